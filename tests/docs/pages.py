"""Reads the pages: fenced blocks with the comments about them, links and headings.

A block of commands is fenced as `sh` (commands alone) or `console` (commands behind `$ `, then what they print). All
are run, but for those below one of these comments, which readers of the page do not see:

    <!-- not run: WHY -->            the block
    <!-- not run (make test): WHY -->   its lines that begin so
    <!-- run by tests/test_x.py -->     another test runs it

A block of `yaml` is a configuration, whole or in part; `# gateway.yaml` as its first line makes it that file in the
folder of the page's commands. docs/decisions/0023 has the reasons.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.parts.launch import REPOSITORY

PAGES: Final = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted(REPOSITORY.glob("docs/**/*.md")),
    *sorted(REPOSITORY.glob("deploy/**/*.md")),
    REPOSITORY / "tests" / "README.md",
]

_FENCE: Final = re.compile(
    r"(?:^<!--(?P<said>(?:(?!-->).)*)-->\n\n?)?^(?P<dent> *)```(?P<kind>[\w-]*)[^\n]*\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_NOT_RUN: Final = re.compile(r"not run(?: \((?P<only>[^)]+)\))?: (?P<why>.+)", re.DOTALL)
_RUN_BY: Final = re.compile(r"run by (?P<test>tests/[\w/]+\.py)")
_FILE: Final = re.compile(r"# (?P<name>[\w-]+\.ya?ml)(?:[ :,].*)?\n")
_LINK: Final = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)
_CODE: Final = re.compile(r"`(?P<text>[^`\n]+)`")
COMMANDS: Final = frozenset({"sh", "console"})


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    kind: str
    text: str
    said: str
    """The comment right above it."""

    @property
    def where(self) -> str:
        return f"{named(self.page)}:{self.line}"

    @property
    def is_commands(self) -> bool:
        return self.kind in COMMANDS

    @property
    def left_out(self) -> tuple[str, str] | None:
        """The beginnings of commands that are not run ("": all), with the reason."""
        found = _NOT_RUN.fullmatch(self.said)
        return None if found is None else (found["only"] or "", " ".join(found["why"].split()))

    @property
    def run_by(self) -> str | None:
        """The other test that runs it, if any."""
        found = _RUN_BY.fullmatch(self.said)
        return None if found is None else found["test"]

    @property
    def file(self) -> str | None:
        """The name of the file that the block is."""
        found = _FILE.match(self.text) if self.kind in {"yaml", "yml"} else None
        return None if found is None else found["name"]


def named(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("kind")) + 1,
            found["kind"],
            re.sub(rf"^{found['dent']}", "", found["text"], flags=re.MULTILINE),
            " ".join((found["said"] or "").split()),
        )
        for found in _FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """The page without its blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Its links to files of the repository."""
    targets = (found["target"] for found in _LINK.finditer(_CODE.sub("", prose(page))))
    return [target for target in targets if "://" not in target]


def inline_code(page: Path) -> list[str]:
    return [found["text"] for found in _CODE.finditer(prose(page))]


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    headings = (found["text"] for found in _HEADING.finditer(prose(page)))
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}
