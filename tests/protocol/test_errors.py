"""The errors of the gateway: code, HTTP status, headers and data that a client gets."""

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


def test_an_unsupported_version_is_answered_with_the_supported_ones() -> None:
    error = errors.UnsupportedVersion("2099-01-01")
    assert (error.code, error.status) == (-32022, 400)
    assert error.data == {"supported": ["2026-07-28"], "requested": "2099-01-01"}


def test_a_missing_capability_is_named() -> None:
    error = errors.MissingCapability({"sampling": {}, "elicitation": {"url": {}}}, "an elicitation")
    assert (error.code, error.status) == (-32021, 400)
    assert error.data == {"requiredCapabilities": {"sampling": {}, "elicitation": {"url": {}}}}
    assert "elicitation, sampling" in error.message


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


def test_a_method_that_is_not_served_is_refused_with_those_that_are() -> None:
    error = errors.NotAllowed("GET is not served here", allowed="POST")
    assert (error.code, error.status, error.headers) == (-32600, 405, {"Allow": "POST"})


def test_a_request_about_tasks_is_told_to_declare_the_extension() -> None:
    error = errors.TasksUndeclared("tasks/get")
    assert (error.code, error.status) == (-32021, 400)
    assert error.data == {"requiredCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}}}
    assert error.message.startswith("tasks/get needs the extension io.modelcontextprotocol/tasks")


def test_an_unknown_task_looks_like_an_expired_one() -> None:
    error = errors.UnknownTask()
    assert (error.code, error.status, error.message, error.data) == (-32602, 400, "Unknown or expired taskId", None)


def test_a_body_in_an_unknown_encoding_is_refused_with_those_that_are_known() -> None:
    error = errors.UnsupportedEncoding()
    assert (error.status, error.headers) == (415, {"Accept-Encoding": "gzip, deflate"})


def test_a_state_from_the_future_blames_the_clock_of_its_replica() -> None:
    assert "gw-1 that holds this call has a clock that is more than 60 s" in errors.StateFromFuture("gw-1").message
    assert "replica that sealed this requestState has a clock that is more" in errors.StateFromFuture("").message
    assert "still wait" not in errors.StateFromFuture("").message


def test_a_call_lost_at_the_replica_that_got_it_is_not_to_be_repeated_at_once() -> None:
    error = errors.TakenCallLost("gw-2")
    assert (error.data, error.headers) == ({"reason": "call_lost"}, {})
    assert "gw-2" in error.message


def test_a_replica_that_shuts_down_says_what_its_client_can_do() -> None:
    error = errors.ShuttingDown("call again")
    assert error.message == "The gateway is shutting down; call again, another replica or a new process will answer"
    assert (error.status, error.data) == (503, {"reason": "stopping"})
