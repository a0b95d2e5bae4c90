"""Verifies bearer tokens with the cached keys of their issuer (JWKS).

Rule 1: a request waits for keys only if there are none, or if its token names an unknown key; and never longer than
one fetch may take. There is one fetch at a time, and a pause after each, whatever tokens arrive.
Rule 2: keys that cannot be refreshed are used for a day, and not a second longer.
"""

import asyncio
import hashlib
from contextlib import closing
from typing import Final

from yarl import URL

from gateway import world
from gateway.config import Principal, redacted_url
from gateway.http.upstream_client import Client
from gateway.http_client.errors import RequestFailed
from gateway.identity.jwt_verification import LEEWAY_SECONDS, BadToken, Key, Verified, read_keys, verify
from gateway.protocol.errors import NoKeys, Unauthorized
from gateway.runtime.newest import Newest
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Event, get_logger

log = get_logger()

_FRESH_SECONDS: Final = 300.0
"""Keys of this age are refreshed in the background, while they still serve requests."""
_STALE_SECONDS: Final = 86_400.0
"""How long keys serve after the last successful fetch: an issuer that fails for longer needs an operator anyway."""
_PAUSE_SECONDS: Final = 10.0
_FETCH_SECONDS: Final = 5.0
_MAX_BYTES: Final = 262_144
_ACCEPTED: Final = {"Accept": "application/json"}
_TOKENS_KEPT: Final = 10_000


class JwksVerifier:
    """Verifies the tokens of one issuer under one configuration."""

    def __init__(self, principal: Principal, keys: tuple[Key, ...], client: Client, tasks: Tasks) -> None:
        """`keys` are those of `jwks_file`; without that, they are fetched."""
        self._principal = principal
        self._client = client
        self._tasks = tasks
        self._keys = keys
        # Keys of a file are always fresh, and are never fetched.
        self._fetched = self._tried = float("-inf") if principal.jwks_file is None else float("inf")
        self._fetching: asyncio.Task[None] | None = None
        self._verified: Newest[bytes, Verified] = Newest(_TOKENS_KEPT)
        """By the token's digest, the least recently used first."""
        self._fetch_soon()  # else the first request would wait for them

    async def principal(self, authorization: str | None) -> bytes:
        """The principal of an `Authorization` header value; raises Unauthorized or NoKeys."""
        scheme, _, token = (authorization or "").strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthorized("This gateway requires a bearer token; send one in Authorization", has_token=False)
        age = world.monotonic() - self._fetched
        if _FRESH_SECONDS <= age < _STALE_SECONDS:
            self._fetch_soon()
        elif age >= _STALE_SECONDS and not await self._fetch():
            raise NoKeys("The issuer's signing keys cannot be fetched, so no token can be verified; call again later")
        # Remembered by digest, so that the cache holds no credentials.
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        known = self._verified.get(digest)
        # A remembered token expires when `verify` would refuse it.
        if known is not None and world.wall() < known.expires + LEEWAY_SECONDS:
            self._verified.move_to_end(digest)
            return known.principal
        issuer, audience = self._principal.issuer, self._principal.audience
        assert issuer is not None, "a rule of the configuration"
        try:
            verified = verify(token, self._keys, issuer, audience)
            if verified is None and await self._fetch():
                verified = verify(token, self._keys, issuer, audience)
        except BadToken as exc:
            raise Unauthorized(str(exc), has_token=True) from exc
        if verified is None:
            raise Unauthorized("The token is signed with a key that its issuer does not publish", has_token=True)
        _ = self._verified.keep(digest, verified)
        return verified.principal

    def _fetch_soon(self) -> None:
        """Begin a fetch, unless one is under way or the pause after the last one is not over."""
        now = world.monotonic()
        if self._fetching is None and now - self._tried >= _PAUSE_SECONDS:
            self._tried = now
            self._fetching = self._tasks.start(self._refresh(), "fetch keys")

    async def _fetch(self) -> bool:
        """Wait for a fetch, if one is under way or may begin; return whether it brought keys."""
        self._fetch_soon()
        if self._fetching is None:
            return False
        before = self._fetched
        # A client that disconnects while it waits does not cancel the fetch.
        _ = await asyncio.wait((self._fetching,))
        return self._fetched > before

    async def _refresh(self) -> None:
        """Fetch once; a failure is logged."""
        url = self._principal.jwks_url
        assert url is not None, "a rule of the configuration"
        try:
            keys = await fetch(self._client, url)
        except (RequestFailed, TimeoutError, ValueError) as exc:
            log.warning(
                Event.KEYS_FAILED,
                url=redacted_url(url),
                cause=str(exc) or f"no answer within {_FETCH_SECONDS:g} s",
                note=f"keys fetched before that stay in use: {len(self._keys)}",
            )
        else:
            if keys != self._keys:
                # A withdrawn key must not vouch for cached tokens.
                self._keys = keys
                self._verified.clear()
            self._fetched = world.monotonic()
        finally:
            self._fetching = None


async def fetch(client: Client, url: str) -> tuple[Key, ...]:
    """Return the keys that an issuer serves; raises RequestFailed, TimeoutError, or ValueError for its answer."""
    async with asyncio.timeout(_FETCH_SECONDS):
        with closing(await client.send("GET", URL(url), _ACCEPTED, b"")) as reply:
            if reply.status != 200:
                raise ValueError(f"answered HTTP {reply.status}")
            body = await reply.read_at_most(_MAX_BYTES)
    if body is None:
        raise ValueError(f"is larger than {_MAX_BYTES} bytes")
    return read_keys(body)
