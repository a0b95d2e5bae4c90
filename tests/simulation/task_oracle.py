"""Judges what clients were told of their tasks: one end, with their own result, and no task that runs twice."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tests.simulation.causes import CUTS, DEATHS, SILENCES, met
from tests.simulation.history import Outcome
from tests.simulation.server import Run
from tests.simulation.task_client import TaskRecord
from tests.simulation.task_server import WITHDRAWN
from tests.simulation.world import START

_TROUBLE: Final = DEATHS | CUTS | SILENCES | {"server", "dns"}
_NOT_GIVEN: Final = ({"action": "cancel"}, {"error": -32602})
"""What the gateway answers to the questions of a task that nobody follows, or that goes on though it is cancelled."""
_CANCELS_SECONDS: Final = 2.0
"""How soon after its client was told so a task is cancelled at its server."""
_CAUSES: Final = {
    "broken": _TROUBLE,
    "refused": _TROUBLE,
    "gave up": DEATHS | SILENCES,
    "unknown": frozenset({"server", "jump"}),
    "error": frozenset({"server", "dns", "part", "slow"}),
}
"""What can be the cause of an end that is no result."""


def complaints(outcome: Outcome) -> Iterator[str]:
    """Everything that is wrong with the tasks of a history."""
    for record in outcome.tasks:
        for complaint in _of_task(outcome, record):
            yield f"{record.call.tag}: {complaint}"


def _of_task(outcome: Outcome, record: TaskRecord) -> Iterator[str]:
    yield from record.strange
    runs = outcome.ledger.of(record.call.tag)
    if record.ended is None:
        return  # it is left
    if len(runs) > 1:
        yield f"ran {len(runs)} times"
    if record.is_driven and not _was_taken_over(outcome, record):
        yield "was served without a task"
    # The replica that follows a task may be any, when its client asks others.
    anywhere = replace(record, used=set(range(1, outcome.plan.replicas + 1)))
    trouble = met(outcome, anywhere, _TROUBLE)
    for run in runs:
        yield from _of_run(record, run, is_troubled=bool(trouble))
    for name in record.asked:
        if not any(name in run.asked for run in runs):
            yield f"was asked {name}, which nobody asked"
    # Its server may refuse the first answer to each question, which its client then sends again.
    refused = record.call.script["questions"] if "refuses" in record.call.script else 0
    if len(record.refusals) > refused and not trouble:
        yield f"was refused without a cause: {record.refusals[0]}"
    # Who followed the task before it was taken over may have been cut off from its server and from the other replicas,
    # and know of no end and no answer.
    if not met(outcome, anywhere, SILENCES | CUTS):
        if record.came_back is not None and not _is_secret(outcome, record, anywhere):
            yield f"was told at {record.came_back - START:.2f} that its task goes on, after its end"
        yield from (f"was asked {name} again after its answer" for name in record.asked_again)
    if record.ended_twice and not _is_secret(outcome, record, anywhere):
        yield f"ended twice: {record.ended_twice}"
    yield from _of_end(outcome, record, runs)
    if not _is_explained(outcome, record, anywhere, runs):
        why = "" if record.final is None else (record.final.error or {}).get("message")
        yield f"ended without a cause: {record.outcome} {why}"


def _is_secret(outcome: Outcome, record: TaskRecord, anywhere: TaskRecord) -> bool:
    """Whether a task is cancelled without its server, and the replica that did so may have ended, or was silent."""
    is_cancelled = any(status == "cancelled" for _, status in record.views)
    return is_cancelled and "fragile" in record.call.script and bool(met(outcome, anywhere, DEATHS | SILENCES))


def _was_taken_over(outcome: Outcome, record: TaskRecord) -> bool:
    """Whether its call went on at another replica before there was a task: that one drives the task itself."""
    taken = {line.fields["request_id"] for line in outcome.lines if line.event == "call.taken_over"}
    return bool(taken & record.requests)


def _of_run(record: TaskRecord, run: Run, *, is_troubled: bool) -> Iterator[str]:
    given, script = {said for answers in record.given.values() for said in answers}, record.call.script
    is_fragile = bool(script.get("fragile"))
    # A task that nobody has heard of, since its client or the gateway lost the connection of its call, is cancelled.
    is_unheard_of = record.task is None and (
        record.outcome == "broken" or (record.outcome == "refused" and is_troubled)
    )
    is_given_up = is_unheard_of or (is_fragile and record.wanted_cancelled is not None)
    for name, answer in zip(run.asked, run.answers, strict=False):
        if answer == WITHDRAWN:
            if not is_troubled and record.outcome == "result" and script["patience"] > record.call.think:
                yield f"run {run.number} got no answer to {name}"
        elif is_given_up and answer in _NOT_GIVEN:
            pass
        elif str(answer) not in given or not str(answer).startswith(f"{name}="):
            yield f"run {run.number} got the answer {answer} to {name}, which its client did not give"
    if run.ended is None:
        yield f"run {run.number} is left running"
    if run.cancelled is not None and record.wanted_cancelled is None and not is_unheard_of:
        yield f"run {run.number} was cancelled, which its client did not want"
    if run.is_harmed:
        yield f"run {run.number} was cancelled, which does harm"
    if record.was_cancelled is not None and not is_troubled and run.cancelled is None and not is_fragile:
        went_on = (run.ended or math.inf) > record.was_cancelled + _CANCELS_SECONDS
        if went_on or run.result is None:
            yield f"run {run.number} was not cancelled"


def _of_end(outcome: Outcome, record: TaskRecord, runs: list[Run]) -> Iterator[str]:
    if record.outcome == "cancelled" and record.wanted_cancelled is None:
        yield "was told that its task is cancelled, which it did not want"
    if record.outcome == "result":
        assert record.final is not None
        text = record.final.result["content"][0]["text"]
        if not any(text in run.results for run in runs):
            yield f"got a result that is not its own: {text}"
        elif any(each not in json.loads(text)["answers"] for run in runs for each in run.answers):
            yield f"got another result than that of its run: {text}"
    if any(status == "completed" for _, status in record.views) and not any(run.result for run in runs):
        yield "was told that its task is completed, which it is not"


def _is_explained(outcome: Outcome, record: TaskRecord, anywhere: TaskRecord, runs: list[Run]) -> bool:
    """Whether something happened that can cost a client its result in this way."""
    kind = record.outcome
    if kind in ("result", "abandoned", "cancelled"):
        return True
    if kind == "error" and record.final is not None:
        said = (record.final.error or {}).get("message")
        if any(run.result == said for run in runs):
            return True
    causes = _CAUSES.get(kind, frozenset())
    if kind == "unknown" and "state" in outcome.plan.config:
        causes |= DEATHS  # its key ended with the replica
    return bool(met(outcome, anywhere, causes))
