"""The admin listener: the names and the formats under which it serves the status."""

import pytest

from gateway.admin.status_page import HEADERS
from tests.support.stand import Start
from tests.support.status import fetch
from tests.support.workbench import Stand


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9090", "localhost.evil.example", ""])
async def test_a_rebound_name_gets_nothing(stand: Stand, host: str) -> None:
    for path in ("/status", "/status.json"):
        status, body, _ = await fetch(stand, path, Host=host)
        assert status == 403
        assert "security.allowed_hosts" in body
    assert (await fetch(stand, "/metrics", Host=host))[0] == 200, "scrapers come by any name"
    assert (await fetch(stand, "/readyz", Host=host))[0] == 200


async def test_addresses_and_configured_names_are_served(begin: Start) -> None:
    stand = await begin(security={"allowed_hosts": ["gw.example", "127.0.0.1"]})
    for host in ("127.0.0.1:9090", "localhost", "10.1.2.3:9090", "[::1]:9090", "GW.example:9090"):
        assert (await fetch(stand, "/status", Host=host))[0] == 200, host


async def test_the_admin_listener_only_answers_reads(stand: Stand) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        async with stand.http.request(method, f"http://{stand.gateway.admin}/status") as response:
            assert response.status == 405
    async with stand.http.head(f"http://{stand.gateway.admin}/status") as response:
        assert (response.status, await response.read()) == (200, b"")
    status, body, _ = await fetch(stand, "/nothing")
    assert (status, body) == (404, "try /healthz /readyz /metrics /status\n")


@pytest.mark.parametrize(
    ("path", "accept", "kind"),
    [
        ("/status", "text/html,application/xhtml+xml,*/*;q=0.8", "text/html"),
        ("/status", "*/*", "text/html"),
        ("/status", "application/json", "application/json"),
        ("/status", "application/json, text/html", "text/html"),
        ("/status.json", "text/html", "application/json"),
    ],
)
async def test_a_page_for_people_and_json_for_programs(stand: Stand, path: str, accept: str, kind: str) -> None:
    _, body, response = await fetch(stand, path, Accept=accept)
    assert response.content_type == kind
    assert (body.startswith("<!DOCTYPE html>"), body.startswith("{")) == (kind == "text/html", kind != "text/html")
    for name, value in HEADERS.items():
        assert response.headers[name] == value
    assert "Access-Control-Allow-Origin" not in response.headers
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
