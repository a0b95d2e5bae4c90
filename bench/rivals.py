"""Other MCP proxies, each of its own environment: `scripts/parts modern contextforge mcp-proxy` builds them.

None of them holds a question for a modern client, so an echo is what can be compared. Each runs in one process,
without authentication, and logs errors only.
"""

import http.client
import json
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions

from bench.processes import ROOT, Fleet, Process, ProcessError, free_port

PARTS = (ROOT / os.environ.get("MRTR_PARTS", ".parts")).resolve()
CONTEXTFORGE_SECONDS = 120
"""It makes a database first: 7 s on a quiet machine, more than 30 on a busy one."""
CONTEXTFORGE = {
    "AUTH_REQUIRED": "false",
    "MCP_REQUIRE_AUTH": "false",
    "ALLOW_UNAUTHENTICATED_ADMIN": "true",  # to register the upstream
    "RATE_LIMITING_ENABLED": "false",  # else 100 calls a minute
    "CACHE_TYPE": "memory",
    "SSRF_ALLOW_LOCALHOST": "true",
    "SSRF_ALLOW_PRIVATE_NETWORKS": "true",
    "MCPGATEWAY_UI_ENABLED": "false",
    "MCPGATEWAY_ADMIN_API_ENABLED": "false",
    "LOG_LEVEL": "ERROR",
}


@dataclass(frozen=True, slots=True)
class Rival:
    """How a rival is started, and how it is called."""

    name: str
    environment: str
    package: str
    start: Callable[[Fleet, Process], Process]
    part: float = 1
    """How many of the operations of the other rows it has, because each takes it so much longer."""
    tool: str = "echo"
    is_modern: bool = True

    def version(self) -> str:
        """Empty if it is not there."""
        folder = PARTS / self.environment
        manifest = folder / "node_modules" / self.package / "package.json"
        if manifest.exists():
            return str(json.loads(manifest.read_text())["version"])
        places = [str(each) for each in folder.glob("lib/python*/site-packages")]
        return next((each.version for each in distributions(name=self.package, path=places)), "")


def start_fastmcp(fleet: Fleet, upstream: Process) -> Process:
    port = free_port()
    command = [str(PARTS / "modern" / "bin" / "python"), str(ROOT / "bench" / "fastmcp_proxy.py")]
    return fleet.start("FastMCP", [*command, f"http://{upstream.address}/mcp", str(port)], f"127.0.0.1:{port}")


def start_mcp_proxy(fleet: Fleet, _upstream: Process) -> Process:
    """Before a child of its own, because it has no upstreams over HTTP; what the child costs is not its cost."""
    port = free_port()
    program = PARTS / "mcp-proxy" / "node_modules" / "mcp-proxy" / "dist" / "bin" / "mcp-proxy.mjs"
    options = ["--host", "127.0.0.1", "--port", str(port), "--server", "stream"]
    child = [sys.executable, "-m", "bench.stdio_upstream"]
    process = fleet.start("mcp-proxy", ["node", str(program), *options, "--", *child], f"127.0.0.1:{port}")
    process.children_count = False
    return process


def start_contextforge(fleet: Fleet, upstream: Process) -> Process:
    """Started, with the upstream registered over its own API."""
    port = free_port()
    environment = CONTEXTFORGE | {
        "DATABASE_URL": f"sqlite:///{fleet.folder}/contextforge.db",
        "JWT_SECRET_KEY": secrets.token_urlsafe(48),
        "AUTH_ENCRYPTION_SECRET": secrets.token_urlsafe(48),
    }
    command = ["env", *(f"{name}={value}" for name, value in environment.items())]
    command += [str(PARTS / "contextforge" / "bin" / "uvicorn"), "mcpgateway.main:app", "--port", str(port)]
    command += ["--no-access-log"]
    process = fleet.start("ContextForge", command, f"127.0.0.1:{port}", seconds=CONTEXTFORGE_SECONDS)
    wanted = {"name": "bench", "url": f"http://{upstream.address}/mcp", "transport": "STREAMABLEHTTP"}
    connection = http.client.HTTPConnection(process.address, timeout=CONTEXTFORGE_SECONDS)
    connection.request("POST", "/gateways", json.dumps(wanted), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != http.client.OK:
        raise ProcessError(f"ContextForge: HTTP {reply.status}: {reply.read().decode()}")
    connection.close()
    return process


RIVALS = (
    Rival("FastMCP's proxy", "modern", "fastmcp", start_fastmcp, part=0.05),
    Rival("npm mcp-proxy", "mcp-proxy", "mcp-proxy", start_mcp_proxy),
    Rival(
        "ContextForge",
        "contextforge",
        "mcp-contextforge-gateway",
        start_contextforge,
        part=0.05,
        tool="bench-echo",
        is_modern=False,
    ),
)


def start_rivals(fleet: Fleet, upstream: Process) -> list[tuple[Rival, Process]]:
    """Those that can be had here; one that cannot is left out with a line."""
    started = []
    for rival in RIVALS:
        if not rival.version():
            print(f"{rival.name} is left out: `scripts/parts {rival.environment}` builds it", file=sys.stderr)
            continue
        before = len(fleet.started)
        try:
            started.append((rival, rival.start(fleet, upstream)))
        except (ProcessError, OSError) as exc:
            print(f"{rival.name} is left out: {str(exc).splitlines()[0]}", file=sys.stderr)
            for process in fleet.started[before:]:
                fleet.kill(process)
    return started
