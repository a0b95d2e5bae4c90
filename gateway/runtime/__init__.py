"""asyncio and aiohttp live here and nowhere else."""
