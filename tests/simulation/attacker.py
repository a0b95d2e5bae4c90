"""An attacker who hears the whole network, and sends again what others have sent: peer messages as they were, and the
states of clients in requests of its own."""

import asyncio
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from tests.simulation import plain_http as http

if TYPE_CHECKING:
    from tests.simulation.history import History
    from tests.simulation.network import Connection

_HOST: Final = "10.0.2.1"
_CALLER: Final = "Bearer mallory"
_SECONDS: Final = 8.0
_OWN_HEADERS: Final = frozenset({"host", "content-length", "expect"})
_AT_ONCE: Final = 4
_NEWEST: Final = 12
_SECRETS: Final = (b'"result"', b"inputRequests")


@dataclass(frozen=True)
class Heard:
    """A request to a gateway."""

    method: str
    path: str
    headers: http.Headers
    body: bytes
    to: tuple[str, int]


class Attacker:
    """Remembers everything, and does harm when a fault says so."""

    def __init__(self, history: "History") -> None:
        self._history = history
        self._random = Random(f"attacker {history.plan.seed}")
        self._process = history.simulation.process("attacker", _HOST)
        self._arriving: dict[Connection, bytes] = {}
        self._messages: list[Heard] = []
        """Those between replicas."""
        self._retries: list[Heard] = []
        """Those of clients, with a state of a gateway."""
        history.network.watchers.append(self._hear)

    def _hear(self, connection: "Connection", is_to_server: bool, data: bytes) -> None:  # noqa: FBT001
        client, server = connection.ends
        if not is_to_server or not server.process.name.startswith("gw-") or client.process is self._process:
            return
        data = self._arriving.pop(connection, b"") + data
        while (found := http.first_request(data)) is not None:
            method, path, headers, body, data = found
            heard = Heard(method, path, headers, body, server.place)
            if heard.path.startswith("/peer"):
                self._messages.append(heard)
            elif heard.path == "/mcp" and b'"requestState"' in heard.body:
                self._retries.append(heard)
        if data:
            self._arriving[connection] = data

    def strike(self, number: int) -> None:
        """Send some of what was heard last to the replica that got it, or to another one."""
        for _ in range(_AT_ONCE):
            kinds = [each for each in (self._messages, self._messages, self._retries) if each]
            if not kinds:
                return
            heard = self._random.choice(self._random.choice(kinds)[-_NEWEST:])
            other = self._history.host(number), heard.to[1]
            work = self._send(heard, self._random.choice((heard.to, heard.to, other)))
            with self._process.running():
                self._process.keep(self._process.loop.create_task(work, name="attack"))

    async def _send(self, heard: Heard, to: tuple[str, int]) -> None:
        headers = {name: value for name, value in heard.headers.items() if name not in _OWN_HEADERS}
        if "authorization" in headers:
            headers["authorization"] = _CALLER
        try:
            async with asyncio.timeout(_SECONDS):
                reply = await http.request(to, heard.method, heard.path, headers, heard.body)
                try:
                    told = await reply.body()
                finally:
                    reply.close()
        except (OSError, TimeoutError, http.Broken):
            return
        if any(secret in told for secret in _SECRETS):
            self._history.outcome.learnt.append(f"{heard.method} {heard.path} of another told it {told[:200]!r}")
