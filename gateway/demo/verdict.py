"""Judges from the wire alone whether the demo did what it claims."""

from collections.abc import Iterable, Sequence
from typing import Any

from gateway.demo.message_reader import Message


def complaint(messages: Sequence[Message]) -> str | None:
    """Return what is wrong with the messages on the wire; None if they are as the demo claims."""
    new = [message.body for message in messages if message.side == "new" and message.body]
    old = [message.body for message in messages if message.side == "old" and message.body]
    results = [body["result"] for body in new if isinstance(body.get("result"), dict)]
    complete = [result for result in results if result.get("content")]
    if not any(body.get("method") == "elicitation/create" for body in old):
        return "the legacy server never asked its question"
    if not any(result.get("resultType") == "input_required" for result in results):
        return "the modern client never received an input_required result"
    if not complete or complete[-1].get("resultType") != "complete":
        return "the modern client never received a complete result of the tool"
    text, expected = str(complete[-1]["content"][0].get("text")), _expected(new)
    if complete[-1].get("isError") or expected not in text:
        return f"the tool returned {text!r}, but after these answers it should have returned {expected!r}"
    return None


def _expected(bodies: Iterable[dict[str, Any]]) -> str:
    answers = [
        answer
        for body in bodies
        for answer in (body.get("params") or {}).get("inputResponses", {}).values()
        if "method" in body
    ]
    if any(answer.get("action") != "accept" for answer in answers):
        return "Bug #4522 was not changed"
    given = {name: value for answer in answers for name, value in answer["content"].items()}
    if given.get("resolution") != "Duplicate":
        return f"Bug #4522 resolved as {given.get('resolution')}. State set to Resolved."
    return (
        f"Bug #4522 resolved as Duplicate of Bug #{given.get('duplicateOfId')}. "
        "State set to Resolved and duplicate link created."
    )
