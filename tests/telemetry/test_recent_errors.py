"""The recent errors: one line for each kind, without secrets."""

import pytest

from gateway.http_client.errors import NotConnected, TlsRefused
from gateway.protocol.errors import (
    Busy,
    CallLost,
    GatewayError,
    InvalidParams,
    InvalidState,
    NoHandshake,
    NoKeys,
    OwnerStalled,
    Stopping,
    Unauthorized,
    Unreachable,
)
from gateway.telemetry.process_status import (
    MOST_ERRORS,
)
from gateway.telemetry.recent_errors import RecentErrors, presentable


def kinds(errors: RecentErrors, *noted: GatewayError) -> list[str | None]:
    """The kinds under which errors are recorded."""
    return [found and found.kind for found in (errors.note(error) for error in noted)]


def test_errors_that_differ_in_numbers_are_one_entry_and_the_number_of_entries_is_bounded() -> None:
    errors = RecentErrors()
    for number in range(5):
        _ = errors.note(Unreachable(f"is started again in {number} s"), "/mcp")
    (error,) = errors.told()
    assert (error.count, error.text) == (5, "is started again in 4 s")
    same = Unreachable("the same one")
    assert kinds(errors, same, same) == ["upstream_unreachable", None]
    assert errors.told()[0].count == 1
    for letter in range(3 * MOST_ERRORS):
        _ = errors.note(Unreachable("x" * (letter + 1)))
    assert len(errors.told()) == MOST_ERRORS
    assert errors.told()[0].text == "x" * 3 * MOST_ERRORS
    assert all(error.text != "the same one" for error in errors.told()), "the oldest has gone"


def test_errors_about_different_replicas_or_workers_are_entries_of_their_own() -> None:
    errors = RecentErrors()
    said = "The replica %s at 127.0.0.1:%d was silent for %.1f s (%d times)"
    for number, name in enumerate(("gw-1", "gw-3", "gw#0", "gw#1", "gw_1", "gw_2", "gw7", "gw8") * 5):
        _ = errors.note(Unreachable(said % (name, 40_000 + number, number / 4, number)))
    assert [error.count for error in errors.told()] == [5] * 8


def test_advice_stands_in_the_fix_alone_if_it_says_the_same() -> None:
    errors = RecentErrors()
    for error in (
        NotConnected("Connection refused").mapped("The upstream"),
        NoHandshake("It answered `initialize` with HTTP 404; check the path of upstream.url"),
        TlsRefused("its certificate has expired; renew it there").mapped("It"),
        CallLost("It was silent; the call may have had effects"),
    ):
        _ = errors.note(error)
    assert [error.text for error in reversed(errors.told())] == [
        "The upstream cannot be reached (Connection refused)",
        "It answered `initialize` with HTTP 404",
        "It cannot be reached over TLS: its certificate has expired; renew it there",
        "It was silent; the call may have had effects",
    ]


def test_an_error_that_only_its_client_can_mend_is_not_recorded() -> None:
    errors, mended = RecentErrors(), (InvalidParams("x"), InvalidState("expired"), Unauthorized("x", has_token=True))
    assert kinds(errors, *mended, InvalidState("unknown_key")) == [None, None, None, "unknown_key"]
    assert "state.keys" in errors.told()[0].fix


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\x1b[31mc\u202ed", "a b?[31mc?d"),
        ("with Bearer abcdefghijkl", "with Bearer [hidden]"),
        ("X refused a message: card 1234", "X refused a message"),
        ("The task has no result: card 1234", "The task has no result"),
        (
            "no ElicitResult: Invalid enum value 'card 1234' - at `$.action`; again",
            "no ElicitResult: Invalid enum value - at `$.action`; again",
        ),
        ("X answered HTTP 502 (card (1) 2); the call may", "X answered HTTP 502; the call may"),
        ("y" * 1000, "y" * 400 + "…"),
    ],
)
def test_a_shown_text_is_one_line_without_secrets(text: str, shown: str) -> None:
    assert presentable(text) == shown


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Busy("full", status=503), "busy"),
        (NoKeys("none"), "no_keys"),
        (OwnerStalled("gw-1"), "owner_stalled"),
        (GatewayError("odd"), "internal"),
        (Stopping("ends"), None),
    ],
)
def test_a_condition_of_the_gateway_is_recorded_by_its_kind(error: GatewayError, kind: str | None) -> None:
    errors = RecentErrors()
    assert kinds(errors, error) == [kind]
    assert [told.kind for told in errors.told()] == ([kind] if kind else [])
