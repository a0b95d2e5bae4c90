"""YAML as a plain tree: readings of YAML 1.1, aliases, tags and bombs are refused."""

import re

import pytest

from gateway.config.parsing.yaml_tree import MAX_TEXT_CHARACTERS, read_tree
from tests.support.configurations import (
    check_refused,
    good,
    problems,
)

REFUSED = [
    ("log: {level: on}\n", 'log.level: "on" is not one of the choices; write debug or error or info or warning'),
    ("hold: {ttl_seconds: 1:30}\n", 'hold.ttl_seconds: "1:30" is a text, but a number is expected; write e.g. 600'),
    ("hold: {ttl_seconds: 0600}\n", 'hold.ttl_seconds: "0600" is a text, but a number is expected; write 600'),
    ("hold: {ttl_seconds: 0x10}\n", None),
    ("hold: {ttl_seconds: .nan}\n", None),
    ("hold: {ttl_seconds: .inf}\n", None),
    ("on: 5\n", None),
    ("? [a]\n: b\n", "line 1: has a key that is not text; put it in quotes if that is the intended key"),
    (
        "listen: !!python/name:os.system x\n",
        "line 1: has a YAML tag, which is not supported; remove it, or put the value in quotes",
    ),
    ("listen: !!binary aGk=\n", None),
    ("workers: !!int 5\n", None),
    ("hold: !!set {}\n", "line 1: has a YAML tag, which is not supported; remove it, or put the value in quotes"),
]


@pytest.mark.parametrize(("text", "problem"), REFUSED)
def test_a_scalar_that_only_yaml_1_1_reads_as_a_value_is_a_text(text: str, problem: str | None) -> None:
    check_refused(text, problem)


@pytest.mark.parametrize("text", ["yes", "on", "2026-11-21", "1e5"])
def test_a_word_of_yaml_1_1_needs_no_quotes_where_a_text_is_expected(text: str) -> None:
    assert good(f"replica: {{id: {text}}}\n").replica.id == text


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1]\nb: *x\n",
        "a: &a [x,x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\n",
        "&k listen: a:1\nadmin: *k\n",
    ],
)
def test_an_alias_is_refused_with_its_line(text: str) -> None:
    assert any(re.match(r'line 2: alias "\w" is not allowed; write the value out', line) for line in problems(text))


@pytest.mark.parametrize(
    "text", ["[" * 10_000, "a: " * 2 + "{a: " * 40, "- " * 5_000, "x" * (MAX_TEXT_CHARACTERS + 1)]
)
def test_a_bomb_is_refused(text: str) -> None:
    assert len(problems(text, routes=False)) == 1


@pytest.mark.parametrize("text", ["a: b: c\n", "'", "a\n---\nb\n", "%YAML 9.9\n---\na", "\t- a", "- a\nb: c"])
def test_broken_yaml_is_one_problem_with_its_line(text: str) -> None:
    found = problems(text, routes=False)
    assert len(found) == 1
    assert re.match(r"line \d+: is not YAML: ", found[0])


def test_a_document_that_is_too_long_is_not_parsed() -> None:
    assert problems("#" * (MAX_TEXT_CHARACTERS + 1)) == ("document: has over 262144 characters; split the routes",)


def test_duplicate_keys_are_refused_at_every_depth_with_their_line() -> None:
    found = problems("hold:\n  ttl_seconds: 1\n  ttl_seconds: 2\nlisten: a:1\nlisten: b:1\n")
    assert found == (
        'line 3: duplicate key "ttl_seconds"; keep one of them',
        'line 5: duplicate key "listen"; keep one of them',
    )


def test_the_values_that_both_versions_of_yaml_read_alike_are_read() -> None:
    tree, found, _ = read_tree("{a: true, b: False, c: null, d: -5, e: 1.5, f: x, g: [1], h: '5'}")
    assert tree == {"a": True, "b": False, "c": None, "d": -5, "e": 1.5, "f": "x", "g": [1], "h": "5"}
    assert not found
    assert read_tree("# nothing") == ({}, [], {"": (1, 1)})
