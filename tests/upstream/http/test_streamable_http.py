"""Resume: a call whose stream broke, or whose process died, is picked up from its event id."""

import asyncio
import errno
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import Raw

from gateway.config import InForce, RouteSettings, parse
from gateway.exchange import events as on
from gateway.http.upstream_client import Bounds, Client
from gateway.http.upstream_url import Endpoint
from gateway.http_client.client import HttpClient
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import Busy, CallGone, CallLost, Refused, Unreachable, UpstreamError
from gateway.runtime.tasks import Tasks
from gateway.seal.request_state import Whereabouts
from gateway.sessions.call import Call, PoolKey, Runner
from gateway.sessions.pool.pool import Pool
from gateway.sessions.session import Session
from gateway.telemetry import Metrics, SessionState
from gateway.upstream.channel import NO_HEADERS, Headers
from gateway.upstream.http import resumption
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.streamable_http import StreamableChannel
from tests.support.fake_upstream import DEADLINE, FORM, FakeUpstream, Script, Turn, event, text
from tests.support.noted_timers import Timers
from tests.support.stand import Start
from tests.support.workbench import ALL, BACKGROUND, configuration, eventually, later

KEY = PoolKey(b"ada", b'{"name":"x","version":"1"}', json.dumps(ALL).encode(), ())
INFO = b'{"name":"fake","version":"1"}'
CALL = b'"gw-dead-1"'
QUESTION = {"id": 7, "method": "elicitation/create", "params": FORM}
RESULT = {"id": "gw-dead-1", "result": text("done")}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is tried again at once; a stream may be silent unless a test says otherwise."""
    monkeypatch.setattr(resumption, "RETRY_SECONDS", (0.0,) * 4)
    monkeypatch.setattr(resumption, "SILENCE_SECONDS", (30.0,))


class Ear:
    """The listener of a call."""

    def __init__(self) -> None:
        self.heard: list[on.Event] = []
        self.cursors: list[str | None] = []
        self.cursor: Callable[[], str | None] = lambda: None

    def hear(self, event: on.Event) -> None:
        self.heard.append(event)
        self.cursors.append(self.cursor())

    @property
    def progress(self) -> list[int]:
        return [int(float(bytes(e.params["progress"]))) for e in self.heard if isinstance(e, on.Progressed)]

    @property
    def asked(self) -> list[bytes]:
        return [bytes(e.id) for e in self.heard if isinstance(e, on.Nested)]

    @property
    def text(self) -> str:
        (result,) = [e.result for e in self.heard if isinstance(e, on.Resulted)]
        return str(json.loads(bytes(result))["content"][0]["text"])


class UpstreamSide(Runner):
    """The upstream side of one process without its downstream side: sessions and their pool, over real HTTP."""

    def __init__(self, url: str, **sections: Any) -> None:
        config = parse(configuration(url, **sections), "test", {})
        self.metrics = Metrics("0", ["/mcp"])
        self.tasks = Tasks(self.metrics)
        self._calls = HttpClient(self.tasks)
        self.client = Client(InForce(Bounds(config.limits, config.timeouts)), self._calls)
        upstream = HttpUpstream(self.client, Endpoint(url, config.routes[0].where), self.tasks)
        settings = InForce(RouteSettings(config, config.routes[0]))
        self.pool = Pool(settings, lambda: StreamableChannel(upstream), self.metrics, self.tasks)
        self.is_attached = asyncio.Event()
        self.ear = Ear()

    async def adopt(self, headers: Headers = NO_HEADERS, *, is_shared: bool = False) -> Session:
        """Take over the call of another process in the session `s0`."""
        where = Whereabouts("s0", "2025-11-25", CALL, INFO, None)
        session = await self.pool.adopt(KEY, where, headers, is_shared=is_shared)
        self.ear.cursor = lambda: session.channel.cursor
        return session

    async def resume(self, session: Session, headers: Headers = NO_HEADERS) -> None:
        async with asyncio.timeout(DEADLINE):
            await session.resume(Call(CALL, b"", self.ear, progress_token=CALL), "e1", headers, self)

    def attached(self) -> None:
        """As the runner of that call."""
        self.is_attached.set()

    async def run(self, session: Session, headers: Headers = NO_HEADERS) -> None:
        """A call of this process's own."""
        self.ear.cursor = lambda: session.channel.cursor
        params = {"name": "tool", "arguments": {}, "_meta": {mcp.META_PROGRESS_TOKEN: Raw(CALL)}}
        message = jsonrpc.request(CALL, mcp.TOOLS_CALL, params)
        async with asyncio.timeout(DEADLINE):
            await session.run(Call(CALL, message, self.ear, progress_token=CALL), headers)

    async def answer(self, session: Session, headers: Headers = NO_HEADERS) -> None:
        await session.answer(Raw(b"7"), Raw(b'{"action":"accept","content":{"name":"Ada"}}'), headers)

    def metric(self, name: str, **labels: str) -> float:
        _ = self.metrics.render()
        return self.metrics.series.registry.get_sample_value(name, {"route": "/mcp", **labels}) or 0.0

    @property
    def sessions(self) -> list[float]:
        return [self.metric("mcp_gateway_sessions", state=state) for state in SessionState]

    @property
    def connections(self) -> int:
        """The connections in use."""
        return len(self._calls.connections) - len(self._calls.idle)

    async def close(self) -> None:
        self.pool.retire()
        await eventually(lambda: all(task.get_name().startswith(BACKGROUND) for task in self.tasks._running))
        await self.tasks.close()
        self.client.close()
        assert self.metrics.series.registry.get_sample_value("mcp_gateway_task_failures_total") == 0


@asynccontextmanager
async def replica(
    upstream: FakeUpstream, times: Mapping[str, Any] | None = None, **sections: Any
) -> AsyncIterator[UpstreamSide]:
    """A process that opened no session; the upstream knows `s0` of another one. `times` replace fixed ones."""
    upstream.known.add("s0")
    before = asyncio.all_tasks()
    made = UpstreamSide(upstream.url, **sections)
    with ExitStack() as patches:
        for name, value in (times or {}).items():
            _ = patches.enter_context(patch(f"gateway.upstream.http.{name}", value))
        try:
            yield made
        finally:
            await made.close()
    await upstream.close()
    await eventually(lambda: asyncio.all_tasks() <= before, "no task is left")


@asynccontextmanager
async def opened(upstream: FakeUpstream) -> AsyncIterator[tuple[UpstreamSide, Session]]:
    """Such a process with a session of its own."""
    async with replica(upstream) as here:
        yield here, await here.pool.acquire(KEY, NO_HEADERS)


@asynccontextmanager
async def adopted(
    upstream: FakeUpstream, times: Mapping[str, Any] | None = None, **sections: Any
) -> AsyncIterator[tuple[UpstreamSide, Session]]:
    """Such a process that has adopted `s0`."""
    async with replica(upstream, times, **sections) as here:
        yield here, await here.adopt()


def progress(number: int) -> dict[str, Any]:
    return {"method": mcp.PROGRESS, "params": {"progressToken": "gw-dead-1", "progress": number}}


def saying(*messages: tuple[str | None, dict[str, Any]], end: str = "end") -> Script:
    """Say these on the reply's stream, by event id, and then end it, break it, or leave it open."""

    async def script(turn: Turn) -> None:
        await turn.raw(b"")
        for event_id, message in messages:
            await turn.say(message, event_id)
        if end == "reset":
            await turn.reset()
        if end == "open":
            await turn.for_ever()

    return script


def refusing(status: int, body: Any = None) -> Script:
    return lambda turn: turn.reply(status, body)


def cursors(upstream: FakeUpstream) -> list[str]:
    """Where each GET with a cursor began."""
    return [seen.headers["Last-Event-ID"] for seen in upstream.of("resume")]


# -- the same process: a stream that breaks ---------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["end", "reset"])
async def test_a_call_whose_stream_is_cut_goes_on_and_nothing_is_told_twice(upstream: FakeUpstream, end: str) -> None:
    upstream.tool(saying(("e1", progress(1)), ("e2", progress(2)), end=end))
    upstream.each(
        "resume",
        saying(("e2", progress(2)), ("e3", progress(3)), ("e4", QUESTION), end=end),
        saying(("e3", progress(3)), ("e4", QUESTION), ("e5", progress(4)), ("e6", RESULT)),
    )
    async with opened(upstream) as (here, session):
        await here.run(session)
        assert here.ear.progress == [1, 2, 3, 4]
        assert here.ear.asked == [b"7"]
        assert here.ear.text == "done"
        assert cursors(upstream) == ["e2", "e2"]
        assert len(upstream.of("tools/call")) == 1
        here.pool.release(session, clean=True)
        assert here.sessions == [1, 0, 0], "it is as good as any other"


@pytest.mark.parametrize(
    "before",
    [
        b"",
        event(progress(1)),
        b"id: a\0b\ndata:\n\n",
        b"id: e1\ndata:\n\nid\n\n",
        b"id: \x01\ndata:\n\n",
        b"id: " + b"e" * 1025 + b"\ndata:\n\n",
    ],
    ids=["nothing", "no id", "no id with NUL", "an id taken back", "no header", "a long id"],
)
async def test_a_call_without_a_cursor_is_lost_with_its_stream(upstream: FakeUpstream, before: bytes) -> None:
    upstream.tool(lambda turn: turn.raw(before))
    async with opened(upstream) as (here, session):
        with pytest.raises(CallLost, match="ended the call's stream without a result"):
            await here.run(session)
        assert not upstream.of("resume")


@pytest.mark.parametrize(
    "priming",
    [
        b"id: p\ndata:\n\n",
        b"id: p\r\ndata: \r\n\r\n",
        b"id: p\n\n",
        b"id: a\nid: p\n\n",
        b"id: p\ndata:\n\nid: x\0y\ndata:\n\n",
    ],
)
async def test_a_priming_event_is_a_place_to_resume_from(upstream: FakeUpstream, priming: bytes) -> None:
    upstream.tool(lambda turn: turn.raw(priming))
    upstream.on("resume", saying(("e1", RESULT)))
    async with opened(upstream) as (here, session):
        await here.run(session)
        assert (here.ear.text, cursors(upstream)) == ("done", ["p"])


async def test_the_cursor_is_always_the_place_after_what_was_heard(upstream: FakeUpstream) -> None:
    async def tool(turn: Turn) -> None:
        # In one piece: what is sealed while the first is heard must not skip the others.
        await turn.raw(
            event(progress(1), "e1") + event(progress(2)) + b"id: p\ndata:\n\n" + event(progress(3)) + b"id: q\n\n"
        )

    upstream.tool(tool)
    upstream.each(
        "resume",
        saying(("e4", progress(4)), ("e5", progress(5))),
        saying(("e4", progress(4)), (None, progress(6)), ("e6", RESULT)),
    )
    async with opened(upstream) as (here, session):
        await here.run(session)
        assert here.ear.cursors == ["e1", "e1", "p", "e4", "e5", "e5", "e6"]
        assert cursors(upstream) == ["q", "q"]


async def test_the_next_call_does_not_inherit_a_cursor(upstream: FakeUpstream) -> None:
    upstream.each("tools/call", saying(("e1", RESULT)), saying())
    async with opened(upstream) as (here, session):
        await here.run(session)
        assert session.channel.cursor == "e1"
        with pytest.raises(CallLost):
            await here.run(session)
        assert not upstream.of("resume")


async def test_a_server_that_gives_every_event_one_id_is_served(upstream: FakeUpstream) -> None:
    upstream.tool(saying(("0", progress(1)), ("0", progress(2)), ("0", RESULT)))
    async with opened(upstream) as (here, session):
        await here.run(session)
        assert (here.ear.progress, here.ear.text) == ([1, 2], "done")


async def test_a_cut_call_is_picked_up_with_the_newest_credential(upstream: FakeUpstream) -> None:
    cut = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.say(QUESTION, "e1")
        await cut.wait()

    upstream.tool(tool)
    upstream.on("resume", saying(("e2", RESULT)))
    async with replica(upstream) as here:
        old, new = ({"Authorization": f"Bearer {word}"} for word in ("old", "new"))
        session = await here.pool.acquire(KEY, old)
        running = later(here.run(session, old))
        await eventually(lambda: here.ear.asked)
        await here.answer(session, new)
        cut.set()
        await running
        assert upstream.of("resume")[0].headers["Authorization"] == "Bearer new"
        here.pool.release(session, clean=True)


@contextmanager
def pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """How long it is waited for meanwhile; nothing waits really."""
    waited: list[float] = []
    moment = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        await moment(0)  # others sleep too, and would have the loop for themselves

    with monkeypatch.context() as patched:
        patched.setattr("asyncio.sleep", sleep)
        yield waited


async def test_a_server_is_given_the_pause_that_it_asks_for(
    upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.tool(lambda turn: turn.raw(b"id: e1\nretry: 7000\ndata:\n\n"))
    upstream.each("resume", lambda turn: turn.raw(b"retry: 900000000\ndata:\n\n"), saying(("e2", RESULT)))
    async with opened(upstream) as (here, session):
        with pauses(monkeypatch) as waited:
            await here.run(session)
        assert [pause for pause in waited if pause >= 1] == [7, 60]  # others may sleep for a moment meanwhile


async def test_a_cut_call_whose_session_is_gone_is_not_called_again(upstream: FakeUpstream, begin: Start) -> None:
    async def tool(turn: Turn) -> None:
        await turn.raw(b"id: e1\ndata:\n\n")
        upstream.forget()

    stand = await begin()
    upstream.tool(tool)
    reply = await stand.client().call()
    assert reply.outcome == (200, -32603, "session_lost")
    assert "may have had effects" in reply.error["message"]
    assert "/mcp" in reply.error["message"]
    assert len(upstream.of("tools/call")) == 1
    assert len(upstream.of("resume")) == 1
    assert "DELETE" not in upstream.words
    assert stand.metric("mcp_gateway_upstream_errors_total", kind="session_lost") == 1


async def test_a_cut_call_whose_credential_is_refused_is_lost_and_not_refused(upstream: FakeUpstream) -> None:
    upstream.tool(saying(("e1", progress(1))))
    upstream.on("resume", refusing(401))
    async with opened(upstream) as (here, session):
        with pytest.raises(CallLost, match=r"refused the credentials .* may have had effects"):
            await here.run(session)
        assert session.lost
    assert "DELETE" not in upstream.words


# -- another process: a session that is adopted -----------------------------------------------------------------------


async def test_an_adopted_session_is_listened_to_before_anything_else_and_has_no_second_handshake(
    upstream: FakeUpstream,
) -> None:
    async def store(turn: Turn) -> None:
        await turn.raw(b"")
        answer = await upstream.expect("s0", 7)
        await turn.say({"id": "gw-dead-1", "result": text(answer["result"]["action"])}, "e2")

    upstream.on("resume", store)
    async with replica(upstream) as here:
        credential = {"Authorization": "Bearer x"}
        session = await here.adopt(credential)
        assert here.sessions == [0, 1, 0]
        assert upstream.words == ["GET"]
        assert session.shaken.server_info == bytes(INFO)
        resuming = later(here.resume(session, credential))
        await here.is_attached.wait()
        assert session.channel.cursor == "e1", "if it is parked now"
        await here.answer(session, credential)
        await resuming
        assert here.ear.text == "accept"
        assert here.is_attached.is_set()
        assert here.ear.cursors == ["e2"]
        here.pool.release(session, clean=True)
        await upstream.saw("DELETE")
        assert here.sessions == [0, 0, 0], "it is not pooled"
        assert (await here.pool.acquire(KEY, NO_HEADERS)).channel.session_id == "s1"
    side, resumed = upstream.seen[:2]
    assert upstream.words[:4] == ["GET", "resume", "answer", "DELETE"]
    assert "Last-Event-ID" not in side.headers
    assert resumed.headers["Last-Event-ID"] == "e1"
    for seen in upstream.seen[:4]:
        assert (seen.session, seen.headers["MCP-Protocol-Version"]) == ("s0", "2025-11-25")
        assert seen.headers["Authorization"] == "Bearer x"


async def test_a_question_and_a_result_on_the_side_stream_belong_to_the_adopted_call(upstream: FakeUpstream) -> None:
    upstream.on("resume", saying(end="open"))
    async with adopted(upstream) as (here, session):
        resuming = later(here.resume(session))
        await here.is_attached.wait()
        upstream.side("s0").put_nowait(event({"jsonrpc": "2.0", **QUESTION}, "x1"))
        upstream.side("s0").put_nowait(event({"jsonrpc": "2.0", **RESULT}, "x2"))
        upstream.side("s0").put_nowait(None)
        await resuming
        assert (here.ear.asked, here.ear.text) == ([b"7"], "done")
        assert (await upstream.saw("GET", 2))[1].headers.get("Last-Event-ID") is None


async def test_the_side_stream_of_an_adopted_session_waits_for_the_old_one_to_fall(upstream: FakeUpstream) -> None:
    upstream.once("GET", refusing(409))
    async with adopted(upstream) as (_, session):
        assert len(upstream.of("GET")) == 2
        assert session.channel.hears_side


async def test_an_adopted_session_finds_where_the_server_redirects_to(upstream: FakeUpstream) -> None:
    upstream.once("GET", lambda turn: turn.reply(307, headers={"Location": "/mcp/"}))
    upstream.on("resume", saying(("e2", RESULT)))
    async with adopted(upstream) as (here, session):
        await here.resume(session)
        assert [seen.path for seen in upstream.seen] == ["/mcp", "/mcp/", "/mcp/"]


async def test_adopted_sessions_count_under_the_caps(upstream: FakeUpstream) -> None:
    async with replica(upstream, sessions={"max": 1}, timeouts={"session_wait_seconds": 0.05}) as here:
        opened = await here.pool.acquire(KEY, NO_HEADERS)
        with pytest.raises(Busy):
            await here.adopt()
        here.pool.release(opened, clean=True)
        adopted = await here.adopt()
        assert here.sessions == [0, 1, 0], "the idle one made room"
        with pytest.raises(Busy):
            await here.pool.acquire(KEY, NO_HEADERS)
        here.pool.release(adopted, clean=False)
        assert here.sessions == [0, 0, 0]


async def test_an_adoption_waits_for_room_and_does_not_take_an_idle_session(upstream: FakeUpstream) -> None:
    async with replica(upstream, sessions={"max": 1}, timeouts={"session_wait_seconds": DEADLINE}) as here:
        opened = await here.pool.acquire(KEY, NO_HEADERS)
        adopting = later(here.adopt())
        await eventually(lambda: here.pool.group(KEY).waiting)
        here.pool.release(opened, clean=True)
        adopted = await adopting
        assert adopted.channel.session_id == "s0"
        assert [seen.session for seen in await upstream.saw("DELETE")] == ["s1"]
        here.pool.release(adopted, clean=False)


async def test_a_session_that_cannot_be_adopted_in_time_is_dropped_and_not_ended(upstream: FakeUpstream) -> None:
    upstream.on("GET", lambda turn: turn.for_ever())
    async with replica(
        upstream, {"standalone_stream.HEAD_SECONDS": 30.0}, timeouts={"handshake_seconds": 0.05}
    ) as here:
        with pytest.raises(Unreachable):
            await here.adopt()
        assert here.sessions == [0, 0, 0]
    assert "DELETE" not in upstream.words


@pytest.mark.parametrize("clean", [True, False])
async def test_an_adopted_session_whose_call_was_not_answered_is_not_ended(
    upstream: FakeUpstream, *, clean: bool
) -> None:
    async with adopted(upstream) as (here, session):
        here.pool.release(session, clean=clean)
        assert here.sessions == [0, 0, 0]
    assert "DELETE" not in upstream.words


async def test_an_answered_session_that_is_deaf_is_not_ended(upstream: FakeUpstream) -> None:
    upstream.on("resume", saying(("e2", RESULT)))
    async with adopted(upstream) as (here, session):
        await here.resume(session)
        upstream.on("GET", refusing(405))
        upstream.side("s0").put_nowait(None)
        await eventually(lambda: session.lost)
    assert "DELETE" not in upstream.words


# -- what a GET may meet ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [refusing(409), refusing(500), refusing(503), refusing(429), refusing(200, {}), saying(), saying(end="reset")],
    ids=["409", "500", "503", "429", "no event stream", "end", "reset"],
)
async def test_what_may_pass_is_tried_again_from_the_same_place(upstream: FakeUpstream, script: Script) -> None:
    upstream.each("resume", script, script, script, saying(("e2", RESULT)))
    async with adopted(upstream) as (here, session):
        await here.resume(session)
        assert (here.ear.text, cursors(upstream)) == ("done", ["e1"] * 4)
        assert here.is_attached.is_set()


@pytest.mark.parametrize("script", [refusing(409), refusing(500), refusing(200, {})], ids=["409", "500", "no stream"])
async def test_what_never_passes_loses_the_call_after_some_tries(upstream: FakeUpstream, script: Script) -> None:
    # A stream in between shows that the server is there: only failures in a row are counted.
    upstream.each("resume", script, script, script, saying(), script)
    async with adopted(upstream) as (here, session):
        with pytest.raises(CallLost, match="may have had effects") as caught:
            await here.resume(session)
        assert type(caught.value) is CallLost
        assert upstream.url in caught.value.message
        assert cursors(upstream) == ["e1"] * 9
        assert here.is_attached.is_set()
    assert "DELETE" not in upstream.words


async def test_a_server_that_accepts_and_says_nothing_at_all_is_given_up(upstream: FakeUpstream) -> None:
    upstream.on("resume", lambda turn: turn.for_ever())
    async with adopted(upstream, {"streamable_http.RESUME_HEAD_SECONDS": 0.01}) as (here, session):
        with pytest.raises(CallLost):
            await here.resume(session)
        assert not here.is_attached.is_set()


async def test_the_result_after_an_answer_comes_on_a_second_get_from_the_same_place(upstream: FakeUpstream) -> None:
    # The first two streams are tied to nothing, as server-everything's are; only the answer makes the third.
    upstream.each("resume", saying(end="open"), saying(end="open"), saying(("e2", RESULT)))
    async with adopted(upstream, {"resumption.SILENCE_SECONDS": (0.02, 30.0)}) as (here, session):
        resuming = later(here.resume(session))
        await upstream.saw("resume", 2)
        await here.answer(session)
        await resuming
        assert upstream.words == ["GET", "resume", "resume", "answer", "resume"]
        assert (here.ear.text, cursors(upstream)) == ("done", ["e1"] * 3)
        here.pool.release(session, clean=True)
        for seen in upstream.of("resume")[:2]:
            await seen.cut.wait()


async def test_a_result_that_overtakes_the_acceptance_of_its_answer_ends_it(upstream: FakeUpstream) -> None:
    taken, heard = asyncio.Event(), asyncio.Event()

    async def store(turn: Turn) -> None:
        await turn.raw(b"")
        await taken.wait()
        await turn.say(RESULT, "e2")
        await turn.for_ever()

    async def accept(turn: Turn) -> None:
        taken.set()
        await heard.wait()
        turn.reply(202)

    upstream.on("resume", store)
    upstream.on("answer", accept)
    async with adopted(upstream, {"resumption.SILENCE_SECONDS": (0.01, 30.0)}) as (here, session):
        resuming = later(here.resume(session))
        await here.is_attached.wait()
        answering = later(here.answer(session))
        await eventually(lambda: here.ear.heard)
        heard.set()
        await answering
        await resuming
        assert here.ear.text == "done"


async def test_a_silent_stream_is_opened_again_for_as_long_as_it_takes(upstream: FakeUpstream) -> None:
    silent = saying(("e2", progress(1)), end="open")
    upstream.each("resume", *[silent] * 12, saying(("e2", progress(1)), ("e3", RESULT)))
    async with adopted(upstream, {"resumption.SILENCE_SECONDS": (0.01, 0.01)}) as (here, session):
        await here.resume(session)
        assert (here.ear.progress, here.ear.text) == ([1], "done")
        assert cursors(upstream) == ["e1"] * 13


async def test_an_answered_stream_that_stays_open_is_closed_and_not_opened_again(upstream: FakeUpstream) -> None:
    upstream.on("resume", saying(("e2", RESULT), end="open"))
    async with adopted(upstream, {"resumption.SILENCE_SECONDS": (0.03,)}) as (here, session):
        await here.resume(session)
        (seen,) = upstream.of("resume")
        await seen.cut.wait()


async def test_an_event_that_is_too_large_is_not_asked_for_again(upstream: FakeUpstream) -> None:
    upstream.on("resume", saying(("e2", {"id": "gw-dead-1", "result": text("x" * 70_000)})))
    async with adopted(upstream, limits={"event_bytes": 65_536}) as (here, session):
        with pytest.raises(CallLost, match="event_bytes"):
            await here.resume(session)
        assert len(upstream.of("resume")) == 1


# -- how it ends badly ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (404, b"", CallGone, "does not know the session"),
        (400, b"Bad Request: No valid session ID provided", CallGone, "does not know the session"),
        (400, {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "Bad id"}}, CallLost, "HTTP 400"),
        (405, b"", CallLost, "HTTP 405"),
        (302, b"", CallLost, "HTTP 302"),
        (401, b"", Refused, "HTTP 401"),
        (403, b"", Refused, "HTTP 403"),
    ],
)
async def test_a_final_refusal_ends_it_at_once(
    upstream: FakeUpstream, status: int, body: Any, error: type[UpstreamError], words: str
) -> None:
    upstream.on("resume", refusing(status, body))
    upstream.on(mcp.PING, refusing(status, body))
    async with adopted(upstream) as (here, session):
        with pytest.raises(UpstreamError, match=words) as caught:
            await here.resume(session)
        assert type(caught.value) is error
        assert upstream.url in caught.value.message
        assert "route /mcp" in caught.value.message
        if error is not Refused:
            assert "may have had effects" in caught.value.message
        assert len(upstream.of("resume")) == 1
        assert not here.is_attached.is_set()
        assert session.lost
        assert here.metric("mcp_gateway_sessions_lost_total") == (error is CallGone)
    assert "DELETE" not in upstream.words


@pytest.mark.parametrize(("status", "body"), [(404, b""), (400, b"Invalid session ID in Last-Event-ID")])
async def test_a_refused_get_does_not_mean_that_the_session_is_lost(
    upstream: FakeUpstream, status: int, body: bytes
) -> None:
    upstream.known.add("s0")
    upstream.on("resume", refusing(status, body))
    async with adopted(upstream) as (here, session):
        with pytest.raises(CallLost, match="cannot pick up a call") as caught:
            await here.resume(session)
        assert type(caught.value) is CallLost
        assert [seen.session for seen in upstream.of(mcp.PING)] == ["s0"]
        assert here.metric("mcp_gateway_sessions_lost_total") == 0


@pytest.mark.parametrize("is_shared", [False, True])
async def test_only_a_call_that_another_process_may_still_hold_is_lost_by_faults_of_the_gateways_own_host(
    upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch, *, is_shared: bool
) -> None:
    upstream.each("resume", refusing(503), refusing(503), saying(("e2", RESULT)))
    lacks_descriptors = 40

    def open_socket(address: Any) -> socket.socket:
        nonlocal lacks_descriptors
        if lacks_descriptors:
            lacks_descriptors -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        family, kind, protocol, *_ = address
        return socket.socket(family, kind, protocol)

    async with replica(upstream) as here:
        session = await here.adopt(is_shared=is_shared)
        monkeypatch.setattr("gateway.world.new_socket", open_socket)
        if is_shared:
            with pytest.raises(CallLost, match=r"cannot be reached: .* may have had effects") as caught:
                await here.resume(session)
            assert type(caught.value) is CallLost
            assert lacks_descriptors == 40 - 1 - len(resumption.RETRY_SECONDS)
        else:
            await here.resume(session)
            assert (here.ear.text, cursors(upstream)) == ("done", ["e1"] * 3)
        here.pool.release(session, clean=not is_shared)


@pytest.mark.parametrize("reads", [True, False], ids=["reading", "pausing"])
async def test_a_cancelled_resumption_leaves_nothing_behind(upstream: FakeUpstream, *, reads: bool) -> None:
    upstream.on("resume", saying(end="open") if reads else refusing(409))
    async with adopted(upstream, {"resumption.RETRY_SECONDS": (30.0,)}) as (here, session):
        resuming = later(here.resume(session))
        (seen,) = await upstream.saw("resume")
        await eventually(
            lambda: here.is_attached.is_set() if reads else here.connections == 1, "the side stream is left"
        )
        resuming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resuming
        if reads:
            await seen.cut.wait()
        assert session.lost
        here.pool.release(session, clean=False)
        await eventually(lambda: here.connections == 0)
    assert "DELETE" not in upstream.words


# -- how it waits -----------------------------------------------------------------------------------------------------


async def test_pauses_grow_until_something_new_is_heard(
    upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = saying(("e2", progress(1)))
    upstream.each("resume", saying(), saying(), new, new, refusing(409), saying(), new, new, saying(("e3", RESULT)))
    async with adopted(upstream, {"resumption.RETRY_SECONDS": (1, 2, 3)}) as (here, session):
        with pauses(monkeypatch) as waited:
            await here.resume(session)
        assert waited == [1, 2, 1, 2, 3, 3, 3, 3]


async def test_a_stream_that_speaks_is_not_silent(upstream: FakeUpstream, timers: Timers) -> None:
    upstream.on("resume", saying(("e2", progress(1)), ("e3", progress(2)), ("e4", RESULT)))
    async with adopted(upstream) as (here, session):
        await here.resume(session)
        deadlines = [timer.cancelled() for timer in timers.of(resumption.SILENCE_SECONDS[0])]
        assert deadlines == [True] * len(deadlines)
        assert len(deadlines) > 3, "it began anew with each message"
