"""`mrtr-gateway wrap` as its host sees it: both eras on both sides, what is refused, and how it ends."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.protocol.errors import clean
from tests.parts.launch import is_alive
from tests.support.fake_upstream import FakeUpstream
from tests.support.host import JSON, META, Host, call, fake, host, initialize, legacy, modern
from tests.support.workbench import eventually

pytestmark = pytest.mark.processes

OLD: Final = fake("fake_stdio.py")
NEW: Final = fake("fake_modern_stdio.py")
ANN: Final = {"action": "accept", "content": {"name": "Ann"}}


@pytest.fixture
async def old() -> AsyncIterator[Host]:
    """A host of a legacy child; the host decides its own era by its first message."""
    async with host(OLD) as running:
        yield running


@pytest.fixture
async def new() -> AsyncIterator[Host]:
    """A host of a modern child."""
    async with host(NEW) as running:
        yield running


async def gone(pid: int) -> None:
    await eventually(lambda: not is_alive(pid), "it has ended", 60)


# --- a modern host of a legacy server ---


async def test_a_modern_host_reads_what_a_legacy_child_says_of_itself(old: Host) -> None:
    answer = await old.ask(modern("server/discover"))
    assert answer["result"]["supportedVersions"] == ["2026-07-28"]
    assert answer["result"]["_meta"][META + "serverInfo"]["name"] == "fake"


async def test_a_late_question_of_a_cancelled_call_is_no_question_of_the_next_one(old: Host) -> None:
    first = await old.text(call("pid", 1))
    old.write(call("abandoned", 2, meta={"progressToken": "runs"}))
    _ = await old.until(method="notifications/progress")
    old.write({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}})
    told = json.loads(await old.text(call("haunted", 3)))
    assert "may be that call's" in told["error"]["message"]
    assert old.events("upstream.failed")
    assert await old.text(call("pid", 4)) != first, "the child may still run the cancelled call"
    asked = await old.ask(call("ask", 5))
    assert asked["result"]["resultType"] == "input_required"


async def test_a_cancelled_call_does_not_cost_the_child_its_memory(old: Host) -> None:
    """The child never answers the cancelled call, as servers of the TypeScript SDK do."""
    pid = await old.text(call("pid"))
    asked = await old.ask(call("ask", 2))
    assert asked["result"]["resultType"] == "input_required"
    # It waits for the answer to its question, which the cancellation gives it.
    old.write(call("echo", 3), {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 3}})
    (key,) = asked["result"]["inputRequests"]
    more = {"requestState": asked["result"]["requestState"], "inputResponses": {key: ANN}}
    assert await old.text(call("ask", 4, more=more)) == "Ann"
    assert await old.text(call("pid", 5)) == pid


async def test_a_modern_host_may_have_the_era_chosen_for_its_server() -> None:
    async with host(OLD, "--era", "bridge") as running:
        assert await running.text(call("echo", x=1)) == '{"x": 1}'


async def test_a_host_that_gives_up_its_probe_goes_on_as_a_legacy_host(old: Host) -> None:
    _ = await old.ask(modern("server/discover"))
    answer = await old.ask(initialize(7))
    assert answer["result"]["protocolVersion"] == "2025-06-18"
    assert await old.text(legacy("tools/call", 8, name="echo", arguments={"x": 1})) == '{"x": 1}'


@pytest.mark.parametrize("command", [OLD, NEW], ids=["legacy", "modern"])
async def test_a_child_of_a_modern_host_that_died_is_started_again(command: list[str]) -> None:
    async with host(command) as running:
        lost = await running.ask(call("die"))
        assert "had effects" in lost["error"]["message"]
        assert await running.text(call("echo", 2, x=1)) == '{"x": 1}'


# --- a legacy host of a legacy server ---


async def test_a_batch_of_a_legacy_host_is_refused(old: Host) -> None:
    _ = await old.ask(initialize())
    old.write([legacy("ping", 1), legacy("ping", 2)])
    assert "batch" in (await old.read())["error"]["message"]
    assert await old.ask(legacy("ping", 1)) == {"jsonrpc": "2.0", "id": 1, "result": {}}


async def test_the_end_of_a_relayed_child_is_the_end_of_the_session() -> None:
    async with host(OLD) as running:
        _ = await running.ask(initialize())
        lost = await running.ask(legacy("tools/call", 5, name="die", arguments={}))
        assert "ended" in lost["error"]["message"]
        assert await running.ended() == 0
        assert running.events("child.ended")


@pytest.mark.parametrize("first", [initialize(), modern("server/discover")], ids=["legacy host", "modern host"])
async def test_a_command_that_cannot_start_is_the_same_news_to_every_host(first: JSON) -> None:
    async with host(["no-such-program"], expects=1) as running:
        error = (await running.ask(first))["error"]
        missing = clean(f"there is no program no-such-program in PATH ({os.environ['PATH']})", 600)
        said = f"The upstream no-such-program cannot be started: {missing}"
        assert error["message"] == said, "without the route, of which the host knows nothing"
        running.stdin.close()
        _ = await running.ended()
        (ended,) = running.events("child.ended")
        assert json.dumps(ended).count(os.environ["PATH"]) == 1
        assert "probe URL" not in json.dumps(running.log)
        assert ("probe --stdio -- COMMAND" in json.dumps(running.log)) is ("_meta" in first["params"])


@pytest.mark.parametrize(("command", "code"), [(["no-such-program"], 1), (OLD, 0)], ids=["missing", "there"])
async def test_a_missing_program_is_told_before_the_host_has_asked(command: list[str], code: int) -> None:
    async with host(command, expects=code) as running:
        running.stdin.close()
        _ = await running.ended()
        causes = [each["cause"] for each in running.events("upstream.failed")]
        assert [os.environ["PATH"] in each for each in causes] == [True] * code


@pytest.mark.parametrize("first", [initialize(), modern("tools/list")], ids=["legacy host", "modern host"])
@pytest.mark.parametrize(
    ("command", "options", "why"),
    [(["sh", "-c", "exit 3"], (), "ended (exit code 3)"), ((), ("--upstream", "http://127.0.0.1:1/"), "be reached")],
    ids=["command", "URL"],
)
async def test_a_server_that_never_opened_a_session_is_a_failure_and_told(
    command: list[str], options: tuple[str, ...], why: str, first: JSON
) -> None:
    async with host(command, *options, expects=1) as running:
        assert why in (await running.ask(first))["error"]["message"]
        running.stdin.close()
        _ = await running.ended()
        (failed,) = running.events("upstream.failed")
        assert why in failed["cause"]
        assert failed["fix"]


@pytest.mark.parametrize("first", [initialize(), modern("tools/list")], ids=["legacy host", "modern host"])
async def test_a_server_that_answers_the_probe_alone_has_opened_no_session(first: JSON) -> None:
    async with FakeUpstream() as upstream:
        for method in ("server/discover", "initialize"):
            upstream.on(method, lambda turn: turn.error(-32601, "no"))
        async with host((), "--upstream", upstream.url, expects=1) as running:
            assert "refused `initialize`" in (await running.ask(first))["error"]["message"]


@pytest.mark.parametrize("first", [initialize(), modern("server/discover")], ids=["legacy host", "modern host"])
async def test_a_host_whose_configuration_has_brief_errors_finds_the_rest_in_its_log(first: JSON) -> None:
    upstream = {"command": ["no-such-program"]}
    async with host(config={"errors": "brief", "routes": [{"upstream": upstream}]}, expects=1) as running:
        said = (await running.ask(first))["error"]["message"]
        assert "no-such-program" not in said
        (line,) = [each for each in running.events("error.shortened") if each["request_id"] in said]
        assert "no-such-program" in line["cause"]


async def test_a_brief_error_does_not_tell_the_limit_of_a_message() -> None:
    limits = {"body_bytes": 2_000}
    async with host(
        config={"errors": "brief", "limits": limits, "routes": [{"upstream": {"command": OLD}}]}
    ) as running:
        running.write(legacy("tools/list", 1, filler="x" * 2_000))
        said = (await running.read())["error"]["message"]
        assert said.startswith("The message is too large (requestId ")


# --- a modern server ---


async def test_requests_of_a_modern_host_pass_to_a_modern_child(new: Host) -> None:
    answer = await new.ask(modern("server/discover", "a"))
    assert answer["result"]["capabilities"] == {"tools": {"listChanged": True}}
    declared: Any = await new.text(call("meta", "b"))
    assert '"name": "host"' in declared


async def test_answers_of_a_modern_child_come_in_its_own_order(new: Host) -> None:
    new.write(call("later", 1), call("now", 2))
    assert [(await new.read())["id"], (await new.read())["id"]] == [1, 2]
    assert await new.text(call("echo", 3)) == "{}"


async def test_a_host_is_told_of_a_server_that_knows_no_version_of_it() -> None:
    async with host(fake("fake_modern_stdio.py", "--refuse")) as running:
        answer = await running.ask(modern("server/discover"))
        assert answer["error"]["code"] == -32022
        assert answer["error"]["data"]["supported"] == ["2027-01-01"]


# --- what is refused ---


async def test_a_line_that_is_not_json_rpc_gets_a_parse_error_and_the_next_one_is_served(old: Host) -> None:
    old.stdin.write(b'{"jsonrpc": "2.0", "id"\n[]\n"text"\n\xff\xfe\n\n')
    for _ in range(4):
        answer = await old.read()
        assert answer["error"]["code"] == -32700
        assert "id" not in answer
    assert await old.text(call("echo", 2, x=1)) == '{"x": 1}'


async def test_a_line_of_a_gigabyte_is_refused_and_not_kept(old: Host) -> None:
    _ = await old.text(call("echo", 1))
    before = peak_bytes(old)
    piece = b"x" * (1 << 20)
    for _ in range(1024):
        old.stdin.write(piece)
        await old.stdin.drain()
    old.stdin.write(b"\n")
    answer = await old.read()
    assert answer["error"]["code"] == -32700
    assert "limits.body_bytes" in answer["error"]["message"]
    assert peak_bytes(old) - before < 64 << 20
    assert await old.text(call("echo", 2, x=1)) == '{"x": 1}'


def peak_bytes(running: Host) -> int:
    """The largest memory that the gateway ever had."""
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


async def test_a_response_that_nothing_asked_for_gets_no_answer(old: Host) -> None:
    _ = await old.ask(modern("server/discover"))
    old.write({"jsonrpc": "2.0", "id": 1, "result": {}}, {"jsonrpc": "2.0", "method": "notifications/unknown"})
    assert (await old.ask(call("echo", 2)))["id"] == 2


# --- what a child gets, and what the gateway opens ---


async def test_the_environment_of_the_host_passes_to_the_child_but_for_the_secrets_of_the_gateway() -> None:
    environment = {"MY_TOKEN": "for the server", "GATEWAY_LOG__LEVEL": "info", "MRTR_STATE_KEY": "f0" * 32}
    async with host(OLD, environment=environment) as running:
        given = await running.text(call("environment"))
    assert "for the server" in given
    assert "GATEWAY_" not in given
    assert "MRTR_STATE_KEY" not in given


def internet_sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets that are not local ones."""
    found = set()
    targets = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        found |= {inode for line in lines if f"socket:[{(inode := line.split()[9])}]" in targets}
    return found


async def test_no_port_is_opened(old: Host) -> None:
    _ = await old.text(call("echo"))
    assert internet_sockets(old.process.pid) == set()


# --- the end ---


async def test_a_running_call_may_finish_after_the_host_has_closed_its_end() -> None:
    async with host(NEW) as running:
        running.write(call("later", 1))
        running.write(call("now", 2))
        running.stdin.close()
        assert {(await running.read())["id"], (await running.read())["id"]} == {1, 2}
        assert await running.ended() == 0


@pytest.mark.parametrize("command", [OLD, NEW], ids=["legacy", "modern"])
async def test_a_legacy_host_may_write_everything_at_once_and_close_its_end(command: list[str]) -> None:
    async with host(command) as running:
        running.write(initialize())
        running.write({"jsonrpc": "2.0", "method": "notifications/initialized"})
        running.write(legacy("tools/call", 5, name="echo", arguments={"x": 1}))
        running.stdin.close()
        assert "result" in await running.read()
        answer = await running.read()
        assert (answer["id"], answer["result"]["content"][0]["text"]) == (5, '{"x": 1}')
        assert await running.ended() == 0


def without_end(*messages: object) -> bytes:
    """These messages as lines, of which the last has no line end."""
    return b"\n".join(json.dumps(message).encode() for message in messages)


@pytest.mark.parametrize("command", [OLD, NEW], ids=["legacy", "modern"])
async def test_the_last_line_of_a_host_needs_no_line_end(command: list[str]) -> None:
    ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    for messages in (
        [call("echo", 5, x=1)],
        [initialize(), ready, legacy("tools/call", 5, name="echo", arguments={})],
    ):
        async with host(command) as running:
            running.stdin.write(without_end(*messages))
            running.stdin.close()
            assert "result" in await running.until(id=5)
            assert await running.ended() == 0


async def test_the_last_line_of_a_child_needs_no_line_end(old: Host, new: Host) -> None:
    assert await old.text(call("echo", 1, then="end unfinished")) == '{"then": "end unfinished"}'
    assert await new.text(call("last", 1)) == "last"
    async with host(OLD) as running:
        _ = await running.ask(initialize())
        given = {"name": "echo", "arguments": {"then": "end unfinished"}}
        assert await running.text(legacy("tools/call", 5, **given)) == '{"then": "end unfinished"}'
        assert await running.ended() == 0
    async with host(NEW) as running:
        _ = await running.ask(initialize())
        assert await running.text(legacy("tools/call", 5, name="last", arguments={})) == "last"


async def test_a_question_is_cancelled_when_the_host_closes_its_end() -> None:
    """Else the end would wait for hold.drain_seconds."""
    config = {"hold": {"drain_seconds": 3600}, "routes": [{"upstream": {"command": OLD}}]}
    async with host(config=config) as running:
        asked = await running.ask(call("ask"))
        assert asked["result"]["resultType"] == "input_required"


async def test_a_question_to_a_legacy_host_does_not_delay_the_end() -> None:
    config = {"hold": {"drain_seconds": 3600}, "routes": [{"upstream": {"command": OLD}}]}
    async with host(config=config) as running:
        _ = await running.ask(initialize())
        running.write(legacy("tools/call", 5, name="ask", arguments={}))
        _ = await running.until(method="elicitation/create")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_the_gateway_with_its_child(number: signal.Signals) -> None:
    async with host(OLD) as running:
        pid = int(await running.text(call("pid")))
        running.write(call("ask", 2))
        _ = await running.read()
        running.process.send_signal(number)
        assert await running.ended() == 0
        await gone(pid)


async def test_signals_until_the_very_end_do_not_change_the_exit_code() -> None:
    async with host(OLD) as running:
        _ = await running.text(call("pid"))
        process = running.process
        while process.returncode is None:
            with suppress(ProcessLookupError):
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    os.kill(process.pid, number)  # not `send_signal`, which would collect the exit code itself
            await asyncio.sleep(0.001)
        assert process.returncode == 0


async def test_the_gateway_ends_when_nobody_reads_its_output() -> None:
    async with host(OLD) as running:
        pid = int(await running.text(call("pid")))
        running.stdout._transport.close()  # type: ignore[attr-defined]
        running.write(call("echo", 2))
        assert await running.ended() == 0
        await gone(pid)


async def test_a_killed_gateway_leaves_no_child() -> None:
    async with host(OLD, expects=-signal.SIGKILL) as running:
        pid = int(await running.text(call("pid")))
        running.process.kill()
        _ = await running.ended()
        await gone(pid)


async def test_the_gateway_serves_files_in_place_of_pipes(tmp_path: Path) -> None:
    """As in `wrap ... < in > out`: libuv aborts a process that gives it a file as a pipe."""
    given, taken = tmp_path / "in", tmp_path / "out"
    given.write_text(json.dumps(call("echo", x=1)) + "\n")
    with given.open("rb") as stdin, taken.open("wb") as stdout:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "wrap", "--log-level", "error", "--", *OLD), stdin=stdin, stdout=stdout
        )
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    assert json.loads(taken.read_text())["result"]["content"][0]["text"] == '{"x": 1}'
