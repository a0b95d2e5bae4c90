"""Which headers of a client go upstream on a route: its credentials, lists and constants; pure.

A call that is translated (`for_call`) takes along what is listed and nothing else; traffic of the old era that is
passed through (`for_passing`) takes along everything but what is listed.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping

from gateway.config import HOP_BY_HOP, Route
from gateway.protocol.errors import InvalidRequest

AUTHORIZATION: Final = "Authorization"
_NEVER: Final = HOP_BY_HOP | {"host", "expect", "content-length"}
"""The HTTP client towards the upstream writes its own."""


def asks_as_client(route: Route) -> bool:
    """Whether the upstream sees, and so checks, the client's own credential."""
    return route.credentials.mode == "forward"


def check_once(names: Iterable[str | None], headers: MultiMapping[str]) -> None:
    """Refuse a request in which one of these comes several times; raises InvalidRequest.

    They tell who is calling. With a proxy that appends its own, the caller would choose which of them counts.
    """
    for name in names:
        if name is not None and (times := len(headers.getall(name, ()))) > 1:
            raise InvalidRequest(
                f"The header {name} came {times} times, and it tells who is calling; send it once, and have a proxy "
                "in front of the gateway replace it, not append to it"
            )


def joined(headers: MultiMapping[str], name: str) -> str | None:
    """The value of a header; that of a repeated one is its values in their order (RFC 9110 section 5.3).

    One line means the same as several, so headers of a call can be a plain mapping. Cookies are joined by semicolons
    (RFC 9113 section 8.2.3).
    """
    values = headers.getall(name, ())
    if len(values) < 2:
        return values[0] if values else None
    return ("; " if name.lower() == "cookie" else ", ").join(values)


def for_call(route: Route, headers: MultiMapping[str]) -> dict[str, str]:
    """Return what goes upstream with one call. Raises InvalidRequest for what cannot."""
    check_once((AUTHORIZATION, *route.bound_headers), headers)
    sent: dict[str, str] = {}
    for name in (AUTHORIZATION, *route.forward_headers) if asks_as_client(route) else route.forward_headers:
        value = joined(headers, name)
        if value is not None:
            sent[name] = _sendable(name, value)
    sent.update(own_headers(route))
    return sent


def credentials_in(route: Route, headers: Mapping[str, str]) -> bool:
    """Whether what goes upstream has a credential of the client's, which the upstream checks."""
    if asks_as_client(route) and AUTHORIZATION in headers:
        return True
    return any(name in headers for name in route.bound_headers)


def for_passing(
    route: Route, headers: CIMultiDictProxy[str], dropped: AbstractSet[str] = frozenset()
) -> CIMultiDict[str]:
    """Return what goes upstream with a request that is passed through, repeated headers and order as they came.

    Without those of the connection, `Host`, `Expect`, `Content-Length` and `dropped` (lower case). Raises
    InvalidRequest.
    """
    check_once((AUTHORIZATION, *route.bound_headers), headers)
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
