"""Configurations from YAML or from a tree, and the problems of those that are refused."""

import base64
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Config, ConfigError, parse

ROUTE = "http://127.0.0.1:9000/mcp"
ROUTES = f"routes: [{{upstream: {{url: '{ROUTE}'}}}}]\n"
KEY = base64.b64encode(bytes(range(32))).decode()
OTHER_KEY = base64.urlsafe_b64encode(bytes(range(200, 240))).decode().rstrip("=")


def good(text: str = "", env: dict[str, str] | None = None) -> Config:
    """The configuration in a text, with one route added."""
    return parse(text + ROUTES, "test.yaml", env or {})


def problems(text: str, env: dict[str, str] | None = None, *, routes: bool = True) -> tuple[str, ...]:
    """Why a text is refused; `routes` adds one route."""
    with pytest.raises(ConfigError) as caught:
        parse(text + (ROUTES if routes else ""), "test.yaml", env or {})
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def check_refused(text: str, problem: str | None) -> None:
    """The text has one problem, with its path and its fix; None: in whichever words."""
    has_routes = "routes" in text
    found = problems(text, routes=not has_routes)
    assert len(found) == 1, found
    assert problem is None or found[0] == problem
    if has_routes:
        assert found[0].startswith("routes")
    else:
        assert re.match(r"^[\w.\[\]]+( \w+)*: .+[;?]", found[0])


def with_route(over: Any = (), folder: str = "", **route: Any) -> Config:
    """A configuration with one route that has these keys; `over` are keys beside the routes."""
    tree = {"routes": [{"path": "/a", "upstream": {"url": "https://a.example/mcp"}, **route}], **dict(over)}
    return parse(yaml.safe_dump(tree), f"{folder}/gateway.yaml" if folder else "gateway.yaml", {})


def route_problems(over: Any = (), folder: str = "", **route: Any) -> tuple[str, ...]:
    """Why `with_route` is refused."""
    with pytest.raises(ConfigError) as caught:
        with_route(over, folder, **route)
    return caught.value.problems


def drain_seconds(config: Config) -> float:
    """The longest time after SIGTERM until the gateway has ended by itself."""
    return config.hold.drain_delay_seconds + config.hold.drain_seconds + config.timeouts.cancel_seconds


def missing(file: Path) -> str:
    """The problem of a key whose file does not exist."""
    why = "cannot be read (No such file or directory)"
    return f"{why}; check its path and permissions ({file}, read as uid {os.geteuid()})"
