"""Writes the messages that wait for a client to its reply, as they come."""

from collections.abc import Awaitable, Callable

from gateway.bridge.response_queue import FinalMessage, ResponseQueue
from gateway.cluster.peer_exchange import Replied
from gateway.http.reply import ReplyWriter
from gateway.protocol import sse
from gateway.runtime.pieces import Turn

Item = bytes | FinalMessage | None
"""What a queue gives: an event, the final message, or None if the client needs a keep-alive."""


async def write(
    queue: ResponseQueue,
    reply: ReplyWriter,
    first: Awaitable[Item] | None = None,
    *,
    keeps_alive: bool = True,
    encode: Callable[[bytes], bytes] = bytes,
) -> FinalMessage:
    """Write each message as an event until the final one, which is returned; the first may come from `first`."""
    queue.begin_writing(reply.share_unread)
    turn = Turn()
    try:
        item = await (first or queue.take())
        while not isinstance(item, FinalMessage):
            if item is not None or keeps_alive:
                if not reply.started:
                    await reply.start()
                await reply.write(sse.KEEP_ALIVE if item is None else encode(item))
            if queue.is_ready:
                await turn.give_way()
            item = await queue.take()
        return item
    finally:
        queue.end_writing()


async def finish(reply: ReplyWriter, last: FinalMessage, event: bytes = b"") -> Replied:
    """Write the final message, which may be empty: as one JSON body, or in a stream as `event` if that is given."""
    if last.body and not (event and reply.started):
        return await reply.whole(last.body, last.status, last.headers, last.ending), last.ending
    if not reply.started:
        await reply.start()
    if last.body:
        await reply.write(event)
    return await reply.end(last.ending), last.ending
