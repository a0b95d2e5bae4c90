"""Runs `mrtr-gateway demo`: a modern client uses a legacy server, with both sides of the gateway on show."""

import argparse
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from gateway.tools.demo.children import DemoFailed, started
from gateway.tools.demo.environments import interpreters, say
from gateway.tools.demo.sequence_diagram import WIDEST, draw, rows

HERE = Path(__file__).parent
UNATTENDED_SECONDS = 60.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "demo",
        help="show a legacy server, the gateway and a modern client at work",
        description="Show a modern client using a legacy server through the gateway.",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="folder for the Python environments of the server and the client "
        "(default: mrtr-gateway/demo in $XDG_CACHE_HOME, which is ~/.cache by default)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo; return 0 if the tool returned the expected result."""
    # By the XDG rules, which require an absolute path.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    caches = base if base.is_absolute() else Path.home() / ".cache"
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show an arrow shows a question mark instead.
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    for number in _ENDING:
        _ = signal.signal(number, _stop)
    try:
        return _play(*interpreters(options.cache or caches / "mrtr-gateway" / "demo"))
    except DemoFailed as exc:
        print(f"mrtr-gateway demo: {exc}", file=sys.stderr)
        return 1
    except SystemExit as exc:
        print("\n  stopped")
        return int(exc.code or 0)


def _stop(number: int, _frame: FrameType | None) -> None:
    for each in _ENDING:  # a second signal must not interrupt the stopping of the children
        _ = signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _play(old: str, modern: str) -> int:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mrtr-demo-")))
        server = stack.enter_context(started("the legacy server", [old, "-I", str(HERE / "legacy_server.py")], folder))
        server_url = server.announced("READY (.+)")
        say(f"legacy server {server_url} (mcp 1.x, protocol 2025-11-25)")

        gateway_command = [sys.executable, "-m", "gateway", "serve", "--upstream", server_url]
        gateway_command += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        settings = {"GATEWAY_DEBUG__BODIES": "true", "GATEWAY_LOG__FORMAT": "json"}
        settings["GATEWAY_HOLD__DRAIN_DELAY_SECONDS"] = "0"  # no load balancer has to notice its end
        gateway = stack.enter_context(started("the gateway", gateway_command, folder, **settings))
        address = gateway.announced('server.started.*"listen": "([^"]+)"')
        url = f"http://{address}/mcp"
        say(f"gateway       {url} (in front of it)")
        say("modern client (mcp 2.x, protocol 2026-07-28) asks the gateway to resolve Bug #4522\n")
        attended = sys.stdin.isatty() and sys.stdout.isatty()
        try:
            # The client inherits the terminal, because it asks the user.
            client = [modern, "-I", str(HERE / "modern_client.py"), url]
            status = subprocess.run(client, check=False, timeout=None if attended else UNATTENDED_SECONDS).returncode
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"the modern client did not end within {UNATTENDED_SECONDS:.0f} s.") from None
        told = rows(gateway.output())

        print("\n  Messages on the wire, in order of time, with the gateway in the middle:\n")
        width, is_coloured = shutil.get_terminal_size((WIDEST, 24)).columns, not os.environ.get("NO_COLOR")
        print(*draw(told, width=width, color=sys.stdout.isatty() and is_coloured), sep="\n")
        if status:
            print(f"mrtr-gateway demo: the client ended with status {status}.", file=sys.stderr)
            for child in (server, gateway):
                print(f"{child.name}: {child.last_words()}", file=sys.stderr)
            return 1
    methods = [(row.side, row.title.partition(" ")[0].strip(",")) for row in told]
    questions, requests = methods.count(("old", "elicitation/create")), methods.count(("new", "tools/call"))
    times = {1: "once", 2: "twice"}.get(questions, f"{questions} times")
    print(
        f"\n  The legacy server paused {times} during one call to ask a question. The modern client sent"
        f"\n  {requests} requests, each complete in itself. In between, the gateway held the call, and then"
        "\n  delivered the answers. Neither side was changed or knows about the gateway: see legacy_server.py"
        "\n  and modern_client.py in"
        f"\n  {HERE}"
        "\n\n  Next, with your own server:  mrtr-gateway serve --upstream http://your-server/mcp"
    )
    return 0
