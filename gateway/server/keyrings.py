"""Derives the keyrings of a process from its configured keys, again after every reload that changes them.

Rule: the key of a process that started without `state.keys` stays the last of each ring, whatever keys it is given
later, because it may have sealed a state that a client still holds.
"""

import secrets
from typing import Final

from gateway.config import Config, InForce
from gateway.legacy_front import session_ids
from gateway.mirror.streamable import tokens
from gateway.mirror.streamable.tokens import MirrorRings
from gateway.passthrough import sse_endpoint
from gateway.seal import client_state, task_handle
from gateway.seal.cipher import Keyring
from gateway.telemetry import Event, get_logger

log = get_logger()

_KEY_BYTES: Final = 32


class Keyrings:
    """One keyring for each purpose."""

    def __init__(self, in_force: InForce[Config], worker_key: bytes | None) -> None:
        """`worker_key` is the key that all workers of a supervisor share."""
        self._own: tuple[bytes, ...] = () if worker_key is None else (worker_key,)
        self._keys = self._all_keys(in_force.value)
        self.state = InForce(Keyring(self._keys, "state"))
        self.peer = InForce(Keyring(self._keys, "peer"))
        self.task = InForce(Keyring(self._keys, task_handle.PURPOSE))
        self.items = InForce(Keyring(self._keys, client_state.PURPOSE))
        self.endpoint = InForce(Keyring(self._keys, sse_endpoint.PURPOSE))
        self._session_keys = in_force.value.state.raw_session_keys()
        self.session = InForce(self._session_ring())
        self.mirror = InForce(self._mirror_rings())
        self.sep_1442 = InForce(self._mirror_rings("sep-1442, "))
        in_force.after_replace(self._use)

    def _use(self, config: Config) -> None:
        keys, session_keys = self._all_keys(config), config.state.raw_session_keys()
        if (keys, session_keys) == (self._keys, self._session_keys):
            return  # a new ring would have to derive its subkeys again
        self._keys, self._session_keys = keys, session_keys
        self.mirror.replace(self._mirror_rings())
        self.sep_1442.replace(self._mirror_rings("sep-1442, "))
        # A reply in transit between replicas keeps the ring that it began with.
        self.state.replace(Keyring(keys, "state"))
        self.peer.replace(Keyring(keys, "peer"))
        self.task.replace(Keyring(keys, task_handle.PURPOSE))
        self.items.replace(Keyring(keys, client_state.PURPOSE))
        self.endpoint.replace(Keyring(keys, sse_endpoint.PURPOSE))
        self.session.replace(self._session_ring())

    @property
    def _former(self) -> tuple[bytes, ...]:
        """The keys that still open the ids of sessions and of events on their standalone streams, and nothing else."""
        return tuple(key for key in self._session_keys if key not in self._keys)

    def _session_ring(self) -> Keyring:
        return Keyring((*self._keys, *self._former), session_ids.PURPOSE)

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
            self._own = (_ephemeral_key(),)
        return (*configured, *self._own)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the state keys; the first one seals."""
        return self.state.value.key_ids


def _ephemeral_key() -> bytes:
    log.warning(
        Event.CONFIG_LOADED,
        note="state.keys is empty: states are sealed with a key of this process alone and end with it; "
        "run `mrtr-gateway keygen` and set state.keys",
    )
    return secrets.token_bytes(_KEY_BYTES)
