"""What the gateway knows of the sessions of one pool key."""

from typing import Any
from unittest.mock import Mock

import pytest

from gateway.exchange.handshake import Handshake
from gateway.protocol import mcp
from gateway.protocol.tool_list import Tool
from gateway.sessions.call import PoolKey
from gateway.sessions.group import ChangeListeners, Group, SessionRequest
from gateway.sessions.known_tools import UNKNOWN_TOOL
from tests.support.memory import left_by

ADA, BOB = {"Authorization": "Bearer ada"}, {"Authorization": "Bearer bob"}
KNOWN = Tool()
KEY = PoolKey(b"p", b"{}", b"{}", ())


def group(*tools: str, headers: Any = ADA) -> Group[Any]:
    made: Group[Any] = Group(KEY, False, ChangeListeners(), Mock())
    if tools:
        made.tools.learn(dict.fromkeys(tools, KNOWN), headers)
    return made


# -- tools ------------------------------------------------------------------------------------------------------------


def test_a_tool_that_a_credential_was_not_shown_is_known_to_be_hidden_from_it() -> None:
    assert group().tools.find("a", ADA) is None
    known = group("a")
    assert known.tools.find("a", ADA) is not None
    assert known.tools.find("hidden", ADA) is UNKNOWN_TOOL
    assert known.tools.find("a", BOB) is not None
    assert known.tools.find("hidden", BOB) is None


def test_a_list_of_a_narrower_scope_leaves_the_tools_of_others_known() -> None:
    known = group("a", "b")
    known.tools.learn({"c": Tool()}, BOB)
    assert set(known.tools.by_name or {}) == {"a", "b", "c"}
    known.tools.learn({"d": Tool()}, BOB)
    assert set(known.tools.by_name or {}) == {"a", "b", "c", "d"}


def test_the_only_credential_that_listed_the_tools_replaces_them() -> None:
    known = group("a", "b")
    known.tools.learn({"c": Tool()}, ADA)
    assert set(known.tools.by_name or {}) == {"c"}


def test_a_server_that_renames_its_tools_for_ever_is_known_in_bounded_memory() -> None:
    known = group(*(f"t{number}" for number in range(10_000)))
    known.tools.learn({"new": Tool()}, BOB)
    assert set(known.tools.by_name or {}) == {"new"}


def test_credentials_that_come_and_go_are_known_in_bounded_memory() -> None:
    known = group("a")

    def come(numbers: range) -> None:
        for number in numbers:
            known.tools.learn({"a": Tool()}, {"Authorization": f"Bearer {number}"})
            known.credentials.note({"Authorization": f"Bearer {number}"})

    come(range(100))
    assert left_by(lambda: come(range(100, 1000))) < 50_000
    assert known.credentials.include({"Authorization": "Bearer 999"})
    assert not known.credentials.include({"Authorization": "Bearer 0"})


@pytest.mark.parametrize(
    ("method", "tools"), [(mcp.TOOLS_CHANGED, None), (mcp.PROMPTS_CHANGED, {"a"}), (mcp.RESOURCE_UPDATED, {"a"})]
)
def test_a_change_makes_old_what_it_is_about(method: str, tools: set[str] | None) -> None:
    known = group("a")
    known.changed(method, b"{}")
    assert (None if known.tools.by_name is None else set(known.tools.by_name)) == tools
    assert known.tools.latest("a") is (UNKNOWN_TOOL if tools is None else KNOWN)


def test_calls_are_judged_by_the_former_tools_after_a_change_may_have_been_missed() -> None:
    known = group("a")
    known.missed()
    known.missed()
    assert known.tools.latest("a") is KNOWN
    assert known.tools.find("a", ADA) is None
    known.changed(mcp.TOOLS_CHANGED, b"{}")
    assert known.tools.latest("a") is UNKNOWN_TOOL


@pytest.mark.parametrize("heard", [True, False])
def test_a_stream_that_never_worked_says_nothing_of_a_restart(*, heard: bool) -> None:
    known = group("a")
    known.deaf(heard=heard)
    assert (known.tools.by_name is None) is heard


# -- what nobody would miss --------------------------------------------------------------------------


@pytest.mark.parametrize("known", ["nothing", "sessions", "waiting", "shaken", "accepted", "tools", "former"])
def test_a_group_that_knows_anything_is_not_unused(known: str) -> None:
    made = group()
    match known:
        case "nothing":
            pass
        case "sessions":
            made.sessions["session"] = None
        case "waiting":
            made.waiting[SessionRequest(made, lambda _: None)] = None
        case "shaken":
            made.shaken = Handshake("2025-11-25", {}, b'{"name":"x"}', None)  # type: ignore[arg-type]
        case "accepted":
            made.credentials.note(ADA)
        case _:
            made.tools.learn({"a": Tool()}, ADA)
    if known == "former":
        made.missed()
    assert made.knows_nothing is (known == "nothing")
    assert made.is_empty is (known not in ("sessions", "waiting"))
