"""Ids of the requests that the gateway sends.

Requests share connections, and some servers key the streams of all sessions by the id. So only a unique id tells which
request a response belongs to: no other request of any replica has it.
"""

from binascii import hexlify
from collections.abc import Iterator
from itertools import count
from typing import Final

from gateway import world

_BYTES: Final = 10


def new_id() -> bytes:
    """JSON of an id."""
    return b'"gw-' + hexlify(world.random_bytes(_BYTES)) + b'"'


def numbered() -> Iterator[bytes]:
    """As `new_id`, without an end and at less cost: only what all ids of one maker have in common is drawn.

    It is drawn for each process that is simulated, and not at import: ids must not depend on what ran before.
    """
    return map(f'"gw-{world.token_hex(_BYTES)}-%d"'.encode().__mod__, count())
