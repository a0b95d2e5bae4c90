"""The errors for requests that cannot be passed through."""

from gateway.http.incoming import Incoming
from gateway.protocol.errors import DownstreamError, GatewayError, InvalidRequest, NotAllowed


def not_allowed(method: str, allowed: str) -> GatewayError:
    """The error for an HTTP method that is not served."""
    return NotAllowed(f"HTTP {method[:20]} is not served here: a modern endpoint takes POST only", allowed=allowed)


def forwarding_loop(path: str) -> GatewayError:
    """The error for a request that this process has forwarded before."""
    said = f"The request returned to the gateway that had forwarded it: upstream.url of route {path} leads back here"
    return InvalidRequest(said, status=508)


def not_passable(incoming: Incoming) -> GatewayError:
    """The error for a legacy request that neither begins nor names a session, before a server that is a process."""
    if incoming.method != "POST":
        return not_allowed(incoming.method, "POST")
    try:
        _ = incoming.parsed()
    except DownstreamError as exc:
        return exc
    return InvalidRequest(
        f"The request names no session of route {incoming.path}: begin with `initialize`, and send the Mcp-Session-Id "
        "that its reply brings with every further request"
    )
