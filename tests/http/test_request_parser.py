"""Requests that are not well-formed HTTP: what is refused, and what the log does not say."""

import re

import pytest

from gateway.http.server.known_heads import KnownHeads
from gateway.http.server.request import ReceivedHead, RequestBody
from gateway.http.server.request_parser import ChunkedBody, HeadParser, Malformed, SizedBody
from gateway.telemetry import Malformation
from tests.support.fake_upstream import FakeUpstream, text
from tests.support.garbage import cycles
from tests.support.logs import Lines
from tests.support.raw_connection import raw_connection, request_head
from tests.support.turns import TINY_CHUNKS
from tests.support.workbench import Client, Stand, eventually

SECRET = b"s3cretTOKEN"
HOST = b"Host: localhost\r\nAuthorization: Bearer " + SECRET + b"\r\n"
MALFORMED = {
    "no http": (b"GARBAGE " + SECRET + b"\r\n\r\n", "method"),
    "a lower-case method": (b"post /mcp?t=" + SECRET + b" HTTP/1.1\r\n" + HOST + b"\r\n", "method"),
    "CONNECT": (b"CONNECT s3cretTOKEN.example:1 HTTP/1.1\r\n" + HOST + b"\r\n", "method"),
    "two spaces before the path": (b"POST  /mcp HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n{}", "request_line"),
    "two spaces after the path": (b"GET /mcp  HTTP/1.1\r\n" + HOST + b"\r\n", "request_line"),
    "HTTP/0.9": (b"GET /mcp?" + SECRET + b"\r\n" + HOST + b"\r\n", "request_line"),
    "HTTP/2.0": (b"GET /mcp?" + SECRET + b" HTTP/2.0\r\n" + HOST + b"\r\n", "request_line"),
    "line feeds alone": (b"GET /mcp HTTP/1.1\n" + HOST + b"\n", "request_line"),
    "no target": (b"GET mcp" + SECRET + b" HTTP/1.1\r\n" + HOST + b"\r\n", "target"),
    "a target that breaks yarl": (b"GET http://[]@/ HTTP/1.1\r\n" + HOST + b"\r\n", "target"),
    "another target that breaks yarl": (b"GET http://[::1]@/" + SECRET + b" HTTP/1.1\r\n" + HOST + b"\r\n", "target"),
    "a port out of range": (b"GET http://s3cretTOKEN:99999/ HTTP/1.1\r\n" + HOST + b"\r\n", "target"),
    "a control character": (b"GET / HTTP/1.1\r\n" + HOST + b"X: " + SECRET + b"\x00\r\n\r\n", "header"),
    "a header without a colon": (b"GET / HTTP/1.1\r\n" + HOST + SECRET + b"\r\n\r\n", "header"),
    **{
        f"the lines {lines!r}": (b"POST / HTTP/1.1\r\n" + HOST + lines + b"\r\n\r\n{}", "header")
        for lines in (
            b"Content-Length: 1\r\nContent-Length: 2",
            b"Content-Length: 2\r\nTransfer-Encoding: chunked",
            b"Content-Length: -2",
            b"Content-Length: 0x2",
            b"X: a\r\n folded: x\r\nContent-Length: 2",
        )
    },
    "a long header": (b"GET / HTTP/1.1\r\n" + HOST + b"X: " + SECRET * 1000 + b"\r\n\r\n", "too_long"),
    "a long path": (b"GET /" + SECRET * 1000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", "too_long"),
}
FINE = b"GET /nothing HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.fixture
async def addresses(stand: Stand) -> dict[str, str]:
    return {"clients": stand.gateway.listen, "admin": stand.gateway.admin}


@pytest.mark.parametrize("listener", ["clients", "admin"])
@pytest.mark.parametrize("before", [b"", FINE], ids=["first", "behind a request"])
@pytest.mark.parametrize(("sent", "reason"), MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_request_gets_a_bare_400_and_one_line_that_quotes_nothing(
    log_lines: Lines, stand: Stand, addresses: dict[str, str], listener: str, before: bytes, sent: bytes, reason: str
) -> None:
    async with raw_connection(stand, addresses[listener]) as raw:
        await raw.send(before + sent)
        *replies, last = (await raw.rest()).split(b"HTTP/1.")[1:]
    assert [reply[:6] for reply in replies] == [b"1 404 "] * bool(before)
    head, _, body = last.partition(b"\r\n\r\n")
    assert head.startswith(b"0 400 Bad Request\r\n")
    assert body == b"400 Bad Request\n"
    (line,) = log_lines("request.malformed")
    assert (line["level"], line["reason"], line["remote"], line["suppressed"]) == ("warning", reason, "127.0.0.1", 0)
    assert "s3cret" not in log_lines.stream.getvalue()
    assert "Traceback" not in log_lines.stream.getvalue()
    assert stand.metric("mcp_gateway_malformed_requests_total", reason=reason) == 1


async def test_the_log_says_what_is_too_long(log_lines: Lines, stand: Stand) -> None:
    async with raw_connection(stand) as raw:
        await raw.send(MALFORMED["a long header"][0])
        assert await raw.rest()
    (line,) = log_lines("request.malformed")
    assert "more than 8190 bytes: shorten cookies or tokens" in line["fix"]


@pytest.mark.parametrize(
    "rest",
    [
        b"XX" + SECRET + b"\r\n",
        b"5;" + SECRET + b"\x00\r\n",
        b"5\r\nabcdeXX" + SECRET + b"\r\n",
        b"0\r\nX-" + SECRET + b": \x00\r\n\r\n",
    ],
)
async def test_a_body_with_malformed_chunks_gets_one_reply(
    log_lines: Lines, stand: Stand, client: Client, rest: bytes
) -> None:
    headers, _ = client.build("tools/call", {"name": "tool"})
    async with raw_connection(stand) as raw:
        await raw.send(request_head(stand, headers | {"Transfer-Encoding": "chunked"}, None) + b"2\r\n{}\r\n")
        await eventually(lambda: stand.gateway.downstream.in_flight == 1, "the request is served")
        await raw.send(rest)
        replies = await raw.rest()
    assert replies.count(b"HTTP/1.") == 1
    assert replies.startswith(b"HTTP/1.1 400 ")
    assert b"The body is damaged" in replies
    assert "s3cret" not in log_lines.stream.getvalue()
    assert "Traceback" not in log_lines.stream.getvalue()
    assert stand.metric("mcp_gateway_malformed_requests_total", reason="body") == 1


class Requests:
    """What a connection parses, and the requests that it found."""

    def __init__(self, heads: KnownHeads | None = None) -> None:
        self.failures: list[Malformation] = []
        self.found: list[tuple[ReceivedHead, RequestBody]] = []
        self.heads = heads or KnownHeads()
        self.parser = HeadParser(self.heads)
        self.arriving: SizedBody | ChunkedBody | None = None

    def feed(self, data: bytes) -> None:
        try:
            while data:
                data = self._parse(data)
        except Malformed as exc:
            self.failures.append(exc.kind)
            if exc.kind is not Malformation.BODY:
                raise

    def _parse(self, data: bytes) -> bytes:
        if self.arriving is not None:
            data = self.arriving.take(data)
            if self.arriving.body.is_complete:
                self.arriving = None
            return data
        if (found := self.parser.find(data)) is None:
            return b""
        head, data = found
        body = RequestBody()
        if head.length:
            self.arriving = SizedBody(body, head.length)
        elif "Transfer-Encoding" in head.headers:
            self.arriving = ChunkedBody(body, is_last=not head.keep_alive)
        else:
            body.finish()
        self.found.append((head, body))
        return data

    def feed_in_pieces(self, data: bytes, size: int) -> None:
        for start in range(0, len(data), size):
            self.feed(data[start : start + size])


def parsed(pieces: list[bytes]) -> list[tuple[str, str, bytes]]:
    """The requests in these pieces, with their bodies."""
    requests = Requests()
    for piece in pieces:
        requests.feed(piece)
    return [(head.method, head.target, body.read_now()) for head, body in requests.found]


PIPELINED = (
    b"\r\nGET /a HTTP/1.1\r\nHost: x\r\n\r\n"
    b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\nGET  /not-a-head HTTP/1.1\r\n\r\nx"
    b"\r\nGET http://x:1/d?e HTTP/1.1\r\nHost: x\r\n\r\n"
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n"
    b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
)


def test_requests_are_found_wherever_their_bytes_are_split() -> None:
    whole = parsed([PIPELINED])
    assert [path for _, path, _ in whole] == ["/a", "/b", "http://x:1/d?e", "*", "/c"]
    for split in range(len(PIPELINED)):
        assert parsed([PIPELINED[:split], PIPELINED[split:]]) == whole, split
    assert parsed([bytes([byte]) for byte in PIPELINED]) == whole


def test_what_has_parsed_a_request_is_freed_with_it() -> None:
    with cycles() as found:
        assert len(parsed([PIPELINED])) == 5
    assert not [kind for kind in found if kind.startswith(("gateway.", "httptools."))]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8191, 20_000])
def test_the_end_of_a_long_head_is_found_wherever_its_bytes_are_split(size: int) -> None:
    headers = b"".join(b"X-%d: %b\r\n" % (number, b"x" * 8000) for number in range(10))
    sent = b"\r\nPOST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n" + headers + b"\r\n{}" + PIPELINED
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
    assert [path for _, path, _ in parsed(pieces)] == ["/a", "/a", "/b", "http://x:1/d?e", "*", "/c"]
    with pytest.raises(Malformed):
        _ = parsed(
            [piece.replace(b"POST /a", b"POST  /a") for piece in pieces] if size > 10 else [b"POST  /a", sent[9:]]
        )


def test_two_spaces_are_found_wherever_the_bytes_are_split() -> None:
    bad = PIPELINED.replace(b"GET http:", b"GET  http:")
    for split in range(len(bad)):
        with pytest.raises(Malformed):
            _ = parsed([bad[:split], bad[split:]])


def test_a_request_in_the_packet_of_a_chunked_bodys_end_is_refused() -> None:
    requests = Requests()
    with pytest.raises(Malformed):
        requests.feed(PIPELINED + b"POST  /mcp HTTP/1.1\r\nHost: x\r\n\r\n")
    assert requests.failures == [Malformation.PIPELINED]
    before = len(requests.found)
    requests.feed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert len(requests.found) == before, "nothing is parsed any more"


CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
BEHIND = b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = BEHIND.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost")


@pytest.mark.parametrize("behind", [BEHIND, UPGRADE])
@pytest.mark.parametrize("split", range(CHUNKED.index(b"\r\n\r\n") + 4, len(CHUNKED)))
def test_a_request_behind_a_chunked_bodys_end_in_a_later_packet_is_refused(split: int, behind: bytes) -> None:
    requests = Requests()
    requests.feed(CHUNKED[:split])
    with pytest.raises(Malformed):
        requests.feed(CHUNKED[split:] + behind)
    assert requests.failures == [Malformation.PIPELINED]
    requests.feed(BEHIND)
    ((head, body),) = requests.found
    assert (head.target, body.is_complete) == ("/a", True)


def test_a_request_in_a_packet_of_its_own_behind_a_chunked_body_is_served() -> None:
    assert [path for _, path, _ in parsed([CHUNKED[:-5], CHUNKED[-5:], BEHIND, BEHIND])] == ["/a", "/b", "/b"]


async def test_the_connection_of_a_request_behind_a_chunked_bodys_end_serves_the_first_and_ends(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(lambda turn: turn.result(text("done")))
    headers, body = client.build("tools/call", {"name": "tool"})
    head = request_head(stand, headers | {"Transfer-Encoding": "chunked"}, None).replace(b"Connection: close\r\n", b"")
    whole = head.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(body)) + body
    async with raw_connection(stand) as raw:
        await raw.send(head + b"%x\r\n%b\r\n" % (len(body), body))
        await eventually(lambda: stand.gateway.downstream.in_flight == 1, "the request is served")
        await raw.send(b"0\r\n\r\n" + whole)
        replies = await raw.rest()
    assert re.findall(rb"HTTP/1\.\d (\d+) ", replies) == [b"200"]
    assert b"\r\nConnection: close\r\n" in replies
    assert len(upstream.of("tools/call")) == 1
    assert stand.metric("mcp_gateway_malformed_requests_total", reason="pipelined") == 1


def test_an_error_of_the_parser_quotes_nothing() -> None:
    for sent, _ in MALFORMED.values():
        requests = Requests()
        with pytest.raises(Malformed) as caught:
            requests.feed(sent)
        assert "s3cret" not in f"{caught.value!r} {caught.value} {caught.value.__cause__} {caught.value.__context__}"


SENT = b"POST /a HTTP/1.1\r\nHost: x\r\nMcp-Name:  y \r\nContent-Length: 2\r\n\r\n{}"


def known(*pieces: bytes, then: bytes) -> bool:
    """Whether the head of a request needs no parsing after these came on other connections."""
    heads = KnownHeads()
    for _ in range(3):
        requests = Requests(heads)
        for piece in pieces:
            requests.feed(piece)
    return is_known(heads, then)


def is_known(heads: KnownHeads, sent: bytes) -> bool:
    """Whether a head needs no parsing."""
    return heads.find(sent.partition(b"\r\n\r\n")[0]) is not None


def test_only_the_bytes_of_a_head_stand_for_it() -> None:
    assert known(SENT, then=SENT)
    assert known(SENT, then=SENT.replace(b"{}", b"[]"))
    head = SENT[:-2]
    for place in range(len(head)):
        assert not known(SENT, then=SENT[:place] + bytes([SENT[place] ^ 1]) + SENT[place + 1 :]), place
    for other in (b"\r\n" + SENT, SENT[: len(head) - 1], b""):
        assert not known(SENT, then=other)
    requests = Requests()
    requests.feed(SENT)
    assert not is_known(requests.heads, SENT), "once is not enough"


def test_a_known_head_is_what_its_bytes_were_parsed_to() -> None:
    requests = Requests()
    for _ in range(3):
        requests.feed(SENT)
    (first, _), (second, _), (head, body) = requests.found
    assert first.values is None
    assert head is second, "it is not parsed again"
    assert (head.method, head.target, head.url.path, head.length) == ("POST", "/a", "/a", 2)
    assert (head.headers, body.read_now(), body.is_complete) == (first.headers, b"{}", True)
    assert head.values is not None
    assert [[*head.values[name]] for name in ("mcp-name", "Mcp-Name", "x")] == [["y"], ["y"], []]


KNOWN = SENT + SENT.replace(b"{}", b"[]") + b"\r\n" + SENT + BEHIND


def test_known_heads_are_found_wherever_their_bytes_are_split() -> None:
    heads = KnownHeads()
    for _ in range(2):
        Requests(heads).feed(SENT)
    for split in range(len(KNOWN)):
        requests = Requests(heads)
        requests.feed(KNOWN[:split])
        requests.feed(KNOWN[split:])
        found = [(head.target, body.read_now(), body.is_complete) for head, body in requests.found]
        assert found == [("/a", b"{}", True), ("/a", b"[]", True), ("/a", b"{}", True), ("/b", b"", True)], split


@pytest.mark.parametrize("begun", [SENT[:-2], SENT[:-1]])
def test_bytes_in_a_body_are_no_known_head(begun: bytes) -> None:
    """What looks like a request there belongs to the request whose body it is."""
    heads = KnownHeads()
    sent = SENT.replace(b": 2", b": %d" % len(SENT))[:-2]
    for _ in range(2):
        Requests(heads).feed(SENT)
        Requests(heads).feed(sent + SENT)
    requests = Requests(heads)
    requests.feed(sent)
    requests.feed(SENT)
    requests.feed(begun)
    requests.feed(SENT[len(begun) :])
    assert [body.read_now() for _, body in requests.found] == [SENT, b"{}"]


def test_a_malformed_request_behind_a_known_head_is_refused() -> None:
    requests = Requests()
    for _ in range(2):
        requests.feed(SENT)
    with pytest.raises(Malformed):
        requests.feed(SENT + SENT.replace(b"POST", b"POST "))
    assert len(requests.found) == 3


def test_a_known_head_keeps_its_connection_open_whatever_came_before() -> None:
    requests = Requests()
    for _ in range(2):
        requests.feed(SENT)
    requests.feed(CHUNKED)
    requests.feed(SENT)
    requests.feed(BEHIND)
    assert [head.target for head, _ in requests.found] == ["/a"] * 4 + ["/b"]


@pytest.mark.parametrize("pieces", [1, 2])
def test_nothing_is_known_behind_a_part_of_a_request_behind_a_chunked_body(pieces: int) -> None:
    heads = KnownHeads()
    for _ in range(3):
        Requests(heads).feed(SENT)
    begun = CHUNKED + b"GET /b HTTP/1.1\r\nHost: x\r\nX: "
    requests = Requests(heads)
    if pieces == 2:
        requests.feed(begun[:-60])
    with pytest.raises(Malformed):
        requests.feed(begun if pieces == 1 else begun[-60:])
    before = len(requests.found)
    requests.feed(SENT)
    assert len(requests.found) == before, "these bytes continue a header of another request"


@pytest.mark.parametrize(
    "sent",
    [
        SENT.replace(b"Host", b"Connection: close\r\nHost"),
        SENT.replace(b"Host", b"Upgrade: h2c\r\nHost"),
        SENT.replace(b"Content-Length: 2\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2\r\n").replace(
            b"}", b"}\r\n0\r\n\r\n"
        ),
        SENT.replace(b"/1.1\r\n", b"/1.0\r\nConnection: keep-alive\r\n"),
        SENT.replace(b" /a", b" http://x/a"),
        SENT.replace(b"POST", b"PUT"),
        SENT.replace(b": 2", b": 0")[:-2],
        SENT.replace(b"y", b"y" * 5000),
    ],
)
def test_heads_that_mean_more_are_always_parsed(sent: bytes) -> None:
    assert not known(sent, then=sent)


def test_a_head_in_pieces_is_not_remembered() -> None:
    """Of a long one, only its first line and its end are kept, and another request may begin and end so."""
    long = SENT.replace(b"Host", b"".join(b"X-%d: %b\r\n" % (number, b"x" * 8000) for number in range(5)) + b"Host")
    first = SENT.partition(b"\r\n")[0]
    assert not known(long[:20], long[20:-1], long[-1:], then=first + b"\r\n..." + b"\r\n\r\n{}")
    assert not known(SENT[:20], SENT[20:], then=SENT)


def test_a_head_must_read_as_it_was_parsed() -> None:
    heads = KnownHeads()
    requests = Requests()
    requests.feed(SENT)
    ((message, _),) = requests.found
    fields = [(b"Host", b"x"), (b"Mcp-Name", b"y"), (b"Content-Length", b"2")]
    head = SENT[:-2]
    bare = head.removesuffix(b"\r\n\r\n")
    for lenient in (head.replace(b"Host: x\r\n", b"Host: x\n"), head.replace(b"/a", b"/b"), head.replace(b"x", b"z")):
        for _ in range(2):
            heads.learn(lenient, message, fields)
        assert heads.find(lenient.removesuffix(b"\r\n\r\n")) is None
    for _ in range(2):
        heads.learn(head, message, fields)
    assert heads.find(bare) is not None


def test_a_forgotten_head_is_known_when_it_has_come_once_more() -> None:
    heads = KnownHeads()
    requests = Requests(heads)
    for _ in range(2):
        requests.feed(SENT)
    heads.forget()
    assert not is_known(heads, SENT)
    requests.feed(SENT)
    assert is_known(heads, SENT)


def test_the_heads_that_came_first_are_forgotten_first() -> None:
    heads = KnownHeads()
    requests = Requests(heads)
    each = [SENT.replace(b"/a", b"/%d" % number) for number in range(520)]
    for sent in (*each, *each):
        requests.feed(sent)
    assert [is_known(heads, sent) for sent in each] == [False] * 8 + [True] * 512


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"GET / HTTP/1.1\r\nX: y\r\n\r\n", Malformation.HEADER),
        (b"GET / HTTP/1.1\r\nHost: x\r\nhost: y\r\n\r\n", Malformation.HEADER),
        (b"GET / HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n", Malformation.HEADER),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Type: a\r\nContent-Type: b\r\n\r\n", Malformation.HEADER),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 128 + b"\r\n", Malformation.HEADER),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 8188 + b"\r\n\r\n", Malformation.TOO_LONG),
        (b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", Malformation.TARGET),
        (b"GET http:/x HTTP/1.1\r\nHost: x\r\n\r\n", Malformation.TARGET),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\n\r\n", Malformation.HEADER),
    ],
)
def test_a_head_that_two_readers_may_understand_differently_is_refused(head: bytes, kind: Malformation) -> None:
    for size in (len(head), 1, 7):
        requests = Requests()
        with pytest.raises(Malformed):
            requests.feed_in_pieces(head, size)
        assert (requests.failures, requests.found) == ([kind], []), size


@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: %b\r\n\r\n" % (b"y" * 8187)]
)
def test_a_head_at_the_bounds_is_accepted(head: bytes) -> None:
    assert [path for _, path, _ in parsed([head])] == ["/"]


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_a_request_to_change_the_protocol_is_one_like_any_other(body: bytes) -> None:
    upgrade = b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n%b"
    requests = parsed([upgrade % (len(body), body) + BEHIND])
    assert [(path, sent) for _, path, sent in requests] == [("/a", body), ("/b", b"")]


@pytest.mark.parametrize("endless", [b"X: y\r\n" * 5000, b"X: " + b"y" * 20_000])
@pytest.mark.parametrize("size", [100, 4096])
def test_trailers_that_do_not_end_break_the_body(endless: bytes, size: int) -> None:
    requests = Requests()
    requests.feed(CHUNKED[:-2])
    requests.feed_in_pieces(endless, size)
    assert requests.failures == [Malformation.BODY]
    assert requests.found[0][1].is_broken


def test_a_head_byte_by_byte_costs_no_more_than_its_size() -> None:
    """Whoever sends 128 headers of 8 KiB one byte at a time has each byte looked at a few times, not a million."""
    requests = Requests()
    head = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: %b\r\n" % (n, b"y" * 8000) for n in range(20)) + b"\r\n"
    for byte in head:
        requests.feed(bytes((byte,)))
    ((found, _),) = requests.found
    assert len(found.headers) == 21


def test_a_body_in_tiny_chunks_takes_little_more_memory_than_its_data() -> None:
    requests = Requests()
    requests.feed(CHUNKED[: CHUNKED.index(b"2\r\n{}")])
    requests.feed_in_pieces(TINY_CHUNKS, 4096)
    ((_, body),) = requests.found
    assert len(body.parts) <= len(TINY_CHUNKS) / 4096 + 1
    assert body.read_now() == b"x" * (len(TINY_CHUNKS) // 6)
