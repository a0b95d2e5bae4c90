"""What a client is told of an error: its message, or only the sentence of its class (`errors` in the configuration).

Like the log, the switch is one per process. What a client is not told is logged, with the request id that it is told:
of refusals, which any stranger can cause, one a second.
"""

from typing import Final

from gateway import world
from gateway.protocol.errors import DownstreamError, GatewayError
from gateway.telemetry import Event, LineLimit, get_logger

log = get_logger()


Sender = tuple[str | None, str | None]
"""The route and the tag of the caller, as far as they are known."""
UNKNOWN: Final = None, None


class ErrorTexts:
    """Words errors for clients."""

    are_brief = False
    left_out = ""
    """What is taken out of messages: under `wrap`, the route, of which its user knows nothing."""

    def __init__(self) -> None:
        self.refusals = LineLimit()

    def told(self, error: GatewayError, request_id: str, sender: Sender = UNKNOWN) -> str:
        """The text for a client; `request_id` is empty if no HTTP request waits for it, and then a new id is told."""
        if not (self.are_brief and error.brief):
            return error.message.replace(self.left_out, "")
        request_id = request_id or world.token_hex(6)
        suppressed = self.refusals.take() if isinstance(error, DownstreamError) else 0
        if suppressed is not None:
            about = {"suppressed": suppressed, "request_id": request_id, "route": sender[0], "caller": sender[1]}
            log.warning(Event.ERROR_SHORTENED, cause=error.message, fix=error.fix, **about)
        return f"{error.brief} (requestId {request_id})"  # in the text too: many hosts show no data of an error


texts: Final = ErrorTexts()
