"""Findings of the fuzzers in a running gateway, each with the input that showed it; the first row is none."""

import time
from pathlib import Path
from typing import NamedTuple

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
MODERN = framed("POST /mcp HTTP/1.1", *modern("tools/list", {}))
MALFORMED_ROUND = PeerRequest(kind="holds", to="gw-1", issued=0, nonce=b"n" * 16, path="exchange", body=b"no number")


class Sent(NamedTuple):
    """What was sent to which listener, and what the upstream says to whatever reaches it."""

    request: bytes
    header: bytes = b"X: y"
    status: bytes = b"200 OK"
    explains: bool = True
    listener: str = "listen"


SENT = {
    "a good request": Sent(INITIALIZE),
    "a host of empty brackets": Sent(framed("GET /mcp HTTP/1.1", [b"Host: []@"], b"")),
    "the same to operators": Sent(framed("GET /status HTTP/1.1", [b"Host: []@"], b""), listener="admin"),
    "control characters in a session id": Sent(INITIALIZE, b"Mcp-Session-Id: \x1b[31m", explains=False),
    "and in a challenge": Sent(MODERN, b"WWW-Authenticate: Bearer realm=\x01", b"401 Unauthorized"),
    "a redirect to empty brackets": Sent(INITIALIZE, b"Location: http://[]@/", b"307 Temporary Redirect"),
    "a switch of protocols": Sent(
        INITIALIZE, b"Upgrade: x\r\nConnection: upgrade", b"101 Switching Protocols", explains=False
    ),
    "a replica's question with a malformed round": Sent(b"", explains=False, listener="peer"),
}


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
async def test_it_is_no_finding_any_more(sent: Sent, tmp_path: Path) -> None:
    peers = f"127.0.0.1:{free_port()}"
    replica = {"id": "gw-1", "listen": peers, "peers": {"gw-1": peers}}
    head = [b"HTTP/1.1 " + sent.status, b"Content-Type: application/json", b"Content-Length: 2", sent.header]
    request = sent.request
    if sent.listener == "peer":
        asked = msgspec.structs.replace(MALFORMED_ROUND, issued=time.time())
        sealed = Keyring([bytes.fromhex(STATE_KEY)], "peer").seal_bytes(msgspec.msgpack.encode(asked), b"request")
        request = framed("POST /peer HTTP/1.1", HEADERS, sealed)
    async with (
        fake_wire(b"\r\n".join([*head, b"", b"{}"])) as url,
        gateway(url, check=False, replica=replica) as gw,
    ):
        address = {**gw.config, "peer": peers}[sent.listener]
        attack = Attack(Campaign(gw, "known", tmp_path), Mutator(0), str(address))
        await attack.send(request, is_whole=True, explains=sent.explains)
        assert (attack.campaign.executions, len(attack.campaign.findings)) == (1, 0)
