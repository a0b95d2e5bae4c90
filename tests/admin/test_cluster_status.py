"""What a replica tells another one of itself, and what one page makes of all of it."""

from msgspec.structs import replace

from gateway.admin.cluster_status import STATUS_BYTES, Heard, chosen, read, told
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


def test_what_replicas_do_not_have_in_common_is_worth_knowing_and_no_problem() -> None:
    keys = KeyStatus("aaaa", "seals and opens"), KeyStatus("bbbb", "only opens")
    own = of("gw-1", version="1", configuration="x", keys=keys)
    assert whole(own, replace(own, replica="gw-2")).notices == ()
    other = of("gw-2", version="2", configuration="y", keys=keys[::-1])
    found = whole(own, other, replace(other, replica="gw-3")).notices
    assert [each.text for each in found] == [
        "The replicas have different versions: 1 (gw-1); 2 (gw-2, gw-3)",
        "The replicas have different configurations: x (gw-1); y (gw-2, gw-3)",
        "The replicas have different sealing keys: aaaa (gw-1); bbbb (gw-2, gw-3)",
    ]
    assert not any(each.is_bad for each in found)


def test_a_notice_of_another_replica_has_its_name_unless_this_one_has_the_same() -> None:
    common, alone = Notice("The same everywhere"), Notice("Only there")
    found = whole(of("gw-1", notices=(common,)), of("gw-2", notices=(common, alone))).notices
    assert [each.text for each in found] == ["The same everywhere", "gw-2: Only there"]
