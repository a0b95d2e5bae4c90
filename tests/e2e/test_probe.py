"""`mrtr-gateway probe` against real servers, and the gateway's behaviour compared with the report."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio

from gateway.__main__ import main
from gateway.config import parse
from gateway.tools.probe.report.findings import ProbedServer, ProbeReport, report
from tests.e2e.wire import ACCEPT, NAMED, wire
from tests.parts.launch import REPOSITORY, OldServer, old_server, stdio_server
from tests.support.gateway_process import gateway
from tests.support.probing import answers, as_text, check, look
from tests.support.workbench import Client

pytestmark = pytest.mark.real

NO_TOOL = "mrtr-gateway-probe-no-such-tool"
IDLE_SECONDS = 1.0
"""The idle timeout: long for a working server, short for a test that waits for a lost question."""


class Row(NamedTuple):
    """The expected report on a server."""

    state: str
    era: str
    transport: str
    questions: str
    replica_death: str
    progress: str
    subscriptions: str
    old_clients: str = "yes"


HTTP = "streamable-http"
HELD = ("yes", "partly", "yes", "yes")
RESUMED = ("yes", "yes", "yes", "yes")
STATELESS = ("no", "not offered", "yes", "no")
JSON = ("partly", "partly", "no", "yes")
TABLE = {
    "py130": Row("ok", "old", HTTP, *HELD),
    "py110": Row("ok", "old", HTTP, *HELD),
    "fm3": Row("ok", "old", HTTP, *HELD),
    "ts132-store": Row("ok", "old", HTTP, *RESUMED),
    "everything": Row("ok", "old", HTTP, *RESUMED),
    "py130 --stateless": Row("warning", "old", HTTP, *STATELESS),
    "ts132 --stateless": Row("warning", "old", HTTP, *STATELESS),
    "py130 --json": Row("warning", "old", HTTP, *JSON),
    "ts132 --json": Row("warning", "old", HTTP, *JSON),
    "py130-sse": Row("ok", "old", "sse", *HELD),
    "ts132-sse": Row("ok", "old", "sse", *HELD),
    "modern-py": Row("ok", "both", HTTP, "yes", "yes", "yes", "yes"),
    "modern-ts": Row("ok", "modern", HTTP, "yes", "yes", "yes", "yes"),
    "dual-py": Row("ok", "both", HTTP, "yes", "yes", "yes", "yes"),
    "dual-fm4": Row("ok", "both", HTTP, "yes", "yes", "yes", "yes"),
    "modern-ts-both": Row("ok", "both", HTTP, "yes", "yes", "yes", "yes"),
}
OLD = [name for name, row in TABLE.items() if row.era == "old" and name != "everything"]
VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": VERSIONS[0], "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[dict[str, OldServer]]:
    async with AsyncExitStack() as stack:
        entering = [stack.enter_async_context(old_server(*name.split())) for name in TABLE]
        yield dict(zip(TABLE, await asyncio.gather(*entering), strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def found(servers: dict[str, OldServer]) -> dict[str, ProbedServer]:
    """Each server, probed once."""
    looking = [look(server.url, {"X-Tenant": "red"}, seconds=10.0) for server in servers.values()]
    return dict(zip(servers, await asyncio.gather(*looking), strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(servers: dict[str, OldServer], found: Mapping[str, ProbedServer]) -> AsyncIterator[Client]:
    """A modern client of a gateway before all of them, each with the configuration that its probe gave."""
    routes = []
    for name in servers:
        (route,) = parse(found[name].configuration or "", name, {}).routes
        assert route.upstream.url is not None
        routes.append({"path": path(name), "upstream": {"url": route.upstream.url}})
    async with (
        gateway("", routes=routes, timeouts={"idle_seconds": IDLE_SECONDS}) as gw,
        wire(gw.base) as bare,
    ):
        yield bare


def path(name: str) -> str:
    return "/" + name.replace(" --", "-")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", TABLE)
async def test_a_probe_identifies_a_real_server(
    name: str, found: dict[str, ProbedServer], servers: dict[str, OldServer]
) -> None:
    it, row, said = found[name], TABLE[name], answers(found[name])
    assert it.server is not None, it.checks
    features = (said[key] for key in list(Row.__annotations__)[3:])
    assert Row(it.state, it.server.era, it.server.transport, *features) == row, it
    if row.era == "old":
        assert it.server.versions == VERSIONS[name == "py110" :]
        assert it.server.sessions == ("--stateless" not in name)
        assert it.server.json_replies == ("--json" in name)
        assert it.server.replays is (True if "yes" in row.replica_death else None)
        assert 0 < it.server.ephemeral_tools < it.server.tools
        assert it.server.ends_sessions is (True if it.server.sessions and row.transport == HTTP else None)
    # fastmcp's middleware sees a call before its name is looked up.
    assert {run["tool"] for run in servers[name].ledger("run")} <= {NO_TOOL}, "nothing ran"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_probe_tells_where_the_bridge_can_help(found: dict[str, ProbedServer]) -> None:
    """tests/e2e/test_era_bridge.py makes the calls that prove this."""
    told = {name: server.legacy_sessions for name, it in found.items() if (server := it.server) is not None}
    both = {name: sessions for name, sessions in told.items() if sessions is not None}
    assert both == {"modern-py": False, "modern-ts-both": False, "dual-py": True, "dual-fm4": True}
    for name, sessions in both.items():
        assert ("set era: bridge" in check(found[name], "era").fix) == sessions


async def words(client: Client, name: str, tool: str) -> str:
    """The tool's result for an answered question, or the reason why there is none."""
    there = client.on(client.url + path(name))
    asked = await there.call(tool)
    if "error" in asked.final:
        return str(asked.error["data"]["reason"])
    return (await there.answer(asked, ACCEPT)).text


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", OLD)
async def test_the_gateway_handles_questions_as_the_probe_predicts(
    name: str, client: Client, found: dict[str, ProbedServer]
) -> None:
    match answers(found[name])["questions"]:
        case "yes":
            said = await asyncio.gather(words(client, name, "ask"), words(client, name, "ask_get"))
            assert set(said) == {NAMED}
        case "partly":
            said = await asyncio.gather(words(client, name, "ask"), words(client, name, "ask_get"))
            assert said == ["call_lost", NAMED]
        case _:
            assert await words(client, name, "ask") == "upstream_cannot_ask"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", OLD)
async def test_the_gateway_handles_progress_as_the_probe_predicts(
    name: str, client: Client, found: dict[str, ProbedServer]
) -> None:
    predicted = answers(found[name])["progress"] == "yes"
    # Old SDKs report progress on the session's GET stream, where the result of the call may overtake it.
    for _ in range(20 if name == "py110" else 1):
        answer = await client.on(client.url + path(name)).call(
            "progress", {"steps": 2}, meta={"progressToken": "token"}
        )
        assert answer.result["resultType"] == "complete"
        if (is_told := len(answer.messages) > 1) == predicted:
            break
    assert is_told == predicted


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["py130", "modern-py", "modern-ts", "modern-ts-both"])
async def test_the_gateway_serves_legacy_clients_as_the_probe_predicts(
    name: str, client: Client, found: dict[str, ProbedServer]
) -> None:
    headers = {"Accept": "application/json, text/event-stream"}
    async with client.http.post(client.url + path(name), json=INITIALIZE, headers=headers) as response:
        served = response.status == 200
        session = response.headers.get("Mcp-Session-Id")
    assert served == (answers(found[name])["old_clients"] == "yes")
    if session is not None:
        await client.http.delete(client.url + path(name), headers={"Mcp-Session-Id": session})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_that_asks_for_a_token_is_explained() -> None:
    async with old_server("py130-auth") as server:
        it = await look(server.url)
        authorization = check(it, "authorization")
        assert (it.state, authorization.state) == ("failed", "failed")
        assert "HTTP 401, WWW-Authenticate: Bearer" in authorization.found
        assert f"Tokens are issued by {server.url.removesuffix('mcp')}, scopes: user" in authorization.why
        refused = await look(server.url, {"Authorization": "Bearer not-the-right-one"})
        assert check(refused, "authorization").why.startswith("The server rejects the credential.")
        assert "right-one" not in repr(refused)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_that_checks_the_host_is_explained(servers: dict[str, OldServer]) -> None:
    """The Python SDK checks the host if it listens on loopback: 127.0.0.2 is not one of its names."""
    url = servers["py130"].url

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Put the server behind another name, as a port mapping does."""
        try:
            if data := await reader.read(65_536):
                host, port = url.split("/")[2].split(":")
                to_reader, to_writer = await asyncio.open_connection(host, int(port))
                to_writer.write(data)
                writer.write(await to_reader.read(65_536))
                to_writer.close()
        finally:
            writer.close()

    listener = await asyncio.start_server(forward, "127.0.0.2", 0)
    async with listener:
        host, port = listener.sockets[0].getsockname()
        it = await look(f"http://{host}:{port}/mcp")
    assert check(it, "host").state == "failed"
    assert "HTTP 421" in check(it, "host").found


def printed(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, ProbedServer]:
    """The output of `probe --json` for one server, and its exit code."""
    code = main(["probe", "--json", *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    (it,) = msgspec.json.decode(captured.out, type=ProbeReport, strict=True).upstreams
    return code, it


def test_a_probe_reports_what_a_command_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    with stdio_server("ts132") as (server, upstream):
        env = upstream["env"]
        given = [f"--env={name}={value}" for name, value in env.items()]
        code, it = printed(["--stdio", *given, "--", *upstream["command"]], capsys)
        assert code == 0
        assert it.server is not None
        assert (it.server.transport, it.server.versions) == ("stdio", VERSIONS[:1])
        assert (answers(it)["questions"], answers(it)["replica_death"]) == ("yes", "partly")
        assert "a child process ends with its gateway" in repr(it.features)
        assert server.ledger("run") == []
        again = parse(it.configuration or "", "here", env).routes[0].upstream
        assert (list(again.command or ()), again.env) == (upstream["command"], env)


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        (["no-such-program-here"], "program", "there is no program no-such-program-here"),
        (["sh", "-c", "echo no database >&2"], "handshake", "ended (exit code 0) before it answered `initialize`"),
        (["cat"], "handshake", "`initialize` was not answered within 0.5 s"),
    ],
)
def test_a_command_that_does_not_work_is_explained(
    command: list[str], name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, it = printed(["--stdio", "--timeout", "0.5", "--", *command], capsys)
    assert code == 1
    assert (it.state, check(it, name).state) == ("failed", "failed")
    assert words in check(it, name).found
    assert ("its stderr ends with: no database" in check(it, name).found) == (command[0] == "sh")


async def as_documented(server: OldServer) -> str:
    """The printed report on a server, with a fixed port and fixed times."""
    it = await look(server.url, seconds=10.0)
    text = as_text(report("", (), (it,))).rstrip().replace(str(server.port), "9000")
    return re.sub(r"in \d+ ms", "in 3 ms", re.sub(r"to within \d+ s", "to within 1 s", text))


@pytest.mark.asyncio(loop_scope="module")
async def test_the_documented_output_is_up_to_date(servers: dict[str, OldServer]) -> None:
    page = (REPOSITORY / "docs" / "probe.md").read_text()
    assert f"$ mrtr-gateway probe http://127.0.0.1:9000/mcp\n{await as_documented(servers['py130'])}\n```\n" in page
