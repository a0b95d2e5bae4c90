"""Translates what the upstream asks to `inputRequests`, with `inputResponses` as the answers.

It asks by nested requests, and for visits to URLs by the error -32042.

Sources: specification 2026-07-28 basic/patterns/mrtr, client/elicitation, client/sampling, client/roots; SEP-2260;
2025-11-25 URLElicitationRequiredError.
"""

import hashlib
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.canonical_json import canonical
from gateway.protocol.errors import InvalidParams
from gateway.protocol.request_meta import Capabilities

_REMOVED: Final = frozenset({"elicitationId", "task", "_meta"})
"""Params of 2025-11-25 that 2026-07-28 does not have; `_meta` is handled separately."""
_REMOVED_META: Final = frozenset({mcp.META_PROGRESS_TOKEN, mcp.META_RELATED_TASK, mcp.META_INPUT_KEY})
_KEY_PREFIX: Final = {mcp.ELICIT: "elicitation", mcp.SAMPLE: "sampling", mcp.ROOTS: "roots"}
_MAX_KEY: Final = 128
MAX_QUESTIONS: Final = 64
"""Questions that may be open at once; a server that asks more in one quiet window would flood its user."""

KINDS: Final = frozenset(_KEY_PREFIX)
"""The methods of nested requests that the client can answer."""


class Question(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One nested request, ready to be asked; a requestState holds those that its client has.

    `upstream_id` is the JSON-RPC id to answer with, as JSON; None if no request waits for the answer (a url
    elicitation from error -32042). `digest` is the `question_digest`, if it is known already. `params` is the modern
    params object; None if another replica asked and the requestState had no room for more than the digest.
    """

    key: str
    method: str
    upstream_id: bytes | None
    digest: bytes | None = None
    params: bytes | None = None

    def nested(self, id_: bytes) -> bytes:
        """The question as a nested request; `id_` is JSON."""
        return jsonrpc.request(id_, self.method, self.params or jsonrpc.EMPTY)


def question_digest(question: Question) -> bytes:
    """A digest of the method with its canonical params: equal questions have equal digests."""
    if question.digest is not None:
        return question.digest
    assert question.params is not None, "a question has params or a digest"
    try:
        named = canonical({"method": question.method, "params": jsonrpc.value(question.params)})
    except (ValueError, RecursionError):
        # Such as a number that Python cannot hold. A server that is called again spells it alike.
        named = b"%b %b" % (question.method.encode(), question.params)
    return hashlib.sha256(named).digest()[:16]


class MalformedQuestion(ValueError):
    """A nested request that a client could not render; the upstream gets -32602."""


class _Elicit(msgspec.Struct):
    message: str
    mode: Literal["form", "url"] = "form"
    url: str | UnsetType = UNSET
    requestedSchema: "_FormSchema | UnsetType" = UNSET  # noqa: N815  (the wire's spelling)


class _FormSchema(msgspec.Struct):
    type: Literal["object"]
    properties: dict[str, Raw]
    title: str | None = None


class _Sample(msgspec.Struct):
    messages: list[Raw]
    maxTokens: int | float  # noqa: N815
    tools: list[Raw] | None = None
    toolChoice: Raw | UnsetType = UNSET  # noqa: N815


class ElicitAnswer(msgspec.Struct):
    """ElicitResult of both revisions."""

    action: Literal["accept", "decline", "cancel"]
    content: dict[str, str | int | float | bool | list[str] | None] | None = None


class _Typed(msgspec.Struct):
    type: str


class SampleAnswer(msgspec.Struct):
    """CreateMessageResult of both revisions."""

    role: Literal["user", "assistant"]
    model: str
    content: _Typed | list[_Typed]
    stopReason: str | None = None  # noqa: N815


class _Root(msgspec.Struct):
    uri: str
    name: str | None = None


class RootsAnswer(msgspec.Struct):
    """ListRootsResult of both revisions."""

    roots: list[_Root]


_ANSWERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    mcp.ELICIT: msgspec.json.Decoder(ElicitAnswer),
    mcp.SAMPLE: msgspec.json.Decoder(SampleAnswer),
    mcp.ROOTS: msgspec.json.Decoder(RootsAnswer),
}
_decode_elicit = msgspec.json.Decoder(_Elicit).decode
_decode_sample = msgspec.json.Decoder(_Sample).decode


class Readable(msgspec.Struct, frozen=True):
    """A nested request as read: the capability it needs of the client, and the key it suggests."""

    required: dict[str, Any]
    allowed: bool
    hint: str | None
    params: bytes


def read(method: str, params: Raw | UnsetType, declared: Capabilities) -> Readable:
    """Read one nested request of `KINDS`; raises Malformed if a client could not render it."""
    try:
        opened = {} if params is UNSET or jsonrpc.is_null(params) else jsonrpc.fields(params)
        meta = jsonrpc.fields(opened["_meta"]) if "_meta" in opened and not jsonrpc.is_null(opened["_meta"]) else {}
        required, allowed, title = _requirement(method, params, declared)
    except (ValueError, RecursionError) as exc:
        raise MalformedQuestion(f"{method}: {exc}") from exc
    nulls = _has_null(params)
    modern: dict[str, bytes | Raw] = {
        k: v for k, v in opened.items() if k not in _REMOVED and not (nulls and jsonrpc.is_null(v))
    }
    if kept := {k: v for k, v in meta.items() if k not in _REMOVED_META}:
        modern["_meta"] = jsonrpc.merge(kept)
    return Readable(required, allowed, jsonrpc.text(meta.get(mcp.META_INPUT_KEY)) or title, jsonrpc.merge(modern))


def _has_null(raw: Raw | UnsetType) -> bool:
    """Whether there may be a null in it, of which most questions and answers have none."""
    return isinstance(raw, Raw) and bytes(raw).find(jsonrpc.NULL) >= 0


def _requirement(
    method: str, params: Raw | UnsetType, declared: Capabilities
) -> tuple[dict[str, Any], bool, str | None]:
    if method == mcp.ROOTS:
        return {"roots": {}}, declared.roots, None
    if params is UNSET:
        raise ValueError("params are missing")
    if method == mcp.SAMPLE:
        sample = jsonrpc.inspect(_decode_sample, params)
        chosen = sample.toolChoice is not UNSET and not jsonrpc.is_null(sample.toolChoice)
        if sample.tools is not None or chosen:
            return {"sampling": {"tools": {}}}, declared.sampling_tools, None
        return {"sampling": {}}, declared.sampling, None
    elicit = jsonrpc.inspect(_decode_elicit, params)
    if elicit.mode == "url":
        if elicit.url is UNSET:
            raise ValueError("url is missing")
        return {"elicitation": {"url": {}}}, declared.url, None
    if elicit.requestedSchema is UNSET:
        raise ValueError("requestedSchema is missing")
    return {"elicitation": {"form": {}}}, declared.form, elicit.requestedSchema.title


def assign_key(method: str, hint: str | None, used: Container[str]) -> str:
    """A key that is unique within the exchange: the hint or the form's title, or else the method with a counter."""
    base = (hint or "")[:_MAX_KEY]
    if base and base not in used:
        return base
    number = 2 if base else 1
    base = base or _KEY_PREFIX[method]
    while f"{base}-{number}" in used:
        number += 1
    return f"{base}-{number}"


def url_questions(data: Raw | UnsetType, used: Iterable[str]) -> dict[str, Question]:
    """The url elicitations in the data of an error -32042; raises MalformedQuestion."""
    try:
        listed = jsonrpc.items(jsonrpc.fields(data)["elicitations"]) if data is not UNSET else []
        if len(listed) > MAX_QUESTIONS:
            raise MalformedQuestion(f"error -32042: {len(listed)} elicitations, more than {MAX_QUESTIONS}")
        questions: dict[str, Question] = {}
        taken = set(used)
        for raw in listed:
            opened = jsonrpc.fields(raw)
            opened.setdefault("mode", Raw(b'"url"'))  # -32042 can ask for nothing else
            asked = read(mcp.ELICIT, Raw(jsonrpc.merge(opened)), Capabilities(url=True))
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


def check_answer(question: Question, answer: Raw) -> Raw:
    """The answer as the upstream gets it; raises InvalidParams if it is not valid for the question's method."""
    try:
        parsed = jsonrpc.inspect(_ANSWERS[question.method].decode, answer)
        opened = jsonrpc.fields(answer)
    except (ValueError, RecursionError) as exc:
        kind = {mcp.ELICIT: "ElicitResult", mcp.SAMPLE: "CreateMessageResult", mcp.ROOTS: "ListRootsResult"}
        raise InvalidParams(
            f"inputResponses[{question.key!r}] is not a valid {kind[question.method]}: {exc}; "
            "the call still waits: answer again with the same requestState"
        ) from exc
    kept: dict[str, bytes | Raw] = {**opened}
    if _has_null(answer):
        kept = {k: v for k, v in opened.items() if not jsonrpc.is_null(v)}
    if isinstance(parsed, SampleAnswer) and isinstance(parsed.content, list) and len(parsed.content) == 1:
        # 2025-06-18 and earlier allow a single content block only; unwrap a list of one.
        kept["content"] = jsonrpc.items(opened["content"])[0]
    return Raw(jsonrpc.merge(kept))


def accepted(answer: Raw) -> bool:
    """Whether an elicitation was accepted."""
    return bool(jsonrpc.inspect(_ANSWERS[mcp.ELICIT].decode, answer).action == "accept")


def withdrawn(method: str) -> Raw | jsonrpc.Error:
    """The answer that the upstream gets when the client gives none: `cancel` for an elicitation, else an error."""
    if method == mcp.ELICIT:
        return Raw(b'{"action":"cancel"}')
    return jsonrpc.Error(mcp.INTERNAL_ERROR, "The client did not answer in time")


def input_requests(questions: Mapping[str, Question]) -> bytes:
    """The `inputRequests` map."""
    return jsonrpc.merge(
        {
            key: b'{"method":"%b","params":%b}' % (question.method.encode(), question.params or b"{}")
            for key, question in questions.items()
        }
    )
