"""The sessions of a route: which calls share one, how many there are, how calls wait for one, and how they end."""

import asyncio
import json
from typing import Any

import pytest
from msgspec import Raw

from gateway.config import InForce, RouteSettings, parse
from gateway.protocol import mcp
from gateway.protocol.errors import Busy
from gateway.protocol.tool_list import Tool
from gateway.runtime.tasks import Tasks
from gateway.seal.request_state import Whereabouts
from gateway.sessions.assignment import Quota
from gateway.sessions.call import Call, OwnListener, PoolKey
from gateway.sessions.group import MAX_FOLLOWED, Group
from gateway.sessions.pool import pool as pools
from gateway.sessions.pool.pool import Pool
from gateway.sessions.session import Session
from gateway.telemetry import Metrics, SessionLimit
from gateway.upstream.channel import NO_HEADERS, Channel, Headers, Hearer
from tests.support.fake_upstream import FakeUpstream, ask
from tests.support.memory import alive
from tests.support.replicas import drop
from tests.support.stand import Start
from tests.support.status import told
from tests.support.workbench import Client, Stand, configuration, eventually, later, leave


async def test_one_call_in_flight_per_session(upstream: FakeUpstream, client: Client) -> None:
    go = upstream.waiting_tool()
    calls = asyncio.gather(*(client.call() for _ in range(3)))
    seen = await upstream.saw("tools/call", 3)
    assert len({request.session for request in seen}) == 3
    go.set()
    await calls
    await client.call()
    assert len(upstream.of("initialize")) == 3, "a free session is used again"


async def test_ids_are_never_repeated_across_sessions(upstream: FakeUpstream, client: Client) -> None:
    await asyncio.gather(*(client.call() for _ in range(20)))
    ids = [seen.body["id"] for seen in upstream.seen if seen.word in ("tools/call", "tools/list")]
    assert len(set(ids)) == len(ids) >= 21


async def test_sessions_are_never_shared_across_different_pool_keys(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(route={"forward_headers": ["x-tenant"]})
    kinds: list[dict[str, Any]] = [
        {},
        {"authorization": "Bearer one"},
        {"authorization": "Bearer two"},
        {"info": {"name": "other", "version": "1"}},
        {"info": {"name": "bench", "version": "2"}},
        {"capabilities": {}},
        {"capabilities": {"elicitation": {}}},
        {"headers": {"X-Tenant": "a"}},
        {"headers": {"X-Tenant": "b"}},
    ]
    for _ in range(2):
        for kind in kinds:
            assert (await stand.client(**kind).call()).text == "done"
    assert len(upstream.of("initialize")) == len(kinds)
    sessions: dict[str, set[tuple[str | None, str | None]]] = {}
    for seen in upstream.of("tools/call"):
        who = seen.headers.get("Authorization"), seen.headers.get("X-Tenant")
        sessions.setdefault(seen.session or "", set()).add(who)
    assert len(sessions) == len(kinds)
    assert all(len(who) == 1 for who in sessions.values())


async def test_an_idle_session_is_closed_with_delete(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(sessions={"idle_seconds": 0.05})
    await stand.client("Bearer x").call()
    assert (await upstream.saw("DELETE"))[0].session == "s1"
    await eventually(lambda: stand.sessions("idle") == 0)
    assert upstream.known == set()
    assert (await stand.client("Bearer x").call()).text == "done"


async def test_a_deaf_idle_session_is_not_used_again(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    await client.call()

    upstream.once("GET", lambda turn: turn.reply(405))
    upstream.side("s1").put_nowait(None)
    await upstream.saw("GET", 2)
    await eventually(lambda: stand.sessions("idle") == 0)
    assert (await upstream.saw("DELETE"))[0].session == "s1", "the server would keep it"
    assert (await client.call()).text == "done"
    assert upstream.of("tools/call")[-1].session == "s2"


async def test_a_session_that_went_deaf_in_its_call_is_ended_after_it(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    go = upstream.waiting_tool()

    calling = later(client.call())
    await upstream.saw("tools/call")
    upstream.once("GET", lambda turn: turn.reply(405))
    upstream.side("s1").put_nowait(None)
    await upstream.saw("GET", 2)
    await eventually(lambda: any(session.lost for session in stand.group().sessions))
    go.set()
    assert (await calling).text == "done"
    assert (await upstream.saw("DELETE"))[0].session == "s1"


async def test_no_session_is_kept_with_idle_seconds_zero(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(sessions={"idle_seconds": 0})
    await stand.client().call()
    await upstream.saw("DELETE", 2)
    assert stand.sessions("idle") == 0


async def test_a_session_that_comes_free_is_handed_over(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(sessions={"max": 1})
    go = upstream.waiting_tool()
    calls = asyncio.gather(*(stand.client().call() for _ in range(4)))
    await upstream.saw("tools/call")
    go.set()
    assert [reply.text for reply in await calls] == ["done"] * 4
    assert len(upstream.of("initialize")) == 1


@pytest.mark.parametrize(("cap", "status"), [("max", 503), ("max_per_principal", 429)])
async def test_waiting_for_a_session_ends_with_the_limit_that_was_reached(
    upstream: FakeUpstream, begin: Start, cap: str, status: int
) -> None:
    stand = await begin(sessions={cap: 1}, timeouts={"session_wait_seconds": 0.1})
    go = upstream.waiting_tool()
    first = later(stand.client().call())
    await upstream.saw("tools/call")
    reply = await stand.client().call()
    assert reply.outcome == (status, -32603, "busy")
    assert int(reply.headers["Retry-After"]) > 0
    refused = [stand.metric("mcp_gateway_sessions_refused_total", limit=limit) for limit in SessionLimit]
    assert refused == [int(limit == f"sessions.{cap}") for limit in SessionLimit]
    (error,) = (await told(stand)).errors
    assert f"raise sessions.{cap} (1 when it happened), " in error.fix
    if cap == "max_per_principal":
        other = later(stand.client("Bearer other").call())
        await upstream.saw("tools/call", 2)
        go.set()
        assert (await other).text == "done"
    go.set()
    assert (await first).text == "done"


async def test_a_caller_without_its_one_session_learns_that_another_one_has_the_last(
    upstream: FakeUpstream, begin: Start
) -> None:
    """With affinity, each other reason is a call of the same caller."""
    affine = {"sessions": {"affinity": "principal"}}
    stand = await begin(route=affine, sessions={"max": 1}, timeouts={"session_wait_seconds": 0.1})
    upstream.tool(ask)
    _ = await stand.client("Bearer one").call()
    reply = await stand.client("Bearer two").call()
    assert reply.status == 503
    assert "raise sessions.max, or" in reply.final["error"]["message"]
    await drop(stand)


async def test_an_idle_session_makes_room_for_another_principal(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(sessions={"max": 1})
    await stand.client("Bearer one").call()
    assert (await stand.client("Bearer two").call()).text == "done"
    assert upstream.of("DELETE")[0].session == "s1"


async def test_idle_sessions_of_a_restarted_server_go_together_and_the_one_that_it_surely_forgot_is_not_ended(
    upstream: FakeUpstream, stand: Stand
) -> None:
    """The other one may have been opened since the server was started again."""
    client, go = stand.client("Bearer x"), upstream.waiting_tool()
    both = [later(client.call()) for _ in range(2)]
    await upstream.saw("tools/call", 2)
    go.set()
    _ = await asyncio.gather(*both)
    upstream.tool(upstream.plain)
    upstream.forget()
    for _ in range(2):
        assert (await client.call()).text == "done"
    assert len(upstream.of("tools/call")) == 2 + 2 + 1, "one was refused, no second one"
    await eventually(lambda: stand.sessions("idle") == 1)
    await stand.gateway.close()
    refused = next(seen.session for seen in upstream.of("tools/call")[2:] if seen.session != "s3")
    assert {seen.session for seen in upstream.of("DELETE")} == {"s1", "s2", "s3"} - {refused}


# -- the pool alone ---------------------------------------------------------------------------------------------------


class SilentChannel(Channel):
    """A channel that opens at once, and does nothing."""

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        return Raw(b'{"protocolVersion":"2025-11-25","capabilities":{}}')

    async def listen(self, *_: object) -> None:
        pass

    async def request(self, message: bytes, headers: Headers, hearer: Hearer, *, is_repeatable: bool = False) -> None:
        pass

    def adopt(self, session_id: str, version: str) -> None:
        self.session_id = session_id

    async def resume(self, *_: object, **__: object) -> None:
        pass

    async def send(self, message: bytes, headers: Headers) -> None:
        pass

    async def beside(self, message: bytes, headers: Headers) -> None:
        pass

    async def ping(self, headers: Headers) -> None:
        pass

    async def close(self, *, end_session: bool) -> None:
        pass


class AnnouncingChannel(SilentChannel):
    """A channel whose server announces a change on the stream of each request."""

    async def request(self, message: bytes, headers: Headers, hearer: Hearer, *, is_repeatable: bool = False) -> None:
        _ = hearer.hear(b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}')


class ChildChannel(SilentChannel):
    """A channel whose server is a process of its own, and has resources."""

    is_process = True

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        return Raw(b'{"protocolVersion":"2025-11-25","capabilities":{"resources":{"subscribe":true}}}')

    async def request(self, message: bytes, headers: Headers, hearer: Hearer, *, is_repeatable: bool = False) -> None:
        opened = json.loads(message)
        self.sent.append((opened["method"], opened["params"]["uri"]))
        refused = {"error": {"code": -32002, "message": "no"}} if opened["params"]["uri"] == "x:no" else {"result": {}}
        _ = hearer.hear(json.dumps({"jsonrpc": "2.0", "id": opened["id"], **refused}).encode())


class Bench:
    """A pool without a gateway."""

    def __init__(self, channel: type[SilentChannel] = SilentChannel, **sections: Any) -> None:
        config = parse(configuration("http://127.0.0.1:9/mcp", **sections), "test", {})
        metrics = Metrics("0", ["/mcp"])
        self.tasks = Tasks(metrics)
        self.settings = InForce(RouteSettings(config, config.routes[0]))
        self.pool = Pool(self.settings, channel, metrics, self.tasks)

    def acquire(self, key: PoolKey) -> "asyncio.Task[Session]":
        return later(self.pool.acquire(key, NO_HEADERS))

    async def close(self) -> None:
        self.pool.retire()
        await self.tasks.close()


def key(principal: str, capabilities: bytes = b"{}") -> PoolKey:
    return PoolKey(principal.encode(), b'{"name":"x","version":"1"}', capabilities, ())


async def turns(count: int = 5) -> None:
    """Let the loop run what is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_waiter_that_is_cancelled_as_it_is_served_loses_no_session() -> None:
    bench = Bench(sessions={"max": 1})
    held = await bench.acquire(key("a"))
    first, second = bench.acquire(key("a")), bench.acquire(key("a"))
    await turns()
    bench.pool.release(held, clean=True)  # handed to the first
    first.cancel()
    assert await asyncio.wait_for(second, 1) is held
    bench.pool.release(held, clean=True)
    await bench.close()


async def test_a_waiter_that_is_cancelled_as_there_is_room_passes_the_room_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_STARTS", 1)
    bench = Bench(sessions={"max": 1}, route={"upstream": {"command": ["cat"]}})
    held = await bench.acquire(key("a"))
    first, second = bench.acquire(key("b")), bench.acquire(key("c"))
    await turns()
    bench.pool.release(held, clean=False)  # dropped: the first may open a session
    first.cancel()
    bench.pool.release(await asyncio.wait_for(second, 1), clean=True)
    last = await asyncio.wait_for(bench.acquire(key("d")), 1)  # nothing counts as starting any more
    bench.pool.release(last, clean=True)
    await bench.close()


@pytest.mark.parametrize("method", [mcp.TOOLS_CALL, mcp.LISTEN])
@pytest.mark.parametrize("idle_seconds", [0, 60])
async def test_a_client_that_leaves_during_the_handshake_leaves_no_session_at_the_server(
    upstream: FakeUpstream, begin: Start, method: str, idle_seconds: float
) -> None:
    """The server made a session when it read `initialize`, and only its answer has the id with which to end that."""
    upstream.capabilities = {"tools": {"listChanged": True}}
    stand = await begin(sessions={"idle_seconds": idle_seconds})
    client, go = stand.client(), upstream.holding(mcp.INITIALIZE)
    params = {"name": "tool"} if method == mcp.TOOLS_CALL else {"notifications": {"toolsListChanged": True}}
    leaving = asyncio.create_task(client.post(method, params))
    await upstream.saw(mcp.INITIALIZE)
    await leave(leaving)
    go.set()
    if idle_seconds == 0:
        assert (await upstream.saw("DELETE"))[0].session == "s1"
    else:
        await eventually(lambda: stand.sessions("idle") == 1)
        await client.call()
        assert len(upstream.of(mcp.INITIALIZE)) == 1, "the next call uses it"
    await eventually(lambda: stand.sessions("busy") == 0)
    assert len(upstream.of(mcp.TOOLS_CALL)) == (idle_seconds > 0), "what the client left was not sent"


@pytest.mark.parametrize("how", ["acquire", "open", "adopt"])
async def test_a_caller_is_served_though_the_sweeper_runs_while_it_waits(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session is there before the caller runs, so the sweeper never sees an empty group."""
    monkeypatch.setattr(pools, "_SWEEP_SECONDS", 0)
    bench = Bench(sessions={"max": 1, "idle_seconds": 0})
    pool = bench.pool
    begun: dict[str, Any] = {
        "acquire": lambda: pool.acquire(key("a"), NO_HEADERS),
        "open": lambda: pool.open(key("a"), NO_HEADERS),
        "adopt": lambda: pool.adopt(key("a"), Whereabouts("s1", "2025-11-25", b"1", b"{}", None), NO_HEADERS),
    }
    held = await bench.acquire(key("other"))
    waiting: asyncio.Task[Session] = later(begun[how]())
    await turns()
    before = pool.group(key("a"))
    pool.release(held, clean=False)
    session = await asyncio.wait_for(waiting, 1)
    pool.release(session, clean=False)
    after = pool.group(key("a"))
    assert after is before
    assert not after.sessions
    assert (await asyncio.wait_for(bench.acquire(key("a")), 1)) is not session
    await bench.close()


async def test_callers_that_wait_at_their_own_limit_and_for_room_are_all_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "_SWEEP_SECONDS", 1000.0)
    before, bench = alive(Quota), Bench(sessions={"max": 40, "max_per_principal": 1})
    held = [await bench.acquire(key(f"h{number}")) for number in range(40)]
    waiting = {bench.acquire(key(f"h{number}", b'{"roots":{}}')) for number in range(40)}  # at their principals' limit
    waiting |= {bench.acquire(key(f"w{number}")) for number in range(40)}
    await turns()
    while waiting:
        bench.pool.release(held.pop(0), clean=True)  # idle, and closed for room at once
        served, waiting = await asyncio.wait(waiting, timeout=1, return_when=asyncio.FIRST_COMPLETED)
        assert served
        held += [each.result() for each in served]
    for session in held:
        bench.pool.release(session, clean=True)
    await bench.close()
    assert alive(Quota) == before


@pytest.mark.parametrize("status", [401, 500])
async def test_a_caller_that_the_upstream_refuses_leaves_nothing_behind(
    upstream: FakeUpstream, stand: Stand, status: int
) -> None:
    upstream.on("initialize", lambda turn: turn.reply(status))
    before = alive(Group, Quota)
    for number in range(3):
        client = stand.client(f"Bearer {number}", info={"name": "x" * 10_000, "version": "1"})
        for reply in (await client.call(), await client.post("tools/list"), await client.post(mcp.DISCOVER)):
            assert "error" in reply.final
    assert alive(Group, Quota) == before


async def test_a_caller_that_got_no_session_leaves_nothing_behind() -> None:
    bench = Bench(sessions={"max": 1}, timeouts={"session_wait_seconds": 0.01})
    held = await bench.acquire(key("a"))
    before = alive(Group)
    with pytest.raises(Busy):
        await bench.acquire(key("b"))
    left = bench.acquire(key("c"))
    await turns()
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    del left
    await eventually(lambda: alive(Group) == before, "only that of the first one is left")
    bench.pool.release(held, clean=True)
    await bench.close()


async def test_room_is_taken_before_the_caller_that_waited_for_it_runs() -> None:
    bench = Bench(sessions={"max": 1})
    held = await bench.acquire(key("a"))
    waiting = bench.acquire(key("b"))
    await turns()
    bench.pool.release(held, clean=False)
    (reserved,) = bench.pool.group(key("b")).sessions
    overtaking = bench.acquire(key("c"))
    session = await asyncio.wait_for(waiting, 1)
    assert session is reserved
    assert not overtaking.done()
    bench.pool.release(session, clean=True)
    bench.pool.release(await asyncio.wait_for(overtaking, 1), clean=True)
    await bench.close()


async def test_a_new_caller_does_not_overtake_one_that_waits_in_its_group() -> None:
    bench = Bench(sessions={"max": 1})
    held = await bench.acquire(key("a"))
    first = bench.acquire(key("a"))
    await turns()
    second = bench.acquire(key("a"))
    bench.pool.release(held, clean=True)
    assert bench.pool.take(bench.pool.group(key("a"))) is None
    assert await asyncio.wait_for(first, 1) is held
    assert not second.done()
    bench.pool.release(held, clean=True)
    assert await asyncio.wait_for(second, 1) is held
    bench.pool.release(held, clean=True)
    await bench.close()


async def test_a_change_that_is_announced_in_the_call_of_a_joiner_is_heard() -> None:
    bench = Bench()
    owner = await bench.acquire(key("a"))
    owner.channel.adopt("s1", "2025-11-25")
    group, metrics = owner.group, Metrics("0", ["/mcp"])
    joiner = Session(group, AnnouncingChannel(), bench.settings, metrics, bench.tasks)
    joiner.join(owner)
    group.tools.learn({"a": Tool()}, NO_HEADERS)
    await joiner.run(Call(b"1", b"{}", OwnListener()), NO_HEADERS)
    assert group.tools.by_name is None
    joiner.shared.leave(joiner)
    bench.pool.release(owner, clean=True)
    await bench.close()


async def test_empty_groups_are_forgotten(begin: Start) -> None:
    stand, before = await begin(sessions={"idle_seconds": 0.03}), alive(Group, Quota)
    for number in range(5):
        await stand.client(f"Bearer {number}").call()
    await eventually(lambda: alive(Group, Quota) == before)
    pool = stand.gateway.routes.live["/mcp"].upstream.pool
    assert pool.served > float("-inf"), "what was known of the server as a whole stays known"


async def test_subscriptions_are_sessions_too(upstream: FakeUpstream, begin: Start) -> None:
    upstream.capabilities = {"tools": {"listChanged": True}}
    stand = await begin(sessions={"max": 1}, timeouts={"session_wait_seconds": 0.05})
    chosen = {"notifications": {"toolsListChanged": True}}
    async with stand.client().open(mcp.LISTEN, chosen) as response:
        await response.content.readany()
        assert (await stand.client().call()).status == 503
        assert (await stand.client().post(mcp.LISTEN, chosen)).status == 503
    await upstream.saw("DELETE")
    assert (await stand.client().call()).text == "done"


async def test_a_process_is_subscribed_to_what_its_caller_listens_to_before_each_call() -> None:
    bench = Bench(ChildChannel, route={"upstream": {"command": ["server"]}})
    pool, alice = bench.pool, key("a")
    session = await bench.acquire(alice)
    channel = session.channel
    assert isinstance(channel, ChildChannel)

    async def sent() -> list[tuple[str, str]]:
        channel.sent.clear()
        await pool.prepare(session, None, NO_HEADERS)
        return list(channel.sent)

    one, two, other = Heard(), Heard(), Heard()
    assert await sent() == []
    with pool.hearing(b"b", other, ["x:b"]):
        assert await sent() == [], "it is another caller's"
    with pool.hearing(b"a", one, ["x:1", "x:no"]), pool.hearing(b"a", two, ["x:2", "x:1"]):
        assert await sent() == [(mcp.SUBSCRIBE, uri) for uri in ("x:1", "x:no", "x:2")], "in their order"
        assert await sent() == [], "also what it refused is asked for once"
    with pool.hearing(b"a", two, ["x:2", *(f"x:{number:04}" for number in range(1_000))]):
        told = await sent()
        assert told[:2] == [(mcp.UNSUBSCRIBE, "x:1"), (mcp.UNSUBSCRIBE, "x:no")]
        assert len(told) == MAX_FOLLOWED + 1, "one of them it had"
    assert len(await sent()) == MAX_FOLLOWED, "nothing is listened to any more"
    pool.release(session, clean=True)
    await bench.close()


class Heard:
    """A Watcher that notes what it hears."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def changed(self, method: str, data: bytes) -> None:
        self.words.append(method.rpartition("/")[0])

    def missed(self) -> None:
        self.words.append("missed")

    def deaf(self, *, heard: bool) -> None:
        self.words.append(f"deaf {heard}")


async def test_a_change_in_a_process_reaches_all_listeners_of_its_caller_once_but_a_gap_only_its_own() -> None:
    bench = Bench(ChildChannel, route={"upstream": {"command": ["server"]}})
    session = await bench.acquire(key("a"))
    own, other, stranger = Heard(), Heard(), Heard()
    hearing = bench.pool.hearing
    session.watch(own)
    with hearing(b"a", own), hearing(b"a", other), hearing(b"b", stranger):
        session.hear_side(b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}')
        session.side_reopened()
        session.side_closed(was_open=True)
    session.hear_side(b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}')
    assert own.words == ["notifications/tools", "missed", "deaf True", "notifications/tools"]
    assert (other.words, stranger.words) == (["notifications/tools"], [])
    bench.pool.release(session, clean=False)
    await bench.close()
