"""One request as its client sent it: how often its body is parsed."""

import pytest

from gateway.http import incoming
from gateway.protocol import request as modern
from gateway.seal.keyring import PREFIX
from tests.support.fake_upstream import FakeUpstream
from tests.support.garbage import cycles
from tests.support.workbench import Client, Stand


async def test_a_body_is_opened_once_however_many_ask(
    upstream: FakeUpstream, stand: Stand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bytes] = []

    def counting(body: bytes, max_depth: int) -> modern.ParsedBody:
        opened.append(body)
        return modern.read(body, max_depth)

    monkeypatch.setattr(incoming, "read", counting)
    asked = f"{PREFIX}.x"  # what looks like a state of ours is looked at even where requests are passed through
    bodies = [
        client.build("tools/call", {"name": "tool", "arguments": {}, "requestState": asked}),
        ({"Content-Type": "application/json"}, client.build("tools/list")[1]),
        ({"Content-Type": "application/json"}, b'{"jsonrpc": "2.0", "id": "\\n", "method": "ping"}'),
        ({"Content-Type": "application/json"}, b'{"jsonrpc": "2.0", "id": "\\n", "id": 2}'),
    ]
    for headers, body in bodies:
        async with stand.http.post(stand.url, headers=headers, data=body) as response:
            _ = await response.read()
    assert opened == [body for _, body in bodies]


async def test_a_body_that_can_only_be_legacy_is_not_opened(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "read", None)
    async with stand.http.post(stand.url, data=b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}') as response:
        assert response.status == 404, "the upstream's own answer to a ping without a session"


@pytest.mark.parametrize("body", [b"{", b"null", b"[" * 50_000, b'{"jsonrpc": "2.0", "id": 1, "id": 2}'], ids=range(4))
async def test_an_unreadable_body_is_freed_with_its_request(stand: Stand, body: bytes) -> None:
    with cycles() as found:
        async with stand.http.post(stand.url, headers={"Content-Type": "application/json"}, data=body) as response:
            assert response.status >= 400
            _ = await response.read()
        # Until the next request, aiohttp keeps what belonged to this one.
        async with stand.http.get(stand.url) as response:
            _ = await response.read()
    assert "gateway.http.incoming.Incoming" not in found
