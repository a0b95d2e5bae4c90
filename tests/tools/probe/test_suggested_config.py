"""Suggested configuration is one that our loader takes, and that serves what was probed."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gateway.config import Config, Route, Upstream, UpstreamTls, parse
from gateway.tools.probe.report.findings import Server
from gateway.tools.probe.report.suggested_config import snippet
from tests.support.authority import Authority

URL = "https://mcp.example:8443/mcp"
OLD = Server(sessions=True, side_stream=True, tools=3, ephemeral_tools=1)


def loaded(route: Route, sent: tuple[str, ...] = (), server: Server = OLD, **options: Any) -> tuple[str, Config]:
    text = snippet(server, route, sent, options.pop("handshake_seconds", 10.0), needs_sse=options.pop("sse", False))
    return text, parse(text, "here", options)


@pytest.mark.parametrize(
    "upstream",
    [
        Upstream(url=URL),
        Upstream(url=URL, tls=UpstreamTls(verify=False)),
        Upstream(url=URL, transport="sse"),
        Upstream(command=("npx", "some server", '--x="${HOME}"', "# no comment", "yes", "1")),
    ],
)
def test_the_upstream_is_the_one_that_was_probed(upstream: Upstream) -> None:
    _, config = loaded(Route(upstream=upstream))
    assert config.routes == (Route(upstream=upstream),)


def test_the_authority_is_named_whatever_its_file_is_called(tmp_path: Path) -> None:
    file = Authority(tmp_path).file.rename(tmp_path / 'ca "1" # ${x}.pem')
    upstream = Upstream(url=URL, tls=UpstreamTls(ca_file=str(file)))
    assert loaded(Route(upstream=upstream))[1].routes[0].upstream == upstream


def test_secrets_are_left_to_variables() -> None:
    text, config = loaded(Route(upstream=Upstream(url=f"{URL}?key=s3cret")), UPSTREAM_QUERY="key=other")
    assert "s3cret" not in text
    assert config.routes[0].upstream.url == f"{URL}?key=other"
    text, config = loaded(Route(upstream=Upstream(command=("x",), env={"API_KEY": "s3cret"})), API_KEY="other")
    assert "s3cret" not in text
    assert config.routes[0].upstream.env == {"API_KEY": "other"}


def test_headers_that_were_sent_are_forwarded() -> None:
    _, config = loaded(Route(upstream=Upstream(url=URL)), ("authorization", "x-tenant"))
    assert config.routes[0].forward_headers == ("x-tenant",)


def test_a_transport_is_written_only_where_auto_would_not_find_it() -> None:
    sse = structs.replace(OLD, transport="sse")
    assert loaded(Route(upstream=Upstream(url=URL)), server=sse)[1].routes[0].upstream.transport == "auto"
    assert loaded(Route(upstream=Upstream(url=URL)), server=sse, sse=True)[1].routes[0].upstream.transport == "sse"


def test_a_slow_handshake_is_given_more_time() -> None:
    slow = structs.replace(OLD, handshake_seconds=6.0)
    assert loaded(Route(upstream=Upstream(url=URL)), server=slow)[1].timeouts.handshake_seconds == 24.0
    assert loaded(Route(upstream=Upstream(url=URL)))[1].timeouts.handshake_seconds == 10.0


def test_arguments_that_look_like_secrets_are_left_to_variables() -> None:
    command = (
        "npx", "--api-key", "s3cret", "--auth-token=s3cret", "--header", "Authorization: Bearer s3cret",
        "https://mcp.example/mcp?key=s3cret", "--max-tokens", "500", "-v",
    )  # fmt: skip
    variables = {
        "API_KEY": "a", "AUTH_TOKEN": "b", "AUTHORIZATION": "c", "UPSTREAM_QUERY": "key=d",
    }  # fmt: skip
    text, config = loaded(Route(upstream=Upstream(command=command)), **variables)
    assert "s3cret" not in text
    assert config.routes[0].upstream.command == (
        "npx", "--api-key", "a", "--auth-token=b", "--header", "Authorization: c",
        "https://mcp.example/mcp?key=d", "--max-tokens", "500", "-v",
    )  # fmt: skip
