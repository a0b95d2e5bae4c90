"""What goes between replicas: sealed for one purpose, good once, for a minute; frames in their one order."""

import itertools
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gateway.config import InForce
from gateway.protocol.errors import InvalidState
from gateway.seal import peer_messages as messages
from gateway.seal.keyring import Keyring, Keys
from gateway.seal.peer_messages import (
    SKEW_SECONDS,
    Data,
    End,
    Frame,
    Frames,
    Gone,
    Head,
    Identity,
    PeerRequest,
    PeerSealer,
    Whole,
)
from gateway.telemetry.metrics.labels import PEER_REASONS
from tests.support.memory import left_by

ONE, TWO = (bytes([number]) * 32 for number in (1, 2))
NOW = 1_800_000_000.0
REQUEST = PeerRequest(
    kind="owner",
    to="gw-2#1",
    issued=NOW,
    nonce=b"n" * 16,
    path="/mcp",
    headers=((b"Authorization", b"Bearer \xc3\xa9\xff"), (b"X-A", b"1"), (b"x-a", b"")),
    remote="127.0.0.1",
    body=b'{"a":"\x00\xff"}',
)
FRAMES: list[Frame] = [
    Head(200, (("Retry-After", "1"), ("WWW-Authenticate", "Bearer")), streamed=False),
    Data(b"one"),
    Data(b""),
    Data(bytes(70_000)),
    Identity("gw-1"),
    Gone("gw-1"),
    Whole(401, (("WWW-Authenticate", "Bearer"),), b"no", "error", "-32603"),
    End("complete"),
]


def ring(*keys: bytes, purpose: str = "peer") -> Keyring:
    return Keyring(keys or (ONE,), purpose)


def peer(*keys: bytes) -> PeerSealer:
    return PeerSealer(InForce(Keys(keys or (ONE,))))


def refusal(sealed: bytes, by: PeerSealer | None = None, now: float = NOW) -> str:
    with pytest.raises(InvalidState) as caught:
        (by or peer()).open(sealed, now)
    assert caught.value.reason in PEER_REASONS, "every reason is a label"
    return caught.value.reason


def sealing(nonce: bytes = REQUEST.nonce, *keys: bytes) -> Frames:
    return Frames(ring(*keys), nonce)


def broken(data: bytes, by: Frames | None = None) -> str:
    with pytest.raises(InvalidState) as caught:
        (by or sealing()).feed(data)
    return caught.value.reason


# -- requests -------------------------------------------------------------------------------------------------------


def test_a_request_comes_over_whole() -> None:
    assert peer().open(peer().seal(REQUEST), NOW) == REQUEST
    for kind in ("owner", "heir", "who"):
        least = PeerRequest(kind=kind, to="", issued=NOW, nonce=b"")
        assert peer().open(peer().seal(least), NOW) == least


def test_a_request_of_an_older_or_a_newer_version_opens() -> None:
    """In a rolling update: `exchange_id` came last."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(replace(REQUEST, exchange_id="x1")))
    for sent, exchange_id in ((fields[:-1], ""), ([*fields, "what comes next"], "x1")):
        opened = peer().open(ring().seal_bytes(msgspec.msgpack.encode(sent), b"request"), NOW)
        assert opened == replace(REQUEST, exchange_id=exchange_id)


def test_a_request_changed_at_any_byte_or_cut_is_refused_and_leaves_no_trace() -> None:
    by, sealed = peer(), peer().seal(REQUEST)
    for place in range(len(sealed)):
        changed = sealed[:place] + bytes([sealed[place] ^ 0x20]) + sealed[place + 1 :]
        assert refusal(changed, by) in ("unknown_key", "forged")
        assert refusal(sealed[:place], by) in ("malformed", "unknown_key", "forged")
    assert refusal(sealed + b"\0", by) == "forged"
    assert refusal(b"", by) == "malformed"
    assert by.open(sealed, NOW) == REQUEST, "a forger cannot use up a nonce"


def test_no_other_purposes_key_opens_a_request_and_a_request_opens_no_state() -> None:
    for purpose in ("state", "admin", "peer2", ""):
        assert refusal(ring(purpose=purpose).seal_bytes(msgspec.msgpack.encode(REQUEST), b"request")) == "forged"
        with pytest.raises(InvalidState, match="requestState"):
            ring(purpose=purpose).open_bytes(peer().seal(REQUEST), b"request")
    assert refusal(peer(TWO).seal(REQUEST)) == "unknown_key"


def test_a_frame_is_no_request_and_a_request_is_no_frame() -> None:
    keys = ring()
    frame = Frames(keys, REQUEST.nonce).seal(FRAMES[0])
    assert refusal(frame[4:]) == "forged"
    request = peer().seal(REQUEST)
    assert broken(len(request).to_bytes(4) + request) == "forged"
    for bound in (b"", b"reply", b"requests"):
        assert refusal(keys.seal_bytes(msgspec.msgpack.encode(REQUEST), bound)) == "forged"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"kind": "owner"}),
        msgspec.msgpack.encode(["elder", "gw-2", NOW, b"n"]),
        msgspec.msgpack.encode(["owner", "gw-2", "now", b"n"]),
        msgspec.msgpack.encode(["owner", 2, NOW, b"n"]),
        msgspec.msgpack.encode(REQUEST) + b"\x00",
        b"\x94\xa5owner\xa1\xff\xcb" + bytes(8) + b"\xc4\x00",
    ],
)
def test_another_versions_request_is_refused(content: bytes) -> None:
    assert refusal(ring().seal_bytes(content, b"request")) == "version"


@pytest.mark.parametrize(
    ("age", "why"),
    [
        (0, None),
        (60, None),
        (60.001, "expired"),
        (-60, None),
        (-60.001, "future"),
        (3600, "expired"),
        (-3600, "future"),
        (float("inf"), "expired"),
        (float("-inf"), "future"),
    ],
)
def test_a_request_is_good_for_a_minute(age: float, why: str | None) -> None:
    sealed = peer().seal(replace(REQUEST, issued=NOW - age))
    by = peer()
    if why is None:
        assert by.open(sealed, NOW).issued == NOW - age
    else:
        assert refusal(sealed, by) == why


def test_a_request_from_the_future_is_not_accepted_when_its_time_has_come() -> None:
    """Its sender was refused, and has done the work elsewhere; whoever recorded it sends it again."""
    by, ahead = peer(), 90.0
    sealed = by.seal(replace(REQUEST, issued=NOW + ahead))
    assert refusal(sealed, by) == "future"
    for later in (1, ahead - SKEW_SECONDS, ahead, ahead + SKEW_SECONDS):
        other = replace(REQUEST, issued=NOW + later, nonce=f"{later}".encode())
        assert by.open(by.seal(other), NOW + later) == other, "others come in between: they are what makes it forget"
        assert refusal(sealed, by, NOW + later) == "replayed", later
    assert refusal(sealed, by, NOW + ahead + SKEW_SECONDS + 1) == "expired"


def test_a_request_that_seemed_to_have_expired_is_not_accepted_when_the_clock_is_set_back() -> None:
    """Its sender was refused as well. A later one is accepted."""
    by = peer()
    sealed = by.seal(replace(REQUEST, issued=NOW))
    assert refusal(sealed, by, NOW + 90.0) == "expired"
    assert refusal(sealed, by, NOW + 1.0) == "expired"
    later = replace(REQUEST, issued=NOW + 0.5)
    assert by.open(by.seal(later), NOW + 1.0) == later


def test_a_request_is_good_once_as_long_as_it_could_be_good() -> None:
    """Sealed by the fastest clock that is believed, it is remembered for as long as any clock would take it."""
    for ahead in (-SKEW_SECONDS, 0, SKEW_SECONDS):
        by, sealed = peer(), peer().seal(replace(REQUEST, issued=NOW + ahead))
        by.open(sealed, NOW)
        for later in sorted((0, 1, SKEW_SECONDS + ahead, SKEW_SECONDS + ahead + 0.001, 3 * SKEW_SECONDS)):
            # Others come in between: they are what makes it forget.
            other = replace(REQUEST, issued=NOW + later, nonce=f"{later}".encode())
            by.open(peer().seal(other), NOW + later)
            expected = "replayed" if later <= SKEW_SECONDS + ahead else "expired"
            assert refusal(sealed, by, NOW + later) == expected, (ahead, later)


def test_the_same_nonce_under_another_seal_is_a_replay_too() -> None:
    by = peer()
    by.open(peer().seal(REQUEST), NOW)
    assert refusal(peer().seal(replace(REQUEST, body=b"other", to="gw-3")), by) == "replayed"
    assert by.open(peer().seal(replace(REQUEST, nonce=b"m" * 16)), NOW).nonce == b"m" * 16


def test_nonces_are_forgotten_when_they_would_be_too_old() -> None:
    by, other = peer(), peer()

    def open_for(seconds: range) -> None:
        for second in seconds:
            peer_request = replace(REQUEST, nonce=second.to_bytes(16), issued=NOW + second)
            by.open(other.seal(peer_request), NOW + second)

    open_for(range(int(2 * SKEW_SECONDS) + 1))
    assert left_by(lambda: open_for(range(121, 1000))) < 30_000, "as many are remembered as before"


def test_the_memory_of_nonces_is_bounded_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_MAX_REMEMBERED", 10)
    by = peer()
    for number in range(50):
        by.open(peer().seal(replace(REQUEST, nonce=number.to_bytes(16))), NOW)
    assert refusal(peer().seal(replace(REQUEST, nonce=(49).to_bytes(16))), by) == "replayed"
    assert refusal(peer().seal(replace(REQUEST, nonce=(40).to_bytes(16))), by) == "replayed"
    assert by.open(peer().seal(replace(REQUEST, nonce=(39).to_bytes(16))), NOW)


def test_nonces_are_drawn_anew() -> None:
    drawn = {messages.nonce() for _ in range(1000)}
    assert len(drawn) == 1000
    assert {len(each) for each in drawn} == {16}


# -- frames ---------------------------------------------------------------------------------------------------------


def sealed_frames(nonce: bytes = REQUEST.nonce, *keys: bytes) -> list[bytes]:
    by = sealing(nonce, *keys)
    return [by.seal(frame) for frame in FRAMES]


def test_frames_come_over_in_their_order() -> None:
    assert sealing().feed(b"".join(sealed_frames())) == FRAMES
    by = sealing()
    assert [by.feed(sealed) for sealed in sealed_frames()] == [[frame] for frame in FRAMES]
    assert by.feed(b"") == []


def test_frames_come_over_wherever_the_stream_is_split() -> None:
    small: list[Frame] = [Head(200, (), streamed=True), Data(b"abc"), End("complete")]
    sealer = sealing()
    stream = b"".join(sealer.seal(frame) for frame in small)
    for place in range(len(stream) + 1):
        by = sealing()
        assert by.feed(stream[:place]) + by.feed(stream[place:]) == small
    by = sealing()
    assert [frame for byte in stream for frame in by.feed(bytes([byte]))] == small


def test_a_stream_changed_at_any_byte_gives_nothing_of_the_changed_frame() -> None:
    small: list[Frame] = [Head(200, (), streamed=True), Data(b"abc")]
    sealer = sealing()
    first, second = (sealer.seal(frame) for frame in small)
    for place in range(len(second)):
        by = sealing()
        assert by.feed(first) == small[:1]
        changed = second[:place] + bytes([second[place] ^ 1]) + second[place + 1 :]
        try:
            got = by.feed(changed + bytes(300))
        except InvalidState:
            continue
        assert got == [], "a length that grew waits for more"
        assert place < 4


def test_frames_out_of_order_repeated_or_dropped_are_refused() -> None:
    sealed = sealed_frames()[:4]
    for order in itertools.permutations(range(4)):
        if order != (0, 1, 2, 3):
            assert broken(b"".join(sealed[place] for place in order)) == "forged"
    for order in ((0, 0), (0, 1, 1), (0, 2), (1,), (3,), (0, 1, 3)):
        assert broken(b"".join(sealed[place] for place in order)) == "forged"


def test_frames_of_another_reply_are_refused() -> None:
    ours, others = sealed_frames(), sealed_frames(b"m" * 16)
    assert broken(others[0]) == "forged"
    by = sealing()
    assert by.feed(ours[0]) == FRAMES[:1]
    assert broken(others[1], by) == "forged"
    # A nonce that is longer by what a number is shorter: the place is of a fixed width.
    assert broken(sealed_frames(REQUEST.nonce + bytes(8))[0]) == "forged"


def test_a_frame_larger_than_the_bound_is_refused_before_it_is_there() -> None:
    assert broken((messages.FRAME_BYTES + 1).to_bytes(4)) == "too_large"
    assert broken(b"\xff\xff\xff\xff") == "too_large"
    assert sealing().feed(messages.FRAME_BYTES.to_bytes(4)) == []
    assert broken(Frames(ring(), REQUEST.nonce).seal(Data(bytes(messages.FRAME_BYTES)))) == "too_large"


def test_a_frame_cut_short_or_with_a_wrong_length_is_refused() -> None:
    sealed = sealed_frames()[0]
    for length in range(len(sealed) - 4):
        assert broken(length.to_bytes(4) + sealed[4:]) in ("malformed", "unknown_key", "forged")
    assert sealing().feed(sealed[:-1]) == [], "it is still on its way"
    assert broken(bytes(4)) == "malformed"


@pytest.mark.parametrize("content", [b"", b"\xc1", ["nothing"], ["head", "200", [], True], ["data"], ["end", 1], {}])
def test_another_versions_frame_is_refused(content: Any) -> None:
    raw = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    sealed = ring().seal_bytes(raw, b"reply" + REQUEST.nonce + bytes(8))
    assert broken(len(sealed).to_bytes(4) + sealed) == "version"


def test_frames_of_other_keys_and_purposes_are_refused() -> None:
    assert broken(sealed_frames(REQUEST.nonce, TWO)[0]) == "unknown_key"
    state = Frames(ring(purpose="state"), REQUEST.nonce).seal(FRAMES[0])
    assert broken(state) == "forged"


# -- rotation -------------------------------------------------------------------------------------------------------


def test_replicas_in_two_phases_of_a_rotation_understand_each_other() -> None:
    phases = [(ONE,), (ONE, TWO), (TWO, ONE), (TWO,)]
    for older, newer in itertools.pairwise(phases):
        for here, there in ((older, newer), (newer, older)):
            sealed = peer(*here).seal(REQUEST)
            assert peer(*there).open(sealed, NOW) == REQUEST
            answered = sealed_frames(REQUEST.nonce, *there)
            assert sealing(REQUEST.nonce, *here).feed(b"".join(answered)) == FRAMES
    assert refusal(peer(ONE, TWO).seal(REQUEST), peer(TWO)) == "unknown_key"
    assert refusal(peer(TWO).seal(REQUEST), peer()) == "unknown_key"
