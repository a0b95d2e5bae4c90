"""What can happen to an exchange. Past participles; every event is one immutable value."""

import msgspec
from msgspec import Raw, UnsetType

from gateway.exchange.questions import Question
from gateway.protocol.errors import GatewayError
from gateway.protocol.jsonrpc import Error


class Leg(msgspec.Struct, frozen=True, eq=False):
    """One downstream request of the exchange, as the core sees it; compared by identity.

    `id` and `progress_token` are JSON; `log_level` is the least severe level this leg wants, None for no log messages.
    """

    id: Raw
    progress_token: Raw | None = None
    log_level: str | None = None


class Event(msgspec.Struct, frozen=True, eq=False):
    """The base of all events."""


class Called(Event, frozen=True):
    """The client called for the first time."""

    leg: Leg


class Answered(Event, frozen=True):
    """The client came back with the state of `round`; `digest` names its answers, equal answers have equal digests."""

    leg: Leg
    round: int
    digest: bytes
    answers: dict[str, Raw]


class Left(Event, frozen=True):
    """A leg's client closed its connection before its final message."""

    leg: Leg


class Nested(Event, frozen=True):
    """The upstream asked for something inside the call; `id` is its JSON-RPC id, as JSON."""

    id: Raw
    method: str
    params: Raw | UnsetType


class Withdrawn(Event, frozen=True):
    """The upstream cancelled its own nested request; `replayable` when the call may be run again."""

    id: Raw
    replayable: bool = False


class Progressed(Event, frozen=True):
    """The upstream reported progress of the call; `params` are those of the notification."""

    params: dict[str, Raw]


class Logged(Event, frozen=True):
    """The upstream sent a log message while the call ran."""

    level: str
    params: Raw


class Resulted(Event, frozen=True):
    """The call ended with a result, already in the new vocabulary."""

    result: bytes | Raw


class Failed(Event, frozen=True):
    """The call ended with a JSON-RPC error, as the upstream wrote it."""

    error: Error


class Broke(Event, frozen=True):
    """The call will not end: no session, a broken stream, a refusal in HTTP, silence.

    `replayable` when that is certain and the call may be run again.
    """

    error: GatewayError
    replayable: bool = False


class Undelivered(Event, frozen=True):
    """These answers did not reach the upstream.

    `retryable` when it refused the credentials and took none; `replayable` as in `Broke`.
    """

    questions: tuple[Question, ...]
    error: GatewayError
    retryable: bool
    replayable: bool = False


class QuietPassed(Event, frozen=True):
    """No nested request came for the quiet window."""


class LegLimitPassed(Event, frozen=True):
    """A leg has waited as long as clients wait; `has_place` when the call may be parked."""

    has_place: bool = True


class GracePassed(Event, frozen=True):
    """Nobody repeated a retry whose connection broke."""


class Expired(Event, frozen=True):
    """Nobody came for a parked call, or for a kept result."""


class HandedOver(Event, frozen=True):
    """This replica is going away while others stay: clients that wait shall come back, and reach another one.

    `has_place` as in `LegLimitPassed`.
    """

    has_place: bool = True


class LetGo(Event, frozen=True):
    """This replica is gone in a moment, and another can go on with the call; `cancel` when by running it again."""

    cancel: bool


class Stopped(Event, frozen=True):
    """The gateway gives the exchange up: it shuts down, or the upstream is silent or cannot be answered."""

    error: GatewayError
