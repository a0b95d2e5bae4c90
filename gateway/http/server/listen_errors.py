"""Explains why a process cannot listen at an address of its configuration."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gateway import world
from gateway.config import Config

_KNOWN: Final = {
    errno.EADDRINUSE: (
        "another process uses it",
        "stop that process (or restart it, if it is this gateway), or choose another port",
    ),
    errno.EADDRNOTAVAIL: (
        "this machine does not have the address",
        "choose an address of this machine, or 0.0.0.0 for all of them",
    ),
    errno.EACCES: (
        "permission denied",
        "choose a port of 1024 or above, or give the process the capability CAP_NET_BIND_SERVICE",
    ),
}


@contextmanager
def explained(config: Config, address: str) -> Iterator[None]:
    """Listen in the block; raises OSError that names the key of the address, the cause and the fix."""
    try:
        yield
    except OSError as exc:
        keys = {config.replica.listen: "replica.listen", config.admin: "admin", config.listen: "listen"}
        key = keys.get(address)
        where = address if key is None else f"{address} ({key})"
        if isinstance(exc, world.LookupFailed):
            cause, fix = f"the name cannot be resolved ({exc.strerror})", "write an IP address of this machine"
        else:
            cause, fix = _KNOWN.get(exc.errno or 0, (exc.strerror or str(exc), "choose another address"))
        raise OSError(exc.errno, f"cannot listen at {where}: {cause}; {fix}") from exc
