"""Stateless clients when something is missing: the dialect, a credential, room, the replica that holds the call."""

import json
from contextlib import suppress

import aiohttp

from gateway.config import parse
from gateway.protocol import mcp
from gateway.server.drain import drain
from tests.plugins.sep_1442.conftest import ROUTE, Tools, client_of
from tests.plugins.sep_1442.test_paper import ACCEPT, text
from tests.support.fake_modern import FakeModern
from tests.support.logs import Lines
from tests.support.replicas import Cluster
from tests.support.status import told
from tests.support.workbench import configuration, eventually, later


async def test_a_route_without_the_dialect_knows_none_of_it(cluster: Cluster, tools: Tools) -> None:
    client = client_of(await cluster.begin("gw-1"))
    for method in ("tools/list", "server/discover", "messages/listen"):
        status, message = await client.ask(method)
        assert message.get("error", {}).get("code") != -32000 or status == 400
        assert "supportedVersions" not in str(message)


async def test_a_reload_gives_a_route_the_dialect(cluster: Cluster, tools: Tools) -> None:
    stands = await cluster.begin("gw-1")
    _, message = await client_of(stands).ask("server/discover")
    assert "supportedVersions" not in str(message)
    stands[0].gateway.apply(parse(configuration(tools.server.url, route=ROUTE), "test", {}))
    _, message = await client_of(stands).ask("server/discover")
    assert "supportedVersions" in message["result"]


async def test_only_what_the_client_sent_is_shown_as_its_message(
    log_lines: Lines, cluster: Cluster, tools: Tools
) -> None:
    client = client_of(await cluster.begin("gw-1", route=ROUTE, debug={"bodies": True}))
    async with client.call("plain") as stream:
        _ = await stream.message()
    came = [line for line in log_lines("debug.body") if line["direction"] == "from_client"]
    assert [json.loads(line["text"])["method"] for line in came] == ["tools/call"]


async def test_a_call_is_one_exchange_whoever_serves_its_rounds(
    log_lines: Lines, cluster: Cluster, tools: Tools
) -> None:
    client = client_of(await cluster.begin("gw-1", route=ROUTE, log={"access": True}))
    async with client.call("ask") as stream:
        _ = await client.answer(await stream.message(), ACCEPT)
        _ = await stream.message()
    await eventually(lambda: len(log_lines("request.finished")) == 2)
    (finished,) = log_lines("exchange.finished")
    assert [line["exchange_id"] for line in log_lines("request.finished")] == [finished["exchange_id"]] * 2


async def test_a_challenge_reaches_the_client(cluster: Cluster, tools: Tools) -> None:
    challenge = 'Bearer realm="fake"'
    if isinstance(tools.server, FakeModern):
        tools.server.credential = "Bearer right"
    else:
        tools.server.on(mcp.INITIALIZE, lambda turn: turn.reply(401, headers={"WWW-Authenticate": challenge}))
    client = client_of(await cluster.begin("gw-1", route=ROUTE), headers={"Authorization": "Bearer wrong"})
    async with client.call("plain") as stream:
        assert stream.response.status == 401
        assert stream.response.headers["WWW-Authenticate"] == challenge


async def test_a_call_whose_replica_dies_ends_with_its_stream(cluster: Cluster, tools: Tools) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", route=ROUTE)
    client = client_of([one, two])
    with suppress(aiohttp.ClientError, EOFError):
        async with client.call("ask") as stream:
            question = await stream.message()
            await cluster.crash(one)
            await stream.message()
    assert await client_of([two]).answer(question, ACCEPT) == 202
    assert tools.calls() == 1


async def test_a_drain_waits_for_answers_and_then_ends_the_calls(cluster: Cluster, tools: Tools) -> None:
    (stand,) = await cluster.begin("gw-1", route=ROUTE, hold={"drain_seconds": 0.1})
    client = client_of([stand])
    async with client.call("ask") as stream:
        question = await stream.message()
        await drain(stand.gateway, delay_seconds=0)
        message = await stream.message()
        assert message["error"]["data"]["reason"] == "stopping"
    assert question["method"] == mcp.ELICIT


async def test_a_call_ends_with_its_process_though_the_tool_may_run_twice(
    cluster: Cluster, tools: Tools, log_lines: Lines
) -> None:
    route = {**ROUTE, "ephemeral": ["*"]}
    (stand,) = await cluster.begin("gw-1", route=route, hold={"drain_seconds": 0.1})
    async with client_of([stand]).call("ask") as stream:
        _ = await stream.message()
        held = (await told(stand)).held
        assert [call.at_end for call in held] == ([] if isinstance(tools.server, FakeModern) else ["lost"])
        await drain(stand.gateway, delay_seconds=0)
        assert (await stream.message())["error"]["data"]["reason"] == "stopping"
    (line,) = log_lines("exchange.finished")
    assert "The gateway shut down before the call ended" in line["cause"]


async def test_a_drain_ends_background_streams_and_begins_none(cluster: Cluster, tools: Tools) -> None:
    (stand,) = await cluster.begin("gw-1", route=ROUTE)
    client = client_of([stand])
    async with client.request("messages/listen", id_="mine") as stream:
        assert "method" in await stream.message()
        async with client.call("ask") as asking:  # the drain waits for it
            question = await asking.message()
            draining = later(drain(stand.gateway, delay_seconds=0))
            assert await stream.message() == {"jsonrpc": "2.0", "id": "mine", "result": {}}
            assert (await client.ask("messages/listen"))[0] == 503
            assert await client.answer(question, ACCEPT) == 202
            assert text(await asking.message()) == {"name": ACCEPT}
    await draining
