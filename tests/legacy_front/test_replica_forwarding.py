"""Sessions over several replicas: each request may reach another one than that which has the session."""

import json
import time
from email.utils import formatdate

import aiohttp
import pytest

from gateway.protocol import mcp, sse
from gateway.seal import peer_messages as messages
from gateway.seal.peer_messages import Data, Head, PeerRequest
from tests.legacy_front.test_front import SESSIONS, answer, ask, before, finish, silent
from tests.support.fake_http import FakeHttp
from tests.support.fake_peer import Asked, FakePeer, Silent
from tests.support.fake_sse import FakeSse
from tests.support.fake_upstream import FakeUpstream
from tests.support.legacy_client import LegacyClient, SseClient
from tests.support.logs import Lines, captured
from tests.support.replicas import Cluster, asked_peers, dies_after_the_body, frames_of
from tests.support.status import told
from tests.support.workbench import Stand, eventually, later


async def at(stand: Stand, client: LegacyClient) -> LegacyClient:
    """Have the client's further requests reach this replica."""
    client.url = f"http://{stand.gateway.listen}/{client.url.split('/', 3)[3]}"
    return client


async def test_any_replica_serves_any_request_of_a_session(cluster: Cluster, sse_server: FakeSse) -> None:
    sse_server.tool = silent
    one, two = await cluster.begin("gw-1", "gw-2", **before(sse_server))
    client = await at(two, await LegacyClient(one).initialize())
    calling = later(client.call())
    await sse_server.heard(mcp.TOOLS_CALL)
    ask(sse_server)
    call = await calling
    asked = await call.message()
    assert await client.answer(asked) == 202
    await sse_server.heard("answer")
    finish(sse_server)
    assert await call.rest() == [answer()]
    stream = await client.listen()
    sse_server.streams[0].say(method=mcp.TOOLS_CHANGED)
    assert (await stream.message())["method"] == mcp.TOOLS_CHANGED
    assert [stand.metric(SESSIONS) for stand in (one, two)] == [1, 0]
    assert len(sse_server.streams) == 1
    assert await client.end() == 200
    assert await stream.rest() == []
    assert (await client.post({"id": 9, "method": "ping"}))[0] == 404
    assert set(asked_peers(two)) == {"served"}


async def test_a_client_comes_back_through_another_replica(cluster: Cluster, sse_server: FakeSse) -> None:
    sse_server.tool = silent
    one, two = await cluster.begin("gw-1", "gw-2", **before(sse_server))
    client = await LegacyClient(one).initialize()
    calling = later(client.call())
    await sse_server.heard(mcp.TOOLS_CALL)
    ask(sse_server)
    call = await calling
    asked = await call.message()
    call.close()
    _ = await at(two, client)
    again = await client.listen(call.last)
    assert await client.answer(asked) == 202
    await sse_server.heard("answer")
    finish(sse_server)
    assert await again.rest() == [answer()]
    assert await client.end() == 200


async def test_messages_of_http_sse_reach_the_replica_that_has_the_stream(
    cluster: Cluster, upstream: FakeUpstream
) -> None:
    http = {"route": {"upstream": {"url": upstream.url, "transport": "streamable-http"}}}
    one, two = await cluster.begin("gw-1", "gw-2", **http)
    client = await SseClient(one).connect()
    _ = await at(two, client)
    assert (await client.post(client.begin_message()))[0] == 202
    assert (await client.stream.message())["id"] == 0
    assert (await client.post({"id": 1, "method": mcp.TOOLS_LIST}))[0] == 202
    assert (await client.stream.message())["id"] == 1
    client.stream.close()
    await eventually(lambda: one.metric(SESSIONS) == 0)
    assert (await client.post({"id": 2, "method": "ping"}))[0] == 404


async def test_another_caller_gets_nothing_at_another_replica(cluster: Cluster, sse_server: FakeSse) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **before(sse_server))
    client = await at(two, await LegacyClient(one, authorization="Bearer ann").initialize())
    client.headers["Authorization"] = "Bearer bob"
    assert (await client.post({"id": 1, "method": "ping"}))[0] == 404
    assert asked_peers(two) == {}
    client.headers["Authorization"] = "Bearer ann"
    assert await client.end() == 200


async def test_a_session_whose_replica_died_does_not_exist(cluster: Cluster, sse_server: FakeSse) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **before(sse_server))
    client = await at(two, await LegacyClient(one).initialize())
    await cluster.crash(one)
    assert (await client.post({"id": 1, "method": "ping"}))[0] == 404
    assert (await client.listen()).status == 404
    assert await client.end() == 404
    again = await LegacyClient(two).initialize()
    assert await again.end() == 200


async def test_a_session_of_a_former_process_does_not_exist(cluster: Cluster, sse_server: FakeSse) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **before(sse_server))
    client = await LegacyClient(one).initialize()
    await cluster.crash(one)
    again = await cluster.start("gw-1", cluster.peers["gw-1"], **before(sse_server))
    for stand in (again, two):
        _ = await at(stand, client)
        assert (await client.post({"id": 1, "method": "ping"}))[0] == 404
    assert asked_peers(two) == {"gone": 1}


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_call_gets_one_error_when_the_replica_that_has_its_session_dies(
    is_streaming: bool,  # noqa: FBT001  (a parameter)
    cluster: Cluster,
    sse_server: FakeSse,
) -> None:
    sse_server.tool = silent
    logs = captured()
    one, two = await cluster.begin("gw-1", "gw-2", **before(sse_server))
    client = await at(two, await LegacyClient(one).initialize())
    calling = later(client.call())
    await sse_server.heard(mcp.TOOLS_CALL)
    listening = await client.listen()
    if is_streaming:
        ask(sse_server, stream=0)
        call = await calling
        assert (await call.message())["id"] == "q"
        await cluster.crash(one)
    else:
        await cluster.crash(one)
        call = await calling
        assert call.status == 200
    body = await call.response.read() if not is_streaming else b""
    messages = [json.loads(body)] if body else await call.rest()
    assert [(each["id"], each["error"]["data"]["reason"]) for each in messages] == [(1, "call_lost")]
    assert len(await sse_server.heard(mcp.TOOLS_CALL)) == 1, "it is not sent again"
    with pytest.raises(aiohttp.ClientPayloadError):
        _ = await listening.rest()
    (line,) = logs("peer.failed")
    assert (line["reason"], line["cause"]) == ("call_lost", messages[0]["error"]["message"])
    assert "The replica gw-1, which has this session," in line["cause"], "the end of the stream is nobody's failure"
    ends = {each["cause"].partition(";")[0] for each in logs("upstream.failed")}
    assert ends <= {"The server ended the session"}, "which only the dead one may say, whose connections broke"
    status = await told(two)
    assert [(error.kind, error.text) for error in status.errors] == [("call_lost", line["cause"])]
    assert status.routes[0].last_failure is None, "the server did not fail"


async def begun_at(cluster: Cluster, server: FakeSse, fake: FakeHttp) -> LegacyClient:
    """A session of gw-1, in whose place a fake stands now, with a client at gw-2."""
    one, two = await cluster.begin("gw-1", "gw-2", **before(server))
    client = await at(two, await LegacyClient(one).initialize())
    await cluster.crash(one)
    await cluster.fake(fake, int(cluster.peers["gw-1"].rpartition(":")[2]))
    return client


async def test_a_reply_that_was_complete_gets_no_error_when_the_replica_dies(
    cluster: Cluster, sse_server: FakeSse
) -> None:
    async def dies_before_the_end(asked: Asked) -> None:
        await asked.take()
        await asked.begin()
        await asked.say(Head(200, (), streamed=True), Data(sse.encode(json.dumps(answer()).encode())))
        asked.die()

    peer = FakePeer(dies_before_the_end, mortal=True)
    client = await begun_at(cluster, sse_server, peer)
    assert await (await client.call()).rest() == [answer()]
    assert peer.kinds == ["session"]


async def test_a_request_is_sent_once_to_a_replica_that_breaks_off(cluster: Cluster, sse_server: FakeSse) -> None:
    peer = FakePeer(dies_after_the_body)
    client = await begun_at(cluster, sse_server, peer)
    status, _, (error,) = await client.post(client.call_message())
    assert (status, error["id"], error["error"]["data"]["reason"]) == (200, 1, "call_lost")
    assert peer.kinds == ["session"]


async def test_a_replica_that_does_not_react_may_still_have_the_session(
    cluster: Cluster, sse_server: FakeSse, log_lines: Lines
) -> None:
    client = await begun_at(cluster, sse_server, Silent())
    status, headers, (error,) = await client.post(client.call_message())
    assert (status, error["error"]["data"]["reason"]) == (200, "owner_stalled")
    assert headers["Retry-After"]
    says = "The replica gw-1 that has this session does not react; send the request again"
    assert error["error"]["message"] == says
    (line,) = log_lines("peer.failed")
    assert (line["reason"], line["cause"]) == ("owner_stalled", says)


async def test_a_replica_that_refuses_a_request_of_its_session_says_why(
    cluster: Cluster, sse_server: FakeSse, log_lines: Lines
) -> None:
    async def refuses(asked: Asked) -> None:
        await asked.refuse(403, formatdate(time.time() + 120, usegmt=True))

    client = await begun_at(cluster, sse_server, FakePeer(refuses))
    _, _, (error,) = await client.post(client.call_message())
    assert "refuses requests from gw-2 (HTTP 403): its clock is" in error["error"]["message"]
    (line,) = log_lines("peer.failed")
    assert line["fix"].startswith("gw-1's clock is")


@pytest.mark.parametrize("to", ["gw-2", "gw-3"])
async def test_a_forwarded_request_goes_no_further(to: str, cluster: Cluster, sse_server: FakeSse) -> None:
    one, _ = await cluster.begin("gw-1", "gw-2", **before(sse_server))
    client = await LegacyClient(one).initialize()
    raw = tuple((name.encode(), value.encode()) for name, value in client.headers.items())
    body = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
    peer_request = PeerRequest(
        kind="session", to=to, issued=time.time(), nonce=messages.nonce(), path="/mcp", headers=raw, body=body
    )
    frames = await frames_of(cluster, "gw-2", peer_request)
    assert any(isinstance(frame, messages.Gone) for frame in frames)
    assert await client.end() == 200
