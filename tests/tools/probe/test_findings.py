"""The state of a report is that of its worst part."""

import pytest

from gateway.tools.probe.report.findings import Check, Feature, ProbedServer, State, report, worst


def check(state: State) -> Check:
    return Check(name="n", state=state, found="f")


@pytest.mark.parametrize(
    ("checks", "upstreams", "state", "exit_code"),
    [
        ([], [], "ok", 0),
        (["ok"], ["ok", "ok"], "ok", 0),
        (["warning"], ["ok"], "warning", 3),
        (["ok"], ["ok", "warning"], "warning", 3),
        (["failed"], ["warning"], "failed", 1),
        (["ok"], ["failed"], "failed", 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst_part(
    checks: list[State], upstreams: list[State], state: State, exit_code: int
) -> None:
    servers = tuple(ProbedServer(target="t", state=each) for each in upstreams)
    found = report("1.2.3", tuple(map(check, checks)), servers)
    assert (found.state, found.exit_code, found.gateway) == (state, exit_code, "1.2.3")
    assert found.upstreams == servers


@pytest.mark.parametrize(
    ("answer", "state"), [("yes", "ok"), ("partly", "ok"), ("not offered", "ok"), ("no", "warning")]
)
def test_a_feature_that_is_missing_is_a_warning(answer: str, state: State) -> None:
    feature = Feature(name="n", title="t", answer=answer, short="s")  # type: ignore[arg-type]
    assert worst((check("ok"),), (feature,)) == state
    assert worst((check("failed"),), (feature,)) == "failed"
