"""Judges a history: what the clients were told must be true in the light of what the server did."""

import base64
import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import msgspec

from gateway.config import Hold, Timeouts
from gateway.http_client.idle_connections import KEEP_ALIVE_SECONDS
from gateway.protocol.errors import InvalidState
from gateway.seal.keyring import Keyring
from gateway.seal.request_state import Envelope
from tests.simulation import listening_oracle, task_oracle
from tests.simulation.causes import ARRIVES_SECONDS, CUTS, DEATHS, SILENCES, WHOLE_DRAINS, begins, ends, is_slow, met
from tests.simulation.client import PATIENCE_SECONDS, Record, Told
from tests.simulation.history import KEY, Line, Outcome
from tests.simulation.plan import Fault
from tests.simulation.server import Run
from tests.simulation.world import BEGAN, START

BUG_LEVELS: Final = ("error", "critical", "exception")
_LACKS_CAPABILITY: Final = -32021
_READ_LATE: Final = ("slow reader", "reads late", "leaves unread", "unread copy")
_NOTICES_SECONDS: Final = 0.05
"""A client that reads notices sooner that its replica has ended."""
_READS_LATER_SECONDS: Final = 5.1
"""The longest time for which a client that reads late reads nothing, and a little more."""
_LEAVES_SECONDS: Final = 3.1
"""The same for a client that leaves then."""
_HAND_OVER_SECONDS: Final = 0.9
_ENDS_SECONDS: Final = 2.1
"""How long cancellations may keep a process that had a second signal, and a little more."""
_ENDS_LATE_SECONDS: Final = Timeouts().cancel_seconds + 0.1
"""The same if a server is slow to take the answers before them."""
_GRACE_SECONDS: Final = Hold().grace_seconds
_LINGERS_SECONDS: Final = Hold().linger_seconds
_HANDSHAKE_SECONDS: Final = Timeouts().handshake_seconds
_STOPS: Final = ("stop", "stall")
_LEG_LATE_SECONDS: Final = 0.5
"""How much later than it should a replica may end the leg of a call that a draining one gave it."""
_STILL_SECONDS: Final = 0.3
"""A grace period that ends so late shows its replica that it stood still, and then it waits for longer."""
_CONNECTS_SECONDS: Final = 1.5
"""How long a client that has given a connection up may take to come elsewhere."""
_CANCELS_SECONDS: Final = 1.0
"""How long a cancellation takes at most if nothing goes wrong."""
_FIRST_PAUSE_SECONDS: Final = 0.5
"""How long no child is started after one was of no use. Each pause is twice as long as the one before."""
_NOTHING_RAN: Final = ("upstream_unreachable", "busy", "stopping")
"""Reasons of errors that say that the tool has not run."""


def complaints(outcome: Outcome) -> list[str]:
    """Everything that is wrong with a history."""
    others = (*listening_oracle.complaints(outcome), *task_oracle.complaints(outcome))
    return [*_of_calls(outcome), *others, *_of_processes(outcome)]


def _of_processes(outcome: Outcome) -> Iterator[str]:
    yield from (f"attacker: {each}" for each in outcome.learnt)
    yield from (f"failure: {each}" for each in outcome.failures)
    yield from (f"end: {each}" for each in outcome.ended_badly)
    for each in outcome.left:
        if not _may_be_left(outcome, each):
            yield f"left: {each}"
    for at, tag in () if _lost_a_replica(outcome) else outcome.ledger.deleted:  # what it had begun is known to nobody
        if not any(record.call.tag == tag and _has_ended_session(record, at) for record in outcome.records):
            yield f"server: a session was deleted while {tag} ran in it"
    for line in outcome.lines:
        if line.level in BUG_LEVELS:
            yield f"log: {line.process} {line.event} {line.fields}"
        if line.event == "call.taken_over" and not _may_take_over(outcome, line):
            yield f"{line.process} took a call of {line.fields['owner']} over at {line.at - START:.2f}, which lives"


def _may_be_left(outcome: Outcome, what: str) -> bool:
    """Whether nobody can have ended what is left."""
    kinds = {fault.kind for fault in outcome.faults}
    if "results" in what:
        # A session that its client could not end is kept until others need the room.
        is_kept = any(not each.has_ended_session for each in outcome.listened)
        return is_kept or _has_missed_an_end(outcome, what.partition(" ")[0])
    if what.startswith("server streams"):
        return "power" in kinds  # every other host ends its connections
    if not what.startswith("server "):
        return False
    if _lost_a_replica(outcome) or any(map(_was_passed, outcome.records)):
        return True
    # Who resumes the call of a silent owner does not end its session, and the owner does not end it either. What opens
    # or ends a session may also be lost on the way to the server.
    is_silent = any(
        line.event in ("call.taken_over", "tool_task.taken_over") and not line.fields["owner_is_dead"]
        for line in outcome.lines
    )
    # To a process that stood still for so long, a request of its own seems unanswered.
    stood_still = any(each.kind in _STOPS and each.seconds >= _HANDSHAKE_SECONDS for each in outcome.faults)
    is_lost = is_silent or stood_still or bool(kinds & {"part", "slow", "dns"})
    is_left_behind = is_lost or _may_belong_to_another_call(outcome)
    return what.startswith("server sessions") and is_left_behind


def _has_missed_an_end(outcome: Outcome, replica: str) -> bool:
    """Whether a replica could not be told that a session has ended: it keeps what it has of that, too."""
    silent = [each for each in outcome.faults if each.kind in SILENCES]
    mine = [each for each in silent if each.kind in ("slow", "one way") or replica in _names_of(each)]
    ended = [each.ended for each in outcome.listened if each.listener.is_legacy and each.ended is not None]
    return any(begins(each) <= when <= ends(outcome, each) for each in mine for when in ended)


def _names_of(fault: Fault) -> set[str]:
    return {f"gw-{number}" for number in (fault.target, *_ends_of(fault))}


def _may_take_over(outcome: Outcome, line: Line) -> bool:
    """Whether the owner of a call had ended, or let go of it; or was silent to everybody who could be asked."""
    owner = line.fields["owner"]
    drains = [(each.at, each.process) for each in outcome.lines if each.event == "server.draining"]
    if not owner or any(name == owner and when <= line.at for when, name in (*outcome.deaths, *drains)):
        return True
    if line.fields["owner_is_dead"]:
        return False
    if _has_lost_its_taker(outcome, line):
        return True
    faults = [each for each in outcome.faults if begins(each) <= line.at <= ends(outcome, each) + 5.0]
    number = int(owner.removeprefix("gw-"))
    failing = {each.target for each in faults if each.kind in (SILENCES | DEATHS) - {"peers", "slow"}}
    # Who does not reach the owner, or may not be reached by the replica that asks whether they do.
    is_parted = any(number in _ends_of(each) for each in faults)
    parted = {end for each in faults for end in _ends_of(each)} if is_parted else set()
    others = set(range(1, outcome.plan.replicas + 1)) - {number}
    blind = others & (failing | parted)
    # Who fails may hear only from another one that does not reach the owner either. Who takes over tries for itself.
    is_misled = bool(others & failing) and len(blind) > 1 and int(line.process.removeprefix("gw-")) in blind
    was_slow = any(each.kind == "slow" for each in faults)
    return number in failing or was_slow or others <= blind or is_misled


def _has_lost_its_taker(outcome: Outcome, line: Line) -> bool:
    """Whether this very request had another replica take the call over before, which has ended since.

    The owner may be reached by now, but has left the call to that replica, or will once it asks who has taken it over.
    """
    takers = {
        each.process: each.at
        for each in outcome.lines
        if (each.event, each.fields.get("owner")) == (line.event, line.fields["owner"])
        and each.fields["request_id"] == line.fields["request_id"] != ""
        and each.at < line.at
    }
    return any(name in takers and takers[name] <= when <= line.at for when, name in outcome.deaths)


def _ends_of(fault: Fault) -> tuple[int, ...]:
    return (fault.target, fault.other) if fault.kind == "peers" else ()


def _of_calls(outcome: Outcome) -> Iterator[str]:
    for record in outcome.records:
        for complaint in _of_call(outcome, record):
            yield f"{record.call.tag}: {complaint}"


def _of_call(outcome: Outcome, record: Record) -> Iterator[str]:
    yield from record.strange
    runs = outcome.ledger.of(record.call.tag)
    if record.ended is None:
        yield "has not ended"
        return
    for name in record.asked:
        if not any(name in run.asked for run in runs) and not _came_after_its_call(outcome, name, runs):
            yield f"was asked {name}, which nobody asked"
    given = {said for answers in record.given.values() for said in answers}
    for run in runs:
        if record.call.is_legacy or record.call.path != "/modern":
            yield from _of_run(record, run, given)
        if run.ended is None and not _may_be_uncancelled(outcome, record) and not _was_passed(record):
            yield f"run {run.number} is left running"
    is_queued = "sessions" in outcome.plan.config.get("route", {})  # behind calls that may hang for longer than that
    hangs = is_queued or "hangs" in record.call.script
    if not hangs and not met(outcome, record, SILENCES | {"power"}):
        yield from (f"got no reply from gw-{each}" for each in record.unanswered)
    yield from _repetitions(outcome, record, runs)
    yield from _asked_twice(record, runs)
    yield from _waits_in_drains(outcome, record)
    yield from _goes_on_for_nobody(outcome, record, runs)
    for told in record.told:
        yield from _of_told(outcome, record, told, runs)
    if record.outcome == "error" and {"fails", "errs"} & record.call.script.keys() and record.final is not None:
        said = (record.final.error or {}).get("message")
        if any(run.result == said for run in runs):
            return
    if not _is_explained(outcome, record):
        final = record.final
        why = "" if final is None else f"{final.reason} {(final.error or {}).get('message')}"
        yield f"ended without a cause: {record.outcome} {why}"


def _of_run(record: Record, run: Run, given: set[str]) -> Iterator[str]:
    for name, answer in zip(run.asked, run.answers, strict=False):
        number = name.rpartition("/")[2]
        said = {each for each in given if each.partition("=")[0].rpartition("/")[2] == number}
        if isinstance(answer, dict):
            if answer.get("action") == "decline" and "decline" not in record.given.get(name, []):
                yield f"run {run.number} was told that {name} was declined, which its client did not say"
            continue
        if answer is not None and answer not in said:
            yield f"run {run.number} got the answer {answer} to {name}, which its client did not give"


def _came_after_its_call(outcome: Outcome, name: str, runs: list[Run]) -> bool:
    """Whether a question on a side stream came so late that another call of its caller had the session by then.

    Its own call has ended without an answer, and it says of no call that it belongs to that.
    """
    callers = {record.call.tag: record.call.caller for record in outcome.records}
    asked = [each for each in outcome.ledger.runs if name in each.asked and each.asked_aside is not None]
    return any(
        (each.session, callers.get(each.tag)) == (run.session, callers[run.tag])
        and (each.ended or math.inf) <= run.began
        and _may_arrive(outcome, each.asked_aside or 0.0, run.began - ARRIVES_SECONDS)  # it came late, too
        for run in runs
        for each in asked
    )


def _asked_twice(record: Record, runs: list[Run]) -> Iterator[str]:
    """Another run gets the answers of the one before, up to the first question that has none."""
    if (
        record.call.habit == "rivals"
        or record.call.path == "/modern"
        or {"urls", "refuses"} & record.call.script.keys()
    ):
        return
    for one, other in pairwise(runs):
        for first, second in zip(one.answers, other.answers, strict=False):
            if not (isinstance(first, str) and isinstance(second, str)):
                break
            if first != second:
                yield f"gave run {one.number} the answer {first}, and was asked again for run {other.number}"


def _goes_on_for_nobody(outcome: Outcome, record: Record, runs: list[Run]) -> Iterator[str]:
    """A call is cancelled once the grace period after its client has left is over."""
    if record.gone is None or met(outcome, record, _HINDRANCES | SILENCES | DEATHS, until=math.inf):
        return
    limit = record.gone + _grace_seconds(outcome) + _CANCELS_SECONDS
    for run in runs:
        if min(run.cancelled or math.inf, run.ended or math.inf) > limit:
            yield f"run {run.number} went on, though its client had left at {record.gone - START:.2f}"


def _waits_in_drains(outcome: Outcome, record: Record) -> Iterator[str]:
    """A call that begins is handed over when its replica drains, so its client is not kept until the end of that."""
    plan, call = outcome.plan, record.call
    is_usual = call.path == "/mcp" and not (call.is_legacy or plan.config.get("route") or plan.replicas == 1)
    if not is_usual or call.habit in _READ_LATE or not record.told or met(outcome, record, _HINDRANCES):
        return
    told = record.told[0]
    for line in outcome.lines:
        if line.event == "server.draining" and line.process == f"gw-{told.replica}":
            began = line.at + line.fields["delay_seconds"]
            is_late = told.is_first and told.sent < began - 0.1 and told.at > began + _HAND_OVER_SECONDS
            is_over = any(name == line.process and line.at <= when <= told.sent for when, name in outcome.deaths)
            if is_late and not is_over and not _ends_early(outcome, told):
                yield f"waited at {line.process} until {told.at - START:.2f}, which drained"


def _ends_early(outcome: Outcome, told: Told) -> bool:
    """Whether a second signal had come: then a replica hands nothing over, and ends soon."""
    hurried = [when for when, name in outcome.second_signals if name == f"gw-{told.replica}"]
    is_late = any(call.script.get("refuses", "").startswith("late") for call in outcome.plan.calls)
    seconds = _ENDS_LATE_SECONDS if is_late else _ENDS_SECONDS
    return any(0.0 <= told.at - when <= seconds for when in hurried)


def _was_passed(record: Record) -> bool:
    """Whether its client spoke with the server itself, through the gateway: then it has to cancel, and does not."""
    return record.call.is_legacy and record.call.path == "/mcp"


def _has_ended_session(record: Record, when: float) -> bool:
    """Whether its client has ended the session itself: it does so once it has been told how its call ended."""
    return _was_passed(record) and record.final is not None and record.final.at <= when


def _lost_a_replica(outcome: Outcome) -> bool:
    """Whether a replica ended without a word: nobody may be left who can cancel its calls."""
    return any(fault.kind in DEATHS for fault in outcome.faults)


def _may_be_uncancelled(outcome: Outcome, record: Record) -> bool:
    """Whether nobody was left to cancel a call, or no word from its replica arrived at the server in time."""
    # A replica that ends as it should cancels what nobody can resume, and leaves the rest to the others.
    is_held = outcome.plan.config.get("route", {}).get("continuation") != "replay"
    has_events = outcome.plan.server.has_events and is_held and record.call.path != "/child"
    is_hindered = bool(met(outcome, record, frozenset({"slow", "part", "dns"}), until=math.inf))
    if is_hindered and met(outcome, record, DEATHS, until=math.inf):
        return True
    # It cancels behind the answers to open questions, for which it does not wait beyond its end.
    is_late = record.call.script.get("refuses", "").startswith("late")
    return bool(met(outcome, record, DEATHS if has_events or is_late else DEATHS - WHOLE_DRAINS, until=math.inf))


def _repetitions(outcome: Outcome, record: Record, runs: list[Run]) -> Iterator[str]:
    runs = [run for run in runs if not run.was_referred]
    if not _may_run_again(outcome, record) and len(runs) > 1:
        yield f"ran {len(runs)} times: {[(run.number, round(run.began, 2)) for run in runs]}"
    for run in [] if _may_be_uncancelled(outcome, record) else runs[:-1]:
        if _may_run_again(outcome, record) and run.cancelled is None and run.result is None and run.ended is None:
            yield f"was run again, and run {run.number} was not cancelled"


def _may_run_again(outcome: Outcome, record: Record) -> bool:
    return record.call.tool == "search" or outcome.plan.config.get("route", {}).get("continuation") == "replay"


def _of_told(outcome: Outcome, record: Record, told: Told, runs: list[Run]) -> Iterator[str]:
    result = told.result
    if told.error is None and "content" in result:
        yield from _of_result(outcome, record, result, runs)
        yield from _of_other_answers(outcome, record, told)
    if told.error is not None:
        yield from _of_error(outcome, record, told, runs)


def _of_result(outcome: Outcome, record: Record, result: dict[str, Any], runs: list[Run]) -> Iterator[str]:
    text = result["content"][0]["text"]
    own = [run for run in runs if text in run.results]
    if not own:
        yield f"got a result that is not its own: {text}"
        return
    answers = json.loads(text)["answers"]
    given = {said for each in record.given.values() for said in each}
    for answer in answers:
        if isinstance(answer, dict):
            if _may_belong_to_another_call(outcome, record.call.caller):
                continue
            if answer.get("action") == "cancel" or ("error" in answer and record.call.habit != "cannot be asked"):
                yield f"got a result of a question that was answered for it: {text}"
        elif answer not in given:
            yield f"got a result with the answer {answer}, which it did not give"


def _of_other_answers(outcome: Outcome, record: Record, told: Told) -> Iterator[str]:
    """A request whose answers came too late is refused, and does not get the result of the other ones.

    Who takes a call over cannot know what was answered before.
    """
    if _has_happened(outcome, "call.taken_over", told) and met(outcome, record, DEATHS | SILENCES):
        return
    for answer in json.loads(told.result["content"][0]["text"])["answers"]:
        name, _, _ = answer.partition("=") if isinstance(answer, str) else ("", "", "")
        if told.carried.get(name, answer) != answer:
            yield f"answered {told.carried[name]}, and got a result with {answer}"


def _has_happened(outcome: Outcome, event: str, told: Told) -> bool:
    """Whether a line of the log, of any call, says so before a client was told something."""
    return any(line.event == event and line.at <= told.at for line in outcome.lines)


def _may_belong_to_another_call(outcome: Outcome, caller: str | None = None) -> bool:
    """Whether calls of a caller share a session in which a question came that names none of them: it is refused."""
    is_shared = "sessions" in outcome.plan.config.get("route", {})
    calls = [each for each in outcome.plan.calls if caller in (None, each.caller)]
    return is_shared and any(each.script.get("aside") for each in calls)


def _of_error(outcome: Outcome, record: Record, told: Told, runs: list[Run]) -> Iterator[str]:
    error = told.error or {}
    message = str(error.get("message", ""))
    before = [run for run in runs if run.began <= told.at]
    has_claimed = told.reason in _NOTHING_RAN and "may have had effects" not in message
    if told.is_first and has_claimed and before and len(record.told) == 1:
        yield f"was told that nothing ran ({message}), but it did"
    if told.reason == "invalid_request_state" and not _may_be_invalid(outcome, record, told):
        yield f"was told at {told.at - START:.2f} that its state is invalid"
    if told.reason == "owner_lost" and not _was_gone(outcome, message, told.at):
        yield f"was told at {told.at - START:.2f} that a replica is gone, which is not: {message}"
    cause = met(outcome, record, DEATHS | {"server", "part", "slow"}, until=told.at)
    if "was cancelled" in message and not cause:
        yield from (
            f"was told that run {run.number} was cancelled, which it was not"
            for run in before
            if run.cancelled is None and run.ended is None
        )
    is_quick = not _hangs_for_too_long(outcome, record)
    # What a server says on its side stream is lost if that is cut just then.
    hushing = DEATHS | SILENCES | (CUTS if record.call.script.get("aside") else frozenset())
    is_hushed = met(outcome, record, hushing, until=told.at) or _asked_in_vain(outcome, record, before)
    if "was silent for" in message and is_quick and not is_hushed:
        yield f"was told that its server was silent, which it was not: {message}"
    # What a modern client says to a modern server is passed, and so is what becomes of it.
    if told.status >= 500 and told.status != 503 and record.call.path == "/mcp":
        yield f"got HTTP {told.status}: {message}"


def _asked_in_vain(outcome: Outcome, record: Record, runs: list[Run]) -> bool:
    """Whether a server waits for the answer to a question that no gateway heard, or whose refusal it did not take."""
    is_refused = "refuses" in record.call.script and _may_belong_to_another_call(outcome, record.call.caller)
    return is_refused or any(run.is_unheard for run in runs)


def _may_be_invalid(outcome: Outcome, record: Record, told: Told) -> bool:
    """Whether a state can have expired, a clock made it look so, or its client forfeited it."""
    is_rival = record.call.habit == "rivals" and bool(told.carried)
    return (is_rival and _has_faster_rival(outcome, record, told)) or _may_have_expired(outcome, record, told)


def _has_faster_rival(outcome: Outcome, record: Record, told: Told) -> bool:
    """Whether other answers may have come first: their result is here, was lost with a replica, or came too late."""
    others = [each for each in record.told if each.state == told.state and each.carried != told.carried]
    refused = [each for each in others if each.reason == "invalid_request_state"]
    is_lost = met(outcome, record, DEATHS) or any(_may_have_expired(outcome, record, each) for each in refused)
    return told is not record.final or bool(is_lost)


def _may_have_expired(outcome: Outcome, record: Record, told: Told) -> bool:
    """Whether nobody has a call any more, or may not seem to, whoever comes with this state."""
    if _came_back_late(outcome, record, told):
        return True
    hold = outcome.plan.config["hold"]
    if record.call.habit == "asks again" and len(outcome.ledger.of(record.call.tag)) > 1:
        return True  # it was told a round of another run, whose keys are the same, and answered the one before
    if "state" in outcome.plan.config and any(record.began <= when <= told.at for when, _ in outcome.deaths):
        return True  # its keys ended with the replica
    if record.left_unread and _has_happened(outcome, "call.cooled", told):
        return True  # nothing is left of the questions of a cold call but their state, which it did not read
    if _went_cold_since(outcome, record, told):
        return True
    age = told.at - min(record.states.get(told.state or "", told.at), _sealed_at(outcome, record, told.state))
    if met(outcome, record, frozenset({"slow", "power"}), until=told.at):
        return True  # who is slow, or asks a host without power first, comes back after grace
    return age + _clocks_apart(outcome, record, told) > hold["ttl_seconds"] - 1


def _clocks_apart(outcome: Outcome, record: Record, told: Told) -> float:
    """How far apart two readings of the replicas' clocks can have been: several jumps of one clock add up."""
    jumps = met(outcome, record, frozenset({"jump"}), until=told.at)
    read = {0.0}
    for jump in jumps:
        mine = [each for each in jumps if each.target == jump.target]
        for when in (begins(jump), begins(jump) + jump.seconds):
            read.add(sum(each.amount for each in mine if begins(each) <= when < begins(each) + each.seconds))
    return max(read) - min(read)


def _came_back_late(outcome: Outcome, record: Record, told: Told) -> bool:
    """Whether a call's owner did not hear of its client for all of the grace period after that had left."""
    grace_seconds = _grace_seconds(outcome)
    if told.unheard_since is not None and _arrived(outcome, told) - told.unheard_since > grace_seconds:
        # It lost its connection, and then asked replicas that could not answer.
        return bool(met(outcome, record, DEATHS | SILENCES, until=told.at))
    if (lost := _leg_lost_at(outcome, record, told)) is not None and _arrived(outcome, told) - lost > grace_seconds:
        return True
    left = record.left.get(told.state or "", math.inf)
    came = (each for each in record.told if each.state == told.state and each.at > left)
    back = next((each for each in came if not _is_parted_from_owner(outcome, each)), None)
    if back is None:
        return False
    heard = back.sent if _stood_still(outcome, back, left + grace_seconds) else back.at
    return heard - left > grace_seconds


def _grace_seconds(outcome: Outcome) -> float:
    return float(outcome.plan.config["hold"].get("grace_seconds", _GRACE_SECONDS))


def _stood_still(outcome: Outcome, told: Told, when: float) -> bool:
    """Whether the owner of a call, which its client asked itself, stood still from then until after this time.

    Not if the request may also have been late to arrive.
    """
    asked, silenced = _opened(outcome, told.state), _silenced(outcome, told)
    if asked is None or asked.owner != f"gw-{told.replica}" or any(each.kind not in _STOPS for each in silenced):
        return False
    return any(begins(each) <= told.sent and begins(each) + each.seconds > when + _STILL_SECONDS for each in silenced)


def _leg_lost_at(outcome: Outcome, record: Record, told: Told) -> float | None:
    """When an owner lost the leg of a client which was told then, where no link led to the owner, to come again.

    The connection of the replica where it waited was reset, or that replica ended. Or that one gave the leg up, and
    the owner heard of this, but of nothing more, though the client came again as often as it could.
    """
    before = [each for each in record.told if each.state == told.state and each.at <= told.sent]
    parted = [each for each in before if _is_parted_from_owner(outcome, each)]
    cuts = [begins(each) for each in outcome.faults if each.kind == "cut"]
    cut = [at for at in cuts for each in parted if each.sent <= at <= each.at]
    given_up, following = [], told
    for each in reversed(before):
        if each not in parted or not _came_when_it_could(outcome, record, each.at, following):
            break
        given_up.append(each)
        following = each
    heard = [each.at for each in given_up if _heard_of_the_end(outcome, each)]
    unheard = [each.unheard_since for each in parted if each.unheard_since is not None]
    return min([*cut, *unheard, *heard], default=None)


def _heard_of_the_end(outcome: Outcome, told: Told) -> bool:
    """Whether a link led to the owner of a call from the replica that gave a leg up there."""
    asked = _opened(outcome, told.state)
    link = {told.replica, int(asked.owner.removeprefix("gw-"))} if asked is not None else set()
    now = [each for each in outcome.faults if begins(each) <= told.at <= begins(each) + each.seconds]
    cuts = [each for each in now if each.kind == "part" or (each.kind == "one way" and each.target == told.replica)]
    return not any(each.target in link for each in cuts) and not any(set(_ends_of(each)) == link for each in now)


def _came_when_it_could(outcome: Outcome, record: Record, since: float, told: Told) -> bool:
    """Whether a client came at once, or may have tried in vain since then to reach yet another replica."""
    others = record.used - {told.replica}
    faults = [each for each in outcome.faults if each.kind in ("part", "power") and each.target in others]
    return told.sent <= since + _CONNECTS_SECONDS or any(
        begins(each) <= since + _CONNECTS_SECONDS and ends(outcome, each) >= told.sent - _CONNECTS_SECONDS
        for each in faults
    )


def _arrived(outcome: Outcome, told: Told) -> float:
    """When its replica can have read a request at the latest: it may have waited for a link that was down."""
    return told.at if _silenced(outcome, told) else told.sent


def _silenced(outcome: Outcome, told: Told) -> list[Fault]:
    """What parted a client from its replica between its request and the reply, or kept that replica from working."""
    mine = [each for each in outcome.faults if each.kind in SILENCES and each.target == told.replica]
    return [each for each in mine if begins(each) <= told.at and ends(outcome, each) >= told.sent]


def _went_cold_since(outcome: Outcome, record: Record, told: Told) -> bool:
    """Whether a request led to new questions, and then their call went cold: it keeps no questions.

    They were told to a copy of the request, or to a replica that did not hear of them: no link led there. Or the
    connection broke before the client had read them, so that it asks again.
    """
    asked, where = _opened(outcome, told.state), set()
    if asked is not None and told.unheard_since is not None:
        where.add((asked.owner, asked.round + 1, record.states[told.state or ""]))
    for each in record.told:
        if (each.state, each.carried) != (told.state, told.carried):
            continue
        if (told_of := _opened(outcome, each.result.get("requestState"))) is not None:
            where.add((told_of.owner, told_of.round, each.at))
        elif asked is not None and _is_parted_from_owner(outcome, each):
            where.add((asked.owner, asked.round + 1, each.sent))
    cooled = [line for line in outcome.lines if line.event == "call.cooled" and line.at <= told.at]
    return any(
        (line.process, line.fields["round"]) == (owner, round_) and line.at >= since
        for line in cooled
        for owner, round_, since in where
    )


def _is_parted_from_owner(outcome: Outcome, told: Told) -> bool:
    """Whether a replica could not tell the owner of a call that its client is back: it could not talk to it.

    Not if the owner stands still: then its grace period does too. A replica that took the call over, and then had no
    session for it, had not reached the owner either.
    """
    if told.reason == "busy":
        request_id = (told.error or {})["data"].get("requestId")
        return any(
            (line.event, line.fields.get("request_id")) == ("call.taken_over", request_id) for line in outcome.lines
        )
    return told.reason == "owner_stalled" and _is_parted_from_named(outcome, told)


def _is_parted_from_named(outcome: Outcome, told: Told) -> bool:
    """Whether no link led, while a replica served a request, to the one that its error names.

    Or the clock of one of the two had been set: a state or a request seems to be of the future there, or expired.
    """
    message = str((told.error or {}).get("message"))
    named = _replica_in(message)
    if named is None:
        return False
    ends_of_link = {int(named.removeprefix("gw-")), told.replica}
    faults = [each for each in outcome.faults if begins(each) <= told.at and ends(outcome, each) >= told.sent]
    is_apart = any(each.kind in ("part", "one way") and each.target in ends_of_link for each in faults)
    is_refused = "clock" in message and any(each.kind == "jump" and each.target in ends_of_link for each in faults)
    return is_apart or is_refused or any(set(_ends_of(each)) == ends_of_link for each in faults)


def _sealed_at(outcome: Outcome, record: Record, state: str | None) -> float:
    """When the time of a state began: it ages on its way to its client too. Infinite if its keys ended with a replica.

    A replica that only asks again for a silent owner gives its client no more time than the state of that one did.
    """
    envelope = _opened(outcome, state)
    if envelope is None:
        return math.inf
    others = [_opened(outcome, each) for each in record.states]
    same = [each.issued for each in others if each is not None and each.expires == envelope.expires]
    return min([envelope.issued, *same]) - BEGAN


def _opened(outcome: Outcome, state: str | None) -> Envelope | None:
    """What is in a state; None if there is none, or if its keys ended with a replica."""
    ring = Keyring([base64.b64decode(KEY), *outcome.own_keys], "state")
    try:
        return msgspec.msgpack.decode(ring.open(state or ""), type=Envelope)
    except InvalidState:
        return None


def _was_gone(outcome: Outcome, message: str, at: float) -> bool:
    """Whether the replica that an error names had ended, or let go of its calls."""
    owner = _replica_in(message)
    return any(name == owner and when <= at for when, name in outcome.deaths)


def _replica_in(message: str) -> str | None:
    """The replica that an error names."""
    found = re.search(r"replica (gw-\d+)", message)
    return None if found is None else found[1]


_HINDRANCES: Final = frozenset(
    {"kill", "power", "part", "one way", "stop", "stall", "slow", "split", "server", "dns", *CUTS}
)
_CAUSES: Final = {
    "owner_lost": DEATHS,
    "call_lost": frozenset({"server", "child", *CUTS, "part", "slow", *DEATHS}),
    "session_lost": frozenset({"server", "child", *DEATHS}),
    "upstream_unreachable": frozenset({"server", "child", "dns", "part", "slow", "stop", "cold cut"}),
    "stopping": DEATHS,
    "invalid_request_state": frozenset({"jump"}),
    "owner_stalled": SILENCES,
    "gave up": frozenset({*SILENCES, *DEATHS}),
    "broken": frozenset({*DEATHS, *CUTS, "part", "stop", "slow"} - WHOLE_DRAINS),
}
"""What can be the cause of an end that is no result, by its reason."""


def _is_explained(outcome: Outcome, record: Record) -> bool:
    """Whether something happened that can cost a client its result in this way."""
    reason, script = record.outcome, record.call.script
    if reason in ("result", "abandoned"):
        return True
    if record.call.is_legacy:  # it has one connection, and one replica
        return "refuses" in script or bool(met(outcome, record, DEATHS | CUTS | SILENCES | {"server", "dns"}))
    if reason == "error":
        assert record.final is not None
        reason = record.final.reason
        if record.call.habit == "cannot be asked" and (record.final.error or {}).get("code") == _LACKS_CAPABILITY:
            return True
        if reason == "invalid_request_state" and _may_be_invalid(outcome, record, record.final):
            return True
    if reason in ("busy", "gave up") and "sessions" in outcome.plan.config.get("route", {}):
        return True  # another call of its caller has their one session
    if reason == "call_lost" and _may_belong_to_another_call(outcome, record.call.caller):
        return True
    is_taken_over = record.final is not None and _has_happened(outcome, "call.taken_over", record.final)
    if reason == "call_lost" and script.get("aside") and is_taken_over and met(outcome, record, SILENCES):
        return True  # who takes a call over does not hear what comes on the side stream of its former owner
    if reason == "call_lost" and _left_a_question_unread(outcome, record):
        return True
    hung_seconds = script.get("hangs", 0.0) * len(outcome.ledger.of(record.call.tag))
    if reason == "gave up" and hung_seconds >= PATIENCE_SECONDS:
        return True  # its tool ran again, because it had not taken an answer, and hung each time
    if reason == "call_lost" and _seemed_to_keep_connections(outcome, record.final):
        return True
    if reason == "call_lost" and any(run.is_unheard for run in outcome.ledger.of(record.call.tag)):
        return True
    if reason == "call_lost" and _lost_its_taker(outcome, record.final):
        return True
    if reason == "call_lost" and ("refuses" in script or _hangs_for_too_long(outcome, record)):
        return True
    if reason == "upstream_unreachable" and _came_while_no_child_is_started(outcome, record.final):
        return True
    if reason == "stopping" and _outlasted_a_drain(outcome, record.final):
        return True
    if reason in ("broken", "session_lost") and _read_beyond_a_deadline(outcome, record):
        return True
    if reason in ("session_lost", "call_lost") and _came_when_its_call_was_over(outcome, record):
        return True
    if reason == "session_lost" and _left_its_result_unread_before_a_drain(outcome, record):
        return True
    if reason == "session_lost" and _had_its_session_after_a_call_that_came_again(outcome, record):
        return True
    causes = _CAUSES.get(reason, frozenset())
    # A replica that has ended does not say whether it sent a call again after visits to URLs.
    said = "" if record.final is None else str((record.final.error or {}).get("message"))
    may_be_sent_already = "sent again since" in said and script.get("urls") and not _may_run_again(outcome, record)
    is_unfindable = (
        may_be_sent_already or _leads_nowhere(outcome, record) or _was_given_up_by_a_former_owner(outcome, record)
    )
    is_left = reason in ("owner_lost", "call_lost", "session_lost") and _is_left_behind(outcome, record)
    if is_left and not is_unfindable:
        causes -= WHOLE_DRAINS
    return any(_may_have_begun(outcome, record, each) for each in met(outcome, record, causes))


def _came_when_its_call_was_over(outcome: Outcome, record: Record) -> bool:
    """Whether a clock made a state look valid, whose call had been held for all of its time and given up.

    Who knows of that may have ended, so that another one resumes the call, in which nothing comes any more.
    """
    ttl_seconds = outcome.plan.config["hold"]["ttl_seconds"]
    ages = [
        (told.at - record.states[told.state], _clocks_apart(outcome, record, told))
        for told in record.told
        if told.state in record.states and told.reason != "owner_stalled"
    ]
    return any(age - apart <= ttl_seconds < age for age, apart in ages)


def _may_have_begun(outcome: Outcome, record: Record, fault: Fault) -> bool:
    """Whether a call began before a replica drained, so that this can have ended it: others begin the new calls.

    A replica that is stopped hears of its drain when it goes on, and serves first what has come meanwhile.
    """
    if fault.kind not in WHOLE_DRAINS:
        return True
    name, when = f"gw-{fault.target}", begins(fault)
    drains = [line for line in outcome.lines if (line.event, line.process) == ("server.draining", name)]
    began = (line.at + line.fields["delay_seconds"] for line in drains if line.at >= when)
    return record.began < min(began, default=when + outcome.plan.config["hold"]["drain_delay_seconds"])


def _seemed_to_keep_connections(outcome: Outcome, told: Told | None) -> bool:
    """Whether a call met the end of a connection that its server, which closes them early, had seemed to keep.

    While a link was down or a process stood still, a replica heard of the end of a connection too late.
    """
    server = outcome.plan.server
    if told is None or server.says_keep_alive or server.idle_seconds >= KEEP_ALIVE_SECONDS:
        return False
    before = [
        each for each in outcome.faults if each.kind in SILENCES - {"peers", "jump"} and begins(each) <= told.sent
    ]
    is_seen = any(each.kind == "slow" or each.target == told.replica for each in before)
    return is_seen and "broke the connection without a reply" in str(told.error)


def _left_a_question_unread(outcome: Outcome, record: Record) -> bool:
    """Whether its client left a question of the side stream unread, and the replica that had heard it ended.

    Only the reply that was left tells of that question: who takes the call over does not hear it.
    """
    names, ended = {f"gw-{number}" for number in record.used}, record.ended or math.inf
    deaths = [when for when, name in outcome.deaths if name in names and when <= ended]
    unread = [
        run.asked_aside
        for run in outcome.ledger.of(record.call.tag)
        if run.asked_aside is not None and run.asked[-1] not in record.asked
    ]
    return any(
        asked <= left <= death + _LEAVES_SECONDS and asked <= death
        for asked in unread
        for left in record.unread
        for death in deaths
    )


def _lost_its_taker(outcome: Outcome, told: Told | None) -> bool:
    """Whether a draining replica gave a call to another one, and the link between the two failed meanwhile.

    Or the other one stood still when the drain was over, or as it was given the call: so much later its leg ends.
    """
    if told is None or "to which another one gave this call" not in str(told.error):
        return False
    taker = _replica_in(str((told.error or {}).get("message")))
    still = [each for each in outcome.faults if each.kind in _STOPS and f"gw-{each.target}" == taker]
    is_still = any(begins(each) <= told.at <= ends(outcome, each) for each in still)
    is_late = any(begins(each) <= told.sent <= begins(each) + each.seconds - _LEG_LATE_SECONDS for each in still)
    return is_still or is_late or _is_parted_from_named(outcome, told)


def _came_while_no_child_is_started(outcome: Outcome, told: Told | None) -> bool:
    """Whether children of its replica were killed one after the other before they were of use: the pauses grow."""
    found = None if told is None else re.search(r"(\d+) times in a row; it is started again in", str(told.error))
    if told is None or found is None:
        return False
    times = int(found[1])
    here = [line for line in outcome.lines if line.process == f"gw-{told.replica}" and line.at <= told.at]
    ended = [line.at for line in here if line.event == "child.ended"][-times:]
    kills = [begins(each) for each in outcome.faults if each.kind == "child"]
    are_killed = all(any(kill <= at <= kill + _NOTICES_SECONDS for kill in kills) for at in ended)
    pause = _FIRST_PAUSE_SECONDS * 2 ** (times - 1)
    return len(ended) == times and are_killed and told.at - ended[-1] < pause


def _outlasted_a_drain(outcome: Outcome, told: Told | None) -> bool:
    """Whether a request that passed through had no answer when the time of its replica's drain was over.

    A draining replica still passes requests through, and cannot hand them over.
    """
    if told is None or "had not answered when the gateway shut down" not in str(told.error):
        return False
    drains = [line for line in outcome.lines if line.event == "server.draining" and line.at <= told.at]
    mine = [line for line in drains if line.process == f"gw-{told.replica}"]
    return any(line.at + line.fields["deadline_seconds"] <= told.at for line in mine[-1:])


def _read_beyond_a_deadline(outcome: Outcome, record: Record) -> bool:
    """Whether its client was still not reading a reply when the time of a drain was over: the rest of it is lost.

    If that was the result, its session may have ended when it was given.
    """
    noticed = record.ended if record.final is None else record.final.unheard_since
    if record.call.habit != "reads late" or noticed is None:
        return False
    names = {f"gw-{number}" for number in record.used}
    deadlines = [
        (line.process, line.at + line.fields["deadline_seconds"])
        for line in outcome.lines
        if line.event == "server.draining" and line.process in names
    ]
    late = [when for when, name in outcome.deaths if any(name == each and when >= end for each, end in deadlines)]
    return any(_NOTICES_SECONDS < noticed - when <= _READS_LATER_SECONDS for when in late)


def _left_its_result_unread_before_a_drain(outcome: Outcome, record: Record) -> bool:
    """Whether its client had not read the result yet when the replica that had given it heard of a drain, and ended.

    The session that a replica has adopted serves no other call, and ends with its result. In a drain it is left to the
    next process, but nobody knows of a drain to come.
    """
    adopted = [line for line in outcome.lines if line.event in ("call.taken_over", "call.cooled")]
    drains = [line for line in outcome.lines if line.event == "server.draining"]
    for run in outcome.ledger.of(record.call.tag):
        given = outcome.ledger.ended.get(run.session)
        if given is None or run.result is None:
            continue
        names = {line.process for line in adopted if line.at <= given}
        names &= {line.process for line in drains if given <= line.at <= given + _LINGERS_SECONDS}
        deaths = [when for when, name in outcome.deaths if name in names and when >= given]
        if any(when <= left + _CONNECTS_SECONDS for when in deaths for left in record.unread):
            return True
    return False


def _had_its_session_after_a_call_that_came_again(outcome: Outcome, record: Record) -> bool:
    """Whether its session ended with a call that had been there before, and whose client had not read its result.

    That one came again after the end of their process, as both of them did. Its state leads to the session, and does
    not say that another call has it since.
    """
    for run in outcome.ledger.of(record.call.tag):
        gone = outcome.ledger.ended.get(run.session, math.inf)
        before = [each for each in outcome.ledger.runs if each.session == run.session and each.result is not None]
        tags = {each.tag for each in before if (each.ended or math.inf) <= run.began}
        if not any(run.began <= when <= gone for when, _ in outcome.deaths):
            continue
        finals = [each.final for each in outcome.records if each.call.tag in tags]
        if any(each is not None and run.began <= each.sent <= gone <= each.at + _CANCELS_SECONDS for each in finals):
            return True
    return False


def _is_left_behind(outcome: Outcome, record: Record) -> bool:
    """Whether a replica that ends as it should leaves its calls to the others, which can resume their streams."""
    if record.call.path == "/child":
        return False
    return outcome.plan.server.has_events and "sessions" not in outcome.plan.config.get("route", {})


def _was_given_up_by_a_former_owner(outcome: Outcome, record: Record) -> bool:
    """Whether a silent owner, whose call another replica had taken over, gave it up when its client did not come back.

    The replica that could have told it of the takeover had ended by then.
    """
    finished = [line for line in outcome.lines if line.event == "exchange.finished"]
    given_up = [(line.process, line.at) for line in finished if line.fields["outcome"] == "cancelled"]
    taken = [line for line in outcome.lines if line.event == "call.taken_over" and not line.fields["owner_is_dead"]]
    return any(
        (line.process, line.fields["owner"]) == (taker, owner) and line.at <= ended <= at <= (record.ended or math.inf)
        for line in taken
        if any(told.sent <= line.at <= told.at for told in record.told)
        for ended, taker in outcome.deaths
        for owner, at in given_up
    )


def _leads_nowhere(outcome: Outcome, record: Record) -> bool:
    """Whether its last state was sealed before the call had a session: who drains hands it over without waiting.

    Or before the first event id of its stream had come.
    """
    envelope = None if record.final is None else _opened(outcome, record.final.state)
    if envelope is None or record.final is None:
        return False
    where = envelope.upstream
    return where is None or (not where.is_resumable and _was_overtaken(outcome, record, record.final.state))


def _was_overtaken(outcome: Outcome, record: Record, state: str | None) -> bool:
    """Whether a state was sealed while what its server had sent first was still on its way, since everything was slow.

    A question on the side stream comes over another connection.
    """
    sealed = _sealed_at(outcome, record, state)
    sent = max((run.began for run in outcome.ledger.of(record.call.tag) if run.began <= sealed), default=-math.inf)
    return _may_arrive(outcome, sent, sealed)


def _may_arrive(outcome: Outcome, sent: float, when: float) -> bool:
    """Whether what was sent while everything was slow may still have been on its way at a later time."""
    return is_slow(outcome, sent) and when <= sent + ARRIVES_SECONDS


def _hangs_for_too_long(outcome: Outcome, record: Record) -> bool:
    longest = outcome.plan.config.get("timeouts", {}).get("idle_seconds", 300)
    return bool(record.call.script.get("hangs", 0.0) >= longest)
