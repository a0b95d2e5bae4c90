"""OAuth's paths, with an authorization server that does on command what real ones do not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from gateway.plugins.oauth import oauth_metadata, oauth_proxy
from tests.support.fake_upstream import DEADLINE, FakeUpstream
from tests.support.raw_connection import raw_connection
from tests.support.served import Served
from tests.support.workbench import Stand, eventually, later

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class FakeIssuer(Served):
    """A FAKE upstream origin with metadata; what has no handler is 404, and all that comes is recorded."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.handlers: dict[str, Handler] = {}

    async def start(self, *where: Any) -> None:
        await super().start(*where)
        self.says(
            oauth_metadata.RESOURCE + "/mcp", resource=f"{self.origin}/mcp", authorization_servers=[f"{self.origin}/"]
        )
        self.says(
            oauth_metadata.SERVER,
            issuer=f"{self.origin}/",
            authorization_endpoint=f"{self.origin}/sso/authorize",
            token_endpoint=f"{self.origin}/sso/token",
        )

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        self.seen.append((http.method, http.path_qs, dict(http.headers), await http.read()))
        handler = self.handlers.get(http.path)
        return await handler(http) if handler is not None else web.Response(status=404)

    def says(self, path: str, **document: Any) -> None:
        async def say(_: web.BaseRequest) -> web.StreamResponse:
            return web.json_response(document)

        self.handlers[path] = say

    def answers(self, path: str, **response: Any) -> None:
        async def answer(_: web.BaseRequest) -> web.StreamResponse:
            return web.Response(**response)

        self.handlers[path] = answer

    def sends(self, path: str, head: bytes, body: bytes) -> None:
        """Answer with a head that aiohttp would not write."""

        async def send(http: web.BaseRequest) -> web.StreamResponse:
            assert http.transport is not None
            http.transport.write(b"HTTP/1.1 200 OK\r\n%b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
            http.transport.close()
            return web.Response()

        self.handlers[path] = send

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.seen]


@pytest.fixture
async def issuer() -> AsyncIterator[FakeIssuer]:
    async with FakeIssuer() as fake:
        yield fake


def route(path: str, origin: str) -> dict[str, Any]:
    return {"path": path, "upstream": {"url": f"{origin}/mcp"}}


class Browser:
    """Speaks plain HTTP to a gateway."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.base = f"http://{stand.gateway.listen}"

    async def ask(self, path: str, method: str = "GET", **options: Any) -> tuple[aiohttp.ClientResponse, bytes]:
        async with (
            asyncio.timeout(DEADLINE),
            self.stand.http.request(method, self.base + path, allow_redirects=False, **options) as response,
        ):
            return response, await response.read()

    async def document(self, path: str, **options: Any) -> dict[str, Any]:
        response, _ = await self.ask(path, **options)
        assert response.status == 200
        document: dict[str, Any] = await response.json()
        return document

    async def refusal(self, path: str, method: str = "GET", **options: Any) -> tuple[int, str]:
        response, _ = await self.ask(path, method, **options)
        return response.status, (await response.json())["error"]["message"]


async def test_with_several_upstreams_the_path_of_the_route_decides(begin: Any, issuer: FakeIssuer) -> None:
    async with FakeIssuer() as other:
        other.says(oauth_metadata.SERVER, issuer=other.origin, token_endpoint=f"{other.origin}/t")
        other.answers("/t", text="from the other")
        browser = Browser(await begin(routes=[route("/a", issuer.origin), route("/b", other.origin)]))
        described = await browser.document(oauth_metadata.SERVER + "/b")
        assert described == {"issuer": f"{browser.base}/b", "token_endpoint": f"{browser.base}/token/b"}
        _, body = await browser.ask("/token/b", "POST")
        assert body == b"from the other"
        assert issuer.seen == []

        for path in (oauth_metadata.SERVER, oauth_metadata.RESOURCE, oauth_metadata.SERVER + "/c"):
            status, said = await browser.refusal(path)
            assert (status, "append the path of a route to" in said) == (404, True)
        assert issuer.seen == []


async def test_a_bare_path_belongs_to_the_only_upstream(begin: Any, issuer: FakeIssuer) -> None:
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))
    described = await browser.document(oauth_metadata.SERVER)
    assert described["issuer"] == f"{browser.base}/"
    assert described["token_endpoint"] == f"{browser.base}/token/mcp"
    assert await browser.document("/mcp" + oauth_metadata.OPENID) == await browser.document(
        oauth_metadata.OPENID + "/mcp"
    )


async def test_an_upstream_that_knows_its_public_name_is_left_as_it_is(begin: Any, issuer: FakeIssuer) -> None:
    public = "https://public.example.com"
    resource = {"resource": f"{public}/mcp", "authorization_servers": [f"{public}/"]}
    issuer.says(oauth_metadata.RESOURCE + "/mcp", **resource)
    issuer.says(oauth_metadata.SERVER, issuer=f"{public}/", token_endpoint=f"{public}/token")
    issuer.answers("/token", text="{}")
    browser = Browser(await begin(url=f"{issuer.origin}/mcp", public_url=f"{public}:443"))
    assert await browser.document(oauth_metadata.RESOURCE + "/mcp") == resource
    described = await browser.document(oauth_metadata.SERVER)
    assert described == {"issuer": f"{public}/", "token_endpoint": f"{public}/token/mcp"}
    for path in ("/token", "/token/mcp"):
        _ = await browser.ask(path, "POST", data={"resource": f"{public}/mcp"})
        _, came, _, body = issuer.seen[-1]
        assert (came, body) == ("/token", urlencode({"resource": f"{public}/mcp"}).encode())


async def test_only_endpoints_that_the_metadata_names_are_reached(begin: Any, issuer: FakeIssuer) -> None:
    for path in ("/register", "/revoke", "/admin", "/token", "/sso/token"):
        issuer.answers(path, text="secret")
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))
    for path in ("/register", "/register/mcp", "/revoke/mcp", "/admin", "/sso/token", "/token/mcp/../../admin"):
        status, _ = await browser.refusal(path, "POST")
        assert status == 404
    assert (await browser.ask("/token/mcp", "GET"))[0].status == 405
    assert set(issuer.paths) <= {oauth_metadata.RESOURCE + "/mcp", oauth_metadata.SERVER}
    assert (await browser.ask("/token/mcp", "POST"))[1] == b"secret"
    assert issuer.paths[-1] == "/sso/token"


async def test_an_upstream_without_metadata_gets_no_oauth_request(begin: Any, issuer: FakeIssuer) -> None:
    issuer.handlers = {}
    issuer.answers("/token", text="a page of its own")
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))
    assert (await browser.refusal("/token/mcp", "POST"))[0] == 404
    assert (await browser.refusal(oauth_metadata.RESOURCE + "/mcp")) == (
        404,
        "The upstream of route /mcp publishes no oauth-protected-resource",
    )
    assert "/token" not in issuer.paths


async def test_the_public_name_is_configured_or_a_trusted_proxys_or_the_requests(
    begin: Any, issuer: FakeIssuer
) -> None:
    url = f"{issuer.origin}/mcp"
    forwarded = {"X-Forwarded-Proto": "https, http", "X-Forwarded-Host": "mcp.example.com, inner"}
    path = oauth_metadata.RESOURCE + "/mcp"
    asked: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"principal": {"trusted_proxies": ["127.0.0.0/8"]}}, "https://mcp.example.com"),
        ({"principal": {"trusted_proxies": ["10.0.0.0/8"]}}, ""),
        ({"public_url": "https://public.example.com"}, "https://public.example.com"),
    ]
    for sections, name in asked:
        browser = Browser(await begin(url=url, **sections))
        said = await browser.document(path, headers=forwarded)
        assert said["resource"] == f"{name or browser.base}/mcp"
    browser = Browser(await begin(url=url))
    status, said = await browser.refusal(path, headers={"Host": 'localhost"x'})
    assert status in {400, 403}


async def test_credentials_go_to_the_token_endpoint_and_nowhere_else(begin: Any, issuer: FakeIssuer) -> None:
    issuer.answers("/sso/token", text="{}", headers={"Set-Cookie": "a=b", "Cache-Control": "no-store"})
    issuer.answers("/sso/authorize", text="<p>", headers={"X-Frame-Options": "DENY"})
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))
    headers = {"Authorization": "Basic abc", "Cookie": "session=1", "X-Other": "1", "Content-Type": "text/plain"}
    for method, path in (("GET", oauth_metadata.SERVER + "/mcp"), ("GET", "/authorize/mcp"), ("POST", "/token/mcp")):
        response, _ = await browser.ask(path, method, headers=headers)
        assert response.status == 200
        assert "Set-Cookie" not in response.headers
    assert response.headers["Cache-Control"] == "no-store"
    assert [path for _, path, headers, _ in issuer.seen if "Authorization" in headers] == ["/sso/token"]
    assert not any({"Cookie", "X-Other"} & set(headers) for _, _, headers, _ in issuer.seen)


async def test_oauth_requests_carry_the_headers_that_their_route_sets(begin: Any, issuer: FakeIssuer) -> None:
    issuer.answers("/sso/token", text="token")
    first = {**route("/a", issuer.origin), "set_headers": {"X-Api-Key": "key of a"}}
    second = {**route("/b", issuer.origin), "set_headers": {"X-Api-Key": "key of b", "accept-language": "en"}}
    replaced = {"mode": "replace", "token": "service"}
    browser = Browser(await begin(routes=[first, {**second, "credentials": replaced}]))
    _ = await browser.document(oauth_metadata.RESOURCE + "/a")
    assert {CIMultiDict(sent)["X-Api-Key"] for _, _, sent, _ in issuer.seen} == {"key of a"}
    issuer.seen.clear()

    _ = await browser.document(oauth_metadata.RESOURCE + "/b")
    assert issuer.seen, "other headers may get other metadata, so routes do not share it"
    own = {"X-Api-Key": "the client's", "Accept-Language": "de", "Authorization": "Basic client"}
    _, body = await browser.ask("/token/b", "POST", headers=own)
    assert body == b"token"
    assert {CIMultiDict(sent)["X-Api-Key"] for _, _, sent, _ in issuer.seen} == {"key of b"}
    sent = CIMultiDict(issuer.seen[-1][2])
    assert (sent.getall("Accept-Language"), sent.getall("Authorization")) == (["en"], ["Basic client"])


async def test_a_resource_is_asked_for_under_the_upstreams_name(begin: Any, issuer: FakeIssuer) -> None:
    issuer.answers("/sso/token", text="{}")
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))
    _ = await browser.ask("/token/mcp", "POST", data={"code": "a+b c", "resource": f"{browser.base}/mcp"})
    assert issuer.seen[-1][3] == urlencode({"code": "a+b c", "resource": f"{issuer.origin}/mcp"}).encode()


async def test_redirects_go_to_the_client_with_the_issuer_that_it_knows(begin: Any, issuer: FakeIssuer) -> None:
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))
    back = "http://127.0.0.1:9/cb?code=1&iss="
    for came, goes in (
        (back + issuer.origin + "/&state=x", back + f"{browser.base}/mcp".replace(":", "%3A").replace("/", "%2F")),
        (back + "https://elsewhere", back + "https://elsewhere"),
        ("/login?next=1", f"{issuer.origin}/login?next=1"),
        ("app.example:/done", "app.example:/done"),
    ):
        issuer.answers("/sso/authorize", status=302, headers={"Location": came})
        response, _ = await browser.ask("/authorize/mcp?state=x")
        assert response.status == 302
        assert response.headers["Location"].removesuffix("&state=x") == goes


async def test_headers_that_are_not_text_are_not_forwarded(begin: Any, issuer: FakeIssuer) -> None:
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))

    async def status(request: bytes) -> bytes:
        async with raw_connection(browser.stand) as raw:
            await raw.send(request + b"\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            return (await raw.rest()).split()[1]

    issuer.answers("/sso/authorize", text="<p>")
    assert await status(b"GET /authorize/mcp?state=\xff HTTP/1.1") == b"400"
    assert await status(b"GET /authorize/mcp?state=x HTTP/1.1\r\nAccept-Language: \xff") == b"200"
    assert "Accept-Language" not in issuer.seen[-1][2]
    issuer.answers("/sso/authorize", status=302, headers={"Location": "http://[", "Retry-After": "\udcff"})
    assert await status(b"GET /authorize/mcp?state=x HTTP/1.1") == b"302"
    issuer.answers("/sso/authorize", status=302, headers={"Location": "//["})
    assert await status(b"GET /authorize/mcp?state=x HTTP/1.1") == b"302"
    issuer.says(oauth_metadata.SERVER, issuer=issuer.origin, authorization_endpoint=f"{issuer.origin}/a HTTP/1.1 b")
    browser.stand.gateway.apply(browser.stand.gateway.config)
    assert await status(b"GET /authorize/mcp HTTP/1.1") == b"502"


async def test_a_page_may_have_headers_that_http_1_1_has_given_up(begin: Any, issuer: FakeIssuer) -> None:
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))
    issuer.sends("/sso/authorize", b"Content-Security-Policy: default-src 'self';\r\n  img-src *\r\nX: \x01", b"<p>")
    response, body = await browser.ask("/authorize/mcp")
    assert (response.status, body) == (200, b"<p>")
    assert response.headers["Content-Security-Policy"].split() == ["default-src", "'self';", "img-src", "*"]
    assert "X" not in response.headers


async def test_only_pages_of_an_allowed_origin_may_ask(begin: Any, issuer: FakeIssuer) -> None:
    browser = Browser(
        await begin(url=f"{issuer.origin}/mcp", security={"allowed_origins": ["https://app.example.com"]})
    )
    allowed, foreign = {"Origin": "https://app.example.com"}, {"Origin": "https://evil.example.com"}
    asked = {"Access-Control-Request-Method": "POST"}
    response, _ = await browser.ask("/token/mcp", "OPTIONS", headers=allowed | asked)
    assert response.status == 204
    assert response.headers["Access-Control-Allow-Origin"] == "https://app.example.com"
    assert "POST" in response.headers["Access-Control-Allow-Methods"]
    assert issuer.seen == []
    response, _ = await browser.ask(oauth_metadata.SERVER + "/mcp", headers=allowed)
    assert response.headers["Access-Control-Allow-Origin"] == "https://app.example.com"
    response, _ = await browser.ask(oauth_metadata.SERVER + "/mcp", headers=foreign)
    assert response.status == 403


async def test_an_upstream_that_fails_is_a_bad_gateway_and_not_a_missing_document(
    begin: Any, issuer: FakeIssuer
) -> None:
    """A client takes 404 for "there is none" and signs in another way."""
    never = asyncio.Event()

    async def stall(_: web.BaseRequest) -> web.StreamResponse:
        await never.wait()
        return web.Response()

    async def drip(http: web.BaseRequest) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(http)
        while True:
            await stream.write(b" " * 65536)

    good = issuer.handlers[oauth_metadata.SERVER]
    browser = Browser(await begin(url=f"{issuer.origin}/mcp", timeouts={"handshake_seconds": 0.5}))
    issuer.handlers[oauth_metadata.SERVER] = stall
    assert (await browser.refusal(oauth_metadata.SERVER + "/mcp"))[0] == 502
    issuer.handlers[oauth_metadata.SERVER] = drip
    patient = Browser(await begin(url=f"{issuer.origin}/mcp"))
    status, said = await patient.refusal(oauth_metadata.SERVER + "/mcp")
    assert (status, "more than" in said) == (502, True)
    for response in ({"status": 500}, {"status": 429}, {"text": "<html>"}, {"text": "[]"}, {"text": "[" * 9999}):
        issuer.answers(oauth_metadata.SERVER, **response)
        assert (await browser.refusal(oauth_metadata.SERVER + "/mcp"))[0] == 502
    issuer.handlers[oauth_metadata.SERVER] = good  # a failure is not remembered
    assert (await browser.document(oauth_metadata.SERVER + "/mcp"))["issuer"] == f"{browser.base}/mcp"
    never.set()


@pytest.mark.parametrize(("path", "asked"), [("/caf\u00e9", "/caf%C3%A9"), ("/a b", "/a%20b")])
async def test_the_path_of_an_authorization_server_may_need_escapes(
    begin: Any, issuer: FakeIssuer, path: str, asked: str
) -> None:
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))
    issuer.says(oauth_metadata.RESOURCE + "/mcp", authorization_servers=[f"{issuer.origin}{path}"])
    assert (await browser.refusal(oauth_metadata.SERVER + "/mcp"))[0] == 404
    assert oauth_metadata.SERVER + asked in issuer.paths


async def test_only_so_many_wait_for_authorization_servers(
    begin: Any, issuer: FakeIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oauth_proxy, "_AT_ONCE", 1)
    go = asyncio.Event()
    document = issuer.handlers[oauth_metadata.SERVER]

    async def wait(http: web.BaseRequest) -> web.StreamResponse:
        await go.wait()
        return await document(http)

    issuer.handlers[oauth_metadata.SERVER] = wait
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))
    first = later(browser.document(oauth_metadata.SERVER + "/mcp"))
    await eventually(lambda: oauth_metadata.SERVER in issuer.paths, "the first waits")
    assert (await browser.refusal(oauth_metadata.SERVER + "/mcp"))[0] == 503
    go.set()
    assert (await first)["issuer"] == f"{browser.base}/mcp"
    assert (await browser.document(oauth_metadata.SERVER + "/mcp")) == await first


async def test_metadata_is_fetched_again_only_after_a_reload(begin: Any, issuer: FakeIssuer) -> None:
    stand = await begin(url=f"{issuer.origin}/mcp")
    browser = Browser(stand)
    for _ in range(3):
        _ = await browser.document(oauth_metadata.RESOURCE + "/mcp")
    assert issuer.paths.count(oauth_metadata.RESOURCE + "/mcp") == 1
    stand.gateway.apply(stand.gateway.config)
    _ = await browser.document(oauth_metadata.RESOURCE + "/mcp")
    assert issuer.paths.count(oauth_metadata.RESOURCE + "/mcp") == 2


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_call_leads_its_client_to_the_gateways_metadata(
    upstream: FakeUpstream, stand: Stand, status: int
) -> None:
    own = upstream.url.removesuffix("/mcp")
    value = f'Bearer scope="a", resource_metadata="{own}/.well-known/oauth-protected-resource/mcp"'

    upstream.on("tools/call", lambda turn: turn.reply(status, b"", {"WWW-Authenticate": value}))
    reply = await stand.client("Bearer t").call()
    assert reply.status == status
    assert reply.headers["WWW-Authenticate"] == value.replace(own, f"http://{stand.gateway.listen}")


async def test_the_upstreams_own_metadata_goes_before_what_the_gateway_knows(begin: Any, issuer: FakeIssuer) -> None:
    """A legacy server may list scopes, or an authorization server in front of the issuer."""
    principal = {"source": "jwt", "issuer": "https://as.example", "jwks_url": f"{issuer.origin}/jwks"}
    browser = Browser(await begin(url=f"{issuer.origin}/mcp", principal=principal))
    document = await browser.document(f"{oauth_metadata.RESOURCE}/mcp")
    assert document["authorization_servers"] == [f"{browser.base}/mcp"]
    del issuer.handlers[f"{oauth_metadata.RESOURCE}/mcp"]
    browser.stand.gateway.apply(browser.stand.gateway.config)
    document = await browser.document(f"{oauth_metadata.RESOURCE}/mcp")
    assert document["authorization_servers"] == ["https://as.example"]


async def test_an_authorization_that_came_twice_reaches_no_endpoint(begin: Any, issuer: FakeIssuer) -> None:
    issuer.answers("/sso/token", text="a token")
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))
    twice = CIMultiDict([("Authorization", "Basic bWluZQ=="), ("Authorization", "Basic eW91cnM=")])
    response, body = await browser.ask("/token/mcp", "POST", headers=twice)
    assert response.status == 400
    assert b"The header Authorization came 2 times" in body
    assert issuer.seen == []


async def test_headers_that_came_twice_go_both_ways_in_their_order(begin: Any, issuer: FakeIssuer) -> None:
    challenges = CIMultiDict([("WWW-Authenticate", 'Basic realm="a"'), ("WWW-Authenticate", "Bearer")])
    issuer.answers("/sso/token", status=401, headers=challenges)
    browser = Browser(await begin(url=f"{issuer.origin}/mcp"))
    twice = CIMultiDict([("Accept-Language", "de"), ("Accept-Language", "en;q=0.5")])
    response, _ = await browser.ask("/token/mcp", "POST", headers=twice)
    assert response.headers.getall("WWW-Authenticate") == ['Basic realm="a", Bearer']
    assert issuer.seen[-1][2]["Accept-Language"] == "de, en;q=0.5"
