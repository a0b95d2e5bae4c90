"""A client that has the gateway's URL signs in at the legacy server behind it."""

import json
from pathlib import Path

import pytest

from tests.parts.launch import NODE, PARTS, old_server, output_of
from tests.support.gateway_process import gateway

pytestmark = pytest.mark.real

CLIENTS = Path(__file__).parent.parent / "parts" / "clients"
COMMANDS = {
    "py": (PARTS / "modern" / "bin" / "python", CLIENTS / "oauth_client.py"),
    "ts": (NODE, CLIENTS / "oauth_client.mjs"),
}
TOKENS = {"py": 2, "ts": 1}
"""The Python client's token expires while its user thinks, and is refreshed."""


@pytest.mark.parametrize("kind", COMMANDS)
async def test_a_client_signs_in_calls_and_refreshes_its_token_while_its_user_thinks(kind: str) -> None:
    async with old_server("py130-auth") as server, gateway(server.url) as gw:
        told = json.loads(await output_of(*COMMANDS[kind], gw.url))

        assert told["version"] == "2026-07-28"
        assert told["asked"] == ["Your name?"]
        assert told["text"] == "accept:Ada"
        assert told["tokens"] == TOKENS[kind]
        assert len(server.ledger("run", "ask")) == 1
        assert len(server.ledger("refreshed")) == TOKENS[kind] - 1
        # The client never contacts the legacy server, which only the gateway needs to reach.
        assert {url.startswith(gw.base) for _, url, _ in told["requested"]} == {True}
        paths = [url.removeprefix(gw.base).partition("?")[0] for _, url, _ in told["requested"]]
        in_order = list(dict.fromkeys(path for path in paths if path != "/mcp"))
        assert in_order == [
            "/.well-known/oauth-protected-resource/mcp",
            "/.well-known/oauth-authorization-server/mcp",
            "/register/mcp",
            "/authorize/mcp",
            "/token/mcp",
        ]
        # The legacy server accepts the token, because it was requested under the server's own name.
        assert [line["resource"] for line in server.ledger("authorized")] == [server.url]
        await gw.settled()
