"""The documents say what the code does, as far as a machine can tell."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gateway.config import Config, Upstream, parse

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")),
    *sorted(REPOSITORY.glob("docs/**/*.md")),
    *sorted(REPOSITORY.glob("deploy/**/*.md")),
]
ENVIRONMENT = {"MRTR_STATE_KEY": "0f" * 32, "API_KEY": "x"}

LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")
BLOCK = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
DEFAULT = re.compile(
    r"`(?P<section>[a-z]+)\.(?P<key>[a-z_]+)`(?:, | \()(?P<number>[\d,.]*\d)(?: (?P<unit>s|ms|KiB|MiB)\b)?"
)
UNITS = {None: 1, "s": 1, "ms": 0.001, "KiB": 1024, "MiB": 1024**2}


def named(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def printed(script: str) -> str:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / script], capture_output=True, text=True, check=True
    )
    return done.stdout


def yaml_blocks() -> list[tuple[str, str]]:
    return [
        (f"{named(page)} block {place}", block["text"])
        for page in PAGES
        for place, block in enumerate(BLOCK.finditer(page.read_text()), start=1)
        if block["kind"] in {"yaml", "yml"}
    ]


def links() -> list[tuple[Path, str]]:
    return [
        (page, link["target"])
        for page in PAGES
        for link in LINK.finditer(CODE.sub("", BLOCK.sub("", page.read_text())))
        if "://" not in link["target"]
    ]


def anchors(page: Path) -> set[str]:
    """What a heading can be linked by, as GitHub makes it."""
    headings = (heading["text"] for heading in HEADING.finditer(BLOCK.sub("", page.read_text())))
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


def test_the_configuration_page_is_what_its_script_prints() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert page == printed("print_configuration"), "run scripts/print_configuration > docs/configuration.md"


def test_the_transition_table_is_what_its_script_prints() -> None:
    table = printed("print_transitions")
    assert table.count("\n") > 2
    assert f"\n\n{table}\n" in (REPOSITORY / "ARCHITECTURE.md").read_text(), "paste the output of the script"


def defaults() -> list[tuple[str, str]]:
    """What the pages say that a key's default is: `` `hold.ttl_seconds`, 600 s ``."""
    return [(named(page), said.group()) for page in PAGES for said in DEFAULT.finditer(page.read_text())]


@pytest.mark.parametrize(("where", "said"), defaults())
def test_every_default_is_the_one_of_the_code(where: str, said: str) -> None:
    match = DEFAULT.fullmatch(said)
    assert match is not None
    sections = {field.name: field.default for field in msgspec.structs.fields(Config)} | {"upstream": Upstream()}
    section = sections[match["section"]]
    number = float(match["number"].replace(",", "")) * UNITS[match["unit"]]
    assert getattr(section, match["key"]) == pytest.approx(number), where


def test_there_are_blocks_and_links_to_check() -> None:
    assert any(where.startswith("README.md") for where, _ in yaml_blocks())
    assert {named(page) for page, _ in links()} >= {"README.md", "ARCHITECTURE.md", "docs/limits.md"}


@pytest.mark.parametrize(("where", "text"), yaml_blocks(), ids=lambda value: value if "block" in value else "")
def test_every_yaml_block_is_a_configuration(where: str, text: str) -> None:
    assert parse(text, where, ENVIRONMENT).routes


@pytest.mark.parametrize(("page", "target"), links(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_link_leads_somewhere(page: Path, target: str) -> None:
    file, _, anchor = target.partition("#")
    found = (page.parent / file).resolve() if file else page
    assert found.exists(), f"{named(page)}: {target}"
    assert found.is_relative_to(REPOSITORY), f"{named(page)}: {target} leaves the repository"
    if anchor:
        assert anchor in anchors(found), f"{named(page)}: {target}; there are {sorted(anchors(found))}"


def test_the_readme_begins_with_the_two_commands() -> None:
    title, _, sentence, _, fence, demo, test, *_ = (REPOSITORY / "README.md").read_text().split("\n")
    assert title.startswith("# ")
    assert sentence
    assert fence == "```"
    assert (demo.split()[:2], test.split()[:2]) == (["make", "demo"], ["make", "test"])
