"""Fixtures: gateways that speak SEP-1442, one or three, before a fake legacy server or a fake modern one."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from gateway.protocol import mcp
from tests.support.fake_modern import FORM, Call, FakeModern, Json
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.paper_client import PaperClient
from tests.support.replicas import Cluster
from tests.support.stand import leaving_nothing
from tests.support.workbench import Stand, eventually

ROUTE: Final = {"dialects": ["sep-1442"]}
ROOTS: Final[Json] = {"method": "roots/list", "params": {}}
LOG: Final[Json] = {"level": "warning", "data": "hot"}
QUESTIONS: Final = {"ask": {"name": FORM}, "roots": {"roots": ROOTS}, "both": {"name": FORM, "roots": ROOTS}}
"""What these tools ask; their result is the answers as text."""


class Tools:
    """A server of either era, whose tools do the same."""

    def __init__(self, server: FakeUpstream | FakeModern) -> None:
        self.server = server
        self.left = asyncio.Event()
        """Set once a call of the tool `wait` is cancelled."""
        if isinstance(server, FakeUpstream):
            server.capabilities = {"tools": {"listChanged": True}, "logging": {}, "resources": {"subscribe": True}}
            server.tool(self._legacy)
        else:
            server.tools = dict.fromkeys(("plain", "tell", "wait", *QUESTIONS), self._modern)

    @property
    def is_legacy(self) -> bool:
        return isinstance(self.server, FakeUpstream)

    def calls(self) -> int:
        """How many times a tool has run."""
        if isinstance(self.server, FakeUpstream):
            return len(self.server.of(mcp.TOOLS_CALL))
        return len([body for body in self.server.of(mcp.TOOLS_CALL) if "inputResponses" not in body["params"]])

    async def _legacy(self, turn: Turn) -> None:
        name = turn.body["params"]["name"]
        if name in QUESTIONS:
            asked = [turn.ask(each["method"], each["params"]) for each in QUESTIONS[name].values()]
            answers = [each.get("result") for each in await asyncio.gather(*asked)]
            await turn.result(text(json.dumps(dict(zip(QUESTIONS[name], answers, strict=True)))))
        elif name == "tell":
            await turn.notify(mcp.LOG, LOG)
            await turn.result(text('"told"'))
        elif name == "wait":
            await turn.notify(mcp.LOG, LOG)
            try:
                await turn.for_ever()
            finally:
                self.left.set()
        else:
            await turn.result(text('"done"'))

    async def _modern(self, call: Call) -> Json:
        name = call.params["name"]
        if name in QUESTIONS:
            return call.text(call.answers) if call.answers else call.ask(**QUESTIONS[name])
        if name in ("tell", "wait") and mcp.META_LOG_LEVEL in call.meta:
            await call.notify(mcp.LOG, LOG)
        if name == "wait":
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        return call.text("told" if name == "tell" else "done")

    async def change(self) -> None:
        """Tell all listeners that the tools have changed."""
        message = {"jsonrpc": "2.0", "method": mcp.TOOLS_CHANGED}
        if isinstance(self.server, FakeModern):
            for tell in self.server.listeners:
                await tell(message)
        else:
            for session in self.server.known:
                self.server.side(session).put_nowait(b"data: %b\n\n" % json.dumps(message).encode())


@pytest.fixture(params=["legacy", "modern"])
async def tools(request: pytest.FixtureRequest) -> AsyncIterator[Tools]:
    server = FakeUpstream() if request.param == "legacy" else FakeModern()
    async with server:
        yield Tools(server)


@pytest.fixture
async def cluster(tools: Tools) -> AsyncIterator[Cluster]:
    """Starts replicas; afterwards the living ones must come to rest and leave nothing behind."""
    async with leaving_nothing(_at_rest, tools.server) as (http, stands):
        found = Cluster(tools.server.url, http)
        yield found
        stands.extend(found.stands.values())


async def _at_rest(stand: Stand) -> None:
    downstream = stand.gateway.downstream
    await eventually(lambda: downstream.in_flight == 0, "no request is in flight")
    dialect = downstream.legacy.stateless
    assert dialect is None or len(dialect.lot) == 0
    assert stand.metric("mcp_gateway_mirrored_calls") == 0
    await eventually(lambda: len(stand.gateway.lot) == 0, "no call is held")
    await eventually(lambda: stand.gateway.calls.used == 0, "no call weighs anything")
    assert stand.metric("mcp_gateway_task_failures_total") == stand.planted_bugs


@pytest.fixture(params=[1, 3])
async def stands(request: pytest.FixtureRequest, cluster: Cluster) -> list[Stand]:
    """One replica or three."""
    return await cluster.begin(*(f"gw-{number}" for number in range(request.param)), route=ROUTE)


@pytest.fixture
def client(stands: list[Stand]) -> PaperClient:
    return client_of(stands)


def client_of(stands: list[Stand], **options: Any) -> PaperClient:
    return PaperClient(stands, **options)
