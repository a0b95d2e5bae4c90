"""An exchange on its way from one process to another: what of it goes into an envelope, and what comes out again."""

from collections.abc import Iterator

from msgspec import Raw
from msgspec.structs import replace

from gateway.exchange import questions as inputs
from gateway.exchange.machine import Snapshot, State
from gateway.exchange.questions import Question
from gateway.seal.request_state import Envelope, Open, unpack_record


def opened(question: Question) -> Open:
    """A question that is with the client, with all that another process would need of it."""
    upstream_id = bytes(question.upstream_id) if question.upstream_id is not None else None
    params = bytes(question.params) if question.params is not None else None
    return Open(question.key, question.method, upstream_id, inputs.question_digest(question), params)


def ever_smaller(envelope: Envelope, *, held: bool) -> Iterator[Envelope]:
    """What gives way in a state that is too large: the questions' words, the record, what only others would need.

    Without the words (and what only a trace needs), who takes over must be given all answers at once; without the
    record, it can resume but not run the call again; the owner needs none of it.
    """
    yield envelope
    wordless = tuple(replace(each, params=None) for each in envelope.open)
    yield (envelope := replace(envelope, open=wordless, trace=None))
    if held:
        yield (envelope := replace(envelope, record=None))
        # Urls that are not named here were not accepted: without them, nobody but the owner may send the call again.
        state = State.PARKED if envelope.state == State.REFERRED else envelope.state
        yield replace(envelope, open=(), upstream=None, state=state)


def past(envelope: Envelope) -> Snapshot:
    """What an envelope tells of its exchange; raises InvalidState when its record is none."""
    questions = {
        each.key: Question(
            each.key,
            each.method,
            Raw(each.params) if each.params is not None else None,
            Raw(each.upstream_id) if each.upstream_id is not None else None,
            each.digest,
        )
        for each in envelope.open
    }
    record = unpack_record(envelope.record) if envelope.record is not None else None
    return Snapshot(State(envelope.state), envelope.round, questions, record, envelope.sheds)
