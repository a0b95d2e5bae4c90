"""An address where nobody even refuses a connection, as that of a host that lost its power."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def black_hole(address: str) -> Iterator[None]:
    """A listener that nobody serves, with a full queue: the kernel drops whoever knocks."""
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
