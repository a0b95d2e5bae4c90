"""One request of a legacy client, mapped to the rounds of a modern call; pure.

The upstream keeps nothing between rounds: `inputResponses` and `requestState` bring everything back. So a call can be
continued by whoever knows its request and the round that it is in.

Source: specification 2026-07-28 basic/patterns/mrtr.
"""

import hashlib
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from gateway.exchange import questions
from gateway.exchange.questions import KINDS, MAX_QUESTIONS, Malformed
from gateway.mirror.profile import Profile
from gateway.mirror.translation import legacy_answer, legacy_notification, legacy_result, modern_request, tool_error
from gateway.protocol import jsonrpc, mcp

MAX_ROUNDS: Final = 32
"""Modern clients stop after ten; a server that goes on like this would never end."""
_MAX_KEY_BYTES: Final = 1_000
"""The id of a nested request carries the key of its question."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A request of a legacy client; `id` and `params` are JSON."""

    id: bytes
    method: str
    params: bytes

    @property
    def target(self) -> str:
        """The tool, prompt or URI; empty for other methods."""
        field = mcp.TARGET_FIELD.get(self.method)
        return (jsonrpc.text(jsonrpc.fields(self.params).get(field)) or "") if field is not None else ""


class Question(msgspec.Struct, frozen=True, array_like=True):
    """One input request of the upstream, ready to be asked; `params` is JSON of 2025-11-25."""

    key: str
    method: str
    params: bytes

    def asked(self, id_: bytes) -> bytes:
        """The nested request; `id_` is JSON."""
        return b'{"jsonrpc":"2.0","id":%b,"method":%b,"params":%b}' % (id_, jsonrpc.encode(self.method), self.params)


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """The place of a call: the number of its round, with the upstream's state (JSON) that the round began with."""

    round: int = 0
    state: bytes | None = None


class Notify(NamedTuple):
    """A notification goes to the client."""

    message: bytes


class Ask(NamedTuple):
    """The client is asked."""

    questions: tuple[Question, ...]


class Again(NamedTuple):
    """The next round goes upstream."""


class End(NamedTuple):
    """The client gets its response."""

    message: bytes


Step = Notify | Ask | Again | End


class MirroredCall:
    """One request on its way through the rounds."""

    def __init__(self, request: Request, profile: Profile, exchange: str, progress: Progress = Progress()) -> None:  # noqa: B008  (frozen)
        self.request = request
        self.profile = profile
        self.progress = progress
        self._exchange = exchange
        self.open: dict[str, Question] = {}
        """The questions of this round that the client has not answered, by key."""
        self.answers: dict[str, bytes] = {}

    def sent(self, id_: bytes, log_level: str | None) -> bytes:
        """The request of the present round; raises ValueError if the client's `_meta` is malformed."""
        added: dict[str, bytes | Raw] = {}
        if self.answers:
            added["inputResponses"] = jsonrpc.merge(self.answers.items())
        if self.progress.state is not None:
            added["requestState"] = self.progress.state
        request = self.request
        params = jsonrpc.fields(request.params)
        return modern_request(id_, request.method, params, self.profile, log_level=log_level, added=added)

    # -- from the upstream --------------------------------------------------------------------------------------

    def received(self, data: bytes) -> Step | None:
        """Take a message of the upstream; None if it concerns nobody. Raises ValueError for one that is malformed."""
        message = jsonrpc.message(data)
        if message.method is not None:
            notification = legacy_notification(message, data)
            return None if notification is None else Notify(notification)
        if isinstance(message.error, Raw):
            return End(legacy_answer(self.request.id, self.request.method, jsonrpc.error(message.error)))
        if not isinstance(message.result, Raw):
            return None
        opened = jsonrpc.fields(message.result)
        if jsonrpc.text(opened.get("resultType")) == "input_required":
            return self._input_required(opened)
        return End(jsonrpc.result(self.request.id, legacy_result(self.request.method, message.result)))

    def _input_required(self, result: jsonrpc.Fields) -> Step:
        if self.progress.round + 1 >= MAX_ROUNDS:
            return self.failed(
                f"The server asked in {MAX_ROUNDS} rounds and gave no result; the gateway ended the call"
            )
        state = result.get("requestState")
        if state is not None and jsonrpc.text(state) is None:
            raise ValueError("`requestState` must be a string")
        asked = jsonrpc.fields(result.get("inputRequests", jsonrpc.EMPTY))
        if len(asked) > MAX_QUESTIONS:
            return self.failed(f"The server asked {len(asked)} questions at once, more than {MAX_QUESTIONS}")
        if any(len(key.encode("utf-8", "surrogatepass")) > _MAX_KEY_BYTES for key in asked):
            return self.failed(f"The server asked a question whose key has more than {_MAX_KEY_BYTES} bytes")
        self.progress = Progress(self.progress.round + 1, None if state is None else bytes(state))
        self.answers = {}
        self.open = {}
        for key, raw in asked.items():
            question = self._question(key, raw)
            if isinstance(question, End):
                self.open = {}
                return question
            self.open[key] = question
        return Ask(tuple(self.open.values())) if self.open else Again()

    def _question(self, key: str, raw: Raw) -> Question | End:
        opened = jsonrpc.fields(raw)
        method = jsonrpc.text(opened.get("method")) or ""
        if method not in KINDS:
            return self.failed(f"The server asked {method[:80]!r}, which the gateway cannot put to a legacy client")
        try:
            read = questions.read(method, opened.get("params", msgspec.UNSET), self.profile.declared)
        except Malformed as exc:
            return self.failed(f"The server asked a malformed question: {exc}")
        if not read.allowed:
            needed = ", ".join(read.required)
            return self.failed(f"The server asked {method}, and this client did not declare the capability {needed}")
        return Question(key, method, self._legacy_params(key, read.params))

    def _legacy_params(self, key: str, params: Raw) -> bytes:
        opened = jsonrpc.fields(params)
        mode = jsonrpc.text(opened.get("mode"))
        if mode == "url":
            named = f"{self._exchange}\n{self.progress.round}\n{key}".encode("utf-8", "surrogatepass")
            elicitation = jsonrpc.encode(hashlib.sha256(named).hexdigest()[:32])
            return jsonrpc.merge([*opened.items(), ("elicitationId", elicitation)])
        if mode == "form" and not self.profile.resumes:
            return jsonrpc.merge((name, raw) for name, raw in opened.items() if name != "mode")
        return bytes(params)

    # -- from the client ----------------------------------------------------------------------------------------

    def answered(self, key: str, message: jsonrpc.Message) -> Step | None:
        """Take the client's response to a question; None if others are open, or if it is not open any more."""
        question = self.open.pop(key, None)
        if question is None:
            return None
        if isinstance(message.error, Raw):
            said = jsonrpc.error(message.error)
            self.open = {}
            return self.failed(f"The client refused {question.method}: {said.message or said.code}")
        if not isinstance(message.result, Raw) or not bytes(message.result).startswith(b"{"):
            self.open = {}
            return self.failed(f"The client answered {question.method} with a result that is not an object")
        self.answers[key] = bytes(message.result)
        return None if self.open else Again()

    def failed(self, words: str) -> End:
        """End the call as a legacy tool ends that raised."""
        if self.request.method == mcp.TOOLS_CALL:
            return End(jsonrpc.result(self.request.id, tool_error(words)))
        return End(jsonrpc.failure(self.request.id, jsonrpc.Error(mcp.INTERNAL_ERROR, words)))
