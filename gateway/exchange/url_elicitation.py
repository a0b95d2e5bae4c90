"""Turns the error -32042 of a legacy server, which asks for visits to URLs, into questions.

Source: specification 2025-11-25, URLElicitationRequiredError.
"""

from collections.abc import Iterable

from msgspec import UNSET, Raw, UnsetType

from gateway.exchange.input_requests import MAX_QUESTIONS, MalformedQuestion, Question, assign_key, read
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.request_meta import Capabilities


def questions_of(data: Raw | UnsetType, used: Iterable[str]) -> dict[str, Question]:
    """The url elicitations of an error -32042 (2025-11-25 URLElicitationRequiredError); raises Malformed."""
    try:
        listed = jsonrpc.items(jsonrpc.fields(data)["elicitations"]) if data is not UNSET else []
        if len(listed) > MAX_QUESTIONS:
            raise MalformedQuestion(f"error -32042: {len(listed)} elicitations, more than {MAX_QUESTIONS}")
        questions: dict[str, Question] = {}
        taken = set(used)
        for raw in listed:
            opened = jsonrpc.fields(raw)
            opened.setdefault("mode", Raw(b'"url"'))
            asked = read(mcp.ELICIT, Raw(jsonrpc.merge(opened.items())), Capabilities(url=True))
            if not asked.allowed:
                raise MalformedQuestion("an elicitation is not of mode url")
            key = assign_key(mcp.ELICIT, asked.hint, taken)
            taken.add(key)
            questions[key] = Question(key, mcp.ELICIT, None, params=asked.params)
    except (ValueError, RecursionError, KeyError) as exc:
        raise MalformedQuestion(f"error -32042: {exc}") from exc
    if not questions:
        raise MalformedQuestion("error -32042 has no elicitations")
    return questions
