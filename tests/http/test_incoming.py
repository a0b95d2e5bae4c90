"""One request as its client sent it: how often its body is parsed, and what is read from its headers."""

from collections.abc import Mapping
from unittest.mock import Mock

import pytest
from msgspec import Raw
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http import incoming
from gateway.http.incoming import Caller, Incoming, client_address
from gateway.http.server.request import NO_HEADERS
from gateway.protocol import jsonrpc
from gateway.protocol import request as modern
from gateway.protocol.header_mismatch import KnownValues
from gateway.seal.keyring import PREFIX
from gateway.telemetry import ClientRequest, Operation, Span
from tests.support.fake_upstream import FakeUpstream
from tests.support.garbage import cycles
from tests.support.workbench import Client, Stand


async def test_a_body_is_opened_once_however_many_ask(
    upstream: FakeUpstream, stand: Stand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bytes] = []

    def counting(body: bytes) -> modern.ParsedBody:
        opened.append(body)
        return modern.read(body)

    monkeypatch.setattr(incoming, "read", counting)
    asked = f"{PREFIX}.x"  # what looks like a state of ours is looked at even where requests are passed through
    bodies = [
        client.build("tools/call", {"name": "tool", "arguments": {}, "requestState": asked}),
        ({"Content-Type": "application/json"}, client.build("tools/list")[1]),
        ({"Content-Type": "application/json"}, b'{"jsonrpc": "2.0", "id": "\\n", "method": "ping"}'),
        ({"Content-Type": "application/json"}, b'{"jsonrpc": "2.0", "id": "\\n", "id": 2}'),
    ]
    for headers, body in bodies:
        async with stand.http.post(stand.url, headers=headers, data=body) as response:
            _ = await response.read()
    assert opened == [body for _, body in bodies]


def test_what_a_body_asks_for_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Incoming("/mcp", NO_HEADERS, None, b'[{"jsonrpc": "2.0", "id": 1, "method": "ping"}]')
    batch.note()
    monkeypatch.setattr(jsonrpc, "message", None)
    batch.note()
    assert (batch.rpc_method, batch.target) == ("", None)


async def test_a_body_that_can_only_be_legacy_is_not_opened(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "read", None)
    async with stand.http.post(stand.url, data=b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}') as response:
        assert response.status == 404, "the upstream's own answer to a ping without a session"


@pytest.mark.parametrize("body", [b"{", b"null", b"[" * 50_000, b'{"jsonrpc": "2.0", "id": 1, "id": 2}'], ids=range(4))
async def test_an_unreadable_body_is_freed_with_its_request(stand: Stand, body: bytes) -> None:
    with cycles() as found:
        async with stand.http.post(stand.url, headers={"Content-Type": "application/json"}, data=body) as response:
            assert response.status >= 400
            _ = await response.read()
        # Until the next request, aiohttp keeps what belonged to this one.
        async with stand.http.get(stand.url) as response:
            _ = await response.read()
    assert "gateway.http.incoming.Incoming" not in found


def incoming_of(body: bytes = b"", *headers: tuple[str, str]) -> Incoming:
    return Incoming("/mcp", CIMultiDictProxy(CIMultiDict(headers)), "192.0.2.1", body, request_id="r1")


@pytest.mark.parametrize("is_known", [False, True])
def test_a_request_is_checked_once_whether_its_headers_are_known_or_not(*, is_known: bool) -> None:
    headers, body = Client(Mock(), "http://it.test").build("tools/call", {"name": "a", "arguments": {}})
    it = incoming_of(body, *headers.items())
    if is_known:
        it.known = KnownValues(it.headers)
    checked = it.request()
    assert (checked.method, checked.target) == ("tools/call", "a")
    assert it.request() is checked


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"jsonrpc": "2.0", "id": "\\u0041", "method": "a"}', b'"\\u0041"'),
        (b'{"jsonrpc": "2.0", "method": "a"}', None),
        (b'{"jsonrpc": "2.0", "id": 7, "method": 8}', b"7"),
        (b"{", None),
        (b"", None),
    ],
)
def test_the_id_of_a_request_is_known_as_far_as_its_body_can_be_read(body: bytes, expected: bytes | None) -> None:
    assert incoming_of(body).rpc_id == expected


def test_the_digest_of_credentials_leaves_out_a_distrusted_header() -> None:
    alice, bob = (incoming_of(b"", ("X-User", name), ("X-Key", "k")) for name in ("alice", "bob"))
    names = ("X-User", "X-Key")
    trusting, distrusting = Caller(b"p", None), Caller(b"p", "X-User")
    assert alice.bearer(trusting).digest(names) != bob.bearer(trusting).digest(names)
    assert alice.bearer(distrusting).digest(names) == bob.bearer(distrusting).digest(names)
    assert alice.bearer(distrusting).digest(names) == incoming_of(b"", ("X-Key", "k")).bearer(trusting).digest(names)
    assert incoming_of(b"", ("X-Key", "l")).bearer(trusting).digest(names) != alice.bearer(distrusting).digest(names)


class FakeTraces:
    """A FAKE tracer, whose propagators read two names."""

    def __init__(self) -> None:
        self.begun: list[tuple[Operation, ClientRequest]] = []

    def carried(self, values: Mapping[str, str]) -> dict[str, str]:
        return {name: values[name] for name in ("traceparent", "tracestate") if name in values}

    def round(self, about: Operation, request: ClientRequest) -> Span:
        self.begun.append((about, request))
        return Mock()


@pytest.mark.parametrize(("id_", "shown"), [(b'"\\u00e9"', "é"), (b"12", "12"), (b'"\\ud800"', "\ufffd")])
def test_a_span_begins_with_the_context_that_a_propagator_can_parse(id_: bytes, shown: str) -> None:
    traces, about = FakeTraces(), Operation("tools/call", "a", "2026-07-28", "/mcp")
    it = incoming_of(b"", ("TraceParent", "00-1"), ("TraceParent", "00-2"), ("Tracestate", "\x01"), ("X", "y"))
    meta = {"traceparent": Raw(b'"00-3"'), "tracestate": Raw(b'"%b"' % (b"x" * 8193)), "progressToken": Raw(b"1")}
    _ = it.begin_span(traces, about, id_, meta)  # type: ignore[arg-type]
    expected = ClientRequest(shown, "r1", "192.0.2.1", {"traceparent": "00-3"}, {"traceparent": "00-1, 00-2"})
    assert traces.begun == [(about, expected)]


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.8", "198.51.100.1", "192.0.2.8"),  # no proxy that is trusted
        (None, "198.51.100.1", None),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("::ffff:10.0.0.1", "2001:DB9:0::1", "2001:db9::1"),
        ("10.0.0.1", "203.0.113.9 , 198.51.100.1, 10.0.0.2", "198.51.100.1"),
        (
            "10.0.0.1",
            "203.0.113.9,198.51.100.1",
            "198.51.100.1",
        ),  # whatever stands before it, the client may have sent
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "198.51.100.1, unknown", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1:8080", "10.0.0.1"),
        ("10.0.0.1", "evil<b>", "10.0.0.1"),
        ("10.0.0.1", "2001:db9::1%<b>\x1b[31mevil", "2001:db9::1"),
        ("10.0.0.1", "198.51.100.1" + ", 10.0.0.2" * 9, "198.51.100.1"),
        ("10.0.0.1", "198.51.100.1, 10.0.0.3" + ", 10.0.0.2" * 10, "10.0.0.2"),  # so many are not looked at
    ],
)
def test_the_address_of_a_client_is_what_trusted_proxies_tell_of_it(
    peer: str | None, forwarded: str, address: str | None
) -> None:
    headers = CIMultiDictProxy(CIMultiDict({"x-forwarded-for": forwarded}))
    assert client_address(peer, headers, ("10.0.0.0/8", "2001:db8::/32")) == address


def test_lines_of_the_header_are_one_list_and_no_header_is_an_empty_one() -> None:
    lines = CIMultiDict([("X-Forwarded-For", "203.0.113.9"), ("X-Forwarded-For", "198.51.100.1")])
    assert client_address("10.0.0.1", CIMultiDictProxy(lines), ("10.0.0.0/8",)) == "198.51.100.1"
    assert client_address("10.0.0.1", NO_HEADERS, ("10.0.0.0/8",)) == "10.0.0.1"
