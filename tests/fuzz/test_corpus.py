"""Each target keeps its promises for its corpus, and for mutants of it that are the same in every run."""

import importlib
import zlib

import pytest

from tests.fuzz.mutator import Mutator
from tests.fuzz.run import JOBS
from tests.fuzz.target import CORPUS, KNOWN, Finding, Target, judge, known_signatures
from tests.fuzz.targets import TARGETS

MUTANTS = 3000
FEWER = {"config": 400, "sse": 1500}
"""Targets that take longer for one input."""
BYTES = 300_000


def new(target: Target, inputs: list[bytes]) -> list[tuple[Finding, bytes]]:
    """The findings that are not known."""
    known = known_signatures(target)
    found = ((judge(target, data), data) for data in inputs)
    return [(finding, data) for finding, data in found if finding is not None and finding.signature not in known]


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_breaks_no_promise(name: str) -> None:
    seeds = TARGETS[name].seeds()
    assert seeds
    assert new(TARGETS[name], seeds) == []


@pytest.mark.parametrize("name", TARGETS)
def test_mutants_of_the_corpus_break_no_promise(name: str) -> None:
    seeds = TARGETS[name].seeds()
    mutator = Mutator(zlib.crc32(name.encode()), seeds)
    mutants = [mutator.mutate(mutator.random.choice(seeds)) for _ in range(FEWER.get(name, MUTANTS))]
    assert new(TARGETS[name], mutants)[:1] == []


@pytest.mark.parametrize("name", TARGETS)
def test_each_known_finding_is_still_one(name: str) -> None:
    mended = [path.name for path in TARGETS[name].known() if judge(TARGETS[name], path.read_bytes()) is None]
    assert not mended, "move these files from known/ to corpus/"


def test_every_folder_of_inputs_belongs_to_a_target_or_to_a_listener() -> None:
    folders = {path.name for root in (CORPUS, KNOWN) if root.is_dir() for path in root.iterdir()}
    assert folders - set(TARGETS) <= {"http"}
    assert set(TARGETS) <= folders


@pytest.mark.parametrize("module", sorted({job.module for job in JOBS}))
def test_every_fuzzer_can_begin(module: str) -> None:
    assert importlib.import_module(module).main


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for root in (CORPUS, KNOWN) for path in root.rglob("*") if path.is_file()) < BYTES


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
    assert judge(target, b"good") is None
    assert judge(target, b"bad") is not None
    assert [data for _, data in new(target, [b"good", b"bad"])] == [b"bad"]
