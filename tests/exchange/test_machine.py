"""Stories of one exchange, each told as its events and the commands that follow."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import ANY

import pytest
from msgspec import Raw

from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange import input_requests, machine
from gateway.exchange.commands import Timer
from gateway.exchange.machine import TRANSITIONS, Exchange, Policy, Snapshot, State
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import (
    InvalidParams,
    InvalidState,
    LocalProtocolError,
    MissingCapability,
    Refused,
    Stopping,
)
from gateway.protocol.request_meta import Capabilities
from tests.support.playbook import (
    ACCEPT,
    ALL,
    CANCEL,
    DECLINE,
    FORM,
    LOST,
    RESULT,
    SAMPLED,
    SAMPLING,
    Playbook,
    answered,
    ask,
    asked,
    attributes,
    broken,
    detached,
    error,
    opened,
    parked,
    raw,
    referred,
    resumed,
    same,
    send,
    url,
    url_required,
    waiting,
)
from tests.support.schema import assert_modern_result

FIRST, SECOND, THIRD, FOURTH = on.Leg(), on.Leg(), on.Leg(), on.Leg()
EVENTS = [event for event in on.Event.__subclasses__() if event is not on.Notice]
STOPPING = Stopping("stopping")
UNAUTHORISED = Refused("refused", status=401, challenge="Bearer")
QUESTION = input_requests.Question("elicitation-1", mcp.ELICIT, b"0", params=bytes(raw(FORM)))
PLAIN = Policy(may_ask=False)

# -- one call ---------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_an_exchange_after_a_bug() -> None:
    play = parked(FIRST)
    play.exchange.crash()
    assert (play.state, play.exchange.legs, play.questions) == (State.ENDED, (), {})
    assert play.refuses(answered(SECOND, 1), InvalidState)


def test_a_request_that_may_not_ask_does_not_shed() -> None:
    assert Playbook(policy=PLAIN) >> on.Called(FIRST) << do.SendCall() >> on.LegLimitPassed()


# -- states -----------------------------------------------------------------------------------------------------


def _restored() -> Playbook:
    play = Playbook()
    play.exchange.restore(Snapshot(State.PARKED, 1, {QUESTION.key: QUESTION}, (), sheds=0))
    return play


STATES: Final[dict[State, Callable[[], Playbook]]] = {
    State.IDLE: Playbook,
    State.RUNNING: lambda: resumed(FIRST, SECOND),
    State.ASKING: lambda: resumed(FIRST, SECOND) >> asked(1) << ANY,
    State.PARKED: lambda: parked(FIRST),
    State.RESTORED: _restored,
    State.REFERRED: lambda: referred(FIRST),
    State.BROKEN: lambda: broken(FIRST),
    State.DETACHED: lambda: detached(FIRST, SECOND),
    State.OPEN: lambda: opened(FIRST),
    State.AWAY: lambda: opened(FIRST) >> on.Left(FIRST),
    State.OWNED: lambda: resumed(FIRST, SECOND) >> on.Became("t") << ANY,
    State.SETTLED: lambda: resumed(FIRST, SECOND) >> on.Became("t") << ANY >> on.Resulted(RESULT) << ANY << ANY,
    State.FINISHED: lambda: parked(FIRST) >> on.Resulted(RESULT) << ANY,
    State.ENDED: lambda: resumed(FIRST, SECOND) >> on.Resulted(RESULT) << ANY << ANY,
}
"""An exchange in each state."""


def in_state(state: State) -> Exchange:
    return STATES[state]().exchange


LEG, QUIET, TTL, COLD, GRACE, LINGER = Timer.LEG, Timer.QUIET, Timer.TTL, Timer.COLD, Timer.GRACE, Timer.LINGER


def _crashed() -> Playbook:
    play = resumed(FIRST, SECOND) >> on.Resulted(RESULT) << ANY << ANY
    play.exchange.crash()
    return play


@pytest.mark.parametrize(
    ("arrive", "timers"),
    [
        (STATES[State.IDLE], ()),
        (lambda: Playbook(policy=PLAIN) >> on.Called(FIRST) << ANY, ()),
        (lambda: waiting(FIRST), (LEG,)),
        (STATES[State.RUNNING], (LEG,)),
        (STATES[State.ASKING], (LEG, QUIET)),
        (STATES[State.PARKED], (TTL, COLD)),
        (STATES[State.RESTORED], (TTL, COLD)),
        (STATES[State.REFERRED], (TTL,)),
        (STATES[State.BROKEN], (TTL,)),
        (STATES[State.DETACHED], (GRACE,)),
        # What a parked call ended with waits as long as the call would have; what nobody was told of lingers.
        (STATES[State.FINISHED], (TTL,)),
        (lambda: broken(FIRST) >> on.Stopped(STOPPING) << ANY, (TTL,)),
        (lambda: detached(FIRST, SECOND) >> on.Resulted(RESULT) << ANY, (LINGER,)),
        (lambda: parked(FIRST) >> on.Resulted(RESULT) << ANY >> answered(SECOND, 1) << ANY << ANY, (LINGER,)),
        (lambda: waiting(FIRST) >> on.Resulted(RESULT) << ANY << ANY, ()),
        (STATES[State.ENDED], (LINGER,)),
        (lambda: resumed(FIRST, SECOND) >> on.Stopped(STOPPING) << ANY << ANY << ANY, (LINGER,)),
        # A call that was given up leaves nothing, but its client may repeat the retry after which it left.
        (lambda: waiting(FIRST) >> on.Left(FIRST) << ANY << ANY, ()),
        (lambda: parked(FIRST) >> on.Expired() << ANY << ANY << ANY, ()),
        (lambda: parked(FIRST) >> on.Resulted(RESULT) << ANY >> on.Expired(), ()),
        (lambda: detached(FIRST, SECOND) >> on.GracePassed() << ANY << ANY, (LINGER,)),
        (lambda: parked(FIRST) >> on.LetGo(cancel=False) << ANY, ()),
        (lambda: detached(FIRST, SECOND) >> on.Resulted(RESULT) << ANY >> on.Expired(), ()),
        (_crashed, ()),
    ],
)
def test_each_state_has_its_timers(arrive: Callable[[], Playbook], timers: tuple[Timer, ...]) -> None:
    play = arrive()
    assert play
    assert play.exchange.timers == timers


# -- questions --------------------------------------------------------------------------------------------------


def test_several_questions_within_the_quiet_window_share_one_round() -> None:
    play = waiting(FIRST) >> asked(0) << do.Arm(Timer.QUIET)
    play = play >> on.Nested(raw("x"), mcp.SAMPLE, raw(SAMPLING)) << do.Arm(Timer.QUIET)
    play = play >> on.Nested(raw(2), mcp.ROOTS, raw({})) << do.Arm(Timer.QUIET)
    keys = ("elicitation-1", "sampling-1", "roots-1")
    play = play >> on.QuietPassed() << ask(FIRST, 1, *keys)
    roots = raw({"roots": [{"uri": "file:///a"}]})
    # The answers go up in the order of the questions, whatever the client's order is.
    play = play >> answered(SECOND, 1, **{"roots-1": roots, "sampling-1": SAMPLED, "elicitation-1": ACCEPT})
    assert play << send(("elicitation-1", 0, ACCEPT), ("sampling-1", "x", SAMPLED), ("roots-1", 2, roots))
    assert play.counts == ["asked"] * 3 + ["answered"] * 3


def test_the_title_of_the_form_is_the_key_and_keys_are_never_given_twice() -> None:
    play = waiting(FIRST) >> asked(0, title="name") << do.Arm(Timer.QUIET) >> asked(1, title="name")
    play = play << do.Arm(Timer.QUIET) >> on.QuietPassed() << ask(FIRST, 1, "name", "name-2")
    play = play >> answered(SECOND, 1, name=ACCEPT, **{"name-2": ACCEPT}) << ANY
    assert play >> asked(2, title="name") << do.Arm(Timer.QUIET)
    assert list(play.questions) == ["name-3"]


def test_a_question_with_the_id_of_an_earlier_one_is_not_asked_again() -> None:
    play = waiting(FIRST) >> asked(0) << do.Arm(Timer.QUIET)
    assert play >> asked(0)
    assert play.counts == ["asked", "duplicate"]
    assert len(play.questions) == 1


def test_ids_differ_by_json_type() -> None:
    play = waiting(FIRST) >> asked(0) << do.Arm(Timer.QUIET) >> asked("0") << do.Arm(Timer.QUIET)
    assert play
    assert len(play.questions) == 2


def test_a_question_with_an_id_that_is_a_load_is_refused() -> None:
    long = "x" * 1023
    play = waiting(FIRST) >> asked(long) << do.Respond(raw(long), error(mcp.INVALID_REQUEST))
    assert play
    assert not play.exchange.nested_requests.has_heard(bytes(raw(long)))


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("ping", {}, mcp.METHOD_NOT_FOUND),
        ("tasks/get", {}, mcp.METHOD_NOT_FOUND),
        (mcp.ELICIT, {"message": "Name?"}, mcp.INVALID_PARAMS),
        (mcp.ELICIT, {"mode": "url", "message": "Visit"}, mcp.INVALID_PARAMS),
        (mcp.ELICIT, [], mcp.INVALID_PARAMS),
        (mcp.SAMPLE, {"messages": []}, mcp.INVALID_PARAMS),
        (mcp.ROOTS, "all", mcp.INVALID_PARAMS),
    ],
)
def test_what_no_client_could_answer_is_refused_upstream_and_the_call_goes_on(
    method: str, params: Any, code: int
) -> None:
    play = waiting(FIRST) >> on.Nested(raw(0), method, raw(params)) << do.Respond(raw(0), error(code))
    assert play
    assert play.state is State.RUNNING
    assert play.counts[0] in {"refused", "malformed"}


# -- capabilities (SEP-2260, mrtr server requirement 7) -----------------------------------------------------------


def test_an_undeclared_question_settles_the_questions_that_were_open() -> None:
    play = waiting(FIRST, declared=Capabilities(form=True, sampling=True)) >> asked(0) << do.Arm(Timer.QUIET)
    play = play >> on.Nested(raw(1), mcp.SAMPLE, raw(SAMPLING)) << do.Arm(Timer.QUIET)
    play = play >> on.Nested(raw(2), mcp.ROOTS, raw({})) << do.Respond(raw(2), error(mcp.INVALID_PARAMS))
    play = play << do.Respond(raw(0), CANCEL) << do.Respond(raw(1), error(mcp.INTERNAL_ERROR))
    assert play << do.CancelCall(ANY) << do.Fail((FIRST,), ANY) << do.ReleaseSession(clean=False)


# -- answers ----------------------------------------------------------------------------------------------------


def test_missing_answers_are_asked_again_in_the_same_round() -> None:
    play = parked(FIRST) >> answered(SECOND, 1) << ask(SECOND, 1, "elicitation-1") << do.Arm(Timer.TTL)
    assert play.state is State.PARKED
    assert play >> answered(THIRD, 1, **{"elicitation-1": ACCEPT}) << send(("elicitation-1", 0, ACCEPT))


def test_only_the_missing_answers_are_asked_again() -> None:
    play = waiting(FIRST) >> asked(0) << do.Arm(Timer.QUIET) >> asked(1) << do.Arm(Timer.QUIET)
    play = play >> on.QuietPassed() << ask(FIRST, 1, "elicitation-1", "elicitation-2")
    play = play >> answered(SECOND, 1, **{"elicitation-2": DECLINE}) << send(("elicitation-2", 1, DECLINE))
    assert play >> on.QuietPassed() << ask(SECOND, 2, "elicitation-1")


def test_unknown_keys_are_ignored() -> None:
    play = parked(FIRST) >> answered(SECOND, 1, **{"elicitation-1": ACCEPT, "elicitation-2": ACCEPT, "x": raw(1)})
    assert play << send(("elicitation-1", 0, ACCEPT))


@pytest.mark.parametrize(
    "number", [b"1e400", b"-1e400", b"9" * 5_000, b"0." + b"1" * 5_000], ids=lambda n: n[:6].decode()
)
@pytest.mark.parametrize("arrive", [parked, broken, referred])
@pytest.mark.parametrize("place", [b'"content":{"n":%b}', b'"_meta":{"n":%b}'], ids=["content", "meta"])
def test_an_answer_with_a_number_beyond_all_ranges_is_taken_whole_or_changes_nothing(
    number: bytes, arrive: Callable[..., Playbook], place: bytes
) -> None:
    answer = Raw(b'{"action":"accept",%b}' % (place % number))
    play = arrive(FIRST)
    before = attributes(play.exchange)
    try:
        play.exchange.handle(answered(SECOND, 1, **{"elicitation-1": answer}))
    except InvalidParams:
        assert attributes(play.exchange) == before
    else:
        assert play.questions == {}
        assert play.exchange.legs == (SECOND,)


@pytest.mark.parametrize("number", [b"1e400", b"9" * 5_000], ids=["exponent", "digits"])
def test_a_question_with_a_number_beyond_all_ranges_is_asked_recorded_and_recognised(number: bytes) -> None:
    params = Raw(b'{"message":"Name?","requestedSchema":{"type":"object","properties":{}},"n":%b}' % number)
    play = waiting(FIRST) >> on.Nested(raw(0), mcp.ELICIT, params) << ANY >> on.QuietPassed() << ANY
    play = play >> answered(SECOND, 1, **{"elicitation-1": ACCEPT}) << ANY
    play = play >> on.Broke(LOST, replayable=True) << ANY << do.RunAgain()
    assert play >> on.Nested(raw(9), mcp.ELICIT, params) << send(("elicitation-1", 9, ACCEPT))


# -- answers that do not arrive -----------------------------------------------------------------------------------


def test_after_refused_credentials_a_result_is_kept_for_whatever_answer_comes() -> None:
    play = resumed(FIRST, SECOND) >> on.Undelivered((QUESTION,), UNAUTHORISED, retryable=True) << ANY << ANY
    play = play >> on.Resulted(RESULT) << do.ReleaseSession(clean=False)
    assert play >> answered(THIRD, 1, **{"elicitation-1": DECLINE}) << do.Reply((THIRD,), RESULT) << ANY


def test_refused_credentials_put_the_questions_back_in_front_of_new_ones() -> None:
    play = resumed(FIRST, SECOND) >> asked(1) << do.Arm(Timer.QUIET)
    play = play >> on.Undelivered((QUESTION,), UNAUTHORISED, retryable=True) << ANY << ANY
    assert list(play.questions) == ["elicitation-1", "elicitation-2"]


def test_refused_credentials_after_every_leg_left_leave_the_call_parked() -> None:
    play = detached(FIRST, SECOND) >> on.Undelivered((QUESTION,), UNAUTHORISED, retryable=True)
    assert play << do.Arm(Timer.TTL)
    assert play.state is State.PARKED


def test_refused_credentials_for_a_given_answer_end_the_first_round() -> None:
    play = waiting(FIRST, given={"elicitation-1": ACCEPT}) >> asked(0) << ANY
    play = play >> on.Undelivered((QUESTION,), UNAUTHORISED, retryable=True) << do.CancelCall(ANY)
    assert play << do.Fail((FIRST,), UNAUTHORISED) << do.ReleaseSession(clean=False)


@pytest.mark.parametrize("retryable", [True, False])
def test_an_answer_to_a_call_that_ended_with_urls_does_not_harm_the_call_after_them(retryable: bool) -> None:  # noqa: FBT001
    play = resumed(FIRST, SECOND) >> url_required(url()) << ANY
    play = play >> answered(THIRD, 2, **{"elicitation-2": ACCEPT}) << do.SendCall()
    assert play >> on.Undelivered((QUESTION,), UNAUTHORISED if retryable else LOST, retryable)
    assert play.state is State.RUNNING
    assert play >> on.Resulted(RESULT) << do.Reply((THIRD,), RESULT) << do.ReleaseSession(clean=True)


# -- withdrawn questions ------------------------------------------------------------------------------------------


def test_a_question_withdrawn_within_the_quiet_window_is_not_asked() -> None:
    play = waiting(FIRST) >> asked(0) << do.Arm(Timer.QUIET) >> on.Withdrawn(raw(0))
    assert play
    assert play.state is State.RUNNING
    assert play.counts == ["asked", "withdrawn"]


def test_of_two_questions_one_withdrawn_the_other_is_asked() -> None:
    play = waiting(FIRST) >> asked(0) << do.Arm(Timer.QUIET) >> asked(1) << do.Arm(Timer.QUIET) >> on.Withdrawn(raw(0))
    assert play >> on.QuietPassed() << ask(FIRST, 1, "elicitation-2")


def test_withdrawing_a_question_that_is_not_open_does_nothing() -> None:
    play = waiting(FIRST) >> asked(0) << do.Arm(Timer.QUIET) >> on.Withdrawn(raw("0"))
    assert play
    assert len(play.questions) == 1


# -- the upstream ends while nobody waits ---------------------------------------------------------------------------


def test_a_result_collected_by_a_repeat_of_an_earlier_round_is_given_to_this_round_too() -> None:
    play = resumed(FIRST, SECOND) >> asked(1) << ANY >> on.QuietPassed() << ANY
    play = play >> on.Resulted(RESULT) << ANY
    play = play >> answered(THIRD, 1, **{"elicitation-1": ACCEPT}) << do.Reply((THIRD,), RESULT) << ANY
    assert play >> answered(FOURTH, 2, **{"elicitation-2": ACCEPT}) << do.Reply((FOURTH,), RESULT)
    # From now on the round has its answers, and the other rounds as before.
    play.refuses(answered(FOURTH, 2, **{"elicitation-2": DECLINE}), InvalidState)
    play.refuses(answered(FOURTH, 3), InvalidState)
    assert play >> answered(FOURTH, 2, **{"elicitation-2": ACCEPT}) << do.Reply((FOURTH,), RESULT)


def test_a_kept_result_is_not_given_to_a_round_that_never_was() -> None:
    play = parked(FIRST) >> on.Resulted(RESULT) << ANY
    play.refuses(answered(SECOND, 0, **{"elicitation-1": ACCEPT}), InvalidState)
    play.refuses(answered(SECOND, 2, **{"elicitation-1": ACCEPT}), InvalidState)


def test_the_error_of_a_call_is_the_answer_to_a_later_round_of_another_process() -> None:
    play = parked(FIRST) >> on.Broke(LOST) << ANY
    assert play.state is State.FINISHED
    play = play >> answered(SECOND, 2, **{"elicitation-2": ACCEPT})
    assert play << do.Fail((SECOND,), LOST) << do.Arm(Timer.LINGER)
    assert play >> answered(THIRD, 3, **{"elicitation-3": ACCEPT}) << do.Fail((THIRD,), LOST)
    assert play >> answered(FOURTH, 0) << do.Fail((FOURTH,), LOST)


@pytest.mark.parametrize(
    ("end", "is_lost"), [(on.Broke(LOST), True), (on.Resulted(RESULT), False), (on.Failed(jsonrpc.Error(1)), False)]
)
def test_a_call_is_lost_if_its_upstream_failed_while_its_client_was_away(end: on.Event, *, is_lost: bool) -> None:
    play = parked(FIRST)
    assert not play.exchange.is_lost
    play = play >> end << ANY
    assert play.exchange.is_lost is is_lost
    assert not (play >> answered(SECOND, 1, **{"elicitation-1": ACCEPT})).exchange.is_lost, "the client knows"


def test_a_lost_call_keeps_none_of_its_answers() -> None:
    play = parked(FIRST) >> answered(SECOND, 1, **{"elicitation-1": ACCEPT}) << ANY >> on.Left(SECOND)
    assert play.exchange.kept_bytes > 0
    play = play >> on.Broke(LOST) << ANY
    assert play.exchange.is_lost
    assert play.exchange.kept_bytes == 0


@pytest.mark.parametrize(
    ("play", "requests"),
    [(waiting(FIRST), 1), (parked(FIRST), 1), (resumed(FIRST, SECOND), 2), (detached(FIRST, SECOND), 2)],
)
def test_a_call_has_as_many_requests_as_its_client_sent(play: Playbook, requests: int) -> None:
    assert play.exchange.requests == requests


def test_what_waits_for_its_client_is_weighed_an_error_of_the_server_too() -> None:
    error = jsonrpc.Error(1, "no", Raw(b'"' + b"x" * 998 + b'"'))
    assert (parked(FIRST) >> on.Failed(error) << ANY).exchange.kept_bytes == 1002
    assert (parked(FIRST) >> on.Failed(jsonrpc.Error(1, "no")) << ANY).exchange.kept_bytes == 2


def test_a_result_whose_client_does_not_return_is_dropped() -> None:
    play = parked(FIRST) >> on.Resulted(RESULT) << ANY >> on.Expired()
    assert play.state is State.ENDED
    play.refuses(answered(SECOND, 1), InvalidState)


# -- -32042 -------------------------------------------------------------------------------------------------------


def test_a_declined_url_ends_in_a_result_that_says_so() -> None:
    play = referred(FIRST) >> answered(SECOND, 1, **{"elicitation-1": DECLINE})
    (reply,) = [command for command in play.pending if isinstance(command, do.Reply)]
    assert play << do.Reply((SECOND,), ANY) << do.ReleaseSession(clean=True)
    result = assert_modern_result(mcp.TOOLS_CALL, reply.result)
    assert result["isError"] is True
    assert "elicitation-1" in result["content"][0]["text"]
    assert play.exchange.timers == (Timer.LINGER,), "a lost reply can be had again"


def test_of_several_urls_only_those_not_accepted_yet_are_asked_again() -> None:
    play = referred(FIRST, url("a"), url("b"))
    play = (
        play
        >> answered(SECOND, 1, **{"elicitation-1": ACCEPT})
        << ask(SECOND, 1, "elicitation-2", state=State.REFERRED)
    )
    assert play << do.Arm(Timer.TTL) >> answered(THIRD, 1, **{"elicitation-2": ACCEPT}) << do.SendCall()


def test_one_url_declined_ends_the_call_though_others_are_open() -> None:
    play = referred(FIRST, url("a"), url("b")) >> answered(SECOND, 1, **{"elicitation-1": DECLINE})
    assert play << do.Reply((SECOND,), ANY) << do.ReleaseSession(clean=True)


def test_a_declined_url_of_a_prompt_is_an_error_and_not_a_tool_result() -> None:
    play = referred(FIRST, policy=Policy(is_tool=False)) >> answered(SECOND, 1, **{"elicitation-1": DECLINE})
    assert play << do.Fail((SECOND,), error(mcp.INTERNAL_ERROR)) << do.ReleaseSession(clean=True)


def test_a_url_for_a_client_that_cannot_visit_it_is_refused() -> None:
    play = waiting(FIRST, declared=Capabilities(form=True)) >> url_required(url())
    missing = MissingCapability({"elicitation": {"url": {}}}, "error -32042")
    assert play << do.Fail((FIRST,), missing) << do.ReleaseSession(clean=True)


def test_a_url_error_that_cannot_be_a_round_keeps_its_code_and_data() -> None:
    failed, _ = waiting(FIRST).exchange.handle(url_required(elicitations="all"))
    assert isinstance(failed, do.Fail)
    assert isinstance(failed.error.data, Raw)
    assert json.loads(bytes(failed.error.data)) == {"upstreamCode": -32042, "elicitations": "all"}


def test_a_url_error_to_a_request_that_may_not_ask_is_an_internal_error() -> None:
    play = Playbook(policy=PLAIN) >> on.Called(FIRST) << do.SendCall() >> url_required(url())
    assert play << do.Fail((FIRST,), error(mcp.INTERNAL_ERROR)) << do.ReleaseSession(clean=True)


def test_urls_that_came_while_detached_are_for_whoever_gave_the_answers_before() -> None:
    play = detached(FIRST, SECOND) >> url_required(url()) << ANY
    play.refuses(answered(THIRD, 1, **{"elicitation-1": DECLINE}), InvalidState)


# -- the client leaves ----------------------------------------------------------------------------------------------


def test_leaving_while_questions_gather_answers_them_with_cancel() -> None:
    play = waiting(FIRST) >> asked(0) << do.Arm(Timer.QUIET) >> on.Left(FIRST) << do.Respond(raw(0), CANCEL)
    assert play << do.CancelCall(ANY) << do.ReleaseSession(clean=False)


def test_a_question_asked_within_the_grace_period_is_asked_to_the_repeat() -> None:
    play = detached(FIRST, SECOND) >> asked(1)
    play = play >> answered(THIRD, 1, **{"elicitation-1": ACCEPT})
    assert play >> on.QuietPassed() << ask(THIRD, 2, "elicitation-2")


def test_a_kept_result_is_not_given_for_other_answers() -> None:
    play = detached(FIRST, SECOND) >> on.Resulted(RESULT) << ANY
    play.refuses(answered(THIRD, 1, **{"elicitation-1": DECLINE}), InvalidState)


@pytest.mark.parametrize("arrive", [parked, referred, broken], ids=["parked", "referred", "broken"])
def test_closing_after_a_reply_is_no_cancellation(arrive: Callable[[on.Leg], Playbook]) -> None:
    play = arrive(FIRST)
    state = play.state
    assert play >> on.Left(FIRST)
    assert play.state is state


# -- two retries at once ----------------------------------------------------------------------------------------------


def test_two_retries_at_once_share_the_next_round() -> None:
    play = resumed(FIRST, SECOND) >> answered(THIRD, 1, **{"elicitation-1": ACCEPT}) >> asked(1) << do.Arm(Timer.QUIET)
    assert play >> on.QuietPassed() << ask((SECOND, THIRD), 2, "elicitation-2")


def test_one_of_two_retries_leaving_changes_nothing_for_the_other() -> None:
    play = resumed(FIRST, SECOND) >> answered(THIRD, 1, **{"elicitation-1": ACCEPT}) >> on.Left(SECOND)
    assert play.state is State.RUNNING
    assert play >> on.Resulted(RESULT) << do.Reply((THIRD,), RESULT) << ANY


# -- repeats and stale rounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("round_", [0, 2, -1])
def test_a_round_that_was_never_asked_is_refused(round_: int) -> None:
    parked(FIRST).refuses(answered(SECOND, round_, **{"elicitation-1": ACCEPT}), InvalidState)
    resumed(FIRST, SECOND).refuses(answered(THIRD, round_, **{"elicitation-1": ACCEPT}), InvalidState)


# -- time -------------------------------------------------------------------------------------------------------------


def test_urls_that_are_not_visited_in_time_free_the_session() -> None:
    play = referred(FIRST) >> on.Expired() << do.ReleaseSession(clean=True)
    assert play
    assert play.state is State.ENDED


def test_a_leg_whose_call_finds_no_place_is_kept_open_until_there_is_one() -> None:
    play = waiting(FIRST, policy=Policy(shed_rounds=1))
    for _ in range(2):
        play = play >> on.LegLimitPassed(has_place=False) << do.Arm(Timer.LEG)
        assert play.state is State.RUNNING
    assert play >> on.LegLimitPassed() << ask(FIRST, 1)


def test_a_leg_that_reaches_its_limit_within_the_quiet_window_asks_at_once() -> None:
    # Waiting on would leave the leg without a limit if the question were withdrawn before the window has passed.
    play = waiting(FIRST) >> asked(0) << do.Arm(Timer.QUIET) >> on.LegLimitPassed()
    assert play << ask(FIRST, 1, "elicitation-1")
    assert play.exchange.sheds == 0


# -- stop -------------------------------------------------------------------------------------------------------------


def test_stopping_while_referred_or_detached_frees_the_session() -> None:
    assert referred(FIRST) >> on.Stopped(STOPPING) << do.ReleaseSession(clean=False)
    assert detached(FIRST, SECOND) >> on.Stopped(STOPPING) << do.CancelCall(ANY) << do.ReleaseSession(clean=False)


# -- late events and the table ----------------------------------------------------------------------------------------


def event_of(kind: type[on.Event]) -> on.Event:
    samples: tuple[on.Event, ...] = (
        on.Called(FIRST),
        answered(THIRD, 1, **{"elicitation-1": ACCEPT}),
        on.Left(SECOND),
        on.Opened(THIRD),
        on.Asked((QUESTION,)),
        on.Responded("name", ACCEPT),
        asked(8),
        on.Withdrawn(raw(0)),
        on.Became("t"),
        on.Updated(((QUESTION, ACCEPT),)),
        on.Cancelled(),
        on.Resulted(RESULT),
        on.Failed(jsonrpc.Error(1)),
        on.Broke(LOST),
        on.Undelivered((QUESTION,), LOST, retryable=True),
        on.QuietPassed(),
        on.LegLimitPassed(),
        on.GracePassed(),
        on.Expired(),
        on.HandedOver(),
        on.LetGo(cancel=True),
        on.Stopped(STOPPING),
    )
    (event,) = [sample for sample in samples if type(sample) is kind]
    return event


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_a_pair_is_in_the_table_or_raises_and_changes_nothing(state: State, kind: type[on.Event]) -> None:
    exchange = in_state(state)
    assert exchange.state is state
    if (state, kind) in TRANSITIONS:
        exchange.handle(event_of(kind))
        return
    before = attributes(exchange)
    with pytest.raises(LocalProtocolError, match=f"{kind.__name__} is not allowed in {state}"):
        exchange.handle(event_of(kind))
    assert attributes(exchange) == before


IS_OVER: Final = (State.FINISHED, State.ENDED)
IS_BETWEEN: Final = (State.REFERRED, State.BROKEN)
LATE: Final[tuple[tuple[tuple[type[on.Event], ...], tuple[State, ...]], ...]] = (
    ((on.Withdrawn, on.Left), (State.SETTLED, *IS_BETWEEN, *IS_OVER)),
    ((on.Resulted, on.Failed, on.Broke), (State.BROKEN, State.SETTLED, *IS_OVER)),
    ((on.Undelivered,), (State.SETTLED, *IS_BETWEEN, State.FINISHED)),
    ((on.Left, on.HandedOver), (State.OWNED,)),
    ((on.HandedOver,), (State.PARKED, State.DETACHED, State.SETTLED, *IS_BETWEEN, *IS_OVER)),
    ((on.LetGo, on.Stopped), IS_OVER),
)
"""Events that come late, with the states in which they do."""


@pytest.mark.parametrize(
    ("kind", "state"), [(kind, state) for kinds, states in LATE for kind in kinds for state in states]
)
def test_a_late_event_changes_nothing(kind: type[on.Event], state: State) -> None:
    exchange = in_state(state)
    before = attributes(exchange)
    assert exchange.handle(event_of(kind)) == []
    assert attributes(exchange) == before


@pytest.mark.parametrize("state", [State.SETTLED, *IS_BETWEEN, *IS_OVER])
def test_a_question_outside_of_a_call_is_refused(state: State) -> None:
    refusal, count = in_state(state).handle(asked(9))
    assert same(refusal, do.Respond(raw(9), error(mcp.INVALID_PARAMS)))
    assert same(count, do.Count(mcp.ELICIT, "refused_unsolicited"))


def test_the_table_and_the_docstring_know_every_state_and_event() -> None:
    doc = machine.__doc__ or ""
    assert all(f"\n{state.name}" in doc for state in State if state is not State.IDLE)
    assert {state for state, _ in TRANSITIONS} == set(State)
    assert {kind for _, kind in TRANSITIONS} == set(EVENTS)


def test_the_tables_that_are_printed_for_readers_have_every_cell() -> None:
    script = Path(__file__).parents[2] / "scripts" / "print_transitions"
    printed = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    cells = {}
    for table in printed.split("\n\n"):
        header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        cells |= {
            (State[state], row[0]): handler
            for row in rows
            for state, handler in zip(header[1:], row[1:], strict=True)
            if handler
        }
    assert cells == {(state, kind.__name__): handler.__name__[1:] for (state, kind), handler in TRANSITIONS.items()}


def test_a_question_keeps_no_more_of_its_message_than_it_needs() -> None:
    message = json.dumps({"jsonrpc": "2.0", "id": "q", "method": mcp.ELICIT, "params": FORM}).encode()
    references = sys.getrefcount(message)
    exchange = Exchange(ALL, Policy())
    exchange.handle(on.Called(FIRST))
    opened = jsonrpc.message(message)
    assert isinstance(opened.id, Raw)
    exchange.handle(on.Nested(opened.id, mcp.ELICIT, opened.params))
    del opened
    assert [question.upstream_id for question in exchange.questions.values()] == [b'"q"']
    assert sys.getrefcount(message) == references
