"""A client that follows SEP-1442 line by line; it sends each message to another replica."""

import itertools
from collections.abc import Sequence
from typing import Any, Final

from gateway.protocol import mcp
from tests.support.legacy_client import Json, LegacyClient, Opening, Served

VERSION: Final = "modelcontextprotocol.io/mcpProtocolVersion"
CAPABILITIES: Final = "modelcontextprotocol.io/clientCapabilities"


class PaperClient(LegacyClient):
    """One client, with or without a session; without capabilities it declares none."""

    def __init__(self, stands: Sequence[Served], version: str = "2025-06-18", **options: Any) -> None:
        super().__init__(stands[0], version, **options)
        self._urls = itertools.cycle([stand.url for stand in stands])
        self.headers[mcp.PROTOCOL_VERSION] = version

    def open(self, message: Json | bytes, url: str | None = None) -> Opening:
        return super().open(message, url or next(self._urls))

    def request(self, method: str, params: Json | None = None, meta: Json | None = None, id_: Any = None) -> Opening:
        declared = {} if self.capabilities is None else {CAPABILITIES: self.capabilities}
        own = {VERSION: self.version, **declared, **(meta or {})}
        return super().request(method, {**(params or {}), "_meta": own}, id_=id_)

    def call(self, name: str, meta: Json | None = None, id_: Any = None) -> Opening:
        return self.request(mcp.TOOLS_CALL, {"name": name, "arguments": {}}, meta, id_)

    async def ask(self, method: str, params: Json | None = None, meta: Json | None = None) -> tuple[int, Json]:
        """Send a request; return the status and the first message of its reply."""
        async with self.request(method, params, meta) as stream:
            return stream.status, await stream.message()

    async def initialize(self) -> Json:
        """Begin a session, which the paper has as an option; return what the server says of itself."""
        _, message = await self.ask(mcp.INITIALIZE, self.begin_message()["params"])
        result: Json = message["result"]
        self.headers[mcp.SESSION_ID] = result["sessionId"]
        return result

    async def refuse(self, question: Json) -> int:
        """Answer a question that this client cannot put to anybody."""
        error = {"code": -32601, "message": "Method not found"}
        return (await self.post({"id": question["id"], "error": error}))[0]

    async def notify(self, method: str, params: Json | None = None) -> int:
        return await super().notify(method, {**(params or {}), "_meta": {VERSION: self.version}})
