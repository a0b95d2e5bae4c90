"""The status of a gateway, fetched from its admin listener or made for a test."""

import json
import re
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gateway.config import digest, parse
from gateway.telemetry.process_status import CallStatus, ProcessStatus, RouteStatus, Status
from tests.support.workbench import Stand

SECRET: Final = "s3cr3t"


async def fetch(stand: Stand, path: str = "/status.json", **headers: str) -> tuple[int, str, Any]:
    async with stand.http.get(f"http://{stand.gateway.admin}{path}", headers=headers) as response:
        return response.status, await response.text(), response


async def told(stand: Stand) -> Status:
    status, body, _ = await fetch(stand)
    assert status == 200
    return msgspec.json.decode(body, type=Status)


async def upstream_up(stand: Stand) -> float | None:
    """What /metrics says of the upstream; None if it says nothing."""
    found = re.search(r"^mcp_gateway_upstream_up\{.*\} (.*)$", (await fetch(stand, "/metrics"))[1], re.MULTILINE)
    return None if found is None else float(found[1])


def held(age: float) -> CallStatus:
    return CallStatus(
        route="/mcp",
        method="tools/call",
        name="t",
        state="parked",
        round=1,
        asked=(),
        age_seconds=age,
        expires_in_seconds=1,
        owner="gw-1",
        caller="c",
    )


def status_of(*processes: ProcessStatus, **fields: Any) -> Status:
    config = parse(json.dumps({"routes": [{"upstream": {"url": "http://127.0.0.1:1/mcp"}}]}), "test", {})
    status = Status(
        version="1",
        replica="gw-1",
        state="ready",
        time="2026-01-01T00:00:00+00:00",
        uptime_seconds=0,
        configuration=digest(config),
        processes=processes,
    )
    return replace(status, **fields)


def process(number: int, configuration: str = "aaa") -> ProcessStatus:
    return ProcessStatus(id=f"gw-1#{number}", state="ready", configuration=configuration, held=number)


def route(**fields: Any) -> RouteStatus:
    usual: dict[str, Any] = {
        "path": "/mcp",
        "upstream": "http://127.0.0.1:1/mcp",
        "transport": "auto",
        "era": "unknown",
        "continuation": "hold",
        "health": "unknown",
        "last_ok_seconds_ago": None,
        "last_failure": None,
        "held": 1,
        "sessions": {"idle": 1, "busy": 2, "quarantined": 0},
        "sessions_limit": 10,
        "waiting": 1,
        "children": None,
        "children_limit": None,
        "subscriptions": 1,
        "streams": 0,
    }
    return RouteStatus(**{**usual, **fields})
