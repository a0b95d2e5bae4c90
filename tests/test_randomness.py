"""The same commit passes or fails for everybody: no test draws anything that its own source does not say."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TESTS = Path(__file__).parent
PARTS = TESTS / "parts"
"""Real servers, and the ports that they get."""
EXPLORE = {TESTS / "fuzz" / f"{name}.py" for name in ("black_box", "guided", "pumping")}
"""What `make fuzz` runs."""
UNSEEDED = {"secrets", "uuid"}


def sources() -> list[Path]:
    return sorted(path for path in TESTS.rglob("*.py") if PARTS not in path.parents and path not in EXPLORE)


def imported(path: Path) -> Iterator[str]:
    """What a file imports: `random` for the module, `random.Random` for a name of it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_a_test_draws_random_values_only_from_a_seed_of_its_own(path: Path) -> None:
    names = set(imported(path))
    assert not {name for name in names if name.split(".")[0] in UNSEEDED}
    assert not {name for name in names if name.split(".")[0] == "random"} - {"random.Random"}


def test_random_tests_repeat_themselves_and_measure_no_time() -> None:
    now = settings()
    assert (now.derandomize, now.database, now.deadline) == (True, None, None)


def drawn() -> list[tuple[str, int]]:
    values: list[tuple[str, int]] = []

    @given(st.text(max_size=5), st.integers())
    def collect(text: str, number: int) -> None:
        values.append((text, number))

    collect()
    return values


def test_what_a_random_test_draws_does_not_depend_on_the_modules_that_are_loaded(tmp_path: Path) -> None:
    before = drawn()
    path = tmp_path / "constants_of_another_module.py"
    path.write_text(f"NAMES = {[f'n{number}' for number in range(500)]}\nNUMBERS = {[*range(10**6, 10**6 + 500)]}\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        assert drawn() == before
