"""Rewrites an upstream's OAuth metadata so that it is valid at the gateway's URL.

An upstream names itself by the URL at which the gateway reaches it. A client that uses the gateway's URL refuses such
a document: `resource` must be the URL that it uses, `issuer` the one that it asked for. So URLs of the upstream's
origin are rewritten to the gateway's; all others stay unchanged.

Sources: RFC 9728 (protected resources), RFC 8414 (authorization servers), RFC 8707 (`resource`), RFC 9207 (`iss`),
specification 2026-07-28 basic/authorization.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote_plus, urlsplit

from yarl import URL

RESOURCE: Final = "/.well-known/oauth-protected-resource"
SERVER: Final = "/.well-known/oauth-authorization-server"
OPENID: Final = "/.well-known/openid-configuration"

ENDPOINTS: Final = {
    "/authorize": "authorization_endpoint",
    "/token": "token_endpoint",
    "/register": "registration_endpoint",
    "/revoke": "revocation_endpoint",
}
"""The endpoints that the gateway serves for an upstream, and their names in the metadata."""

_METADATA_PARAMETER: Final = re.compile(r'(\bresource_metadata=)(?:"([^"]*)"|([^\s,"]+))', re.IGNORECASE)

_PATH: Final = "/%:@!$&'()*+,;=~"
"""The punctuation that a path may have (RFC 3986), or has in its escapes."""

Document = dict[str, Any]


class Place(NamedTuple):
    """A route's public origin and path, and its upstream's origin."""

    public: str
    """The origin at which clients reach the gateway."""
    suffix: str
    """The route's path; empty for `/`."""
    upstream: str
    """The origin of the upstream."""

    @property
    def resource(self) -> str:
        """The URL that clients use."""
        return f"{self.public}{self.suffix or '/'}"

    def owns(self, url: object) -> bool:
        """Whether a URL names the upstream itself: by its own origin, or by the gateway's."""
        return origin(url) in {self.upstream, self.public}

    def is_private(self, url: object) -> bool:
        """Whether a URL names the upstream by an origin that clients do not know."""
        return origin(url) == self.upstream != self.public


def origin(url: object) -> str | None:
    """`scheme://host[:port]` of an http(s) URL, normalised; None for anything else."""
    if not isinstance(url, str):
        return None
    try:
        found = URL(url).origin()
    except (ValueError, IndexError):  # yarl raises IndexError for "http://[]@"
        return None
    return str(found) if found.scheme in ("http", "https") else None


def challenge(value: str, place: Place) -> str:
    """A WWW-Authenticate value whose `resource_metadata` points to the gateway."""

    def named(match: re.Match[str]) -> str:
        if not place.is_private(match[2] or match[3]):
            return match[0]
        return f'{match[1]}"{place.public}{RESOURCE}{place.suffix}"'

    return _METADATA_PARAMETER.sub(named, value)


def with_metadata(value: str, public: str, suffix: str) -> str:
    """A Bearer challenge that leads to the metadata of a route (RFC 9728 section 5.1), unless it names some."""
    scheme, space, rest = value.partition(" ")
    if scheme.lower() != "bearer" or _METADATA_PARAMETER.search(rest):
        return value
    parameter = f'resource_metadata="{public}{RESOURCE}{suffix}"'
    return f"{scheme} {parameter}{', ' if space else ''}{rest}"


def of_issuer(issuer: str, resource: str) -> Document:
    """RFC 9728 metadata of a resource whose tokens the gateway verifies, and whose upstream publishes none."""
    return {"resource": resource, "authorization_servers": [issuer], "bearer_methods_supported": ["header"]}


def protected_resource(document: Document, place: Place) -> Document:
    """RFC 9728 metadata for the client: of the URL that it uses, with authorization servers that it can reach."""
    changed = dict(document)
    if place.is_private(document.get("resource")):
        changed["resource"] = place.resource
    servers = document.get("authorization_servers")
    if isinstance(servers, list):
        renamed = [place.public + place.suffix if place.is_private(each) else each for each in servers]
        # Several servers at the upstream's origin become one URL.
        changed["authorization_servers"] = list(dict.fromkeys(each for each in renamed if isinstance(each, str)))
    return changed


def own_server(document: Document | None, place: Place) -> str:
    """The path of the authorization server on the upstream's origin, as it is sent; empty for its root."""
    servers = (document or {}).get("authorization_servers")
    own = [each for each in servers if place.owns(each)] if isinstance(servers, list) else []
    return quote(urlsplit(own[0]).path.rstrip("/"), safe=_PATH) if own else ""


def authorization_server(document: Document, place: Place, asked: str) -> Document:
    """RFC 8414 metadata for the client; `asked` is the suffix of the well-known URL that it requested.

    The issuer must equal, as a string, the one from which the URL was built (RFC 8414 section 3.3).
    """
    changed = dict(document)
    if place.is_private(document.get("issuer")):
        changed["issuer"] = issuer(document, place, asked)
    for path, name in ENDPOINTS.items():
        if place.owns(document.get(name)):
            changed[name] = f"{place.public}{path}{place.suffix}"
    return changed


def issuer(document: Document, place: Place, asked: str) -> str:
    """The public issuer; a root issuer keeps its final slash, because issuers are compared as strings."""
    slash = "/" if not asked and str(document.get("issuer")).endswith("/") else ""
    return f"{place.public}{asked}{slash}"


def endpoint(document: Document, name: str, place: Place) -> str | None:
    """Path and query of an endpoint in the upstream's metadata; None if it is on another origin."""
    url = document.get(name)
    if not isinstance(url, str) or not place.owns(url):
        return None
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def replaced(encoded: str, values: Mapping[str, tuple[str, str]]) -> str:
    """Replace the value of named fields in a form or query, if it is the given one; the rest stays unchanged."""
    parts = []
    for part in encoded.split("&"):
        name, _, value = part.partition("=")
        before, after = values.get(unquote_plus(name), (None, ""))
        parts.append(f"{name}={quote(after, safe='')}" if unquote_plus(value) == before else part)
    return "&".join(parts)
