"""Well-known published servers of other authors, and one harmless call for each; docs/interop.md shows the table."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.parts.launch import NODE, PARTS, REPOSITORY

TRIED: Final = "22 November 2026"
"""When the table was last played as a whole; `make interop` plays it again."""

NPM: Final = PARTS / "published-npm" / "node_modules"
CHROMIUM: Final = shutil.which("chromium")
PYTHON: Final = PARTS / "published-py" / "bin"


@dataclass(frozen=True)
class Published:
    """One server over stdio. `{folder}` is an empty folder, `{page}` a URL with the text `ready`."""

    package: str
    tools: int
    """How many it lists."""
    tool: str
    says: str
    """A part of the result's text."""
    arguments: dict[str, Any] = field(default_factory=dict)
    program: str = ""
    """The file that npm's package names as its program; empty for a package of PyPI."""
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def registry(self) -> str:
        return "npm" if self.program else "PyPI"

    @property
    def _command(self) -> list[str]:
        return [str(NODE), str(NPM / self.package / self.program)] if self.program else [str(PYTHON / self.package)]

    def upstream(self, folder: Path) -> dict[str, Any]:
        """The `upstream` of a route that runs the server."""
        flags = [flag.format(folder=folder) for flag in self.flags]
        environment = {name: value.format(folder=folder) for name, value in self.environment.items()}
        return {"command": [*self._command, *flags], "env": environment}

    def filled(self, page: str) -> dict[str, Any]:
        """The arguments of the call."""
        return {
            name: value.format(page=page) if isinstance(value, str) else value
            for name, value in self.arguments.items()
        }


THOUGHT: Final = {"thought": "Two", "thoughtNumber": 1, "totalThoughts": 1, "nextThoughtNeeded": False}

PUBLISHED: Final = (
    Published("@modelcontextprotocol/server-everything", 17, "echo", "Echo: Ada", {"message": "Ada"}, "dist/index.js"),
    Published(
        "@modelcontextprotocol/server-filesystem",
        14,
        "list_allowed_directories",
        "Allowed directories",
        program="dist/index.js",
        flags=("{folder}",),
    ),
    Published(
        "@modelcontextprotocol/server-memory",
        9,
        "read_graph",
        "entities",
        program="dist/index.js",
        environment={"MEMORY_FILE_PATH": "{folder}/memory.json"},
    ),
    Published(
        "@modelcontextprotocol/server-sequential-thinking",
        1,
        "sequentialthinking",
        "thoughtHistoryLength",
        THOUGHT,
        "dist/index.js",
    ),
    Published(
        "@playwright/mcp",
        25,
        "browser_navigate",
        "{page}",
        {"url": "{page}"},
        "cli.js",
        ("--headless", "--isolated", "--no-sandbox", "--output-dir", "{folder}", "--executable-path", CHROMIUM or ""),
    ),
    Published("mcp-server-calculator", 1, "calculate", "42", {"expression": "6*7"}),
    Published(
        "mcp-server-fetch",
        1,
        "fetch",
        "ready",
        {"url": "{page}"},
        flags=("--ignore-robots-txt", "--allow-private-ips"),
    ),
    Published("mcp-server-git", 12, "git_status", "Repository status", {"repo_path": str(REPOSITORY)}),
    Published("mcp-server-sqlite", 6, "list_tables", "[]", flags=("--db-path", "{folder}/test.db")),
    Published("mcp-server-time", 2, "get_current_time", "UTC", {"timezone": "UTC"}),
)
