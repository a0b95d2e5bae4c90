"""Who gives way where callers share a full place."""

from random import Random

from gateway.runtime.fair_shares import FairTable, Holdings
from tests.support.memory import left_by


def keys(table: FairTable[str, int], among: str) -> str:
    return "".join(key for key in among if key in table)


def test_a_caller_that_adds_entries_evicts_its_own_oldest() -> None:
    table: FairTable[str, int] = FairTable(3)
    assert table.keep(b"ann", "a", 1) is None
    for number, key in enumerate("uvwxyz"):
        evicted = table.keep(b"eve", key, number)
        assert evicted == (number - 2 if number >= 2 else None)
    assert keys(table, "auvwxyz") == "ayz"


def test_one_with_few_entries_gets_room_from_the_one_with_most() -> None:
    table: FairTable[str, int] = FairTable(4)
    for key in "uvwx":
        _ = table.keep(b"eve", key, 0)
    _ = table.keep(b"ann", "a", 0)
    assert keys(table, "uvwxa") == "vwxa"
    for key in "bc":
        _ = table.keep(b"ann", key, 0)
    assert keys(table, "vwxabc") == "vwxc", "one that would have more than half as much as the other makes room itself"


def test_among_callers_that_have_as_much_the_one_that_adds_makes_room() -> None:
    table: FairTable[str, int] = FairTable(5)
    for key in "uvw":
        _ = table.keep(b"eve", key, 0)
    for key in "abc":
        _ = table.keep(b"ann", key, 0)
    assert keys(table, "uvwabc") == "uvwbc"


def test_among_callers_with_one_entry_the_oldest_gives_way() -> None:
    table: FairTable[str, int] = FairTable(2)
    _ = [table.keep(key.encode(), key, 0) for key in "abc"]
    assert keys(table, "abc") == "bc"


def test_a_caller_that_is_alone_has_all_the_room() -> None:
    table: FairTable[str, int] = FairTable(4)
    _ = [table.keep(b"ann", key, 0) for key in "abcd"]
    assert keys(table, "abcd") == "abcd"
    assert table.keep(b"ann", "a", 5) is None
    assert table.get("a") == 5
    _ = table.keep(b"ann", "e", 0)
    assert keys(table, "abcde") == "acde", "what was set again is new"


def test_what_is_taken_out_leaves_nothing() -> None:
    table: FairTable[str, int] = FairTable(9)
    _ = table.keep(b"ann", "a", 1)
    assert (table.pop("a"), table.pop("a"), table.get("a"), len(table)) == (1, None, None, 0)

    def keep_many() -> None:
        for number in range(1000):
            _ = table.keep(b"%d" % number, f"{number}", 1)
            _ = table.pop(f"{number}")

    assert left_by(keep_many) < 5_000


def test_the_one_that_gives_way_is_never_one_of_a_caller_with_less_than_half_of_the_most() -> None:
    holdings = Holdings[int]()
    assert left_by(lambda: share_at_random(holdings)) < 5_000, "what is taken out leaves nothing"


def share_at_random(holdings: Holdings[int]) -> None:
    """Add entries, each of which may make the first one give way; at the end, remove all that are left."""
    rng = Random(7)
    rooms: dict[int, tuple[bytes, int]] = {}
    for key in range(2_000):
        owner, room = rng.choice((b"a", b"b", b"c", b"d")), rng.randrange(50)
        holdings.add(owner, key, 0)
        holdings.grow(owner, room)
        rooms[key] = owner, room
        if rng.random() < 0.8:
            gone = holdings.first(owner)
            of_each: dict[bytes, int] = {}
            for name, held in rooms.values():
                of_each[name] = of_each.get(name, 0) + held
            whose, held = rooms.pop(gone)
            assert 2 * of_each[whose] >= max(of_each.values())
            assert gone == min(key for key, (name, _) in (*rooms.items(), (gone, (whose, 0))) if name == whose)
            holdings.remove(whose, gone, held)
    for key, (owner, room) in rooms.items():
        holdings.remove(owner, key, room)
