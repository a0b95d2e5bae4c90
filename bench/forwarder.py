"""The anchor: a minimal reverse proxy with the gateway's own libraries, which understands nothing it copies.

What the gateway costs more than this is the price of the bridge; what this costs is the price of aiohttp.
"""

import argparse
import asyncio

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from multidict import CIMultiDict, CIMultiDictProxy

# Of one connection only (RFC 9110, 7.6.1).
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP_BY_HOP)


class Forwarder:
    """One upstream, one pooled client session."""

    def __init__(self, upstream: str, session: ClientSession) -> None:
        self._upstream = upstream
        self._session = session

    async def handle(self, request: web.Request) -> web.StreamResponse:
        async with self._session.request(
            request.method,
            self._upstream + request.path_qs,
            headers=end_to_end(request.headers),
            data=request.content if request.body_exists else None,
            allow_redirects=False,
        ) as upstream:
            response = web.StreamResponse(status=upstream.status, headers=end_to_end(upstream.headers))
            await response.prepare(request)
            async for data in upstream.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response


async def serve(port: int, upstream: str) -> None:
    async with ClientSession(
        connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None), auto_decompress=False
    ) as session:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", Forwarder(upstream, session).handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a minimal aiohttp byte forwarder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True, help="scheme, host and port")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.upstream))
