"""Prints at the end of a run which commands of the pages it did not run, and why."""

import pytest

from tests.docs.pages import PAGES, blocks
from tests.docs.shell import elsewhere


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = [block for page in PAGES for block in blocks(page) if block.is_commands]
    lines = []
    for block in found:
        if block.left_out is not None:
            only, why = block.left_out
            lines.append(f"{block.where}: {f'{only}: ' if only else ''}{why}")
        elif block.run_by is not None:
            lines.append(f"{block.where}: run by {block.run_by}")
        else:
            lines += [f"{block.where}: {command}: needs {need}" for command, need in elsewhere(block)]
    if lines:
        terminalreporter.section("commands in the documents that are not run here")
        for line in lines:
            terminalreporter.write_line(line)
