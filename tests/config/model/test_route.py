"""The structs of a route: which headers are credentials, how fresh results are."""

from typing import Any

import pytest
import yaml

from gateway.config import parse
from gateway.config.model.route import Upstream

TRACE_AND_PROXY = [
    *("traceparent", "tracestate", "baggage", "x-request-id", "x-forwarded-for", "x-forwarded-user"),
    *("user-agent", "accept-language"),
]


@pytest.mark.parametrize(
    ("keys", "bound"),
    [
        ({}, ()),
        ({"forward_headers": ["X-Api-Key", *TRACE_AND_PROXY, "cookie"]}, ("x-api-key", "cookie")),
        ({"forward_headers": ["x-api-key", "x-forwarded-user"], "bind_headers": []}, ()),
        (
            {"forward_headers": ["x-api-key", "x-forwarded-user"], "bind_headers": ["X-Forwarded-User"]},
            ("x-forwarded-user",),
        ),
        ({"forward_headers": ["DPoP", "x-api-key"]}, ("x-api-key",)),
        ({"forward_headers": ["DPoP", "x-api-key"], "bind_headers": ["DPoP", "x-api-key"]}, ("x-api-key",)),
    ],
)
def test_forwarded_headers_are_credentials_except_for_those_of_traces_and_proxies(
    keys: dict[str, Any], bound: tuple[str, ...]
) -> None:
    route = {"upstream": {"url": "http://a/mcp"}, **keys}
    assert parse(yaml.safe_dump({"routes": [route]}), "t", {}).routes[0].bound_headers == bound


def test_an_upstream_is_named_without_what_may_be_secret() -> None:
    assert Upstream(url="http://user:pw@h:1/mcp?key=x").name == "http://h:1/mcp"
    assert Upstream(command=("server", "--token", "s3cret")).name == "server"
