"""A SIMULATED modern server (2026-07-28): it keeps nothing between rounds, and writes its runs into the ledger."""

import asyncio
import json
from typing import Any, Final

import msgspec

from gateway.protocol import mcp
from tests.simulation import plain_http as http
from tests.simulation.kernel import Process
from tests.simulation.listening import CHANGES, Change
from tests.simulation.plain_http import Request
from tests.simulation.server import Ledger, Run, question, said_in

_INFO: Final = {mcp.META_SERVER_INFO: {"name": "simulated-modern", "version": "1"}}
_TOOLS: Final = ("pay", "search")


class ModernServer:
    """The server's process; `main` is its program."""

    def __init__(self, process: Process, ledger: Ledger, port: int, *, has_changes: bool = False) -> None:
        self._process, self._ledger, self._port = process, ledger, port
        self._changes = CHANGES if has_changes else {}
        self._listeners: dict[Request, tuple[Any, str, dict[str, Any]]] = {}
        """The open streams of changes: the id, the caller, and what is wanted."""

    async def main(self) -> None:
        _ = await http.serve(self._process.host, self._port, self.serve)
        await asyncio.get_running_loop().create_future()

    def _now(self) -> float:
        return self._process.kernel.now

    def held(self) -> int:
        """How many listen."""
        return sum(not request.gone.done() for request in self._listeners)

    async def serve(self, request: Request) -> None:
        if request.method != "POST":
            request.reply(405)
            return
        body = msgspec.json.decode(request.body)
        if request.headers.get(mcp.PROTOCOL_VERSION.lower()) != mcp.MODERN:
            refused = {"code": -32022, "message": "no", "data": {"supported": [mcp.MODERN], "requested": "?"}}
            request.reply(400, msgspec.json.encode({"jsonrpc": "2.0", "id": body.get("id"), "error": refused}))
            return
        if "id" not in body:
            request.reply(202)
            return
        if body["method"] == mcp.LISTEN:
            await self._listen(request, body)
            return
        is_streamed = body["method"] == mcp.TOOLS_CALL and bool(body["params"]["arguments"].get("notes"))
        if is_streamed:
            request.stream()
            said = {"level": "error", "data": "at work"}
            for seconds in (0.1, 0.1):
                await asyncio.sleep(seconds)
                _ = request.event({"jsonrpc": "2.0", "method": "notifications/message", "params": said})
        final = {"jsonrpc": "2.0", "id": body["id"], **await self._answer(body)}
        if is_streamed:
            _ = request.event(final)
            request.end()
        else:
            request.reply_json(final)

    async def _answer(self, body: Any) -> Any:
        listed = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
        match body["method"]:
            case mcp.DISCOVER:
                capabilities = {"tools": {}, "logging": {}, **self._changes}
                found = {**listed, "_meta": _INFO, "supportedVersions": [mcp.MODERN], "capabilities": capabilities}
                return {"result": found}
            case mcp.TOOLS_LIST:
                tools = [{"name": name, "inputSchema": {"type": "object"}} for name in _TOOLS]
                return {"result": {**listed, "tools": tools}}
            case mcp.TOOLS_CALL:
                return await self._call(body["params"])
            case method:
                return {"error": {"code": -32601, "message": f"Method not found: {method}"}}

    async def _listen(self, request: Request, body: Any) -> None:
        id_, wanted = body["id"], body["params"]["notifications"]
        offered = {
            "toolsListChanged": wanted.get("toolsListChanged", False),
            "resourceSubscriptions": wanted.get("resourceSubscriptions", []),
        }
        request.stream()
        params = {"_meta": {mcp.META_SUBSCRIPTION: id_}, "notifications": offered}
        _ = request.event({"jsonrpc": "2.0", "method": mcp.ACKNOWLEDGED, "params": params})
        self._listeners[request] = id_, request.headers.get("authorization", ""), offered
        while not request.gone.done():
            _ = await asyncio.wait((request.gone,), timeout=15.0)
            _ = request.event(None)
        del self._listeners[request]

    def announce(self, number: int, change: Change) -> None:
        """Tell those who listen for a caller of a change that they want to know."""
        for request, (id_, caller, wanted) in self._listeners.items():
            is_wanted = change.uri in wanted["resourceSubscriptions"] if change.uri else wanted["toolsListChanged"]
            if is_wanted and caller == f"Bearer {change.caller}":
                _ = request.event(change.announcement(number, {mcp.META_SUBSCRIPTION: id_}))

    async def _call(self, params: Any) -> Any:
        script = params["arguments"]
        run = self._run(params, script["tag"])
        before = msgspec.json.decode(params["requestState"])["answers"] if "requestState" in params else []
        answers = [*before, *map(said_in, (params.get("inputResponses") or {}).values())]
        run.answers = answers if len(answers) >= len(run.answers) else run.answers
        try:
            await asyncio.sleep(script.get("between" if before else "before", 0.0))
        finally:
            run.ended = self._now()
        if len(answers) < script.get("questions", 0):
            name = f"{run.tag}/{len(answers)}"
            if name not in run.asked:  # a client may send a round twice
                run.asked.append(name)
            state = json.dumps({"run": run.number, "answers": answers})
            asked = {f"q{len(answers)}": question(name, script, len(answers), mode="form")}
            return {"result": {"resultType": "input_required", "inputRequests": asked, "requestState": state}}
        if script.get("errs"):
            run.result = f"failed {run.tag}"
            return {"error": {"code": -32000, "message": run.result}}
        run.effects.append((self._now(), "done"))
        text = json.dumps({"tag": run.tag, "run": run.number, "answers": answers})
        run.result = text
        run.results.append(text)
        content = [{"type": "text", "text": text}]
        return {"result": {"resultType": "complete", "_meta": _INFO, "content": content}}

    def _run(self, params: Any, tag: str) -> Run:
        if "requestState" in params:
            number = msgspec.json.decode(params["requestState"])["run"]
            return next(run for run in self._ledger.runs if run.number == number)
        number = 10_000 + len(self._ledger.runs)
        run = Run(tag, number, params["name"], "", self._now())
        self._ledger.runs.append(run)
        return run
