"""Calls that wait for a later request of their client, held or cold."""
