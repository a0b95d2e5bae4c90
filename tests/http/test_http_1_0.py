"""Clients of HTTP/1.0, as nginx is by default before 1.29.7: no chunks, and whatever has no length ends by closing."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.protocol import sse
from tests.parts.launch import free_port
from tests.support.cluster import Balancer, needs
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.raw_connection import RawConnection, raw_connection
from tests.support.stand import Start
from tests.support.workbench import Client, Reply, Stand

TOKEN = {"progressToken": "p"}
NONE: Mapping[str, str] = {}
OLD_CALL = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "tool", "arguments": {}}}


class Http10(RawConnection):
    """A connection that speaks HTTP/1.0."""

    async def request(self, headers: Mapping[str, str], body: bytes, method: str = "POST") -> None:
        fields = {"Host": "127.0.0.1", "Content-Length": str(len(body)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        await self.send(f"{method} /mcp HTTP/1.0\r\n{head}\r\n".encode() + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the reply; nothing comes before them."""
        lines = (await self.until(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        version, status, _ = lines[0].split(" ", 2)
        assert version in ("HTTP/1.0", "HTTP/1.1")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        assert "transfer-encoding" not in headers
        return int(status), headers

    async def events(self) -> list[Any]:
        """The messages of a stream that ends with its connection."""
        status, headers = await self.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        assert headers.get("connection", "close") == "close"
        return messages(await self.rest())


def messages(data: bytes) -> list[Any]:
    return [json.loads(event.data) for event in sse.Parser(1 << 20).feed(data)]


def plain_nginx(directory: Path, behind: str) -> Balancer:
    """An nginx that was told where to pass requests, and nothing of how."""
    nginx = Balancer("nginx", directory, f"127.0.0.1:{free_port()}")
    directory.chmod(0o755)  # its workers are another user
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    nginx.configuration.write_text(
        f"pid {directory}/pid; events {{}} http {{ access_log off;\n"
        + "".join(f"{name}_temp_path {directory / name};\n" for name in names)
        + f"server {{ listen {nginx.address};\n"
        f"location / {{ proxy_pass http://{behind}; proxy_http_version 1.0; }} }} }}\n"
    )
    return nginx


connected = partial(raw_connection, kind=Http10)


async def progressing(turn: Turn) -> None:
    await turn.progress(1)
    await turn.result(text("done"))


@pytest.mark.parametrize("headers", [NONE, {"Connection": "close"}, {"Connection": "keep-alive"}], ids=str)
async def test_a_call_with_progress_is_a_stream_that_ends_with_its_connection(
    upstream: FakeUpstream, stand: Stand, client: Client, headers: dict[str, str]
) -> None:
    upstream.tool(progressing)
    sent, body = client.build("tools/call", {"name": "tool", "arguments": {}}, TOKEN, headers)
    async with connected(stand) as http:
        await http.request(sent, body)
        told, last = await http.events()
    assert told["method"] == "notifications/progress"
    assert last["result"]["content"][0]["text"] == "done"
    assert "notifications/cancelled" not in upstream.words


async def test_silence_is_filled_with_comments_and_the_call_goes_on(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"keepalive_seconds": 0.02})
    go = upstream.waiting_tool("at last")
    sent, body = stand.client().build("tools/call", {"name": "tool", "arguments": {}})
    async with connected(stand) as http:
        await http.request(sent, body)
        _ = await http.head()
        assert await http.exactly(3) == sse.KEEP_ALIVE
        go.set()
        (last,) = messages(await http.rest())
    assert last["result"]["content"][0]["text"] == "at last"


async def test_a_connection_ends_with_its_reply_even_if_the_client_asks_to_keep_it(
    stand: Stand, client: Client
) -> None:
    async with connected(stand) as http:
        sent, body = client.build("tools/call", {"name": "tool", "arguments": {}})
        await http.request(sent | {"Connection": "keep-alive"}, body)
        status, headers = await http.head()
        assert (status, headers["connection"]) == (200, "close")
        assert json.loads(await http.rest())["result"]["content"][0]["text"] == "done"


async def test_a_subscription_is_served(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    upstream.capabilities = {"tools": {"listChanged": True}}
    sent, body = client.build("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
    async with connected(stand) as http:
        await http.request(sent, body)
        _ = await http.head()
        assert b"acknowledged" in await http.until(b"\n\n")
        upstream.side("s1").put_nowait(b'data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n')
        assert b"list_changed" in await http.until(b"\n\n")


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_an_event_stream_that_is_passed_through_ends_with_its_connection(
    upstream: FakeUpstream, stand: Stand, connection: str
) -> None:
    async def tool(turn: Turn) -> None:
        await turn.notify("notifications/message", {"level": "info", "data": "x"})
        await turn.result(text("old"))

    upstream.known.add("s1")
    upstream.tool(tool)
    headers = {"Content-Type": "application/json", "Mcp-Session-Id": "s1", "Connection": connection}
    async with connected(stand) as http:
        await http.request(headers, json.dumps(OLD_CALL).encode())
        told, last = await http.events()
    assert told["method"] == "notifications/message"
    assert last["result"]["content"][0]["text"] == "old"


async def test_a_side_stream_that_is_passed_through_is_written_as_it_comes(
    upstream: FakeUpstream, stand: Stand
) -> None:
    upstream.known.add("s1")
    headers = {"Accept": "text/event-stream", "Mcp-Session-Id": "s1", "MCP-Protocol-Version": "2025-11-25"}
    async with connected(stand) as http:
        await http.request(headers, b"", "GET")
        _ = await http.head()
        upstream.side("s1").put_nowait(b"data: {}\n\n")
        assert await http.until(b"\n\n") == b"data: {}\n\n"
        upstream.side("s1").put_nowait(None)
        assert await http.rest() == b""


async def test_an_http_1_0_client_is_not_told_to_continue(stand: Stand, client: Client) -> None:
    """RFC 9110 section 10.1.1: an expectation in an HTTP/1.0 request is ignored."""
    sent, body = client.build("tools/call", {"name": "tool", "arguments": {}})
    fields = {**sent, "Expect": "100-continue", "Host": "127.0.0.1", "Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    async with connected(stand) as http:
        await http.send(f"POST /mcp HTTP/1.0\r\n{head}\r\n".encode())
        _ = await client.call()  # by then it has waited for the body that does not come
        await http.send(body)
        assert (await http.head())[0] == 200


@needs("nginx")
async def test_a_call_with_progress_goes_through_nginx_as_it_is_set_up_by_default(
    upstream: FakeUpstream, stand: Stand, tmp_path: Path
) -> None:
    """HTTP/1.0 and `Connection: close` is what nginx before 1.29.7 speaks to upstreams by default."""
    nginx = plain_nginx(tmp_path, stand.gateway.listen)
    upstream.tool(progressing)
    await nginx.start()
    try:
        client = Client(stand.http, f"http://{nginx.address}/mcp")
        reply: Reply = await client.call(meta=TOKEN)
        assert reply.notifications[0]["method"] == "notifications/progress"
        assert reply.text == "done"
        async with client.open("subscriptions/listen", {"notifications": {}}) as response:
            assert b"acknowledged" in await response.content.readuntil(b"\n\n")
    finally:
        await nginx.kill()
