from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from gateway.config import InForce
from gateway.protocol.errors import InvalidState
from gateway.seal.claims import Bearer
from gateway.seal.keyring import Keyring, Keys
from gateway.seal.request_state import Whereabouts
from gateway.seal.task_handle import MAX_HANDLE_BYTES, QuestionKey, TaskHandle, TaskSealer

KEY = bytes(range(32))
NOW = 1_000_000.0
SEALER = TaskSealer(InForce(Keys((KEY,))))
WHERE = Whereabouts("5" * 36, "2025-11-25", b"6" * 69, b'{"name":"server","version":"1.0.0"}', None)
HANDLE = TaskHandle(
    issued=NOW,
    expires=NOW + 60,
    route="/mcp",
    principal=b"p" * 32,
    names=(),
    headers=b"",
    exchange="0123456789abcdef",
    owner="gw-1#0",
    epoch="0123456789abcdef",
    ttl_ms=60_000,
    upstream=WHERE,
)


def digest(names: Sequence[str]) -> bytes:
    return ",".join(names).encode()


def opened(sealed: str, *, route: str = "/mcp", principal: bytes = b"p" * 32, now: float = NOW) -> TaskHandle:
    return SEALER.open(sealed, Bearer(route, principal, now, digest))


def test_a_handle_has_all_that_another_replica_needs_and_fits_into_a_header() -> None:
    sealed = SEALER.seal(HANDLE)
    assert opened(sealed) == HANDLE
    assert len(sealed) < MAX_HANDLE_BYTES
    assert sealed.isascii()
    assert HANDLE.upstream is not None


def test_a_handle_that_would_be_too_large_keeps_what_its_owner_needs() -> None:
    large = replace(HANDLE, upstream=replace(WHERE, session="5" * 2000))
    sealed = SEALER.seal(large)
    assert len(sealed) < MAX_HANDLE_BYTES
    assert opened(sealed) == replace(large, upstream=None)
    assert opened(sealed).upstream is None


@pytest.mark.parametrize(
    ("sealed", "given", "reason"),
    [
        (SEALER.seal(HANDLE), {"principal": b"q" * 32}, "other_principal"),
        (SEALER.seal(HANDLE), {"now": NOW + 61}, "expired"),
        (SEALER.seal(replace(HANDLE, names=("x-key",), headers=b"another")), {}, "other_headers"),
        (SEALER.questions.seal(QuestionKey("e", "roots/list", b"1", b"d")), {}, "version"),
        (SEALER.seal(HANDLE)[:-4] + "AAAA", {}, "forged"),
        ("x" * 3000, {}, "too_large"),
        ("no handle", {}, "malformed"),
    ],
    ids=range(7),
)
def test_a_handle_opens_only_for_its_caller_on_its_route_in_its_time(
    sealed: str, given: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidState) as caught:
        opened(sealed, **given)  # type: ignore[arg-type]
    assert caught.value.reason == reason


def test_a_handle_is_bound_to_the_headers_that_its_route_bound() -> None:
    bound = replace(HANDLE, names=("x-key",), headers=digest(["x-key"]))
    assert opened(SEALER.seal(bound)) == bound


def test_the_key_of_a_question_holds_the_id_that_its_server_waits_for() -> None:
    key = QuestionKey("e", "elicitation/create", b'"task-1"', b"digest")
    assert SEALER.questions.open(SEALER.questions.seal(key)) == key
    assert SEALER.questions.seal(key) != SEALER.questions.seal(key)
    with pytest.raises(InvalidState):
        SEALER.questions.open("x" * 5000)
    with pytest.raises(InvalidState):
        SEALER.questions.open(SEALER.seal(HANDLE))


def test_a_handle_does_not_open_as_a_state() -> None:
    with pytest.raises(InvalidState):
        Keyring([KEY], "state").open(SEALER.seal(HANDLE))
