"""Selects the headers of a client that go upstream on a route: credentials, configured lists, constants.

A bridged call (`for_call`) forwards only the listed headers. Traffic that passes through (`for_passing`) forwards all
headers except the listed ones.
"""

import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping

from gateway.config import DPOP, HOP_BY_HOP, Route
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol.errors import InvalidRequest

AUTHORIZATION: Final = "Authorization"
_NEVER: Final = HOP_BY_HOP | {"host", "expect", "content-length"}
"""The HTTP client that connects to the upstream writes these itself."""
_NEVER_BACK: Final = HOP_BY_HOP | {
    "access-control-allow-credentials",
    "access-control-allow-origin",
    "access-control-expose-headers",
}
"""The gateway says itself which pages may read its replies: the upstream does not know their origins."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_NONE: Final[dict[str, str]] = {}
_TRUSTED: Final = frozenset({"authorization", "cookie", "forwarded", "x-real-ip"})
_TRUSTED_PREFIXES: Final = ("x-forwarded-", "mcp-")
"""Headers that servers believe; no other spelling of them goes upstream."""


def asks_as_client(route: Route) -> bool:
    """Whether the upstream gets, and so checks, the client's own credential."""
    return route.credentials.mode == "forward"


def check_once(names: Iterable[str | None], headers: MultiMapping[str]) -> None:
    """Reject a request that repeats one of these headers, which identify the caller; raises InvalidRequest.

    If a proxy in front appends its own value, the caller could otherwise choose which of the values counts.
    """
    for name in names:
        if name is not None and name in headers and (times := len(headers.getall(name))) > 1:
            raise InvalidRequest(
                f"The header {name} came {times} times, and it tells who is calling; send it once, and have a proxy "
                "in front of the gateway replace it, not append to it"
            )


def joined(headers: MultiMapping[str], name: str) -> str | None:
    """The value of a header; the values of a repeated header are joined in order (RFC 9110 section 5.3).

    One line is equivalent to several, so the headers of a call can be a plain mapping. Cookies are joined by
    semicolons (RFC 9113 section 8.2.3).
    """
    values = headers.getall(name, ())
    if len(values) < 2:
        return values[0] if values else None
    return ("; " if name.lower() == "cookie" else ", ").join(values)


def is_valid_value(value: str) -> bool:
    """Whether a header may have this value (RFC 9110 section 5.5).

    Some parsers let control characters through. Bytes that are not UTF-8 came in as surrogates.
    """
    if _CONTROL.search(value) is not None:
        return False
    try:
        _ = value.encode()
    except UnicodeEncodeError:
        return False
    return True


def for_call(route: Route, headers: MultiMapping[str], distrusted: str | None = None) -> dict[str, str]:
    """What goes upstream with one call, but for a `distrusted` header; raises InvalidRequest if one cannot be sent."""
    check_once((AUTHORIZATION, *route.bound_headers), headers)
    sent: dict[str, str] = {}
    for name in (AUTHORIZATION, *route.forward_headers) if asks_as_client(route) else route.forward_headers:
        if name != distrusted and name in headers and (value := joined(headers, name)) is not None:
            sent[name] = _sendable(name, value)
    # A token may need a proof with each request.
    if DPOP in headers and (DPOP in sent or sent.get(AUTHORIZATION, "")[:5].lower() == "dpop "):
        check_once((DPOP,), headers)
        sent[DPOP] = _sendable(DPOP, headers[DPOP])
    own = own_headers(route)
    return {**sent, **own} if own else sent


def credential_of(headers: Mapping[str, str]) -> tuple[str | None, str | None]:
    """What the upstream checks of the headers of `for_call`, but for those that are part of the pool key.

    A token that needs a proof is worth nothing without it, so an upstream that accepted it with one proof has not
    accepted it with another.
    """
    return headers.get(AUTHORIZATION), headers.get(DPOP)


def credentials_in(route: Route, headers: Mapping[str, str]) -> bool:
    """Whether the headers that go upstream contain a credential of the client, which the upstream checks."""
    if asks_as_client(route) and AUTHORIZATION in headers:
        return True
    return any(name in headers for name in route.bound_headers)


def for_passing(
    route: Route, headers: CIMultiDictProxy[str], dropped: AbstractSet[str] = frozenset()
) -> CIMultiDict[str]:
    """The headers that go upstream with a request that passes through, repeated headers and order unchanged.

    Hop-by-hop headers, `Host`, `Expect`, `Content-Length` and `dropped` (lower case) are left out. Raises
    InvalidRequest.
    """
    check_once((AUTHORIZATION, *route.bound_headers), headers)
    own = own_headers(route)
    out = _NEVER | _connection_headers(headers.getall("Connection", ())) | dropped
    out |= set(route.drop_headers) | {name.lower() for name in own}
    if not asks_as_client(route):
        out |= {AUTHORIZATION.lower()}
    out |= disguised(headers, {*out, *_TRUSTED, *route.forward_headers, *route.bound_headers})
    sent = CIMultiDict((name, _sendable(name, value)) for name, value in headers.items() if name.lower() not in out)
    sent.extend(own)
    return sent


def disguised(headers: Iterable[str], names: AbstractSet[str]) -> set[str]:
    """The headers (lower case) that many servers take for one of these `names` (lower case): `x_user` for `x-user`.

    CGI and WSGI turn `-` and `_` into the same letter, so such a header would go past whoever checks the real one.
    """
    spelled = {name.lower() for name in headers if "_" in name}
    if not spelled:
        return spelled
    same = {name.replace("_", "-") for name in names}
    return {
        name
        for name in spelled - names
        if (dashed := name.replace("_", "-")) in same or dashed.startswith(_TRUSTED_PREFIXES)
    }


def passed_back(head: ReplyHead) -> CIMultiDict[str]:
    """The headers of a reply that go to the client: without hop-by-hop headers, invalid values, and CORS."""
    out: AbstractSet[str] = _NEVER_BACK
    if named := head.get_all(b"connection"):
        out = out | _connection_headers(value.decode("latin-1") for value in named)
    return CIMultiDict(
        (name, value) for name, value in head.texts() if name.lower() not in out and is_valid_value(value)
    )


def own_headers(route: Route) -> Mapping[str, str]:
    """The headers that the route sets; they replace those of the client and of the trace."""
    credentials = route.credentials
    if not route.set_headers and credentials.mode != "replace":
        return _NONE
    own = dict(route.set_headers)
    if credentials.mode == "replace" and credentials.token is not None:
        if credentials.header is None:
            own[AUTHORIZATION] = f"Bearer {credentials.token}"
        else:
            own[credentials.header] = credentials.token
    return own


def with_request_id(route: Route, headers: Mapping[str, str], request_id: str) -> Mapping[str, str]:
    """Headers of a request, with the id of the client's request that causes it if the upstream wants that."""
    name = route.upstream.request_id_header
    return headers if name is None else {**headers, name: request_id}


def _connection_headers(values: Iterable[str]) -> set[str]:
    """The headers that `Connection` makes hop-by-hop (RFC 9110 section 7.6.1)."""
    return {name.strip().lower() for value in values for name in value.split(",")}


def _sendable(name: str, value: str) -> str:
    if not is_valid_value(value):
        raise InvalidRequest(f"The header {name} is not UTF-8 without control characters")
    return value
