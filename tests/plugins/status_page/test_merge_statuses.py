"""Statuses are merged into one; the latest answer or failure decides the health of a route."""

import re
from itertools import zip_longest

import pytest
from msgspec.structs import fields, replace

from gateway.plugins.status_page.merge_statuses import Heard, health, of_cluster, of_host
from gateway.plugins.status_page.status_page import page
from gateway.telemetry.process_status import (
    MOST_CALLERS,
    CallerStatus,
    ErrorStatus,
    Failure,
    KeyStatus,
    PeerState,
    PeerStatus,
    ProcessStatus,
    RouteStatus,
    Status,
    StatusNotice,
    Use,
)
from tests.support.status import held, process, route, status_of


def of_workers(own: Status, *others: Status, **silent: Heard) -> Status:
    heard = {f"gw-1#{number}": Heard(state="answered", status=other) for number, other in enumerate(others, 1)}
    return of_host(replace(own, replica="gw-1#0"), {**heard, **silent}, "gw-1")


def test_the_latest_answer_or_failure_decides_the_health() -> None:
    failure = Failure(kind="k", cause="c", fix="f", seconds_ago=5)
    assert health(None, None) == "unknown"
    assert health(9.0, None) == "ok"
    assert health(None, failure) == "failing"
    assert health(9.0, failure) == "failing"
    assert health(1.0, failure) == "ok"


def test_the_statuses_of_workers_are_merged_into_one() -> None:
    failure = Failure(kind="call_lost", cause="c", fix="f", seconds_ago=3)
    parts = [
        status_of(
            replace(process(1), uptime_seconds=7),
            routes=(route(last_failure=failure, health="failing"),),
            routes_total=1,
            held_total=1,
        ),
        status_of(
            process(0),
            routes=(route(last_ok_seconds_ago=2.0, era="old", transport="sse", health="ok"),),
            routes_total=1,
            held=(held(5),),
            held_total=2,
        ),
    ]
    whole = of_workers(*parts, **{"gw-1#2": Heard(state="silent", why="It slept")})
    assert (whole.replica, whole.uptime_seconds) == ("gw-1", 7)
    assert [(each.id, each.state) for each in whole.processes] == [
        ("gw-1#0", "ready"),
        ("gw-1#1", "ready"),
        ("gw-1#2", "silent"),
    ]
    assert (whole.state, whole.held_total, len(whole.held)) == ("not ready", 3, 1)
    (row,) = whole.routes
    assert (row.health, row.era, row.transport, row.held, row.waiting) == ("ok", "old", "sse", 2, 2)
    assert row.last_failure == failure
    assert (row.sessions, row.sessions_limit) == ({"idle": 2, "busy": 4, "quarantined": 0}, 20)
    assert [(notice.text.partition(":")[0], notice.detail) for notice in whole.notices] == [
        ("No status from gw-1#2", "It slept"),
    ]
    assert "gw-1#2" in page(whole)


@pytest.mark.parametrize(
    ("rows", "since"),
    [
        ([(300.0, 200.0), (250.0, 40.0)], 200.0),  # the earliest
        ([(300.0, 200.0), (None, 40.0)], 200.0),
        ([(None, 200.0), (None, 40.0)], 200.0),  # it has never answered
        ([(300.0, 200.0), (100.0, 40.0)], 40.0),  # the other began before an answer, and is over
        ([(300.0, 200.0), (100.0, 150.0)], 100.0),  # all began before the last answer, and fail again
        ([(300.0, 0.0), (100.0, 0.0)], 0.0),  # of an older version
    ],
)
def test_a_route_is_failing_since_the_first_failure_of_any_process(
    rows: list[tuple[float | None, float]], since: float
) -> None:
    parts = [
        status_of(
            process(number),
            routes=(
                route(
                    health="failing",
                    last_ok_seconds_ago=last_ok,
                    last_failure=Failure(
                        kind="k", cause="c", fix="f", seconds_ago=3 + number, since_seconds_ago=began
                    ),
                ),
            ),
        )
        for number, (last_ok, began) in enumerate(rows)
    ]
    (row,) = of_workers(*parts).routes
    assert row.last_failure is not None
    assert (row.health, row.last_failure.since_seconds_ago, row.last_failure.seconds_ago) == ("failing", since, 3)


@pytest.mark.parametrize(
    ("failed", "answered", "health", "since"),
    [
        ((3, 10), 20, "failing", 10),
        ((3, 50), 20, "failing", 20),  # it began before an answer to the other, and failed again
        ((30, 50), 20, "ok", 50),  # it knows only an old failure
    ],
)
def test_a_failure_before_an_answer_to_any_process_does_not_count(
    failed: tuple[float, float], answered: float, health: str, since: float
) -> None:
    def of_process(number: int, health: str, last_ok: float, *failed: float) -> Status:
        failure = Failure(kind="k", cause="c", fix="f", seconds_ago=failed[0], since_seconds_ago=failed[1])
        row = route(health=health, last_ok_seconds_ago=last_ok, last_failure=failure)
        return status_of(process(number), routes=(row,))

    (row,) = of_workers(of_process(0, "failing", 90, *failed), of_process(1, "ok", answered, 500, 600)).routes
    assert row.last_failure is not None
    assert (row.health, row.last_failure.since_seconds_ago) == (health, since)


def test_workers_with_different_configurations_are_a_notice() -> None:
    parts = [replace(status_of(process(number)), configuration=each) for number, each in enumerate(("aaa", "bbb"))]
    whole = of_workers(*parts)
    assert whole.notices[0].text == "The configurations differ: aaa (gw-1#0); bbb (gw-1#1)"
    assert "or the service's GATEWAY_ variables override the file" in whole.notices[0].fix
    assert of_workers(replace(parts[0], state="draining"), parts[1]).state == "draining"


def test_the_same_error_of_several_workers_is_one() -> None:
    def error(count: int, first: float, last: float) -> ErrorStatus:
        return ErrorStatus(
            kind="k", route="/mcp", text="t", fix="f", count=count, first_seconds_ago=first, last_seconds_ago=last
        )

    parts = [status_of(process(0), errors=(error(1, 9, 5),)), status_of(process(1), errors=(error(2, 8, 3),))]
    assert of_workers(*parts).errors == (error(3, 9, 3),)


def test_what_a_caller_has_in_several_processes_is_added_up_and_the_most_come_first() -> None:
    def caller(tag: str, held: int, sessions: int) -> CallerStatus:
        return CallerStatus(caller=tag, held=held, sessions=sessions)

    few = tuple(caller(f"few-{number}", 1, 1) for number in range(MOST_CALLERS))
    parts = [(*few, caller("idle", 0, 9)), (caller("a", 2, 2), caller("b", 4, 4)), (caller("a", 3, 4),)]
    own, *others = (status_of(process(number), callers=callers) for number, callers in enumerate(parts))
    shown = of_workers(own, *others).callers
    assert shown[:3] == (caller("idle", 0, 9), caller("a", 5, 6), caller("b", 4, 4))
    assert len(shown) == MOST_CALLERS


def test_the_process_in_which_a_caller_is_nearest_to_a_limit_is_kept_beside_the_sum() -> None:
    uses = (
        (Use(600, 1000, "gw-0"), Use(20, 1100, "/mcp of gw-0")),
        (Use(900, 1000, "gw-1"), Use(15, 20, "/own of gw-1")),  # a route with a limit of its own
        (Use(), Use()),  # of an older replica
    )
    parts = [
        status_of(
            process(number),
            callers=(CallerStatus(caller="a", held=500, sessions=30, most_held=held, most_sessions=sessions),),
        )
        for number, (held, sessions) in enumerate(uses)
    ]
    whole = of_workers(*parts)
    assert whole.callers == (
        CallerStatus(caller="a", held=1500, sessions=90, most_held=uses[1][0], most_sessions=uses[1][1]),
    )
    html = page(whole)
    assert re.search(r"<div>1,500\s*<p class=.soft.>fullest: gw-1, 900 of 1,000<", html)
    assert re.search(r"<div>90\s*<p class=.soft.>fullest: /own of gw-1, 15 of 20<", html)
    assert "on all routes and processes. The limits apply to each process." in html
    assert " of 0 " not in page(parts[2]).partition('id="callers"')[2].partition("</section>")[0]


def test_the_clients_of_a_caller_are_added_up_and_those_with_the_most_are_kept() -> None:
    def part(number: int, **clients: int) -> Status:
        caller = CallerStatus(caller="a", held=1, sessions=1, clients=clients)
        return status_of(process(number), callers=(caller,), addresses=clients)

    whole = of_workers(part(0, x=3, y=2, z=1), part(1, y=2, w=2), part(2))
    (caller,) = whole.callers
    assert list(caller.clients.items()) == [("y", 4), ("x", 3), ("w", 2)]
    assert list(whole.addresses.items()) == list(caller.clients.items())


def test_children_are_added_up_where_there_are_any() -> None:
    def children(*counts: int | None) -> tuple[int | None, int | None]:
        rows = (route(children=count, children_limit=None if count is None else 32) for count in counts)
        (row,) = of_workers(*(status_of(process(0), routes=(each,)) for each in rows)).routes
        return row.children, row.children_limit

    assert children(2, 3) == (5, 64)
    assert children(None, None) == (None, None)


def test_every_number_of_a_route_is_added_up() -> None:
    numbers = [field.name for field in fields(RouteStatus) if field.type is int]
    parts = [status_of(process(0), routes=(replace(route(), **dict.fromkeys(numbers, count)),)) for count in (1, 2)]
    (row,) = of_workers(*parts).routes
    assert {name: getattr(row, name) for name in numbers} == dict.fromkeys(numbers, 3)


# Of a cluster.


def of(name: str, **fields: object) -> Status:
    return replace(status_of(ProcessStatus(id=name, state="ready")), replica=name, **fields)


def whole(own: Status, *others: Status) -> Status:
    return of_cluster(own, {each.replica: Heard(state="answered", status=each) for each in others})


def test_what_replicas_do_not_have_in_common_is_worth_knowing_and_no_problem() -> None:
    keys = KeyStatus("aaaa", "seals and opens"), KeyStatus("bbbb", "only opens")
    own = of("gw-1", version="1", configuration="x", keys=keys)
    assert whole(own, replace(own, replica="gw-2")).notices == ()
    other = of("gw-2", version="2", configuration="y", keys=keys[::-1])
    found = whole(own, other, replace(other, replica="gw-3")).notices
    assert [each.text for each in found] == [
        "The versions differ: 1 (gw-1); 2 (gw-2, gw-3)",
        "The configurations differ: x (gw-1); y (gw-2, gw-3)",
        "The sealing keys differ: aaaa (gw-1); bbbb (gw-2, gw-3)",
    ]
    assert not any(each.is_bad for each in found)
    assert all(
        "State keys" in each.fix and "`mrtr-gateway check --config FILE` on each host" in each.fix for each in found
    )


# What replicas have for keys, the first of which seals; the one that each knows to be the newest; and what their page
# says of the rotation.
TWO = (
    "If new is the new key, phase 1 is {}. If new is the old key, phase {}: move it from state.keys to session_keys "
    "when no replica"
)
PHASES = (
    ("old/old/old", "", "One key at gw-1, gw-2, gw-3: no rotation is under way there."),
    (
        "old new/old/old",
        "",
        "old seals at gw-1, gw-2, gw-3; gw-2, gw-3 cannot open new. "
        + TWO.format("half done: put it last everywhere", "3 is half done"),
    ),
    (
        "old/old new/old new",
        "/new/new",
        "old seals at gw-1, gw-2, gw-3; gw-1 cannot open new. As new is the new key, phase 1 is half done: put",
    ),
    (
        "old new/old new/old new",
        "",
        "old seals at gw-1, gw-2, gw-3. " + TWO.format("done: put it first everywhere", "2 is done"),
    ),
    (
        "old new/old new/old new",
        "new//new",
        "old seals at gw-1, gw-2, gw-3. As new is the new key, phase 1 is done: put it first everywhere.",
    ),
    (
        "old new/new old/new old",
        "",
        "old seals at gw-1; new seals at gw-2, gw-3. Phase 2 is half done: put the new key first everywhere.",
    ),
    (
        "old new/new old/new old",
        "new/new/new",
        "old seals at gw-1; new seals at gw-2, gw-3. Phase 2 is half done: put new first everywhere.",
    ),
    (
        "new old/old new/old new",
        "new/old/new",
        "new seals at gw-1; old seals at gw-2, gw-3. Phase 2 is half done: put the new key first everywhere.",
    ),
    (
        "new old/new old/new old",
        "new/new/new",
        "new seals at gw-1, gw-2, gw-3. As old is the old key, phase 2 is done: move it from state.keys to ",
    ),
    (
        "new/new old/new old",
        "/new/new",
        "new seals at gw-1, gw-2, gw-3; gw-1 cannot open old. As old is the old key, phase 3 is half done: move",
    ),
    # What gw-2 knows is about former keys: only one that has both knows which is newer.
    ("old new/old", "/old", "old seals at gw-1, gw-2; gw-2 cannot open new. If new is the new key"),
    ("old new/old new", "gone/", "old seals at gw-1, gw-2. If new is the new key"),
    (
        "old/new old/old",
        "",
        "old seals at gw-1, gw-3; new seals at gw-2; gw-1, gw-3 cannot open new. Calls fail until ",
    ),
    (
        "new/old new/new",
        "",
        "new seals at gw-1, gw-3; old seals at gw-2; gw-1, gw-3 cannot open old. Calls fail until ",
    ),
    ("old new//old new", "", "old seals at gw-1, gw-3. If new is the new key"),
    ("old older new/old older", "new/", "old seals at gw-1, gw-2; gw-2 cannot open new. As new is the new key"),
    ("old older new/old older new", "new/new", "old seals at gw-1, gw-2. As new is the new key, phase 1 is done"),
)


def phase_of(rings: str, newest: str = "", sealing: tuple[float | None, ...] = ()) -> str:
    replicas = []
    for number, (ring, new) in enumerate(zip_longest(rings.split("/"), newest.split("/"), fillvalue="")):
        keys = tuple(
            KeyStatus(key, "only opens" if place else "seals and opens") for place, key in enumerate(ring.split())
        )
        ago = sealing[number] if sealing else None
        name = f"gw-{number + 1}"
        processes = (ProcessStatus(id=name, state="ready", sealing_seconds_ago=ago, newest_key=new),)
        replicas.append(of(name, keys=keys, keys_kept_seconds=3600, processes=processes))
    return whole(*replicas).key_phase


@pytest.mark.parametrize(("rings", "newest", "phase"), PHASES)
def test_the_phase_of_a_rotation_is_that_of_all_replicas(rings: str, newest: str, phase: str) -> None:
    assert phase_of(rings, newest).removeprefix("A rotation is under way: ").startswith(phase)


def test_the_phase_names_the_replicas_whose_keys_are_unknown() -> None:
    own = of("gw-1", keys=(KeyStatus("old", "seals and opens"),), keys_kept_seconds=600)
    heard = {"gw-2": Heard(state="silent"), "gw-3": Heard(state="refused"), "gw-4": Heard(state="stalled")}
    told = "gw-2, gw-3, gw-4 did not tell any keys, and gw-3 may lack old, or gw-1 one of theirs."
    assert of_cluster(own, heard).key_phase == f"One key at gw-1: no rotation is under way there; {told}"
    both = replace(own, keys=(*own.keys, KeyStatus("new", "only opens")))
    assert of_cluster(both, heard).key_phase == (
        f"A rotation is under way: old seals at gw-1; {told} "
        "Before the next step, see State keys on the page of gw-2, gw-3, gw-4."
    )


EARLY = " did too early: if calls fail there, put it back as the last key"
WAITS = (
    ("new old/new old/new old", (60, 600, 9000), "from 2026-01-01 01:00 UTC on"),  # the last one decides
    ("new old/new old/new old", (60.9, 600, 9000), "from 2026-01-01 00:59 UTC on"),
    ("new old/new old/new old", (90_000, 86_400, 90_000), "now"),
    (
        "new/new old/new old",
        (60, 600, 9000),
        f"from 2026-01-01 00:51 UTC on; gw-1{EARLY}",
    ),  # gw-1 has dropped it, after that time
    ("new/new/new old", (60, 600, None), "when no replica has sealed with it for 3,600 s"),  # an older version
    (
        "new/new/new old",
        (None, None, 600),
        f"from 2026-01-01 00:51 UTC on; gw-1, gw-2{EARLY}",
    ),
    ("new old/new old/new old", (60, -1e15, 1e15), "from 2026-01-01 01:01 UTC on"),  # a peer cannot break the page
    ("new/new/new old", (60, 60, 1e15), "now"),
)


@pytest.mark.parametrize(("rings", "sealing", "end"), WAITS)
def test_the_old_key_is_needed_until_those_that_have_it_have_sealed_with_the_new_one_for_long(
    rings: str, sealing: tuple[float | None, ...], end: str
) -> None:
    assert phase_of(rings, "new/new/new", sealing).endswith(f"move it from state.keys to session_keys {end}.")


def test_no_time_is_told_for_a_replica_that_may_come_back_with_the_old_key_first() -> None:
    keys = KeyStatus("new", "seals and opens"), KeyStatus("old", "only opens")
    processes = (ProcessStatus(id="gw-1", state="ready", sealing_seconds_ago=9000),)
    own = of("gw-1", keys=keys, keys_kept_seconds=3600, processes=processes)
    assert own.replica == "gw-1"
    dead = of_cluster(own, {"gw-2": Heard(state="dead")})
    assert dead.key_phase.endswith("when no replica has sealed with it for 3,600 s.")
    assert of_cluster(own, {}).key_phase.endswith("move it from state.keys to session_keys now.")


def test_the_slowest_worker_of_a_replica_counts() -> None:
    keys = KeyStatus("new", "seals and opens"), KeyStatus("old", "only opens")
    workers = tuple(
        ProcessStatus(id=f"gw-2#{number}", state="ready", sealing_seconds_ago=ago, newest_key=newest)
        for number, (ago, newest) in enumerate(((9000, "new"), (600, "")))
    )
    dropped = ProcessStatus(id="gw-1#0", state="ready", sealing_seconds_ago=60)
    one = of("gw-1", keys=keys[:1], keys_kept_seconds=3600, processes=(dropped,))
    two = of("gw-2", keys=keys, keys_kept_seconds=3600, processes=workers)
    assert whole(one, two).key_phase.endswith(
        "phase 3 is half done: move it from state.keys to session_keys from 2026-01-01 00:51 UTC on; gw-1 "
        "did too early: if calls fail there, put it back as the last key."
    )


def test_a_notice_has_the_names_of_those_that_report_it_unless_all_do() -> None:
    common, alone = StatusNotice("The same everywhere"), StatusNotice("Only there")
    replicas = [of(f"gw-{number}", notices=notices) for number, notices in enumerate([(), (alone,), (alone,)])]
    found = whole(*(replace(each, notices=(common, *each.notices)) for each in replicas)).notices
    assert [each.text for each in found] == ["The same everywhere", "gw-1, gw-2: Only there"]


def test_a_replica_without_an_answer_is_shown_as_it_was_found() -> None:
    heard = {"gw-2": Heard(state="answered", status=of("gw-2")), "gw-3": Heard(state="silent", why="It slept")}
    status = of_cluster(of("gw-1"), heard)
    assert {each.id: each.state for each in status.processes} == {"gw-1": "ready", "gw-2": "ready", "gw-3": "silent"}
    (notice,) = status.notices
    assert (notice.text.partition(":")[0], notice.detail) == ("No status from gw-3", "It slept")


def peers(**found: tuple[PeerState, float | None]) -> dict[str, tuple[PeerStatus, ...]]:
    """What a replica found of others, and how many seconds ago."""
    return {
        "peers": tuple(
            PeerStatus(
                id=name.replace("_", "-"),
                address="x:1",
                state=state,
                found_seconds_ago=ago,
                last_answer_seconds_ago=None,
            )
            for name, (state, ago) in found.items()
        )
    }


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"gw_3": ("dead", 9.0)}, "gw-3 at x:1 (dead)"),
        ({"gw_3": ("silent", 599.0)}, "gw-3 at x:1 (silent)"),
        ({"gw_1": ("refused", 9.0)}, "gw-1 at x:1 (refused)"),
        ({"gw_1": ("dead", 1.0), "gw_3": ("stalled", 2.0)}, "gw-1 at x:1 (dead), gw-3 at x:1 (stalled)"),
        ({"gw_3": ("silent", 601.0)}, None),  # it may be back for long
        ({"gw_3": ("answered", 9.0), "gw_1": ("not asked", None)}, None),
        ({"gw_4": ("dead", 9.0)}, None),  # it was restarted since
        ({"gw_5": ("dead", 9.0)}, None),  # it told this replica no status either
    ],
)
def test_a_replica_that_another_one_does_not_reach_is_told_on_every_page(
    found: dict[str, tuple[PeerState, float | None]], says: str | None
) -> None:
    answering = [of(f"gw-{number}", uptime_seconds=3.0 if number == 4 else 9_000.0) for number in range(1, 5)]
    own, two, *others = answering
    heard = {each.replica: Heard(state="answered", status=each) for each in (replace(two, **peers(**found)), *others)}
    notices = of_cluster(own, {**heard, "gw-5": Heard(state="dead")}).notices
    told = [(each.text, each.fix, each.is_bad) for each in notices if not each.text.startswith("No status")]
    if says is None:
        assert told == []
        return
    fix = "Run `mrtr-gateway doctor --config FILE` on gw-2, and compare replica.peers with that of others"
    assert told == [(f"gw-2 did not reach {says} within the last 10 minutes", fix, True)]


def test_what_many_replicas_do_not_reach_is_one_notice() -> None:
    found = peers(gw_0=("silent", 1.0))
    own = of("gw-0", uptime_seconds=9.0)
    (notice,) = whole(own, *(of(f"gw-{number}", **found) for number in range(1, 100))).notices
    assert notice.text.endswith("gw-10 and 89 more did not reach gw-0 at x:1 (silent) within the last 10 minutes")
    every = peers(**{f"gw_{number}": ("dead", 1.0) for number in range(1, 100)})
    (notice,) = whole(
        own, of("gw-100", **every), *(of(f"gw-{each}", uptime_seconds=9.0) for each in range(1, 100))
    ).notices
    assert notice.text.startswith("gw-100 did not reach gw-1 at x:1 (dead), gw-2 at x:1 (dead)")
    assert "gw-10 at x:1 (dead) and 89 more within" in notice.text


def test_what_any_worker_of_this_host_found_last_of_a_peer_counts_and_the_last_answer_to_any() -> None:
    def peer(state: PeerState, found: float | None, answered: float | None) -> PeerStatus:
        return PeerStatus(
            id="gw-2", address="x:1", state=state, found_seconds_ago=found, last_answer_seconds_ago=answered
        )

    def told(*peers: PeerStatus) -> PeerStatus:
        (found,) = of_workers(*(status_of(process(0), peers=(each,)) for each in peers)).peers
        return found

    never, old, new = peer("not asked", None, None), peer("answered", 9.0, 9.0), peer("dead", 5.0, None)
    assert told(never, old, new) == told(new, old, never) == peer("dead", 5.0, 9.0)
    assert (told(never, old), told(never, never)) == (old, never)


def test_the_fixes_of_another_replica_say_where_their_commands_run() -> None:
    def error(text: str) -> ErrorStatus:
        return ErrorStatus(
            kind="x", route="", text=text, fix="Run it", count=1, first_seconds_ago=2.0, last_seconds_ago=1.0
        )

    failure = Failure(kind="x", cause="gone", fix="Run it", seconds_ago=1.0)
    failing = replace(route(), health="failing", last_failure=failure)
    both, there = error("of both"), error("there alone")
    status = whole(of("gw-1", errors=(both,)), of("gw-2", errors=(both, there), routes=(failing,)))
    assert {each.text: each.fix for each in status.errors} == {"of both": "Run it", "there alone": "On gw-2: Run it"}
    assert status.routes[0].last_failure == replace(failure, fix="On gw-2: Run it")


def test_of_many_replicas_the_first_ten_are_named() -> None:
    own = of("gw-0", version="1")
    others = [of(f"gw-{number}", version="2") for number in range(1, 13)]
    (notice,) = whole(own, *others).notices
    assert notice.text.endswith("gw-10 and 2 more)")
