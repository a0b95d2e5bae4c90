"""Converts an exchange to the content of a requestState, from which another process restores it."""

from collections.abc import Iterator

from msgspec.structs import force_setattr, replace

from gateway.exchange.input_requests import Question, question_digest
from gateway.exchange.machine import Snapshot, State
from gateway.protocol.errors import InvalidState
from gateway.seal.request_state import Envelope, unpack_record


def opened(question: Question) -> Question:
    """A question that the client has, with everything that another process needs to continue."""
    if question.digest is None:
        force_setattr(question, "digest", question_digest(question))  # the record of its answer needs it again
    return question


def ever_smaller(envelope: Envelope, *, held: bool) -> Iterator[Envelope]:
    """Yield ever smaller versions of an envelope, for a state that is too large.

    First the params of the questions and the trace are dropped: then a replica that takes over needs all answers at
    once. Without the record, it can resume the call but not run it again. The last version is enough only for the
    owner of the call.
    """
    yield envelope
    wordless = tuple(replace(each, params=None) for each in envelope.open)
    yield (envelope := replace(envelope, open=wordless, trace=None))
    if held:
        yield (envelope := replace(envelope, record=None))
        yield only_for_its_owner(envelope)


def only_for_its_owner(envelope: Envelope) -> Envelope:
    """An envelope without what it takes to continue the call elsewhere."""
    # Without the urls, only the owner knows whether all were accepted, so only it may send the call again.
    state = State.PARKED if envelope.state == State.REFERRED else envelope.state
    return replace(envelope, open=(), upstream=None, state=state)


def past(envelope: Envelope) -> Snapshot:
    """The snapshot of an exchange in an envelope; raises InvalidState if its state or record is malformed."""
    record = unpack_record(envelope.record) if envelope.record is not None else None
    try:
        state = State(envelope.state)
    except ValueError as exc:
        raise InvalidState("version") from exc
    return Snapshot(state, envelope.round, {each.key: each for each in envelope.open}, record, envelope.sheds)
