"""A FAKE stdio server that misbehaves on command. It is bare Python, so it starts at once.

python -I -S fake_stdio.py [--die | --silent | --stubborn]
"""

import json
import os
import signal
import sys
import time
from typing import Any

JSON = dict[str, Any]
SUBSCRIBED: list[str] = []


def say(*messages: JSON) -> None:
    """Write the messages at once: whoever reads the first can read them all."""
    sys.stdout.write("".join(json.dumps({"jsonrpc": "2.0", **message}) + "\n" for message in messages))
    sys.stdout.flush()


FORM = {"type": "object", "properties": {}}


def text(words: object) -> JSON:
    return {"content": [{"type": "text", "text": words if isinstance(words, str) else json.dumps(words)}]}


def read() -> JSON:
    line = sys.stdin.readline()
    if not line:
        if "--stubborn" in sys.argv:
            time.sleep(600)
        sys.exit(0)
    message: JSON = json.loads(line)
    return message


def ask() -> str:
    schema = {"type": "object", "title": "Name", "properties": {"name": {"type": "string"}}}
    say({"id": 1, "method": "elicitation/create", "params": {"message": "Who?", "requestedSchema": schema}})
    while True:
        message = read()
        if message.get("id") == 1 and "result" in message:
            return str(message["result"]["content"]["name"])


def start_family() -> list[int]:
    """Start a process that survives all but SIGKILL: an orphan in a session of its own."""
    told, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.write(tell, str(os.getpid()).encode())
            for file in (0, 1, 2):
                os.close(file)
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
    return [os.getppid(), os.getpid(), int(os.read(told, 20))]


def call(name: str, given: JSON) -> JSON:
    match name:
        case "echo":
            return text(given)
        case "late":
            return text("asks now")
        case "say":
            return text(given["words"])
        case "subscribed":
            return text([os.getpid(), SUBSCRIBED])
        case "pid":
            return text(str(os.getpid()))
        case "environment":
            return text(dict(os.environ))
        case "ask":
            return text(ask())
        case "family":
            return text(start_family())
        case "ask_family":
            family = start_family()
            ask()
            return text(family)
        case "die":
            sys.stderr.write("these are my last words\n")
            sys.stderr.flush()
            sys.exit(7)
        case "ask_die":
            name = ask()
            try:
                os.close(os.open(given["marker"], os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return text(name)
            sys.exit(7)
        case "noise":
            sys.stdout.write(
                'listening\n\n{"level":"info","msg":"ready"}\n[1,2]\n{"jsonrpc":"2.0","id"\n\u2028 \x00\n'
            )
            return text("heard")
        case "endless":
            while True:
                sys.stdout.write("x" * 65536)
        case "shut":
            os.close(0)
            return text("shut")
        case "deaf":
            return {**text("deaf"), "_meta": {"deaf": True}}
        case "print_stderr":
            sys.stderr.write(f"my key is {os.environ['API_KEY']}\n" + "x" * 5000 + "\n" + "again\n" * 1000)
            sys.stderr.flush()
            return text("printed")
        case _:
            raise AssertionError(name)


def serve() -> None:
    if "--die" in sys.argv:
        sys.stderr.write("cannot find my database\n")
        sys.exit(3)
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answers: list[JSON] = []
    while True:
        message = read()
        id_ = message.get("id")
        if id_ is None or "--silent" in sys.argv:
            continue
        if "method" not in message:
            answers.append(message)
            continue
        if message["method"] == "initialize":
            info = {"name": "fake", "version": "1"}
            can = {"tools": {}, "resources": {"subscribe": True}}
            say({"id": id_, "result": {"protocolVersion": "2025-06-18", "capabilities": can, "serverInfo": info}})
        elif message["method"] in {"resources/subscribe", "resources/unsubscribe"}:
            change = SUBSCRIBED.append if message["method"] == "resources/subscribe" else SUBSCRIBED.remove
            change(message["params"]["uri"])
            say({"id": id_, "result": {}})
        elif message["method"] == "tools/list":
            say({"id": id_, "result": {"tools": []}})
        elif message["method"] == "ping":
            say({"id": id_, "result": {}})
        elif message["method"] == "server/discover":
            say({"id": id_, "error": {"code": -32601, "message": "Method not found"}})
        elif message["params"].get("name") == "abandoned":
            token = message["params"]["_meta"]["progressToken"]
            say({"method": "notifications/progress", "params": {"progressToken": token, "progress": 1}})
        elif message["params"].get("name") == "haunted":
            # The abandoned call asks now.
            say(
                {
                    "id": "ghost",
                    "method": "elicitation/create",
                    "params": {"message": "Sure?", "requestedSchema": FORM},
                }
            )
            while (answer := read()).get("id") != "ghost":
                pass
            say({"id": id_, "result": text(answer)})
        else:
            params = message["params"]
            result = (
                text(answers) if params["name"] == "answers" else call(params["name"], params.get("arguments", {}))
            )
            if params.get("arguments", {}).get("then") == "end unfinished":
                sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": id_, "result": result}))
                sys.stdout.flush()
                sys.exit(0)
            late = [{"id": "late", "method": "roots/list"}] if params["name"] == "late" else []
            say({"id": id_, "result": result}, *late)
            if params["name"] in {"deaf", "shut"}:
                time.sleep(600)
            if params.get("arguments", {}).get("then") == "die":
                sys.exit(0)


serve()
