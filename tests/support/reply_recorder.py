"""A listener that records what it hears of a reply."""

import asyncio
from collections.abc import Callable, Mapping

from yarl import URL

from gateway.http_client.client import HttpClient
from gateway.http_client.connection import PendingRequest
from gateway.http_client.errors import RequestFailed
from gateway.http_client.origin import Origin
from gateway.http_client.reply_head import ReplyHead
from gateway.http_client.request_head import RequestHead

DEADLINE = 20.0
COMPLETE = ["head", "body", "end"]
"""What is heard of a whole reply with a body."""


def raises_at(when: str) -> Callable[[str], None]:
    """What a recorder does that raises in the method of this word."""

    def react(word: str) -> None:
        if word == when:
            raise LookupError(word)

    return react


class Recorder:
    """What was heard of one reply."""

    def __init__(self) -> None:
        self.words: list[str] = []
        """The methods that were called; parts of one body count once."""
        self.head: ReplyHead
        self.parts: list[bytes] = []
        self.failure: RequestFailed | None = None
        self.react: Callable[[str], None] = lambda word: None
        """Called at the end of each method."""
        self._changed = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def on_head(self, head: ReplyHead, /) -> None:
        self.head = head
        self._note("head")

    def on_body(self, data: bytes, /) -> None:
        assert data
        self.parts.append(data)
        self._note("body")

    def on_end(self) -> None:
        self._note("end")

    def on_whole(self, head: ReplyHead, body: bytes, /) -> None:
        self.on_head(head)
        self.on_body(body)
        self.on_end()

    def on_failed(self, failure: RequestFailed, /) -> None:
        self.failure = failure
        self._note("failed")

    def _note(self, word: str) -> None:
        assert not {"end", "failed"} & set(self.words), f"{word} after {self.words}"
        if self.words[-1:] != [word]:
            self.words.append(word)
        self._changed.set()
        self.react(word)

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until what was heard fulfils a condition."""
        async with asyncio.timeout(DEADLINE):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def over(self) -> None:
        """Wait until the reply has ended or failed."""
        await self.until(lambda: {"end", "failed"} & set(self.words))


class Sender:
    """Sends requests to one URL."""

    def __init__(self, client: HttpClient, url: str, origin: Origin | None = None) -> None:
        self.client = client
        self.url = URL(url)
        self.origin = origin or Origin.of(self.url)

    def begin(
        self,
        method: str = "POST",
        body: bytes = b"{}",
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float = DEADLINE,
        is_lenient: bool = False,
        is_repeatable: bool = False,
    ) -> tuple[Recorder, PendingRequest]:
        """Begin a request."""
        recorder = Recorder()
        head = RequestHead(method, self.url)
        pending = PendingRequest(
            self.origin,
            recorder,
            head.encoded(headers or {}, len(body)),
            body,
            seconds,
            method=method,
            is_lenient=is_lenient,
            sending="repeatable" if is_repeatable else "usual",
        )
        self.client.begin(pending)
        assert recorder.words == [], "the listener was called before begin returned"
        return recorder, pending

    async def send(
        self, method: str = "POST", body: bytes = b"{}", headers: Mapping[str, str] | None = None
    ) -> Recorder:
        """Send a request and wait for the end of its reply."""
        recorder, _ = self.begin(method, body, headers)
        await recorder.over()
        return recorder
