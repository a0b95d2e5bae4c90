"""What is told of a request by the tokens that it brings."""

from tests.mirror.conftest import Begin
from tests.support.mirrored_client import LegacyClient
from tests.support.workbench import Stand


def rejected(stand: Stand, reason: str) -> float:
    return stand.metric("mcp_gateway_state_rejected_total", reason=reason)


async def test_each_token_that_is_not_accepted_counts_once(begin: Begin) -> None:
    stand = await begin()
    client = LegacyClient(stand.http, stand.url, headers={"Authorization": "Bearer ada"})
    _ = await client.initialize()
    assert await client.answer({"id": "mrtr1.00000000." + "A" * 80}, {}) == 200
    assert rejected(stand, "unknown_key") == 1
    async with client.get("not a place") as stream:
        assert stream.response.status == 400
    assert rejected(stand, "malformed") == 1
    client.headers = {"Authorization": "Bearer eve"}
    async with client.request("ping") as stream:
        assert stream.response.status == 404
    assert rejected(stand, "other_principal") == 1
    client.headers = {"Authorization": "Bearer ada"}
    async with client.http.delete(client.url, headers=client.sent()) as response:
        assert response.status == 200
    async with client.request("ping") as stream:
        assert stream.response.status == 404
    assert rejected(stand, "ended") == 1
