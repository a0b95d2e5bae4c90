"""SIMULATED modern clients: each plays one call to its end, and records what it was told."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.protocol import mcp
from tests.simulation import plain_http as http
from tests.simulation.plan import Call

_REQUEST_SECONDS: Final = 150.0
"""Longer than twice 60 s, which may pass before silence is noticed, after the last change that a server tells of."""
PATIENCE_SECONDS: Final = 75.0
"""How long a client tries again before it gives a call up."""
_MOST_ROUNDS: Final = 30
"""After so many rounds a client gives its call up; other clients do that earlier."""
_THINKS_AGAIN_SECONDS: Final = 12.0
_GOES_SECONDS: Final = 0.3
_TOO_SLOW: Final = "too slow"
_NOTES: Final = ("notifications/progress", "notifications/message")
_CAPABILITIES: Final = {"elicitation": {"form": {}, "url": {}}, "sampling": {}}
_ACCEPT: Final = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}


@dataclass
class Told:
    """One final message that a client got."""

    at: float
    replica: int
    status: int
    message: dict[str, Any]
    is_first: bool
    """Whether its request had no state."""
    state: str | None = None
    carried: dict[str, str] = field(default_factory=dict)
    """What its request answered, by the names of the questions."""
    sent: float = 0.0
    """When its request was sent."""
    unheard_since: float | None = None
    """When the connection of an earlier request broke that nothing was answered to since."""

    @property
    def error(self) -> dict[str, Any] | None:
        return self.message.get("error")

    @property
    def reason(self) -> str:
        error = self.error
        return "" if error is None else str((error.get("data") or {}).get("reason", ""))

    @property
    def result(self) -> dict[str, Any]:
        return dict(self.message.get("result") or {})


@dataclass
class Record:
    """What one client has seen and done."""

    call: Call
    began: float = 0.0
    ended: float | None = None
    outcome: str = ""
    """result, error, broken (no reply to the first request), gave up, abandoned."""
    final: Told | None = None
    told: list[Told] = field(default_factory=list)
    given: dict[str, list[str]] = field(default_factory=dict)
    """The answers that it gave to each question."""
    states: dict[str, float] = field(default_factory=dict)
    """When each of its states was new."""
    asked: list[str] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    """The replicas that it has sent requests to."""
    unanswered: list[str] = field(default_factory=list)
    """Requests that got no reply in two minutes: to which replica, and when that was."""
    left: dict[str, float] = field(default_factory=dict)
    """When it left a retry, by the state of that: it comes back with the same one."""
    unheard: dict[str, float] = field(default_factory=dict)
    """Since when no replica has answered a retry whose connection broke, by its state."""
    gone: float | None = None
    """When it left every request that it had sent for its last round, none of which was answered."""
    unread: list[float] = field(default_factory=list)
    """When it left a reply that it had not read."""
    left_unread: bool = False
    """It left a retry whose reply it had not read."""
    strange: list[str] = field(default_factory=list)


class Player:
    """Plays a part, which is a call or a listener, to its end."""

    record: Any

    def __init__(self, part: Any, addresses: list[tuple[str, int]]) -> None:
        self._part, self._addresses = part, addresses
        self._turn = 0
        self._ids = 0
        self._session = ""
        """The id of a legacy client's session, once it has one."""

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _replica(self) -> int:
        """The replica that gets the next request."""
        order = self._part.replicas
        replica: int = order[self._turn % len(order)]
        self._turn += 1
        return replica

    async def play(self) -> None:
        """Play it to the end."""
        await asyncio.sleep(self._part.at)
        self.record.began = self._now()
        try:
            await self._play()
        finally:
            self.record.ended = self._now()

    async def _play(self) -> None:
        raise NotImplementedError

    async def _send_to(self, replica: int, method: str, headers: http.Headers, body: bytes = b"") -> http.Reply:
        self.record.used.add(replica)
        return await http.request(self._addresses[replica - 1], method, self._part.path, headers, body)

    def _legacy_headers(self) -> http.Headers:
        headers = {**_ACCEPT, "Authorization": f"Bearer {self._part.caller}"}
        own = {mcp.SESSION_ID: self._session, mcp.PROTOCOL_VERSION: mcp.LEGACY}
        return headers | own if self._session else headers

    async def _send_legacy(self, message: dict[str, Any]) -> http.Reply:
        """Send a message of a legacy client. Raises Broken if it is refused."""
        body = msgspec.json.encode({"jsonrpc": "2.0", **message})
        reply = await self._send_to(self._replica(), "POST", self._legacy_headers(), body)
        if reply.status not in (200, 202):
            reply.close()
            raise http.Broken(f"HTTP {reply.status}")
        return reply

    async def _initialize(self, capabilities: dict[str, Any]) -> http.Reply:
        """Begin the session of a legacy client."""
        info = {"name": "legacy", "version": "1"}
        params = {"protocolVersion": mcp.LEGACY, "capabilities": capabilities, "clientInfo": info}
        reply = await self._send_legacy({"id": 0, "method": "initialize", "params": params})
        self._session = reply.headers.get(mcp.SESSION_ID.lower(), "")
        return reply


def modern_request(
    part: Any, id_: str, method: str, params: dict[str, Any], target: str = "", **headers: str
) -> tuple[http.Headers, bytes]:
    """The headers and the body of a modern client's request."""
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": id_, "method": method, "params": params})
    named = {mcp.NAME_HEADER: target} if target else {}
    versions = {mcp.PROTOCOL_VERSION: mcp.MODERN, mcp.METHOD_HEADER: method, **named}
    return {**_ACCEPT, **versions, "Authorization": f"Bearer {part.caller}", **headers}, body


def meta_of(name: str, capabilities: dict[str, Any]) -> dict[str, Any]:
    """The `_meta` of a modern client of this name."""
    info = {"name": name, "version": "1"}
    return {mcp.META_VERSION: mcp.MODERN, mcp.META_CLIENT_INFO: info, mcp.META_CAPABILITIES: capabilities}


class Client(Player):
    """Plays one call."""

    record: Record

    def __init__(self, call: Call, addresses: list[tuple[str, int]], record: Record) -> None:
        super().__init__(call, addresses)
        self._call, self.record = call, record
        self._gave = 0
        self._has_copied = False

    async def _play(self) -> None:
        record, habit = self.record, self._call.habit
        told = await self._first()
        while told is not None:
            result = told.result
            if told.error is not None:
                record.outcome, record.final = "error", told
                return
            if result.get("resultType") != "input_required":
                record.outcome, record.final = "result", told
                return
            if len(record.states) > _MOST_ROUNDS:
                record.outcome = "gave up"
                return
            state, questions = result.get("requestState"), result.get("inputRequests") or {}
            record.asked += [name_of(question) for question in questions.values()]
            if habit == "abandons" and questions:
                record.outcome = "abandoned"
                return
            if questions:
                await asyncio.sleep(25.0 if habit == "late" else self._call.think)
            if habit in ("asks again", "asks again, thinks", "asks again, stops reading") and questions:
                again = await self._until_told(state, {})
                if again is None:
                    return
                if again.result.get("resultType") != "input_required":
                    told = again
                    continue
                asked = again.result.get("inputRequests") or {}
                if self._turn % 2 or habit.endswith("thinks") or asked.keys() != questions.keys():
                    told = again
                    state, questions = again.result.get("requestState"), asked
                if habit == "asks again, thinks":
                    await asyncio.sleep(_THINKS_AGAIN_SECONDS)
            if habit == "asks again, goes" and questions:
                _ = await self._until_told(state, {})
                record.outcome = "abandoned"
                return
            if habit == "one by one":
                questions = dict(list(questions.items())[:1])
            answers = {key: self._answer(question) for key, question in questions.items()}
            told = await self._retry(state, answers, questions)

    async def _first(self) -> Told | None:
        """Begin the call; some clients leave soon."""
        try:
            async with asyncio.timeout(0.3 + 0.4 * (self._call.at % 1) if self._call.habit == "goes" else None):
                return await self._until_told(None, {})
        except TimeoutError:
            self.record.outcome = "abandoned"
            return None

    async def _retry(self, state: str | None, answers: dict[str, Any], questions: dict[str, Any]) -> Told | None:
        habit = self._call.habit
        if not questions:
            return await self._until_told(state, {})
        if habit in ("twice", "rivals"):
            other = answers
            if habit == "rivals":
                other = {key: self._answer(question) for key, question in questions.items()}
            works = [self._until_told(state, each) for each in (answers, other)]
            told = await asyncio.gather(*works)
            found = [each for each in told if each is not None]
            # A result ends the call, and of two questions the newer one is open.
            good = sorted(
                (each for each in found if each.error is None), key=lambda each: (_is_question(each), -each.at)
            )
            truest = [each for each in found if each.reason != "invalid_request_state"]
            # Whose state is invalid knows nothing of the call. The other one does, even if it gave up.
            return (good or truest or ([None] if None in told else found))[0]
        if habit == "twice, then goes":
            works = [self._until_told(state, answers) for _ in range(2)]
            try:
                async with asyncio.timeout(_GOES_SECONDS):
                    return (await asyncio.gather(*works))[0]
            except TimeoutError:
                self.record.outcome, self.record.gone = "abandoned", self._now()
                return None
        if habit == "copies, then goes" and self._has_copied:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    return await self._until_told(state, answers)
            self.record.outcome = "abandoned"
            return None
        if habit in ("unread copy", "copies, then goes") and not self._has_copied:
            self._has_copied = True
            loop = http.running_loop()
            loop.process.keep(loop.create_task(self._copy_unread(state, answers)))
            return await self._until_told(state, answers)
        if habit in ("leaves", "leaves for a moment", "unread copy"):
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._until_told(state, answers))
                _ = await asyncio.wait((task,), timeout=0.02 + 0.1 * (self._turn % 3))
                if not task.done():
                    task.cancel()
            if task.cancelled():
                pause = 0.8 if habit == "leaves for a moment" else (0.1, 0.8, 4.0)[self._turn % 3]
                self.record.left[state or ""] = self._now()
                await asyncio.sleep(pause)
                self.record.outcome = ""
            else:
                return task.result()
        return await self._until_told(state, answers)

    async def _copy_unread(self, state: str | None, answers: dict[str, Any]) -> None:
        """Send a request once more, read nothing of its reply for a while, and leave."""
        with suppress(OSError, TimeoutError, http.Broken):
            _ = await self._post(self._replica(), state, answers, http.Pause(6.0, leaves=True))

    async def _until_told(self, state: str | None, answers: dict[str, Any]) -> Told | None:
        """Send a request, again and again while it may succeed; but nobody may begin a call twice."""
        until = self._now() + PATIENCE_SECONDS
        while self._now() < until:
            try:
                told = await self._post(self._replica(), state, answers)
            except OSError:  # nothing was sent
                await asyncio.sleep(0.5)
                continue
            except http.Broken:
                if state is None:
                    self.record.outcome = "broken"
                    return None
                _ = self.record.unheard.setdefault(state, self._now())
                await asyncio.sleep(0.5)
                continue
            told.unheard_since = self.record.unheard.pop(state or "", None)
            if (pause := pause_of(told)) is None:
                return told
            await asyncio.sleep(pause)
        self.record.outcome = "gave up"
        return None

    def _answer(self, question: Any) -> Any:
        name = name_of(question)
        if question["params"].get("mode") == "url":
            return {"action": "accept"}
        is_form = question["method"] == "elicitation/create"
        if is_form and self._call.habit == "declines" and self._turn % 2:
            self.record.given.setdefault(name, []).append("decline")
            return {"action": "decline"}
        self._gave += 1
        said = f"{name}={self._gave}"
        self.record.given.setdefault(name, []).append(said)
        if question["method"] == "sampling/createMessage":
            return {"role": "assistant", "content": {"type": "text", "text": said}, "model": "m"}
        return {"action": "accept", "content": {"name": said}}

    def _pause_of(self, state: str | None) -> http.Pause | None:
        """How it reads the reply to its next request."""
        turn = self._ids % 3
        if self._call.habit == "reads late":
            return http.Pause((0.5, 2.0, 5.0)[turn])
        if self._call.habit == "leaves unread" and state is not None and turn:
            return http.Pause((0.0, 1.5, 3.0)[turn], leaves=True)
        return None

    async def _post(
        self, replica: int, state: str | None, answers: dict[str, Any], pause: http.Pause | None = None
    ) -> Told:
        pause = pause or self._pause_of(state)
        self.record.left_unread |= pause is not None and pause.leaves
        self._ids += 1
        call = self._call
        meta = meta_of("simulated", {} if call.habit == "cannot be asked" else _CAPABILITIES)
        arguments = {"tag": call.tag, **call.script}
        params: dict[str, Any] = {"name": call.tool, "arguments": arguments, "_meta": meta}
        if call.script.get("logs"):
            params["_meta"][mcp.META_LOG_LEVEL] = "info"
        if call.script.get("reports"):
            params["_meta"][mcp.META_PROGRESS_TOKEN] = call.tag
        if state is not None:
            params["requestState"] = state
        if answers:
            params["inputResponses"] = answers
        sent_at = self._now()
        try:
            told = await self._ask(replica, mcp.TOOLS_CALL, call.tool, params, pause=pause)
        except http.Broken as exc:
            if pause is not None and pause.leaves and call.habit == "leaves unread" and str(exc) != _TOO_SLOW:
                self.record.left[state or ""] = self._now()
                self.record.unread.append(self._now())
            raise
        told.carried = {said.partition("=")[0]: said for said in map(_said, answers.values()) if said}
        told.is_first, told.state, told.sent = state is None, state, sent_at
        self.record.told.append(told)
        if (new := told.result.get("requestState")) is not None:
            _ = self.record.states.setdefault(new, told.at)
        return told

    async def _ask(
        self,
        replica: int,
        method: str,
        target: str,
        params: dict[str, Any],
        *,
        seconds: float = _REQUEST_SECONDS,
        pause: http.Pause | None = None,
        **headers: str,
    ) -> Told:
        """Send a modern request, and read the final message."""
        id_ = f"{self._call.tag}-{self._ids}"
        sent, body = modern_request(self._call, id_, method, params, target, **headers)
        self.record.used.add(replica)
        try:
            async with asyncio.timeout(seconds):
                where = self._addresses[replica - 1]
                reply = await http.request(where, "POST", self._call.path, sent, body, pause=pause)
                try:
                    message = await self._read(reply)
                finally:
                    reply.close()
        except TimeoutError as exc:
            self.record.unanswered.append(f"{replica} at {self._now():.2f}")
            raise http.Broken(_TOO_SLOW) from exc
        if message.get("id") not in (id_, None):
            self.record.strange.append(f"{id_} was answered with {message.get('id')}")
        message["_headers"] = reply.headers
        return Told(self._now(), replica, reply.status, message, is_first=method == mcp.TOOLS_CALL)

    async def _read(self, reply: http.Reply) -> dict[str, Any]:
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            finals = []
            async for _, message in reply.events():
                if self._call.habit == "slow reader":
                    await asyncio.sleep(0.3)
                if self._call.habit == "asks again, stops reading":
                    await reply.pause(http.Pause(5.0, leaves=True))
                if message is not None and "method" not in message:
                    finals.append(message)
                elif message is not None and message["method"] not in _NOTES:
                    self.record.strange.append(f"got {message['method']}")
            if len(finals) != 1:
                if finals:
                    self.record.strange.append(f"{len(finals)} final messages")
                raise http.Broken("no final message")
            return dict(finals[0])
        body = await reply.body()
        try:
            return dict(msgspec.json.decode(body))
        except ValueError:
            return {"error": {"code": 0, "message": body.decode(errors="replace"), "data": {"reason": "not JSON"}}}


def pause_of(told: Told) -> float | None:
    """How long the gateway asks the client to wait before it sends the same request again."""
    headers = told.message.get("_headers") or {}
    if told.status == 503 and "retry-after" in headers:
        return float(headers["retry-after"])
    if told.reason == "owner_stalled":
        return 1.0  # the head of its reply was sent before that was known
    return None


def _is_question(told: Told) -> bool:
    return bool(told.result.get("resultType") == "input_required")


def _said(answer: Any) -> str:
    """The text of an answer; empty if it declines, or is to a URL."""
    if "role" in answer:
        return str(answer["content"]["text"])
    return str(answer.get("content", {}).get("name", ""))


def name_of(question: Any) -> str:
    """What a question is called in the ledger."""
    params = question["params"]
    if question["method"] == "sampling/createMessage":
        return str(params["messages"][0]["content"]["text"])
    return str(params["message"])
