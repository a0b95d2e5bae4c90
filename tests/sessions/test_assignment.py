"""Which request gets a session, and which session is closed to make room for it."""

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.sessions.assignment import Capacity, Join, Open, Reuse, reusable
from gateway.sessions.call import PoolKey
from gateway.sessions.group import ChangeListeners, Group, SessionRequest

NOBODY: Any = None
"""The future of a request that nobody awaits, and a sweeper that no session tells anything."""


class FakeSession:
    """A session whose state the test sets."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.lost = False
        self.can_begin = True
        self.has_room = False
        self.joiners: list[str] = []
        self.shared: Any = self


def group_of(principal: bytes, *, is_affine: bool = False) -> Group[FakeSession]:
    return Group(PoolKey(principal, b"{}", b"{}", ()), is_affine, ChangeListeners(), NOBODY)


class Scene:
    """Sessions and requests by name; a group is named `principal/kind`, or `principal!kind` with affinity."""

    def __init__(self, limits: tuple[int, ...]) -> None:
        self.capacity: Capacity[FakeSession] = Capacity(*limits)
        self.groups: dict[str, Group[FakeSession]] = {}
        self.group_of: dict[str, Group[FakeSession]] = {}
        self.sessions: dict[str, FakeSession] = {}
        self.requests: dict[str, SessionRequest[FakeSession]] = {}

    def group(self, name: str) -> Group[FakeSession]:
        principal = name.replace("!", "/").partition("/")[0].encode()
        return self.groups.setdefault(name, group_of(principal, is_affine="!" in name))

    def do(self, step: str) -> None:
        word, name, *rest = step.split()
        getattr(self, word)(name, *rest)

    def open(self, name: str, group: str, *words: str) -> None:
        self.start(name, group, *words)
        self.capacity.started()

    def start(self, name: str, group: str, *words: str) -> None:
        session = self.sessions[name] = FakeSession(name)
        self.group_of[name] = self.group(group)
        self.capacity.opened(session, self.group(group), is_fresh="fresh" in words)

    def rest(self, name: str) -> None:
        self.capacity.rested(self.sessions[name], self.group_of[name], 0.0)

    def use(self, name: str) -> None:
        self.capacity.occupied(self.sessions[name], self.group_of[name])

    def close(self, name: str) -> None:
        self.capacity.closed(self.sessions[name], self.group_of[name])

    def set(self, name: str, *flags: str) -> None:
        for flag in flags:
            word, value = flag.removeprefix("not-"), not flag.startswith("not-")
            setattr(self.sessions[name], word, ["a joiner"] * value if word == "joiners" else value)

    def wait(self, name: str, group: str, *words: str) -> None:
        request = self.requests[name] = SessionRequest(self.group(group), NOBODY, is_fresh="fresh" in words)
        self.capacity.add(request)

    def leave(self, name: str) -> None:
        self.capacity.remove(self.requests[name])

    def assigned(self, group: str) -> str:
        """Carry one assignment out; what it was."""
        found = self.capacity.assign(self.group(group))
        if found is None:
            return ""
        name = next(name for name, request in self.requests.items() if request is found.request)
        said = name
        if isinstance(found, Reuse):
            self.use(found.session.name)
            said = f"{name} reuses {found.session.name}"
        elif isinstance(found, Join):
            said = f"{name} joins {found.owner.name}"
        elif isinstance(found, Open):
            said = f"{name} opens"
            if found.evicted is not None:
                self.close(found.evicted.name)
                said += f" for {found.evicted.name}"
            opened_for = next(name for name, each in self.groups.items() if each is found.request.group)
            words = ["fresh"] * found.request.is_fresh
            self.open(f"s-{name}", opened_for, *words)
        self.leave(name)
        return said

    def all_assigned(self, group: str) -> Iterator[str]:
        while said := self.assigned(group):
            yield said


ROOMY = (9, 9)

CASES: dict[str, tuple[tuple[int, ...], list[str], str, list[str]]] = {
    "nothing waits": (ROOMY, ["open s1 a/x", "rest s1"], "a/x", []),
    "the first request opens a session": (ROOMY, ["wait r1 a/x"], "a/x", ["r1 opens"]),
    "an idle session of the group comes before a new one": (
        ROOMY,
        ["open s1 a/x", "rest s1", "wait r1 a/x"],
        "a/x",
        ["r1 reuses s1"],
    ),
    "the newest idle session is reused": (
        ROOMY,
        ["open s1 a/x", "open s2 a/x", "rest s2", "rest s1", "wait r1 a/x"],
        "a/x",
        ["r1 reuses s1"],
    ),
    "a session of another group is not reused": (
        ROOMY,
        ["open s1 a/y", "rest s1", "wait r1 a/x"],
        "a/x",
        ["r1 opens"],
    ),
    "a fresh session is never a used one": (
        ROOMY,
        ["open s1 a/x", "rest s1", "wait r1 a/x fresh"],
        "a/x",
        ["r1 opens"],
    ),
    "a fresh request does not stand in the way of one that a used session satisfies": (
        (1, 1),
        ["open s1 a/x", "wait r1 a/x fresh", "wait r2 a/x", "rest s1"],
        "a/x",
        ["r2 reuses s1"],
    ),
    "a lost session only makes room": (
        (1, 1),
        ["open s1 a/x", "rest s1", "set s1 lost", "wait r1 a/x"],
        "a/x",
        ["r1 opens for s1"],
    ),
    "a lost session is passed by": (
        (9, 2),
        ["open s1 a/x", "open s2 a/x", "rest s1", "rest s2", "set s2 lost", "wait r1 a/x"],
        "a/x",
        ["r1 reuses s1"],
    ),
    "requests of a group are served in the order of their arrival": (
        (1, 1),
        ["open s1 a/x", "wait r1 a/x", "wait r2 a/x", "rest s1"],
        "a/x",
        ["r1 reuses s1"],
    ),
    "nothing is assigned when all sessions are in use": ((1, 9), ["open s1 a/x", "wait r1 b/x"], "b/x", []),
    "the session that is idle longest makes room": (
        (2, 9),
        ["open s1 a/x", "open s2 b/x", "rest s2", "rest s1", "wait r1 c/x"],
        "c/x",
        ["r1 opens for s2"],
    ),
    "a principal at its limit gives a session of its own": (
        (9, 1),
        ["open s1 b/x", "rest s1", "open s2 a/y", "rest s2", "wait r1 a/x"],
        "a/x",
        ["r1 opens for s2"],
    ),
    "a principal at its limit takes nothing of another": (
        (9, 1),
        ["open s1 b/x", "rest s1", "open s2 a/y", "wait r1 a/x"],
        "a/x",
        [],
    ),
    "a principal at its limit gives a session of its own that becomes idle": (
        (9, 1),
        ["open s1 a/y", "wait r1 a/x", "rest s1"],
        "a/x",
        ["r1 opens for s1"],
    ),
    "a principal at its limit gives no session that is in use again": (
        (9, 1),
        ["open s1 a/y", "wait r1 a/x", "rest s1", "use s1"],
        "a/x",
        [],
    ),
    "a principal at its limit gets the room of its own session that ended": (
        (9, 1),
        ["open s1 a/y", "wait r1 a/x", "close s1"],
        "a/x",
        ["r1 opens"],
    ),
    "room passes a principal at its limit by": (
        (2, 1),
        ["open s1 a/y", "open s2 b/x", "wait r1 a/x", "wait r2 c/x", "close s2"],
        "b/x",
        ["r2 opens"],
    ),
    "principals take turns, and each serves its first request": (
        (3, 9),
        [
            *("open s0 z/x", "open s1 z/x", "open s2 z/x"),
            *("wait r1 a/x", "wait r2 a/y", "wait r3 b/x", "wait r4 b/y"),
            *("close s0", "close s1", "close s2"),
        ],
        "z/x",
        ["r1 opens", "r3 opens", "r2 opens"],
    ),
    "a request that was given up gets nothing": (
        ROOMY,
        ["wait r1 a/x", "wait r2 a/x", "leave r1", "leave r1"],
        "a/x",
        ["r2 opens"],
    ),
    "a start waits while too many sessions are in their handshake": (
        (9, 9, 1),
        ["start s1 a/x", "wait r1 b/x"],
        "b/x",
        [],
    ),
    "a session that comes free needs no start": (
        (9, 9, 1),
        ["start s1 a/x", "open s2 b/x", "wait r1 b/x", "rest s2"],
        "b/x",
        ["r1 reuses s2"],
    ),
    "with affinity the second call waits for the session of the first": (
        ROOMY,
        ["wait r1 a!x", "wait r2 a!x"],
        "a!x",
        ["r1 opens"],
    ),
    "with affinity a call joins one that waits for its user": (
        ROOMY,
        ["open s1 a!x", "set s1 has_room", "wait r1 a!x"],
        "a!x",
        ["r1 joins s1"],
    ),
    "with affinity a call waits while joiners stand in its way": (
        ROOMY,
        ["open s1 a!x", "set s1 not-can_begin joiners", "rest s1", "wait r1 a!x"],
        "a!x",
        [],
    ),
    "with affinity a fresh session is opened beside that of the calls": (
        ROOMY,
        ["open s1 a!x", "wait r1 a!x", "wait r2 a!x fresh"],
        "a!x",
        ["r2 opens"],
    ),
    "with affinity a new session replaces one that was lost": (
        ROOMY,
        ["open s1 a!x", "set s1 lost", "wait r1 a!x", "wait r2 a!x"],
        "a!x",
        ["r1 opens"],
    ),
    "with affinity the next call opens a session when that of the calls was dropped": (
        ROOMY,
        ["open s1 a!x", "wait r1 a!x", "wait r2 a!x", "close s1"],
        "a!x",
        ["r1 opens"],
    ),
    "with affinity the next call takes the place of one that was given up": (
        (1, 9),
        ["open s0 z/x", "wait r1 a!x", "wait r2 a!x", "leave r1", "close s0"],
        "a!x",
        ["r2 opens"],
    ),
    "room passes calls by that wait for the one session of their group": (
        (2, 9),
        ["open s1 a!x", "open s2 z/x", "wait r1 a!x", "wait r2 b/x", "close s2"],
        "z/x",
        ["r2 opens"],
    ),
    "an idle session with joiners is not closed for room": (
        (2, 9),
        ["open s1 a!x", "set s1 joiners", "rest s1", "open s2 b/x", "rest s2", "wait r1 c/x"],
        "c/x",
        ["r1 opens for s2"],
    ),
    "an idle session is closed for room once its joiners have left": (
        (1, 9),
        ["open s1 a!x", "set s1 joiners", "rest s1", "wait r1 c/x", "set s1 not-joiners", "rest s1"],
        "c/x",
        ["r1 opens for s1"],
    ),
}


@pytest.mark.parametrize(("limits", "steps", "group", "expected"), CASES.values(), ids=CASES)
def test_assignments(limits: tuple[int, ...], steps: list[str], group: str, expected: list[str]) -> None:
    scene = Scene(limits)
    for step in steps:
        scene.do(step)
    assert list(scene.all_assigned(group)) == expected


def test_a_session_that_cannot_begin_a_call_is_not_reusable() -> None:
    scene = Scene(ROOMY)
    for step in ("open s1 a!x", "rest s1"):
        scene.do(step)
    assert reusable(scene.group("a!x")) is scene.sessions["s1"]
    scene.do("set s1 not-can_begin joiners")
    assert reusable(scene.group("a!x")) is None


class Unsearched(dict[Any, Any]):
    """An ordered dictionary that counts the elements that are read from it one after the other."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            Unsearched.read += 1
            yield each

    def values(self) -> Any:
        for each in super().values():
            Unsearched.read += 1
            yield each


@pytest.mark.parametrize("many", [1, 1000])
def test_an_assignment_reads_as_much_of_many_principals_as_of_one(many: int) -> None:
    scene = Scene((many * 2, 1))
    for number in range(many):
        for step in (f"open i{number} i{number}/x", f"rest i{number}"):
            scene.do(step)
        for step in (f"open c{number} c{number}/y", f"wait c{number} c{number}/x", f"wait w{number} w{number}/x"):
            scene.do(step)
    capacity = scene.capacity
    capacity.evictable = Unsearched(capacity.evictable)
    capacity.eligible = Unsearched(capacity.eligible)
    capacity.quotas = Unsearched(capacity.quotas)
    Unsearched.read = 0
    assert scene.assigned("w0/x") == "w0 opens for i0"
    assert Unsearched.read == 2, "the quota whose turn it is, and the session that is idle longest"


# -- how sessions and requests are counted ---------------------------------------------------------------------------


def capacity(per_principal: int = 9) -> Capacity[FakeSession]:
    return Capacity(9, per_principal)


def request(group: Group, *, is_fresh: bool = False) -> SessionRequest[FakeSession]:
    return SessionRequest(group, NOBODY, is_fresh=is_fresh)


def test_new_limits_decide_which_principals_are_eligible() -> None:
    counted, group = capacity(1), group_of(b"a")
    counted.opened(FakeSession(), group)
    counted.add(waiting := request(group))
    assert counted.assign(group) is None
    counted.change_limits(9, 2)
    assert counted.assign(group) == Open(waiting, None)
    counted.change_limits(9, 1)
    assert counted.assign(group) is None


def test_nothing_is_kept_of_a_principal_without_sessions_and_requests() -> None:
    counted, here, there = capacity(1), group_of(b"a"), group_of(b"b")
    waiting, session = request(here), FakeSession()
    counted.add(waiting)
    counted.opened(session, there)
    counted.rested(session, there, 0.0)
    counted.occupied(session, there)
    counted.occupied(session, there)
    counted.remove(waiting)
    counted.remove(waiting)
    counted.closed(session, there)
    assert len(counted.quotas) == counted.count == len(counted.evictable) == len(here.waiting) == len(here.takers) == 0
    assert counted.assign(here) is None
