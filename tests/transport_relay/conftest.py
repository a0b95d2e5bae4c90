"""Fixtures: fake servers of each transport."""

from tests.legacy_front.conftest import sse_server

__all__ = ["sse_server"]
