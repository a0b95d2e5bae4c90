"""Derives the keyrings of a process from its configured keys, again after every reload that changes them.

Rule: the key of a process that started without `state.keys` stays the last of each ring, whatever keys it is given
later, because it may have sealed a state that a client still holds.
"""

import secrets
from typing import Final

from gateway.config import Config, InForce
from gateway.passthrough import sse_endpoint
from gateway.seal import task_handle
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
        self.endpoint = InForce(Keyring(self._keys, sse_endpoint.PURPOSE))
        in_force.after_replace(self._use)

    def _use(self, config: Config) -> None:
        keys = self._all_keys(config)
        if keys == self._keys:
            return  # a new ring would have to derive its subkeys again
        self._keys = keys
        # A reply in transit between replicas keeps the ring that it began with.
        self.state.replace(Keyring(keys, "state"))
        self.peer.replace(Keyring(keys, "peer"))
        self.task.replace(Keyring(keys, task_handle.PURPOSE))
        self.endpoint.replace(Keyring(keys, sse_endpoint.PURPOSE))

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
