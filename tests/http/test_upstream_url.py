"""The URL of an upstream: its redirects, its origin, its secrets."""

import pytest
from yarl import URL

from gateway.config import Route, Upstream
from gateway.http.upstream_url import Endpoint
from gateway.protocol.errors import Unreachable


def endpoint(url: str = "http://old:9000/mcp") -> Endpoint:
    return Endpoint(url, Route(upstream=Upstream(url=url)).where)


@pytest.mark.parametrize("location", ["/mcp/", "mcp/", "http://old:9000/mcp/", "http://user:password@old:9000/mcp/"])
def test_a_redirect_within_the_origin_is_followed_and_kept(location: str) -> None:
    upstream = endpoint()
    upstream.follow(location)
    assert upstream.url == URL("http://old:9000/mcp/")


@pytest.mark.parametrize(
    "location",
    [
        None,
        "",
        "http://other:9000/mcp",
        "https://old:9000/mcp",
        "//other/mcp",
        "http://[",
        "http://[]@",
        "//][@",
        "//\ud800",
    ],
)
def test_a_redirect_to_another_origin_is_refused_and_changes_nothing(location: str | None) -> None:
    upstream = endpoint()
    with pytest.raises(Unreachable, match=r"upstream http://old:9000/mcp of route /mcp redirects to another origin"):
        upstream.follow(location)
    assert upstream.url == URL("http://old:9000/mcp")


def test_an_address_is_resolved_against_the_page_that_named_it() -> None:
    assert endpoint().within("two", URL("http://old:9000/a/one")) == URL("http://old:9000/a/two")


def test_a_quotation_has_no_secret_of_the_query_and_is_short() -> None:
    upstream = endpoint("http://old:9000/mcp?key=hunter22&page=abc&token=hunter22-long")
    assert upstream.quoted("bad key hunter22-long, page abc") == "bad key [hidden], page abc"
    assert upstream.quoted("no ?key=hunter22&page=abc&token=hunter22-long") == "no ?[hidden]"
    assert upstream.quoted("x" * 1000) == "x" * 200 + "…"
    assert upstream.quoted("a\x1b[2J\nb") == "a?[2J b"
    assert "hunter22" not in upstream.where
