"""What an exchange may ask for. Imperatives; the driver obeys them in order."""

from enum import StrEnum

import msgspec
from msgspec import Raw

from gateway.exchange.events import Leg
from gateway.exchange.questions import Question
from gateway.protocol.errors import GatewayError
from gateway.protocol.jsonrpc import Error


class Timer(StrEnum):
    """The exchange's clocks; each runs at most once at a time and `Arm` starts it anew."""

    __hash__ = str.__hash__  # Enum's own is a Python function, and these are keys on the hot path

    QUIET = "quiet"
    LEG = "leg"
    GRACE = "grace"
    TTL = "ttl"
    LINGER = "linger"


class _Base(msgspec.Struct, frozen=True, eq=False):
    """What all commands are: immutable, compared by identity."""


class SendCall(_Base, frozen=True):
    """Send the call upstream, in the exchange's session if it has one."""


class RunAgain(_Base, frozen=True):
    """Send the call upstream once more, in another session: the one before it is lost, and it may run twice."""


class SendAnswers(_Base, frozen=True):
    """Post these answers upstream, in this order; report `Undelivered` for those that fail."""

    answers: tuple[tuple[Question, Raw], ...]


class Respond(_Base, frozen=True):
    """Answer one nested request without the client; nobody waits for the outcome."""

    upstream_id: Raw
    result: Raw | None
    error: Error | None


class CancelCall(_Base, frozen=True):
    """Tell the upstream that the call is no longer wanted."""

    reason: str


class ReleaseSession(_Base, frozen=True):
    """The exchange needs its session no more; `clean` when the call ended with nothing left open."""

    clean: bool


class Forward(_Base, frozen=True):
    """Send one notification to a leg."""

    leg: Leg
    message: bytes


class Ask(_Base, frozen=True):
    """Seal the state of `round` and end these legs with an InputRequiredResult.

    `state` is where another replica would go on. `held` when the call waits for the client, and `stays` when
    it does so here: it takes a place.
    """

    legs: tuple[Leg, ...]
    questions: dict[str, Question]
    round: int
    state: str = "parked"
    held: bool = True
    stays: bool = True


class Reply(_Base, frozen=True):
    """End these legs with a result (JSON)."""

    legs: tuple[Leg, ...]
    result: bytes


class Fail(_Base, frozen=True):
    """End these legs with an error."""

    legs: tuple[Leg, ...]
    error: GatewayError


class FailWith(_Base, frozen=True):
    """End these legs with the upstream's own JSON-RPC error."""

    legs: tuple[Leg, ...]
    error: Error


class Arm(_Base, frozen=True):
    """Start a timer, or start it anew."""

    timer: Timer


class Disarm(_Base, frozen=True):
    """Stop a timer; nothing happens when it does not run."""

    timer: Timer


class DisarmLeg(_Base, frozen=True):
    """Stop what times a waiting leg: QUIET, LEG and GRACE."""


class Count(_Base, frozen=True):
    """Report what became of a nested request: method and outcome, for the metrics."""

    method: str
    outcome: str


Command = (
    SendCall
    | RunAgain
    | SendAnswers
    | Respond
    | CancelCall
    | ReleaseSession
    | Forward
    | Ask
    | Reply
    | Fail
    | FailWith
    | Arm
    | Disarm
    | DisarmLeg
    | Count
)
"""Every command; a driver matches over all of them."""
