"""`errors: brief` with real processes: a replica that was killed, then a server that was."""

import json
from typing import Any

import pytest

from tests.e2e.wire import ACCEPT, wire
from tests.parts.launch import old_server
from tests.support.cluster import memberships
from tests.support.gateway_process import Gateway, gateway
from tests.support.workbench import Reply

pytestmark = pytest.mark.real


def check(gw: Gateway, reply: Reply, *inside: str) -> dict[str, Any]:
    """The reply has nothing of the inside, the log has it beside the id; returns the error."""
    told = f"{dict(reply.headers)} {json.dumps(reply.messages)}"
    assert [word for word in inside if word in told] == []
    error: dict[str, Any] = reply.error
    found = error["data"]["requestId"]
    assert f"(requestId {found})" in error["message"]
    (line,) = [line for line in gw.log("error.shortened") if line["request_id"] == found]
    assert any(word in line["cause"] for word in inside)
    return error


async def test_a_client_hears_of_a_dead_replica_and_of_a_dead_server_without_their_names() -> None:
    first, second = memberships(2)
    async with (
        old_server("py130") as server,
        gateway(server.url, check=False, errors="brief", replica=first) as owner,
        gateway(server.url, errors="brief", replica=second) as other,
        wire(owner.url) as client,
    ):
        inside = (first["id"], f":{server.port}", *first["peers"].values())
        asked = await client.call("ask", {"question": "Who?"})
        await owner.kill()
        lost = check(other, await client.on(other.url).answer(asked, ACCEPT), *inside)
        assert lost["data"]["reason"] == "owner_lost"
        await server.kill()
        check(other, await client.on(other.url).call("ask", {"question": "Who?"}), *inside)
