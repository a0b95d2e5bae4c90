"""Events that an exchange handles, each an immutable value named by a past participle."""

import msgspec
from msgspec import Raw, UnsetType

from gateway.exchange.input_requests import Question
from gateway.protocol.errors import GatewayError
from gateway.protocol.jsonrpc import Error


class Leg:
    """One downstream request of the exchange; compared by identity."""

    __slots__ = ()


class Event(msgspec.Struct, frozen=True, eq=False):
    """The base of all events."""


class Notice(Event, frozen=True):
    """What changes no exchange: it goes past it, to the newest leg."""


class Progressed(Notice, frozen=True):
    """The upstream reported progress of the call; `params` are those of the notification."""

    params: dict[str, Raw]


class Logged(Notice, frozen=True):
    """The upstream sent a log message while the call ran."""

    level: str
    params: Raw


class Called(Event, frozen=True):
    """The client sent the first request of the exchange."""

    leg: Leg


class Answered(Event, frozen=True):
    """The client retried with the requestState of `round`; equal answers have equal digests."""

    leg: Leg
    round: int
    digest: bytes
    answers: dict[str, Raw]


class Left(Event, frozen=True):
    """The client closed a leg's connection before it got the final message, or the connection broke."""

    leg: Leg


class Opened(Event, frozen=True):
    """A client that takes nested requests has opened a stream for its call: the first one, or another one."""

    leg: Leg


class Responded(Event, frozen=True):
    """A client that takes nested requests has answered the question with this key, or refused it with an error."""

    key: str
    answer: Raw | Error


class Asked(Event, frozen=True):
    """The upstream has ended a round with these questions: with all answers it is called again."""

    questions: tuple[Question, ...]


class Nested(Event, frozen=True):
    """The upstream sent a nested request inside the call; `id` is its JSON-RPC id, as JSON."""

    id: Raw
    method: str
    params: Raw | UnsetType


class Withdrawn(Event, frozen=True):
    """The upstream cancelled its own nested request; `replayable` if the call may be run again."""

    id: Raw
    replayable: bool = False


class Became(Event, frozen=True):
    """The call has become a task, whose client gets the handle; `ttl_seconds` if its server limits its time."""

    task_id: str
    ttl_seconds: float | None = None


class Updated(Event, frozen=True):
    """The holder of a task's handle answered these questions; those without params are of another replica."""

    answers: tuple[tuple[Question, Raw], ...]


class Cancelled(Event, frozen=True):
    """The client says that it wants the call no longer, or the task whose handle it holds."""


class Resulted(Event, frozen=True):
    """The call ended with a result, already translated for the client."""

    result: bytes | Raw
    is_tool_error: bool | None = None
    """As `results.plain` gives it, if the result has been read."""


class Failed(Event, frozen=True):
    """The call ended with a JSON-RPC error, as the upstream wrote it."""

    error: Error


class Broke(Event, frozen=True):
    """The call will not end: it got no session, its stream broke, HTTP refused it, or the upstream is silent.

    `replayable` if that is certain and the call may be run again. `runs_on` if the upstream may still work on it, for
    nobody: then it is told to stop. `not_begun` if nothing was sent, and the same may succeed later.
    """

    error: GatewayError
    replayable: bool = False
    runs_on: bool = False
    not_begun: bool = False


class Undelivered(Event, frozen=True):
    """These answers did not reach the upstream.

    `retryable` if the upstream took none of them, because it could not be reached or refused the credentials: then a
    retry of the client may deliver them. `replayable` and `runs_on` as in `Broke`.
    """

    questions: tuple[Question, ...]
    error: GatewayError
    retryable: bool
    replayable: bool = False
    runs_on: bool = False


class QuietPassed(Event, frozen=True):
    """The quiet window passed without a nested request."""


class LegLimitPassed(Event, frozen=True):
    """A leg has waited as long as clients wait; `has_place` if there is a parking place for the call."""

    has_place: bool = True


class GracePassed(Event, frozen=True):
    """The client did not repeat a retry whose connection broke."""


class Expired(Event, frozen=True):
    """The client did not come back for a parked call or a kept result in time."""


class HandedOver(Event, frozen=True):
    """This replica shuts down while others run: waiting clients should come back, and will reach another replica.

    `has_place` as in `LegLimitPassed`.
    """

    has_place: bool = True


class LetGo(Event, frozen=True):
    """This replica exits now, and another can continue the call; `cancel` if it must do so by running it again."""

    cancel: bool


class Stopped(Event, frozen=True):
    """The gateway gives the exchange up: it shuts down, or the upstream is silent or cannot take an answer."""

    error: GatewayError
