"""A toy face: its clients call the gateway as objects of one process. It shows all that a new face needs."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.config import parse
from gateway.http.incoming import Caller, Incoming
from gateway.http.outbox import FinalMessage, error_response
from gateway.http.reply import MessageReply
from gateway.http.server.response import Response, WholeResponse
from gateway.protocol import mcp
from gateway.protocol.errors import TooLarge
from gateway.runtime.budget import Share
from gateway.server.process import Gateway
from tests.stories.faces import Client, Diary, Left, Lines, Play, line_of, rounds
from tests.stories.server import Json
from tests.support.host import modern
from tests.support.workbench import DEADLINE, configuration

MEMORY = Caller(b"memory", None)


class MemoryReply(MessageReply):
    """Its reader takes the messages from a queue."""

    def __init__(self, gateway: Gateway, event_bytes: int) -> None:
        super().__init__(event_bytes)
        self._unread = gateway.routes.process.traffic.sending
        self.messages: asyncio.Queue[Json] = asyncio.Queue()

    def share_unread(self) -> Share:
        return self._unread.share(lambda: None)

    async def take(self, message: bytes) -> None:
        self.messages.put_nowait(json.loads(message))

    async def only(self, final: FinalMessage) -> Response:
        await self.take(final.body)
        return WholeResponse()


@asynccontextmanager
async def modern_memory(sections: Json, _: pytest.MonkeyPatch) -> AsyncIterator[Play]:
    """A modern face; each story has a gateway of its own."""

    async def played(told: Client, steps: Lines, diary: Diary) -> None:
        config = parse(configuration("", **sections), "test", {})
        gateway = Gateway(config, serves_host=True)
        (live,) = gateway.routes.live.values()
        ids = itertools.count(1)

        async def send(params: Json) -> Json:
            meta = {**params["_meta"], mcp.META_LOG_LEVEL: "info", mcp.META_CAPABILITIES: told.capabilities}
            given = {name: value for name, value in params.items() if name != "_meta"}
            request = modern(mcp.TOOLS_CALL, next(ids), meta=meta, **given)
            body = json.dumps({"jsonrpc": "2.0", **request}).encode()
            if len(body) > live.config.limits.body_bytes:  # the bounds of what arrives are a face's own
                error: Json = json.loads(error_response(None, TooLarge("The message is too large")))
                return error
            incoming = Incoming(
                live.route.path,
                CIMultiDictProxy(CIMultiDict()),
                None,
                body,
                request_id=str(request["id"]),
                has_headers=False,
                caller=MEMORY,
            )
            reply = MemoryReply(gateway, live.config.limits.event_bytes)
            serving = asyncio.ensure_future(gateway.downstream.handle_message(incoming, reply, live))
            try:
                async with asyncio.timeout(DEADLINE):
                    while "method" in (message := await reply.messages.get()):
                        diary.note(line_of(message))
                    _ = await serving
            except Left:  # which cancels, as closing a reply of HTTP does
                serving.cancel()
                raise
            return message

        try:
            await rounds(send, told, steps, diary)
        except Left:
            await diary.server_heard()
        finally:
            await gateway.close()

    yield played
