"""What happens in one history, drawn from a seed: replicas, server, calls, faults. A plan is plain data."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import msgspec

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
    """`/mcp` leads to the legacy server, `/modern` to a modern one."""
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


@dataclass(frozen=True)
class Plan:
    """One history."""

    seed: int
    replicas: int
    server: Kind
    config: dict[str, Any]
    calls: tuple[Call, ...]
    faults: tuple[Fault, ...]

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


def draw(seed: int) -> Plan:
    """The plan of a seed."""
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
    calls += _close(Random(f"close {seed}"), server)
    return Plan(seed, replicas, server, config, calls, tuple(sorted(faults, key=lambda fault: fault.at)))


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


def _close(random: Random, server: Kind) -> tuple[Call, ...]:
    """Sometimes calls that come just when the server closes the connection of the one before."""
    if server.idle_seconds > LOAD_SECONDS or random.random() < 0.5:
        return ()
    at, calls, replica = 18.0, [], random.randrange(1, 4)
    while at < LOAD_SECONDS and len(calls) < 8:
        tag = f"c{len(calls) + 20}"
        calls.append(Call(tag, round(at, 3), "pay", "kim", {"questions": 0}, 0.01, replicas=(replica,)))
        at += server.idle_seconds + random.randrange(-1, 5) / 1000
    return tuple(calls)
