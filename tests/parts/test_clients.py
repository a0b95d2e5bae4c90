"""The drivers of the real modern clients against a modern server, so that what fails elsewhere is ours."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import pytest_asyncio

from tests.parts.clients.drive import (
    PYTHON,
    DriverError,
    Kind,
    ModernClient,
    Reply,
    available,
    elicit,
    modern_client,
    roots,
    sample,
    tool_call,
)

KINDS = get_args(Kind)
SERVER = Path(__file__).parent / "servers" / "modern_py.py"

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not all(map(available, KINDS)), reason="scripts/parts has not been run"),
]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("modern") / "ledger.jsonl"
    path.touch()
    return path


@pytest.fixture(scope="module")
def url(ledger: Path) -> Iterator[str]:
    with subprocess.Popen([PYTHON, SERVER, "--ledger", ledger], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready, _, address = server.stdout.readline().strip().partition(" ")
        assert ready == "READY"
        yield address
        server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def driver(request: pytest.FixtureRequest) -> AsyncIterator[ModernClient]:
    # A driver takes seconds to import its SDK, so there is one for the module; each test has its own connection.
    async with modern_client(request.param) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def client(driver: ModernClient, url: str) -> ModernClient:
    assert (await driver.connect(url)).ok
    return driver


def written(ledger: Path) -> list[tuple[str, str]]:
    lines = map(json.loads, ledger.read_text().splitlines())
    return [(line["event"], line["tool"]) for line in lines]


async def in_ledger(ledger: Path, event: str, tool: str, before: int) -> None:
    """Wait until the server has written this after so many lines."""
    async with asyncio.timeout(5):
        while (event, tool) not in written(ledger)[before:]:
            await asyncio.sleep(0.02)


def error_of(reply: Reply) -> Any:
    assert reply.error is not None, reply
    return reply.error


async def test_a_client_says_what_it_negotiated(client: ModernClient, url: str) -> None:
    described = (await client.connect(url)).value
    assert described["era"] == "modern"
    assert described["protocolVersion"] == "2026-07-28"
    assert described["serverInfo"] == {"name": "modern-py", "version": "2.3.0"}
    assert described["capabilities"]["tools"] is not None
    assert described["instructions"] == "A modern server for the tests."


async def test_a_tool_answers_fails_and_gives_structure(client: ModernClient) -> None:
    assert (await client.call_tool("echo", {"text": "zoë"})).text == "zoë"
    failed = await client.call_tool("fail", {"message": "no"})
    assert (failed.text, failed.value["isError"]) == ("no", True)
    assert (await client.call_tool("structured", {"n": 4})).value["structuredContent"] == {
        "n": 4,
        "square": 16,
    }


async def test_a_json_rpc_error_reaches_the_user_whole(client: ModernClient) -> None:
    error = error_of(await client.call_tool("broken", {"message": "because"}))
    assert (error.code, error.message, error.data) == (-32050, "broken", {"why": "because"})


async def test_a_question_is_answered_by_default_and_by_rule(client: ModernClient) -> None:
    reply = await client.call_tool("ask", {"question": "Who?"})
    assert reply.text == 'accept:{"name":"Ann"}'
    assert [(asked["kind"], asked["key"]) for asked in reply.asked] == [("elicit", "name")]
    assert reply.asked[0]["params"]["message"] == "Who?"

    answers = [elicit({"action": "accept", "content": {"name": "Bob"}}, match="Who")]
    assert (await client.call_tool("ask", {"question": "Who?"}, answers=answers)).text == 'accept:{"name":"Bob"}'
    assert (await client.call_tool("ask", {"question": "Why?"}, answers=answers)).text == 'accept:{"name":"Ann"}'
    declined = await client.call_tool("ask", {"question": "Who?"}, answers=[elicit({"action": "decline"})])
    assert declined.text == "decline"


async def test_all_kinds_of_questions_are_answered(client: ModernClient, url: str) -> None:
    assert (await client.connect(url, roots=[{"uri": "file:///a"}, {"uri": "file:///b", "name": "b"}])).ok
    reply = await client.call_tool("ask_many")
    assert json.loads(reply.text) == {
        "elicit": 'accept:{"name":"Ann"}',
        "sample": "sampled",
        "roots": ["file:///a", "file:///b"],
    }
    assert sorted(reply.kinds) == ["elicit", "roots", "sample"]

    spoken = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "hi"}}
    assert (await client.call_tool("sample", {"prompt": "speak"}, answers=[sample(spoken)])).text == "hi"
    listed = await client.call_tool("roots", answers=[roots({"roots": [{"uri": "file:///c"}]})])
    assert json.loads(listed.text) == ["file:///c"]
    page = await client.call_tool("ask_url", {"url": "https://example.com/"})
    assert page.text == "accept"
    assert page.asked[0]["params"]["url"] == "https://example.com/"


async def test_a_callback_that_fails_ends_the_call_without_a_retry(client: ModernClient, ledger: Path) -> None:
    before = len(written(ledger))
    error = error_of(await client.call_tool("ask", {"question": "Who?"}, answers=[elicit({"error": "no user"})]))
    assert "no user" in error.message
    assert written(ledger)[before:] == [("run", "ask"), ("finished", "ask")]


async def test_prompts_and_resources_ask_too(client: ModernClient) -> None:
    greeting = (await client.get_prompt("greet", {"name": "Ann"})).value
    assert greeting["messages"][0]["content"]["text"] == "Hello, Ann!"
    asked = await client.get_prompt("ask_prompt", answers=[elicit({"action": "cancel"})])
    assert asked.value["messages"][0]["content"]["text"] == "cancel"
    assert (await client.read_resource("note://7")).value["contents"][0]["text"] == "note 7"
    assert (await client.read_resource("note://blob")).value["contents"][0]["blob"] == "AAEC/w=="
    form = await client.read_resource("ask://form")
    assert form.value["contents"][0]["text"] == 'accept:{"name":"Ann"}'
    assert form.kinds == ["elicit"]
    missing = error_of(await client.read_resource("note://missing"))
    assert (missing.code, missing.data) == (-32602, {"uri": "note://missing"})


async def test_every_page_is_listed(client: ModernClient) -> None:
    tools = (await client.list_all("tools")).value["tools"]
    assert len(tools) == 13
    prompts = (await client.list_all("prompts")).value["prompts"]
    assert [prompt["name"] for prompt in prompts] == ["greet", "ask_prompt", "third"]
    assert len((await client.list_all("resources")).value["resources"]) == 3
    templates = (await client.list_all("resource_templates")).value["resourceTemplates"]
    assert [template["uriTemplate"] for template in templates] == ["note://{id}"]


async def test_an_argument_is_completed(client: ModernClient) -> None:
    ref = {"type": "ref/prompt", "name": "greet"}
    reply = await client.complete(ref, {"name": "name", "value": "An"})
    assert reply.value["completion"]["values"] == ["Ann", "Anna"]


async def test_progress_and_logs_come_when_they_are_asked_for(client: ModernClient) -> None:
    reply = await client.call_tool("progress", {"steps": 3}, progress=True)
    assert [step["progress"] for step in reply.progress] == [1, 2, 3]
    assert (await client.call_tool("progress", {"steps": 3})).progress == []
    logged = await client.call_tool("logs", log_level="warning")
    assert [(message["level"], message["data"]) for message in logged.logs] == [
        ("warning", "a warning message"),
        ("error", "a error message"),
    ]
    # Only fastmcp asks for logs that its user did not ask for.
    assert len((await client.call_tool("logs", progress=True)).logs) == (4 if client.kind == "fm" else 0)


async def test_a_cancelled_call_is_cancelled_at_the_server(client: ModernClient, ledger: Path) -> None:
    before = len(written(ledger))
    reply = await client.cancel_call("hang", after_seconds=0.3)
    assert reply.cancelled is True
    await in_ledger(ledger, "cancelled", "hang", before)
    steps = await client.cancel_call("progress", {"steps": 50, "delay_seconds": 0.1}, after_progress=2)
    assert (steps.cancelled, len(steps.progress)) == (True, 2)
    await in_ledger(ledger, "cancelled", "progress", before)
    assert (await client.cancel_call("echo", {"text": "quick"}, after_seconds=20)).cancelled is False
    slow = [elicit(delay_seconds=60)]
    asked = await client.cancel_call("ask", {"question": "Still there?"}, after_asked=1, answers=slow)
    assert (asked.cancelled, asked.kinds) == (True, ["elicit"])
    assert (await client.call_tool("echo", {"text": "alive"})).text == "alive"


async def test_a_call_has_a_time_out(client: ModernClient) -> None:
    error = error_of(await client.call_tool("hang", timeout_seconds=0.3))
    assert error.type in {"MCPError", "SdkError:REQUEST_TIMEOUT"}


async def test_calls_at_the_same_time_keep_their_answers_apart(client: ModernClient) -> None:
    calls = [
        tool_call("ask", {"question": f"{i}?"}, [elicit({"action": "accept", "content": {"name": str(i)}})])
        for i in range(4)
    ]
    replies = await client.call_many([*calls, tool_call("broken")])
    assert [reply.text for reply in replies[:4]] == [f'accept:{{"name":"{i}"}}' for i in range(4)]
    assert [reply.asked[0]["params"]["message"] for reply in replies[:4]] == ["0?", "1?", "2?", "3?"]
    assert error_of(replies[4]).code == -32050


async def test_headers_and_capabilities_are_sent(client: ModernClient, url: str) -> None:
    assert (await client.connect(url, capabilities=["roots"], headers={"X-Test": "1"})).ok
    seen = json.loads((await client.call_tool("whoami")).text)
    assert seen["headers"]["x-test"] == "1"
    assert seen["capabilities"].keys() == {"roots"}

    reply = await client.connect(url, capabilities=["form", "sampling"])
    if client.kind == "ts":
        capabilities = json.loads((await client.call_tool("whoami")).text)["capabilities"]
        assert capabilities == {"elicitation": {"form": {}}, "sampling": {}}
    else:
        assert "form and url together" in (reply.unsupported or "")


async def test_a_question_nobody_can_answer_is_an_error(client: ModernClient, url: str) -> None:
    assert (await client.connect(url, capabilities=[])).ok
    assert error_of(await client.call_tool("ask", {"question": "Who?"})).message


async def test_close_and_connect_again(client: ModernClient, url: str) -> None:
    assert (await client.close()).ok
    assert error_of(await client.call_tool("echo", {"text": "x"}))
    assert error_of((await client.call_many([tool_call("echo", {"text": "x"})]))[0])
    assert error_of(await client.cancel_call("hang", after_seconds=1))
    assert (await client.connect(url)).ok
    assert (await client.call_tool("echo", {"text": "again"})).text == "again"


async def test_a_deadline_shows_what_the_driver_wrote(client: ModernClient) -> None:
    with pytest.raises(DriverError, match="no reply to call_tool hang"):
        await client.call_tool("hang", deadline_seconds=0.2)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_is_not_there_is_an_error(kind: Kind) -> None:
    async with modern_client(kind) as client:
        assert error_of(await client.connect("http://127.0.0.1:1/mcp")).message


@pytest.mark.parametrize("kind", KINDS)
async def test_a_driver_dies_with_its_parent(kind: Kind, url: str) -> None:
    script = (
        "import asyncio, os\n"
        "from tests.parts.clients.drive import modern_client\n"
        "async def main():\n"
        f"    async with modern_client({kind!r}) as client:\n"
        f"        await client.connect({url!r})\n"
        "        client.write({'id': 0, 'op': 'call_tool', 'name': 'hang'})\n"
        "        print(client.transport.get_pid(), flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], stdout=subprocess.PIPE, check=False, cwd=Path.cwd()
    )
    pid = int(parent.stdout)
    async with asyncio.timeout(5):
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(pid, 0)
                await asyncio.sleep(0.02)
