"""An upstream call that is one request, whose reply is heard by the session, and read by a task once it breaks."""

from gateway.bridge.call_context import Context
from gateway.bridge.modern_to_legacy import legacy_call
from gateway.bridge.upstream_call import UpstreamCall
from gateway.exchange import events as on
from gateway.protocol.errors import GatewayError, SessionLost, bug
from gateway.seal.request_state import Whereabouts
from gateway.sessions.call import Call, Listener
from gateway.sessions.session import Session
from gateway.telemetry import bodies


class RequestCall(UpstreamCall):
    """The call, in any session of its pool key."""

    __slots__ = ("_begun",)

    def __init__(self, context: Context, listener: Listener, begun: tuple[Session, Call] | None = None) -> None:
        """`begun` is a call that was sent before its exchange began, so that only the rest of it is read."""
        super().__init__(context, listener)
        self._begun = begun
        if begun is not None:
            self._session, self._call = begun
            self._call.passes_to(listener, self)
            self._is_sent = True
            context.runs_in(self._session)

    def start(self) -> None:
        """Send the call, in the session of the exchange if it has one; or read the rest of a begun one."""
        begun, self._begun = self._begun, None
        if begun is None:
            super().start()
            return
        session, call = begun
        if session.in_flight is call and self._is_watched:  # its answer has not come
            self._check_silence()

    def broke(self, call: Call) -> None:
        """Read by a task what is left of a begun call."""
        assert self.session is not None, "it runs there"
        task = self._context.live.process.tasks.start(self._run((self.session, call)), "call")
        if call is self._call:
            self._task = task

    async def _run(self, begun: tuple[Session, Call] | None = None) -> None:
        """The call's own task: it outlives the leg that started it. A call that was `begun` is only read."""
        call, context = None, self._context
        try:
            if begun is None:
                session = await self._ready_session()
                if not self._is_wanted():
                    self.release(clean=True)  # given up at the moment the session came
                    return
                span = context.begin_call_span(session.shaken.version)
                call = legacy_call(context.request, next(context.live.process.call_ids), self._listener, span)
                if span is None and not bodies.on and session.begin(call, context.headers, self):
                    self._sent(call)
                    self._task = None  # no task waits for its reply
                    return
                reply = self._send(call, session)
            else:
                session, call = begun
                reply = session.read(call)
            try:
                await reply
            except SessionLost:
                if not (self._is_wanted() and call.message):
                    raise  # the client has left, or the server has begun: the call must not begin in another session
                session = await self._another_session(session)
                if self._is_wanted():
                    await self._send(call, session)
                else:
                    self.release(clean=True)
        except GatewayError as exc:
            self._failed(exc, call)
        except Exception:  # the outermost edge of the call's task: it is counted there, and the client gets an error
            self._listener.hear(on.Broke(bug()))
            raise

    # -- the call of another replica --------------------------------------------------------------------------------

    async def resume(self, upstream: Whereabouts, *, is_shared: bool) -> None:
        """Read the call of another replica where its stream broke off; `is_shared` if that one may still hold it."""
        session, call = await self._adopted(upstream, is_shared=is_shared)
        _ = self._context.begin_call_span(session.shaken.version)
        await self._read_on(call, session, upstream, is_shared=is_shared)
