"""Says at the end of a run which commands of the documents it did not run, and why."""

import pytest

from tests.docs.pages import PAGES, blocks


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = [(block.where, *block.left_out) for page in PAGES for block in blocks(page) if block.left_out]
    if left_out:
        terminalreporter.section("commands in the documents that are not run")
        for where, only, why in left_out:
            terminalreporter.write_line(f"{where}: {f'{only}: ' if only else ''}{why}")
