"""The demo's verdict: what the messages on the wire must show."""

from typing import Any

import pytest

from gateway.demo.message_reader import Message, Side
from gateway.demo.verdict import complaint

DUPLICATE = "Bug #4522 resolved as Duplicate of Bug #4301. State set to Resolved and duplicate link created."


def message(side: Side, body: dict[str, Any]) -> Message:
    return Message(side, to_server=True, start="", headers={}, body=body)


ASKED = message("old", {"id": 1, "method": "elicitation/create"})
PAUSED = message("new", {"id": 1, "result": {"resultType": "input_required"}})


def answered(action: str = "accept", **content: Any) -> Message:
    answer = {"action": action, "content": content}
    return message("new", {"id": 2, "method": "tools/call", "params": {"inputResponses": {"q": answer}}})


def done(text: str, kind: str = "complete", **more: Any) -> Message:
    return message("new", {"id": 2, "result": {"resultType": kind, "content": [{"text": text}], **more}})


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([answered(resolution="Duplicate"), answered(duplicateOfId=4301)], DUPLICATE),
        ([answered(resolution="Fixed")], "Bug #4522 resolved as Fixed. State set to Resolved."),
        ([answered("decline")], "Bug #4522 was not changed: no resolution was given."),
    ],
)
def test_a_demo_that_did_what_the_answers_say_is_good(answers: list[Message], text: str) -> None:
    assert complaint([ASKED, PAUSED, *answers, done(text)]) is None
    assert "should have returned" in (complaint([ASKED, PAUSED, *answers, done("something else")]) or "")


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ([], "never asked its question"),
        ([ASKED], "never received an input_required result"),
        ([ASKED, PAUSED], "never received a complete result"),
        ([ASKED, PAUSED, done("x", kind="input_required")], "never received a complete result"),
        ([ASKED, PAUSED, answered("decline"), done("Bug #4522 was not changed", isError=True)], "should have"),
    ],
)
def test_what_is_missing_is_named(told: list[Message], what: str) -> None:
    assert what in (complaint(told) or "")
