"""Judges a history: what the clients were told must be true in the light of what the server did."""

import json
from collections.abc import Iterator
from typing import Any, Final

from tests.simulation.client import Record, Told
from tests.simulation.history import Outcome
from tests.simulation.server import Run

BUG_LEVELS: Final = ("error", "critical", "exception")
_NOTHING_RAN: Final = ("upstream_unreachable", "busy", "stopping")
"""Reasons of errors that say that the tool has not run."""
_HARMLESS: Final = frozenset({"split", "dns", "drift"})
"""Faults that cost no call."""


def complaints(outcome: Outcome) -> list[str]:
    """Everything that is wrong with a history."""
    return [*_of_calls(outcome), *_of_processes(outcome)]


def _of_processes(outcome: Outcome) -> Iterator[str]:
    yield from (f"failure: {each}" for each in outcome.failures)
    yield from (f"end: {each}" for each in outcome.ended_badly)
    lost = _lost_a_replica(outcome)
    yield from (f"left: {each}" for each in outcome.left if not (lost and each.startswith("server ")))
    yield from (f"server: {each}" for each in outcome.ledger.strange)
    for line in outcome.lines:
        if line.level in BUG_LEVELS:
            yield f"log: {line.process} {line.event} {line.fields}"


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
        if not any(name in run.asked for run in runs):
            yield f"was asked {name}, which nobody asked"
    given = {said for answers in record.given.values() for said in answers}
    for run in runs:
        yield from _of_run(record, run, given)
        if run.ended is None and not _lost_a_replica(outcome):
            yield f"run {run.number} is left running"
    yield from _repetitions(record, runs)
    for told in record.told:
        yield from _of_told(outcome, record, told, runs)
    if record.outcome == "error" and record.final is not None and not _may_fail(outcome, record):
        error = record.final.error or {}
        yield f"failed for no reason: {record.final.reason} {error.get('message')}"
    if record.outcome == "gave up" and not _may_fail(outcome, record):
        yield "gave up for no reason"


def _of_run(record: Record, run: Run, given: set[str]) -> Iterator[str]:
    for name, answer in zip(run.asked, run.answers, strict=False):
        number = name.rpartition("/")[2]
        said = {each for each in given if each.partition("=")[0].rpartition("/")[2] == number}
        if isinstance(answer, dict):
            continue
        if answer is not None and answer not in said:
            yield f"run {run.number} got the answer {answer} to {name}, which its client did not give"


def _lost_a_replica(outcome: Outcome) -> bool:
    """Whether a replica ended without a word: nobody may be left who can cancel its calls."""
    return any(fault.kind in ("kill", "power", "term", "term twice") for fault in outcome.plan.faults)


def _repetitions(record: Record, runs: list[Run]) -> Iterator[str]:
    if record.call.tool == "pay" and len(runs) > 1:
        yield f"ran {len(runs)} times: {[(run.number, round(run.began, 2)) for run in runs]}"
    for run in runs[:-1]:
        if record.call.tool == "search" and run.cancelled is None and run.result is None and run.ended is None:
            yield f"was run again, and run {run.number} was not cancelled"


def _of_told(outcome: Outcome, record: Record, told: Told, runs: list[Run]) -> Iterator[str]:
    result = told.result
    if told.error is None and result.get("resultType") == "complete":
        yield from _of_result(record, result, runs)
    if told.error is not None:
        yield from _of_error(outcome, record, told, runs)


def _of_result(record: Record, result: dict[str, Any], runs: list[Run]) -> Iterator[str]:
    text = result["content"][0]["text"]
    own = [run for run in runs if run.result == text]
    if not own:
        yield f"got a result that is not its own: {text}"
        return
    answers = json.loads(text)["answers"]
    given = {said for each in record.given.values() for said in each}
    for answer in answers:
        if answer is not None and answer not in given and not isinstance(answer, dict):
            yield f"got a result with the answer {answer}, which it did not give"
        if answer is None or isinstance(answer, dict):
            yield f"got a result of a question that was answered for it: {text}"


def _of_error(outcome: Outcome, record: Record, told: Told, runs: list[Run]) -> Iterator[str]:
    error = told.error or {}
    message = str(error.get("message", ""))
    before = [run for run in runs if run.began <= told.at]
    if told.is_first and told.reason in _NOTHING_RAN and before and len(record.told) == 1:
        yield f"was told that nothing ran ({message}), but it did"
    if told.reason == "invalid_request_state" and not _may_be_invalid(outcome, record):
        yield f"was told at {told.at:.2f} that its state is invalid"
    if told.status >= 500 and told.status != 503:
        yield f"got HTTP {told.status}: {message}"


def _may_be_invalid(outcome: Outcome, record: Record) -> bool:
    """Whether a state can have expired, or a clock made it look so."""
    ttl = outcome.plan.config["hold"]["ttl_seconds"]
    assert record.ended is not None
    if any(fault.kind == "jump" and abs(fault.amount) > 0 for fault in outcome.plan.faults):
        return True
    return record.ended - record.began > ttl or record.call.habit in ("rivals", "twice", "leaves")


def _may_fail(outcome: Outcome, record: Record) -> bool:
    """Whether anything happened that can cost a call."""
    kinds = {fault.kind for fault in outcome.plan.faults} - _HARMLESS
    return bool(kinds) or record.call.habit in ("rivals", "leaves")
