"""What happens in one history, drawn from a seed: replicas, server, calls, faults. A plan is plain data."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import msgspec

from tests.simulation import listening
from tests.simulation.listening import Change, Listener
from tests.simulation.server import Kind

LOAD_SECONDS: Final = 29.0
REST_SECONDS: Final = 260.0


@dataclass(frozen=True)
class Call:
    """One call of a client, and how that client behaves."""

    tag: str
    at: float
    tool: str
    caller: str
    script: dict[str, Any]
    think: float
    """How long its user thinks about each round."""
    habit: str = "plain"
    """See `client.HABITS`."""
    replicas: tuple[int, ...] = (1,)
    """Which replica gets each of its requests in turn."""
    path: str = "/mcp"
    """`/mcp` leads to the legacy server, `/modern` to a modern one, `/child` to legacy servers over stdio."""
    is_legacy: bool = False
    """Whether its client is a legacy one."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong for a while."""

    kind: str
    at: float
    seconds: float
    target: int = 1
    other: int = 2
    amount: float = 0.0
    when: str = ""
    """It waits for a call in this state, and meets the replica that has it; see `History.replica_with`."""


@dataclass(frozen=True)
class Plan:
    """One history."""

    seed: int
    replicas: int
    server: Kind
    config: dict[str, Any]
    calls: tuple[Call, ...]
    faults: tuple[Fault, ...]
    listeners: tuple[Listener, ...] = ()
    changes: tuple[Change, ...] = ()
    tasks: tuple[Call, ...] = ()
    """Calls that become tasks of clients that declare these."""

    @property
    def has_children(self) -> bool:
        """Whether some calls go to servers over stdio."""
        return any(call.path == "/child" for call in self.calls)

    def without_calls(self, tags: set[str]) -> "Plan":
        return replace(self, calls=tuple(call for call in self.calls if call.tag not in tags))

    def without_faults(self, places: set[int]) -> "Plan":
        return replace(self, faults=tuple(each for place, each in enumerate(self.faults) if place not in places))


def to_text(plan: Plan) -> str:
    """A plan as JSON, to be kept in `stories/`."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1).decode() + "\n"


def of_text(text: str) -> Plan:
    """The plan of a story."""
    return msgspec.json.decode(text, type=Plan)


HABITS: Final = (
    *("plain", "twice", "late", "asks again", "rivals", "leaves", "abandons", "slow reader", "declines"),
    *("goes", "cannot be asked"),
)
FAULTS: Final = (
    *("kill", "power", "term", "term twice", "stop", "stall", "part", "one way", "peers", "server", "cut"),
    *("slow", "split", "dns", "jump", "drift", "cold cut"),
)
_AIMED: Final = ("kill", "term", "stop", "part", "one way", "peers")


MORE_HABITS: Final = (
    *("reads late", "leaves unread", "unread copy", "one by one", "asks again, goes", "asks again, thinks"),
    *("leaves for a moment", "copies, then goes", "asks again, stops reading", "twice, then goes"),
)
MORE_FAULTS: Final = ("int", "replay", "modern cut", "child")


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    return _returning(_with_children(_with_tasks(_with_listeners(_rare(_more(_first(seed)))))))


def _first(seed: int) -> Plan:
    """What the first draws say; those of `_more` came later, and leave many plans as they were."""
    random = Random(f"plan {seed}")
    replicas = random.randrange(3, 6)
    server = Kind(
        has_events=random.random() < 0.6,
        idle_seconds=random.choice((60.0, 60.0, 60.0, 5.0, 0.4)),
        answers_late=random.random() < 0.2,
    )
    hold: dict[str, Any] = {"ttl_seconds": random.choice((40.0, 90.0, 120.0))}
    if server.has_events and random.random() < 0.2:
        hold["cold_seconds"] = random.choice((2.0, 5.0))
    if Random(f"ttl {seed}").random() < 0.2:
        hold["ttl_seconds"] = 10.0
    sessions = {"idle_seconds": 30}
    hold["drain_delay_seconds"], hold["drain_seconds"] = random.choice(((1.0, 4.0), (0.5, 1.0), (2.0, 10.0)))
    config: dict[str, Any] = {"hold": hold, "sessions": sessions, "timeouts": {"idle_seconds": 60}}
    if random.random() < 0.3:
        config["legs"] = {"limit_seconds": random.choice((1.0, 4.0))}
    route: dict[str, Any] = {}
    if random.random() < 0.1:
        route["continuation"] = "replay"
    if random.random() < 0.15:
        route["sessions"] = {"affinity": "principal"}
    config["route"] = route
    habits = random.sample(HABITS[1:], random.randrange(0, 4))
    tools = random.choice((("pay",), ("pay", "search"), ("pay", "pay", "search")))
    calls = tuple(_call(random, number, replicas, habits, tools) for number in range(1, 13))
    kinds = random.sample(FAULTS, random.randrange(1, 5))
    density = random.choice((1, 1, 2, 3))
    faults = tuple(_fault(random, kind, replicas) for kind in kinds for _ in range(random.randrange(1, density + 1)))
    faults += _aimed(Random(f"aimed {seed}"), calls, replicas)
    faults += _replays(Random(f"replays {seed}"), faults, replicas)
    calls += _close(Random(f"close {seed}"), server)
    return Plan(seed, replicas, server, config, calls, _sorted(*faults))


def _call(random: Random, number: int, replicas: int, habits: list[str], tools: tuple[str, ...]) -> Call:
    script: dict[str, Any] = {"questions": random.choice((0, 1, 1, 1, 2, 3))}
    if random.random() < 0.4:
        script["before"] = random.choice((0.05, 0.5, 3.0, 6.0))
    if random.random() < 0.4:
        script["between"] = random.choice((0.05, 1.0, 6.0))
    if random.random() < 0.3:
        script["kinds"] = random.choice((["sample"], ["elicit", "sample"]))
    if random.random() < 0.2:
        script["reports"] = True
    if random.random() < 0.1:
        script["aside"] = True
    for word, chance in (("fails", 0.1), ("logs", 0.15), ("urls", 0.08), ("asks late", 0.05)):
        if random.random() < chance:
            script[word] = True
    if random.random() < 0.15:
        script["at once"] = True
    if random.random() < 0.15:
        script["patience"] = random.choice((0.3, 2.0, 6.0))
    if random.random() < 0.06:
        script["hangs"] = 20.0 if "patience" in script else random.choice((20.0, 70.0))
    if random.random() < 0.08:
        script["refuses"] = random.choice(("503", "cut"))
    path = "/modern" if random.random() < 0.15 else "/mcp"
    is_legacy = random.random() < (0.7 if path == "/modern" else 0.1)
    if is_legacy or path == "/modern":
        for word in ("aside", "urls", "asks late"):
            script.pop(word, None)
    return Call(
        path=path,
        is_legacy=is_legacy,
        tag=f"c{number}",
        at=round(random.random() * LOAD_SECONDS * 0.6, 3),
        tool=random.choice(tools),
        caller=random.choice(("ann", "bob", "eve")),
        script=script,
        think=random.choice((0.01, 0.2, 1.0, 3.0, 8.0)),
        habit=random.choice(("plain", *habits)),
        replicas=tuple(random.randrange(1, replicas + 1) for _ in range(6)),
    )


def _fault(random: Random, kind: str, replicas: int) -> Fault:
    target, other = random.sample(range(1, replicas + 1), 2)
    seconds = {"stall": (0.2, 1.0, 2.5), "cut": (0.0,), "cold cut": (0.0,)}.get(kind, (0.5, 2.0, 6.0, 15.0))
    return Fault(
        kind=kind,
        at=round(1.0 + random.random() * (LOAD_SECONDS - 5.0), 3),
        seconds=random.choice(seconds),
        target=target,
        other=other,
        amount=random.choice((-300.0, -20.0, 20.0, 90.0, 400.0)),
    )


def _aimed(random: Random, calls: tuple[Call, ...], replicas: int) -> tuple[Fault, ...]:
    """Sometimes a fault of the replica that holds a call, or runs it: the others seldom meet one."""
    asking = [call for call in calls if call.script["questions"] and call.path == "/mcp" and not call.is_legacy]
    if not asking or random.random() < 0.4:
        return ()
    peculiar = [call for call in asking if call.habit != "plain"]
    call = random.choice(peculiar if peculiar and random.random() < 0.7 else asking)
    target = call.replicas[0]
    others = random.sample([number for number in range(1, replicas + 1) if number != target], replicas - 1)
    lasts = call.script.get("before", 0.0) + call.think + call.script.get("between", 0.0)
    at = round(call.at + 0.1 + random.random() * lasts, 3)
    kind, seconds = random.choice(_AIMED), random.choice((2.0, 6.0))
    count = 2 if kind == "peers" else 1
    return tuple(Fault(kind, at, seconds, target, other) for other in others[:count])


def _replays(random: Random, faults: tuple[Fault, ...], replicas: int) -> tuple[Fault, ...]:
    """Sometimes an attacker sends again what it has heard: any time, and right after a drain has sent new calls on."""
    if random.random() < 0.7:
        return ()
    spans = (LOAD_SECONDS, LOAD_SECONDS, 4.0 * LOAD_SECONDS)
    times = [2.0 + random.random() * random.choice(spans) for _ in range(random.randrange(1, 9))]
    times += [fault.at + 4.0 * random.random() for fault in faults if fault.kind.startswith("term") for _ in range(3)]
    return tuple(Fault("replay", round(at, 3), 0.0, random.randrange(1, replicas + 1)) for at in times)


def _close(random: Random, server: Kind) -> tuple[Call, ...]:
    """Sometimes calls that come just when the server closes the connection of the one before."""
    if server.idle_seconds > LOAD_SECONDS or random.random() < 0.5:
        return ()
    at, calls, replica = 18.0, [], random.randrange(1, 4)
    while at < LOAD_SECONDS and len(calls) < 8:
        tag = f"c{len(calls) + 20}"
        calls.append(Call(tag, round(at, 3), "pay", "kim", {"questions": 0}, 0.01, replicas=(replica, replica)))
        at += server.idle_seconds + random.randrange(-1, 5) / 1000
    return tuple(calls)


@dataclass(frozen=True)
class _Theme:
    """Things that meet only together."""

    habits: tuple[str, ...]
    scripts: tuple[dict[str, Any], ...]
    """Each is added to some calls."""
    states: tuple[str, ...]
    """Some faults wait for these."""
    kinds: tuple[str, ...] = ("int", "int", "term", "kill", "cold cut", "part")
    tools: tuple[str, ...] = ()
    quiet: tuple[float, ...] = ()
    thinks: tuple[float, ...] = ()
    has_short_legs: bool = False
    has_events: tuple[bool | None, ...] = (None,)
    has_tasks: bool = False
    loses_owners: bool = False


_LATE: Final[dict[str, Any]] = {"logs": True, "reports": True, "between": 0.2, "deaf": True}
_THEMES: Final = (
    # replies that are not read, while their calls go on
    _Theme(
        habits=("leaves unread", "leaves unread", "unread copy", "reads late"),
        scripts=(
            {"logs": True, "between": 0.3, "questions": 2},
            {"logs": True, "between": 0.2, "questions": 3, "hasty": 1.0},
            {"logs": True, "between": 1.0, "questions": 1, "urls": "later"},
        ),
        states=tuple(f"unread {state}" for state in ("parked", "referred", "broken", "detached", "finished", "ended")),
        kinds=("int", "int", "int", "term", "cold cut"),
        thinks=(0.2, 1.0),
    ),
    # answers that are refused so late that the call has moved on
    _Theme(
        habits=("plain", "one by one"),
        scripts=(
            {**_LATE, "refuses": "late 503", "patience": 1.5, "questions": 3},
            {**_LATE, "refuses": "late cut", "patience": 1.5, "questions": 3, "fails": True},
            {**_LATE, "refuses": "late 503", "hasty": 2.5, "questions": 3, "at once": True},
            {**_LATE, "refuses": "late 503", "hasty": 1.5, "questions": 2, "urls": "later"},
        ),
        states=("broken", "referred", "finished", "asking", "parked", "parked"),
        tools=("search", "search", "pay"),
        thinks=(0.3, 1.0, 4.0),
        has_short_legs=True,
        has_events=(None, False),
    ),
    # calls that another replica has taken over, and that nobody comes back for
    _Theme(
        habits=("asks again, goes", "asks again", "plain"),
        scripts=({"questions": 2}, {"questions": 1, "urls": True}, {"questions": 1, "hasty": 3.0}),
        states=("restored", "restored", "restored", "referred", "parked"),
        kinds=("int", "int", "int", "term", "kill"),
        has_events=(None, False),
        loses_owners=True,
    ),
    # questions that are gathered for long
    _Theme(
        habits=("one by one", "plain", "leaves"),
        scripts=(
            {"questions": 3, "at once": True},
            {"questions": 2, "at once": True, "refuses": "late 503"},
            {"questions": 2, "hasty": 0.2, "logs": True},
            {"questions": 2, "hasty": 0.2, "fails": True},
        ),
        states=("asking", "asking", "detached"),
        has_events=(None, False),
        quiet=(0.5, 2.0, 4.0),
    ),
    # calls that are lost while nobody waits for them
    _Theme(
        habits=("leaves", "asks again", "plain"),
        scripts=({"questions": 2, "between": 6.0}, {"questions": 2, "patience": 2.0}, {"questions": 2, "deaf": True}),
        states=("detached", "broken", "finished"),
        kinds=("int", "int", "cold cut", "server"),
        tools=("search", "pay"),
        has_events=(False,),
    ),
    # calls of a tool that runs as a task, in sessions of their own
    _Theme(
        habits=("plain", "leaves", "asks again"),
        scripts=(
            {"questions": 1},
            {"questions": 1, "urls": True, "babbles": True},
            {"questions": 2, "urls": "later", "patience": 2.0},
        ),
        states=("referred", "parked", "detached"),
        tools=("job", "job", "pay"),
        has_tasks=True,
    ),
)


def _more(plan: Plan) -> Plan:
    """A plan with what was added since seeds have a meaning; four of ten remain as they were."""
    random = Random(f"more {plan.seed}")
    if random.random() < 0.4:
        return plan
    theme = random.choice(_THEMES)
    config = {**plan.config, "hold": dict(plan.config["hold"])}
    if theme.quiet:
        config["hold"]["quiet_seconds"] = random.choice(theme.quiet)
    if theme.has_short_legs:
        config["legs"] = {"limit_seconds": 1.0}
    server = plan.server
    if (has_events := random.choice(theme.has_events)) is not None:
        server = replace(server, has_events=has_events)
        config["hold"].pop("cold_seconds", None)
    if theme.has_tasks:
        server = replace(server, has_tasks=True)
    is_held = config.get("route", {}).get("continuation") != "replay"
    calls = _usual(plan, lambda call: _with_theme(random, call, theme, is_held))
    faults = plan.faults if random.random() < 0.5 else plan.faults[:1]
    if theme.loses_owners:
        lost = _fault(random, random.choice(("kill", "power")), plan.replicas)
        faults += (replace(lost, seconds=30.0, at=round(1.0 + 8.0 * random.random(), 3), when="parked"),)
    faults += tuple(_fault_when(random, plan.replicas, theme) for _ in range(random.choice((0, 1, 1, 2))))
    plan = replace(plan, server=server, config=config, calls=calls, faults=faults)
    return _alone(random, plan) if random.random() < 0.08 else plan


def _with_theme(random: Random, call: Call, theme: _Theme, is_held: bool) -> Call:  # noqa: FBT001
    habits = theme.habits if is_held else ("plain",)
    if random.random() < 0.3:
        return call
    script = {**call.script, **random.choice(theme.scripts)}
    if script.get("deaf"):
        script.setdefault("patience", 4.0)
    first, other = call.replicas[:2]
    return replace(
        call,
        script=script,
        tool=random.choice(theme.tools or (call.tool,)),
        think=random.choice(theme.thinks or (call.think,)),
        habit=_habit(random.choice(habits), call, theme, is_held),
        replicas=random.choice((call.replicas, (first,) * 6, (first, *[other] * 5))),
    )


def _habit(drawn: str, call: Call, theme: _Theme, is_held: bool) -> str:  # noqa: FBT001
    """The habit of a client; those of calls that nobody holds came later, and leave the other draws as they were."""
    return drawn if is_held else Random(f"habit {call.tag} {call.at}").choice(theme.habits)


def _fault_when(random: Random, replicas: int, theme: _Theme) -> Fault:
    """A fault that waits for a state."""
    fault = _fault(random, random.choice(theme.kinds), replicas)
    return replace(fault, at=round(1.0 + random.random() * 10.0, 3), when=random.choice(theme.states))


def _alone(random: Random, plan: Plan) -> Plan:
    """With one replica, which may have keys that nobody else has."""
    calls = tuple(replace(call, replicas=(1,)) for call in plan.calls)
    faults = tuple(replace(fault, target=1, other=2) for fault in plan.faults)
    own_keys = {"state": {}, "replica": {"id": "gw-1"}} if random.random() < 0.7 else {}
    config = {**plan.config, **own_keys}
    return replace(plan, replicas=1, config=config, calls=calls, faults=faults)


_LONG: Final[tuple[dict[str, Any], ...]] = ({"questions": 2, "between": 7.0}, {"questions": 1, "hangs": 16.0})
_SHORT: Final[tuple[dict[str, Any], ...]] = ({"questions": 1}, {"questions": 2, "between": 1.0})


def _is_usual(call: Call) -> bool:
    return call.path == "/mcp" and not call.is_legacy


def _usual(plan: Plan, changed: Callable[[Call], Call]) -> tuple[Call, ...]:
    """The calls of a plan, of which those of modern clients to the legacy server are changed."""
    return tuple(changed(call) if _is_usual(call) else call for call in plan.calls)


def _each_at_one(plan: Plan, **how: Any) -> tuple[Call, ...]:
    """The calls of a plan, of which each of those goes to one replica, and is changed in the same way."""
    return _usual(plan, lambda call: replace(call, replicas=call.replicas[:1] * 6, **how))


def _sorted(*faults: Fault) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _held_for(plan: Plan, seconds: float) -> dict[str, Any]:
    """The configuration, in which calls wait for so long, and none goes cold."""
    config = _held(plan.config)
    return {**config, "hold": {**config["hold"], "ttl_seconds": seconds}}


def _with_silent_owners(random: Random, plan: Plan) -> Plan:
    """Others do not reach the owner of a call, all of them or some, while its client goes on there.

    Either it asks again, and answers when the owner is back; or the call lasts for longer than the owner waits.
    """
    replicas, asks_again = max(plan.replicas, 4), random.random() < 0.5
    parted: dict[int, list[int]] = {}
    for owner in range(1, replicas + 1):
        others = [number for number in range(1, replicas + 1) if number != owner]
        parted[owner] = random.sample(others, random.choice((2, 3, len(others), len(others))))
    calls = _usual(
        plan,
        lambda call: replace(
            call,
            script=random.choice(_SHORT if asks_again else _LONG),
            think=random.choice((0.2, 1.0)),
            habit="asks again, thinks" if asks_again else "plain",
            replicas=(call.replicas[0], *[random.choice(parted[call.replicas[0]])] * 5),
        ),
    )
    usual = [call for call in calls if _is_usual(call)]
    faults: list[Fault] = []
    for call in random.sample(usual, min(2, len(usual))):
        owner, kind = call.replicas[0], random.choice(("peers", "peers", "stop", "one way"))
        at, seconds = round(call.at + 0.1 + call.think * random.random(), 3), random.choice((3.0, 5.0))
        others = parted[owner] if kind == "peers" else parted[owner][:1]
        faults += [Fault(kind, at, seconds, owner, other) for other in others]
    server, config = replace(plan.server, has_events=True), _held_for(plan, 90.0 if asks_again else 10.0)
    return replace(plan, replicas=replicas, server=server, config=config, calls=calls, faults=_sorted(*faults))


def _asked_again_late(random: Random, plan: Plan) -> Plan:
    """Clients ask again just before their time is over, and answer after it would have been."""
    calls = _usual(
        plan, lambda call: replace(call, script=random.choice(_SHORT), think=6.0, habit="asks again, thinks")
    )
    return replace(plan, config=_held_for(plan, 15.0), calls=calls, faults=())


def _with_silent_server(random: Random, plan: Plan) -> Plan:
    """Some calls hang for longer than their clients wait; some clients think for nearly as long as a server may."""
    config = {**_held_for(plan, 90.0), "timeouts": {"idle_seconds": 15}}
    config.pop("legs", None)

    def changed(call: Call) -> Call:
        if random.random() < 0.3:
            return replace(call, script={"questions": random.choice((0, 1)), "hangs": 300.0})
        return replace(call, script={"questions": 2, "between": 6.0}, think=12.0, habit="plain")

    return replace(plan, config=config, calls=_usual(plan, changed), faults=plan.faults[:1])


def _stopped_in_grace(random: Random, plan: Plan) -> Plan:
    """Replicas are stopped for longer than they wait for clients that have left, and that come back meanwhile.

    A grace period of 1 s has one look at the clock, so that its end is due together with what came meanwhile.
    """
    script = {"questions": 2, "between": 3.0}
    calls = _each_at_one(plan, script=script, think=0.2, habit="leaves for a moment")
    stops = tuple(Fault("stop", at, 8.0, when="detached") for at in (2.0, 11.0, 20.0))
    config = _held_for(plan, 90.0)
    config["hold"]["grace_seconds"] = random.choice((1.0, 6.0))
    return replace(plan, config=config, calls=calls, faults=stops)


def _left_twice(random: Random, plan: Plan) -> Plan:
    """Clients leave both copies of a request, and their calls would go on for longer than they are waited for."""
    owner = random.randrange(1, plan.replicas + 1)
    how = {"script": {"questions": 1, "hangs": 40.0}, "think": 0.3, "habit": "twice, then goes"}
    calls = _usual(
        plan, lambda call: replace(call, replicas=random.choice((call.replicas, (owner, owner, owner))), **how)
    )
    return replace(plan, config=_held_for(plan, 90.0), calls=calls, faults=())


def _lost_call(random: Random, plan: Plan, *replicas: int, **how: Any) -> tuple[Plan, Call]:
    """A plan with few other calls, on a server that cannot resume streams; and a call that may be run again."""
    script = {"questions": 2, **how.pop("script", {})}
    call = Call("c31", round(1.0 + 6.0 * random.random(), 3), "search", "ann", script, replicas=replicas, **how)
    config = {name: value for name, value in _held_for(plan, 90.0).items() if name != "legs"}
    server = replace(plan.server, has_events=False)
    return replace(plan, server=server, config=config, calls=(*plan.calls[:6], call), faults=()), call


def _outlived(random: Random, plan: Plan) -> Plan:
    """Another replica runs a call again while its owner waits in vain for its client, which then comes there."""
    owner, heir = random.sample(range(1, plan.replicas + 1), 2)
    plan, call = _lost_call(
        *(random, plan, owner, owner, heir, owner), think=0.2, habit="leaves", script={"between": 6.0}
    )
    return replace(plan, faults=(Fault(random.choice(("one way", "part")), call.at + 1.2, 8.0, owner),))


def _answered_as_it_breaks(random: Random, plan: Plan) -> Plan:
    """The server dies when it has an answer, and has not yet said so."""
    script = {"at once": True}
    plan, call = _lost_call(random, plan, 1, think=2.0, habit="one by one", script=script)
    died = Fault("server", round(call.at + 2.1 + 0.2 * random.random(), 3), 1.0)
    return replace(plan, server=replace(plan.server, answers_late=True), faults=(died,))


def _broken_at_the_end(random: Random, plan: Plan) -> Plan:
    """The only replica ends while a lost call waits for its client, to be run again."""
    plan, call = _lost_call(random, plan, 1, think=15.0)
    ends = Fault("term", call.at + 1.0 + random.random(), 2.0)
    plan = replace(_alone(random, plan), faults=(Fault("cold cut", call.at + 0.5, 0.0), ends))
    return replace(plan, config={**plan.config, "state": {}, "replica": {"id": "gw-1"}})


def _unread_later(random: Random, plan: Plan) -> Plan:
    """Nobody waits for the calls, which go on or have ended, while a copy of the last retry but one is not read."""
    script = {"logs": True, "questions": 2, "between": random.choice((0.5, 3.0))}
    calls = _each_at_one(plan, script=script, think=0.3, habit="copies, then goes")
    state = random.choice(("", "unread detached", "unread finished"))
    faults = (Fault("int", round(1.0 + 5.0 * random.random(), 3), 2.0, when=state),) if state else ()
    return replace(plan, config=_held_for(plan, 40.0), calls=calls, faults=faults)


def _unread_broken(random: Random, plan: Plan) -> Plan:
    """The stream of a call breaks whose last round is not read, and then its replica drains."""
    script = {"logs": True, "questions": 2, "between": 0.3}
    calls = _each_at_one(plan, script=script, tool="search", think=3.0, habit="unread copy")
    at = round(1.0 + 8.0 * random.random(), 3)
    faults = (Fault("cold cut", at, 0.0, when="unread parked"), Fault("int", at + 0.1, 2.0, when="unread broken"))
    config = _held_for(plan, 40.0)
    config.pop("legs", None)
    server = replace(plan.server, has_events=False)
    return replace(plan, server=server, config=config, calls=calls, faults=faults)


def _unread_restored(random: Random, plan: Plan) -> Plan:
    """The owner of a call dies in the middle of a reply, and who takes the call over asks again, which is not read."""
    config = _held_for(plan, 90.0)
    config.pop("legs", None)
    owner, heir = random.sample(range(1, plan.replicas + 1), 2)
    at = round(1.0 + 6.0 * random.random(), 3)
    call = Call(
        tag="c30",
        at=at,
        tool="pay",
        caller="ann",
        # Both questions are withdrawn after a second; what is said of the second one comes when its client is back.
        script={"logs": True, "questions": 2, "at once": True, "patience": 1.0, "between": 2.0},
        think=1.5,
        habit="asks again, stops reading",
        replicas=(owner, *[heir] * 5),
    )
    dies_at = round(at + 3.2 + random.random(), 3)
    faults = [Fault("kill", dies_at, 20.0, owner, heir)]
    if random.random() < 0.5:
        faults.append(Fault("int", dies_at + 0.5, 2.0, when="unread restored"))
    return replace(plan, config=config, calls=(*plan.calls[:6], call), faults=tuple(faults))


_OWNERS: Final = (_with_silent_owners, _with_silent_owners, _asked_again_late, _with_silent_server, _stopped_in_grace)
_UNREAD: Final = (_unread_later, _unread_broken, _unread_restored, _left_twice)
_LOST: Final = (_outlived, _answered_as_it_breaks, _broken_at_the_end)


def _rare(plan: Plan) -> Plan:
    """A plan of one situation that few others lead to, if one is drawn.

    Owners or servers are silent; a call has moved on while a reply of it is not read, or both copies of a request were
    left; or a call is lost at a moment when few are.
    """
    for name, share, draws in (("newest", 0.16, _OWNERS), ("rarest", 0.05, _UNREAD), ("lost", 0.015, _LOST)):
        random = Random(f"{name} {plan.seed}")
        if random.random() <= share and plan.replicas >= 3 and not plan.config["route"]:
            plan = random.choice(draws)(random, plan)
    return plan


def _with_listeners(plan: Plan) -> Plan:
    """A plan in which clients listen to changes, if one is drawn."""
    listeners, changes = listening.drawn(plan, LOAD_SECONDS)
    if not listeners:
        return plan
    plan = replace(plan, server=replace(plan.server, has_changes=True), listeners=listeners, changes=changes)
    return _with_cut_listeners(Random(f"cut listeners {plan.seed}"), plan)


def _with_cut_listeners(random: Random, plan: Plan) -> Plan:
    """Sometimes the modern server's connections break, and something changes for a mirrored client after that."""
    mirrored = [each for each in plan.listeners if each.is_legacy and each.path == "/modern"]
    if not mirrored or random.random() > 0.5:
        return plan
    cut = Fault("modern cut", round(10.0 + 8.0 * random.random(), 3), 0.0)
    changes = tuple(
        Change(round(cut.at + 0.2 + 5.0 * random.random(), 3), each.caller, uri, each.path)
        for each in mirrored
        for uri in (*each.uris, "")
    )
    return replace(
        plan,
        faults=_sorted(*plan.faults, cut),
        changes=tuple(sorted((*plan.changes, *changes), key=lambda change: change.at)),
    )


TASK_HABITS: Final = ("plain", "plain", "plain", "cancels", "abandons")


def _with_tasks(plan: Plan) -> Plan:
    """A plan in which clients have tasks, if one is drawn."""
    random = Random(f"tasks {plan.seed}")
    # A call that may be replayed says so of its task too, and a task has effects.
    if random.random() >= 0.1 or plan.config.get("route", {}).get("continuation") == "replay":
        return plan
    tasks = tuple(_task(random, number, plan.replicas) for number in range(1, random.randrange(2, 6)))
    config = {**plan.config, "tasks": {"ttl_seconds": 100}}
    late, odd = Random(f"late tasks {plan.seed}"), Random(f"odd tasks {plan.seed}")
    tasks = tuple(_odd(odd, task) if odd.random() < 0.25 else _made(late, task) for task in tasks)
    forgets = Random(f"forgotten tasks {plan.seed}")
    tasks = tuple(replace(task, script={**task.script, "forgets": forgets.random() < 0.2}) for task in tasks)
    plan = replace(plan, server=replace(plan.server, has_lasting_tasks=True), config=config, tasks=tasks)
    return _with_cut_tasks(Random(f"cut tasks {plan.seed}"), plan)


def _made(random: Random, task: Call) -> Call:
    """Sometimes a server takes a while to make a task, and may ask before."""
    if random.random() > 0.3:
        return task
    asks_first = bool(task.script["questions"]) and random.random() < 0.6
    return replace(task, script={**task.script, "made": random.choice((0.02, 1.0, 6.0)), "asks_first": asks_first})


def _odd(random: Random, task: Call) -> Call:
    """A task whose client or server does what few do."""
    soon = {
        "questions": random.choice((1, 2)),
        "before": random.choice((0.0, 1.0)),
        "between": random.choice((0.0, 1.0)),
    }
    habit, think, script = random.choice(
        (
            ("leaves", 0.2, {"made": 1.0, "asks_first": True}),  # the task is made while its client is away
            ("cancels", 0.5, {"fragile": True}),  # the server goes on, and asks
            ("plain", 4.0, {"patience": 1.0}),  # the server does not wait for the answer
            ("plain", 0.2, {"refuses": random.choice(("503", "cut"))}),  # the server does not take the answer at once
        )
    )
    return replace(task, habit=habit, think=think, script={**task.script, **soon, **script})


def _with_cut_tasks(random: Random, plan: Plan) -> Plan:
    """Sometimes the server's connections break soon after a task began, and its streams cannot be resumed."""
    if random.random() > 0.3:
        return plan
    cuts = tuple(Fault("cold cut", round(task.at + 0.5 + 3.0 * random.random(), 3), 0.0) for task in plan.tasks[:2])
    faults = _sorted(*plan.faults[:1], *cuts)
    return replace(plan, server=replace(plan.server, has_events=False), config=_held(plan.config), faults=faults)


def _held(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration, in which no call goes cold."""
    return {**config, "hold": {name: value for name, value in config["hold"].items() if name != "cold_seconds"}}


def _task(random: Random, number: int, replicas: int) -> Call:
    script: dict[str, Any] = {"questions": random.choice((0, 1, 1, 2)), "patience": 20.0}
    script |= {"before": random.choice((0.0, 0.05, 1.0, 6.0, 15.0)), "between": random.choice((0.0, 1.0, 6.0))}
    if random.random() < 0.15:
        script["fails"] = True
    return Call(
        tag=f"t{number}",
        at=round(random.random() * LOAD_SECONDS * 0.6, 3),
        tool="chore",
        caller=random.choice(("ann", "bob", "eve")),
        script=script,
        think=random.choice((0.01, 0.2, 1.0, 4.0)),
        habit=random.choice(TASK_HABITS),
        replicas=tuple(random.randrange(1, replicas + 1) for _ in range(6)),
    )


_NOT_OF_CHILDREN: Final = ("refuses", "aside", "deaf", "asks late")
"""What a server over stdio does not do, or what may be of the next call: it has nothing but its output."""


def _with_children(plan: Plan) -> Plan:
    """A plan in which some calls go to servers over stdio, if that is drawn; such servers may die."""
    random = Random(f"children {plan.seed}")
    if random.random() >= 0.06:
        return plan

    def changed(call: Call) -> Call:
        if random.random() < 0.3:
            return call
        script = {name: value for name, value in call.script.items() if name not in _NOT_OF_CHILDREN}
        if "hangs" in script:
            script["hangs"] = 20.0  # it may do so in several runs, and a history has an end
        tool = "pay" if call.tool == "job" else call.tool
        return replace(call, path="/child", script=script, tool=tool)

    calls = _usual(plan, changed)
    dead = (
        Fault("child", round(1.0 + random.random() * (LOAD_SECONDS - 5.0), 3), 0.0) for _ in range(random.randrange(4))
    )
    return replace(plan, calls=calls, faults=_sorted(*plan.faults, *dead))


def _returning(plan: Plan) -> Plan:
    """A plan in which a mirrored client leaves the stream of its call, or cancels the call, if that is drawn."""
    random = Random(f"returning {plan.seed}")
    if random.random() >= 0.03:
        return plan
    script: dict[str, Any] = {"questions": random.choice((1, 2)), "before": 1.0, "between": 1.0, "notes": True}
    if random.random() < 0.4:
        script["errs"] = True
    call = Call(
        tag=f"c{max((int(each.tag[1:]) for each in plan.calls), default=0) + 1}",
        at=round(random.random() * LOAD_SECONDS * 0.6, 3),
        tool="pay",
        caller=random.choice(("ann", "bob", "eve")),
        script=script,
        think=random.choice((0.2, 1.0)),
        habit=random.choice(("comes back", "comes back late", "hangs up", "hangs up away")),
        replicas=tuple(random.randrange(1, plan.replicas + 1) for _ in range(6)),
        path="/modern",
        is_legacy=True,
    )
    return replace(plan, calls=(*plan.calls, call))
