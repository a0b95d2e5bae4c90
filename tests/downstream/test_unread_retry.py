"""Retries that this replica forwards without reading them: who checks what."""

import json
import re
from typing import Any

import pytest

from gateway.cluster.peer_client import PeerClient
from gateway.downstream.unread_retry import UnreadRetry, glance
from gateway.protocol import mcp
from gateway.seal.request_state import Sealer
from tests.cluster.conftest import cluster
from tests.cluster.test_peer_exchange import forward
from tests.downstream.test_fast_path_request import LABELS, reply, request
from tests.parts.launch import free_port
from tests.support.fake_upstream import FakeUpstream
from tests.support.raw_connection import RawConnection, raw_connection
from tests.support.replicas import (
    TWICE,
    Cluster,
    ask,
    asked_peers,
    operations,
    orphan,
    retry_params,
    sample,
    steps,
)
from tests.support.workbench import ACCEPT, Stand

__all__ = ["cluster"]
BOUND = {"forward_headers": ["x-api-key"], "bind_headers": ["x-api-key"]}
STATE = "mrtr1.12345678.abc"


def retry(params: object = None, **members: object) -> bytes:
    params = {"name": "t", "requestState": STATE} if params is None else params
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params} | members).encode()


def test_a_glance_finds_the_method_and_the_state() -> None:
    seen = glance(retry(), 2)
    assert seen is not None
    assert (seen.method, seen.state) == ("tools/call", STATE)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        retry({"name": "t"}),
        retry({"name": "t", "requestState": "of another server"}),
        retry({"name": "t", "arguments": {"requestState": STATE}}),
        retry({"name": STATE, "requestState": 1}),
        retry([STATE]),
        retry(method=1),
        retry().replace(b'"id": 1, ', b""),
        retry()[:-1],
        retry() + b"}",
        retry().replace(b'"t"', b"[" * 10_000 + b"]" * 10_000),
        retry({"name": "t" * 70_000, "requestState": STATE}),
        retry({"name": "t", "arguments": [[]] * 62, "requestState": STATE}),
    ],
    ids=str,
)
def test_a_glance_leaves_everything_else_to_the_reader(body: bytes) -> None:
    assert glance(body, 64) is None


def body_of(stand: Stand, params: dict[str, Any]) -> bytes:
    return stand.client().build("tools/call", params)[1]


def compact(body: bytes) -> bytes:
    return json.dumps(json.loads(body), separators=(",", ":")).encode()


async def replies(raw: RawConnection, sent: bytes, count: int = 4) -> list[tuple[int, Any]]:
    """Send a request again and again: from the third time on, its head is known."""
    found = []
    for _ in range(count):
        await raw.send(sent)
        head, body = await reply(raw)
        said = json.loads(body)
        said.get("error", {}).get("data", {}).pop("requestId", None)
        found.append((int(head.split(b" ")[1]), said))
    return found


async def test_a_retry_is_not_read_where_it_is_forwarded(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    seen = []

    def look() -> bool:
        seen[:] = two.gateway.downstream._direct
        return bool(seen)

    number = await forward(upstream, one, two, look)
    (retry,) = seen
    assert isinstance(retry.round, UnreadRetry)
    assert retry.incoming.opened is None
    assert steps(two) == {"forwarded": number}
    assert two.metric("mcp_server_operation_duration_seconds_count", **LABELS) == number
    assert operations(one, "complete") == 0, "the replica of the client counts"


async def test_a_retry_of_a_call_that_is_held_here_is_opened_once(
    upstream: FakeUpstream, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseal, states = Sealer.unseal, []

    def spy(self: Sealer, state: str, now: float) -> Any:
        states.append(state)
        return unseal(self, state, now)

    monkeypatch.setattr(Sealer, "unseal", spy)
    upstream.tool(ask)
    asked = await stand.client().call()
    sent = request(stand, body=body_of(stand, retry_params(asked)))
    async with raw_connection(stand) as raw:
        assert [status for status, _ in await replies(raw, sent)] == [200] * 4
    assert states == [asked.state] * 4


OTHER_TARGET = {"Mcp-Name: tool": "Mcp-Name: other", '"name":"tool"': '"name":"other"'}
MISMATCH, PARAMS, REQUEST, JSON = -32020, -32602, -32600, -32700


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (OTHER_TARGET, PARAMS),
        ({"Mcp-Name: tool": "Mcp-Name: other"}, MISMATCH),
        ({"Mcp-Method: tools/call": "Mcp-Method: prompts/get"}, MISMATCH),
        ({'"method":"tools/call"': '"method":"tools/call","method":"tools/call"'}, REQUEST),
        ({'"jsonrpc":"2.0"': '"jsonrpc":"1.0"'}, REQUEST),
        ({'"arguments":{}': '"arguments":{"a":1e999}'}, PARAMS),
        ({'"inputResponses":{': '"inputResponses":{"x":1,'}, PARAMS),
        ({'"id":"c': '"id":null,"x":"c'}, REQUEST),
        ({'"_meta":{': '"meta":{'}, PARAMS),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_the_owner_refuses_a_retry_as_the_other_replica_would(
    upstream: FakeUpstream, cluster: Cluster, changes: dict[str, str], code: int
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)
    asked = await one.client().call()
    sent = changed(request(two, body=compact(body_of(two, retry_params(asked)))), changes)
    async with raw_connection(two) as raw:
        found = await replies(raw, sent)
    assert found == [found[0]] * 4
    assert (found[0][0], found[0][1]["error"]["code"]) == (400, code)
    assert asked_peers(two) == {"served": 2}, "the first two are read here, since their head is not known yet"
    assert (rejected(one), rejected(two)) == (2, 2)
    assert not upstream.of("answer")
    assert json.loads((await two.client().answer(asked)).text) == ACCEPT


def changed(sent: bytes, changes: dict[str, str]) -> bytes:
    head, _, body = sent.partition(b"\r\n\r\n")
    for old, new in changes.items():
        assert (head + body).count(old.encode()) == 1, old
        head, body = (part.replace(old.encode(), new.encode()) for part in (head, body))
    return re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head) + b"\r\n\r\n" + body


def rejected(stand: Stand) -> int:
    """The requests and the states that this replica refused."""
    names = ("mcp_gateway_state_rejected_total", "mcp_gateway_downstream_rejected_total")
    families = stand.gateway.metrics._registry.collect()
    return int(sum(each.value for family in families for each in family.samples if each.name in names))


@pytest.mark.parametrize(
    ("route", "first", "second", "reason"),
    [
        ({}, ("Authorization: Bearer a",), ("Authorization: Bearer b",), "other_principal"),
        (BOUND, ("x-api-key: a",), ("x-api-key: b",), "other_headers"),
        (BOUND, ("x-api-key: a",), (), "other_headers"),
    ],
)
async def test_the_retry_of_another_caller_is_not_forwarded(
    upstream: FakeUpstream,
    cluster: Cluster,
    route: dict[str, Any],
    first: tuple[str, ...],
    second: tuple[str, ...],
    reason: str,
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", route=route)
    upstream.tool(ask)
    asked = await one.client(headers=dict(line.split(": ") for line in first)).call()
    body = body_of(two, retry_params(asked))
    async with raw_connection(two) as raw:
        found = await replies(raw, request(two, *second, body=body))
        assert [status for status, _ in found] == [400] * 4
        assert sample(two, "mcp_gateway_state_rejected_total", reason=reason) == 4
        assert asked_peers(two) == {}
        found = await replies(raw, request(two, *first, body=body))
        assert [status for status, _ in found] == [200] * 4
    assert asked_peers(two) == {"served": 4}
    assert len(upstream.of("answer")) == 1


async def test_a_dead_owners_retry_is_read_before_its_call_is_taken_over(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": f"127.0.0.1:{free_port()}"}, **TWICE)
    upstream.tool(ask)
    asked = await orphan(one, "gw-2", "gw-1")
    calls, before = len(upstream.of("tools/call")), rejected(one)
    sent = request(one, body=compact(body_of(one, retry_params(asked))))
    async with raw_connection(one) as raw:
        found = await replies(raw, changed(sent, {"Mcp-Name: tool": "Mcp-Name: other"}))
        assert [said["error"]["code"] for _, said in found] == [MISMATCH] * 4
        assert asked_peers(one) == {"dead": 2}, "the first two are refused at once, since their head is not known yet"
        assert (len(upstream.of("tools/call")), steps(one)) == (calls, {})
        assert (rejected(one) - before, operations(one, "rejected")) == (4, 0)
        found = await replies(raw, sent, 1)
    assert json.loads(found[0][1]["result"]["content"][0]["text"]) == ACCEPT
    assert steps(one) == {"replayed": 1}


async def test_a_retry_of_a_dead_owner_is_counted_once(upstream: FakeUpstream, cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": f"127.0.0.1:{free_port()}"}, **TWICE)
    upstream.tool(ask)
    async with raw_connection(one) as raw:
        for number in (1, 2, 3, 4):
            asked = await orphan(one, "gw-2", "gw-1")
            await raw.send(request(one, body=body_of(one, retry_params(asked))))
            assert b" 200 " in (await reply(raw))[0]
            assert operations(one, "complete") == number


async def test_a_retry_is_read_if_its_owner_has_to_be_looked_up(
    upstream: FakeUpstream, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    monkeypatch.setattr(PeerClient, "begin", lambda *_: None)
    upstream.tool(ask)
    asked = await one.client().call()
    async with raw_connection(two) as raw:
        found = await replies(raw, request(two, body=body_of(two, retry_params(asked))))
    assert [json.loads(said["result"]["content"][0]["text"]) for _, said in found] == [ACCEPT] * 4
    assert steps(two) == {"forwarded": 4}
    assert (operations(two, "complete"), operations(two, "error")) == (4, 0)


async def test_a_retry_that_may_be_nested_too_deep_is_read_first(upstream: FakeUpstream, cluster: Cluster) -> None:
    """The replica that holds the call may have another limit, or be of a version that relies on this one."""
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)
    asked = await one.client().call()
    deep = {'"arguments":{}': '"arguments":' + '{"a":' * 70 + "1" + "}" * 70}
    async with raw_connection(two) as raw:
        found = await replies(raw, changed(request(two, body=compact(body_of(two, retry_params(asked)))), deep))
    assert [(status, said["error"]["code"]) for status, said in found] == [(400, JSON)] * 4
    assert (asked_peers(two), rejected(two)) == ({}, 4)
    assert json.loads((await two.client().answer(asked)).text) == ACCEPT


async def test_the_version_of_a_retry_is_a_label_only_if_the_gateway_speaks_it(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)
    asked = await one.client().call()
    sent = request(two, body=compact(body_of(two, retry_params(asked))))
    async with raw_connection(two) as raw:
        for version in ("2026-07-29", "x" * 100):
            found = await replies(raw, changed(sent, {f"Version: {mcp.MODERN}": f"Version: {version}"}))
            assert [status for status, _ in found] == [400] * 4
        assert asked_peers(two) == {}, "this replica speaks no such version, so it asks no other"
        assert [status for status, _ in await replies(raw, sent)] == [200] * 4
    assert {versions for stand in (one, two) for versions in labels(stand)} <= {*mcp.SUPPORTED_VERSIONS, ""}


def labels(stand: Stand) -> set[str]:
    """The versions that label a metric."""
    families = stand.gateway.metrics._registry.collect()
    return {each.labels.get("protocol_version", "") for family in families for each in family.samples}
