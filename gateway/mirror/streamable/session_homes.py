"""What mirrored sessions have at their home replica: the standalone stream with the changes that it brings.

The client opens the stream again when it is lost with its home. A client of 2025-11-25 then names the last event id,
which carries the subscriptions of the session to the next home. An older client has no event ids, and must subscribe
again, as it would after a restart of a legacy server.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from gateway.http.outbox import Outbox
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.legacy_front.stream import ENDED
from gateway.mirror.change_subscription import Changes
from gateway.mirror.client_requests import DEFAULT_LEVEL
from gateway.mirror.server_client import RouteServer
from gateway.mirror.streamable.tokens import MirroredSession, NoSession, Tokens
from gateway.protocol import sse
from gateway.protocol.errors import InvalidParams, InvalidState, NotAllowed
from gateway.routes.live_route import LiveRoute
from gateway.runtime.budget import Budget
from gateway.runtime.fair_shares import FairTable
from gateway.seal.sep_1655_items import Item
from gateway.upstream.channel import Headers

_MAX_HOMES: Final = 10_000
_MAX_LEVELS: Final = 100_000
_MAX_ENDED: Final = 100_000


class Homes:
    """The sessions whose home this replica is."""

    def __init__(self, tokens: Tokens, budget: Budget) -> None:
        """`budget` limits what subscriptions take."""
        self.tokens = tokens
        self.budget = budget
        self._homes: FairTable[str, Home] = FairTable(_MAX_HOMES)
        self._levels: FairTable[str, Item] = FairTable(_MAX_LEVELS)
        self._ended: FairTable[str, None] = FairTable(_MAX_ENDED)

    def check(self, session: MirroredSession) -> None:
        """Raise NoSession if the client has ended the session, as far as this replica heard."""
        if session.key in self._ended:
            raise NoSession from InvalidState("ended")

    def of(self, session: MirroredSession, live: LiveRoute) -> "Home":
        """The home of a session; one of the caller that has the most makes room for a new one."""
        home = self._homes.get(session.key)
        if home is None or home.live.upstream is not live.upstream:  # a reload gave the path another upstream
            self.forget(session.key)
            home = Home(self, session, live)
        oldest = self._homes.keep(session.principal, session.key, home)
        if oldest is not None:
            oldest.close()
        return home

    def end(self, session: MirroredSession) -> None:
        """The client has ended the session."""
        self._ended.keep(session.principal, session.key, None)
        _ = self._levels.pop(session.key)
        self.forget(session.key)

    def forget(self, key: str) -> None:
        """Close the home of a session, if there is one."""
        home = self._homes.pop(key)
        if home is not None:
            home.close()

    def learn_level(self, session: MirroredSession, level: Item) -> None:
        """Remember a log level that the client kept, unless a newer one is known."""
        known = self._levels.get(session.key)
        if known is None or known.issued < level.issued:
            self.set_level(session, level)

    def set_level(self, session: MirroredSession, level: Item) -> None:
        """Remember the log level of a session."""
        _ = self._levels.keep(session.principal, session.key, level)

    def level(self, session: MirroredSession) -> str:
        """The log level of a session."""
        level = self._levels.get(session.key)
        return DEFAULT_LEVEL if level is None else level.value


class Home:
    """One session at its home (`routes.live_route.Endable`)."""

    def __init__(self, homes: Homes, session: MirroredSession, live: LiveRoute) -> None:
        self.live = live
        self._homes, self._session = homes, session
        server = RouteServer(live, session.principal)
        self._changes = Changes(server, live.process.tasks, session.profile, self._tell, self._end_stream)
        self._share = homes.budget.share(partial(homes.forget, session.key), session.principal)
        self._users = 0
        """Requests of the client that need the server's changes."""
        self._queue: Outbox | None = None
        self._had_stream = False

    def _tell(self, message: bytes) -> None:
        if self._queue is not None:
            self._queue.send(sse.encode(message))

    async def subscribe(self, method: str, uri: str, headers: Headers) -> None:
        """Serve resources/subscribe or resources/unsubscribe; raises GatewayError."""
        with self._in_use():
            await self._changes.change(method, uri, headers)
            self._share.hold(self._changes.uri_bytes)
            if self._queue is not None and self._session.profile.resumes:
                self._queue.send(self._prime())

    def _prime(self) -> bytes:
        """An event whose id says to what the session is subscribed."""
        return b"id: %b\ndata: \n\n" % self._homes.tokens.standalone_id(self._session, self._changes.uris).encode()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Listen to the server only as long as a stream or a request of the client needs it."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._changes.close()

    async def write(self, reply: ReplyWriter, headers: Headers, subscribed: Collection[str] | None = None) -> Response:
        """Write the standalone stream until the client leaves; raises GatewayError.

        `subscribed` is what the last event id says, if the client has come back with one.
        """
        if subscribed is not None:
            # A resource that was given up after that event is announced needlessly; none that is wanted is missed.
            self._had_stream = True
            self._changes.add(subscribed)
            self._share.hold(self._changes.uri_bytes)
        with self._in_use():
            try:
                honoured = await self._changes.listen(headers)
            except InvalidParams as exc:
                said = f"There is no standalone stream: {exc.message}"
                raise NotAllowed(said, allowed="POST, DELETE") from exc  # 405 is `no stream here` to clients
            self._share.hold(self._changes.uri_bytes)
            self._end_stream()  # only now: had the server refused, the stream before would go on
            live, queue = self.live, Outbox(self.live.deadlines.silence)
            queue.ask(self._prime() if self._session.profile.resumes else sse.KEEP_ALIVE)  # it begins the stream
            self._queue, live.upstream.streams[self] = queue, None
            if self._had_stream:
                self._changes.tell_all(honoured)  # what changed between two streams was told to nobody
            self._had_stream = True
            live.process.metrics.subscriptions[live.route.path,].inc(1)
            try:
                return await reply.finish(await reply.deliver(queue))
            finally:
                live.process.metrics.subscriptions[live.route.path,].inc(-1)
                if self._queue is queue:
                    self._end_stream()

    def end(self) -> None:
        """See `Endable`."""
        self._end_stream()
        self._changes.close()

    def close(self) -> None:
        """End it, and forget its subscriptions."""
        self.end()
        self._share.release()

    def _end_stream(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.finish(ENDED)
            _ = self.live.upstream.streams.pop(self, None)
