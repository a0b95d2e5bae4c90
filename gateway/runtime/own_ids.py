"""Ids of the requests that the gateway sends."""

from binascii import hexlify
from typing import Final

from gateway import world

_BYTES: Final = 10


def new_id() -> bytes:
    """JSON of an id that no other request of any replica has.

    Requests share connections, and some servers key the streams of all sessions by the id. So only a unique id tells
    which request a response belongs to. It is drawn whole: a prefix that is drawn at import would be the same in all
    processes of a simulated world, and another one in each run of it.
    """
    return b'"gw-' + hexlify(world.random_bytes(_BYTES)) + b'"'
