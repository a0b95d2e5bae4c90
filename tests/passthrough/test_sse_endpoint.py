"""A legacy client of an HTTP+SSE server is told an address of the gateway, which no client can forge."""

import json
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec.structs import replace
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gateway.http.incoming import Incoming
from gateway.http.upstream_url import Endpoint
from gateway.passthrough.passage import HttpPassage
from gateway.passthrough.sse_endpoint import PURPOSE, FirstEventRewriter, may_begin, target
from gateway.protocol import mcp
from gateway.protocol.errors import InvalidRequest
from gateway.seal.keyring import Keyring
from tests.support.fake_sse import FakeSse
from tests.support.stand import Start
from tests.support.turns import work_gives_way

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
UPSTREAM = Endpoint("http://10.0.0.1:9000/sse", "The server")
RING = Keyring((OLD,), PURPOSE)
EVENT = b"event: endpoint\r\ndata: /messages/?session_id=1f\r\n\r\n"


def asked(url: str, method: str = "GET", **headers: str) -> Incoming:
    target = URL(url)
    return Incoming(target.path, CIMultiDictProxy(CIMultiDict(headers)), None, method=method, url=target)


def first_event(ring: Keyring = RING) -> FirstEventRewriter:
    return FirstEventRewriter(ring, asked("/mcp"), UPSTREAM)


def address(event: bytes) -> str:
    """Where an endpoint event leads."""
    head, _, data = event.partition(b"data: ")
    assert head == b"event: endpoint\n"
    assert data.endswith(b"\n\n")
    return data.decode().strip()


def test_the_servers_address_is_sealed_into_the_routes_own() -> None:
    told = address(first_event().feed(EVENT))
    assert told.startswith("/mcp?")
    assert "messages" not in told
    assert str(target(RING, asked(told, "POST"), UPSTREAM)) == "http://10.0.0.1:9000/messages/?session_id=1f"


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("end", [b"\r\n", b"\n", b"\r"])
def test_a_stream_in_pieces_is_the_same_stream(size: int, end: bytes) -> None:
    event, after = EVENT.replace(b"\r\n", end), b"data: {}" + 2 * end
    stream = b": welcome" + 2 * end + event + after
    begun = first_event()
    passed = b"".join(begun.feed(stream[place : place + size]) for place in range(0, len(stream), size))
    before, _, rest = passed.partition(b"event: ")
    assert before == b": welcome" + 2 * end
    assert rest.endswith(b"\n\n" + after.lstrip(b"\n")), "and what comes after it is as it was"
    assert begun.rest() == b""


@pytest.mark.parametrize("ends", [b"\n\r\n", b"\r\n\n", b"\r\r\n"])
def test_an_event_may_end_in_lines_that_end_differently(ends: bytes) -> None:
    told = first_event().feed(EVENT.replace(b"\r\n\r\n", ends))
    assert target(RING, asked(address(told.rstrip() + b"\n\n"), "POST"), UPSTREAM) is not None


@pytest.mark.parametrize(
    "stream",
    [
        b"data: {}\n\n" + EVENT,
        b"event: endpoint\ndata: http://evil.example/messages\n\n",
        b"event: message\ndata: /messages\n\n",
    ],
)
def test_an_event_without_an_address_of_the_server_passes_unchanged(stream: bytes) -> None:
    assert first_event().feed(stream) == stream


def test_a_first_event_without_an_end_is_not_held_back() -> None:
    begun = first_event()
    assert begun.feed(b"x" * 20_000) == b"x" * 20_000
    assert begun.feed(b"\n\n" + EVENT) == b"\n\n" + EVENT


def test_a_stream_that_ends_early_loses_nothing() -> None:
    begun = first_event()
    assert begun.feed(b"event: endp") + begun.rest() == b"event: endp"


def test_a_stream_of_streamable_http_is_not_looked_at() -> None:
    assert may_begin(asked("/mcp"))
    assert not may_begin(asked("/mcp", **{mcp.SESSION_ID: "x"}))
    assert not may_begin(asked("/mcp", **{mcp.LAST_EVENT_ID: "x"}))
    assert not may_begin(asked("/mcp", "POST"))


def test_an_address_is_good_for_its_route_only_and_cannot_be_made_up() -> None:
    told = address(first_event().feed(EVENT))
    stranger = address(first_event(Keyring((NEW,), PURPOSE)).feed(EVENT))
    state = Keyring((OLD,), "state").seal(b"/mcp\nhttp://10.0.0.1:9000/admin")
    for url in (
        told.replace("/mcp?", "/other?"),
        told[:-1],
        stranger,
        told.partition("=")[0] + "=/admin",
        f"{told.partition('=')[0]}={state}",
    ):
        with pytest.raises(InvalidRequest) as caught:
            _ = target(RING, asked(url, "POST"), UPSTREAM)
        assert caught.value.status == 404
    elsewhere = Endpoint("http://10.0.0.2:9000/sse", "The server")
    with pytest.raises(InvalidRequest):
        _ = target(RING, asked(told, "POST"), elsewhere)
    assert target(RING, asked("/mcp?other=1", "POST"), UPSTREAM) is None


def test_an_address_outlives_a_rotation_of_keys() -> None:
    told = address(first_event().feed(EVENT))
    assert target(Keyring((NEW, OLD), PURPOSE), asked(told, "POST"), UPSTREAM) is not None


# -- a whole one ------------------------------------------------------------------------------------------------------


async def test_an_address_stays_good_under_a_key_that_opens_former_sessions(old: FakeSse, begin: Start) -> None:
    stand = await begin(url=old.url, route={"upstream": {"url": old.url, "transport": "sse"}})
    config, ping = stand.gateway.config, {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    async with stand.http.get(stand.url, headers={"Accept": "text/event-stream"}) as stream:
        told = URL(stand.url).join(URL(address(await stream.content.readuntil(b"\n\n")), encoded=True))
        for former, status in ((config.state.keys, 202), ((), 404)):
            state = replace(config.state, keys=(NEW.hex(),), session_keys=former)
            stand.gateway.apply(replace(config, state=state))
            async with stand.http.post(told, json=ping) as reply:
                assert reply.status == status


@pytest.mark.parametrize("transport", ["auto", "sse"])
async def test_messages_go_where_the_server_wants_them(old: FakeSse, begin: Start, transport: str) -> None:
    stand = await begin(url=old.url, route={"upstream": {"url": old.url, "transport": transport}})
    message = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2024-11-05"}}
    async with stand.http.get(stand.url, headers={"Accept": "text/event-stream"}) as stream:
        told = URL(stand.url).join(URL(address(await stream.content.readuntil(b"\n\n")), encoded=True))
        async with stand.http.post(told, json=message) as accepted:
            assert accepted.status == 202
        answer = json.loads((await stream.content.readuntil(b"\n\n")).partition(b"data: ")[2])
        assert answer["id"] == 0
        assert "result" in answer
    forged = told.update_query({"mrtr-endpoint": "/admin"})
    before = len(old.posts)
    async with stand.http.post(forged, json={**message, "id": 7}) as refused:
        assert refused.status == 404
        assert (await refused.json())["id"] == 7
    assert len(old.posts) == before


@pytest.mark.usefixtures("busy_clock")
async def test_much_before_the_first_event_lets_others_run_and_passes_unchanged() -> None:
    comments, sent = b": x\n\n" * 20_000, bytearray()

    async def send(data: bytes) -> None:
        sent.extend(data)

    passage: Any = Mock(reply=Mock(end=AsyncMock()))
    stream = Mock(write=send)
    said: Any = Source(comments + EVENT + b"data: behind\n\n", b"data: more\n\n")
    assert await work_gives_way(HttpPassage._stream(passage, said, stream, None, first_event()))
    before, event, behind = sent.partition(b"event: endpoint\n")
    assert before == comments
    assert behind.endswith(b"\n\ndata: behind\n\ndata: more\n\n")
    assert event


class Source:
    """A FAKE reply of which this is here."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = iter(parts)
        self.pending = Mock()

    async def __anext__(self) -> bytes:
        try:
            return next(self._parts)
        except StopIteration:
            raise StopAsyncIteration from None
