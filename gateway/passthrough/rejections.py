"""The errors for requests that cannot be passed through."""

from gateway.http.incoming import Incoming
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import DownstreamError, GatewayError, InvalidRequest, UnsupportedVersion


def not_allowed(method: str, allowed: str) -> GatewayError:
    """The error for an HTTP method that is not served."""
    error = InvalidRequest(f"HTTP {method[:20]} is not served here: a modern endpoint takes POST only")
    error.status = 405
    error.headers["Allow"] = allowed
    return error


def forwarding_loop(path: str) -> GatewayError:
    """The error for a request that this process has forwarded before."""
    error = InvalidRequest(
        f"The request returned to the gateway that had forwarded it: upstream.url of route {path} leads back here"
    )
    error.status = 508
    return error


def not_passable(incoming: Incoming) -> GatewayError:
    """The error for a legacy client whose bytes the upstream's transport cannot carry."""
    if incoming.method != "POST":
        return not_allowed(incoming.method, "POST")
    try:
        parsed = incoming.parsed()
    except DownstreamError as exc:
        return exc
    requested = jsonrpc.text(parsed.params.get("protocolVersion")) or incoming.headers.get(mcp.PROTOCOL_VERSION)
    error = UnsupportedVersion(requested or "none")
    error.message += (
        f"; this is a legacy request (it begins with initialize), and the server of route {incoming.path} does not "
        "speak streamable HTTP, so the request cannot be passed through: use a client of 2026-07-28, or connect to "
        "the server directly"
    )
    return error
