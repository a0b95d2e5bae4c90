"""A FAKE modern stdio server that misbehaves on command. It is bare Python, so it starts at once.

python -I -S fake_modern_stdio.py [--refuse]

It answers `initialize` with -32022. A call of `later` is answered when a call of `now` arrives, so that a test decides
the order. With --refuse it knows no other version than 2027-01-01 either.
"""

import json
import os
import sys
from typing import Any

JSON = dict[str, Any]
META = "io.modelcontextprotocol/"


def say(message: JSON) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def result(id_: Any, **fields: Any) -> None:
    say({"id": id_, "result": {"resultType": "complete", **fields}})


def text(id_: Any, words: object) -> None:
    said = words if isinstance(words, str) else json.dumps(words)
    result(id_, content=[{"type": "text", "text": said}])


def main() -> None:
    waiting: list[Any] = []
    listening: list[Any] = []
    cancelled: list[Any] = []
    for line in sys.stdin:
        message: JSON = json.loads(line)
        method, id_, params = message.get("method"), message.get("id"), message.get("params", {})
        meta = params.get("_meta", {})
        if method == "notifications/cancelled":
            cancelled.append(params["requestId"])
        elif method == "server/discover":
            if "--refuse" in sys.argv:
                say({"id": id_, "error": {"code": -32022, "message": "no", "data": {"supported": ["2027-01-01"]}}})
                continue
            capabilities = {"tools": {"listChanged": True}}
            result(id_, supportedVersions=["2026-07-28"], capabilities=capabilities, ttlMs=0, cacheScope="private")
        elif method == "initialize":
            data = {"supported": ["2026-07-28"], "requested": params.get("protocolVersion")}
            say({"id": id_, "error": {"code": -32022, "message": "Unsupported protocol version", "data": data}})
        elif method == "tools/list":
            result(id_, tools=[], ttlMs=0, cacheScope="private")
        elif method == "subscriptions/listen":
            listening.append(id_)
            told = {"_meta": {META + "subscriptionId": id_}, "notifications": params["notifications"]}
            say({"method": "notifications/subscriptions/acknowledged", "params": told})
        elif method == "tools/call":
            match params["name"]:
                case "echo":
                    text(id_, params.get("arguments", {}))
                case "pid":
                    text(id_, str(os.getpid()))
                case "meta":
                    text(id_, meta)
                case "later":
                    waiting.append(id_)
                case "now":
                    for each in waiting:
                        text(each, "later")
                    waiting.clear()
                    text(id_, "now")
                case "progress":
                    token = {"progressToken": meta["progressToken"], "progress": 1}
                    say({"method": "notifications/progress", "params": token})
                    text(id_, "done")
                case "ask":
                    say({"id": "odd", "method": "elicitation/create", "params": {}})
                    text(id_, "done")
                case "log":
                    say({"method": "notifications/message", "params": {"level": "info", "data": "said"}})
                    text(id_, "done")
                case "change":
                    for each in listening:
                        told = {"_meta": {META + "subscriptionId": each}}
                        say({"method": "notifications/tools/list_changed", "params": told})
                    text(id_, "done")
                case "tear_down":
                    for each in listening:
                        say({"method": "notifications/cancelled", "params": {"requestId": each}})
                    text(id_, "done")
                case "waiting":
                    text(id_, str(len(waiting)))
                case "cancelled":
                    text(id_, str(len(cancelled)))
                case "last":
                    content = [{"type": "text", "text": "last"}]
                    answer = {"jsonrpc": "2.0", "id": id_, "result": {"resultType": "complete", "content": content}}
                    sys.stdout.write(json.dumps(answer))
                    sys.stdout.flush()
                    sys.exit(0)
                case "neither":
                    say({"id": id_})
                case "die":
                    sys.exit(7)
                case name:
                    say({"id": id_, "error": {"code": -32602, "message": f"Unknown tool: {name}"}})
        elif method in ("tasks/get", "tasks/update", "tasks/cancel"):
            result(id_, taskId=params["taskId"])
        elif id_ is not None:
            say({"id": id_, "error": {"code": -32601, "message": "Method not found"}})


main()
