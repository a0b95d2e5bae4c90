"""Calls whose requests come with the same bytes again and again on one connection, so that their heads are known."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.protocol import mcp
from tests.support.fake_upstream import Turn, text
from tests.support.raw_connection import RawConnection, raw_connection
from tests.support.workbench import ACCEPT, Stand, eventually

LABELS = {"method": "tools/call", "protocol_version": mcp.MODERN, "outcome": "complete", "error_type": ""}
arguments: dict[str, Any] = {}
"""More params of a call: with arguments, a form of its body is learnt, and so its way."""


def request(stand: Stand, *lines: str, name: str = "tool", body: bytes | None = None) -> bytes:
    """A call as a client sends it again and again."""
    headers, built = stand.client().build("tools/call", {"name": name, **arguments})
    body = built if body is None else body
    head = [f"{name}: {value}" for name, value in headers.items()]
    head += [f"Host: {stand.gateway.listen}", *lines, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(["POST /mcp HTTP/1.1", *head]).encode() + body


async def reply(raw: RawConnection) -> tuple[bytes, bytes]:
    """The head and the body of one reply."""
    head = await raw.until(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head, await raw.exactly(length)


async def status(raw: RawConnection) -> int:
    """The status of one reply."""
    return int((await reply(raw))[0].split()[1])


async def said(raw: RawConnection) -> str:
    """What the tool says in one reply."""
    found: str = json.loads((await reply(raw))[1])["result"]["content"][0]["text"]
    return found


async def known(stand: Stand, raw: RawConnection, sent: bytes) -> None:
    """Send a request until its head is known, as on a connection that is kept open."""
    for _ in range(3):
        await raw.send(sent)
        assert await status(raw) == 200


@asynccontextmanager
async def calling(stand: Stand, *lines: str) -> AsyncIterator[tuple[RawConnection, bytes]]:
    """A connection, and a request whose head is known there."""
    sent = request(stand, *lines)
    async with raw_connection(stand) as raw:
        await known(stand, raw, sent)
        yield raw, sent


class Gate:
    """A tool that answers when the test says so."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.ended: list[bool] = []

    async def __call__(self, turn: Turn) -> None:
        try:
            await self.opened.wait()
            await turn.result(text(turn.body["params"]["name"]))
            self.ended.append(True)
        except asyncio.CancelledError:
            self.ended.append(False)
            raise

    async def catch(self, stand: Stand, raw: RawConnection, sent: bytes) -> None:
        """Have a call wait."""
        self.opened.clear()
        await raw.send(sent)
        await eventually(lambda: stand.gateway.downstream.in_flight == 1, "it is served")


def retry_of(stand: Stand, body: bytes, *lines: str) -> bytes:
    """The retry with an answer to what a reply asks."""
    asked = json.loads(body)["result"]
    answers = dict.fromkeys(asked["inputRequests"], ACCEPT)
    params = {"name": "tool", **arguments, "requestState": asked["requestState"], "inputResponses": answers}
    return request(stand, *lines, body=stand.client().build("tools/call", params)[1])
