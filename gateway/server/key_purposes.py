"""Derives the keyrings of a process from its configured keys, again after every reload that changes them.

Rule: the key of a process that started without `state.keys` stays the last of each ring, whatever keys it is given
later, because it may have sealed a state that a client still holds.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from gateway import world
from gateway.config import Config, InForce
from gateway.legacy_front import session_ids
from gateway.mirror.streamable import tokens
from gateway.mirror.streamable.tokens import MirrorRings
from gateway.passthrough import sse_endpoint
from gateway.seal import client_state, task_handle
from gateway.seal.keyring import Keyring
from gateway.telemetry import Event, get_logger

log = get_logger()

KEY_BYTES: Final = 32

T = TypeVar("T")


class Keyrings:
    """One keyring for each purpose."""

    def __init__(self, in_force: InForce[Config], worker_key: bytes | None) -> None:
        """`worker_key` is the key that all workers of a supervisor share."""
        self._own: tuple[bytes, ...] = () if worker_key is None else (worker_key,)
        self._keys = self._all_keys(in_force.value)
        self._session_keys = in_force.value.state.raw_session_keys()
        self._renewals: list[Callable[[], None]] = []
        self.state = self._ring("state")
        self.peer = self._ring("peer")  # a reply in transit between replicas keeps the ring that it began with
        self.task = self._ring(task_handle.PURPOSE)
        self.items = self._ring(client_state.PURPOSE)
        self.endpoint = self._ring(sse_endpoint.PURPOSE)
        self.session = self._renewed(lambda: Keyring((*self._keys, *self._former), session_ids.PURPOSE))
        self.mirror = self._renewed(self._mirror_rings)
        self.sep_1442 = self._renewed(lambda: self._mirror_rings("sep-1442, "))
        in_force.after_replace(self._use)

    def _use(self, config: Config) -> None:
        keys, session_keys = self._all_keys(config), config.state.raw_session_keys()
        if (keys, session_keys) == (self._keys, self._session_keys):
            return  # a new ring would have to derive its subkeys again
        self._keys, self._session_keys = keys, session_keys
        for renew in self._renewals:
            renew()

    def _ring(self, purpose: str) -> InForce[Keyring]:
        return self._renewed(lambda: Keyring(self._keys, purpose))

    def _renewed(self, make: Callable[[], T]) -> InForce[T]:
        """Return what `make` derives from the keys, now and after each change of them."""
        rings = InForce(make())
        self._renewals.append(lambda: rings.replace(make()))
        return rings

    @property
    def _former(self) -> tuple[bytes, ...]:
        """The keys that still open the ids of sessions and of events on their standalone streams, and nothing else."""
        return tuple(key for key in self._session_keys if key not in self._keys)

    def _mirror_rings(self, of: str = "") -> MirrorRings:
        return MirrorRings(
            Keyring((*self._keys, *self._former), of + tokens.SESSION),
            Keyring(self._keys, of + tokens.NESTED),
            Keyring(self._keys, of + tokens.EVENT),
            Keyring(self._keys, of + tokens.STATE),
        )

    def _all_keys(self, config: Config) -> tuple[bytes, ...]:
        """Return the configured keys, then the own one if there is any; the first one seals."""
        configured = config.state.raw_keys()
        if not configured and not self._own:
            self._own = (ephemeral_key("this process"),)
        return (*configured, *self._own)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the state keys; the first one seals."""
        return self.state.value.key_ids


def ephemeral_key(whose: str) -> bytes:
    """Make a key in place of `state.keys`, and log a warning."""
    note = f"states are sealed with a key that ends with {whose}; run `mrtr-gateway keygen` and set state.keys"
    log.warning(Event.CONFIG_LOADED, note=f"state.keys is empty: {note}")
    return world.random_bytes(KEY_BYTES)
