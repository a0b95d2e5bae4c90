"""The check of Host and Origin, by listener and by configuration."""

import pytest

from gateway.auth.host_check import HostCheck
from gateway.config import Security
from gateway.protocol.errors import Forbidden


def allowed(guard: HostCheck, host: str | None, origin: str | None = None) -> bool:
    try:
        guard.check(host, origin)
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


def test_listed_names_are_the_only_ones() -> None:
    guard = HostCheck(
        Security(allowed_hosts=("gw.example", "other.example:444"), allowed_origins=("https://app.example",)),
        "127.0.0.1:8080",
    )
    assert allowed(guard, "GW.example:1", "https://app.example")
    assert allowed(guard, "other.example:444")
    assert not allowed(guard, "other.example:445")
    assert not allowed(guard, "localhost")
    for origin in ("https://app.example:8443", "http://app.example", "https://gw.example", "", "null"):
        assert not allowed(guard, "gw.example", origin)
