"""The errors of a route that cannot provide a session say what to change."""

import asyncio
from typing import Any

import pytest

from gateway.config import Config, Route, parse
from gateway.protocol.errors import CallLost, ChildUnreachable, NoHandshake, Unreachable
from gateway.sessions import pool_errors
from gateway.telemetry import SessionLimit
from tests.support.workbench import configuration


def config(url: str = "http://127.0.0.1:9/mcp", **sections: Any) -> Config:
    return parse(configuration(url, **sections), "test", {})


def route(url: str = "http://127.0.0.1:9/mcp", **sections: Any) -> Route:
    return config(url, **sections).routes[0]


COMMAND = {"upstream": {"command": ["server"]}}
AFFINE = {"sessions": {"affinity": "principal"}}


@pytest.mark.parametrize(
    ("limit", "status"),
    [(SessionLimit.ALL, 503), (SessionLimit.CHILDREN, 503), (SessionLimit.OF_CALLER, 429)],
)
def test_a_caller_without_a_session_learns_which_limit_is_reached(limit: SessionLimit, status: int) -> None:
    error = pool_errors.none_free(route(), limit, 3, is_shared=False)
    assert error.status == status
    assert [f"{key}," in error.message or f"({key})" in error.message for key in SessionLimit] == [
        key is limit for key in SessionLimit
    ]
    assert "timeouts.session_wait_seconds" in error.message
    look = "see Callers on the status page: stop one that should not have so many, or "
    assert error.fix == f"{look}raise {limit} (3 when it happened), or add a replica"


def test_callers_without_a_credential_learn_that_they_are_one() -> None:
    error = pool_errors.none_free(route(), SessionLimit.OF_CALLER, 3, is_shared=True)
    assert "You sent no credential" in error.brief
    assert error.fix.endswith("or give each client a credential of its own")


def test_a_caller_with_one_session_learns_that_its_calls_take_turns() -> None:
    error = pool_errors.in_use(route(route=AFFINE), config(), is_pinned=False)
    assert error.status == 503
    assert "the same principal" in error.message
    assert "sessions.affinity: principal" in error.message
    assert error.fix == "raise timeouts.session_wait_seconds (10 when it happened), or add a replica"


def test_a_client_with_a_session_of_its_own_learns_that_its_calls_take_turns() -> None:
    error = pool_errors.in_use(route(route=AFFINE), config(), is_pinned=True)
    assert "the same client" in error.message
    assert "dialects: [sep-1655]" in error.message


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/mcp", "https://127.0.0.1:9/mcp"])
def test_a_server_that_hangs_up_over_tls_may_miss_a_client_certificate(url: str) -> None:
    lost = CallLost("It broke the connection; the request may have had effects")
    error = pool_errors.handshake_failed(lost, route(url), 10)
    assert isinstance(error, Unreachable)
    assert error.message.startswith("It broke the connection")
    assert "effects" not in error.message
    assert ("upstream.tls.cert_file" in error.message) is url.startswith("https")


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (TimeoutError(), "did not finish its handshake in 2.5 s (timeouts.handshake_seconds)"),
        (ValueError("no protocolVersion"), "is not an MCP server: no protocolVersion"),
        (RecursionError("too deep"), "is not an MCP server: too deep"),
    ],
    ids=["timeout", "malformed", "too deep"],
)
def test_a_failed_handshake_names_the_upstream_and_the_route(failure: BaseException, words: str) -> None:
    error = pool_errors.handshake_failed(failure, route(), 2.5)
    assert isinstance(error, Unreachable)
    assert "The upstream http://127.0.0.1:9/mcp of route /mcp" in error.message
    assert words in error.message


def test_a_server_that_does_not_answer_may_hang_and_a_program_may_be_another_one() -> None:
    server = pool_errors.handshake_failed(TimeoutError(), route(), 2.5)
    assert isinstance(server, Unreachable)
    assert server.message.endswith("It accepts connections but does not answer: hung or overloaded?")
    assert "restart it if it hangs; if it is only slow, raise timeouts.handshake_seconds" in server.fix
    child = pool_errors.handshake_failed(TimeoutError(), route(route=COMMAND), 2.5)
    assert isinstance(child, ChildUnreachable)
    assert child.message.endswith("; check that it is an MCP server")


@pytest.mark.parametrize("failure", [NoHandshake("It refused"), asyncio.CancelledError()])
def test_a_failure_that_explains_itself_stays_as_it_is(failure: BaseException) -> None:
    assert pool_errors.handshake_failed(failure, route(), 10) is failure


def test_a_refused_handshake_names_the_key_if_the_route_is_bridged() -> None:
    error = pool_errors.handshake_failed(NoHandshake("It refused"), route(route={"era": "bridge"}), 10)
    assert isinstance(error, NoHandshake)
    assert error.message.startswith("It refused. The route has era: bridge")
    assert "set era: auto" in error.message
    assert "era: auto" in error.fix


def test_a_question_in_a_session_without_an_id_names_the_cure() -> None:
    assert "/mcp gives no Mcp-Session-Id" in pool_errors.cannot_ask("/mcp").message
