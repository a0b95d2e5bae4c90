"""Which requests may share a connection."""

import ssl

import pytest
from yarl import URL

from gateway.http_client.origin import Origin


def test_an_http_url_has_no_tls() -> None:
    assert Origin.of(URL("http://Host.example/mcp"), ssl.create_default_context(), "x") == (
        "host.example",
        80,
        None,
        None,
    )


def test_an_https_url_trusts_the_system_with_one_context_for_all() -> None:
    one, other = Origin.of(URL("https://a.example:8443/x")), Origin.of(URL("https://a.example:8443/y"))
    assert one == other
    assert one.tls is not None
    assert one.tls.verify_mode == ssl.CERT_REQUIRED
    assert one.tls.check_hostname
    assert one.server_name == "a.example"


def test_contexts_and_server_names_separate_origins() -> None:
    url, mine = URL("https://a.example/x"), ssl.create_default_context()
    origins = {Origin.of(url), Origin.of(url, mine), Origin.of(url, mine, "b.example")}
    assert len(origins) == 3


def test_the_dot_at_the_end_of_a_name_is_not_in_certificates() -> None:
    assert Origin.of(URL("https://a.example./x")).server_name == "a.example"


def test_the_brackets_of_an_address_are_not_part_of_it() -> None:
    assert Origin.of(URL("http://[::1]:8080/")).host == "::1"


@pytest.mark.parametrize("url", ["ftp://h/", "/mcp", "unix:/x", "//h/x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="needs http or https"):
        Origin.of(URL(url))
