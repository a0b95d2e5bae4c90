"""Writes the messages that wait for a client to its reply, as they come."""

from collections.abc import Awaitable, Callable

from gateway.http.outbox import FinalMessage, Item, Outbox
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.protocol import sse
from gateway.runtime.pieces import Turn


async def write(
    outbox: Outbox,
    reply: ReplyWriter,
    first: Awaitable[Item] | None = None,
    *,
    keeps_alive: bool = True,
    encode: Callable[[bytes], bytes] = bytes,
) -> FinalMessage:
    """Write each message as an event until the final one, which is returned; the first may come from `first`."""
    outbox.begin_writing(reply.share_unread)
    turn: Turn | None = None
    try:
        item = await (first or outbox.take())
        while not isinstance(item, FinalMessage):
            if item is not None or keeps_alive:
                if not reply.started:
                    await reply.start()
                await reply.write(sse.KEEP_ALIVE if item is None else encode(item))
            if outbox.is_ready:
                turn = turn or Turn()
                await turn.give_way()
            item = await outbox.take()
        return item
    finally:
        outbox.end_writing()


async def finish(reply: ReplyWriter, last: FinalMessage, event: bytes = b"") -> Response:
    """Write the final message, which may be empty: as one JSON body, or in a stream as `event` if that is given."""
    if last.body and not (event and reply.started):
        return await reply.whole(last)
    if not reply.started:
        await reply.start()
    if last.body:
        await reply.write(event)
    return await reply.end(last.ending)
