"""Ids of the requests that the gateway sends."""

import itertools
from typing import Final

from gateway import world

_PROCESS: Final = world.token_hex(6).encode()
_NUMBERS: Final = itertools.count(1)


def new_id() -> bytes:
    """JSON of an id that no other request of any replica has.

    Requests share connections, and some servers key the streams of all sessions by the id. So only a unique id tells
    which request a response belongs to.
    """
    return b'"gw-%b-%x"' % (_PROCESS, next(_NUMBERS))
