"""The replay ledger by itself, beyond what the stories of an exchange that runs again show of it."""

from msgspec import Raw

from gateway.exchange.input_requests import Question, question_digest
from gateway.exchange.replay_ledger import MAX_RECORD_BYTES, MAX_RUNS, Answers, Recorded, ReplayLedger
from gateway.protocol import mcp
from tests.support.playbook import FORM, raw


def question(number: int, *, key: str | None = None) -> Question:
    params = raw({**FORM, "message": f"Question {number}?"})
    return Question(key or f"key-{number}", mcp.ELICIT, bytes(raw(number)), params=bytes(params))


def reply(number: int) -> Raw:
    return raw({"action": "accept", "content": {"name": f"answer {number}"}})


def answers(*numbers: int) -> Answers:
    return tuple((question(number), reply(number)) for number in numbers)


def large(share: int) -> Raw:
    return raw({"action": "accept", "content": {"name": "x" * (MAX_RECORD_BYTES // share)}})


def replayed(ledger: ReplayLedger, number: int) -> bytes | None:
    """What the ledger answers to a question that another run asks under another key."""
    answer = ledger.next_answer(question(number, key=f"again-{number}"))
    return None if answer is None else bytes(answer)


def test_answers_are_on_record_in_their_order_with_their_round() -> None:
    ledger = ReplayLedger()
    ledger.note(answers(2, 1), 1)
    ledger.note(answers(3), 2)
    assert ledger.record == tuple(
        Recorded(f"key-{number}", question_digest(question(number)), round_, bytes(reply(number)))
        for number, round_ in [(2, 1), (1, 1), (3, 2)]
    )


def test_a_later_answer_replaces_the_earlier_one() -> None:
    ledger = ReplayLedger()
    ledger.note(answers(1, 2), 1)
    ledger.note(((question(1), reply(9)),), 2)
    assert [(recorded.key, recorded.answer) for recorded in ledger.record or ()] == [
        ("key-2", bytes(reply(2))),
        ("key-1", bytes(reply(9))),
    ]


def test_a_call_runs_again_only_so_often() -> None:
    ledger = ReplayLedger()
    for _ in range(MAX_RUNS):
        assert ledger.can_run_again
        ledger.start_run()
    assert not ledger.can_run_again
    ledger.start_call()
    assert not ledger.can_run_again, "a referral does not renew the runs"


def test_a_new_question_parts_the_runs() -> None:
    ledger = ReplayLedger()
    ledger.note(answers(1, 2), 1)
    ledger.start_run()
    assert replayed(ledger, 1) == bytes(reply(1))
    assert (replayed(ledger, 9), replayed(ledger, 2)) == (None, None)


def test_another_call_of_the_exchange_starts_with_an_empty_record() -> None:
    ledger = ReplayLedger()
    ledger.note(answers(1), 1)
    ledger.start_run()
    ledger.withdraw(question(3))
    ledger.start_call()
    assert (ledger.record, replayed(ledger, 1), ledger.match({"key-3": reply(3)})) == ((), None, ())


def test_an_owed_answer_that_a_sent_one_replaces_owes_nothing() -> None:
    ledger = ReplayLedger()
    ledger.note(answers(1), 1, sent=False)
    ledger.note(answers(1), 2)
    assert not ledger.owes_run


def test_nothing_is_owed_once_the_answer_is_struck_or_the_record_dropped() -> None:
    struck, dropped = ReplayLedger(), ReplayLedger()
    for ledger in (struck, dropped):
        ledger.note(answers(1), 1, sent=False)
    struck.strike([question(1)])
    dropped.note(((question(2), large(1)),), 1)
    assert (struck.owes_run, dropped.owes_run) == (False, False)


def test_a_withdrawn_question_takes_no_answer_when_the_call_cannot_run_again() -> None:
    ledger = ReplayLedger(None)
    ledger.withdraw(question(1))
    assert ledger.match({"key-1": raw({"action": 7})}) == ()


def test_undelivered_questions_are_open_again_unless_the_upstream_withdrew_them() -> None:
    ledger = ReplayLedger()
    ledger.withdraw_sent(b"2", replayable=False)
    ledger.withdraw_sent(b"3", replayable=True)
    ledger.withdraw_sent(b"4", replayable=True)
    undelivered = [question(number) for number in (1, 2, 3, 4)]
    assert list(ledger.still_open(undelivered, frozenset({"key-1", "key-2", "key-3"}))) == ["key-1"]
    late = ledger.match({f"key-{number}": reply(number) for number in (1, 2, 3, 4)})
    assert [asked.key for asked, _ in late] == ["key-3"], "shown, withdrawn, and its call may run again"
