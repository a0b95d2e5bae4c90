"""Commands that an exchange gives its driver, which carries them out in order."""

from enum import StrEnum

import msgspec
from msgspec import Raw

from gateway.exchange.events import Leg
from gateway.exchange.input_requests import Question
from gateway.protocol.errors import GatewayError
from gateway.protocol.jsonrpc import Error


class Timer(StrEnum):
    """The exchange's timers; each runs at most once at a time, in the states of `machine.TIMERS`."""

    QUIET = "quiet"
    LEG = "leg"
    GRACE = "grace"
    TTL = "ttl"
    LINGER = "linger"
    COLD = "cold"
    """Its end is no event: the driver knows whether the call is resumable."""


QUIET, LEG, GRACE, TTL, LINGER, COLD = Timer
"""The same by their names alone: to look a member up in its class takes ten times as long."""


class Command(msgspec.Struct, frozen=True, eq=False):
    """The base of all commands: immutable, compared by identity."""


class SendCall(Command, frozen=True):
    """Send the call upstream, in the exchange's session if it has one."""


class RunAgain(Command, frozen=True):
    """Send the call upstream once more, in another session: the earlier run is lost, and the call may run twice."""


class SendAnswers(Command, frozen=True):
    """Post these answers upstream, in this order; report `Undelivered` for those that fail.

    An upstream that is called again gets them with the others of the round.
    """

    answers: tuple[tuple[Question, Raw | Error], ...]


class Respond(Command, frozen=True):
    """Answer one nested request without the client; the outcome does not matter."""

    upstream_id: Raw
    answer: Raw | Error


class CancelCall(Command, frozen=True):
    """Tell the upstream that the call is no longer wanted."""

    reason: str


class ReleaseSession(Command, frozen=True):
    """Give the session back; `clean` if the call completed and no nested request in it is unanswered."""

    clean: bool


class Ask(Command, frozen=True):
    """Seal the state of `round` and end these legs with an InputRequiredResult.

    `state` is the one in which another replica would continue. `held`: the call waits for the client. `stays`: it
    waits in this process, so it takes a parking place.
    """

    legs: tuple[Leg, ...]
    questions: dict[str, Question]
    round: int
    state: str = "parked"
    held: bool = True
    stays: bool = True


class Put(Command, frozen=True):
    """Put these questions to the client, each as a nested request; it gets them later if no leg waits."""

    questions: tuple[Question, ...]


class Close(Command, frozen=True):
    """End these legs without a final message: nobody waits for one there."""

    legs: tuple[Leg, ...]


class Reply(Command, frozen=True):
    """End these legs with a result (JSON)."""

    legs: tuple[Leg, ...]
    result: bytes


class Fail(Command, frozen=True):
    """End these legs with an error of the gateway, or with the upstream's own."""

    legs: tuple[Leg, ...]
    error: GatewayError | Error


class Give(Command, frozen=True):
    """End these legs with the handle of the task."""

    legs: tuple[Leg, ...]


class Keep(Command, frozen=True):
    """Keep how the task ended for the holder of its handle."""

    final: Reply | Fail


class Arm(Command, frozen=True):
    """Start a timer of the present state anew."""

    timer: Timer


class Count(Command, frozen=True):
    """Count a nested request in the metrics, by method and outcome."""

    method: str
    outcome: str
