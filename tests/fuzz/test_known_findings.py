"""Findings of the fuzzers in a running gateway, each with the input that showed it; the first row is none."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fuzz.black_box import SECRET, Attack, Campaign, framed, modern
from tests.fuzz.mutator import Mutator
from tests.support.fake_http import fake_wire
from tests.support.gateway_process import gateway

pytestmark = pytest.mark.processes

HEADERS = [b"Host: 127.0.0.1", b"Content-Type: application/json"]
INITIALIZE = framed(
    "POST /mcp HTTP/1.1",
    [*HEADERS, b"Accept: application/json, text/event-stream", b"Authorization: Bearer " + SECRET.encode()],
    b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}',
)
MODERN = framed("POST /mcp HTTP/1.1", *modern("tools/list", {}))


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
}


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
async def test_it_is_no_finding_any_more(sent: Sent, tmp_path: Path) -> None:
    head = [b"HTTP/1.1 " + sent.status, b"Content-Type: application/json", b"Content-Length: 2", sent.header]
    async with (
        fake_wire(b"\r\n".join([*head, b"", b"{}"])) as url,
        gateway(url, check=False) as gw,
    ):
        attack = Attack(Campaign(gw, "known", tmp_path), Mutator(0), str(gw.config[sent.listener]))
        await attack.send(sent.request, is_whole=True, explains=sent.explains)
        assert (attack.campaign.executions, len(attack.campaign.findings)) == (1, 0)
