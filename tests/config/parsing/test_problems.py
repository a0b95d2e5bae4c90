"""The problems of a configuration: none of them quotes a secret."""

import errno
import os

import pytest

from gateway.config.load import lines
from gateway.config.parsing.problems import Given, Problem, nearest, shown, touches, unreadable
from tests.support.configurations import (
    problems,
)

SECRET = "C4naryC4naryC4naryC4naryC4naryC4naryC4naryC4"


def test_a_problem_begins_with_its_line_if_it_is_in_one() -> None:
    found = [Problem("", "e", (8, 1)), Problem("a", "b"), Problem("c", "d", (7, 3))]
    assert lines(found, "f.yaml") == ["a: b", "f.yaml:7:3: c: d", "f.yaml:8:1: e"]


LEAKS = [
    f"state: {{keys: {SECRET}}}\n",
    f"state: {{keys: ['{SECRET}', '{SECRET}']}}\n",
    f"state: {{keys: ['{SECRET[:20]}']}}\n",
    f"state: {{keys: ['{SECRET} ']}}\n",
    f"state: {{keys: {{{SECRET}: 1, {SECRET}: 2}}}}\n",
    f"state: {{keys: [[{SECRET}]]}}\n",
    f"state: {{key: [{SECRET}]}}\n",
    f"state: {{{SECRET}: 1}}\n",
    f"{SECRET}: 1\n",
    f"? {SECRET}\n",
    f"state: {{keys: [*{SECRET}]}}\n",
    f"state: {{keys: ['{SECRET}]}}\n",
    f"state: {{keys: [!{SECRET} x]}}\n",
    f"state:\n  keys: {SECRET}: x\n",
    f"state: {{ttl_seconds: {SECRET}}}\n",
    f"log: {{level: {SECRET}}}\n",
    f"replica: {{id: '${{{SECRET}}}'}}\n",
    "state: {keys: ['${K}x y']}\n",
    "replica: {id: '${K} '}\n",
    "hold: {ttl_seconds: '${K}'}\n",
    "state: {keys: [" + "7" * 25 + "]}\n",
    f"state: {{keys: {SECRET[:20]}}}\n",
    "replica: {id: " + "7" * 65 + "}\n",
    f"replica: {{id: '{SECRET} ${{N:-x}}'}}\n",
    f"routes: [{{upstream: {{url: 'http://u:{SECRET[:20]}/x@a/'}}}}]\n",
    f"routes: [{{upstream: {{url: 'u:{SECRET[:20]}@a'}}}}]\n",
    f"routes: [{{upstream: {{url: 'ftp://a/?key={SECRET[:20]}'}}}}]\n",
    f"routes: [{{upstream: {{url: 'ftp://u:{SECRET[:20]}@a${{N:-x}}'}}}}]\n",
    f"routes: [{{upstream: {{url: 'http://a/#{SECRET[:20]}'}}}}]\n",
    f"routes: [{{upstream: {{url: 'http://a/?q=\"{SECRET[:20]}'}}}}]\n",
    f"routes: [{{upstream: {{url: 'http://u:{SECRET[:20]} x@a/'}}}}]\n",
    "routes: [{upstream: {url: 'http://${K}@a/'}}]\n",
    "routes: [{upstream: {url: 'http://u:${K}@a/'}}]\n",
]


@pytest.mark.parametrize("text", LEAKS)
def test_a_problem_never_quotes_a_secret(text: str) -> None:
    found = problems(text, {"K": SECRET}, routes="routes" not in text)
    hidden = SECRET[:20] if "${C4" not in text else SECRET + "!"
    assert hidden not in "\n".join(found)
    assert "7" * 20 not in "\n".join(found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1}, "a mapping"),
        ([1], "a list"),
        (True, "true"),
        ("x" * 70, '"(hidden)"'),
        ("a " * 40, f'"{"a " * 29}a..."'),
        (Given("8080", "GATEWAY_LISTEN"), '"8080" (from GATEWAY_LISTEN)'),
    ],
)
def test_a_value_is_quoted_short_and_without_secrets(value: object, text: str) -> None:
    assert shown(value) == text


def test_paths_touch_if_one_is_inside_the_other() -> None:
    assert touches("hold.ttl_seconds", "hold")
    assert touches("routes", "routes[0].path")
    assert not touches("hold.ttl", "hold.ttl_seconds")


def test_the_nearest_name_is_similar_or_begins_alike() -> None:
    assert nearest("ttl", ["max_calls", "ttl_seconds"]) == "ttl_seconds"
    assert nearest("lisen", ["listen", "admin"]) == "listen"
    assert nearest("ulr", ["env", "url"]) == "url"
    for name, other in (("cache", "listen"), ("version", "sessions"), ("bearer", "header")):
        assert nearest(name, [other]) is None


def test_a_file_that_cannot_be_read_is_named_with_the_reason_and_the_user() -> None:
    said = unreadable("/run/secrets/keys", PermissionError(errno.EACCES, "Permission denied"))
    assert said == (
        f"cannot be read (Permission denied); check its path and permissions "
        f"(/run/secrets/keys, read as uid {os.geteuid()})"
    )
