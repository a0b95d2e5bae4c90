"""Every way in which an HTTP request to an upstream can fail.

No message quotes bytes of the upstream: they may contain secrets, and control characters.
"""

import errno

from gateway import world
from gateway.protocol.errors import CallLost, DescriptorsShort, Unreachable, UpstreamError


class RequestFailed(Exception):
    """A request without a complete reply."""

    sent = True
    """Whether the upstream may have received a byte of the request. If not, it ran nothing."""
    cause = ""
    """What has happened, where that is always the same."""
    _said = "{where} {cause}; the request may have had effects"

    def __init__(self, cause: str = "") -> None:
        super().__init__(cause or self.cause)

    def mapped(self, where: str) -> UpstreamError:
        """Translate the failure for clients; `where` names the upstream."""
        error = CallLost if self.sent else Unreachable
        return error(self._said.format(where=where, cause=self))


class NotConnected(RequestFailed):
    """There is no connection, so the upstream ran nothing. The message is the reason."""

    sent = False
    _said = "{where} cannot be reached ({cause}); check that the server runs and that upstream.url is right"

    def mapped(self, where: str) -> UpstreamError:
        """See `RequestFailed`."""
        if none_left := world.no_descriptor(self.__cause__):
            return DescriptorsShort(f"{where} cannot be reached: {none_left}")
        if isinstance(self.__cause__, OSError) and self.__cause__.errno == errno.EADDRNOTAVAIL:
            fix = (
                "if many calls are held, widen net.ipv4.ip_local_port_range (each takes two ports), or add a replica "
                "on another host; if it is an IPv6 address, check that this host has IPv6"
            )
            return Unreachable(
                f"{where} cannot be reached: this host has no local address or port left for it", fix=fix
            )
        return super().mapped(where)


class ConnectTimedOut(NotConnected):
    """There was no connection within the deadline, TLS included."""

    cause = "connecting took too long"
    _said = "{where} did not accept a connection within timeouts.connect_seconds; check address and firewall"


class TlsRefused(NotConnected):
    """One of the two sides refused the TLS handshake. The message is the reason with its fix."""

    _said = "{where} cannot be reached over TLS: {cause}"


class NoReply(RequestFailed):
    """The connection ended before the first byte of a reply."""

    cause = "broke the connection without a reply"


class ReplyCut(RequestFailed):
    """The connection ended in the middle of a reply."""

    cause = "broke the connection in the middle of its reply"


class MalformedReply(RequestFailed):
    """The reply is not valid HTTP/1.1, or exceeds the bounds for its head. `why` is a fixed text."""

    def __init__(self, why: str) -> None:
        super().__init__(f"sent a reply that is not valid HTTP/1.1 ({why})")


class ListenerFailed(RequestFailed):
    """A method of the listener raised `__cause__`, so the rest of the reply is dropped."""

    cause = "sent a reply that the gateway could not process"


class ClientClosed(RequestFailed):
    """The gateway closed the client while the request was in flight."""

    cause = "was disconnected because the gateway is shutting down"

    def __init__(self, *, sent: bool) -> None:
        super().__init__()
        self.sent = sent
        if not sent:
            self._said = "{where} was not asked: the gateway shuts down"
