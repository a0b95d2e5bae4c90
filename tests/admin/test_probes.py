"""The admin listener: the names and the formats under which it serves the status."""

import pytest

from gateway.plugins.status_page.templates import HEADERS
from tests.support.logs import Lines
from tests.support.raw_connection import raw_connection
from tests.support.stand import Start
from tests.support.status import fetch
from tests.support.workbench import Stand


async def test_only_a_name_of_the_gateway_is_served(begin: Start) -> None:
    stand = await begin(security={"allowed_hosts": ["gw.example"]})
    for path in ("/status", "/status.json", "/metrics", "/healthz", "/readyz", "/other"):
        status, body, _ = await fetch(stand, path, Host="evil.example")
        assert status == 403, path
        assert "security.allowed_hosts" in body
    for host in ("GW.example:9464", "10.1.2.3:9464", "gw.mcp.svc"):
        assert (await fetch(stand, "/metrics", Host=host))[0] == 200, host


@pytest.mark.parametrize(("path", "status"), [("/healthz", b" 200 "), ("/readyz", b" 200 "), ("/metrics", b" 403 ")])
async def test_a_health_check_without_a_host_is_answered(stand: Stand, path: str, status: bytes) -> None:
    async with raw_connection(stand, stand.gateway.admin) as raw:
        await raw.send(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        assert status in await raw.line()


@pytest.mark.parametrize("path", ["/status", "/metrics"])
async def test_an_odd_host_is_refused_without_an_error_in_the_log(log_lines: Lines, stand: Stand, path: str) -> None:
    for host in ("[]@", "[::1]@", "[", "a b"):
        async with raw_connection(stand, stand.gateway.admin) as raw:
            await raw.send(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            assert b" 403 " in await raw.line()
    assert "Traceback" not in log_lines.stream.getvalue()


async def test_the_admin_listener_only_answers_reads(stand: Stand) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        async with stand.http.request(method, f"http://{stand.gateway.admin}/status") as response:
            assert response.status == 405
    async with stand.http.head(f"http://{stand.gateway.admin}/status") as response:
        assert (response.status, await response.read()) == (200, b"")
    status, body, _ = await fetch(stand, "/nothing")
    assert (status, body) == (404, "try /healthz /readyz /metrics /status\n")


async def test_the_root_leads_to_the_status_page(stand: Stand) -> None:
    status, body, response = await fetch(stand, "/")
    assert (status, response.url.path) == (200, "/status")
    assert body.startswith("<!DOCTYPE html>")
    async with stand.http.get(f"http://{stand.gateway.admin}/", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (302, "status"), "a proxy may add a path before it"


@pytest.mark.parametrize(
    ("path", "accept", "kind"),
    [
        ("/status", "text/html,application/xhtml+xml,*/*;q=0.8", "text/html"),
        ("/status", "*/*", "text/html"),
        ("/status", "application/json", "application/json"),
        ("/status", "application/json, text/html", "text/html"),
        ("/status.json", "text/html", "application/json"),
        ("/docs/monitoring.md", "text/plain", "text/html"),
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
