"""Callers that are verified: by keys of a real HTTP endpoint, which may rotate them, stall, lie or be gone."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from gateway import world
from gateway.auth import jwks as jwks_module
from gateway.auth.authenticator import Authenticator
from gateway.config import ConfigError, contexts, parse
from gateway.http.incoming import Caller, Incoming
from gateway.identity import principal as principals
from gateway.plugins.oauth import oauth_metadata
from gateway.protocol import mcp
from gateway.protocol.errors import InvalidRequest
from gateway.seal.keyring import PREFIX
from tests.http.test_tls import server_context
from tests.support.authority import Authority
from tests.support.fake_upstream import FakeUpstream, asks, text
from tests.support.logs import Lines
from tests.support.raw_connection import raw_connection
from tests.support.served import Served
from tests.support.signer import ISSUER, jwks, private, public_jwk, token
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, configuration, eventually

KEY, NEXT = private("ES256"), private("ES256")
ONE, OTHER = jwks(public_jwk(KEY)), jwks(public_jwk(NEXT, "k2"))
UNAUTHORIZED = (401, -32600, "unauthorized")
NO_KEYS = (503, -32603, "no_keys")

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Endpoint(Served):
    """The issuer's JWKS, over HTTP; `answer` may be changed at any time."""

    path = "/jwks"

    def __init__(self) -> None:
        self.asked = 0
        self.serve(ONE)

    def serve(self, body: str, status: int = 200) -> None:
        async def answer(_: web.BaseRequest) -> web.StreamResponse:
            return web.Response(text=body, status=status)

        self.answer: Answer = answer

    def wait(self, body: str) -> asyncio.Event:
        """Serve once the event is set."""
        go = asyncio.Event()

        async def answer(_: web.BaseRequest) -> web.StreamResponse:
            await go.wait()
            return web.Response(text=body)

        self.answer = answer
        return go

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        self.asked += 1
        return await self.answer(http)


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with Endpoint() as served:
        yield served


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwks_module, "_PAUSE_SECONDS", 0.0)


def verified(endpoint: Endpoint, **more: Any) -> dict[str, Any]:
    return {"source": "jwt", "issuer": ISSUER, "jwks_url": endpoint.url, **more}


def bearer(key: Any = KEY, **options: Any) -> str:
    return f"Bearer {token(key, **options)}"


def by_next(**claims: Any) -> str:
    return bearer(NEXT, headers={"kid": "k2"}, **claims)


@pytest.fixture
async def stand(endpoint: Endpoint, upstream: FakeUpstream, begin: Start) -> Stand:
    upstream.tool(lambda turn: turn.result(text("done")))
    return await begin(principal=verified(endpoint))


async def test_a_verified_caller_is_served_and_its_token_goes_upstream(
    upstream: FakeUpstream, endpoint: Endpoint, stand: Stand
) -> None:
    sent = bearer()
    for _ in range(3):
        assert (await stand.client(sent).call()).text == "done"
    assert upstream.of("tools/call")[0].headers["Authorization"] == sent
    assert endpoint.asked == 1


async def test_a_caller_is_verified_once_per_request(
    upstream: FakeUpstream, endpoint: Endpoint, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a request that is probed for its era, looked at for a state of ours, and then bridged."""
    upstream.tool(lambda turn: turn.result(text("done")))
    stand = await begin(principal=verified(endpoint))
    callers, verify = list[str | None](), jwks_module.JwksVerifier.principal

    async def counting(verifier: jwks_module.JwksVerifier, authorization: str | None) -> bytes:
        callers.append(authorization)
        return await verify(verifier, authorization)

    monkeypatch.setattr(jwks_module.JwksVerifier, "principal", counting)
    client = stand.client(bearer())
    _ = await client.call()
    assert len(callers) == 1
    _ = await client.call(state=f"{PREFIX}.no-state")
    assert len(callers) == 2
    for number in range(3, 9):  # that its head is known tells nothing of its token
        assert (await client.call()).text == "done"
        assert len(callers) == number


def metadata_of(stand: Stand) -> str:
    """The URL of RFC 9728 for the resource that is the stand's route."""
    return stand.url.replace("/mcp", f"{oauth_metadata.RESOURCE}/mcp")


NOBODY = [
    None,
    "",
    "Bearer",
    "Basic YTpi",
    bearer(private("ES256")),
    bearer(exp=1),
    bearer(iss="https://evil.example"),
]


@pytest.mark.parametrize("authorization", NOBODY)
async def test_an_unverified_caller_gets_401_and_reaches_no_upstream(
    authorization: str | None, upstream: FakeUpstream, stand: Stand
) -> None:
    client = stand.client(authorization)
    for reply in (await client.call(), await client.post(mcp.DISCOVER)):
        assert reply.outcome == UNAUTHORIZED
        assert reply.final["id"]
        challenge = reply.headers["WWW-Authenticate"]
        has_token = (authorization or "").startswith("Bearer ")
        metadata = f'Bearer resource_metadata="{metadata_of(stand)}"'
        assert challenge.startswith(
            f'{metadata}, error="invalid_token", error_description="The token' if has_token else metadata
        )
        assert ("error=" in challenge) == has_token, "RFC 6750 section 3.1: no error without a token"
    assert not upstream.seen
    assert not upstream.probes, "not even its era is asked for with headers of an unverified caller"


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_a_refused_caller_is_led_to_the_issuer(stand: Stand, method: str) -> None:
    """RFC 9728 section 5.1, which clients of every era follow."""
    async with stand.http.request(method, stand.url, data=b"{}") as response:
        (url,) = re.findall(r'resource_metadata="([^"]*)"', response.headers["WWW-Authenticate"])
    assert (response.status, url) == (401, metadata_of(stand))
    async with stand.http.get(url) as response:
        document = await response.json()
    assert document == {
        "resource": stand.url,
        "authorization_servers": [ISSUER],
        "bearer_methods_supported": ["header"],
    }


async def test_a_refused_caller_of_a_stdio_server_is_led_to_the_issuer(endpoint: Endpoint, begin: Start) -> None:
    routes = [{"path": "/mcp", "era": "bridge", "upstream": {"command": ["cat"], "warm": 0}}]
    stand = await begin(routes=routes, principal=verified(endpoint))
    reply = await stand.client().call()
    assert reply.headers["WWW-Authenticate"] == f'Bearer resource_metadata="{metadata_of(stand)}"'
    async with stand.http.get(metadata_of(stand)) as response:
        assert (await response.json())["authorization_servers"] == [ISSUER]


async def test_an_issuer_without_a_url_is_named_to_nobody(endpoint: Endpoint, begin: Start) -> None:
    stand = await begin(principal=verified(endpoint, issuer="accounts of example"))
    assert (await stand.client().call()).headers["WWW-Authenticate"] == "Bearer"
    async with stand.http.get(metadata_of(stand)) as response:
        assert response.status == 404


@pytest.mark.parametrize("length", ["Content-Length: 4000000", "Transfer-Encoding: chunked"])
async def test_an_unverified_caller_is_refused_before_a_large_body_is_read(stand: Stand, length: str) -> None:
    # A body takes time to open, megabytes of it tens of milliseconds in which nobody else is served.
    async with raw_connection(stand) as raw:
        await raw.send(f"POST /mcp HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode())
        head = await raw.until(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ")
    assert b"www-authenticate: bearer" in head.lower()


async def test_a_caller_is_verified_before_its_body_is_found_to_be_wrong(stand: Stand) -> None:
    for authorization, status in ((bearer(exp=1), 401), (bearer(), 400)):
        headers = {"Authorization": authorization, mcp.PROTOCOL_VERSION: mcp.MODERN}
        async with stand.http.post(stand.url, data=b"{", headers=headers) as response:
            assert response.status == status
            assert "id" not in await response.json()


async def test_a_foreign_host_is_refused_before_its_caller_and_its_body(stand: Stand) -> None:
    async with raw_connection(stand) as raw:
        await raw.send(b"POST /mcp HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 100000\r\n\r\n")
        assert (await raw.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 403 "), "the body never comes"


async def test_an_unverified_callers_body_is_not_opened_on_a_path_without_a_route(stand: Stand) -> None:
    for data, id_ in ((b'{"jsonrpc":"2.0","id":7,"method":"m"}', 7), (b" " * 100_000, None), (b"{", None)):
        async with stand.http.post(stand.url + "/other", data=data) as response:
            refused = await response.json()
        assert (response.status, refused["error"]["code"], refused.get("id")) == (404, -32601, id_)


async def test_a_state_is_its_callers_whatever_the_token(upstream: FakeUpstream, stand: Stand) -> None:
    upstream.tool(asks("answered"))
    asked = await stand.client(bearer(jti="first")).call()
    stolen = await stand.client(bearer(sub="eve")).answer(asked)
    assert stolen.outcome == (400, -32602, "invalid_request_state")
    assert (await stand.client(bearer(jti="refreshed")).answer(asked)).text == "answered"


async def test_a_token_that_was_verified_is_refused_when_it_expires(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = stand.client(bearer(exp=int(time.time()) + 100))
    assert (await client.call()).text == "done"
    now = time.time() + 131
    monkeypatch.setattr(world, "wall", lambda: now)
    monkeypatch.setattr("gateway.identity.jwt_verification.LEEWAY_SECONDS", -100)  # PyJWT's clock is not the one above
    assert (await client.call()).outcome == UNAUTHORIZED


async def test_tokens_that_are_kept_are_bounded(
    upstream: FakeUpstream, endpoint: Endpoint, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks_module, "_TOKENS_KEPT", 3)
    verify = Mock(wraps=jwks_module.verify)
    monkeypatch.setattr(jwks_module, "verify", verify)
    upstream.tool(lambda turn: turn.result(text("done")))
    stand = await begin(principal=verified(endpoint))
    tokens = [bearer(jti=str(number)) for number in range(4)]
    for number in (0, 1, 2, 0, 3, 0, 1):
        assert (await stand.client(tokens[number]).call()).text == "done"
    assert [call.args[0] for call in verify.call_args_list] == [
        token.removeprefix("Bearer ") for token in (*tokens, tokens[1])
    ]


# -- the keys -------------------------------------------------------------------------------------------------------


async def test_a_new_key_is_fetched_when_a_token_names_it_and_the_old_one_is_gone(
    endpoint: Endpoint, stand: Stand
) -> None:
    old = stand.client(bearer())
    assert (await old.call()).text == "done"
    endpoint.serve(OTHER)
    assert (await old.call()).text == "done", "its key is still thought to be good"
    assert (await stand.client(by_next()).call()).text == "done"
    assert (await old.call()).outcome == UNAUTHORIZED, "what a key that is gone has verified is forgotten"


async def test_unknown_keys_have_them_fetched_once_at_a_time_and_after_a_pause(
    endpoint: Endpoint, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await stand.client(bearer()).call()).text == "done"
    go = endpoint.wait(OTHER)
    flood = [asyncio.ensure_future(stand.client(bearer(headers={"kid": f"x{number}"})).call()) for number in range(20)]
    await eventually(lambda: stand.gateway.downstream.in_flight == 20)
    assert (await stand.client(bearer()).call()).text == "done", "who is known does not wait"
    monkeypatch.setattr(jwks_module, "_PAUSE_SECONDS", 3600.0)
    go.set()
    assert {(await reply).outcome for reply in flood} == {UNAUTHORIZED}
    assert endpoint.asked == 2
    assert (await stand.client(bearer(headers={"kid": "again"})).call()).outcome == UNAUTHORIZED
    assert endpoint.asked == 2


@pytest.mark.parametrize(
    "body", [json.dumps({"keys": []}), "no json", jwks(public_jwk(KEY), {"k": "x" * 300_000})], ids=len
)
async def test_keys_that_cannot_be_used_change_nothing(
    body: str, endpoint: Endpoint, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await stand.client(bearer()).call()).text == "done"
    endpoint.serve(body)
    monkeypatch.setattr(jwks_module, "log", log := Mock())
    assert (await stand.client(by_next()).call()).outcome == UNAUTHORIZED
    assert (await stand.client(bearer()).call()).text == "done"
    assert log.warning.call_args.kwargs["note"] == "keys fetched before that stay in use: 1"


async def test_keys_may_come_with_a_header_that_http_1_1_has_given_up(endpoint: Endpoint, begin: Start) -> None:
    async def answer(http: web.BaseRequest) -> web.StreamResponse:
        assert http.transport is not None
        head = b"HTTP/1.1 200 OK\r\nX: folded\r\n header\r\nContent-Length: %d\r\n\r\n" % len(ONE)
        http.transport.write(head + ONE.encode())
        http.transport.close()
        return web.Response()

    endpoint.answer = answer
    stand = await begin(principal=verified(endpoint))
    assert (await stand.client(bearer()).call()).text


async def test_a_secret_in_the_url_of_the_keys_is_not_logged(
    endpoint: Endpoint, log_lines: Lines, begin: Start
) -> None:
    endpoint.serve("no json")
    stand = await begin(principal=verified(endpoint, jwks_url=f"{endpoint.url}?key=s3cret"))
    assert (await stand.client(bearer()).call()).outcome == NO_KEYS
    assert log_lines("keys.failed")[0]["url"] == endpoint.url
    assert "s3cret" not in log_lines.stream.getvalue()


async def test_keys_grow_old_beside_requests_and_are_not_used_for_ever(
    endpoint: Endpoint, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = stand.client(bearer())
    assert (await client.call()).text == "done"
    endpoint.serve("gone", status=500)
    monkeypatch.setattr(jwks_module, "_FRESH_SECONDS", 0.0)
    assert (await client.call()).text == "done"
    await eventually(lambda: endpoint.asked == 2, "they were asked for")
    monkeypatch.setattr(jwks_module, "_STALE_SECONDS", 0.0)
    refused = await client.call()
    assert refused.outcome == NO_KEYS
    assert refused.headers["Retry-After"] == "10"
    endpoint.serve(ONE)
    assert (await client.call()).text == "done"


async def test_a_stalled_key_endpoint_makes_no_request_hang(
    upstream: FakeUpstream, endpoint: Endpoint, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks_module, "_FETCH_SECONDS", 0.1)

    async def never(http: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        await asyncio.Event().wait()
        return response

    endpoint.answer = never
    stand = await begin(principal=verified(endpoint))
    assert (await stand.client(bearer()).call()).outcome == NO_KEYS
    endpoint.serve(ONE)
    assert (await stand.client(bearer()).call()).status == 200


async def test_without_signing_keys_one_request_of_a_legacy_session_is_refused_and_not_the_session(
    endpoint: Endpoint, begin: Start
) -> None:
    await endpoint.close()
    stand = await begin(principal=verified(endpoint))
    call = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "tool"}}
    for session, status in (({"Mcp-Session-Id": "s"}, 200), ({}, 503)):
        async with stand.http.post(stand.url, json=call, headers={"Authorization": bearer(), **session}) as response:
            error = await response.json()
            assert (response.status, error["id"], error["error"]["data"]["reason"]) == (status, 3, "no_keys")
    async with stand.http.get(stand.url, headers={"Authorization": bearer(), "Mcp-Session-Id": "s"}) as response:
        assert response.status == 503
    async with stand.http.post(stand.url, json=call, headers={"Mcp-Session-Id": "s"}) as response:
        assert response.status == 401


async def test_a_client_that_leaves_does_not_cancel_a_fetch_of_keys(
    upstream: FakeUpstream, endpoint: Endpoint, begin: Start
) -> None:
    go = endpoint.wait(ONE)
    upstream.tool(lambda turn: turn.result(text("done")))
    stand = await begin(principal=verified(endpoint))
    one, other = (asyncio.ensure_future(stand.client(bearer()).call()) for _ in range(2))
    await eventually(lambda: stand.gateway.downstream.in_flight == 2)
    one.cancel()
    await eventually(lambda: stand.gateway.downstream.in_flight == 1)
    go.set()
    assert (await other).text == "done"
    assert endpoint.asked == 1


async def test_the_endpoint_may_have_an_authority_of_its_own(
    upstream: FakeUpstream, tmp_path: Path, begin: Start
) -> None:
    upstream.tool(lambda turn: turn.result(text("done")))
    ca, endpoint = Authority(tmp_path), Endpoint()
    await endpoint.start(tls=server_context(ca.sign("issuer")))
    try:
        stand = await begin(principal=verified(endpoint, jwks_ca_file=str(ca.file)))
        assert (await stand.client(bearer()).call()).text == "done"
        stranger = await begin(principal=verified(endpoint))
        assert (await stranger.client(bearer()).call()).outcome == NO_KEYS
    finally:
        await endpoint.close()


async def test_keys_in_a_file_are_read_at_start_and_at_reload(
    upstream: FakeUpstream, tmp_path: Path, begin: Start
) -> None:
    upstream.tool(lambda turn: turn.result(text("done")))
    file = tmp_path / "jwks.json"
    file.write_text(ONE)
    sections = {"principal": {"source": "jwt", "issuer": ISSUER, "jwks_file": str(file)}}
    stand = await begin(**sections)
    assert (await stand.client(bearer()).call()).text == "done"
    file.write_text(OTHER)
    new = parse(configuration(upstream.url, **sections), "test", {})
    stand.gateway.apply(new)
    assert (await stand.client(by_next()).call()).text == "done"
    assert (await stand.client(bearer()).call()).outcome == UNAUTHORIZED
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"principal\.jwks_file: is not a JWKS"):
        parse(configuration(upstream.url, **sections), "test", {})
    with pytest.raises(ConfigError, match=r"principal\.jwks_file: is not a JWKS"):
        stand.gateway.apply(new)
    assert (await stand.client(by_next()).call()).text == "done"


async def test_a_reload_of_something_else_keeps_keys_and_tokens(
    upstream: FakeUpstream, endpoint: Endpoint, stand: Stand
) -> None:
    client: Client = stand.client(bearer())
    assert (await client.call()).text == "done"
    new = configuration(upstream.url, principal=verified(endpoint), limits={"body_bytes": 10_000})
    stand.gateway.apply(parse(new, "test", {}))
    assert (await client.call()).text == "done"
    assert endpoint.asked == 1
    stand.gateway.apply(parse(configuration(upstream.url, principal=verified(endpoint, audience=["us"])), "test", {}))
    assert (await client.call()).outcome == UNAUTHORIZED, "the new rule holds for a token that was verified before"
    stand.gateway.apply(parse(configuration(upstream.url), "test", {}))
    assert (await client.call()).text == "done"


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_old_clients_are_verified_before_they_are_passed_through(
    upstream: FakeUpstream, endpoint: Endpoint, stand: Stand, method: str
) -> None:
    old = {"Mcp-Session-Id": "s1", "MCP-Protocol-Version": "2025-06-18", "Authorization": "Bearer forged"}
    async with stand.http.request(method, stand.url, headers=old, data=b"{}") as response:
        assert response.status == 401
        assert "invalid_token" in response.headers["WWW-Authenticate"]
    assert not upstream.seen, "nothing of it went upstream"
    async with stand.http.request(method, stand.url, headers={**old, "Authorization": bearer()}, data=b"{}") as passed:
        assert passed.status != 401


# -- one request by itself --------------------------------------------------------------------------------------------

PROXY, STRANGER = "10.0.0.1", "203.0.113.9"
BY_HEADER = {"source": "header", "header": "x-user", "trusted_proxies": ["10.0.0.0/8"]}


def authenticator(principal: dict[str, Any]) -> Authenticator:
    config = parse(configuration("http://127.0.0.1:1/mcp", principal=principal), "test", {})
    return Authenticator(config, contexts(config), Mock(), Mock())


def sent(*headers: tuple[str, str], remote: str = PROXY) -> Incoming:
    return Incoming("/mcp", CIMultiDictProxy(CIMultiDict(headers)), remote)


def by_file(folder: Path) -> dict[str, Any]:
    file = folder / "jwks.json"
    _ = file.write_text(ONE)
    return {"source": "jwt", "issuer": ISSUER, "jwks_file": str(file)}


async def test_a_header_names_the_caller_only_if_a_trusted_proxy_sent_it() -> None:
    by_header = authenticator(BY_HEADER)
    trusted = await by_header.caller(sent(("X-User", "ada")), is_checked=True)
    assert trusted == Caller(principals.of_header("ada"), None)
    assert await by_header.caller(sent(("X-User", "ada"), remote=STRANGER), is_checked=True) == Caller(
        principals.ANONYMOUS, "x-user"
    )
    assert (await by_header.caller(sent(), is_checked=True)).principal == principals.ANONYMOUS


@pytest.mark.parametrize("name", ["Authorization", "X-User"])
async def test_a_header_that_tells_who_is_calling_comes_once(name: str, tmp_path: Path) -> None:
    twice = sent((name, "Bearer a"), (name, "Bearer b"))
    settings = [BY_HEADER] if name == "X-User" else [BY_HEADER, {}, by_file(tmp_path)]
    for principal in settings:
        with pytest.raises(InvalidRequest, match=f"(?i){name} came 2 times"):
            _ = await authenticator(principal).caller(twice, is_checked=True)
    assert twice.caller is None


async def test_a_token_that_the_upstream_does_not_check_is_opaque() -> None:
    one = ("Authorization", bearer())
    checked = await authenticator({}).caller(sent(one), is_checked=True)
    assert checked.principal == principals.of_claims(ISSUER, "ada", "app")
    opaque = await authenticator({}).caller(sent(one), is_checked=False)
    assert opaque.principal == principals.of_authorization(one[1], is_checked=False)


async def test_a_caller_is_determined_once() -> None:
    incoming = sent(("Authorization", "Bearer a"))
    found = await authenticator({}).caller(incoming, is_checked=True)
    assert incoming.caller is found
    assert await authenticator(BY_HEADER).caller(incoming, is_checked=True) is found
