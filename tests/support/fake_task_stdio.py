"""A FAKE stdio server whose one tool is a task that asks in the same write as the answer that makes the task.

With `first`, the question comes before that answer.

python -I -S fake_task_stdio.py

It answers tasks/result only after its question was answered, or at once with an error with `impatient`, as fastmcp 3.
With `forgets`, one that waited for the answer gets none, as of `mcp` 1.30. A cancelled task asks once more.
"""

import json
import sys
from typing import Any

JSON = dict[str, Any]
TOOL: JSON = {"name": "hasty", "inputSchema": {"type": "object"}, "execution": {"taskSupport": "required"}}
SCHEMA: JSON = {"type": "object", "title": "Name", "properties": {"name": {"type": "string"}}}
CAPABILITIES: JSON = {"tools": {}, "tasks": {"requests": {"tools": {}}}}  # without `call`, as older Python SDKs


def say(*messages: JSON) -> None:
    sys.stdout.write("".join(json.dumps({"jsonrpc": "2.0", **message}) + "\n" for message in messages))
    sys.stdout.flush()


def serve() -> None:
    name, waiting, impatient, forgets = "", None, False, False
    for line in sys.stdin:
        message: JSON = json.loads(line)
        id_, params = message.get("id"), message.get("params", {})
        match message.get("method"):
            case "initialize":
                info = {"name": "fake", "version": "1"}
                shaken = {"protocolVersion": "2025-11-25", "capabilities": CAPABILITIES, "serverInfo": info}
                say({"id": id_, "result": shaken})
            case "tools/list":
                say({"id": id_, "result": {"tools": [TOOL]}})
            case "tools/call":
                impatient = params["arguments"].get("impatient", False)
                forgets = params["arguments"].get("forgets", False)
                asked = {
                    "id": 1,
                    "method": "elicitation/create",
                    "params": {"message": "Who?", "requestedSchema": SCHEMA},
                }
                made = {"id": id_, "result": {"task": {"taskId": "t", "status": "working", "ttl": 60000}}}
                say(*((asked, made) if params["arguments"].get("first", False) else (made, asked)))
            case "tasks/result" if impatient and not name:
                say({"id": id_, "error": {"code": -32602, "message": "Task not completed yet"}})
            case "tasks/result":
                waiting = id_
            case "tasks/get":
                say({"id": id_, "result": {"taskId": "t", "status": "completed" if name else "working"}})
            case "tasks/cancel":
                late = {"id": 2, "method": "roots/list"}
                say({"id": id_, "result": {"taskId": "t", "status": "cancelled"}}, late)
            case None if id_ == 1:
                name = message["result"]["content"]["name"]
                if forgets:
                    waiting = None
        if name and waiting is not None:
            say({"id": waiting, "result": {"content": [{"type": "text", "text": name}]}})
            waiting = None


serve()
