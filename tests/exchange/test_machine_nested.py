"""The rows of a client that takes nested requests, before a server that is called again with the answers."""

from unittest.mock import ANY

import pytest

from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange import input_requests
from gateway.exchange.commands import Timer
from gateway.exchange.machine import Policy, Snapshot, State
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidState, Stopping
from tests.support.playbook import ACCEPT, FORM, LOST, RESULT, Playbook, opened, raw

FIRST, SECOND = on.Leg(), on.Leg()
A, B = (input_requests.Question(key, mcp.ELICIT, None, params=bytes(raw(FORM))) for key in "ab")
RELEASED = do.ReleaseSession(clean=True)
DROPPED = do.ReleaseSession(clean=False)


def asked(*, returns: bool = True) -> Playbook:
    return opened(FIRST, returns=returns) >> on.Asked((A, B)) << do.Put((A, B))


def away() -> Playbook:
    return opened(FIRST) >> on.Left(FIRST)


def test_a_round_is_asked_at_once_and_each_answer_goes_to_the_link() -> None:
    play = asked() >> on.Responded("b", ACCEPT) << do.SendAnswers(((B, ACCEPT),))
    assert list(play.questions) == ["a"]
    refusal = jsonrpc.Error(-1, "no")
    assert play >> on.Responded("a", refusal) << do.SendAnswers(((A, refusal),))
    assert play >> on.Resulted(RESULT) << do.Reply((FIRST,), RESULT) << RELEASED
    assert play.counts == ["asked", "asked", "answered", "answered"]
    assert play.state is State.ENDED


def test_an_answer_counts_once_and_only_to_an_open_question() -> None:
    play = asked() >> on.Responded("c", ACCEPT) >> on.Responded("a", ACCEPT) << ANY >> on.Responded("a", ACCEPT)
    assert play
    assert list(play.questions) == ["b"]


def test_a_client_that_comes_back_before_its_stream_broke_gets_one_reply() -> None:
    play = opened(FIRST) >> on.Opened(SECOND) << do.Close((FIRST,))
    assert play >> on.Left(FIRST)
    assert play.state is State.OPEN
    assert play >> on.Resulted(RESULT) << do.Reply((SECOND,), RESULT) << RELEASED


def test_a_client_that_is_away_is_asked_and_gets_the_end_when_it_comes_back() -> None:
    play = away()
    assert play.exchange.timers == (Timer.TTL,)
    assert play >> on.Asked((A,)) << do.Put((A,)) >> on.Responded("a", ACCEPT) << do.SendAnswers(((A, ACCEPT),))
    assert play.state is State.AWAY
    assert play >> on.Resulted(RESULT) << do.Reply((), RESULT) << RELEASED
    assert play.exchange.timers == (Timer.LINGER,)
    assert play >> on.Opened(SECOND) << do.Reply((SECOND,), RESULT) >> on.Expired()


@pytest.mark.parametrize(
    ("event", "fails"),
    [
        (on.Broke(LOST), do.Fail((), LOST)),
        (on.Failed(jsonrpc.Error(mcp.LEGACY_URL_REQUIRED)), do.Fail((), jsonrpc.Error(mcp.LEGACY_URL_REQUIRED))),
    ],
)
def test_an_error_is_kept_as_a_result_is(event: on.Event, fails: do.Fail) -> None:
    play = away() >> event << fails << ANY
    assert play >> on.Opened(SECOND) << do.Fail((SECOND,), fails.error)


def test_a_client_that_never_comes_back_is_given_up() -> None:
    play = away() >> on.Asked((A,)) << ANY >> on.Expired() << do.CancelCall(ANY) << DROPPED
    assert (play.state, play.exchange.timers, play.questions) == (State.ENDED, (), {})
    assert play.refuses(on.Opened(SECOND), InvalidState)


def test_the_call_of_an_older_client_ends_when_it_would_have_to_ask() -> None:
    play = opened(FIRST, returns=False) >> on.Left(FIRST)
    assert play.state is State.AWAY, "the tool may have effects, so it goes on"
    assert play >> on.Asked((A,)) << do.CancelCall(ANY) << DROPPED
    assert asked(returns=False) >> on.Left(FIRST) << do.CancelCall(ANY) << DROPPED
    play = opened(FIRST, returns=False, may_ask=False) >> on.Left(FIRST) << do.CancelCall(ANY) << DROPPED
    assert play.state is State.ENDED


def test_a_client_may_hang_up_whenever_it_likes() -> None:
    for play, legs in ((asked(), (FIRST,)), (away(), ())):
        assert play >> on.Cancelled() << do.CancelCall(ANY) << DROPPED << do.Close(legs)
        assert play >> on.Cancelled(), "also once more"
    assert opened(FIRST) >> on.Resulted(RESULT) << ANY << ANY >> on.Cancelled()


def test_a_call_that_is_stopped_fails_with_one_error() -> None:
    error = Stopping("stopping")
    play = asked() >> on.Stopped(error) << do.CancelCall(ANY) << do.Fail((FIRST,), error) << DROPPED
    assert play >> on.Stopped(error)


def test_the_call_of_a_dead_replica_waits_for_its_client() -> None:
    play = Playbook(policy=Policy(returns=True))
    play.exchange.restore(Snapshot(State.AWAY, 0, {"a": A}, None, 0))
    assert (play.exchange.timers, play.exchange.calling) == ((Timer.TTL,), True)
    assert play >> on.Responded("a", ACCEPT) << do.SendAnswers(((A, ACCEPT),))
