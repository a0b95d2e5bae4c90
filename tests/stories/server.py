"""A FAKE server that does as the arguments of a call say. It is bare Python, so it starts at once as a child.

python -I -S server.py LEDGER (legacy | modern)

The argument `steps` is a list of words: `progress 1`, `log words`, `ask name` (a form; with more names, so many at
once), `text`, `fail` (a failed tool), `error` (of JSON-RPC), `hang`, `die`, `large 5000`. The ledger gets a line for
each run and each cancellation.
"""

import json
import sys
from collections.abc import Generator, Iterable
from typing import Any

Json = dict[str, Any]
Answers = dict[str, Any]
META = "io.modelcontextprotocol/"
PROGRESS, LOG, ELICIT = "notifications/progress", "notifications/message", "elicitation/create"
FORM: Json = {"type": "object", "properties": {"name": {"type": "string"}}}


def play(call: Json, past: Iterable[Answers] = ()) -> Generator[tuple[str, Any], Answers, None]:
    """What the server does, one step after another; `past` are the answers that earlier rounds of a modern call had.

    Yields `notify` with a message, `ask` with the names (and is sent the answers), and at last how it ends.
    """
    left, told, token = list(past), {}, call.get("_meta", {}).get("progressToken")
    for step in call["arguments"]["steps"]:
        word, _, rest = step.partition(" ")
        if word == "ask":
            told |= left.pop(0) if left else (yield "ask", rest.split())
        elif left:
            continue  # an earlier round said it
        elif word == "progress":
            yield "notify", {"method": PROGRESS, "params": {"progressToken": token, "progress": int(rest)}}
        elif word == "log":
            yield "notify", {"method": LOG, "params": {"level": "error", "data": rest}}
        elif word == "error":
            yield "end", {"error": {"code": -32050, "message": "odd"}}
        elif word in {"hang", "die"}:
            yield word, None
        else:
            words = "x" * int(rest) if word == "large" else ", ".join(f"{name}: {told[name]}" for name in told)
            yield "end", {"result": {"content": [{"type": "text", "text": words}], "isError": word == "fail"}}


def question(name: str) -> Json:
    """The form that asks for a name."""
    return {"method": ELICIT, "params": {"message": name, "requestedSchema": {**FORM, "title": name}}}


def understood(answer: Json) -> str:
    """What a tool makes of an answer, or of the error that came in its place."""
    result = answer.get("result", answer)
    return str(result["content"]["name"] if result.get("action") == "accept" else result.get("action", "refused"))


def modern_round(call: Json) -> tuple[list[Answers], Generator[tuple[str, Any], Answers, None]]:
    """One round of a modern call: the answers so far, and what the server does now."""
    past = json.loads(call.get("requestState", "[]"))
    if given := call.get("inputResponses"):
        past.append({name: understood(answer) for name, answer in given.items()})
    return past, play(call, past)


def asked(names: list[str], past: list[Answers]) -> Json:
    """The end of a modern round that asks."""
    requests = {name: question(name) for name in names}
    return {"result": {"resultType": "input_required", "inputRequests": requests, "requestState": json.dumps(past)}}


def complete(end: Json) -> Json:
    """The end of a modern call."""
    return {"result": {"resultType": "complete", **end["result"]}} if "result" in end else end


def discovered() -> Json:
    """What a modern server says of itself."""
    said = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}, "logging": {}}}
    return {"result": {"resultType": "complete", "ttlMs": 0, "cacheScope": "private", **said}}


class Child:
    """The server as a child: it serves one message after the other, and hears of cancellations meanwhile."""

    def __init__(self, ledger: str) -> None:
        self._ledger = ledger

    def note(self, word: str) -> None:
        with open(self._ledger, "a") as file:  # noqa: PTH123  (pathlib takes long to import)
            file.write(f"{word}\n")

    def say(self, message: Json) -> None:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()

    def read(self) -> Json:
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        message: Json = json.loads(line)
        return message

    def legacy(self) -> None:
        while True:
            message = self.read()
            id_, method = message.get("id"), message.get("method")
            if method == "initialize":
                info = {"name": "story", "version": "1"}
                said = {"capabilities": {"tools": {}, "logging": {}}, "serverInfo": info}
                self.say({"id": id_, "result": {"protocolVersion": message["params"]["protocolVersion"], **said}})
            elif method == "server/discover":
                self.say({"id": id_, "error": {"code": -32601, "message": "Method not found"}})
            elif method == "tools/call":
                self.note("run")
                self._played(message, play(message["params"]))
            elif method == "notifications/cancelled":
                self.note("cancelled")
            elif id_ is not None:
                self.say({"id": id_, "result": {"tools": []} if method == "tools/list" else {}})

    def _played(self, call: Json, steps: Generator[tuple[str, Any], Answers, None]) -> None:
        given: Any = None
        while True:
            word, what = steps.send(given)
            given = None
            if word == "notify":
                self.say(what)
            elif word == "ask":
                for name in what:
                    self.say({"id": name, **question(name)})
                answers: Answers = {}
                while len(answers) < len(what):
                    if (answer := self._next_about(call)) is None:
                        return None
                    answers[answer["id"]] = understood(answer)
                given = {name: answers[name] for name in what}
            elif word == "hang":
                while self._next_about(call) is not None:
                    pass
                return None
            elif word == "die":
                sys.exit(7)
            else:
                return self.say({"id": call["id"], **what})

    def _next_about(self, call: Json) -> Json | None:
        """The next answer; None if the call is cancelled."""
        while True:
            message = self.read()
            if message.get("method") == "notifications/cancelled" and message["params"]["requestId"] == call["id"]:
                self.note("cancelled")
                return None
            if "method" not in message:
                return message
            if "id" in message:
                self.say({"id": message["id"], "result": {}})

    def modern(self) -> None:
        hanging: list[Any] = []
        while True:
            message = self.read()
            id_, method = message.get("id"), message.get("method")
            if method == "server/discover":
                self.say({"id": id_, **discovered()})
            elif method == "initialize":
                data = {"supported": ["2026-07-28"], "requested": "?"}
                self.say({"id": id_, "error": {"code": -32022, "message": "Unsupported version", "data": data}})
            elif method == "tools/list":
                tools = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private", "tools": []}
                self.say({"id": id_, "result": tools})
            elif method == "tools/call":
                self.note("run")
                past, steps = modern_round(message["params"])
                for word, what in steps:
                    if word == "notify":
                        self.say(what)
                    elif word == "hang":
                        hanging.append(id_)
                        break
                    elif word == "die":
                        sys.exit(7)
                    else:
                        self.say({"id": id_, **(asked(what, past) if word == "ask" else complete(what))})
                        break
            elif method == "notifications/cancelled" and message["params"]["requestId"] in hanging:
                self.note("cancelled")


if __name__ == "__main__":
    child = Child(sys.argv[1])
    child.modern() if sys.argv[2] == "modern" else child.legacy()
