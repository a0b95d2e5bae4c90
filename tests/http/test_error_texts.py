"""What a client is told of an error with `errors: brief`: never what tells of the inside, which the log has."""

import json
from collections.abc import Iterator

import pytest

from gateway.cluster.peer_errors import NoReplica, PeerRefused, PeerStuck
from gateway.http.error_texts import texts
from gateway.http.outbox import error_response
from gateway.mirror.streamable.sep_1685_state import InvalidRequestState
from gateway.mirror.streamable.tokens import NoSession
from gateway.plugins.sep_1442.vocabulary import InvalidSession, UnknownVersion
from gateway.protocol import errors
from gateway.tasks.follower import TaskGone
from gateway.telemetry import LineLimit
from gateway.telemetry.tracing import TracesUnavailable
from gateway.upstream.http.http_errors import SuspectedSessionLoss, WrongTransport
from tests.support.logs import Lines

INSIDE = "http://inside.example:9999/inside gw-inside /inside/program (Connection refused)"
SHORTENED = [
    errors.GatewayError(INSIDE),
    errors.Busy(INSIDE, status=429),
    errors.Busy(INSIDE, status=503),
    errors.TooLarge(INSIDE),
    errors.UpstreamError(INSIDE),
    errors.Unreachable(INSIDE),
    errors.NoHandshake(INSIDE),
    errors.ChildUnreachable(INSIDE),
    errors.DescriptorsShort(INSIDE),
    errors.Redirected(INSIDE),
    WrongTransport(INSIDE),
    errors.SessionLost(INSIDE),
    errors.CallLost(INSIDE),
    errors.CallSilent(INSIDE),
    errors.Unheeded(INSIDE),
    errors.OwnerLost("gw-inside", INSIDE),
    errors.bug(),
    errors.CallGone(INSIDE),
    TaskGone(INSIDE),
    errors.CannotAsk(INSIDE),
    errors.Refused(INSIDE, status=401),
    errors.Refused(INSIDE, status=403, is_clients=False),
    errors.OwnerStalled(INSIDE),
    errors.StateFromFuture(INSIDE),
    errors.StateFromFuture(""),
    errors.OwnerSilent(INSIDE, INSIDE),
    errors.SessionStalled("gw-inside", errors.OwnerStalled(INSIDE)),
    NoReplica(INSIDE, INSIDE),
    PeerRefused(INSIDE, INSIDE),
    PeerRefused(INSIDE, INSIDE, 90),
    PeerStuck(INSIDE),
    errors.TakenCallLost(INSIDE),
    errors.Stopping(INSIDE),
]
AS_THEY_ARE = [
    errors.TaskCancelled(),
    errors.NoKeys("The issuer's signing keys cannot be fetched"),
    errors.ShuttingDown("call again"),
    errors.DownstreamError("of the request"),
    errors.ParseError("of the request"),
    errors.InvalidRequest("of the request"),
    errors.Notification("of the request"),
    errors.IdInUse(),
    errors.NotAllowed("of the request", allowed="POST"),
    errors.InvalidParams("of the request"),
    errors.InvalidState("forged"),
    InvalidRequestState("expired"),
    errors.OutOfTime("expired", "gw-inside", 90),
    errors.HeaderMismatch("of the request"),
    errors.MissingCapability({"sampling": {}}, "a question"),
    errors.TasksUndeclared("tasks/get"),
    errors.UnknownTask(),
    errors.UnsupportedVersion("9"),
    errors.MethodNotFound("of the request"),
    errors.Unauthorized("The token has expired", has_token=True),
    errors.Forbidden("of the request"),
    errors.UnsupportedEncoding(),
    NoSession(),
    UnknownVersion(),
    InvalidSession(),
]
NEVER_TOLD = {
    TracesUnavailable,  # at a start
    SuspectedSessionLoss,  # becomes another one
}


def subclasses(kind: type[errors.GatewayError]) -> Iterator[type[errors.GatewayError]]:
    for each in kind.__subclasses__():
        if each.__module__.startswith("gateway."):
            yield each
        yield from subclasses(each)


@pytest.fixture
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "are_brief", True)
    monkeypatch.setattr(texts, "refusals", LineLimit())


def test_every_class_of_errors_is_in_the_table() -> None:
    told = {type(error) for error in (*SHORTENED, *AS_THEY_ARE)} | NEVER_TOLD
    assert {errors.GatewayError, *subclasses(errors.GatewayError)} <= told


@pytest.mark.usefixtures("_brief")
@pytest.mark.parametrize("error", SHORTENED, ids=lambda error: type(error).__name__)
def test_the_inside_is_in_the_log_alone_beside_the_id(error: errors.GatewayError, log_lines: Lines) -> None:
    body = error_response(b"1", error, "r-1")
    said = json.loads(body)["error"]
    assert b"inside" not in body
    assert b"refused)" not in body
    assert said["message"] == f"{error.brief} (requestId r-1)"
    assert said["data"] == {**(error.data or {}), "requestId": "r-1"}
    (line,) = log_lines("error.shortened")
    assert (line["cause"], line["fix"], line["request_id"]) == (error.message, error.fix, "r-1")


@pytest.mark.usefixtures("_brief")
@pytest.mark.parametrize("error", AS_THEY_ARE, ids=lambda error: type(error).__name__)
def test_an_error_about_the_request_is_told_as_it_is(error: errors.GatewayError, log_lines: Lines) -> None:
    body = error_response(b"1", error, "r-1")
    assert json.loads(body)["error"]["message"] == error.message
    assert b"inside" not in body
    assert log_lines() == []


@pytest.mark.usefixtures("_brief")
def test_of_refusals_20_lines_a_second_are_logged_and_every_failure(
    log_lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("gateway.world.monotonic", lambda: now)
    for seconds in (0.0, 0.999, 0.001):
        now += seconds
        for number in range(22):
            assert b"inside" not in error_response(b"1", errors.Busy(INSIDE, status=429), f"busy {now} {number}")
        assert b"inside" not in error_response(b"1", errors.CallLost(INSIDE), f"lost {now}")
    twenty, after = range(20), range(1, 20)
    assert [(line["request_id"], line["suppressed"]) for line in log_lines("error.shortened")] == [
        *((f"busy 1000.0 {number}", 0) for number in twenty),
        ("lost 1000.0", 0),
        ("lost 1000.999", 0),
        ("busy 1001.0 0", 2 + 22),
        *((f"busy 1001.0 {number}", 0) for number in after),
        ("lost 1001.0", 0),
    ]


@pytest.mark.usefixtures("_brief")
def test_without_an_http_request_the_error_gets_an_id_of_its_own(log_lines: Lines) -> None:
    said = json.loads(error_response(b"1", errors.Unreachable(INSIDE)))["error"]["message"]
    (line,) = log_lines("error.shortened")
    assert said == f"{errors.Unreachable.brief} (requestId {line['request_id']})"


@pytest.mark.parametrize("error", SHORTENED, ids=lambda error: type(error).__name__)
def test_full_errors_are_told_in_full(error: errors.GatewayError, log_lines: Lines) -> None:
    assert json.loads(error_response(b"1", error, "r-1"))["error"]["message"] == error.message
    assert log_lines() == []
