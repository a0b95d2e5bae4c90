"""Who listens to changes of the servers, and what changes there; drawn apart from the rest of a plan."""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from gateway.protocol import mcp

if TYPE_CHECKING:
    from tests.simulation.plan import Plan

LISTENS_SECONDS: Final = 130.0
"""How long most listeners stay, which is longer than anything takes to mend itself."""
CHANGES: Final[dict[str, Any]] = {"tools": {"listChanged": True}, "resources": {"subscribe": True}}
"""The capabilities of a server that announces changes."""
CHANGE: Final = "simulated/change"
"""In `_meta` of an announcement: the number of the change."""
URIS: Final = ("note://a", "note://b")
"""The resources of each caller; who else has one of this name has another one."""


@dataclass(frozen=True)
class Listener:
    """A client that wants to hear of changes."""

    tag: str
    at: float
    until: float
    caller: str
    uris: tuple[str, ...]
    wants_lists: bool
    replicas: tuple[int, ...]
    path: str = "/mcp"
    is_legacy: bool = False


@dataclass(frozen=True)
class Change:
    """Something changes for one caller at the server behind a path: a resource, or the list of tools."""

    at: float
    caller: str
    uri: str = ""
    path: str = "/mcp"

    @property
    def topic(self) -> tuple[str, str]:
        return (mcp.RESOURCE_UPDATED, self.uri) if self.uri else (mcp.TOOLS_CHANGED, "")

    def announcement(self, number: int, meta: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a server says of it."""
        method, uri = self.topic
        params = {**({"uri": uri} if uri else {}), "_meta": {CHANGE: number, **(meta or {})}}
        return {"jsonrpc": "2.0", "method": method, "params": params}


def drawn(plan: "Plan", load_seconds: float) -> tuple[tuple[Listener, ...], tuple[Change, ...]]:
    """Listeners and changes in one history of ten."""
    random = Random(f"listeners {plan.seed}")
    if random.random() >= 0.1:
        return (), ()
    listeners = tuple(_listener(random, f"l{number}", plan.replicas) for number in range(1, random.randrange(2, 6)))
    times = [random.random() * load_seconds for _ in range(random.randrange(4, 16))]
    times += [fault.at + random.random() * (fault.seconds + 1.0) for fault in plan.faults for _ in range(3)]
    return listeners, tuple(_change(random, at, random.choice(listeners)) for at in sorted(times))


def _listener(random: Random, tag: str, replicas: int) -> Listener:
    path, is_legacy = random.choice((("/mcp", False), ("/mcp", False), ("/modern", True), ("/modern", False)))
    at = round(random.random() * 8.0, 3)
    return Listener(
        tag,
        at,
        # A mirrored session that nobody ends is forgotten late.
        until=at + (LISTENS_SECONDS if is_legacy else random.choice((*[LISTENS_SECONDS] * 8, 0.3, 5.0, 20.0))),
        caller=random.choice(("ann", "bob")),
        uris=random.choice((URIS, URIS[:1], ())),
        wants_lists=random.random() < 0.7,
        replicas=tuple(random.randrange(1, replicas + 1) for _ in range(6)),
        path=path,
        is_legacy=is_legacy,
    )


def _change(random: Random, at: float, listener: Listener) -> Change:
    """A change that a listener wants to hear of, or one of another caller."""
    caller = listener.caller if random.random() < 0.8 else random.choice(("ann", "bob", "eve"))
    return Change(round(at, 3), caller, random.choice((*URIS, "")), listener.path)
