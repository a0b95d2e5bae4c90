"""The credentials with which the upstream served the callers of one pool key, and when."""

from typing import Final

from gateway import world
from gateway.http.upstream_headers import credential_of
from gateway.runtime.newest import Newest
from gateway.upstream.channel import Headers

_FRESH_SECONDS: Final = 60.0
"""How long a credential counts as checked for what the gateway answers itself."""
_KEPT: Final = 64


class AcceptedCredentials:
    """When the upstream last served each of the newest ones."""

    __slots__ = ("_credential", "_headers", "_times")

    def __init__(self) -> None:
        self._times: Newest[tuple[str | None, str | None], float] = Newest(_KEPT)
        """Monotonic, the newest one last."""
        self._headers: Headers | None = None
        """Those noted last; most requests of a caller come with the same object."""
        self._credential: tuple[str | None, str | None] = None, None

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._times)

    def note(self, headers: Headers) -> None:
        """The upstream has just served a request with this credential."""
        if headers is not self._headers:  # the same object is the newest entry already
            self._headers, self._credential = headers, credential_of(headers)
            _ = self._times.keep(self._credential, 0.0)
        self._times[self._credential] = world.monotonic()

    def include(self, headers: Headers) -> bool:
        """Whether the upstream served this credential recently; forwarded credentials are part of the pool key."""
        noted = self._times.get(credential_of(headers))
        return noted is not None and world.monotonic() - noted < _FRESH_SECONDS

    @property
    def newest(self) -> float:
        """When the upstream last served a request; -inf before the first."""
        return next(reversed(self._times.values()), float("-inf"))
