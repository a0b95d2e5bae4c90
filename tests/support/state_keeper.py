"""What a client keeps for one server, as SEP-1655 says it, line by line."""

import ipaddress
from typing import Any, Final

import aiohttp

from tests.support.workbench import ALL, Client, Reply

Json = dict[str, Any]
PREFIX: Final = "modelcontextprotocol.io/state/"
SESSION: Final = PREFIX + "session"
SERVER: Final = PREFIX + "server"
CAPABILITY: Final[Json] = {"state": {}}


class StateKeeper:
    """The state of one server, which the client knows by the domain name `host`."""

    def __init__(self, host: str = "gateway.example.com") -> None:
        """Tests reach the gateway by its address, and a client MUST NOT keep state for one: they give it a name."""
        self._keeps = _is_domain(host)
        self.kept: dict[str, Json] = {SESSION: {}, SERVER: {}}

    @property
    def meta(self) -> Json:
        """The `_meta` of every request; a key without state SHOULD NOT be sent."""
        return {key: state for key, state in self.kept.items() if state}

    def hear(self, message: Json) -> None:
        """Keep what a result sets: a name overwrites the whole value, null deletes it, all others stay."""
        result = message.get("result")
        if not (self._keeps and isinstance(result, dict)):
            return
        for key, state in self.kept.items():
            for name, value in result.get("_meta", {}).get(key, {}).items():
                if value is None:
                    state.pop(name, None)
                else:
                    state[name] = value

    def begin_session(self) -> None:
        """Discard what ended with the session before."""
        self.kept[SESSION] = {}


def _is_domain(host: str) -> bool:
    try:
        _ = ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


class KeepingClient(Client):
    """A modern client that keeps state, and sends it with every request."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, authorization: str | None = "Bearer ada", **options: Any
    ) -> None:
        super().__init__(http, url, authorization, **{"capabilities": {**ALL, **CAPABILITY}, **options})
        self.state = StateKeeper()

    async def post(self, method: str, params: Any = None, **options: Any) -> Reply:
        options["meta"] = {**self.state.meta, **options.get("meta", {})}
        reply = await super().post(method, params, **options)
        self.state.hear(reply.final)
        return reply
