"""One request of a legacy client on its way: its message, with the headers that go upstream."""

from types import SimpleNamespace
from typing import Any

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.config import Route, Upstream
from gateway.http.incoming import Caller, Incoming
from gateway.legacy_front.arrival import Arrival


def test_a_name_from_anybody_else_goes_to_no_server() -> None:
    sent = CIMultiDictProxy(CIMultiDict({"x-user": "ann", "x-tenant": "a"}))
    ping = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
    upstream = Upstream(url="http://upstream/mcp")
    live: Any = SimpleNamespace(route=Route(path="/mcp", upstream=upstream, forward_headers=("x-user", "x-tenant")))
    reply: Any = None
    for distrusted, expected in ((None, {"x-user": "ann", "x-tenant": "a"}), ("x-user", {"x-tenant": "a"})):
        arrival = Arrival(Incoming("/mcp", sent, None, ping), reply, live, Caller(b"", distrusted))
        assert arrival.message().headers == expected
