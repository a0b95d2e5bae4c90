"""The tags of callers on the status page and in the log: a tag leads from one to the other, and not to the caller."""

import hmac
from functools import lru_cache, partial
from typing import Final

from gateway.config import InForce
from gateway.seal.keyring import Keys, subkey

_BYTES: Final = 4
_KEPT: Final = 256


class CallerTags:
    """Makes the tags of callers, each of which has the same tag at every replica."""

    def __init__(self, keys: InForce[Keys]) -> None:
        """`keys` make it impossible to find a caller by its tag."""
        self._of = keys.part(lambda it: lru_cache(_KEPT)(partial(_tag, subkey(it.present[0], "caller tag"))))

    def of(self, principal: bytes) -> str:
        """The tag of a principal."""
        return self._of.value(principal)


def _tag(key: bytes, principal: bytes) -> str:
    return hmac.digest(key, principal, "sha256")[:_BYTES].hex()
