"""Keys of earlier releases: refused with what replaces them, wherever they stand."""

import pytest

from gateway.config.load import config_shape
from gateway.config.parsing.advice import keys_below
from gateway.config.parsing.problems import joined
from gateway.config.parsing.retired_keys import RETIRED
from tests.support.configurations import ROUTE, good, problems

CAP = "sessions: {max_newcomers: 5}"


@pytest.mark.parametrize(
    ("text", "path"), [(CAP, "sessions"), (f"routes: [{{upstream: {{url: '{ROUTE}'}}, {CAP}}}]", "routes[0].sessions")]
)
def test_a_retired_key_is_refused_with_what_replaces_it(text: str, path: str) -> None:
    found = problems(f"{text}\n", routes="routes" not in text)
    assert found == (f"{path}.max_newcomers: was removed: {RETIRED['sessions.max_newcomers']}",)


@pytest.mark.parametrize("key", ["hold: {quiet_seconds: 1}", "limits: {body_bytes: 1}"])
def test_a_key_that_only_routes_have_lost_names_the_shared_one(key: str) -> None:
    (found,) = problems(f"routes: [{{upstream: {{url: '{ROUTE}'}}, {key}}}]\n", routes=False)
    place = "hold.quiet_seconds" if "quiet" in key else "limits"
    assert found == f"routes[0].{place}: was removed: {RETIRED[f'routes[].{place}']}"
    assert f"set {place}, which holds for all routes" in found
    _ = good(f"{key}\n")


def test_so_is_its_variable() -> None:
    name = "GATEWAY_SESSIONS__MAX_NEWCOMERS"
    assert problems("", {name: "5"}) == (f"{name}: was removed: {RETIRED['sessions.max_newcomers']}",)


def test_no_key_that_is_read_is_retired() -> None:
    read = {joined(section, field.name) for section, field in keys_below(config_shape())}
    assert read
    assert not read.intersection(RETIRED)
