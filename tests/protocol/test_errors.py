"""The errors of the gateway: code, HTTP status, headers and data that a client gets."""

from typing import Any

import pytest

from gateway.protocol import errors

UNAVAILABLE = [
    (errors.Busy("full", status=429, retry_after_seconds=5), 429, "busy", "5"),
    (errors.NoKeys("no keys"), 503, "no_keys", "10"),
    (errors.OwnerStalled("gw-1"), 503, "owner_stalled", "1"),
    (errors.OwnerSilent("gw-1", "is silent"), 503, "owner_stalled", "1"),
    (errors.ShuttingDown("call again"), 503, "stopping", "1"),
]


@pytest.mark.parametrize(("error", "status", "reason", "seconds"), UNAVAILABLE)
def test_a_condition_that_passes_names_its_reason_and_when_to_retry(
    error: errors.GatewayError, status: int, reason: str, seconds: str
) -> None:
    assert (error.code, error.status) == (-32603, status)
    assert error.data == {"reason": reason}
    assert error.headers == {"Retry-After": seconds}


def test_a_call_that_a_drain_has_ended_is_not_to_be_repeated() -> None:
    """It may have had effects, and clients repeat by themselves what has this header."""
    assert errors.Stopping("ends").headers == {}


def test_every_rejected_state_looks_the_same_to_the_client() -> None:
    one, other = errors.InvalidState("forged"), errors.InvalidState("expired")
    assert (one.code, one.status, one.message, one.data) == (other.code, other.status, other.message, other.data)
    assert (one.code, one.status, one.data) == (-32602, 400, {"reason": "invalid_request_state"})
    assert (one.reason, other.reason) == ("forged", "expired")


TASKS = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
TOLD: list[tuple[errors.GatewayError, int, int, dict[str, Any] | None, str]] = [
    (errors.UnsupportedVersion("9"), -32022, 400, {"supported": ["2026-07-28"], "requested": "9"}, "2026-07-28"),
    (
        errors.MissingCapability({"sampling": {}, "elicitation": {"url": {}}}, "an elicitation"),
        -32021,
        400,
        {"requiredCapabilities": {"sampling": {}, "elicitation": {"url": {}}}},
        "elicitation, sampling",
    ),
    (errors.TasksUndeclared("tasks/get"), -32021, 400, {"requiredCapabilities": TASKS}, "tasks/get needs the ext"),
    (errors.UnknownTask(), -32602, 400, None, "Unknown or expired taskId"),  # it must not tell which tasks exist
    (
        errors.StateFromFuture("gw-1"),
        -32603,
        503,
        {"reason": "owner_stalled"},
        "gw-1 that holds this call has a clock",
    ),
    (errors.StateFromFuture(""), -32603, 503, {"reason": "owner_stalled"}, "replica that sealed this requestState"),
    (errors.TakenCallLost("gw-2"), -32603, 503, {"reason": "call_lost"}, "gw-2"),
    (errors.ShuttingDown("call again"), -32603, 503, {"reason": "stopping"}, "shutting down; call again, another"),
]


@pytest.mark.parametrize(("error", "code", "status", "data", "says"), TOLD)
def test_a_client_is_told_what_it_can_act_on(
    error: errors.GatewayError, code: int, status: int, data: dict[str, Any] | None, says: str
) -> None:
    assert (error.code, error.status, error.data) == (code, status, data)
    assert says in error.message


def test_what_is_allowed_or_when_to_try_again_is_a_header() -> None:
    assert errors.NotAllowed("GET is not served here", allowed="POST").headers == {"Allow": "POST"}
    assert errors.UnsupportedEncoding().headers == {"Accept-Encoding": "identity"}
    assert errors.TakenCallLost("gw-2").headers == {}, "the call may have had effects"


def test_the_challenge_says_what_is_wrong_with_a_token_only_if_there_was_one() -> None:
    assert errors.Unauthorized("No token", has_token=False).headers == {"WWW-Authenticate": "Bearer"}
    assert errors.Unauthorized("The token has expired", has_token=True).headers == {
        "WWW-Authenticate": 'Bearer error="invalid_token", error_description="The token has expired"'
    }


@pytest.mark.parametrize(
    ("challenge", "is_clients", "status", "headers"),
    [
        ("Bearer x", True, 401, {"WWW-Authenticate": "Bearer x"}),
        (None, True, 401, {}),
        ("Bearer x", False, 200, {}),
    ],
)
def test_a_refusal_of_the_upstream_reaches_the_client_if_the_credential_is_its_own(
    challenge: str | None, status: int, headers: dict[str, str], *, is_clients: bool
) -> None:
    error = errors.Refused("refused", status=401, challenge=challenge, is_clients=is_clients)
    assert (error.status, error.headers) == (status, headers)
    assert error.data == {"reason": "upstream_refused", "status": 401}


def test_an_owner_that_cannot_be_reached_for_a_local_cause_is_fixed_on_this_replica() -> None:
    local = errors.OwnerSilent("gw-1", "cannot be asked", is_local=True)
    assert local.fix.startswith("check this replica, not the owner")
    assert errors.OwnerSilent("gw-1", "is silent").fix.startswith("check that replica")


def test_a_message_is_one_printable_line_of_bounded_length_whatever_it_quotes() -> None:
    error = errors.CallLost("The server said \x1b[2Jforged\r\nline \ud800 " + "x" * 5000)
    assert error.message.startswith("The server said ?[2Jforged  line ? xxx")
    assert len(error.message) == errors.MESSAGE_CHARACTERS + 1
    assert str(error) == error.message
    assert errors.CallLost("Grüße, 世界").message == "Grüße, 世界"
