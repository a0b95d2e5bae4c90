"""The key ring: what it seals opens, and nothing else does."""

import base64
import itertools
import string
from unittest.mock import Mock

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.protocol.errors import InvalidState
from gateway.seal import keyring as keyring_module
from gateway.seal.keyring import PREFIX, Keyring, key_id

ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
ONE, TWO = (bytes([number]) * 32 for number in (1, 2))
PLAIN = b"the content"


def ring(*keys: bytes, purpose: str = "state") -> Keyring:
    return Keyring(keys or (ONE,), purpose)


def reason(token: str, by: Keyring) -> str:
    with pytest.raises(InvalidState) as caught:
        by.open(token)
    assert caught.value.message == "Invalid or expired requestState"
    assert caught.value.data == {"reason": "invalid_request_state"}
    return caught.value.reason


def content(token: str) -> bytes:
    """The bytes of a token: its salt, nonce and ciphertext."""
    body = token.rpartition(".")[2]
    return base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))


def test_what_is_sealed_opens() -> None:
    keys = ring()
    for plain in (b"", PLAIN, bytes(5000)):
        assert keys.open(keys.seal(plain)) == plain
        assert ring().open(keys.seal(plain)) == plain, "another process with the same key opens it"


def test_a_token_with_any_character_changed_to_any_other_is_refused() -> None:
    keys = ring()
    token = keys.seal(PLAIN)
    for place, character in enumerate(token):
        for other in ALPHABET + ".=+/ \n":
            if other != character:
                changed = token[:place] + other + token[place + 1 :]
                assert reason(changed, keys) in ("malformed", "unknown_key", "forged"), changed


def test_a_token_cut_at_any_length_or_made_longer_is_refused() -> None:
    keys = ring()
    token = keys.seal(PLAIN)
    for length in range(len(token)):
        reason(token[:length], keys)
    for more in ("A", "AAAA", "=", "==", ".", "\n", " "):
        reason(token + more, keys)
        reason(more + token, keys)


@pytest.mark.parametrize("token", ["", "..", PREFIX, f"{PREFIX}..", f"{PREFIX}.{'0' * 8}.", "a.b.c", "\ud800"])
def test_what_is_no_token_is_refused(token: str) -> None:
    reason(token, ring())


@pytest.mark.parametrize("tail", ["", "A", "é", "\ud800", "****", "AA AA", "A" * 4, "=" * 60])
def test_a_body_that_is_no_base64url_or_too_short_is_malformed(tail: str) -> None:
    keys = ring()
    assert reason(f"{PREFIX}.{key_id(ONE)}.{tail}", keys) == "malformed"


def test_prefix_and_key_id_are_authenticated(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ring()
    prefix, key_id, body = keys.seal(PLAIN).split(".")
    assert reason(f"mrtr2.{key_id}.{body}", keys) == "malformed"
    assert reason(f"{prefix}.{'0' * 8}.{body}", keys) == "unknown_key"
    # A ring that takes the other words: only the associated data can tell.
    monkeypatch.setattr(keyring_module, "PREFIX", "mrtr2")
    assert reason(f"mrtr2.{key_id}.{body}", keys) == "forged"
    monkeypatch.undo()
    monkeypatch.setattr(keyring_module, "key_id", lambda _: "00000000")
    assert reason(f"{prefix}.00000000.{body}", ring()) == "forged"


def test_one_token_has_one_spelling() -> None:
    """Padding, the other alphabet, escapes, and bits that Base64 ignores are refused, though they mean the same."""
    keys = ring()
    for size in range(6):
        token = keys.seal(b"x" * size)
        head, _, body = token.rpartition(".")
        raw = content(token)
        for count in (1, 2, 3, 4):
            assert reason(token + "=" * count, keys) == "malformed"
        standard = base64.b64encode(raw).decode().rstrip("=")
        if standard != body:
            assert reason(f"{head}.{standard}", keys) == "malformed"
        escaped = "".join([f"\\u{ord(character):04x}" for character in body[:4]])
        assert reason(f"{head}.{escaped}{body[4:]}", keys) == "malformed"
        spare = {0: 0, 2: 4, 3: 2}[len(body) % 4]
        last = ALPHABET.index(body[-1])
        for bits in range(1, 1 << spare):
            twin = body[:-1] + ALPHABET[last | bits]
            assert content(f"{head}.{twin}") == raw
            assert reason(f"{head}.{twin}", keys) == "malformed"


def test_a_rotation_in_three_phases_refuses_nothing_until_the_old_key_is_dropped() -> None:
    phases = [ring(ONE), ring(ONE, TWO), ring(TWO, ONE), ring(TWO)]
    # Replicas are one phase apart at most: what one seals the other opens, whoever is ahead.
    for older, newer in itertools.pairwise(phases):
        assert older.open(newer.seal(PLAIN)) == PLAIN
        if newer is phases[3]:
            break  # states of phase 2 are gone by then: the old key is dropped a TTL after it last sealed
        assert newer.open(older.seal(PLAIN)) == PLAIN
    assert phases[3].open(phases[2].seal(PLAIN)) == PLAIN
    assert reason(phases[0].seal(PLAIN), phases[3]) == "unknown_key"
    assert reason(phases[1].seal(PLAIN), phases[3]) == "unknown_key"


def test_the_first_key_seals_and_key_ids_tell_nothing_else() -> None:
    assert ring(TWO, ONE).seal(PLAIN).split(".")[1] == key_id(TWO)
    assert len(key_id(TWO)) == 8


def test_keys_of_one_purpose_do_not_open_anothers_tokens() -> None:
    for sealing, opening in (("state", "peer"), ("peer", "state"), ("state", "admin"), ("state", "state2")):
        token = ring(purpose=sealing).seal(PLAIN)
        assert reason(token, ring(purpose=opening)) == "forged"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ((), "at least one key"),
        ((bytes(31),), "32 bytes"),
        ((ONE, b"short"), "32 bytes"),
        ((b"",), "32 bytes"),
        ((ONE, TWO, ONE), "repeated"),
    ],
)
def test_weak_rings_are_refused(keys: tuple[bytes, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Keyring(keys, "state")


def test_the_salt_is_renewed_before_random_nonces_could_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keyring_module._SEALS_PER_SALT <= 2**32, "NIST SP 800-38D, 8.3"
    monkeypatch.setattr(keyring_module, "_SEALS_PER_SALT", 3)
    keys = ring()
    tokens = [keys.seal(PLAIN) for _ in range(7)]
    salts = [content(token)[:16] for token in tokens]
    assert salts == [salts[0]] * 3 + [salts[3]] * 3 + [salts[6]]
    assert len(set(salts)) == 3
    assert {keys.open(token) for token in tokens} == {PLAIN}


def test_nonces_are_unique_and_a_token_never_repeats() -> None:
    one, other = (content(ring().seal(PLAIN))[:16] for _ in range(2))
    assert one != other, "two processes share no subkey"
    keys = ring()
    assert len({content(keys.seal(PLAIN))[16:28] for _ in range(10_000)}) == 10_000


def test_subkeys_of_other_processes_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring_module, "_SUBKEYS_KEPT", 4)
    keys = ring()
    tokens = [ring().seal(PLAIN) for _ in range(20)]
    derive = Mock(wraps=keyring_module.HKDF)
    monkeypatch.setattr(keyring_module, "HKDF", derive)
    for token in tokens + tokens:
        assert keys.open(token) == PLAIN
    assert derive.call_count == 40, "when they come again, all are forgotten"
    for token in tokens[-4:]:
        assert keys.open(token) == PLAIN
    assert derive.call_count == 40, "the last four are known"
    assert keys.open(keys.seal(PLAIN)) == PLAIN, "its own subkey may be dropped from the cache, not from use"


def test_the_plaintext_is_encrypted_with_a_key_that_is_not_the_configured_one() -> None:
    raw = content(ring().seal(PLAIN))
    assert PLAIN not in raw
    with pytest.raises(InvalidTag):
        AESGCM(ONE).decrypt(raw[16:28], raw[28:], f"{PREFIX}.{key_id(ONE)}.".encode())


def raw_reason(sealed: bytes, bound: bytes, by: Keyring) -> str:
    with pytest.raises(InvalidState) as caught:
        by.open_bytes(sealed, bound)
    return caught.value.reason


def test_bytes_that_are_sealed_open_where_the_same_is_known() -> None:
    keys = ring()
    for plain in (b"", PLAIN, bytes(100_000)):
        for bound in (b"", b"request", bytes(50)):
            assert ring().open_bytes(keys.seal_bytes(plain, bound), bound) == plain
    assert raw_reason(keys.seal_bytes(PLAIN, b"one"), b"two", keys) == "forged"
    assert raw_reason(keys.seal_bytes(PLAIN, b"one"), b"", keys) == "forged"
    assert raw_reason(keys.seal_bytes(PLAIN, b""), b"one", keys) == "forged"


def test_sealed_bytes_with_any_byte_changed_or_cut_are_refused() -> None:
    keys = ring()
    sealed = keys.seal_bytes(PLAIN, b"request")
    for place in range(len(sealed)):
        for bit in range(8):
            changed = sealed[:place] + bytes([sealed[place] ^ 1 << bit]) + sealed[place + 1 :]
            assert raw_reason(changed, b"request", keys) == ("unknown_key" if place < 8 else "forged")
        assert raw_reason(sealed[:place], b"request", keys) in ("malformed", "forged")
    for more in (b"\0", sealed):
        assert raw_reason(sealed + more, b"request", keys) == "forged"
    assert raw_reason(b"\xff" * 100, b"request", keys) == "unknown_key"


def test_the_key_id_of_sealed_bytes_is_authenticated(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = ring().seal_bytes(PLAIN, b"request")
    monkeypatch.setattr(keyring_module, "key_id", lambda _: "00000000")
    assert raw_reason(b"00000000" + sealed[8:], b"request", ring()) == "forged"


def test_a_token_and_sealed_bytes_do_not_stand_for_each_other() -> None:
    keys = ring()
    token = keys.seal(PLAIN)
    head = token.rpartition(".")[0]
    for bound in (b"", b"request", f"{head}.".encode()):
        assert raw_reason(key_id(ONE).encode() + content(token), bound, keys) == "forged"
    sealed = base64.urlsafe_b64encode(keys.seal_bytes(PLAIN, b"")[8:]).rstrip(b"=").decode()
    assert reason(f"{head}.{sealed}", keys) == "forged"
