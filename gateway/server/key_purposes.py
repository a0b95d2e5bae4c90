"""The keys of a process, again after every reload that changes them.

Rule: the key of a process that started without `state.keys` stays the last one, whatever keys it is given later,
because it may have sealed a state that a client still holds.
"""

from gateway import world
from gateway.config import KEY_BYTES, Config, InForce
from gateway.seal.keyring import Keys, key_id
from gateway.telemetry import Event, get_logger

log = get_logger()


def state_keys(in_force: InForce[Config], worker_key: bytes | None) -> InForce[Keys]:
    """Return the keys that hold; `worker_key` is the one that all workers of a supervisor share."""
    own: tuple[bytes, ...] = () if worker_key is None else (worker_key,)

    def of(config: Config) -> Keys:
        """Return the configured keys, then the own one if there is any."""
        nonlocal own
        configured = config.state.raw_keys()
        if not configured and not own:
            own = (ephemeral_key("this process"),)
        present = (*configured, *own)
        former = tuple(key for key in config.state.raw_session_keys() if key not in present)
        return Keys(present, former, world.monotonic())

    def follow(config: Config) -> None:
        had, new = keys.value, of(config)
        ids = [*map(key_id, new.present)]
        if new.present[0] == had.present[0]:
            newest = next((each for each in reversed(ids) if each not in known), had.newest)
            new = new._replace(sealing_since=had.sealing_since, newest=newest)
        else:
            new = new._replace(newest=ids[0])
        known.update(ids)
        if new != had:  # a new ring would have to derive its subkeys again
            keys.replace(new)

    keys = InForce(of(in_force.value))
    known = set(map(key_id, keys.value.present))  # a key that is put back is not new
    in_force.after_replace(follow)
    return keys


def ephemeral_key(whose: str) -> bytes:
    """Make a key in place of `state.keys`, and log a warning."""
    note = f"states are sealed with a key that ends with {whose}; run `mrtr-gateway keygen` and set state.keys"
    log.warning(Event.CONFIG_LOADED, note=f"state.keys is empty: {note}")
    return world.random_bytes(KEY_BYTES)
