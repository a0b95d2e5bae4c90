"""The pages of the documentation that the status page links to."""

import re
import tomllib
from html import unescape
from pathlib import Path

import pytest

from gateway.plugins.status_page.documents import TITLES, document, rendered
from tests.docs.pages import anchors
from tests.support.raw_connection import raw_connection
from tests.support.status import fetch
from tests.support.workbench import Stand

REPOSITORY = Path(__file__).parents[3]


def html(name: str) -> str:
    found = document(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", TITLES)
def test_a_page_is_that_of_this_version_as_html(name: str) -> None:
    text = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    assert f">{title}</h1>" in html(name)
    assert html(name).count("<table>") == len(re.findall(r"^\| ?-", text, re.MULTILINE))
    words = re.sub(r"(?s)<pre>.*?</pre>|<code>.*?</code>|<[^>]*>", "", html(name).partition("<article>")[2])
    assert not re.findall(r"\*\*|\]\(|\|--|```|<!--|&lt;!--", words), "nothing is left of Markdown"


@pytest.mark.parametrize("name", TITLES)
def test_a_heading_has_the_anchor_that_it_has_on_github(name: str) -> None:
    found = re.findall(r'<h\d id="([^"]*)">', html(name))
    assert len(found) == len(set(found))
    assert set(found) == anchors(REPOSITORY / "docs" / name)


@pytest.mark.parametrize("name", TITLES)
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r' href="([^"]*)"', html(name)):
        page, _, anchor = unescape(target).partition("#")
        if "://" not in page and page not in {"../status", "data:,"}:
            assert not anchor or f'id="{anchor}"' in html(page or name), target
    named = re.findall(r'<span title="([^"]*)">', html(name).partition("<article>")[2].partition("</article>")[0])
    assert [file for file in named if not (REPOSITORY / file.partition("#")[0]).exists()] == []


def test_a_link_to_a_page_that_is_not_served_names_the_file() -> None:
    assert rendered("[one `two`](../SECURITY.md#a), [three](faq.md#b), [four](#c), [five](https://h/x.md)") == (
        '<p><span title="SECURITY.md#a">one <code>two</code></span>, <a href="faq.md#b">three</a>, '
        '<a href="#c">four</a>, <a href="https://h/x.md">five</a></p>\n'
    )
    assert rendered('![a "b"](images/c.png)') == '<p><span title="docs/images/c.png">a &quot;b&quot;</span></p>\n'


@pytest.mark.parametrize("path", ["/docs", "/docs/"])
async def test_the_folder_of_the_documents_lists_them(stand: Stand, path: str) -> None:
    _, page, _ = await fetch(stand, path)
    listed = page.partition("<article>")[2]
    assert [name for name in TITLES if f'href="{name}"' not in listed] == ["README.md"]
    assert '<span title="docs/security.md">' in listed


@pytest.mark.parametrize("name", ["none.md", "tracing.md", "../README.md", "..%2FREADME.md", "%2E%2E/docs/faq.md"])
async def test_no_other_file_is_served_or_remembered(stand: Stand, name: str) -> None:
    before = document.cache_info()
    async with raw_connection(stand, stand.gateway.admin) as raw:  # a client of HTTP would take `..` out
        await raw.send(f"GET /docs/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert b" 404 " in await raw.line()
    assert document.cache_info() == before


def test_the_package_has_each_page() -> None:
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["force-include"] == {f"docs/{name}": f"gateway/docs/{name}" for name in TITLES}
