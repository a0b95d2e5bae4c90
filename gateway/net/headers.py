"""Which headers of a client go upstream on a route: its credentials, lists and constants; pure.

A call that is translated (`for_call`) takes along what is listed and nothing else; traffic of the old era that is
passed through (`for_passing`) takes along everything but what is listed.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping

from gateway.config import HOP_BY_HOP, Route
from gateway.errors import InvalidRequest

AUTHORIZATION: Final = "Authorization"
_NEVER: Final = HOP_BY_HOP | {"host", "expect", "content-length"}
"""The HTTP client towards the upstream writes its own."""


def asks_as_client(route: Route) -> bool:
    """Whether the upstream sees, and so checks, the client's own credential."""
    return route.credentials.mode == "forward"


def for_call(route: Route, headers: MultiMapping[str]) -> dict[str, str]:
    """Return what goes upstream with one call. Raises InvalidRequest for a value that cannot."""
    sent: dict[str, str] = {}
    for name in (AUTHORIZATION, *route.forward_headers) if asks_as_client(route) else route.forward_headers:
        value = headers.get(name)
        if value is not None:
            sent[name] = _sendable(name, value)
    sent.update(own_headers(route))
    return sent


def for_passing(
    route: Route, headers: CIMultiDictProxy[str], dropped: AbstractSet[str] = frozenset()
) -> CIMultiDict[str]:
    """Return what goes upstream with a request that is passed through, repeated headers and order as they came.

    Without those of the connection, `Host`, `Expect`, `Content-Length` and `dropped` (lower case). Raises
    InvalidRequest.
    """
    if len(headers.getall(AUTHORIZATION, ())) > 1:
        raise InvalidRequest("There are several Authorization headers; send one")  # the first one is who is calling
    own = own_headers(route)
    out = _NEVER | _named(headers.getall("Connection", ())) | dropped
    out |= set(route.drop_headers) | {name.lower() for name in own}
    if not asks_as_client(route):
        out |= {AUTHORIZATION.lower()}
    sent = CIMultiDict((name, _sendable(name, value)) for name, value in headers.items() if name.lower() not in out)
    sent.extend(own)
    return sent


def passed_back(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return what of a reply's headers goes to the client: all but those of one connection."""
    out = HOP_BY_HOP | _named(headers.getall("Connection", ()))
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in out and _encodes(value))


def own_headers(route: Route) -> dict[str, str]:
    """What the gateway says on its own account; no header of a client or a trace takes its place."""
    credentials = route.credentials
    own = dict(route.set_headers)
    if credentials.mode == "replace" and credentials.token is not None:
        if credentials.header is None:
            own[AUTHORIZATION] = f"Bearer {credentials.token}"
        else:
            own[credentials.header] = credentials.token
    return own


def _named(values: Iterable[str]) -> set[str]:
    """The headers that `Connection` makes hop-by-hop (RFC 9110 section 7.6.1)."""
    return {name.strip().lower() for value in values for name in value.split(",")}


def _sendable(name: str, value: str) -> str:
    if not _encodes(value):
        raise InvalidRequest(f"The header {name} is not UTF-8")
    return value


def _encodes(value: str) -> bool:
    """Whether a header value can be sent: bytes that are no UTF-8 came in as surrogates."""
    try:
        _ = value.encode()
    except UnicodeEncodeError:
        return False
    return True
