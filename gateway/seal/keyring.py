"""Authenticated encryption (AES-256-GCM) under a ring of keys.

A token is `mrtr1.<key id>.<base64url(salt ‖ nonce ‖ ciphertext ‖ tag)>`. Its readable part is associated data, so
changing any character makes opening fail. Every process draws a 16-byte salt and derives its own subkey for each
purpose (HKDF-SHA256), so replicas that draw the same random 96-bit nonce still use it under different subkeys. After
2^32 seals the process draws a new salt.

The first key of the ring seals, all keys open. To rotate: add the new key last on every replica, then move it first,
then remove the old key.
"""

import hashlib
from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gateway import world
from gateway.config import KEY_BYTES, InForce
from gateway.protocol.errors import InvalidState

T = TypeVar("T")
PREFIX: Final = "mrtr1"
IN_JSON: Final = f'"{PREFIX}.'.encode()
"""How a sealed state begins in JSON that does not escape it."""

_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_OVERHEAD_BYTES: Final = _SALT_BYTES + _NONCE_BYTES + 16
"""Of salt, nonce and tag: the least that is encrypted."""
_TO_URL: Final = bytes.maketrans(b"+/", b"-_")
_FROM_URL: Final = bytes.maketrans(b"-_+/", b"+/\0\0")
"""The characters that base64url does not have count as any other that is wrong."""
_KEY_ID_CHARACTERS: Final = 8
# The most that NIST SP 800-38D (8.3) allows under one key with random nonces.
_SEALS_PER_SALT: Final = 2**32
_SUBKEYS_KEPT: Final = 1024
"""Cached subkeys, most of them of other processes; one derivation costs about 10 µs."""


class Keys(NamedTuple):
    """The keys of a process."""

    present: tuple[bytes, ...]
    """The first one seals, all open."""
    former: tuple[bytes, ...] = ()
    """They open ids and addresses of sessions, ids of events on their standalone streams, and nothing else."""
    sealing_since: float = 0.0
    """Monotonic: when the first one became that, or the process began."""
    newest: str = ""
    """The id of the one that a reload put first, or added; empty if the process began with those that it has."""


class Keyring:
    """Seals and opens for one purpose; a token of one purpose does not open in another."""

    def __init__(self, keys: Sequence[bytes], purpose: str) -> None:
        """The first of `keys` seals, all open; raises ValueError for a short or a repeated key."""
        if not keys:
            raise ValueError("a key ring needs at least one key")
        if any(len(key) < KEY_BYTES for key in keys):
            raise ValueError(f"a state key needs at least {KEY_BYTES} bytes")
        self._keys = {key_id(key): key for key in keys}
        if len(self._keys) != len(keys):
            raise ValueError("a state key is repeated")
        self._subkey = lru_cache(_SUBKEYS_KEPT)(lambda id_, salt: AESGCM(subkey(self._keys[id_], purpose, salt)))
        self._first = next(iter(self._keys))
        self._head = f"{PREFIX}.{self._first}.".encode()
        self._salt: bytes
        self._sealer: AESGCM
        self._left = 0
        """How much more may be sealed with this salt. There is none before the first seal: many rings never seal."""

    def seal(self, plaintext: bytes) -> str:
        """The token that carries `plaintext`."""
        body = b2a_base64(self._encrypt(plaintext, self._head), newline=False).rstrip(b"=").translate(_TO_URL)
        return (self._head + body).decode()

    def seal_bytes(self, plaintext: bytes, bound: bytes) -> bytes:
        """As `seal`, but in bytes; `bound` is associated data that must be equal when it is opened."""
        key_id = self._first.encode()
        return key_id + self._encrypt(plaintext, key_id + bound)

    def open_bytes(self, sealed: bytes, bound: bytes) -> bytes:
        """The plaintext of `seal_bytes`; raises InvalidState."""
        key_id = sealed[:_KEY_ID_CHARACTERS]
        return self._decrypt(key_id.decode("ascii", "replace"), sealed[_KEY_ID_CHARACTERS:], key_id + bound)

    def open(self, token: str) -> bytes:
        """The plaintext; raises InvalidState, whose reason is for metrics and logs only."""
        prefix, _, rest = token.partition(".")
        key_id, _, body = rest.partition(".")
        if prefix != PREFIX:
            raise InvalidState("malformed")
        try:
            standard = body.encode().translate(_FROM_URL)
            sealed = a2b_base64(standard + b"==")
        except ValueError as exc:
            raise InvalidState("malformed") from exc
        # Of the spellings that mean the same, only the one that `seal` writes is taken.
        if b2a_base64(sealed, newline=False).rstrip(b"=") != standard:
            raise InvalidState("malformed")
        # Bytes of a header that are not UTF-8 are surrogates in the id: it is unknown then, and nothing raises.
        return self._decrypt(key_id, sealed, f"{PREFIX}.{key_id}.".encode("utf-8", "surrogatepass"))

    def _encrypt(self, plaintext: bytes, bound: bytes) -> bytes:
        """Salt, nonce and ciphertext."""
        if self._left == 0:
            self._salt = world.random_bytes(_SALT_BYTES)
            self._left = _SEALS_PER_SALT
            self._sealer = self._subkey(self._first, self._salt)
        self._left -= 1
        nonce = world.random_bytes(_NONCE_BYTES)
        return self._salt + nonce + self._sealer.encrypt(nonce, plaintext, bound)

    def _decrypt(self, key_id: str, sealed: bytes, bound: bytes) -> bytes:
        if len(sealed) < _OVERHEAD_BYTES:
            raise InvalidState("malformed")
        if key_id not in self._keys:
            raise InvalidState("unknown_key")
        salt, nonce = sealed[:_SALT_BYTES], sealed[_SALT_BYTES : _SALT_BYTES + _NONCE_BYTES]
        try:
            return self._subkey(key_id, salt).decrypt(nonce, sealed[_SALT_BYTES + _NONCE_BYTES :], bound)
        except InvalidTag as exc:
            raise InvalidState("forged") from exc


def subkey(key: bytes, purpose: str, salt: bytes | None = None) -> bytes:
    """The subkey for a purpose; without a salt, the same one in all processes that have the key."""
    return HKDF(SHA256(), 32, salt, b"mrtr-gateway/1/" + purpose.encode()).derive(key)


def ring(keys: InForce[Keys], purpose: str, *, opens_former: bool = False) -> InForce[Keyring]:
    """The ring for a purpose, now and after each change of the keys."""
    return keys.part(lambda it: Keyring(it.present + it.former if opens_former else it.present, purpose))


def room(characters: int) -> int:
    """How many bytes a token of so many characters can carry."""
    return (characters - len(PREFIX) - _KEY_ID_CHARACTERS - 2) * 3 // 4 - _OVERHEAD_BYTES


def decode_content(decoder: msgspec.msgpack.Decoder[T], plaintext: bytes) -> T:
    """What was sealed; raises InvalidState if another version wrote it in another form."""
    try:
        return decoder.decode(plaintext)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise InvalidState("version") from exc


def key_id(key: bytes) -> str:
    """The id of a key, which reveals nothing about it."""
    return hashlib.sha256(b"mrtr-gateway/key-id/" + key).hexdigest()[:_KEY_ID_CHARACTERS]
