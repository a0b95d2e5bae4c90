"""An address that neither accepts nor refuses connections, like that of a host without power."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def black_hole(address: str) -> Iterator[None]:
    """A listener with a full queue that is never served: the kernel drops new connections."""
    host, _, port = address.rpartition(":")
    with socket.socket() as listener, ExitStack() as stack:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(0)
        while True:
            knocking = stack.enter_context(socket.socket())
            knocking.settimeout(0.1)
            try:
                knocking.connect((host, int(port)))
            except TimeoutError:
                break
        yield
