"""`mrtr-gateway probe` and `doctor` as programs: arguments, exit codes, what is printed, and how they are stopped."""

import asyncio
import io
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.__main__ import main
from gateway.config import for_upstream
from gateway.tools.probe.report.features import features
from gateway.tools.probe.report.findings import Check, Feature, ProbedServer, ProbeReport, Server, report
from tests.parts.launch import REPOSITORY, free_port
from tests.support.fake_upstream import FakeUpstream, text
from tests.support.probing import Terminal, as_text
from tests.support.workbench import eventually

START_SECONDS = 30.0
SECRET = "correct-horse-battery"


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *arguments),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # A shell's background job ignores SIGINT, and so does all that it starts.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


async def run(*arguments: str) -> tuple[int | None, str, str]:
    """(exit code, stdout, stderr)."""
    process = await start(*arguments)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


# -- arguments -------------------------------------------------------------------------------------------------------

URL = "http://127.0.0.1:9/mcp"
WRONG: list[tuple[tuple[str, ...], str]] = [
    ((), "give exactly one of: a URL, --config FILE, or --stdio -- COMMAND"),
    ((URL, "--config", "x.yaml"), "give exactly one of"),
    (("Makefile",), "Makefile is a file, not a URL; write --config Makefile"),
    (("not a url",), "(from URL) is not an http(s) URL"),
    ((URL, "--header", SECRET), "--header: this is not a header name; write it as 'Name: value'"),
    ((URL, "--header", f"X-Key: {SECRET}\x07"), "--header: the value of x-key is not one line of plain text"),
    ((URL, "--header", "Connection: close"), "concerns one connection"),
    ((URL, "--header", "Mcp-Session-Id: x"), "is written by the gateway itself"),
    (
        (URL, "--bearer-file", "/no/such/file"),
        "--bearer-file: /no/such/file cannot be read (No such file or directory)",
    ),
    ((URL, "--ca-file", "ca.pem"), "--ca-file, --insecure: only for an https URL"),
    (("https://127.0.0.1:9/", "--ca-file", "/no/such/file"), "--ca-file: cannot be read (No such file or directory)"),
    ((URL, "--route", "/mcp"), "--route: needs --config"),
    ((URL, "--env", "A=b"), "--env: needs --stdio"),
    (
        ("--config", "config/minimal.yaml", "--route", "/none"),
        "the configuration has no route /none; its routes are /mcp",
    ),
    (("--config", "config/minimal.yaml", "--ca-file", "x"), "--ca-file: set it in the configuration file instead"),
    (("--stdio", "--bearer-file", "x", "--", "cat"), "does not apply to a command"),
]


@pytest.mark.parametrize("name", ["probe", "doctor"])
@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_wrong_usage_is_explained_in_a_sentence_and_exit_code_2(
    name: str, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert SECRET not in printed.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("routs: []", "routs"),
        (
            "routes: [{upstream: {url: 'https://127.0.0.1:9/mcp', tls: {ca_file: /no/such/file}}}]",
            "upstream.tls.ca_file: cannot be read",
        ),
    ],
    ids=["no file", "unknown key", "no certificate"],
)
def test_a_wrong_configuration_is_exit_code_1(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gateway.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["doctor", "--config", str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err


def test_the_file_of_the_environment_is_examined_where_nothing_else_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("routs: []")
    monkeypatch.setenv("GATEWAY_CONFIG", str(file))
    for arguments in ((), ("-c", str(file))):
        assert main(["doctor", *arguments]) == 1
        assert "routs" in capsys.readouterr().err
    assert main(["doctor", URL, "--route", "/x"]) == 2, "a URL is examined whatever the environment names"
    assert "--route: needs --config" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [("--stdio",), (URL, "--", "cat"), (URL, "--timeout", "0"), (URL, "--timeout", "9999"), (URL, "--nope")],
)
def test_bad_usage_is_exit_code_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["probe", *arguments])
    assert ended.value.code == 2
    assert "usage: mrtr-gateway" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", f"http://127.0.0.1:{free_port()}/mcp"]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "FAILED   connection" in printed.out
    assert "\033" not in printed.out
    assert max(map(len, printed.out.split("\n"))) <= 80


# -- a whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.processes
async def test_a_server_without_limits_is_exit_code_0_and_fits_80_columns(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.tools = [{"name": "x", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}]
    token = tmp_path / "token"
    token.write_text(f"{SECRET}\n")
    given = ("--bearer-file", str(token), "--header", "X-Tenant: acme")
    code, out, err = await run("probe", f"{upstream.url}?key={SECRET}", *given)
    assert (code, err) == (0, "")
    assert "\nquestions: yes\n" in out
    assert "\nsurvives a replica's death: only ephemeral tools, no event store\n" in out
    assert max(map(len, out.split("\n"))) <= 80
    assert SECRET not in out
    assert {seen.headers["Authorization"] for seen in upstream.seen} == {f"Bearer {SECRET}"}
    assert {seen.headers["X-Tenant"] for seen in upstream.seen} == {"acme"}
    assert "mrtr-gateway-probe-no-such-tool" in {seen.body["params"]["name"] for seen in upstream.of("tools/call")}
    # Nor of the query, which is left to a variable.
    assert f'url: "{upstream.url}?${{UPSTREAM_QUERY}}"' in out
    assert {seen.query for seen in upstream.seen} == {f"key={SECRET}"}
    # What is to be copied is at the end, between its heading and the summary.
    copied = out.partition("Suggested configuration\n")[2].rpartition("\n\n")[0]
    file = tmp_path / "gateway.yaml"
    file.write_text(copied)
    monkeypatch.setenv("UPSTREAM_QUERY", "key=x")
    assert main(["check", "--config", str(file)]) == 0


@pytest.mark.processes
async def test_a_server_with_limits_is_exit_code_3_and_json_says_all(upstream: FakeUpstream) -> None:
    upstream.tool(lambda turn: turn.result(text("a JSON body")))
    code, out, err = await run("doctor", upstream.url, "--json")
    assert (code, err) == (3, "")
    found = msgspec.json.decode(out, type=ProbeReport, strict=True)
    assert json.loads(out) == json.loads(msgspec.json.encode(found)), "every key is one that the structs declare"
    assert (found.schema, found.state, found.exit_code) == (1, "warning", 3)
    (it,) = found.upstreams
    assert it.target == upstream.url
    assert it.server is not None
    assert it.server.json_replies


@pytest.mark.processes
@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_probe_that_is_stopped_ends_its_sessions_and_prints_no_traceback(
    sign: signal.Signals, code: int, upstream: FakeUpstream
) -> None:
    upstream.on("tools/list", lambda turn: turn.for_ever())
    process = await start("probe", upstream.url)
    await eventually(lambda: upstream.of("tools/list"), seconds=START_SECONDS)
    assert process.stdout is not None
    out = await process.stdout.readuntil(b"capabilities")  # each step is printed when it ends, on a pipe too
    assert out.startswith(f"{upstream.url}\n\nok       address".encode())
    process.send_signal(sign)
    out, err = await process.communicate()
    assert process.returncode == code
    assert b"Through the gateway" not in out
    assert err.decode().strip() in {"interrupted; all sessions are closed", "terminated; all sessions are closed"}
    assert len(upstream.of("DELETE")) == 1


# -- text ------------------------------------------------------------------------------------------------------------


def limited() -> ProbeReport:
    checks = tuple(
        Check(name=state, state=state, found="f " * 90, why="w " * 90, fix="x " * 90)
        for state in ("ok", "warning", "failed")
    )
    features = tuple(
        Feature(name="n", title="t", answer=answer, short="s", why="w" * 200)
        for answer in ("yes", "partly", "no", "not offered")
    )
    it = ProbedServer(
        target="http://here", route="/mcp", checks=checks, server=Server(), features=features, unknown=("u",)
    )
    return report("1", checks[:1], (it,))


@pytest.mark.parametrize(
    ("out", "environment", "shown"),
    [
        (Terminal, {"TERM": "xterm"}, "coloured"),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}, "plain"),
        (Terminal, {"TERM": "dumb"}, "plain"),
        (io.StringIO, {"TERM": "xterm"}, "plain"),
    ],
)
def test_colour_is_for_terminals_that_want_it(
    out: Any, environment: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ("\033[" in as_text(limited(), out())) == (shown == "coloured")


@pytest.mark.processes
@pytest.mark.parametrize("form", [(), ("--json",)])
async def test_a_reader_that_has_left_is_no_traceback(form: tuple[str, ...]) -> None:
    """As `| head` does; nor may there be one when the file is closed at the end."""
    read, write = os.pipe()
    os.close(read)
    words = (sys.executable, "-m", "gateway", "probe", URL, *form)
    process = await asyncio.create_subprocess_exec(
        *words, cwd=REPOSITORY, stdout=write, stderr=asyncio.subprocess.PIPE
    )
    os.close(write)
    assert await process.communicate() == (None, b"")
    assert process.returncode == 141


# -- the page --------------------------------------------------------------------------------------------------------

PAGE = (REPOSITORY / "docs" / "probe.md").read_text()


@pytest.mark.parametrize("shape", [ProbeReport, ProbedServer, Check, Feature, Server])
def test_the_page_names_every_key_of_the_report(shape: type[msgspec.Struct]) -> None:
    table = PAGE.partition("## JSON")[2]
    assert {name for name in shape.__struct_fields__ if f"`{name}`" not in table} == set()


def test_the_page_shows_what_is_printed_of_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", URL]) == 1
    assert f"$ mrtr-gateway probe {URL}\n{capsys.readouterr().out}```\n" in PAGE


def test_the_page_names_every_feature_and_every_option() -> None:
    config = for_upstream(URL)
    told = features(Server(), config.routes[0], config)
    assert len(told) == 8
    for feature in told:
        assert f"| {feature.title} | `{feature.name}` |" in PAGE
    for option in ("--header", "--bearer-file", "--ca-file", "--insecure", "--timeout", "--json", "--route"):
        assert option in PAGE
