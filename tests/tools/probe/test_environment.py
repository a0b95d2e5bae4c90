"""`doctor --config`: the configuration on this machine, and each of its upstreams with what the route has for it."""

import re
import socket
import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.__main__ import main
from gateway.config import parse
from gateway.tools.probe.report.findings import Check
from gateway.tools.probe.report.text import TextReport
from gateway.tools.probe.steps.context import Notes
from gateway.tools.probe.steps.environment import look_around
from tests.parts.launch import free_port
from tests.support.fake_http import fake_wire
from tests.support.fake_peer import FakePeer, Silent
from tests.support.fake_upstream import FakeUpstream, Turn
from tests.support.gateway_process import gateway
from tests.support.replicas import Cluster, dies_after_the_body
from tests.support.signer import jwks, private, public_jwk
from tests.tools.probe.test_command import run

KEY = "0f" * 32
SECRET = "correct-horse-battery"
KEYS = jwks(public_jwk(private("RS256"))).encode()


def tree(**sections: Any) -> dict[str, Any]:
    """A configuration in which nothing is wrong."""
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("listen", "admin")}
    route = {"upstream": {"url": "http://127.0.0.1:9/mcp"}}
    return {**addresses, "state": {"keys": [KEY]}, "routes": [route], **sections}


async def around(**sections: Any) -> Notes:
    return await look_around(parse(yaml.safe_dump(tree(**sections)), "here", {}), (), TextReport(None))


def of(notes: Notes, name: str) -> Check:
    (one,) = [check for check in notes.checks if check.name == name]
    return one


def troubles(notes: Notes) -> dict[str, str]:
    return {check.name: check.state for check in notes.checks if check.state != "ok"}


@pytest.fixture
async def taken() -> AsyncIterator[str]:
    """An address that another process serves."""
    async with fake_wire(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url:
        yield url.split("/")[2]


async def test_a_configuration_in_which_nothing_is_wrong() -> None:
    notes = await around()
    assert troubles(notes) == {}
    assert {"configuration", "state keys", "listen", "admin"} == {check.name for check in notes.checks}
    assert of(notes, "listen").found.endswith(" is free")
    assert KEY not in repr(notes.checks)


async def test_a_start_without_keys_is_warned_of() -> None:
    assert troubles(await around(state={})) == {"state keys": "warning"}


@pytest.mark.parametrize("name", ["listen", "admin"])
async def test_an_address_of_another_process_is_found(name: str, taken: str) -> None:
    notes = await around(**{name: taken})
    assert troubles(notes) == {name: "failed"}
    assert of(notes, name).found == f"cannot listen at {taken} ({name}): another process uses it"
    assert of(notes, name).fix == "Stop that process (or restart it, if it is this gateway), or choose another port."


async def test_an_address_that_is_not_of_this_machine_is_found() -> None:
    notes = await around(listen="192.0.2.1:8080")
    assert troubles(notes) == {"listen": "failed"}
    assert of(notes, "listen").found.endswith("this machine does not have the address")


@pytest.mark.processes
async def test_the_addresses_of_a_gateway_that_runs_are_its_own(upstream: FakeUpstream) -> None:
    async with gateway(upstream.url) as gw:
        notes = await around(listen=gw.config["listen"], admin=gw.config["admin"])
    assert troubles(notes) == {}
    assert of(notes, "listen").found.endswith("is in use by a running gateway")


async def test_peers_are_asked_as_a_replica_asks_them(cluster: Cluster, taken: str) -> None:
    _ = await cluster.begin("gw-1", "gw-2", state={"keys": [KEY]})
    nobody = f"127.0.0.1:{free_port()}"
    own = f"127.0.0.1:{free_port()}"
    late = await cluster.fake(FakePeer(lambda asked: asked.refuse(403, formatdate(time.time() - 120, usegmt=True))))
    dying = await cluster.fake(FakePeer(dies_after_the_body))
    hung = await cluster.fake(Silent())
    peers = {
        "a": own,
        "b": taken,
        "c": nobody,
        "d": late.address,
        "f": dying.address,
        "g": hung.address,
        "gw-1": cluster.peers["gw-1"],
        "e": cluster.peers["gw-2"],
    }

    async def asked(**sections: Any) -> dict[str, tuple[str, str]]:
        notes = await around(replica={"id": "a", "listen": own, "peers": peers}, **sections)
        return {
            check.found.partition(" ")[0]: (check.found.partition(" at ")[2].partition(" ")[2], check.fix)
            for check in notes.checks
            if check.name == "peers"
        }

    found = await asked()
    assert found["b"][1].startswith("Correct its address in replica.peers")
    assert found["g"][1].endswith("If it hangs, restart it: its calls then continue elsewhere where they can.")
    says, fix = found.pop("d")
    assert re.match(r"refuses requests from a \(HTTP 403\): its clock is 1\d\d s behind that of a$", says)
    assert fix.startswith("d's clock is 1")
    assert {name: says for name, (says, _) in found.items()} == {
        "gw-1": "answers",
        "b": "answers HTTP 404 (is its address in replica.peers that of another program?)",
        "c": "refuses connections",
        "e": "is gw-2",
        "f": "does not answer as a replica",
        "g": "does not answer in time",
    }
    says, fix = (await asked(state={"keys": ["ef" * 32]}))["gw-1"]
    assert says == "refuses requests from a (HTTP 403): compare state.keys of both, whose clocks agree"
    assert fix.startswith("Compare state.keys")


async def test_a_peer_that_seals_with_a_new_key_too_early_is_told(cluster: Cluster) -> None:
    _ = await cluster.begin("gw-1", state={"keys": ["ef" * 32, KEY]})
    own = f"127.0.0.1:{free_port()}"
    replica = {"id": "a", "listen": own, "peers": {**cluster.peers, "a": own}}
    check = of(await around(replica=replica, state={"keys": [KEY]}), "peers")
    assert check.found.endswith("seals its answers with a key that this replica lacks")
    assert check.fix.startswith("Compare state.keys")


async def test_the_name_of_peers_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = {"id": "a", "listen": f"127.0.0.1:{free_port()}", "peers_dns": "localhost:8081"}
    assert "127.0.0.1:8081" in of(await around(replica=replica), "peers").found

    async def unknown(*_: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("gateway.tools.probe.steps.environment.resolve", unknown)
    assert "has no address (Name or service not known)" in of(await around(replica=replica), "peers").found


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(KEYS), KEYS), "ok"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"keys":[]}', "failed"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "failed"),
        (b"", "failed"),
    ],
    ids=["keys", "no keys", "no document", "hangs up"],
)
async def test_the_issuer_of_tokens_is_asked_for_its_keys(said: bytes, state: str) -> None:
    async with fake_wire(said) as url:
        notes = await around(principal={"source": "jwt", "issuer": "https://id.example", "jwks_url": url})
    assert of(notes, "issuer").state == state


async def test_cautions_are_told() -> None:
    route = {"path": "/a", "upstream": {"url": "https://127.0.0.1:9/mcp", "tls": {"verify": False}}}
    notes = await around(routes=[route | {"forward_headers": ["x-forwarded-key"]}])
    told = [check for check in notes.checks if check.name == "caution"]
    assert [(check.found, check.state, check.why[:10], check.fix[:12]) for check in told] == [
        ("routes[/a].upstream.tls.verify", "warning", "It is fals", "Give the ups"),
        ("routes[/a].forward_headers", "warning", "It has x-f", "Set bind_hea"),
    ]


@pytest.mark.processes
async def test_each_upstream_is_probed_with_what_its_route_has_for_it(upstream: FakeUpstream, tmp_path: Path) -> None:
    routes = [
        {
            "path": "/one",
            "upstream": {"url": upstream.url},
            "credentials": {"mode": "replace", "token": SECRET},
            "set_headers": {"x-tenant": "acme-corp"},
        },
        {"path": "/two", "upstream": {"url": f"{upstream.url}/two"}, "continuation": "replay"},
        {"path": "/down", "upstream": {"url": f"http://127.0.0.1:{free_port()}/mcp"}},
    ]

    async def echo(turn: Turn) -> None:
        """Say the credential back."""
        error = {"code": -32000, "message": turn.seen.headers.get("Authorization", "")}
        turn.reply(400, {"jsonrpc": "2.0", "id": None, "error": error}, {"Server": str(turn.seen.headers)[:500]})

    upstream.on("server/discover", echo)
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(tree(routes=routes)))
    code, out, err = await run("doctor", "--config", str(file), "--header", "Authorization: Bearer the-clients-own")
    assert (code, err) == (1, "")
    by_path: dict[str, set[str | None]] = {}
    for seen in upstream.seen:
        by_path.setdefault(seen.path, set()).add(seen.headers.get("Authorization"))
    assert by_path == {"/mcp": {f"Bearer {SECRET}"}, "/mcp/two": {"Bearer the-clients-own"}}
    assert f"\n/one -> {upstream.url}\n" in out
    assert f"\n/two -> {upstream.url}/two\n" in out
    assert "\nsurvives a replica's death: yes, run again\n" in out
    assert "FAILED   connection     no connection to port" in out
    assert not any(secret in out for secret in (SECRET, "the-clients-own", "acme-corp", KEY))
    assert "Suggested configuration" not in out, "there is one"


def test_one_route_of_a_configuration_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routes = [{"path": f"/{name}", "upstream": {"url": f"http://127.0.0.1:{free_port()}/"}} for name in "ab"]
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(tree(routes=routes)))
    assert main(["probe", "--config", str(file), "--route", "/b"]) == 1
    out = capsys.readouterr().out
    assert "/b -> " in out
    assert "/a -> " not in out
