"""One OAuth metadata document, seen from the other side of the gateway.

An upstream names itself by the URL at which the gateway reaches it. A client that was given the gateway's URL refuses
such a document: `resource` must be the URL that it was given, `issuer` the one that it asked for. So what an upstream
says of its own origin is said of the gateway's; what it says of anybody else stays as it is.

Sources: RFC 9728 (protected resources), RFC 8414 (authorization servers), RFC 8707 (`resource`), RFC 9207 (`iss`),
specification 2026-07-28 basic/authorization.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote_plus, urlsplit

RESOURCE: Final = "/.well-known/oauth-protected-resource"
SERVER: Final = "/.well-known/oauth-authorization-server"
OPENID: Final = "/.well-known/openid-configuration"

ENDPOINTS: Final = {
    "/authorize": "authorization_endpoint",
    "/token": "token_endpoint",
    "/register": "registration_endpoint",
    "/revoke": "revocation_endpoint",
}
"""The endpoints that the gateway serves in an upstream's place, and what the metadata calls them."""

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_METADATA_PARAMETER: Final = re.compile(r'(\bresource_metadata=)(?:"([^"]*)"|([^\s,"]+))', re.IGNORECASE)

Document = dict[str, Any]


class Place(NamedTuple):
    """One route, seen from both sides."""

    public: str
    """Origin at which clients reach the gateway."""
    suffix: str
    """The route's path; empty for `/`."""
    upstream: str
    """Origin of the upstream."""

    @property
    def resource(self) -> str:
        """The URL that clients are given."""
        return f"{self.public}{self.suffix or '/'}"

    def owns(self, url: object) -> bool:
        """Whether a URL names the upstream itself: by its own origin, or by the gateway's, if it knows that."""
        return origin(url) in {self.upstream, self.public}

    def is_private(self, url: object) -> bool:
        """Whether a URL names the upstream by an origin that clients were not given."""
        return origin(url) == self.upstream != self.public


def origin(url: object) -> str | None:
    """`scheme://host[:port]` of an http(s) URL, in one spelling; None for anything else."""
    if not isinstance(url, str):
        return None
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in _DEFAULT_PORTS or not host:
        return None
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (f":{port}" if port not in {None, _DEFAULT_PORTS[parts.scheme]} else "")


def challenge(value: str, place: Place) -> str:
    """A WWW-Authenticate value whose `resource_metadata` can be fetched from the gateway."""

    def named(match: re.Match[str]) -> str:
        if not place.is_private(match[2] or match[3]):
            return match[0]
        return f'{match[1]}"{place.public}{RESOURCE}{place.suffix}"'

    return _METADATA_PARAMETER.sub(named, value)


def protected_resource(document: Document, place: Place) -> Document:
    """RFC 9728 metadata as the client needs it: of the URL that it was given, and of servers that it can reach."""
    changed = dict(document)
    if place.is_private(document.get("resource")):
        changed["resource"] = place.resource
    servers = document.get("authorization_servers")
    if isinstance(servers, list):
        renamed = [place.public + place.suffix if place.is_private(each) else each for each in servers]
        changed["authorization_servers"] = list(dict.fromkeys(filter(_is_text, renamed)))
    return changed


def own_server(document: Document | None, place: Place) -> str:
    """Path of the authorization server that lives on the upstream's origin; empty for its root."""
    servers = (document or {}).get("authorization_servers")
    own = [each for each in servers if place.owns(each)] if isinstance(servers, list) else []
    return urlsplit(own[0]).path.rstrip("/") if own else ""


def authorization_server(document: Document, place: Place, asked: str) -> Document:
    """RFC 8414 metadata as the client needs it; `asked` is the suffix of the well-known URL that it asked for.

    The issuer must be the one that the URL was made from, as a string (RFC 8414 section 3.3).
    """
    changed = dict(document)
    if place.is_private(document.get("issuer")):
        changed["issuer"] = issuer(document, place, asked)
    for path, name in ENDPOINTS.items():
        if place.owns(document.get(name)):
            changed[name] = f"{place.public}{path}{place.suffix}"
    return changed


def issuer(document: Document, place: Place, asked: str) -> str:
    """The issuer under its public name; the slash at the end of a root's stays, for it is part of the string."""
    slash = "/" if not asked and str(document.get("issuer")).endswith("/") else ""
    return f"{place.public}{asked}{slash}"


def endpoint(document: Document, name: str, place: Place) -> str | None:
    """Where on the upstream an endpoint of its metadata is: path and query; None when it is somewhere else."""
    url = document.get(name)
    if not isinstance(url, str) or not place.owns(url):
        return None
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def replaced(encoded: str, values: Mapping[str, tuple[str, str]]) -> str:
    """A form or query in which named fields with one value have another; every other byte stays as it is."""
    return "&".join(_field(part, values) for part in encoded.split("&"))


def _field(part: str, values: Mapping[str, tuple[str, str]]) -> str:
    name, _, value = part.partition("=")
    found = values.get(unquote_plus(name))
    return f"{name}={quote(found[1], safe='')}" if found is not None and unquote_plus(value) == found[0] else part


def _is_text(value: object) -> bool:
    return isinstance(value, str)
