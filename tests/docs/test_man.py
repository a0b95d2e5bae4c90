"""The man pages."""

import re
import sys
from pathlib import Path

import pytest

from gateway.__main__ import _parser
from tests.parts.launch import REPOSITORY
from tests.support.programs import output

COMMANDS = re.findall(r"^    (\w+)  ", _parser().format_help(), re.MULTILINE)


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][a-z-]*", text)) - {"-h", "--help"}


@pytest.mark.processes
def test_a_command_has_a_man_page_with_the_options_of_its_help(tmp_path: Path) -> None:
    _ = output(sys.executable, REPOSITORY / "scripts" / "man", tmp_path)
    pages = {page.stem: re.sub(r"\\f[BIR]|\\(?=-)", "", page.read_text()) for page in tmp_path.glob("*.1")}
    whole = pages.pop("mrtr-gateway")
    assert {"-V", "--version"} <= options(whole)
    assert pages.keys() == {f"mrtr-gateway-{name}" for name in COMMANDS}
    for name in {*COMMANDS} - {"help"}:  # its help is that of the program
        page = pages[f"mrtr-gateway-{name}"]
        told = options(output(sys.executable, "-m", "gateway", name, "--help"))
        assert told <= options(page) & options(whole), name
        assert f'.TH MRTR-GATEWAY-{name.upper()} "1"' in page
    assert options(pages["mrtr-gateway-health"]) > {"--ready"}
