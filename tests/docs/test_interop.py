"""docs/interop.md is printed from the tables of the tests."""

import subprocess
import sys

from tests.parts.launch import REPOSITORY


def test_the_page_on_interoperability_is_the_output_of_its_script() -> None:
    script = REPOSITORY / "scripts" / "print_interop"
    said = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert said == (REPOSITORY / "docs" / "interop.md").read_text(), "run: scripts/print_interop > docs/interop.md"
