"""The standalone GET stream of a session over streamable HTTP.

Source: specification 2025-11-25 basic/transports (Listening for Messages from the Server). A server sends there what
belongs to no request. The gateway never resumes this stream from an event id, because its events may belong to a
request that has ended.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from gateway.http.client import REDIRECTS
from gateway.protocol import sse
from gateway.protocol.errors import UpstreamError
from gateway.upstream.batches import hand_over
from gateway.upstream.channel import Headers, SideListener
from gateway.upstream.http_errors import RetryLater
from gateway.upstream.http_upstream import HttpUpstream

_STABLE_SECONDS: Final = 1.0
"""A stream that lasted longer than this may be opened again at once; others would hammer the server."""


class StandaloneStream:
    """Keeps the GET stream of one session open."""

    def __init__(self, upstream: HttpUpstream, get_headers: Callable[[Headers], dict[str, str]]) -> None:
        """`get_headers` completes the headers of a GET."""
        self.is_open = False
        self._client, self._endpoint, self._tasks, self._times = upstream
        self._get_headers = get_headers
        self._was_open = False
        """Whether there ever was a stream; `is_open` may be a guess."""
        self._is_closing = False
        self._head: asyncio.Future[None]
        """Done when the server answered the first GET."""
        self._task: asyncio.Task[None] | None = None

    async def open(self, headers: Headers, listener: SideListener) -> None:
        """Open the stream and keep it open until `close`."""
        self._head = asyncio.get_running_loop().create_future()
        self._task = self._tasks.start(self._keep(headers, listener), "side stream")
        # Not `wait_for`: if it is cancelled in the moment the future completes, it swallows the cancellation
        # (Python 3.11), and a call whose client has left would run on.
        _ = await asyncio.wait((self._head,), timeout=self._times.side_head_seconds)
        if not self._head.done():
            self.is_open = True

    def stop_reporting(self) -> None:
        """The session is about to end: the end of the stream is no news for its listener."""
        self._is_closing = True

    def close(self) -> None:
        """Close the stream."""
        if self._task is not None:
            self._task.cancel()

    async def _keep(self, headers: Headers, listener: SideListener) -> None:
        """Read the stream, and open it again when it ends."""
        pauses = self._times.reopen_seconds
        failures = attempts = 0
        try:
            while failures < len(pauses):
                await asyncio.sleep(pauses[failures])
                started = time.monotonic()
                try:
                    attempts += 1
                    if not await self._read(headers, listener, again=attempts > 1):
                        return  # the server does without this stream
                except RetryLater:
                    failures += 1
                    continue
                except (UpstreamError, sse.EventTooLarge):
                    pass
                finally:
                    self.is_open = False
                self._note_head()
                failures = 0 if time.monotonic() - started > _STABLE_SECONDS else failures + 1
        finally:
            self._note_head()
            if not self._is_closing:
                if self._was_open:
                    listener.lost()
                listener.changed(False)

    def _note_head(self) -> None:
        if not self._head.done():
            self._head.set_result(None)

    async def _read(self, headers: Headers, listener: SideListener, *, again: bool) -> bool:
        """Read one GET stream until it ends; return whether another may be opened."""
        endpoint = self._endpoint
        newest = self._get_headers(headers)
        async with self._client.exchange("GET", endpoint.url, newest, b"", endpoint.where) as response:
            if response.status in REDIRECTS:
                # A process that did not open the session does not know the redirect yet.
                endpoint.follow(response.headers.get("Location"))
                raise RetryLater(f"{endpoint.where} redirected")
            if response.status == 409:
                # The server may still count the stream of a dead process as open.
                raise RetryLater(f"{endpoint.where} takes another side stream for open")
            if response.status != 200 or response.content_type != "text/event-stream":
                return False
            self.is_open = self._was_open = True
            self._note_head()
            if again:
                listener.changed(True)
            parser = sse.Parser(self._client.limits.event_bytes)
            async for chunk in response:
                for event in parser.feed(chunk):
                    if event.data:
                        _ = hand_over(event.data, listener.receive)
        return True
