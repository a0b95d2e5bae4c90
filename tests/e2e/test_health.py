"""`mrtr-gateway health` as a container's engine runs it, against a real gateway and against other programs."""

import asyncio
import sys
import textwrap
from pathlib import Path

import pytest

from gateway import container_health
from gateway.config import Config, parse
from gateway.config.parsing.environment import FILE_VARIABLE
from tests.parts.launch import REPOSITORY, free_port, ran
from tests.support.fake_http import FakeHttp, Wire, says
from tests.support.gateway_process import gateway
from tests.support.programs import output, verdict

NOWHERE = "http://127.0.0.1:9/mcp"
PROGRAM = [sys.executable, "-c", "import sys; from gateway.entry import main; sys.exit(main())"]
"""Run the installed script."""


async def ask(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run the command; return its exit code and output."""
    done = await ran(*PROGRAM, "health", *arguments, environment=environment)
    return done.code, (done.out + done.err).strip()


def file(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


async def drips(wire: Wire) -> None:
    _ = await wire.head()
    await wire.say(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        await wire.say(b"x")
        await asyncio.sleep(0.02)


# --- a real gateway ---


async def test_a_running_gateway_is_healthy_and_a_stopped_one_is_not(tmp_path: Path) -> None:
    async with gateway(NOWHERE) as gw:
        port = gw.config["admin"].rpartition(":")[2]
        well = (0, "healthy: /healthz says ok")
        assert await ask("--admin", gw.config["admin"]) == well
        assert await ask("--admin", f"0.0.0.0:{port}") == well, "where it listens is not where it is asked"
        assert await ask("-c", str(gw.directory / "gateway.yaml")) == well
        assert await ask(GATEWAY_ADMIN=gw.config["admin"]) == well
        assert await ask("--config", file(tmp_path, 'admin: "${H:-127.0.0.1}:${P}"'), P=port) == well
        assert await ask("--ready", "--admin", gw.config["admin"]) == (0, "healthy: /readyz says ready")
    code, said = await ask("--admin", gw.config["admin"])
    assert code == 1
    assert said.startswith(f"not healthy: no connection to {gw.config['admin']} (--admin): Connection refused; ")


async def test_a_draining_gateway_is_healthy_and_not_ready() -> None:
    async with gateway(NOWHERE, hold={"drain_delay_seconds": 60}) as gw:
        await gw.drain()
        assert (await ask("--admin", gw.config["admin"]))[0] == 0
        code, said = await ask("--ready", "--admin", gw.config["admin"])
        assert (code, said.rpartition(" says ")[2]) == (1, "503 draining")
        gw.terminate()
        assert await gw.exited() == 0


async def test_a_gateway_that_hangs_is_not_healthy() -> None:
    async with gateway(NOWHERE) as gw:
        gw.stop()
        code, said = await ask("--admin", gw.config["admin"], "--timeout", "0.2")
    assert (code, said.partition(" from ")[0]) == (1, "not healthy: no answer")


# --- another program on the port ---


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"", "not from an admin listener"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not from an admin listener"),
        (b"HTTP/1.1 404 Not Found\r\n\r\nno such page", "says 404 no such page"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n\x1b[31mred\x1b[0m", "says 503 ?[31mred?[0m"),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n" + b"x" * 100_000, "says 500 " + "x" * 100),
    ],
    ids=["nothing", "ssh", "another server", "terminal codes", "a flood"],
)
async def test_another_answer_than_200_is_not_healthy(reply: bytes, said: str) -> None:
    async with FakeHttp(says(reply)) as fake:
        code, text = await ask("--admin", f"127.0.0.1:{fake.port}")
    assert code == 1
    assert said in text
    assert len(text) < 250


async def test_a_reply_that_drips_does_not_outlast_the_timeout() -> None:
    async with FakeHttp(drips) as fake, asyncio.timeout(30):
        code, text = await ask("--admin", f"127.0.0.1:{fake.port}", "--timeout", "0.3")
    assert (code, text.partition(" from ")[0]) == (1, "not healthy: no answer")


# --- where it asks ---


@pytest.mark.parametrize("text", ["admin: [", "\udc80", "- a list", ""], ids=["no YAML", "no text", "no map", "empty"])
async def test_an_invalid_file_does_not_make_a_gateway_unhealthy(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    address, source = container_health.whereabouts(None, path, {})
    assert address == parse("routes: [{upstream: {url: http://a/}}]", "", {}).admin
    assert source == f"the default, because {path} cannot be read"


def test_the_health_check_looks_for_the_file_in_the_gateways_order(tmp_path: Path) -> None:
    path = Path(file(tmp_path, "admin: file:1"))
    assert container_health.whereabouts("flag:1", path, {"GATEWAY_ADMIN": "variable:1"}) == ("flag:1", "--admin")
    assert container_health.whereabouts(None, path, {"GATEWAY_ADMIN": "variable:1"}) == ("variable:1", "GATEWAY_ADMIN")
    named = {FILE_VARIABLE: str(path)}
    assert container_health.whereabouts(None, path, {FILE_VARIABLE: "other.yaml"}) == ("file:1", f"admin of {path}")
    assert container_health.whereabouts(None, None, named) == ("file:1", f"admin of {path}")
    assert container_health.whereabouts(None, None, {**named, "GATEWAY_ADMIN": "variable:1"})[0] == "variable:1"
    assert container_health.whereabouts(None, None, {}) == (Config(routes=()).admin, "the default")
    assert container_health.whereabouts(None, Path(file(tmp_path, "routes: []")), {})[0] == Config(routes=()).admin


async def test_a_gateway_without_an_admin_listener_cannot_be_asked(tmp_path: Path) -> None:
    code, said = await ask("--config", file(tmp_path, "admin: null"))
    assert code == 1
    assert said.startswith("not healthy: admin is null in ")


@pytest.mark.parametrize("address", ["nonsense", "host:", "host:0", "host:65536", "http://host:1", "::1:80"])
async def test_an_invalid_address_is_reported(address: str) -> None:
    code, said = await ask("--admin", address)
    assert code == 1
    assert said == f"not healthy: '{address}' (--admin) is not an address; use the form 127.0.0.1:9464"


async def test_an_ipv6_address_is_used_without_brackets() -> None:
    code, said = await ask("--admin", f"[::]:{free_port()}")
    assert code == 1
    assert "no connection" in said


@pytest.mark.parametrize("words", [["--timeout", "0"], ["--timeout", "nan"], ["--timeout", "soon"], ["--adnim", "x"]])
async def test_bad_usage_has_its_own_exit_code(words: list[str]) -> None:
    assert (await ask(*words))[0] == 2


# --- what it costs ---


def printed(script: str) -> str:
    return output(sys.executable, "-c", textwrap.dedent(script), cwd=REPOSITORY).strip()


def test_the_check_does_not_import_the_gateway() -> None:
    names = printed("import gateway.entry, sys; print(*(n for n in sorted(sys.modules) if n.startswith('gateway')))")
    assert names == "gateway gateway.container_health gateway.entry"


# --- the first process of a container ---


def first_process(while_starting: str) -> int:
    """The exit code of the program in a process whose pid reads as 1, with this in place of the command line."""
    script = f"""
        import importlib, os, signal, sys
        from types import SimpleNamespace
        from gateway import entry
        def main():
            {while_starting}
            return 7
        os.getpid = lambda: 1
        entry.import_module = lambda name: SimpleNamespace(main=main)
        sys.argv = ["mrtr-gateway", "serve"]
        sys.exit(entry.main())
    """
    return verdict(sys.executable, "-c", textwrap.dedent(script), cwd=REPOSITORY)[0]


@pytest.mark.parametrize(
    ("happens", "code"), [("pass", 7), ("signal.raise_signal(signal.SIGTERM)", 0)], ids=["nothing", "a stop"]
)
def test_a_container_that_is_stopped_while_it_starts_exits_with_0(happens: str, code: int) -> None:
    assert first_process(happens) == code


def test_the_entry_point_handles_the_signal_only_in_process_1() -> None:
    script = "import signal, sys; from gateway import entry; sys.argv = ['x', '--version']\n"
    script += "try: entry.main()\nexcept SystemExit: print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    assert printed(script).splitlines()[-1] == "True"
