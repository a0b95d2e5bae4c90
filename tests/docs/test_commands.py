"""Every command on the pages does what they say, in front of a real legacy server."""

import re
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.__main__ import _parser
from tests.docs.pages import COMMANDS, PAGES, Block, blocks, inline_code, named
from tests.docs.shell import DocumentError, Reader, steps
from tests.parts.launch import REPOSITORY, OldServer, old_server

PROGRAMS = "cd|curl|export|git|kill|make|mrtr-gateway|npm|npx|pip|promtool|python|python3"  # and not shell._ELSEWHERE
COMMAND = re.compile(rf"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:{PROGRAMS})(?: |$)", re.MULTILINE)
OTHER_KINDS = frozenset(
    {"", "yaml", "yml", "json", "text", "mermaid", "python", "nginx", "haproxy", "ini", "http", "promql", "toml"}
    | {"javascript"}
)
ALL = [block for page in PAGES for block in blocks(page)]
FOLLOWED = [page for page in PAGES if any(block.is_commands for block in blocks(page))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[OldServer]:
    """The server at 127.0.0.1:9000."""
    async with old_server("py130") as server:
        yield server


@pytest.fixture
def reader(server: OldServer, tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path, server.port)
    yield reader
    reader.kill()


def to_run(page: Path) -> list[Block]:
    """The blocks that this test runs."""
    found = blocks(page)
    return [block for block in found if block.run_by is None and (block.left_out is None or block.left_out[0])]


@pytest.mark.real
@pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl", "make"))), reason="apt install bash curl make")
@pytest.mark.parametrize("page", FOLLOWED, ids=named)
def test_the_commands_of_a_page_do_what_it_says(page: Path, reader: Reader) -> None:
    reader.follow(to_run(page))
    reader.leave()


def test_there_are_pages_to_follow() -> None:
    assert {named(page) for page in FOLLOWED} >= {"README.md", "docs/quick-start.md", "docs/migration.md"}


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.where)
def test_no_command_stands_where_it_is_not_run(block: Block) -> None:
    assert block.kind in COMMANDS | OTHER_KINDS, f"{block.where}: name the language of the block"
    if not block.is_commands:
        found = COMMAND.search(block.text)
        assert found is None, (
            f"{block.where}: {found.group()!r} in a block that is never run; fence it as sh or console"
        )


@pytest.mark.parametrize("block", [block for block in ALL if block.is_commands], ids=lambda block: block.where)
def test_a_block_that_is_not_run_has_a_reason(block: Block) -> None:
    if block.said.startswith(("not run", "run by")):
        assert block.left_out or block.run_by, f"{block.where}: <!--{block.said}--> is not understood; see pages.py"
    if block.run_by is not None:
        assert (REPOSITORY / block.run_by).exists(), f"{block.where}: there is no {block.run_by}"
    if block.left_out is not None and block.left_out[0]:
        assert block.left_out[0] in block.text, f"{block.where}: no line begins with {block.left_out[0]!r}"
    if block.kind == "console":
        assert list(steps(block)), f"{block.where}: no line begins with `$ `"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=named)
def test_commands_of_the_gateway_in_the_text_exist(page: Path) -> None:
    """The changelog may name commands that were removed."""
    for code in inline_code(page):
        words = code.split()
        if words[0] == "mrtr-gateway" and len(words) > 1 and words[1].isalpha():
            assert words[1] in _parser().format_help(), f"{named(page)}: `{code}`: there is no such command"


@pytest.mark.real
@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        ("sh", "mrtr-gateway check --config nothing.yaml", "ends with 1"),
        ("console", "$ echo one\ntwo", "prints\none\n\nand the page says\ntwo"),
        ("sh", "mrtr-gateway serve --config nothing.yaml", "nothing.yaml"),
        ("sh", "false | cat", "ends with 1"),
    ],
)
def test_a_wrong_page_fails(kind: str, text: str, complaint: str, reader: Reader) -> None:
    with pytest.raises((DocumentError, FileNotFoundError), match=re.escape(complaint)):
        reader.follow([Block(REPOSITORY / "README.md", 1, kind, text, "")])
