"""The cases that every modern client must play with every legacy server through the gateway.

A case takes a `Stage` and asserts. `runs` says what the server's ledger must show afterwards, no more and no less:
that nothing ran twice is checked after every case. Which server cannot produce which case, and why, is the table in
matrix.py.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from tests.parts.clients.drive import (
    CallError,
    Kind,
    ModernClient,
    Reply,
    elicit,
    roots,
    sample,
    tool_call,
)
from tests.parts.launch import OldServer
from tests.support.gateway_process import HELD, ROUNDS, Front

ANN: Final = 'accept:{"name":"Ann"}'
BIG: Final = 2_000_000
SLOW_SECONDS: Final = 0.8
"""How long a client thinks; its server gives up after half of that."""
ENDED: Final = frozenset({"finished", "failed", "cancelled"})
TRACE: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

Runs = Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """One row of the matrix."""

    name: str
    play: "Callable[[Stage], Awaitable[None]]"
    runs: Runs


CASES: Final[list[Case]] = []
_STRANGERS: Final = count(1)


def case(
    name: str, **runs: int
) -> "Callable[[Callable[[Stage], Awaitable[None]]], Callable[[Stage], Awaitable[None]]]":
    """Register a case; `runs` counts the tools (prompts, resources) that must have run."""

    def register(play: "Callable[[Stage], Awaitable[None]]") -> "Callable[[Stage], Awaitable[None]]":
        CASES.append(Case(name, play, runs))
        return play

    return register


@dataclass
class Drivers:
    """One process per client for the whole test session, with its connection."""

    clients: Mapping[Kind, ModernClient]
    connected: dict[Kind, object] = field(default_factory=dict)

    async def connect(
        self, kind: Kind, url: str, *, declares: bool = True, headers: Mapping[str, str] | None = None
    ) -> ModernClient:
        """Connect, unless the same connection exists."""
        wanted = (url, declares, tuple(sorted((headers or {}).items())))
        client = self.clients[kind]
        if self.connected.get(kind) != wanted:
            self.connected.pop(kind, None)
            reply = await client.connect(url, declares=declares, headers=headers)
            assert reply.ok, reply
            self.connected[kind] = wanted
        return client


@dataclass
class Stage:
    """A client, the gateway and a server; the ledger is read from the beginning of the case."""

    server: OldServer
    gw: Front
    short: Front
    """Another gateway before the same server, whose parked calls expire soon."""
    drivers: Drivers
    kind: Kind
    began: int = 0

    @property
    def name(self) -> str:
        return self.server.name.removesuffix("-stdio").removesuffix("-sse")

    async def client(
        self,
        *,
        path: str = "/mcp",
        declares: bool = True,
        headers: Mapping[str, str] | None = None,
        gw: Front | None = None,
    ) -> ModernClient:
        return await self.drivers.connect(self.kind, (gw or self.gw).base + path, declares=declares, headers=headers)

    async def stranger(self, **options: Any) -> ModernClient:
        """Connect as a caller without sessions."""
        return await self.client(headers={"Authorization": f"Bearer stranger-{next(_STRANGERS)}"}, **options)

    async def call(
        self, tool: str, arguments: dict[str, Any] | None = None, client: ModernClient | None = None, **options: Any
    ) -> Reply:
        client = client or await self.client()
        return await client.call_tool(tool, arguments or {}, **options)

    def ledger(self, event: str | None = None, tool: str | None = None) -> list[dict[str, Any]]:
        """Read what the server did since the case began."""
        entries = self.server.ledger()[self.began :]
        return [e for e in entries if event in (None, e["event"]) and tool in (None, e["tool"])]

    async def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for an entry in the ledger."""
        await self.gw.until(condition, f"{what} in the ledger {self.ledger()}")

    def runs(self) -> Counter[str]:
        """Count the runs; not of plain resources, which only some of the servers record."""
        tools = (entry["tool"] for entry in self.ledger("run"))
        return Counter(tool for tool in tools if not tool.startswith(("note://", "nope://")))

    async def in_rounds(self, count: int, before: int) -> None:
        """Assert that `count` requests of tools/call arrived since `before`."""
        await self.gw.until_metric(ROUNDS, lambda seen: seen >= before + count, method="tools/call")
        assert await self.gw.rounds("tools/call") == before + count


def error_of(reply: Reply) -> CallError:
    assert reply.error is not None, reply
    return reply.error


def is_error(reply: Reply) -> bool:
    return bool(reply.value.get("isError"))


# --- what needs no question ---


@case("discover")
async def discover(s: Stage) -> None:
    s.drivers.connected.pop(s.kind, None)
    reply = await s.drivers.clients[s.kind].connect(s.gw.url)
    described = reply.value
    names = {"fm3": "old-fastmcp", "ts132": "old-ts"}
    assert (described["era"], described["protocolVersion"]) == ("modern", "2026-07-28")
    assert described["serverInfo"]["name"] == names.get(s.name, "old-py")
    assert {"tools", "prompts", "resources"} <= described["capabilities"].keys()
    assert described["instructions"] == "An old server for the tests."


TOOLS: Final = {
    *("echo", "big", "fail", "structured", "ask", "ask_get", "ask_sequence", "ask_many", "sample", "sample_related"),
    *("roots", "ping_me", "progress", "progress_ask", "logs", "give_up", "hang", "sleep", "late", "whoami", "counter"),
}


@case("lists are complete")
async def lists(s: Stage) -> None:
    client = await s.client()
    tools = [tool["name"] for tool in (await client.list_all("tools")).value["tools"]]
    assert len(tools) == len(set(tools))
    assert set(tools) >= TOOLS
    prompts = {prompt["name"] for prompt in (await client.list_all("prompts")).value["prompts"]}
    assert prompts >= {"greet", "ask_prompt"}
    uris = {resource["uri"] for resource in (await client.list_all("resources")).value["resources"]}
    assert uris >= {"note://static", "note://blob", "ask://form"}
    templates = (await client.list_all("resource_templates")).value["resourceTemplates"]
    assert "note://{id}" in {template["uriTemplate"] for template in templates}


@case("lists come in pages")
async def pages(s: Stage) -> None:
    before = await s.gw.rounds("tools/list")
    await lists(s)
    # Servers without pages fail here.
    await s.gw.until_metric(ROUNDS, lambda seen: seen >= before + 3, seconds=5.0, method="tools/list")


@case("completion")
async def completion(s: Stage) -> None:
    client = await s.client()
    reply = await client.complete({"type": "ref/prompt", "name": "greet"}, {"name": "name", "value": "An"})
    assert reply.value["completion"]["values"] == ["Ann", "Anna"]


@case("echo", echo=2)
async def echo(s: Stage) -> None:
    for words in ("hi", 'zoë "\u2028" 🎉'):
        reply = await s.call("echo", {"text": words})
        assert reply.text == words
        assert reply.kinds == []


@case("resource")
async def resource(s: Stage) -> None:
    client = await s.client()
    (content,) = (await client.read_resource("note://blob")).value["contents"]
    assert (content["uri"], content["blob"]) == ("note://blob", "AAEC/w==")


@case("unknown resource is -32602")
async def unknown_resource(s: Stage) -> None:
    error = error_of(await (await s.client()).read_resource("nope://x"))
    assert error.code == -32602


@case("result of 2 MB", big=1)
async def big(s: Stage) -> None:
    reply = await s.call("big", {"bytes": BIG})
    assert reply.text == "x" * BIG


@case("tool error", fail=1)
async def tool_error(s: Stage) -> None:
    reply = await s.call("fail", {"message": "boo"})
    assert is_error(reply)
    assert "boo" in reply.text


@case("structured output", structured=1)
async def structured(s: Stage) -> None:
    content = (await s.call("structured", {"n": 3})).value["structuredContent"]
    assert content["square"] == 9


# --- questions ---


@case("form on the POST stream: accept", ask=1)
async def form_accepted(s: Stage) -> None:
    before = await s.gw.rounds("tools/call")
    reply = await s.call("ask", {"question": "Who?"})
    assert reply.text == ANN
    assert reply.kinds == ["elicit"]
    assert reply.asked[0]["params"]["message"] == "Who?"
    await s.in_rounds(2, before)


@case("form on the POST stream: decline, cancel", ask=2)
async def form_refused(s: Stage) -> None:
    for action in ("decline", "cancel"):
        assert (await s.call("ask", {}, answers=[elicit({"action": action})])).text == action


@case("form on the GET stream", ask_get=1)
async def form_on_get(s: Stage) -> None:
    reply = await s.call("ask_get", {"question": "Who?"})
    assert reply.text == ANN
    assert reply.kinds == ["elicit"]


@case("url elicitation", ask_url=2)
async def url(s: Stage) -> None:
    reply = await s.call("ask_url", {"url": "https://example.com/page"})
    assert reply.text == "accept"
    assert reply.asked[0]["params"]["url"] == "https://example.com/page"
    assert "elicitationId" not in reply.asked[0]["params"]
    declined = await s.call("ask_url", {"url": "https://example.com/"}, answers=[elicit({"action": "decline"})])
    assert declined.text == "decline"


@case("three questions at once", ask_many=1)
async def many(s: Stage) -> None:
    """A server that pauses longer than the quiet window between two questions is rightly given a round more."""
    before, asked_before = await s.gw.rounds("tools/call"), await s.gw.rounds("tools/call", "input_required")
    reply = await s.call("ask_many")
    answers = {"elicit": ANN, "sample": "sampled", "roots": ["file:///project"]}
    assert json.loads(reply.text) == answers
    assert sorted(reply.kinds) == ["elicit", "roots", "sample"]
    asked = await s.gw.rounds("tools/call", "input_required") - asked_before
    assert 1 <= asked <= len(answers)
    await s.in_rounds(asked + 1, before)


@case("three questions in sequence", ask_sequence=1)
async def sequence(s: Stage) -> None:
    before = await s.gw.rounds("tools/call")
    answers = [elicit({"action": "accept", "content": {"name": str(i)}}, match=f"question {i}") for i in (3, 2, 1)]
    text = (await s.call("ask_sequence", {"n": 3}, answers=answers)).text
    assert re.findall(r'accept:\{\\*"name\\*":\\*"(\d)', text) == ["1", "2", "3"]
    await s.in_rounds(4, before)


@case("sampling on the POST stream", sample_related=1)
async def sampling(s: Stage) -> None:
    spoken = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "hello"}}
    reply = await s.call("sample_related", {"prompt": "Speak"}, answers=[sample(spoken, match="Speak")])
    assert reply.text == "hello"


@case("sampling as the SDK does it", sample=1)
async def sampling_unrelated(s: Stage) -> None:
    reply = await s.call("sample", {"prompt": "Speak"})
    assert reply.text == "sampled"
    assert "Speak" in json.dumps(reply.asked[0]["params"])


@case("sampling with tools", sample_tools=1)
async def sampling_with_tools(s: Stage) -> None:
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}
    spoken = {"role": "assistant", "model": "m", "content": [use], "stopReason": "toolUse"}
    reply = await s.call("sample_tools", {"prompt": "Weather?"}, answers=[sample(spoken)])
    assert json.loads(reply.text) == ["tool_use"]
    params = reply.asked[0]["params"]
    assert params["tools"][0]["name"] == "weather"
    assert params["toolChoice"] == {"mode": "auto"}


@case("roots", roots=1)
async def roots_listed(s: Stage) -> None:
    answers = [roots({"roots": [{"uri": "file:///a"}, {"uri": "file:///b", "name": "b"}]})]
    reply = await s.call("roots", client=await s.stranger(), answers=answers)
    assert json.loads(reply.text) == ["file:///a", "file:///b"]


@case("question in prompts/get", ask_prompt=1)
async def prompt(s: Stage) -> None:
    reply = await (await s.client()).get_prompt("ask_prompt")
    assert reply.value["messages"][0]["content"]["text"] == ANN
    assert reply.kinds == ["elicit"]


@case("question in resources/read", **{"ask://form": 1})
async def resource_asks(s: Stage) -> None:
    reply = await (await s.client()).read_resource("ask://form")
    assert reply.value["contents"][0]["text"] == ANN
    assert reply.kinds == ["elicit"]


@case("-32042 accepted", url_required=2)
async def url_required(s: Stage) -> None:
    client = await s.stranger()
    reply = await s.call("url_required", {"url": "https://example.com/sign-in"}, client)
    assert reply.text == "done"
    assert [asked["params"]["mode"] for asked in reply.asked] == ["url"]
    assert len({entry["session"] for entry in s.ledger("run")}) <= 1


@case("-32042 declined", url_required=1)
async def url_declined(s: Stage) -> None:
    client = await s.stranger()
    url = "https://example.com/declined"
    reply = await s.call("url_required", {"url": url}, client, answers=[elicit({"action": "decline"})])
    assert is_error(reply)
    assert "declined" in reply.text
    assert reply.kinds == ["elicit"]


# --- notifications and other traffic beside the call ---


@case("the upstream's ping", ping_me=1)
async def ping(s: Stage) -> None:
    reply = await s.call("ping_me")
    assert (reply.text, reply.asked) == ("pong", [])


def steps_of(reply: Reply) -> list[float]:
    """The server's progress. The TypeScript client reports its own rounds in between, without a total."""
    return [step["progress"] for step in reply.progress if step.get("total")]


@case("progress", progress=2)
async def progress(s: Stage) -> None:
    reply = await s.call("progress", {"steps": 3, "delay_seconds": 0.02}, progress=True)
    assert steps_of(reply) == [1, 2, 3]
    assert (await s.call("progress", {"steps": 3})).progress == []


@case("progress across a question", progress_ask=1)
async def progress_across(s: Stage) -> None:
    reply = await s.call("progress_ask", {"steps": 2}, progress=True)
    seen = steps_of(reply)
    # mcp 1.10 sends progress on the GET stream, where the result may overtake what was sent just before it.
    assert seen == [1, 2, 3, 4][: max(len(seen), 2) if s.name == "py110" else 4]
    assert reply.kinds == ["elicit"]


@case("logs of the level asked", logs=2)
async def logs(s: Stage) -> None:
    reply = await s.call("logs", log_level="warning")
    assert [message["level"] for message in reply.logs] == ["warning", "error"]
    reply = await s.call("logs", log_level="debug")
    assert [message["level"] for message in reply.logs] == ["debug", "info", "warning", "error"]


@case("no logs unless asked", logs=2)
async def no_logs(s: Stage) -> None:
    assert (await s.call("logs", log_level="debug")).logs
    assert (await s.call("logs", progress=True)).logs == []


@case("question after its call", late=1)
async def late(s: Stage) -> None:
    name = "mcp_gateway_nested_requests_total"
    before = await s.gw.metric(name, outcome="refused_unsolicited")
    # fastmcp lists the tools after a call, and a question that comes meanwhile counts as one of the list.
    reply = await s.call("late", {"delay_seconds": 0.5})
    await s.gw.until_metric(name, lambda refused: refused > before, outcome="refused_unsolicited")
    await s.wait("refused", lambda: bool(s.ledger("refused", "late")))
    assert [entry["code"] for entry in s.ledger("refused", "late")] == [-32602]
    assert reply.asked == []


# --- capabilities ---


@case("undeclared capability is -32021", ask=1)
async def undeclared(s: Stage) -> None:
    reply = await s.call("ask", {}, await s.client(declares=False))
    error = error_of(reply)
    assert error.code == -32021
    assert error.data["requiredCapabilities"] == {"elicitation": {"form": {}}}
    assert reply.asked == []
    await s.wait("the end of ask", lambda: any(e["event"] in ENDED for e in s.ledger(tool="ask")))


@case("undeclared: refuse lets the tool go on", ask=1)
async def undeclared_refused(s: Stage) -> None:
    reply = await s.call("ask", {}, await s.client(path="/refuse", declares=False))
    assert is_error(reply)
    assert "did not declare" in reply.text
    await s.wait("refused", lambda: [e["code"] for e in s.ledger("refused", "ask")] == [-32602])


# --- clients and servers that give up ---


@case("upstream gives up its question", give_up=1)
async def give_up(s: Stage) -> None:
    arguments = {"seconds": SLOW_SECONDS / 2}
    reply = await s.call("give_up", arguments, answers=[elicit(delay_seconds=SLOW_SECONDS)])
    assert reply.text == "gave up"
    assert reply.kinds == ["elicit"]


@case("client cancels a running call", echo=1, hang=1)
async def cancelled(s: Stage) -> None:
    client = await s.client()
    await s.call("echo", {"text": "hi"}, client)  # so that a session is at hand: a child takes its time to start
    work = asyncio.get_running_loop().create_task(client.cancel_call("hang", {}, after_seconds=0.3))
    assert (await work).cancelled is True
    await s.wait("cancelled", lambda: bool(s.ledger("cancelled", "hang")))
    await s.gw.settled()
    assert len(s.ledger("cancelled", "hang")) == 1


@case("client abandons a question", ask=1)
async def abandoned(s: Stage) -> None:
    client = await s.client(gw=s.short)
    reply = await s.call("ask", {}, client, answers=[elicit({"error": "no user"})])
    assert "no user" in error_of(reply).message
    assert await s.short.metric(HELD) == 1
    await s.short.settled()
    await s.wait("the end of ask", lambda: any(e["event"] in ENDED for e in s.ledger(tool="ask")))
    assert s.ledger("answered", "ask")[0]["result"] is not None


@case("calls at once never mix", ask=8, ask_get=8)
async def never_mix(s: Stage) -> None:
    names: tuple[Kind, ...] = ("py", "fm", "ts")
    other = names[(names.index(s.kind) + 1) % len(names)]
    mine, theirs = await s.client(), await s.drivers.connect(other, s.gw.url)
    markers = [f"<{s.kind}-{number}>" for number in range(10)], [f"<other-{number}>" for number in range(6)]
    replies = await asyncio.gather(mine.call_many(marked(markers[0])), theirs.call_many(marked(markers[1])))
    for marker, reply in zip([*markers[0], *markers[1]], [*replies[0], *replies[1]], strict=True):
        assert reply.ok, reply
        assert marker in reply.text
        (asked,) = reply.asked
        assert marker in json.dumps(asked["params"])


def marked(markers: list[str]) -> list[dict[str, Any]]:
    """Make a call per marker, with the marker in its question and its answer, on POST and GET in turn."""
    calls = []
    for number, marker in enumerate(markers):
        answers = [elicit({"action": "accept", "content": {"name": marker}}, match=marker, delay_seconds=0.05)]
        calls.append(tool_call(("ask", "ask_get")[number % 2], {"question": marker}, answers))
    return calls


# --- what the upstream sees ---


@case("headers", whoami=1)
async def headers(s: Stage) -> None:
    sent = {
        "Authorization": "Bearer secret-of-ann",
        "X-Tenant": "red",
        "X-Other": "1",
        "Cookie": "session=1",
        "traceparent": TRACE,
    }
    told = json.loads((await s.call("whoami", {}, await s.client(headers=sent))).text)
    seen = told["headers"]
    assert seen["host"] == f"127.0.0.1:{s.server.port}"
    assert seen["authorization"] == "Bearer secret-of-ann"
    assert seen["x-tenant"] == "red"
    assert seen["traceparent"].split("-")[1] == TRACE.split("-")[1]
    assert not {"origin", "cookie", "x-other"} & seen.keys()
    assert told["clientInfo"]["name"] == f"{s.kind}-client"
    assert {"elicitation", "sampling", "roots"} <= told["capabilities"].keys()


@case("sessions are used again", counter=3)
async def sessions(s: Stage) -> None:
    client = await s.stranger()
    opened = await s.gw.metric("mcp_gateway_sessions_opened_total")
    assert [(await s.call("counter", {}, client)).text for _ in range(3)] == ["1", "2", "3"]
    assert len({entry["session"] for entry in s.ledger("run", "counter")}) == 1
    assert await s.gw.metric("mcp_gateway_sessions_opened_total") == opened
