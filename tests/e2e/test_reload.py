"""SIGHUP to real processes: the file is applied whole or not at all, and no call is disturbed.

What each key does is tested in tests/server/test_reload.py; here are the file, the signal, the log, the metrics and
the processes. The upstream is a real legacy server (py130).
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.wire import ACCEPT, NAMED, wire
from tests.parts.launch import OldServer, old_server
from tests.support.gateway_process import STATE_KEY, gateway, merged
from tests.support.workbench import Client, Reply

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
]

NEW_KEY = "1e" * 32
RELOADS = "mcp_gateway_config_reloads_total"
LIMIT = "mcp_gateway_held_calls_limit"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[OldServer]:
    async with old_server("py130") as running:
        yield running


async def park(client: Client) -> Reply:
    return await client.call("ask", {"question": "Who?"})


def applied(said: list[dict[str, Any]]) -> list[str]:
    """The changed keys, as every process logs them alike."""
    assert {line["event"] for line in said} == {"config.loaded"}, said
    (changed,) = {tuple(line["changed"]) for line in said}
    return list(changed)


def rejected(said: list[dict[str, Any]]) -> str:
    """The reasons why the file was rejected, in one text."""
    assert {(line["event"], line["level"]) for line in said} == {("config.rejected", "error")}, said
    (problems,) = {tuple(line["problems"]) for line in said}
    return "\n".join(problems)


# A bad file.


BAD_FILES: list[tuple[str, str | None, list[str]]] = [
    ("no YAML", "listen: [", ["is not YAML"]),
    (
        "an unknown key and a bad value",
        '{"hodl": {}, "limits": {"body_bytes": -1}}',
        ["hodl", "limits.body_bytes", "routes"],
    ),
    ("a key that is none", '{"state": {"keys": ["not-a-key-but-secret"]}, "routes": []}', ["state.keys[0]", "routes"]),
    ("no file", None, ["cannot be read"]),
    ("no text", "\udcff", ["is not UTF-8"]),
]


@pytest.mark.parametrize(("text", "words"), [pytest.param(*rest, id=name) for name, *rest in BAD_FILES])
async def test_an_invalid_file_changes_nothing_and_is_logged(
    server: OldServer, text: str | None, words: list[str]
) -> None:
    async with gateway(server.url) as gw, wire(gw.url) as client:
        gw.provoked = {"config.rejected"}
        running = asyncio.get_running_loop().create_task(client.call("sleep", {"seconds": 0.5}))
        asked = await park(client)
        path = gw.directory / "gateway.yaml"
        if text is None:
            path.unlink()
        else:
            path.write_bytes(text.encode(errors="surrogateescape"))
        said = await gw.reload()
        assert len(said) == 1
        assert all(word in rejected(said) for word in words)
        assert "secret" not in gw.stderr
        assert await gw.metric(RELOADS, outcome="rejected") == 1
        assert await gw.metric(RELOADS, outcome="applied") == 0
        assert (await client.answer(asked, ACCEPT)).text == NAMED
        assert (await running).text == "slept 0.5"
        assert (await gw.reload(gw.config))[0]["note"] == "nothing changed"
        assert await gw.metric(RELOADS, outcome="applied") == 1


async def test_a_reload_is_logged_without_the_values(server: OldServer) -> None:
    async with gateway(server.url) as gw, wire(gw.url) as client:
        before = gw.log("server.started")[0]["configuration"]
        over = {"state": {"keys": [STATE_KEY, NEW_KEY]}, "hold": {"max_calls": 7}, "limits": {"body_bytes": 5_000}}
        said = await gw.reload(merged(gw.config, over))
        assert applied(said) == ["state.keys", "hold.max_calls", "limits.body_bytes"]
        assert said[0]["configuration"] != before
        assert NEW_KEY not in gw.stderr
        assert await gw.metric(LIMIT) == 7
        async with gw.http.post(gw.url, data=b"x" * 6_000) as response:
            assert response.status == 413
        assert (await client.call("echo", {"text": "x" * 1_000})).text


# Keys.


async def test_a_key_file_is_read_again(server: OldServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(STATE_KEY)
    async with gateway(server.url, state={"keys": [], "keys_file": str(keys)}) as gw, wire(gw.url) as client:
        asked = await park(client)
        keys.write_text(f"{NEW_KEY}\n{STATE_KEY}\n")
        assert applied(await gw.reload()) == ["state.keys"]
        assert (await client.answer(asked, ACCEPT)).text == NAMED
        newer = await park(client)
        assert newer.state.split(".")[1] != asked.state.split(".")[1]
        assert (await client.answer(newer, ACCEPT)).text == NAMED
