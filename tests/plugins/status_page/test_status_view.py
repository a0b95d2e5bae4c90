"""The texts and figures of the status page, without its HTML."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway import world
from gateway.plugins.status_page.status_view import (
    ago,
    duration,
    mode,
    only,
    sessions_near_limit,
    sessions_note,
    streams,
    view,
    waits_for,
)
from gateway.telemetry.metrics.registry import BudgetStatus
from gateway.telemetry.process_status import ErrorStatus, Failure, ProcessStatus, Status, StatusNotice
from tests.support.status import held, process, route, status_of


def test_a_status_without_problems_is_good() -> None:
    shown = view(status_of(process(0)))
    assert (shown.level, shown.verdict, shown.status.notices) == ("good", "ready", ())


def test_a_draining_process_is_a_warning() -> None:
    shown = view(replace(status_of(process(0)), state="draining"))
    assert (shown.level, shown.verdict) == ("warn", "draining")


def test_problems_are_counted_and_come_first() -> None:
    caution, problem = StatusNotice("caution", is_bad=False), StatusNotice("problem")
    shown = view(status_of(process(0), notices=(caution, problem)))
    assert (shown.level, shown.verdict, shown.status.notices) == ("bad", "ready, 1 problem", (problem, caution))


@pytest.mark.parametrize(
    ("answered", "since", "text"),
    [
        (None, 0.0, "; it last failed 1 s ago"),
        (61, 60.0, " since 23:59:30 UTC (1 min); it last failed 1 s ago and answered 1 min 1 s ago"),
    ],
)
def test_a_failing_upstream_is_a_problem_with_its_fix(
    answered: float | None, since: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "wall", lambda: 86_430.0)
    failure = Failure(kind="call_lost", cause="the cause", fix="the fix", seconds_ago=1, since_seconds_ago=since)
    failing = route(health="failing", last_failure=failure, last_ok_seconds_ago=answered)
    (notice,) = view(status_of(process(0), routes=(failing,), routes_total=1)).status.notices
    assert notice.text == f"The upstream of /mcp is failing{text}"
    assert (notice.fix, notice.detail) == ("the fix", "the cause")


@pytest.mark.parametrize(
    ("uptimes", "forgotten"),
    [
        ((0.0, 50.0, 60.0), ""),  # the first one told nothing, which has a notice of its own
        ((9.0, 60.0), "; an answer since may be forgotten: 1 process started later"),
        ((9.0, 49.9), "; an answer since may be forgotten: 2 processes started later"),
    ],
)
@pytest.mark.parametrize("since", [50.0, 0.0])  # an older replica does not tell it
def test_a_process_that_started_after_a_failure_may_have_forgotten_an_answer(
    uptimes: tuple[float, ...], forgotten: str, since: float
) -> None:
    failure = Failure(kind="k", cause="c", fix="f", seconds_ago=40 if since else 50, since_seconds_ago=since)
    processes = [replace(process(number), uptime_seconds=seconds) for number, seconds in enumerate(uptimes)]
    (notice,) = view(status_of(*processes, routes=(route(health="failing", last_failure=failure),))).status.notices
    assert notice.text.endswith(f"it last failed {ago(failure.seconds_ago)}{forgotten}")
    assert ("UTC (50 s) or later;" in notice.text) == bool(forgotten and since)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"last_ok_seconds_ago": 40.0}, "last answer 40 s ago; 3 running calls, the oldest for 31 s"),
        ({"last_ok_seconds_ago": None, "running": 1}, "last answer never; 1 running call, the oldest for 31 s"),
        ({"last_ok_seconds_ago": 40.0, "running": 0}, "last answer 40 s ago; 1 running call, the oldest for 31 s"),
        ({"last_ok_seconds_ago": 40.0, "unsent": 1}, "last answer 40 s ago; 2 running calls, the oldest for 31 s"),
        ({"last_ok_seconds_ago": 29.0}, None),  # a slow tool, or a call before the last answer
        ({"last_ok_seconds_ago": 40.0, "oldest_call_seconds": 29.0}, None),
        ({"last_ok_seconds_ago": 40.0, "oldest_call_seconds": None, "running": 0}, None),
    ],
)
def test_a_server_that_answers_nothing_while_calls_wait_may_hang(fields: dict[str, Any], text: str | None) -> None:
    waits = route(**{"oldest_call_seconds": 31.0, "running": 3, **fields})
    shown = view(status_of(process(0), routes=(waits,)))
    assert [each.text for each in shown.status.notices] == ([f"The upstream of /mcp may hang: {text}"] if text else [])
    assert (shown.level, shown.verdict) == ("good", "ready")


def test_one_route_alone_has_its_own_calls_and_errors() -> None:
    def error(path: str) -> ErrorStatus:
        return ErrorStatus(kind="k", route=path, text="t", fix="f", count=1, first_seconds_ago=1, last_seconds_ago=1)

    routes = tuple(route(path=path, held=number) for number, path in enumerate(("/one", "/two"), 1))
    calls = tuple(replace(held(1), route=path) for path in ("/one", "/two", "/two"))
    status = status_of(process(0), routes=routes, held=calls, errors=(error("/one"), error("/two")))
    found = only(status, "/two")
    assert (found.routes, found.routes_total) == (routes[1:], 1)
    assert (found.held, found.held_total) == (calls[1:], 2)
    assert found.errors == (error("/two"),)
    assert found.processes == status.processes


def limits(status: Status) -> list[str]:
    return [notice.text for notice in view(status).status.notices]


def test_a_budget_that_is_nearly_full_is_a_problem() -> None:
    def notices(used_bytes: int, name: str = "limits.sending_bytes") -> list[tuple[str, str]]:
        budget = BudgetStatus(used_bytes, 10_000, 0)
        shown = view(status_of(replace(process(0), budgets={name: budget})))
        return [(notice.text, notice.fix) for notice in shown.status.notices]

    behind = "At the limit, the client that is behind longest is closed"
    assert notices(8_000) == [("limits.sending_bytes: 8,000 of 10,000 bytes", behind)]
    assert notices(7_999) == []
    refused = "At the limit, new calls that do not fit are refused"
    assert notices(9_000, "limits.calls_bytes") == [("limits.calls_bytes: 9,000 of 10,000 bytes", refused)]
    assert notices(9_000, "limits.of_a_newer_replica") == [("limits.of_a_newer_replica: 9,000 of 10,000 bytes", "")]


def test_a_limit_that_is_nearly_reached_is_a_problem() -> None:
    busy = ProcessStatus(id="gw-1", state="ready", held=8, held_limit=10, connections=79, connections_limit=100)
    assert limits(status_of(busy)) == ["Held calls: 8 of 10 (hold.max_calls)"]
    fixes = [notice.fix for number in (9, 10) for notice in view(status_of(replace(busy, held=number))).status.notices]
    assert fixes == [
        "When the limit is reached, new ones are refused; see Callers",
        "New ones are refused; see Callers",
    ]
    (others,) = view(status_of(replace(busy, held=0, connections=80))).status.notices
    assert others.fix == "When the limit is reached, new ones are refused", "which the page does not count by caller"
    (files,) = view(status_of(replace(busy, held=0, open_files=8, open_files_limit=10))).status.notices
    assert files.fix == "When the limit is reached, new ones are refused, once no session is idle"
    assert limits(status_of(busy, process(0))) == ["Held calls in gw-1: 8 of 10 (hold.max_calls)"]


@pytest.mark.parametrize(
    ("most_children", "key"), [(None, "sessions.max"), (10, "upstream.max_children"), (11, "sessions.max")]
)
def test_idle_sessions_do_not_count_towards_their_limit(most_children: int | None, key: str) -> None:
    def near(idle: int) -> list[str]:
        sessions = {"idle": idle, "busy": 8 - idle}
        one = route(sessions=sessions, sessions_limit=10, children=most_children and 8, children_limit=most_children)
        return [notice.text for notice in sessions_near_limit([one])]

    assert near(0) == [f"Sessions in use on /mcp: 8 of 10 ({key})"]
    assert near(1) == []


def test_the_figures_add_up_all_processes_and_errors() -> None:
    error = ErrorStatus(kind="busy", route="/mcp", text="t", fix="f", count=3, first_seconds_ago=2, last_seconds_ago=1)
    parts = [replace(process(number), held_limit=10, in_flight=2) for number in (1, 2)]
    failing = route(health="failing")
    shown = view(status_of(*parts, routes=(failing,), routes_total=4, held_total=3, errors=(error,)))
    figures = {figure.label: figure for figure in shown.figures}
    assert (figures["Held calls"].number, figures["Held calls"].limit) == (3, 20)
    assert figures["In flight"].number == 4
    upstreams = figures["Upstreams failing"]
    assert (upstreams.number, upstreams.unit, upstreams.is_bad) == (1, "of 4", True)
    assert (figures["Errors"].number, figures["Errors"].unit) == (3, "listed below")
    quiet = {figure.label: figure for figure in view(status_of(process(0))).figures}
    assert (quiet["Errors"].unit, quiet["Upstreams failing"].is_bad) == ("since the start", False)


@pytest.mark.parametrize(
    ("fields", "shown", "note", "open_"),
    [
        (
            {},
            "auto, era not known yet",
            "1 idle, 2 busy, 1 call waiting for one",
            "1 bridged",
        ),
        (
            {"transport": "stdio", "era": "old", "continuation": "replay", "children": 2, "children_limit": 1000},
            "stdio, legacy, continuation: replay",
            "1 idle, 2 busy, 1 call waiting for one, 2 child processes of 1,000",
            "1 bridged",
        ),
        (
            {"era": "modern", "sessions": {}, "waiting": 0, "subscriptions": 0, "streams": 1200},
            "auto, modern, passed through",
            "",
            "1,200 passed through",
        ),
        (
            {"waiting": 0, "tasks": 2, "client_sessions": 3},
            "auto, era not known yet",
            "1 idle, 2 busy, 2 tasks in them, 3 of legacy clients",
            "1 bridged",
        ),
        (
            {"sessions": {}, "waiting": 2, "subscriptions": 0},
            "auto, era not known yet",
            "2 calls waiting for one",
            "none",
        ),
    ],
)
def test_the_row_of_a_route(fields: dict[str, Any], shown: str, note: str, open_: str) -> None:
    row = route(**fields)
    assert (mode(row), sessions_note(row), streams(row)) == (shown, note, open_)


def test_what_a_held_call_waits_for() -> None:
    calls = (
        held(1),
        replace(held(1), asked=("elicitation", "roots")),
        replace(held(1), state="broken", asked=("roots",)),
        replace(held(1), state="finished", is_lost=True),
        replace(held(1), running_seconds=9.0, silent_seconds=9.0),
        replace(held(1), running_seconds=9.0),  # it is sent anew
    )
    assert [*map(waits_for, calls)] == [
        "the client's next request",
        "elicitation, roots",
        "roots; the upstream call was lost and will run again",
        "lost: the client will be told",
        "the server's response; between rounds of its client",
        "a session with the server, or its list of tools; between rounds of its client",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(None, "never"), (0.9, "just now"), (1, "1 s ago"), (61, "1 min 1 s ago")]
)
def test_ages_are_words(seconds: float | None, words: str) -> None:
    assert ago(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0 s"), (0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (61, "1 min 1 s"), (7260, "2 h 1 min"),
        (180_000, "2 d 2 h"),
    ],
)  # fmt: skip
def test_a_duration_has_its_two_largest_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words
