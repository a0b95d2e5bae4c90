"""The values of metric labels are those that the code uses."""

import re
from pathlib import Path
from typing import TypeVar

import pytest

from gateway.protocol.errors import DownstreamError, GatewayError, InvalidState, OwnerLost, UpstreamError
from gateway.seal.request_state import Binding
from gateway.telemetry import NestedOutcome
from gateway.telemetry.metrics.labels import PEER_REASONS, REJECTIONS, STATE_REASONS, UPSTREAM_FAILURES

E = TypeVar("E", bound=GatewayError)


SOURCES = sorted((Path(__file__).parents[3] / "gateway").rglob("*.py"))


def subclasses(kind: type[E]) -> set[type[E]]:
    """The class itself among them."""
    return {kind}.union(*(subclasses(each) for each in kind.__subclasses__()))


def in_sources(pattern: str) -> set[str]:
    found = set(re.findall(pattern, "".join(path.read_text() for path in SOURCES)))
    assert found
    return found


def test_the_upstream_failures_are_the_reasons_of_the_errors_and_those_counted_by_name() -> None:
    reasons = {kind.reason for kind in subclasses(UpstreamError) - {UpstreamError, OwnerLost}}  # no upstream failed
    assert reasons | in_sources(r'upstream_failures\[[^"\[\]]+, "(\w+)"\]') == set(UPSTREAM_FAILURES)


def test_the_rejections_are_those_of_the_errors() -> None:
    assert {kind.rejection for kind in subclasses(DownstreamError) - {InvalidState}} == set(REJECTIONS)


def test_the_nested_outcomes_know_every_word_that_the_core_counts() -> None:
    core = "".join(path.read_text() for path in SOURCES if path.parent.name == "exchange")
    counted = set(re.findall(r'(?:do\.Count\([\w.]+|[rR]efus\w+\((?:\w+, \w+)?)(?:, )?"(\w+)"', core))
    assert {"asked", "malformed", "refused_unsolicited"} < counted
    assert {NestedOutcome(word).value for word in counted} == counted
    with pytest.raises(ValueError, match="is not a valid"):
        NestedOutcome("odd")


def test_the_state_and_peer_reasons_are_those_that_are_raised() -> None:
    compared = {*Binding.__struct_fields__} - {"names"}  # of the headers
    bound = {f"other_{name}" for name in compared}
    assert in_sources(r'InvalidState\("(\w+)"\)') | bound == {*STATE_REASONS, *PEER_REASONS}
