"""Is the harness itself right? Not part of the gateway's tests: `pytest bench`."""

import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from bench import cluster, cold, legacy, modern, report, rivals, scenarios, timeline
from bench.__main__ import default_gateway
from bench.http1 import Reader
from bench.load import Connection, Slice, run
from bench.processes import ROOT, Fleet, Pair, Process
from bench.scenarios import FORWARDED, LOCAL, ONE_WORKER, TWO_WORKERS, EndedOutcome, Interleaved, ParkedOutcome

HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
WIRE = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    b"HTTP/1.1 202 Accepted\r\ncontent-length:0\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\nA;x=y\r\nlo\r\n\r\nothe\r\n0\r\n\r\n"
)
EXPECTED = [(200, b"hello"), (202, b""), (200, b"hello\r\n\r\nothe")]


def test_messages_come_out_whole_however_the_bytes_are_cut() -> None:
    for cut in range(1, len(WIRE)):
        reader = Reader()
        messages = reader.feed(WIRE[:cut]) + reader.feed(WIRE[cut:])
        assert [(message.status, message.body) for message in messages] == EXPECTED


class Legacy:
    """A 2025-11-25 client with one session, which opens a connection for each request."""

    def __init__(self, upstream: Process, stack: ExitStack) -> None:
        self._upstream = upstream
        self._stack = stack
        self._session: dict[str, str] = {}

    def send(self, message: dict[str, Any] | None, method: str = "POST") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._upstream.address, timeout=5)
        self._stack.callback(connection.close)
        body = None if message is None else json.dumps({"jsonrpc": "2.0", **message})
        connection.request(method, "/mcp", body, {**HEADERS, **self._session})
        return connection.getresponse()

    def initialize(self) -> http.client.HTTPResponse:
        """The GET stream, opened before `initialized` as the gateway does it."""
        reply = self.send({"id": "i", "method": "initialize", "params": {"protocolVersion": "2025-11-25"}})
        assert json.loads(reply.read())["result"]["protocolVersion"] == "2025-11-25"
        self._session = {"Mcp-Session-Id": reply.headers["Mcp-Session-Id"]}
        stream = self.send(None, "GET")
        assert stream.headers["Content-Type"] == "text/event-stream"
        assert self.send({"method": "notifications/initialized"}).status == 202
        return stream

    def call(self, call_id: int | str, name: str, marker: str) -> http.client.HTTPResponse:
        params = {"name": name, "arguments": {"marker": marker}}
        return self.send({"id": call_id, "method": "tools/call", "params": params})

    def answer(self, nested_id: int | str, marker: str) -> int:
        result = {"action": "accept", "content": {"marker": marker}}
        return self.send({"id": nested_id, "result": result}).status


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Processes, which end with the test."""
    found = Fleet(tmp_path)
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture
def connect(fleet: Fleet) -> Iterator[Callable[[], Legacy]]:
    """Makes clients of a started upstream."""
    with ExitStack() as stack:
        upstream = fleet.upstream()
        yield lambda: Legacy(upstream, stack)


def event(stream: http.client.HTTPResponse) -> dict[str, Any]:
    while not (line := stream.readline()).startswith(b"data:"):
        assert line, "the stream ended"
    message: dict[str, Any] = json.loads(line[5:])
    return message


def text(message: dict[str, Any]) -> str:
    answer: str = message["result"]["content"][0]["text"]
    return answer


def test_each_answer_reaches_the_call_of_its_session(connect: Callable[[], Legacy]) -> None:
    first, second = connect(), connect()
    streams = first.initialize(), second.initialize()
    calls = first.call("a", "ask", "one"), second.call(7, "ask", "two")
    questions = [event(call) for call in calls]
    assert [question["id"] for question in questions] == [0, 0]
    assert [question["params"]["message"] for question in questions] == ["Say one", "Say two"]
    assert second.answer(0, "blue") == 202
    assert first.answer("0", "an id of the wrong type is nobody's") == 202
    assert first.answer(1, "an unknown id is nobody's") == 202
    assert first.answer(0, "red") == 202
    results = [event(call) for call in calls]
    assert [result["id"] for result in results] == ["a", 7]
    assert [text(result) for result in results] == ["one/red", "two/blue"]
    assert calls[0].read() == calls[1].read() == b"\n"
    assert first.send(None, "DELETE").status == 200
    assert streams[0].read() == b""
    assert first.call(1, "echo", "x").status == 404


def test_echo_answers_with_and_without_a_session_as_json_and_as_sse(connect: Callable[[], Legacy]) -> None:
    client = connect()
    for _ in range(2):
        assert text(json.loads(client.call(1, "echo", "hé").read())) == "hé"
        assert text(event(client.call(2, "echo_sse", "ho"))) == "ho"
        client.initialize()


def test_a_modern_probe_is_refused_as_by_a_real_old_server(connect: Callable[[], Legacy]) -> None:
    reply = connect().send({"id": 1, "method": "server/discover", "params": {"_meta": {}}})
    assert (reply.status, json.loads(reply.read())["error"]["code"]) == (400, -32600)


def slices(*cpu_us: float) -> list[Slice]:
    return [Slice(1.0, 10, 1.0, 2.0, one, ()) for one in cpu_us]


def test_a_ratio_and_a_difference_are_those_of_one_round() -> None:
    outcome = Interleaved("x", {LOCAL: slices(1000, 4000, 2000), FORWARDED: slices(1500, 5000, 5000)}, LOCAL)
    assert report.ratios(outcome, FORWARDED) == [1.5, 1.25, 2.5]
    shown = report.text(outcome, markdown=False)
    assert "1.50 (1.25-2.50)" in shown
    assert "forwarding adds 1.00 ms of CPU to a retry (0.50 to 3.00)" in shown
    assert report.as_json(outcome)["forwarding_us"] == [500, 1000, 3000]


def test_without_a_forwarded_row_nothing_is_said_of_forwarding() -> None:
    outcome = Interleaved("x", {scenarios.FORWARDER: slices(100), "mrtr-gateway": slices(150)})
    assert "forwarding" not in report.text(outcome, markdown=False)
    assert "forwarding_us" not in report.as_json(outcome)


def test_forwarded_rounds_are_right_and_the_peer_counts_each(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "SETTLE_SECONDS", 1)
    pair = fleet.pair(default_gateway(), fleet.upstream())
    outcome = scenarios.forward(pair, rounds=2, count=3, clients=2)
    assert report.complaints(outcome) == []
    # The same row when nothing is forwarded: every reply is right, and the row is not what it says.
    outcome = scenarios.forward(Pair(pair.first, pair.first), rounds=1, count=3, clients=2)
    assert report.complaints(outcome) == ["0 retries were served by the peer, expected 5"]
    fleet.check()


def test_a_run_over_three_replicas_forwards_most_retries_and_survives_a_kill(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "LOAD_SECONDS", 0.5)
    upstream = fleet.upstream()
    outcome = cluster.measure_cluster(fleet, default_gateway(), upstream, rounds=1, asks=12, clients=2, calls=9)
    assert report.complaints(outcome) == []
    assert 0 < outcome.forwarded <= 1
    assert outcome.held.held == {"before": 0, "parked": 9}
    assert outcome.killed["answered"] >= 9
    assert (outcome.executions > 30, outcome.doubles) == (True, 0)
    assert "| double executions" in report.text(outcome, markdown=True)
    fleet.check()


def test_a_call_that_is_executed_twice_is_a_finding(fleet: Fleet) -> None:
    upstream = fleet.upstream()
    gateway = fleet.gateway(default_gateway(), upstream)

    async def twice(connection: Connection) -> None:
        for call_id in (1, 2):
            _ = await connection.request(modern.call(call_id, "ask", "the same"))

    assert uvloop.run(run(gateway.address, twice, 1, 1))[1] == []
    assert cluster.executions(upstream) == (2, 1)


def test_two_workers_are_compared_by_the_cpu_of_a_request() -> None:
    outcome = Interleaved("x", {ONE_WORKER: slices(100, 100), TWO_WORKERS: slices(100, 125)}, ONE_WORKER)
    assert "do 1.80 times the work of one by CPU per request (1.60 to 2.00)" in report.text(outcome, markdown=False)


def test_what_stays_is_the_memory_in_the_quiet_less_that_before() -> None:
    row = ParkedOutcome(1, 1, "", rss_kib={"before": 102_400, "parked": 204_800, "after": 204_800, "quiet": 107_520})
    shown = report.text(EndedOutcome(1, {"a gateway": row}), markdown=True)
    assert "| a gateway    | 100    | 200  | 200           | 105   | +5    |" in shown


@pytest.mark.parametrize("tool", ["large", "large_sse"])
def test_a_large_result_is_as_long_as_asked_and_another_one_is_wrong(fleet: Fleet, tool: str) -> None:
    upstream = fleet.upstream()
    gateway = fleet.gateway(default_gateway(), upstream)
    for operation in (modern.large(tool, 100_000), legacy.large(tool, 100_000), legacy.echo("echo")):
        assert uvloop.run(run(gateway.address, operation, 3, 2))[1] == []
    assert len(uvloop.run(run(upstream.address, legacy.large("echo", 100_000), 2, 1))[1]) == 2


def test_a_cold_gateway_has_its_records_from_the_start(fleet: Fleet) -> None:
    gateway = fleet.cold_gateway(fleet.upstream(), 12)
    assert scenarios.sample(gateway, cold.COLD_GAUGE) == 12


def test_a_legacy_session_is_opened_once_and_serves_all_slices(fleet: Fleet) -> None:
    upstream = fleet.upstream()
    echo = legacy.echo_in_session("echo")
    for _ in range(2):
        assert uvloop.run(run(upstream.address, echo, 6, 2))[1] == []


def test_the_echo_over_stdio_answers_requests_only() -> None:
    sent = [
        {"id": 1, "method": "initialize", "params": {}},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/list"},
        {"id": "c", "method": "tools/call", "params": {"name": "echo", "arguments": {"marker": "m1"}}},
        {"id": 4, "method": "ping"},
    ]
    lines = "".join(json.dumps({"jsonrpc": "2.0", **message}) + "\n" for message in sent)
    command = [sys.executable, "-m", "bench.stdio_upstream"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, cwd=ROOT)
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert [reply["id"] for reply in replies] == [1, 2, "c", 4]
    assert text(replies[2]) == "m1"


def test_a_rival_that_is_not_there_is_left_out_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rivals, "PARTS", tmp_path)
    assert rivals.start_rivals(Fleet(tmp_path), Process("upstream", "", None, tmp_path)) == []
    assert capsys.readouterr().err.splitlines() == [
        f"{rival.name} is left out: `scripts/parts {rival.environment}` builds it" for rival in rivals.RIVALS
    ]


def test_a_rival_that_ends_at_its_start_is_left_out_too(
    tmp_path: Path, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(fleet: Fleet, _upstream: Process) -> Process:
        return fleet.start("rival", [sys.executable, "-c", "import no_such_module"], "127.0.0.1:1")

    rival = rivals.Rival("a rival", "modern", "fastmcp", start)
    monkeypatch.setattr(rivals.Rival, "version", lambda _: "1")
    monkeypatch.setattr(rivals, "RIVALS", [rival])
    assert rivals.start_rivals(fleet, Process("upstream", "", None, tmp_path)) == []
    assert fleet.started == []
    assert capsys.readouterr().err == "a rival is left out: rival is not ready (exit status 1):\n"


@pytest.mark.parametrize(("tool", "lost"), [(cluster.STORED, False), ("ask", True)])
def test_a_timeline_shows_what_a_kill_costs(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tool: str, *, lost: bool
) -> None:
    for name, seconds in (("KILL_SECONDS", 1.0), ("RESTART_SECONDS", 2.0), ("END_SECONDS", 4.0)):
        monkeypatch.setattr(timeline, name, seconds)
    monkeypatch.setattr(timeline, "ASKERS", 12)
    outcome = timeline.measure_timeline(fleet, default_gateway(), fleet.upstream(), tool)
    assert report.complaints(outcome) == []
    assert len(outcome.parts) == 8
    assert outcome.held > 0
    assert 1 <= outcome.killed_seconds < 2 <= outcome.restarted_seconds
    totals = outcome.totals()
    assert totals[timeline.CALLED] > 100
    assert totals[cluster.ANSWERED] > 10
    assert (cluster.LOST in totals) is lost
    assert "| double executions" in report.text(outcome, markdown=True)
    fleet.check()
