"""Each target keeps its promises for its corpus, and for mutants of it that are the same in every run."""

import importlib
import zlib

import pytest

from tests.fuzz.mutator import Mutator
from tests.fuzz.run import JOBS
from tests.fuzz.targets import CORPUS, TARGETS, Target

MUTANTS = 3000
FEWER = {"config": 400, "sse": 1500}
"""Targets that take longer for one input."""
BYTES = 300_000


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_corpus_breaks_no_promise(target: Target) -> None:
    seeds = target.seeds()
    assert seeds
    assert [data for data in seeds if target.judge(data)] == []


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_mutants_of_the_corpus_break_no_promise(target: Target) -> None:
    seeds = target.seeds()
    mutator = Mutator(zlib.crc32(target.name.encode()), seeds)
    for _ in range(FEWER.get(target.name, MUTANTS)):
        mutant = mutator.mutate(mutator.random.choice(seeds))
        assert target.judge(mutant) is None, mutant


def test_the_corpus_is_small_and_every_folder_of_it_belongs_to_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < BYTES


@pytest.mark.parametrize("module", sorted({job.module for job in JOBS}))
def test_every_fuzzer_can_begin(module: str) -> None:
    assert importlib.import_module(module).main


def test_a_mutator_with_the_same_seed_draws_the_same_mutants() -> None:
    def drawn(seed: int) -> list[bytes]:
        mutator = Mutator(seed, [b"one", b"two"])
        return [edit(b'{"a":[1,{"b":"c"}]}') for _ in range(50) for edit in (mutator.mutate, mutator.mutate_json)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize(
    "broken", [ValueError("x"), RecursionError("x"), AssertionError("x")], ids=lambda each: type(each).__name__
)
def test_whatever_a_target_raises_is_a_finding(broken: Exception) -> None:
    def check(data: bytes) -> None:
        if data == b"bad":
            raise broken

    target = Target("broken", check)
    assert target.judge(b"good") is None
    assert target.judge(b"bad") is not None
