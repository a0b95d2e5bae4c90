"""A modern client of the Python SDK 2.3.0 that is given a URL and nothing else: it signs in, and answers a question.

    python oauth_client.py URL  ->  one line of JSON: the result's text, what was requested, how often a token came

While the question is open its token expires, so the answer goes out with another one.
"""

import asyncio
import json
import sys
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import mcp_types as types
from mcp import Client
from mcp.client.auth import OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthClientMetadata, OAuthToken

LONG_AGO = 1.0


class Storage:
    """What a client keeps."""

    def __init__(self) -> None:
        self.tokens: list[OAuthToken] = []
        self.client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens[-1] if self.tokens else None

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens.append(tokens)

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


async def main(url: str) -> None:
    storage = Storage()
    requested: list[tuple[str, str, int]] = []
    came_back: list[AuthorizationCodeResult] = []
    asked: list[str] = []

    async def record(response: httpx2.Response) -> None:
        requested.append((response.request.method, str(response.request.url), response.status_code))

    async def browse(address: str) -> None:
        """The user's browser: it opens the page, and is sent to the client's own address at once."""
        async with httpx2.AsyncClient(event_hooks={"response": [record]}) as browser:
            response = await browser.get(address)
        fields = parse_qs(urlsplit(response.headers["location"]).query)
        first = {name: values[0] for name, values in fields.items()}
        came_back.append(AuthorizationCodeResult.model_validate(first))

    async def wait_for_browser() -> AuthorizationCodeResult:
        return came_back.pop()

    metadata: dict[str, Any] = {"client_name": "oauth-client", "redirect_uris": ["http://127.0.0.1:9/callback"]}
    provider = OAuthClientProvider(
        url, OAuthClientMetadata.model_validate(metadata), storage, browse, wait_for_browser
    )

    async def answer(_context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        asked.append(params.message)
        provider.context.token_expiry_time = LONG_AGO
        return types.ElicitResult(action="accept", content={"name": "Ada"})

    async with create_mcp_http_client(auth=provider) as http:
        http.event_hooks = {"response": [record]}
        async with Client(streamable_http_client(url, http_client=http), elicitation_callback=answer) as client:
            version = client.protocol_version
            result = await client.call_tool("ask", {})
    text = result.content[0].text if isinstance(result.content[0], types.TextContent) else ""
    told = {"text": text, "version": version, "asked": asked, "requested": requested, "tokens": len(storage.tokens)}
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
