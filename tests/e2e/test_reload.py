"""SIGHUP to real processes: the file is applied whole or not at all, and no call is disturbed.

What each key does is tested in tests/server/test_reload.py; here are the file, the signal, the log, the metrics and
the processes. The upstream is a real legacy server (py130).
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.wire import ACCEPT, NAMED, Answer, Wire, wire
from tests.parts.launch import PARTS, REPOSITORY, OldServer, die_with_parent, free_port, old_server
from tests.support.cluster import memberships
from tests.support.gateway_process import FAILURES, HELD, STATE_KEY, Gateway, gateway, merged

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not (PARTS / "py130").exists(), reason="scripts/parts has not been run"),
]

NEW_KEY = "1e" * 32
RELOADS = "mcp_gateway_config_reloads_total"
REJECTED = "mcp_gateway_state_rejected_total"
LIMIT = "mcp_gateway_held_calls_limit"
QUESTION = {"question": "Who?"}
RELOADS_UNDER_LOAD = 50


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[OldServer]:
    async with old_server("py130") as running:
        yield running


@dataclass
class Setup:
    """A gateway and a client of its first route."""

    gw: Gateway
    wire: Wire

    async def park(self, by: Wire | None = None) -> Answer:
        answer = await (by or self.wire).call("ask", QUESTION)
        assert answer.asks, answer
        return answer

    async def answer(self, asked: Answer, by: Wire | None = None) -> Answer:
        answers = dict.fromkeys(asked.asks, ACCEPT)
        return await (by or self.wire).call("ask", QUESTION, state=asked.state, answers=answers)

    def config(self, **over: Any) -> dict[str, Any]:
        return merged(self.gw.config, over)

    def route(self, path: str, url: str, **more: Any) -> dict[str, Any]:
        return {"path": path, "upstream": {"url": url}, **more}


@asynccontextmanager
async def setup(server: OldServer, **config: Any) -> AsyncIterator[Setup]:
    async with gateway(server.url, **config) as gw, wire(gw.url) as client:
        yield Setup(gw, client)


def applied(said: list[dict[str, Any]]) -> list[str]:
    """The changed keys, as every process logs them alike."""
    assert {line["event"] for line in said} == {"config.loaded"}, said
    (changed,) = {tuple(line["changed"]) for line in said}
    return list(changed)


def rejected(said: list[dict[str, Any]]) -> str:
    """The reasons why the file was rejected, in one text."""
    assert {(line["event"], line["level"]) for line in said} == {("config.rejected", "error")}, said
    (problems,) = {tuple(line["problems"]) for line in said}
    return "\n".join(problems)


def open_files(gw: Gateway) -> int:
    assert gw.process is not None
    return len(list(Path(f"/proc/{gw.process.pid}/fd").iterdir()))


# A bad file.


BAD_FILES: list[tuple[str, str | None, list[str]]] = [
    ("no YAML", "listen: [", ["is not YAML"]),
    (
        "an unknown key and a bad value",
        '{"hodl": {}, "limits": {"body_bytes": -1}}',
        ["hodl", "limits.body_bytes", "routes"],
    ),
    ("a key that is none", '{"state": {"keys": ["not-a-key-but-secret"]}, "routes": []}', ["state.keys[0]", "routes"]),
    ("no file", None, ["cannot be read"]),
    ("no text", "\udcff", ["is not UTF-8"]),
]


@pytest.mark.parametrize(("text", "words"), [pytest.param(*rest, id=name) for name, *rest in BAD_FILES])
async def test_an_invalid_file_changes_nothing_and_is_logged(
    server: OldServer, text: str | None, words: list[str]
) -> None:
    async with setup(server) as s:
        s.gw.provoked = {"config.rejected"}
        running = asyncio.get_running_loop().create_task(s.wire.call("sleep", {"seconds": 0.5}))
        asked = await s.park()
        path = s.gw.directory / "gateway.yaml"
        if text is None:
            path.unlink()
        else:
            path.write_bytes(text.encode(errors="surrogateescape"))
        said = await s.gw.reload()
        assert len(said) == 1
        assert all(word in rejected(said) for word in words)
        assert "secret" not in s.gw.stderr
        assert await s.gw.metric(RELOADS, outcome="rejected") == 1
        assert await s.gw.metric(RELOADS, outcome="applied") == 0
        assert (await s.answer(asked)).text == NAMED
        assert (await running).text == "slept 0.5"
        assert (await s.gw.reload(s.gw.config))[0]["note"] == "nothing changed"
        assert await s.gw.metric(RELOADS, outcome="applied") == 1


async def test_a_change_that_needs_a_restart_rejects_the_whole_file(server: OldServer) -> None:
    async with setup(server) as s:
        s.gw.provoked = {"config.rejected"}
        new = s.config(listen=f"127.0.0.1:{free_port()}", workers=2, log={"level": "debug"}, hold={"max_calls": 5})
        why = rejected(await s.gw.reload(new))
        assert why == "listen, workers, log.level: cannot change while the process runs; restart to change"
        assert await s.gw.metric(LIMIT) == 10_000, "nothing is half applied"
        assert (await s.wire.call("echo", {"text": "x"})).text == "x"


async def test_a_reload_is_logged_without_the_values(server: OldServer) -> None:
    async with setup(server) as s:
        before = s.gw.log("server.started")[0]["configuration"]
        new = s.config(state={"keys": [STATE_KEY, NEW_KEY]}, hold={"max_calls": 7}, limits={"body_bytes": 5_000})
        said = await s.gw.reload(new)
        assert applied(said) == ["state.keys", "hold.max_calls", "limits.body_bytes"]
        assert said[0]["configuration"] != before
        assert NEW_KEY not in s.gw.stderr
        assert await s.gw.metric(LIMIT) == 7
        async with s.gw.http.post(s.gw.url, data=b"x" * 6_000) as response:
            assert response.status == 413
        assert (await s.wire.call("echo", {"text": "x" * 1_000})).text


async def test_a_gateway_without_a_file_logs_that_it_has_none(server: OldServer, tmp_path: Path) -> None:
    listen, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    async with aiohttp.ClientSession() as http:
        config = {"listen": listen, "admin": admin, "routes": [{"path": "/mcp"}]}
        gw = Gateway(config, tmp_path, http)
        with (tmp_path / "stderr").open("ab") as err:
            gw.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", "serve", "--upstream", server.url),
                *("--listen", listen, "--admin", admin),
                cwd=REPOSITORY,
                stderr=err,
                env={**os.environ, "GATEWAY_LOG__FORMAT": "json", "GATEWAY_HOLD__DRAIN_DELAY_SECONDS": "0"},
                preexec_fn=die_with_parent,
            )
        try:
            await gw.until(gw._is_ready, "ready", 15)
            (line,) = await gw.reload()
            assert (line["event"], line["level"]) == ("config.rejected", "warning")
            assert "of --config again, and this process has none" in line["note"]
            async with wire(gw.url) as client:
                assert (await client.call("echo", {"text": "x"})).text == "x"
            await gw.end()
        finally:
            await gw.kill()


# Keys.


async def test_keys_are_rotated_over_two_replicas_in_three_phases(server: OldServer) -> None:
    """A call that waits through phases 1 and 2, and every call in between, is answered, mostly elsewhere."""
    async with AsyncExitStack() as stack:
        both = [await stack.enter_async_context(setup(server, replica=replica)) for replica in memberships(2)]
        one, two = both
        early = [await one.park(), await two.park()]
        sealed_new: list[Answer] = []
        for keys in ([STATE_KEY, NEW_KEY], [NEW_KEY, STATE_KEY]):
            for s in both:
                assert applied(await s.gw.reload(s.config(state={"keys": keys}))) == ["state.keys"]
                for here, there in ((one, two), (two, one)):
                    assert (await there.answer(await here.park())).text == NAMED
            sealed_new = [await one.park(), await two.park()]
        assert (await two.answer(early[0])).text == NAMED
        for s in both:
            await s.gw.reload(s.config(state={"keys": [NEW_KEY]}))
            for here, there in ((one, two), (two, one)):
                assert (await there.answer(await here.park())).text == NAMED
        assert (await two.answer(sealed_new[0])).text == NAMED
        assert (await one.answer(sealed_new[1])).text == NAMED
        assert [await s.gw.metric(REJECTED) for s in both] == [0, 0]
        assert (await two.answer(early[1])).error["code"] == -32602, "its key is gone"
        assert await two.gw.metric(REJECTED, reason="unknown_key") == 1


async def test_a_key_file_is_read_again(server: OldServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(STATE_KEY)
    async with setup(server, state={"keys": [], "keys_file": str(keys)}) as s:
        asked = await s.park()
        keys.write_text(f"{NEW_KEY}\n{STATE_KEY}\n")
        assert applied(await s.gw.reload()) == ["state.keys"]
        assert (await s.answer(asked)).text == NAMED
        newer = await s.park()
        assert newer.state.split(".")[1] != asked.state.split(".")[1]
        assert (await s.answer(newer)).text == NAMED


# Routes.


async def test_waiting_calls_survive_added_changed_and_removed_routes(server: OldServer) -> None:
    async with old_server("py130") as other, AsyncExitStack() as stack:
        s = await stack.enter_async_context(setup(server))
        new, changed = s.route("/new", server.url), s.route("/mcp", other.url)
        by_new = await stack.enter_async_context(wire(f"{s.gw.base}/new"))
        assert (await by_new.call("echo", {"text": "x"})).refusal == (404, -32601)
        routes = [*s.gw.config["routes"], new]
        assert applied(await s.gw.reload(s.config(routes=routes))) == ["routes[/new] added"]
        assert (await by_new.call("echo", {"text": "x"})).text == "x"
        before, waiting = await s.park(), await s.park(by_new)
        asked_at_other = len(other.ledger("run", "ask"))
        said = await s.gw.reload(s.config(routes=[changed]))
        assert applied(said) == ["routes[/mcp].upstream.url", "routes[/new] removed"]
        assert (await by_new.call("ask", QUESTION)).refusal == (404, -32601)
        after = await s.park()
        assert len(other.ledger("run", "ask")) == asked_at_other + 1
        for asked, by in ((waiting, by_new), (after, s.wire), (before, s.wire)):
            assert (await s.answer(asked, by)).text == NAMED
        assert len(other.ledger("run", "ask")) == asked_at_other + 1
        await s.gw.settled()


# Processes.


async def test_all_workers_reload_the_file_including_those_that_start_later(server: OldServer) -> None:
    async with setup(server, workers=2) as s:
        s.gw.provoked = {"config.rejected"}
        asked = [await s.park() for _ in range(4)]
        said = await s.gw.reload(s.config(hold={"max_calls": 7}, limits={"body_bytes": 5_000}))
        assert applied(said) == ["hold.max_calls", "limits.body_bytes"]
        assert await s.gw.metric(LIMIT) == 14
        assert await s.gw.metric(RELOADS, outcome="applied") == 2
        for each in asked:
            assert (await s.answer(each)).text == NAMED
        assert "restart" in rejected(await s.gw.reload(s.config(workers=3)))
        _ = s.gw.write("no: configuration")
        newest = {line["worker"]: line["pid"] for line in s.gw.log("worker.started")}
        os.kill(newest[0], signal.SIGKILL)

        async def restarted() -> bool:
            return len(s.gw.log("worker.started")) == 3 and await s.gw.ready() == 200

        await s.gw.until(restarted, "another worker is ready", 15)
        assert await s.gw.metric(LIMIT) == 14, "it has what the others have, not what the supervisor began with"
        configurations = [line["configuration"] for line in s.gw.log("server.started")]
        assert configurations[2] == said[0]["configuration"] != configurations[0]


async def test_a_reload_during_a_drain_is_ignored(server: OldServer) -> None:
    async with setup(server, hold={"drain_delay_seconds": 60, "drain_seconds": 60}) as s:
        asked = await s.park()
        _ = await s.gw.reload(s.config(hold={"drain_delay_seconds": 0, "drain_seconds": 20}))
        s.gw.terminate()

        async def drains() -> bool:
            return bool(s.gw.log("server.draining"))

        await s.gw.until(drains, "it drains")
        (line,) = s.gw.log("server.draining")
        assert (line["delay_seconds"], line["deadline_seconds"]) == (0, 20), "by the newest file"
        (line,) = await s.gw.reload(s.config(routes=[s.route("/other", server.url)]))
        assert (line["event"], line["level"]) == ("config.rejected", "warning")
        assert "reload in mid-drain" in line["note"]
        assert (await s.answer(asked)).text == NAMED
        assert await s.gw.exited() == 0


async def test_fifty_reloads_under_load_fail_no_request_and_leak_no_descriptor(server: OldServer) -> None:
    async with setup(server, hold={"linger_seconds": 0.1}, sessions={"idle_seconds": 1}) as s:

        async def calls(work: Callable[[], Awaitable[str]], good: str) -> int:
            count = 0
            while not over.is_set():
                assert await work() == good
                count += 1
            return count

        async def plain() -> str:
            return (await s.wire.call("echo", {"text": "x"})).text

        async def asking() -> str:
            return (await s.answer(await s.park())).text

        async def idle_files() -> int:
            await s.gw.settled()
            values: list[int] = []

            async def is_swept() -> bool:
                values.append(open_files(s.gw))
                return await s.gw.metric("mcp_gateway_sessions") == 0 and values[-2:] == [values[-1]] * 2

            await s.gw.until(is_swept, "all sessions are swept", 10)
            return values[-1]

        assert (await asking(), await plain()) == (NAMED, "x")
        before = await idle_files()
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        load = [loop.create_task(calls(plain, "x")) for _ in range(3)]
        load += [loop.create_task(calls(asking, NAMED)) for _ in range(3)]
        waiting = await s.park()
        first = s.gw.config
        for number in range(RELOADS_UNDER_LOAD):
            more = s.route(f"/r{number}", server.url)
            mcp = {**first["routes"][0], "forward_headers": ["x-a"] if number % 2 else []}
            new = merged(first, {"hold": {"ttl_seconds": 100 + number}, "routes": [mcp, more]})
            assert "routes[/mcp].forward_headers" in applied(await s.gw.reload(new)) or number == 0
        assert (await s.answer(waiting)).text == NAMED
        over.set()
        counts = await asyncio.gather(*load)
        assert all(counts), counts
        _ = await s.gw.reload(first)
        assert await s.gw.metric(RELOADS, outcome="applied") == RELOADS_UNDER_LOAD + 1
        assert await s.gw.metric(FAILURES) == await s.gw.metric(HELD) == 0
        # A connection of each client, as before; no more than a few that are about to be closed.
        _ = await idle_files()

        async def is_few() -> bool:
            return open_files(s.gw) <= before + 8

        await s.gw.until(is_few, f"no more than 8 files beside the {before} of before", 10)
