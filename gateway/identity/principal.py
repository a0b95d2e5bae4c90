"""Derives the principal (the identity of the caller) from a request's headers.

Sessions are pooled by principal, and states are bound to it. For a JWT it is (iss, sub, client) instead of the token's
bytes, because clients refresh access tokens between rounds. The signature is not checked here (if configured,
`identity.jwt_verification` does that): the token goes upstream with every leg, and the upstream authorises it. If it
does not go upstream, no server checks it, so a JWT is treated as an opaque token. The principal of an opaque token is
its digest.
Requests without a credential share one principal, "anonymous".
"""

import base64
import hashlib
import ipaddress
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final

import msgspec

ANONYMOUS: Final = hashlib.sha256(b"anonymous").digest()


class _TokenClaims(msgspec.Struct):
    iss: str = ""
    sub: str = ""
    client_id: str = ""
    azp: str = ""


def of_authorization(authorization: str | None, *, is_checked: bool = True) -> bytes:
    """The principal of an `Authorization` header value; `is_checked`: the upstream gets and checks it."""
    if authorization is None:
        return ANONYMOUS
    return _of_credential(authorization) if is_checked else _digest(b"opaque", authorization)


def of_headers(names: Sequence[str], value_of: Callable[[str], str | None]) -> bytes:
    """A digest of the named headers, which are credentials (`routes[].bind_headers`); empty for no names.

    For a JWT, with or without `Bearer`, only its claims count, as in `of_authorization`, because proxies refresh
    tokens too. A missing header differs from every value, even an empty one.
    """
    if not names:
        return b""
    each = [
        (name, None if (value := value_of(name)) is None else _of_credential(value, may_be_bare=True).hex())
        for name in names
    ]
    return hashlib.sha256(b"headers\0" + msgspec.json.encode(sorted(each))).digest()


def _of_credential(value: str, *, may_be_bare: bool = False) -> bytes:
    """The principal of a JWT's unverified claims, or of the credential as it is, if issuer or subject is missing.

    Proxies send a token without its scheme.
    """
    scheme, _, token = value.strip().partition(" ")
    if may_be_bare and not token:
        scheme, token = "bearer", scheme
    parts = token.strip().split(".")
    # An encrypted JWT has five parts (RFC 7516), and its claims cannot be read here.
    if scheme.lower() == "bearer" and len(parts) == 3:
        with suppress(ValueError, RecursionError):  # it is no JWT
            content = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
            claims = msgspec.json.decode(content, type=_TokenClaims)
            if claims.iss and claims.sub:
                return of_claims(claims.iss, claims.sub, claims.client_id or claims.azp)
    return _digest(b"opaque", value)


def of_claims(issuer: str, subject: str, client: str) -> bytes:
    """The principal of a token's claims."""
    # JSON, since joined texts of other parts could be equal. The prefix sets it apart from other credentials.
    return hashlib.sha256(b"jwt\0" + msgspec.json.encode((issuer, subject, client))).digest()


def of_header(value: str | None) -> bytes:
    """The principal that a trusted proxy names in a header; without the header, anonymous."""
    return ANONYMOUS if value is None else _digest(b"header", value)


def _digest(kind: bytes, value: str) -> bytes:
    """A digest of a header's original bytes, of which those that are not UTF-8 are decoded to surrogates."""
    return hashlib.sha256(kind + b"\0" + value.strip().encode(errors="surrogateescape")).digest()


def is_trusted(peer: str | None, proxies: tuple[str, ...]) -> bool:
    """Whether a request's TCP peer is a trusted proxy, in one of these networks."""
    address = parsed_address(peer or "")
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address  # how a dual-stack listener shows IPv4 peers
    return address is not None and any(address in network for network in _networks(proxies))


@lru_cache(maxsize=4)
def _networks(texts: tuple[str, ...]) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    return [ipaddress.ip_network(text) for text in texts]


def parsed_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address in a text; None if it is none."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
