"""What the mirror seals: session ids, ids of nested requests, ids of events."""

import tracemalloc
from typing import Any, Final

import pytest
from msgspec.structs import replace

from gateway.config import InForce
from gateway.exchange.input_requests import Question
from gateway.mirror.call_rounds import Progress
from gateway.mirror.client_requests import LegacyRequest, Profile
from gateway.mirror.streamable.tokens import EVENT, NESTED, STATE, CallPlace, MirroredSession, NoSession, Tokens
from gateway.protocol.errors import InvalidState
from gateway.seal.claims import Bearer
from gateway.seal.keyring import Keys

KEY, OTHER = bytes(32), bytes(range(32))
NOW = 1_800_000_000.0
DAY = 86_400.0
PROFILE = Profile("2025-11-25", b'{"name":"c","version":"1"}', b'{"elicitation":{}}')
PLACE = CallPlace("s", "x", "gw-1", "e", NOW, 1, b"1", key="name", progress=Progress(1))
KINDS: Final = (NESTED, EVENT, STATE)


def tokens(*keys: bytes, former: tuple[bytes, ...] = ()) -> Tokens:
    return Tokens(InForce(Keys(keys or (KEY,), former)))


def bearer(route: str = "/mcp", principal: bytes = b"ada", now: float = NOW) -> Bearer:
    return Bearer(route, principal, now, lambda _: b"")


def opened(token: str, by: Tokens, **changes: Any) -> MirroredSession:
    return by.session(token, bearer(**changes), 7 * DAY)


def session_of(by: Tokens, key: str) -> MirroredSession:
    return replace(opened(by.new_session(bearer(), PROFILE), by), key=key)


@pytest.mark.parametrize(("reason", "change"), [("other_route", {"route": "/other"}), ("future", {"now": NOW - 61})])
def test_a_session_id_counts_for_nothing_elsewhere(reason: str, change: dict[str, object]) -> None:
    by = tokens()
    with pytest.raises(NoSession) as refused:
        _ = opened(by.new_session(bearer(), PROFILE), by, **change)
    assert isinstance(refused.value.__cause__, InvalidState)
    assert refused.value.__cause__.reason == reason


def test_a_former_key_opens_session_ids_and_nothing_else() -> None:
    old, new = tokens(OTHER), tokens(KEY, former=(OTHER,))
    assert opened(old.new_session(bearer(), PROFILE), new).profile == PROFILE
    for kind in KINDS:
        with pytest.raises(InvalidState):
            _ = new.place(kind, old.of_place(kind, PLACE), "s")
    assert not tokens(KEY).sessions.opens(old.new_session(bearer(), PROFILE))


def test_no_kind_of_token_opens_as_another_or_in_another_session() -> None:
    by = tokens()
    sealed = {kind: by.of_place(kind, PLACE) for kind in KINDS} | {"session": by.new_session(bearer(), PROFILE)}
    for kind in KINDS:
        assert by.place(kind, sealed[kind], "s") == PLACE
        with pytest.raises(InvalidState):
            _ = by.place(kind, sealed[kind], "t")
        for other in sealed.keys() - {kind}:
            with pytest.raises(InvalidState):
                _ = by.place(kind, sealed[other], "s")
        assert not by.sessions.opens(sealed[kind])
    assert [by.is_question(token) for token in (*sealed.values(), "x", None)] == [True] + [False] * 5


@pytest.mark.parametrize("size", [0, 500, 1_500, 1_900, 2_500, 10_000])
def test_a_nested_id_has_at_most_3000_characters_and_carries_the_call_if_it_fits(size: int) -> None:
    by = tokens()
    request = LegacyRequest(b"7", "tools/call", b'{"name":"t","arguments":{"a":"%b"}}' % (b"x" * size))
    asking = (Question("name", "elicitation/create", None),)
    whole = replace(PLACE, request=request, progress=Progress(1, b'"state"'), asking=asking)
    id_ = by.of_place(NESTED, whole)
    assert len(id_) <= 3_000
    assert by.place(NESTED, id_, "s") == (whole if size <= 1_900 else PLACE)


def test_what_cannot_fit_is_not_even_encoded() -> None:
    # Each event of a stream has an id: to encode megabytes for each would be work for a hostile server to ask for.
    by, size = tokens(), 4_000_000
    request = LegacyRequest(b"7", "tools/call", b'{"name":"t","arguments":{"a":"%b"}}' % (b"x" * size))
    keys = tuple([Question("k" * 900, "roots/list", None)] * 4_000)
    params = (Question("name", "elicitation/create", None, params=request.params),)
    tracemalloc.start()
    try:
        for place in (replace(PLACE, request=request), replace(PLACE, asking=keys), replace(PLACE, asking=params)):
            for kind in KINDS:
                _ = by.of_place(kind, place)
        assert tracemalloc.get_traced_memory()[1] < size / 10
    finally:
        tracemalloc.stop()


def test_an_event_id_fits_into_a_header_and_always_names_the_request() -> None:
    by = tokens()
    request = LegacyRequest(b"7", "tools/call", b'{"name":"t","arguments":{}}')
    small = replace(PLACE, request=request, asking=(Question("name", "elicitation/create", None, params=b"{}"),))
    assert by.place(EVENT, by.of_place(EVENT, small), "s") == small
    question = Question("name", "elicitation/create", None, params=b'{"message":"%b"}' % (b"x" * 7_000))
    token = by.of_place(EVENT, replace(small, asking=(question,)))
    assert len(token) <= 4_000
    assert by.place(EVENT, token, "s") == PLACE


def test_an_id_of_the_standalone_stream_carries_the_subscriptions_of_its_session() -> None:
    by = tokens()
    session = session_of(by, "s")
    for uris in ((), ("a://b", "a://\ud800")):
        assert by.subscribed(by.standalone_id(session, uris), session) == uris
    token = by.standalone_id(session, ("a://b",))
    assert by.subscribed(token, session_of(by, "t")) is None
    assert not by.sessions.opens(token)
    assert tokens(KEY, former=(OTHER,)).subscribed(tokens(OTHER).standalone_id(session, ()), session) == ()
    places = [by.of_place(kind, PLACE) for kind in KINDS]
    for odd in ("", "x" * 100_000, *places, by.new_session(bearer(), PROFILE)):
        assert by.subscribed(odd, session) is None
    with pytest.raises(InvalidState):
        _ = by.place(EVENT, token, "s")


def test_an_id_of_the_standalone_stream_fits_into_a_header() -> None:
    by = tokens()
    session = session_of(by, "s")
    uris = ("a://" + "x" * 3_000, *(f"a://{number:03}" for number in range(500)))
    token = by.standalone_id(session, uris)
    kept = by.subscribed(token, session)
    assert len(token) <= 4_000
    assert kept is not None
    assert 200 < len(kept) < 500
