"""The notes of an examination."""

from typing import Any

from gateway.config import for_upstream
from gateway.tools.probe.report.findings import Check, Server
from gateway.tools.probe.steps.context import Notes, ProbeContext, ProbeStopped, Subject


def test_notes_are_kept_in_order_with_their_states() -> None:
    notes = Notes()
    notes.ok("a", "found")
    notes.warn("b", "found", "why", "fix")
    stopped = notes.failed("c", "the server is gone", "why", "fix")
    assert isinstance(stopped, ProbeStopped)
    assert str(stopped) == "the server is gone"
    assert notes.checks == [
        Check(name="a", state="ok", found="found"),
        Check(name="b", state="warning", found="found", why="why", fix="fix"),
        Check(name="c", state="failed", found="the server is gone", why="why", fix="fix"),
    ]


def test_an_examination_begins_without_knowledge_of_the_server() -> None:
    config = for_upstream("http://127.0.0.1:9/mcp?key=s3cret", env={})
    nothing: Any = None
    exam = ProbeContext(Subject(route=config.routes[0], config=config, headers={}), nothing, nothing)
    assert exam.server == Server()
    assert exam.endpoint.where == "The server", "its URL may hold a secret"
    assert exam.timeouts == config.timeouts
    assert (exam.met_page, exam.spoken, exam.needs_sse) == (False, False, False)
