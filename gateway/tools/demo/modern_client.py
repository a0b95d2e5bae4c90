"""An ordinary MCP client of 2026, written for the 2.x SDK: it calls one tool, whose questions it shows.

Nothing in this file is specific to the gateway. It runs in its own environment (mcp 2.3).
Usage: modern_client.py URL
"""

# The SDK is not in the environment that is type-checked.
# mypy: disable-error-code="import-not-found"

import asyncio
import signal
import sys
from typing import Any, Literal

from mcp.client import Client, ClientRequestContext
from mcp_types import ElicitRequestFormParams, ElicitRequestParams, ElicitResult, TextContent

TOOL = "update_work_item"
ARGUMENTS = {"workItemId": 4522, "fields": {"System.State": "Resolved"}}
DEFAULTS: dict[str, Any] = {"resolution": "Duplicate", "duplicateOfId": 4301}
INTERACTIVE = sys.stdin.isatty() and sys.stdout.isatty()


def choose(answer: str, schema: dict[str, Any]) -> Any:
    """Convert the input to a value of the schema; raises ValueError with the reason if it is invalid."""
    if choices := schema.get("enum"):
        if answer.isdecimal() and 1 <= int(answer) <= len(choices):
            return choices[int(answer) - 1]
        if answer in choices:
            return answer
        raise ValueError(f"not one of the choices: {answer!r}")
    if schema.get("type") in {"integer", "number"}:
        try:
            return int(answer)
        except ValueError:
            raise ValueError(f"not a whole number: {answer!r}") from None
    return answer


def ask(name: str, schema: dict[str, Any]) -> tuple[Literal["accept", "decline", "cancel"], Any]:
    """Read one field of the form from the terminal; return what the user does, and the value."""
    default = schema.get("default", DEFAULTS.get(name))
    choices = schema.get("enum", [])
    for number, choice in enumerate(choices, 1):
        print(f"    {number}  {choice}")
    shown = choices.index(default) + 1 if default in choices else default
    while True:
        try:
            # Blocking the event loop is fine: between two rounds a modern client has no open request.
            answer = input(f"  {name} (d declines, c cancels) [{shown}]: ").strip()
        except EOFError:
            return "cancel", None
        if answer in {"d", "c"}:
            return ("decline" if answer == "d" else "cancel"), None
        try:
            return "accept", choose(answer or str(default), schema)
        except ValueError as exc:
            print(f"  {exc}")


async def elicit(_context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
    """Ask the user the server's question, or answer it automatically without a terminal."""
    assert isinstance(params, ElicitRequestFormParams)
    print(f"\n  {params.message}")
    content: dict[str, Any] = {}
    for name, schema in params.requested_schema.get("properties", {}).items():
        if not INTERACTIVE:
            content[name] = DEFAULTS[name]
            print(f"  {name}: {content[name]} (no terminal: answered automatically)")
            continue
        action, content[name] = ask(name, schema)
        if action != "accept":
            return ElicitResult(action=action)
    return ElicitResult(action="accept", content=content)


async def call(url: str) -> int:
    """Call the tool; return 0 if it returned a result in the modern protocol."""
    async with Client(url, elicitation_callback=elicit) as client:
        if client.protocol_version < "2026-07-28":
            print(f"The server supports only {client.protocol_version}, but this client needs 2026-07-28.")
            return 1
        print(f"  calling {TOOL}(workItemId=4522, fields={{'System.State': 'Resolved'}})")
        result = await client.call_tool(TOOL, ARGUMENTS)
    text = "".join(block.text for block in result.content if isinstance(block, TextContent))
    print(f"\n  The tool {'failed' if result.is_error else 'returned'}:\n  {text}")
    return 1 if result.is_error else 0


def main() -> int:
    """Run until the tool has returned."""
    # Only the default action of the signal ends a process that waits in input().
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return asyncio.run(call(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
