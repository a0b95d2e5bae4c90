"""An old server that asks for OAuth, with the authorization server that the Python SDK 1.x has built in; in py130.

It knows itself by the address it listens at, and takes only tokens that were issued for that (RFC 8707). Whoever comes
to sign in is Ada, at once. Access tokens look like JWTs: iss, sub and client_id, and a number that makes each another.
"""

import base64
import itertools
import json
import time
from typing import Any

from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    AuthorizationParams,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions, RevocationOptions
from mcp.server.fastmcp import Context, FastMCP
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from pydantic import AnyHttpUrl, BaseModel
from serving import Ledger, arguments, recorded, serve

TOKEN_SECONDS = 3600
options = arguments()
ledger = Ledger(options.ledger)
origin = f"http://{options.host}:{options.port}"
issuer = AnyHttpUrl(origin)


def part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


class Provider:
    """All that the SDK asks of an authorization server, in memory."""

    def __init__(self) -> None:
        self.clients: dict[str, OAuthClientInformationFull] = {}
        self.codes: dict[str, AuthorizationCode] = {}
        self.access: dict[str, AccessToken] = {}
        self.refresh: dict[str, RefreshToken] = {}
        self.numbers = itertools.count(1)

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self.clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        assert client_info.client_id is not None
        ledger.write("registered", client_info.client_id)
        self.clients[client_info.client_id] = client_info

    async def authorize(self, client: OAuthClientInformationFull, params: AuthorizationParams) -> str:
        assert client.client_id is not None
        code = f"code-{next(self.numbers)}"
        self.codes[code] = AuthorizationCode(
            code=code,
            scopes=params.scopes or [],
            expires_at=time.time() + 60,
            client_id=client.client_id,
            code_challenge=params.code_challenge,
            redirect_uri=params.redirect_uri,
            redirect_uri_provided_explicitly=params.redirect_uri_provided_explicitly,
            resource=params.resource,
        )
        ledger.write("authorized", client.client_id, resource=params.resource)
        # RFC 9207: the client checks who answers.
        return construct_redirect_uri(str(params.redirect_uri), code=code, state=params.state, iss=str(issuer))

    async def load_authorization_code(self, client: Any, authorization_code: str) -> AuthorizationCode | None:
        return self.codes.get(authorization_code)

    async def exchange_authorization_code(self, client: Any, authorization_code: AuthorizationCode) -> OAuthToken:
        del self.codes[authorization_code.code]
        return self.issue(client.client_id, authorization_code.scopes, authorization_code.resource)

    async def load_refresh_token(self, client: Any, refresh_token: str) -> RefreshToken | None:
        return self.refresh.get(refresh_token)

    async def exchange_refresh_token(self, client: Any, refresh_token: RefreshToken, scopes: list[str]) -> OAuthToken:
        del self.refresh[refresh_token.token]
        # As servers do that rotate: the old token is good no more.
        self.access.clear()
        ledger.write("refreshed", client.client_id)
        return self.issue(client.client_id, scopes, refresh_token.resource)

    def issue(self, client_id: str, scopes: list[str], resource: str | None) -> OAuthToken:
        claims = {"iss": str(issuer), "sub": "ada", "client_id": client_id}
        token = f"{part({'alg': 'none'})}.{part({**claims, 'jti': next(self.numbers)})}.{part('unsigned')}"
        known: dict[str, Any] = {"client_id": client_id, "scopes": scopes, "resource": resource, "subject": "ada"}
        self.access[token] = AccessToken(token=token, claims=claims, **known)
        again = f"refresh-{next(self.numbers)}"
        self.refresh[again] = RefreshToken(token=again, **known)
        return OAuthToken(access_token=token, expires_in=TOKEN_SECONDS, scope=" ".join(scopes), refresh_token=again)

    async def load_access_token(self, token: str) -> AccessToken | None:
        return self.access.get(token)

    async def revoke_token(self, token: AccessToken | RefreshToken) -> None:
        self.access.pop(token.token, None)
        self.refresh.pop(token.token, None)


server = FastMCP(
    "old-auth",
    host=options.host,
    port=options.port,
    auth_server_provider=Provider(),
    auth=AuthSettings(
        issuer_url=issuer,
        resource_server_url=AnyHttpUrl(f"{origin}/mcp"),
        validate_token_resource=True,
        required_scopes=["user"],
        client_registration_options=ClientRegistrationOptions(
            enabled=True, valid_scopes=["user"], default_scopes=["user"]
        ),
        revocation_options=RevocationOptions(enabled=True),
    ),
)


class Name(BaseModel):
    name: str


@server.tool()
async def ask(ctx: Context[Any, Any, Any]) -> str:
    async with recorded(ledger, "ask"):
        answered = await ctx.elicit("Your name?", Name)
        return f"{answered.action}:{answered.data.name}" if answered.action == "accept" else answered.action


if __name__ == "__main__":
    serve(server.streamable_http_app(), options)
