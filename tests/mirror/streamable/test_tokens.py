"""What the mirror seals: session ids, ids of nested requests, ids of events."""

import json
import tracemalloc
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.config import InForce
from gateway.mirror.call_rounds import Progress
from gateway.mirror.client_requests import Profile, Request
from gateway.mirror.streamable.tokens import (
    CallPlace,
    Mark,
    NestedId,
    NoSession,
    SealedQuestion,
    Session,
    Tokens,
)
from gateway.protocol.errors import InvalidState
from gateway.seal.claims import Bearer
from gateway.seal.keyring import Keys

KEY, OTHER = bytes(32), bytes(range(32))
NOW = 1_800_000_000.0
DAY = 86_400.0
PROFILE = Profile("2025-11-25", b'{"name":"c","version":"1"}', b'{"elicitation":{}}')
PLACE = CallPlace("s", "x", "gw-1", "e", NOW)


def tokens(*keys: bytes, former: tuple[bytes, ...] = ()) -> Tokens:
    return Tokens(InForce(Keys(keys or (KEY,), former)))


def bearer(route: str = "/mcp", principal: bytes = b"ada", now: float = NOW) -> Bearer:
    return Bearer(route, principal, now, lambda _: b"")


def opened(token: str, by: Tokens, **changes: Any) -> Session:
    return by.session(token, bearer(**changes), 7 * DAY)


def session_of(by: Tokens, key: str) -> Session:
    return replace(opened(by.new_session(bearer(), PROFILE), by), key=key)


@pytest.mark.parametrize(("reason", "change"), [("other_route", {"route": "/other"}), ("future", {"now": NOW - 61})])
def test_a_session_id_counts_for_nothing_elsewhere(reason: str, change: dict[str, object]) -> None:
    by = tokens()
    with pytest.raises(NoSession) as refused:
        _ = opened(by.new_session(bearer(), PROFILE), by, **change)
    assert refused.value.reason == reason


def test_a_former_key_opens_session_ids_and_nothing_else() -> None:
    old, new = tokens(OTHER), tokens(KEY, former=(OTHER,))
    session = session_of(old, "s")
    assert opened(old.new_session(bearer(), PROFILE), new).profile == PROFILE
    nested = json.loads(old.nested_id(NestedId(PLACE, 1, "name")))
    with pytest.raises(InvalidState):
        _ = new.asked(nested, session)
    with pytest.raises(InvalidState):
        _ = new.mark(old.event_id(Mark(PLACE, 1, b"1")), session)
    assert not tokens(KEY).sessions.opens(old.new_session(bearer(), PROFILE))


def test_no_kind_of_token_opens_as_another() -> None:
    by = tokens()
    session = session_of(by, "s")
    nested, event = json.loads(by.nested_id(NestedId(PLACE, 1, "name"))), by.event_id(Mark(PLACE, 1, b"1"))
    assert by.asked(nested, session).key == "name"
    assert by.mark(event, session).rpc_id == b"1"
    for odd in (event, by.new_session(bearer(), PROFILE)):
        with pytest.raises(InvalidState):
            _ = by.asked(odd, session)
    with pytest.raises(InvalidState):
        _ = by.mark(nested, session)
    assert not by.sessions.opens(nested)
    assert [by.nested.opens(token) for token in (nested, event, "x", None)] == [True, False, False, False]


@pytest.mark.parametrize("size", [0, 500, 1_500, 1_900, 2_500, 10_000])
def test_a_nested_id_has_at_most_3000_characters_and_carries_the_call_if_it_fits(size: int) -> None:
    by = tokens()
    request = Request(b"7", "tools/call", b'{"name":"t","arguments":{"a":"%b"}}' % (b"x" * size))
    progress = Progress(1, b'"state"')
    id_ = by.nested_id(NestedId(PLACE, 1, "name", request, progress, ("name",)))
    assert len(json.loads(id_)) <= 3_000
    nested = by.asked(json.loads(id_), session_of(by, "s"))
    assert (nested.place, nested.round, nested.key) == (PLACE, 1, "name")
    if size <= 1_900:
        assert (nested.request, nested.progress, nested.keys) == (request, progress, ("name",))
    else:
        assert (nested.request, nested.progress, nested.keys) == (None, Progress(), ())


def test_what_cannot_fit_is_not_even_encoded() -> None:
    # Each event of a stream has an id: to encode megabytes for each would be work for a hostile server to ask for.
    by, size = tokens(), 4_000_000
    request = Request(b"7", "tools/call", b'{"name":"t","arguments":{"a":"%b"}}' % (b"x" * size))
    keys, asking = ("k" * 900,) * 4_000, (SealedQuestion("name", "elicitation/create", request.params),)
    tracemalloc.start()
    try:
        for nested in (NestedId(PLACE, 1, "name", request), NestedId(PLACE, 1, "name", keys=keys)):
            _ = by.nested_id(nested), by.state(nested)
        for mark in (Mark(PLACE, 1, b"7", request=request), Mark(PLACE, 1, b"7", asking=asking)):
            _ = by.event_id(mark)
        assert tracemalloc.get_traced_memory()[1] < size / 10
    finally:
        tracemalloc.stop()


def test_an_event_id_fits_into_a_header_and_always_names_the_request() -> None:
    by = tokens()
    request = Request(b"7", "tools/call", b'{"name":"t","arguments":{}}')
    question = SealedQuestion("name", "elicitation/create", b'{"message":"%b"}' % (b"x" * 9_000))
    mark = Mark(PLACE, 3, b"7", request=request, progress=Progress(1, None), asking=(question,))
    token = by.event_id(mark)
    assert len(token) <= 4_000
    found = by.mark(token, session_of(by, "s"))
    assert (found.place, found.number, found.rpc_id, found.request, found.asking) == (PLACE, 3, b"7", None, ())
    small = replace(mark, asking=(SealedQuestion("name", "elicitation/create", b"{}"),))
    assert by.mark(by.event_id(small), session_of(by, "s")) == small


def test_an_id_of_the_standalone_stream_carries_the_subscriptions_of_its_session() -> None:
    by = tokens()
    session = session_of(by, "s")
    for uris in ((), ("a://b", "a://\ud800")):
        assert by.subscribed(by.standalone_id(session, uris), session) == uris
    token = by.standalone_id(session, ("a://b",))
    assert by.subscribed(token, session_of(by, "t")) is None
    assert not by.sessions.opens(token)
    assert tokens(KEY, former=(OTHER,)).subscribed(tokens(OTHER).standalone_id(session, ()), session) == ()
    nested, event = json.loads(by.nested_id(NestedId(PLACE, 1, "name"))), by.event_id(Mark(PLACE, 1, b"1"))
    for odd in ("", "x" * 100_000, nested, event, by.new_session(bearer(), PROFILE)):
        assert by.subscribed(odd, session) is None
    with pytest.raises(InvalidState):
        _ = by.mark(token, session)


def test_an_id_of_the_standalone_stream_fits_into_a_header() -> None:
    by = tokens()
    session = session_of(by, "s")
    uris = ("a://" + "x" * 3_000, *(f"a://{number:03}" for number in range(500)))
    token = by.standalone_id(session, uris)
    kept = by.subscribed(token, session)
    assert len(token) <= 4_000
    assert kept is not None
    assert 200 < len(kept) < 500
