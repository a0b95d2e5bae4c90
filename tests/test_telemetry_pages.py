"""The page about metrics says what the code does: it is printed from it, and nothing is left out."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(("page", "name"), [("metrics.md", "print_metrics")])
def test_a_page_is_what_its_script_prints(page: str, name: str) -> None:
    run = [sys.executable, str(REPOSITORY / "scripts" / name)]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert (REPOSITORY / "docs" / page).read_text() == printed, f"run scripts/{name} > docs/{page}"


def test_an_alarm_that_the_pages_speak_of_is_a_metric_that_there_is() -> None:
    metrics = (REPOSITORY / "docs" / "metrics.md").read_text()
    declared = set(re.findall(r"^### `(\w+)`$", metrics, re.MULTILINE))
    pages = [*REPOSITORY.glob("docs/**/*.md"), REPOSITORY / "README.md"]
    named = {
        (page.name, name)
        for page in pages
        for name in re.findall(r"mcp_(?:gateway|server)_[a-z_]*[a-z]", page.read_text())
        if "decisions" not in page.parts
    }
    known = declared | {f"{name}_{end}" for name in declared for end in ("count", "sum", "bucket")}
    assert [each for each in sorted(named) if each[1] not in known] == []
