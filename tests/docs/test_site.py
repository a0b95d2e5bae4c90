"""The documentation as a site."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.parts.launch import REPOSITORY
from tests.support.programs import output

SITE = REPOSITORY / "docs" / "site.yml"


@pytest.mark.processes
def test_the_site_is_built_without_a_dead_link_and_finds_what_the_pages_say(tmp_path: Path) -> None:
    _ = output(sys.executable, REPOSITORY / "scripts" / "site", tmp_path)
    found = json.loads((tmp_path / "site" / "search.json").read_text())
    pages = {item["location"].partition("#")[0] for item in found["items"] if "quiet_seconds" in item["text"]}
    assert {"docs/configuration/", "docs/faq/"} <= pages
    first, _, _ = (tmp_path / "site" / "index.html").read_text().partition('"docs/images/demo.svg"')
    _, _, table = first.partition("<table>")
    assert 0 < table.find('"docs/quick-start/"') < table.find('"docs/operations/"') < table.find('"SECURITY/"')


def test_every_page_of_docs_is_in_the_contents() -> None:
    listed = {page for part in yaml.safe_load(SITE.read_text())["nav"] for pages in part.values() for page in pages}
    there = {str(page.relative_to(REPOSITORY)) for page in (REPOSITORY / "docs").glob("*.md")}
    assert there - listed == set()
    assert {page for page in listed if not (REPOSITORY / page).exists()} == {"docs/decisions/index.md"}
