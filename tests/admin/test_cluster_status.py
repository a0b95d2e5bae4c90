"""What a replica tells another one of itself, and what one page makes of all of it."""

from msgspec.structs import replace

from gateway.admin.cluster_status import STATUS_BYTES, chosen, read, told
from gateway.admin.merge_statuses import Heard
from gateway.telemetry.process_status import MOST_HELD, KeyStatus, Notice, PeerStatus, ProcessStatus, Status
from tests.support.status import held, status_of


def of(name: str, **fields: object) -> Status:
    return replace(status_of(ProcessStatus(id=name, state="ready")), replica=name, **fields)


def whole(own: Status, *others: Status) -> Status:
    return chosen(own, {each.replica: Heard(state="answered", status=each) for each in others}, None)


def test_a_status_survives_the_way_without_its_peers() -> None:
    peer = PeerStatus(id="gw-1", address="x:1", state="answered", last_answer_seconds_ago=1)
    status = of("gw-2", held=(held(1.0),), held_total=1, peers=(peer,), peers_total=1)
    assert read(told(status), "gw-2") == replace(status, peers=(), peers_total=0)


def test_a_status_that_would_be_too_long_loses_rows_and_keeps_its_totals() -> None:
    calls = tuple(replace(held(float(age)), name="n" * 4000) for age in range(MOST_HELD, 0, -1))
    text = told(of("gw-2", held=calls, held_total=5000))
    assert len(text) < STATUS_BYTES
    status = read(text, "gw-2")
    assert status is not None
    assert status.held == calls[: len(status.held)], "the oldest ones stay"
    assert (0 < len(status.held) < MOST_HELD, status.held_total) == (True, 5000)


def test_a_status_that_is_too_long_without_its_lists_is_told_all_the_same() -> None:
    text = told(of("gw-2", held=(held(1.0),), configuration="c" * STATUS_BYTES))
    assert len(text) > STATUS_BYTES, "the replica that asked refuses it"
    assert '"held":[]' in text


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


def test_a_notice_has_the_names_of_those_that_report_it_unless_all_do() -> None:
    common, alone = Notice("The same everywhere"), Notice("Only there")
    replicas = [of(f"gw-{number}", notices=notices) for number, notices in enumerate([(), (alone,), (alone,)])]
    found = whole(*(replace(each, notices=(common, *each.notices)) for each in replicas)).notices
    assert [each.text for each in found] == ["The same everywhere", "gw-1, gw-2: Only there"]


def test_a_text_that_is_not_the_status_of_its_sender_is_refused() -> None:
    good = told(of("gw-2"))
    assert read(good, "gw-2") is not None
    assert read(good, "gw-3") is None
    assert read(good.replace('"in_flight":0', f'"in_flight":{2**60}'), "gw-2") is None
    for text in ("", "{}", "[" * 100_000, good[:-1]):
        assert read(text, "gw-2") is None


def test_one_replica_is_chosen_by_its_name() -> None:
    own, other = of("gw-1"), of("gw-2")
    heard = {"gw-2": Heard(state="answered", status=other), "gw-3": Heard(state="dead", why="no")}
    assert chosen(own, {}, "gw-2") == own
    assert chosen(own, heard, "gw-2") == other
    for name in (None, "gw-3", "gw-9"):
        assert chosen(own, heard, name).covers == "cluster"


def test_a_replica_without_an_answer_is_shown_as_it_was_found() -> None:
    def peer(name: str) -> PeerStatus:
        return PeerStatus(id=name, address="x:1", state="not asked", last_answer_seconds_ago=9.0)

    own = of("gw-1", peers=tuple(map(peer, ("gw-2", "gw-3", "gw-4"))))
    heard = {"gw-2": Heard(state="answered", status=of("gw-2")), "gw-3": Heard(state="silent", why="It slept")}
    status = chosen(own, heard, None)
    assert [(each.state, each.last_answer_seconds_ago) for each in status.peers] == [
        ("answered", 0.0),
        ("silent", 9.0),
        ("not asked", 9.0),
    ]
    assert {each.id: each.state for each in status.processes} == {"gw-1": "ready", "gw-2": "ready", "gw-3": "silent"}
    (notice,) = status.notices
    assert (notice.text.partition(":")[0], notice.detail) == ("No status from gw-3", "It slept")


def test_of_many_replicas_the_first_ten_are_named() -> None:
    own = of("gw-0", version="1")
    others = [of(f"gw-{number}", version="2") for number in range(1, 13)]
    (notice,) = whole(own, *others).notices
    assert notice.text.endswith("gw-10 and 2 more)")
