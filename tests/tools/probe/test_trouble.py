"""What a probe says of servers that cannot be used, or only so-so: what, why, and the fix."""

import asyncio
import email.utils
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from yarl import URL

from gateway.config import InForce, parse
from gateway.http.upstream_client import Bounds, Client
from gateway.http_client.client import HttpClient
from gateway.runtime.tasks import Tasks
from gateway.tools.probe import runner
from gateway.tools.probe.steps import requests
from tests.parts.launch import free_port
from tests.support.authority import Authority
from tests.support.black_hole import black_hole
from tests.support.fake_http import fake_wire
from tests.support.fake_sse import FakeSse
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.probing import answers, check, everything_in, look, states, subject
from tests.support.workbench import eventually

Script = Callable[[Turn], Awaitable[None]]
SECRET = "Bearer correct-horse-battery"
SHORT = 0.3
"""For what never comes."""
LATER = 0.8
"""For what comes, or never does: long for who answers at once."""


def failed(found: Any, name: str) -> str:
    """The one check that failed is the last one, and is complete; its words."""
    last = found.checks[-1]
    assert (last.name, last.state) == (name, "failed")
    assert found.state == "failed"
    assert last.found
    assert last.why.endswith(".")
    assert last.fix.endswith(".")
    assert found.features == ()
    assert found.configuration is None
    return f"{last.found} | {last.why} | {last.fix}"


# -- the way there ---------------------------------------------------------------------------------------------------


async def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    said = failed(await look("http://nobody.example/mcp"), "address")
    assert "nobody.example has no address (Name or service not known)" in said


async def test_a_port_at_which_nobody_listens() -> None:
    port = free_port()
    said = failed(await look(f"http://127.0.0.1:{port}/mcp"), "connection")
    assert f"no connection to port {port}: Connection refused" in said


async def test_a_host_that_does_not_even_refuse() -> None:
    port = free_port()
    with black_hole(f"127.0.0.1:{port}"):
        said = failed(await look(f"http://127.0.0.1:{port}/mcp", seconds=SHORT), "connection")
    assert "no connection to port" in said
    assert "took too long" in said


@pytest.mark.parametrize(
    ("said", "options", "name", "words"),
    [
        (
            b"",
            {"stays": True},
            "session",
            "not answered within 0.3 s | The server accepts connections but does not answer",
        ),
        (b"", {}, "http", "closed without an answer"),
        (b"\x15\x03\x01\x00\x02\x02\x46", {}, "http", "not valid HTTP"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", {}, "http", "not valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + b"data: x\n\n" * 9, {"times": None}, "", ""),
        (b"x" * 65_536, {"times": None}, "http", ""),
        (b"HTTP/1.1 502 Bad\r\nServer: \x1b[31mnginx\r\n\r\n", {}, "http", "Server: ?[31mnginx"),
    ],
    ids=["silent", "closes", "tls alert", "ssh", "endless events", "endless garbage", "escape in a header"],
)
async def test_a_port_that_is_of_another_trade(said: bytes, options: Any, name: str, words: str) -> None:
    async with fake_wire(said, **options) as url:
        found = await look(url, seconds=SHORT)
    assert words in failed(found, name or found.checks[-1].name)
    assert "\x1b" not in everything_in(found)
    assert "(probe)" not in states(found), "the mistake is not the probe's"


async def test_a_reply_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_BODY_BYTES", 1000)
    it = subject("http://127.0.0.1:9/mcp")
    client = Client(InForce(Bounds(it.config.limits, it.config.timeouts)), HttpClient(Tasks(Mock())))
    async with fake_wire(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 65_536, times=200) as url:
        reply = await requests.ask(client, "GET", URL(url), {}, seconds=30.0)
    client.close()
    assert 1000 < len(reply.body) < 1_000_000


# -- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def tls(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[FakeUpstream]]]:
    """Starts servers with a certificate of the authority in ca.pem."""
    ca = Authority(tmp_path)
    fakes: list[FakeUpstream] = []

    async def start(**certificate: Any) -> FakeUpstream:
        fakes.append(FakeUpstream())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(ca.sign("server", **certificate))
        await fakes[-1].start(tls=context)
        return fakes[-1]

    yield start
    for fake in fakes:
        assert not fake.known
        await fake.close()


@pytest.mark.parametrize(
    ("certificate", "trust", "words"),
    [
        ({"days": -1}, "ca.pem", "its certificate has expired (TLSv1.3, certificate of server by test ca, until "),
        ({}, None, "unknown authority (TLSv1.3, certificate of server by test ca"),
        ({"host": "127.0.0.9"}, "ca.pem", "is for another address"),
    ],
    ids=["expired", "unknown authority", "another address"],
)
async def test_a_certificate_that_is_not_to_be_trusted(
    certificate: Any, trust: str | None, words: str, tls: Any, tmp_path: Path
) -> None:
    fake = await tls(**certificate)
    said = failed(
        await look(fake.url, {"Authorization": SECRET}, **({"ca_file": tmp_path / trust} if trust else {})), "tls"
    )
    assert words in said
    assert "--ca-file" in said
    assert not fake.seen, "nothing was sent"
    assert not fake.probes


async def test_a_certificate_that_is_trusted_and_one_that_ends_soon(tls: Any, tmp_path: Path) -> None:
    trust = {"ca_file": tmp_path / "ca.pem"}
    found = await look((await tls(days=20)).url, **trust)
    assert check(found, "tls").state == "ok"
    assert "TLSv1.3, certificate of server by test ca, until " in check(found, "tls").found
    assert f'tls: {{ca_file: "{tmp_path}/ca.pem"}}' in (found.configuration or "")
    assert parse(found.configuration or "", "here", {}).routes[0].upstream.tls.ca_file == str(tmp_path / "ca.pem")
    soon = check(await look((await tls(days=3)).url, **trust), "tls")
    assert (soon.state, soon.why) == ("warning", "The certificate expires in 2 days; every call fails from then on.")


async def test_a_certificate_that_nobody_verifies_is_warned_of(tls: Any) -> None:
    found = await look((await tls()).url, verify=False)
    assert check(found, "tls").state == "warning"
    assert "not verified" in check(found, "tls").found
    assert not parse(found.configuration or "", "here", {}).routes[0].upstream.tls.verify


async def test_https_for_a_port_of_plain_http(upstream: FakeUpstream) -> None:
    assert "does not speak TLS there" in failed(await look(upstream.url.replace("http:", "https:")), "tls")


# -- HTTP ------------------------------------------------------------------------------------------------------------


def reply(status: int, body: Any = b"", **headers: str) -> Script:
    return lambda turn: turn.reply(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


def page(status: int, **headers: str) -> Script:
    return reply(status, b"<html>\x1b[31mBad</html>", Content_Type="text/html", **headers)


def result(value: Any) -> Script:
    return lambda turn: turn.result(value)


NO: dict[str, Any] = {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "no"}}
CASES: list[tuple[str, Script, tuple[str, str], list[str]]] = [
    # (the request, what the server does with it, the check with its state, its words)
    (
        "server/discover",
        page(502, Server="nginx/1.24.0"),
        ("http", "failed"),
        ["HTTP 502, text/html, Server: nginx/1.24.0", "A proxy answers instead of the server"],
    ),
    ("server/discover", page(200), ("http", "failed"), ["not the path of the website"]),
    (
        "server/discover",
        page(403, WWW_Authenticate="Bearer"),
        ("authorization", "failed"),
        ["The server refuses requests without a credential"],
    ),
    (
        "server/discover",
        reply(401, WWW_Authenticate='Bearer resource_metadata="http://127.0.0.2:9/here"'),
        ("authorization", "failed"),
        ['HTTP 401, WWW-Authenticate: Bearer resource_metadata="', "Its metadata is at http://127.0.0.2:9/here."],
    ),
    (
        "server/discover",
        reply(421, b"Invalid Host header", Content_Type="text/plain"),
        ("host", "failed"),
        ["HTTP 421: Invalid Host header", "allowed_hosts"],
    ),
    ("server/discover", reply(400, NO, Via="1.1 envoy"), ("proxy", "ok"), ["1.1 envoy is in front of the server"]),
    ("server/discover", reply(400, NO, Date="soon"), ("era", "ok"), ["legacy"]),
    ("DELETE", reply(405), ("DELETE", "ok"), ["does not end a session"]),
    ("tools/list", result({"tools": 7}), ("tools", "warning"), ["was refused, or its result is malformed"]),
    ("tools/list", result({"nothing": True}), ("tools", "warning"), ["was refused, or its result is malformed"]),
    ("tools/list", lambda turn: turn.for_ever(), ("tools", "warning"), ["was refused"]),
    ("tools/call", lambda turn: turn.for_ever(), ("replies", "warning"), ["did not answer a call"]),
]


@pytest.mark.parametrize(("word", "does", "told", "words"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
async def test_what_a_server_does_is_told_with_its_fix(
    word: str, does: Script, told: tuple[str, str], words: list[str], upstream: FakeUpstream
) -> None:
    upstream.on(word, does)
    found = await look(upstream.url, seconds=LATER)
    name, state = told
    assert check(found, name).state == state
    shown = failed(found, name) if state == "failed" else repr(check(found, name))
    assert [each for each in words if each not in shown] == []
    assert found.state == state, "what is only told is no limit"
    assert state != "failed" or set(upstream.words) <= {"GET"}, "only OAuth metadata is still asked for"
    upstream.forget()


@pytest.mark.parametrize("status", [403, 404, 405, 501])
async def test_a_website_that_refuses_a_post_is_called_a_website(status: int, upstream: FakeUpstream) -> None:
    upstream.on("server/discover", page(status))
    upstream.on("initialize", page(status))
    upstream.on("GET", page(200))
    said = failed(await look(upstream.url), "http")
    assert "web page" in said
    assert "This URL belongs to a website" in said
    assert "Use the path of the MCP endpoint" in said
    assert "credential" not in said.partition("A sign-in page")[0]


async def test_a_server_that_serves_pages_too_is_no_website(upstream: FakeUpstream) -> None:
    """Some frameworks answer an unknown method with a page."""
    upstream.on("server/discover", page(404))
    assert (await look(upstream.url)).state == "ok"


async def test_a_redirect_to_another_origin_is_told_and_not_followed(upstream: FakeUpstream) -> None:
    other = FakeUpstream()
    await other.start()
    upstream.on("server/discover", reply(307, Location=f"{other.url}/elsewhere?token=hidden"))
    said = failed(await look(upstream.url, {"Authorization": SECRET}), "http")
    assert "redirects to another origin" in said
    assert "hidden" not in said
    assert not other.seen
    assert not other.probes
    await other.close()


async def test_a_redirect_within_the_origin_is_followed_and_told(upstream: FakeUpstream) -> None:
    async def slashed(turn: Turn) -> None:
        if turn.seen.path == "/mcp":
            turn.reply(307, headers={"Location": "/mcp/"})
        else:
            await upstream.plain(turn)

    upstream.on("server/discover", slashed)
    found = await look(upstream.url)
    assert check(found, "redirect").found == "to /mcp/"
    assert {seen.path for seen in upstream.seen} == {"/mcp/"}
    assert found.state == "ok"


@pytest.mark.parametrize(("skew", "state"), [(0, "ok"), (300, "warning"), (-300, "warning")])
async def test_the_clocks_are_compared(skew: int, state: str, upstream: FakeUpstream) -> None:
    date = email.utils.formatdate(time.time() + skew, usegmt=True)
    upstream.on("server/discover", reply(400, NO, Date=date))
    assert check(await look(upstream.url), "clock").state == state


# -- who is let in ---------------------------------------------------------------------------------------------------


async def test_a_server_that_wants_a_token_and_says_who_issues_it(upstream: FakeUpstream) -> None:
    here = upstream.url.replace("mcp", "here")
    upstream.on("server/discover", reply(401, WWW_Authenticate=f'Bearer resource_metadata="{here}"'))
    metadata = {"authorization_servers": ["https://id.example"], "scopes_supported": ["mcp:read"]}
    upstream.on("GET", reply(200, metadata))
    said = failed(await look(upstream.url), "authorization")
    assert f"Tokens are issued by https://id.example, scopes: mcp:read (from {here})" in said
    assert "--bearer-file" in said
    upstream.on("GET", page(404))
    said = failed(await look(upstream.url, {"Authorization": SECRET}), "authorization")
    assert f"Its metadata should be at {here}, but is not." in said
    assert [(seen.path, "Authorization" in seen.headers) for seen in upstream.seen] == [("/here", False)] * 2


async def test_no_secret_comes_out_whoever_repeats_it(upstream: FakeUpstream) -> None:
    """A token that is refused, by a server that says it back wherever it can."""

    async def echo(turn: Turn) -> None:
        said = turn.seen.headers["Authorization"]
        error = {"code": -32000, "message": f"bad {said} {turn.seen.query}"}
        turn.reply(400, {"jsonrpc": "2.0", "id": turn.id, "error": error}, {"Server": said})

    upstream.on("initialize", echo)
    upstream.on("server/discover", echo)
    found = await look(f"{upstream.url}?key=s3cret-in-the-url", {"Authorization": SECRET})
    shown = everything_in(found)
    assert "bad <hidden> [hidden]" in failed(found, "session")
    assert "battery" not in shown
    assert "s3cret" not in shown
    assert "<hidden>" in check(found, "http").found


# -- sessions --------------------------------------------------------------------------------------------------------


async def test_a_server_with_room_for_one_session(upstream: FakeUpstream) -> None:
    async def one(turn: Turn) -> None:
        if upstream.known:
            error = {"code": -32600, "message": "Server already initialized"}
            turn.reply(400, {"jsonrpc": "2.0", "id": turn.id, "error": error})
        else:
            await upstream.initialize(turn)

    upstream.on("initialize", one)
    found = await look(upstream.url)
    assert check(found, "more sessions").state == "warning"
    assert "Server already initialized" in check(found, "more sessions").found
    assert found.state == "warning"


async def test_what_a_server_says_of_itself_is_made_harmless(upstream: FakeUpstream) -> None:
    async def evil(turn: Turn) -> None:
        await upstream.initialize(turn)
        response = turn.response
        assert isinstance(response, web.Response)
        assert isinstance(response.body, bytes)
        said = json.loads(response.body)
        said["result"]["serverInfo"] = {"name": "\x1b]0;owned\x07" + "n" * 5000, "version": "1\u202e"}
        said["result"]["capabilities"]["\x1b[2J"] = {"\x07": True}
        response.body = json.dumps(said).encode()

    upstream.on("initialize", evil)
    upstream.tools = [{"name": "bad\x1b[31m\n", "inputSchema": {"type": "array"}}]
    found = await look(upstream.url)
    shown = everything_in(found)
    assert not any(letter in shown for letter in ("\\x1b", "\\x07", "\\u202e"))
    assert len(found.server.name if found.server else "") < 250
    assert "left out: bad?[31m" in check(found, "tools").found
    assert answers(found)["calls"] == "partly"


async def test_a_tool_list_without_end_is_not_read_for_ever(upstream: FakeUpstream) -> None:
    async def more(turn: Turn) -> None:
        await turn.result({"tools": [{"name": "a", "inputSchema": {"type": "object"}}], "nextCursor": "on"})

    upstream.on("tools/list", more)
    found = await look(upstream.url)
    assert found.server is not None
    assert found.server.tools == len(upstream.of("tools/list")) == 50


async def test_tools_that_run_as_tasks_are_counted_and_those_that_may_ask_get_advice(upstream: FakeUpstream) -> None:
    upstream.tools = [
        {"name": support, "inputSchema": {"type": "object"}, "execution": {"taskSupport": support}}
        for support in ("required", "optional", "forbidden")
    ]
    found = await look(upstream.url)
    told = check(found, "tasks")
    assert (told.state, told.found) == ("ok", "1 of the tools require a task, 1 support one")
    assert "tasks: {optional: drive}" in told.why
    assert answers(found)["calls"] == "yes"


@pytest.mark.parametrize("word", ["initialize", "tools/list", "tools/call", "DELETE", "GET", "server/discover"])
async def test_a_reply_that_is_garbage_is_survived(word: str, upstream: FakeUpstream) -> None:
    """Nested too deeply, not UTF-8, no objects: a sentence, never a traceback."""
    for body in (b"[" * 100_000, b'{"jsonrpc":"2.0","id":"init","result":\xff}', b'"text"', b"{}", b"\0"):

        async def garbage(turn: Turn, body: bytes = body) -> None:
            turn.reply(200, body)

        upstream.on(word, garbage)
        found = await look(upstream.url, seconds=SHORT)
        assert "probe" not in states(found), check(found, "probe")
    upstream.forget()


# -- streams ---------------------------------------------------------------------------------------------------------


def with_ids(*ids: str) -> Callable[[Turn], Awaitable[None]]:
    async def script(turn: Turn) -> None:
        for id_ in ids[:-1]:
            await turn.raw(b"id: %b\ndata:\n\n" % id_.encode())
        await turn.say({"id": turn.id, "result": text("no such tool")}, ids[-1])

    return script


@pytest.mark.parametrize(("does", "state", "answer"), [("replays", "ok", "yes"), ("forgets", "warning", "partly")])
async def test_an_event_store_is_asked_for_what_it_stores(
    does: str,
    state: str,
    answer: str,
    upstream: FakeUpstream,
) -> None:
    stored: list[Any] = []

    async def call(turn: Turn) -> None:
        stored.append(turn.id)
        await with_ids("e1", "e2")(turn)

    async def resume(turn: Turn) -> None:
        assert turn.seen.headers["Last-Event-ID"] == "e1"
        # Another's answer is none of ours.
        await turn.say({"id": stored[0] if does == "replays" else "another", "result": {}}, "e2")

    upstream.tool(call)
    upstream.on("resume", resume)
    found = await look(upstream.url)
    assert check(found, "event ids").state == state
    assert answers(found)["replica_death"] == answer
    assert found.server is not None
    assert found.server.replays is (does == "replays")


@pytest.fixture
async def mute() -> AsyncIterator[FakeSse]:
    """A server of HTTP+SSE that leaves a POST to its stream's address unanswered."""
    fake = FakeSse()

    async def hang(http: web.BaseRequest) -> web.StreamResponse:
        if http.method == "POST" and http.path == "/sse":
            await asyncio.get_running_loop().create_future()
        fake.instead = None
        return await fake.handle(http)

    fake.instead = hang
    async with fake:
        yield fake
        await eventually(lambda: all(stream.closed.is_set() for stream in fake.streams))


async def test_http_sse_that_auto_does_not_find_is_found_and_configured(mute: FakeSse) -> None:
    found = await look(mute.url, seconds=LATER)
    assert found.server is not None
    assert found.server.transport == "sse"
    assert check(found, "auto").state == "warning"
    assert parse(found.configuration or "", "here", {}).routes[0].upstream.transport == "sse"


async def test_http_sse_that_is_configured_is_not_asked_for_its_era(mute: FakeSse) -> None:
    found = await look(mute.url, transport="sse")
    assert found.state == "ok", found
    assert "http" not in states(found)
    assert parse(found.configuration or "", "here", {}).routes[0].upstream.transport == "sse"


# -- the probe itself ------------------------------------------------------------------------------------------------


async def test_a_server_that_is_slow_at_every_step_is_given_up(
    upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.on("tools/list", lambda turn: turn.for_ever())
    monkeypatch.setattr(runner, "_STEPS", 0.4)
    assert "took too long" in failed(await look(upstream.url, seconds=3.0), "time")
    assert len(upstream.of("DELETE")) == 1


async def test_a_mistake_of_the_probe_is_a_sentence(upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "greet", None)
    assert "could not handle an answer (TypeError)" in failed(await look(upstream.url), "probe")
