"""The check of Host and Origin, by listener and by configuration."""

import pytest
from multidict import CIMultiDict

from gateway.auth.host_check import HostCheck, check_admin
from gateway.config import Config, Security, parse
from gateway.protocol.errors import Forbidden
from tests.support.workbench import configuration

NO_NAMES = Config(routes=(), admin=None)


def allowed(guard: HostCheck, host: str | None, *origins: str) -> bool:
    headers = CIMultiDict[str]()
    if host is not None:
        headers["Host"] = host
    for origin in origins:
        headers.add("Origin", origin)
    try:
        guard.check(headers)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize("listen", ["127.0.0.1:8080", "localhost:8080", "[::1]:8080"])
def test_a_loopback_listener_is_for_loopback_names(listen: str) -> None:
    guard = HostCheck(Security(), listen)
    assert all(allowed(guard, host) for host in ("localhost", "127.0.0.1:1", "[::1]", "LocalHost:8080"))
    assert not any(
        allowed(guard, host) for host in (None, "", "example.com", "localhost.", "127.0.0.2", "[::1", "a b")
    )


def test_a_public_listener_takes_any_host_but_only_its_own_origin() -> None:
    guard = HostCheck(Security(), "0.0.0.0:8080")
    assert allowed(guard, "gw.example:8080")
    assert allowed(guard, "gw.example", "https://gw.example")
    assert not allowed(guard, "gw.example", "https://evil.example")
    assert not allowed(guard, "gw.example", "http://localhost")
    assert not allowed(guard, None, "null")
    assert not allowed(guard, "gw.example", "http://[")


def test_a_loopback_listener_serves_the_pages_of_loopback_servers() -> None:
    guard = HostCheck(Security(), "127.0.0.1:8080")
    assert allowed(guard, "localhost:8080", "http://127.0.0.1:5173")
    assert not allowed(guard, "localhost:8080", "http://gw.example")


def test_a_second_origin_does_not_hide_behind_an_allowed_one() -> None:
    guard = HostCheck(Security(), "0.0.0.0:8080")
    assert not allowed(guard, "gw.example", "https://gw.example", "https://evil.example")


def test_listed_names_are_the_only_ones() -> None:
    guard = HostCheck(
        Security(allowed_hosts=("GW.Example", "other.example:444"), allowed_origins=("https://app.example",)),
        "127.0.0.1:8080",
    )
    assert allowed(guard, "GW.example:1", "https://app.example")
    assert allowed(guard, "other.example:444")
    assert not allowed(guard, "other.example:445")
    assert not allowed(guard, "localhost")
    for origin in (
        "https://app.example:8443",
        "http://app.example",
        "http://localhost",
        "https://gw.example",
        "",
        "null",
    ):
        assert not allowed(guard, "gw.example", origin)


def serves_status(config: Config, host: str | None) -> bool:
    try:
        check_admin(host, config)
    except Forbidden:
        return False
    return True


def test_the_status_is_served_under_addresses_and_configured_names() -> None:
    security = {"allowed_hosts": ["GW.example", "other.example:444"]}
    config = parse(
        configuration("http://127.0.0.1:1/mcp", admin="gw.inside.example:9464", security=security), "test", {}
    )
    for host in ("localhost", "127.0.0.1:9464", "10.1.2.3", "[::1]:9464", "gw.EXAMPLE:1", "Gw.Inside.example:9464"):
        assert serves_status(config, host), host
    assert serves_status(config, "other.example:444")
    for host in (None, "", "evil.example", "localhost.evil.example", "10.1.2.3.evil.example", "other.example", "[::1"):
        assert not serves_status(config, host), host


@pytest.mark.parametrize(
    "host", ["gateway", "gateway:9464", "gw.mcp.svc", "gw.mcp.svc.cluster.local:9464", "a.internal"]
)
def test_service_names_that_the_public_name_service_does_not_have_are_served(host: str) -> None:
    assert serves_status(NO_NAMES, host)


@pytest.mark.parametrize("host", ["svc.evil.example", "local.evil.example", "gw.mcp.svc.evil.example", "gw.mcp.svc."])
def test_a_public_name_that_looks_like_a_service_is_refused(host: str) -> None:
    assert not serves_status(NO_NAMES, host)


@pytest.mark.parametrize("odd", ["[]@", "[::1]@", "@", "a:b:c", "[", "x@[]", "[]@:1", "\ud800", "//"])
def test_an_odd_host_or_origin_is_refused_like_any_other(odd: str) -> None:
    guard = HostCheck(Security(), "127.0.0.1:8080")
    assert not allowed(guard, odd)
    assert not serves_status(NO_NAMES, odd)
    for origin in (odd, f"http://{odd}", f"{odd}://x"):
        assert not allowed(guard, "localhost", origin)
