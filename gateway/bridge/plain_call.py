"""A call from which nothing but its result has come, as nearly all calls are.

No task reads it, and it has no exchange, no queue and no timer of its own. Its result goes from the connection to the
client in one stack: reply, session, `hear`, and the future for which the request waits. As soon as anything else
happens (a question, a notification, an error, a stream that breaks, the time for a keep-alive, a client that leaves, a
drain), `promote` makes the driver of a full exchange in its place, which is then RUNNING as if it had been from the
beginning (decision 61).
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import cast

import msgspec

from gateway import world
from gateway.bridge.call_context import ClientCall
from gateway.bridge.driver import Driver
from gateway.bridge.modern_to_legacy import legacy_call, modern_result
from gateway.bridge.request_call import RequestCall
from gateway.bridge.response_queue import ResponseQueue
from gateway.exchange import events as on
from gateway.exchange import results
from gateway.parking.lot import Lot
from gateway.protocol import jsonrpc, mcp
from gateway.routes.live_route import LiveRoute
from gateway.runtime.call_bytes import Weight
from gateway.sessions.call import Call, Runner
from gateway.sessions.group import Group
from gateway.sessions.session import Session
from gateway.telemetry import COMPLETE, TOOL_FAILED, Ending, bodies
from gateway.telemetry.process_status import CallStatus, Fate


class PlainCall(msgspec.Struct, Runner, eq=False):
    """One call in flight; the listener of its session. A coroutine waits for it, or what a subclass does."""

    asked: ClientCall
    _lot: Lot[Driver]
    final: tuple[bytes, Ending] | None = None
    """The response, once it is here."""
    driver: Driver | None = None
    """The exchange that has taken the call over."""
    queue: ResponseQueue = cast("ResponseQueue", None)
    """The queue of that exchange for the client."""
    _waiter: asyncio.Future[None] | None = None
    _call: Call = cast("Call", None)
    _session: Session = cast("Session", None)
    _size: int = 0
    """What it weighs, as `ClientCall.weigh` says."""

    def begin(self, group: Group[Session]) -> bool:
        """Send the call in a session of this group; returns False if it takes an exchange from the beginning.

        It does if no session is idle, something has to be set on the session, the transport is not Streamable HTTP,
        or the call is traced. Raises Busy if the call is too heavy.
        """
        asked, live, request = self.asked, self.asked.live, self.asked.request
        if request.said.log_level is not None or live.process.traces is not None or bodies.on:
            return False
        pool = live.upstream.pool
        session = pool.take(group)
        if session is None:
            return False
        is_begun, calls, principal = False, live.process.calls, asked.key.principal
        try:
            calls.reserve(principal, 2 * asked.body_bytes)
            self._size = 2 * asked.body_bytes
            call = self._call = legacy_call(request, next(live.process.call_ids), self)
            is_begun = session.begin(call, asked.headers, self)
        finally:
            if not is_begun:
                pool.release(session, clean=True)
                if self._size:
                    calls.add(principal, -self._size)
        if not is_begun:
            return False
        self._session = session
        return True

    @property
    def about(self) -> Mapping[str, str | None]:
        """See `Listener`."""
        return {"request_id": self.asked.request_id}

    @property
    def live(self) -> LiveRoute:
        """The route as it was when the call began."""
        return self.asked.live

    def running_seconds(self, now: float) -> float:
        """For how long the call has run."""
        return now - self._call.sent

    def glance(self, now: float) -> CallStatus:
        """The call on the status page; `now` is the monotonic time."""
        return self.asked.running_status(self.running_seconds(now), now - self.heard, self.at_end)

    @property
    def heard(self) -> float:
        """See `UpstreamCall`."""
        return self._call.heard

    @property
    def at_end(self) -> Fate:
        """See `Driver`."""
        is_resumable = self.live.route.continuation == "hold" and self._session.can_be_resumed
        return self.asked.fate(is_resumable=is_resumable, may_run_twice=self.asked.may_run_twice)

    def waiter(self) -> asyncio.Future[None]:
        """Return what is done when `final` is set, or the queue of the exchange has something for the client."""
        # Not `create_future`, which takes 1,900 instructions in uvloop in place of 1,000 (decision 61).
        waiter = self._waiter = self._waiter or asyncio.Future()
        return waiter

    def abandon(self) -> None:
        """The client has left."""
        if self.final is None:
            driver = self.promote()
            self.queue.waits_no_more()  # `promote` has set the time of its keep-alive
            driver.leave(self.queue)

    def hear(self, event: on.Event) -> None:
        """Take the result; anything else is for an exchange."""
        asked, live = self.asked, self.asked.live
        if isinstance(event, on.Resulted):
            try:
                info, is_tool_error = self._session.shaken.server_info, event.is_tool_error
                if is_tool_error is not None and asked.request.method == mcp.TOOLS_CALL:
                    body = results.plain_response(asked.request.id, event.result, info)
                else:
                    modern = modern_result(asked, event.result, info)
                    body = jsonrpc.result(asked.request.id, modern.begin, modern.rest)
                    is_tool_error = modern.is_tool_error
                ending = TOOL_FAILED if is_tool_error else COMPLETE
            except ValueError:
                pass  # an exchange says what is wrong with it
            else:
                self.final = body, ending
                live.process.calls.add(asked.key.principal, -self._size)
                seconds = world.monotonic() - self._call.sent
                live.process.metrics.calls[live.route.path, asked.request.method, ending.error_type].observe(seconds)
                session = self._session
                del self._session, self._call  # the call refers to this object
                live.upstream.pool.release(session, clean=True)
                self._answered(body, ending)
                return
        self.promote().hear(event)

    def promote(self) -> Driver:
        """Have an exchange take the call over, unless one has."""
        if self.driver is None:
            live = self.asked.live
            seconds = world.monotonic() - self._call.sent
            queue = self.queue = self.asked.queue()
            queue.awaited(self.waiter(), seconds, live.config.timeouts.keepalive_seconds)
            begun = self._session, self._call
            weight = Weight(live.process.calls, self.asked.key.principal, self._size)
            self.driver = Driver(self.asked, self._lot, partial(RequestCall, begun=begun), weight)
            self.driver.begin(queue, seconds)
            self._deviated()
        return self.driver

    def _answered(self, _body: bytes, _ending: Ending) -> None:
        """`final` is set."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _deviated(self) -> None:
        """An exchange has taken the call over; a coroutine hears of it by the queue."""

    def broke(self, call: Call) -> None:
        """See `Runner`."""
        _ = self.promote()
        call.runner.broke(call)  # the exchange's, since it took the call over
