"""The keys of a process, again after every reload that changes them.

Rule: the key of a process that started without `state.keys` stays the last one, whatever keys it is given later,
because it may have sealed a state that a client still holds.
"""

from typing import Final

from gateway import world
from gateway.config import Config, InForce
from gateway.seal.keyring import Keys, key_id
from gateway.telemetry import Event, get_logger

log = get_logger()

KEY_BYTES: Final = 32


class StateKeys:
    """The keys that hold now."""

    def __init__(self, in_force: InForce[Config], worker_key: bytes | None) -> None:
        """`worker_key` is the key that all workers of a supervisor share."""
        self._own: tuple[bytes, ...] = () if worker_key is None else (worker_key,)
        self.keys = InForce(self._of(in_force.value))
        in_force.after_replace(self._use)

    def _use(self, config: Config) -> None:
        keys = self._of(config)
        if keys != self.keys.value:  # a new ring would have to derive its subkeys again
            self.keys.replace(keys)

    def _of(self, config: Config) -> Keys:
        """Return the configured keys, then the own one if there is any."""
        configured = config.state.raw_keys()
        if not configured and not self._own:
            self._own = (ephemeral_key("this process"),)
        present = (*configured, *self._own)
        return Keys(present, tuple(key for key in config.state.raw_session_keys() if key not in present))

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the keys; the first one seals."""
        return tuple(map(key_id, self.keys.value.present))


def ephemeral_key(whose: str) -> bytes:
    """Make a key in place of `state.keys`, and log a warning."""
    note = f"states are sealed with a key that ends with {whose}; run `mrtr-gateway keygen` and set state.keys"
    log.warning(Event.CONFIG_LOADED, note=f"state.keys is empty: {note}")
    return world.random_bytes(KEY_BYTES)
