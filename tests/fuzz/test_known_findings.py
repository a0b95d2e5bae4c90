"""Findings of the fuzzers in a running gateway, each with the input that showed it."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.seal.keyring import Keyring
from gateway.seal.peer_messages import PeerRequest
from tests.fuzz.black_box import SECRET, Attack, Campaign, framed, modern
from tests.fuzz.mutator import Mutator
from tests.parts.launch import free_port
from tests.support.fake_http import fake_wire
from tests.support.gateway_process import STATE_KEY, gateway

pytestmark = pytest.mark.processes

HEADERS = [b"Host: 127.0.0.1", b"Content-Type: application/json"]
INITIALIZE = framed(
    "POST /mcp HTTP/1.1",
    [*HEADERS, b"Accept: application/json, text/event-stream", b"Authorization: Bearer " + SECRET.encode()],
    b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}',
)


def said(*headers: bytes, status: bytes = b"200 OK", body: bytes = b"{}") -> bytes:
    """What the upstream says to a request."""
    head = [b"HTTP/1.1 " + status, b"Content-Type: application/json", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*head, b"", body])


@asynccontextmanager
async def attacked(upstream: bytes, folder: Path, listener: str = "listen", **sections: Any) -> AsyncIterator[Attack]:
    """A gateway in front of an upstream that says the same to everyone."""
    async with fake_wire(upstream) as url, gateway(url, check=False, **sections) as gw:
        address = gw.config["replica"]["listen"] if listener == "replica" else gw.config[listener]
        yield Attack(Campaign(gw, "known", folder), Mutator(0), str(address))


async def test_a_good_request_is_not_a_finding(tmp_path: Path) -> None:
    async with attacked(said(), tmp_path) as attack:
        await attack.send(INITIALIZE, is_whole=True, explains=True)
        await attack.send(framed("POST /mcp HTTP/1.1", *modern("nothing", {})), is_whole=True, explains=True)
        assert attack.campaign.executions == 2
        assert attack.campaign.findings == 0


@pytest.mark.parametrize(("listener", "path"), [("listen", "/mcp"), ("admin", "/status")])
async def test_a_host_of_empty_brackets_is_refused(listener: str, path: str, tmp_path: Path) -> None:
    async with attacked(said(), tmp_path, listener) as attack:
        await attack.send(framed(f"GET {path} HTTP/1.1", [b"Host: []@"], b""), is_whole=True, explains=True)
        assert attack.campaign.findings == 0


async def test_control_characters_in_a_header_of_the_upstream_break_no_reply(tmp_path: Path) -> None:
    async with attacked(said(b"Mcp-Session-Id: \x1b[31m"), tmp_path) as attack:
        await attack.send(INITIALIZE, is_whole=True, explains=False)
        assert attack.campaign.findings == 0


async def test_control_characters_in_a_challenge_of_the_upstream_break_no_reply(tmp_path: Path) -> None:
    answer = said(b"WWW-Authenticate: Bearer realm=\x01", status=b"401 Unauthorized")
    async with attacked(answer, tmp_path) as attack:
        request = framed("POST /mcp HTTP/1.1", *modern("tools/list", {}))
        await attack.send(request, is_whole=True, explains=True)
        assert attack.campaign.findings == 0


async def test_a_redirect_to_empty_brackets_is_refused(tmp_path: Path) -> None:
    async with attacked(said(b"Location: http://[]@/", status=b"307 Temporary Redirect"), tmp_path) as attack:
        await attack.send(INITIALIZE, is_whole=True, explains=True)
        assert attack.campaign.findings == 0


async def test_a_switch_of_protocols_is_not_relayed(tmp_path: Path) -> None:
    answer = said(b"Upgrade: x", b"Connection: upgrade", status=b"101 Switching Protocols")
    async with attacked(answer, tmp_path) as attack:
        await attack.send(INITIALIZE, is_whole=True, explains=False)
        assert attack.campaign.findings == 0


async def test_a_question_of_a_replica_with_a_malformed_round_is_answered(tmp_path: Path) -> None:
    peers = f"127.0.0.1:{free_port()}"
    replica = {"id": "gw-1", "listen": peers, "peers": {"gw-1": peers}}
    request = PeerRequest(
        kind="holds", to="gw-1", issued=time.time(), nonce=b"n" * 16, path="exchange", body=b"no number"
    )
    sealed = Keyring([bytes.fromhex(STATE_KEY)], "peer").seal_bytes(msgspec.msgpack.encode(request), b"request")
    async with attacked(said(), tmp_path, "replica", replica=replica) as attack:
        await attack.send(framed("POST /peer HTTP/1.1", HEADERS, sealed), is_whole=True, explains=False)
        assert attack.campaign.findings == 0
