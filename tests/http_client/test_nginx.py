"""The client against a real nginx."""

import asyncio
import shutil
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from yarl import URL

from gateway.http_client.client import HttpClient
from gateway.http_client.origin import Origin
from tests.support.authority import Authority
from tests.support.reply_recorder import Sender
from tests.support.workbench import eventually

NGINX = shutil.which("nginx")
COMPLETE = ["head", "body", "end"]
CONFIGURATION = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 64; }}
http {{
    access_log off; client_max_body_size 1m; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    server {{
        listen 127.0.0.1:{plain};
        listen 127.0.0.1:{tls} ssl;
        ssl_certificate {certificate}; ssl_certificate_key {certificate};
        keepalive_requests 3;
        location /large {{ root {folder}; }}
        location /ok {{ return 200 "ok"; }}
        location /gone {{ return 204; }}
        location /reset {{ return 444; }}
        location /client {{ return 200 $connection_requests; }}
    }}
}}
"""


class Nginx:
    def __init__(self, plain: int, tls: int, ca: Authority) -> None:
        self.plain, self.tls, self.ca = plain, tls, ca

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.plain}{path}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert isinstance(port, int)
    return port


def accepts(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
async def nginx(tmp_path: Path) -> AsyncIterator[Nginx]:
    if NGINX is None:
        pytest.skip("nginx is not installed")
    ca = Authority(tmp_path)
    (tmp_path / "large").write_bytes(bytes(range(256)) * 16_384)
    plain, tls = free_port(), free_port()
    text = CONFIGURATION.format(folder=tmp_path, plain=plain, tls=tls, certificate=ca.sign("server"))
    (tmp_path / "nginx.conf").write_text("user root;\n" + text)
    process = await asyncio.create_subprocess_exec(NGINX, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"))
    try:
        await eventually(lambda: accepts(plain), "nginx listens")
        yield Nginx(plain, tls, ca)
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


@pytest.mark.processes
async def test_replies_of_every_kind_are_read(nginx: Nginx, client: HttpClient) -> None:
    large = bytes(range(256)) * 16_384
    assert (await Sender(client, nginx.url("/ok")).send("GET", b"")).body == b"ok"
    assert (await Sender(client, nginx.url("/gone")).send("GET", b"")).words == ["head", "end"]
    assert (await Sender(client, nginx.url("/large")).send("GET", b"")).body == large
    head = await Sender(client, nginx.url("/large")).send("HEAD", b"")
    assert (head.words, head.head.content_length) == (["head", "end"], len(large))
    missing = await Sender(client, nginx.url("/none")).send("GET", b"")
    assert (missing.head.status, missing.head.reason, missing.words) == (404, "Not Found", COMPLETE)
    changed = head.head.text(b"last-modified") or ""
    same = await Sender(client, nginx.url("/large")).send("GET", b"", {"If-Modified-Since": changed})
    assert (same.head.status, same.words) == (304, ["head", "end"])
    reset = await Sender(client, nginx.url("/reset")).send("GET", b"")
    assert reset.words == ["failed"]


@pytest.mark.processes
async def test_connections_are_used_as_often_as_nginx_allows(nginx: Nginx, client: HttpClient) -> None:
    sender = Sender(client, nginx.url("/client"))
    assert [(await sender.send("GET", b"")).body for _ in range(7)] == [b"1", b"2", b"3", b"1", b"2", b"3", b"1"]


@pytest.mark.processes
async def test_a_request_that_nginx_finds_too_large_is_answered(nginx: Nginx, client: HttpClient) -> None:
    heard = await Sender(client, nginx.url("/ok")).send("POST", b"x" * (8 * 2**20))
    assert heard.words in (COMPLETE, ["failed"]), "a reset may overtake the reply"
    assert heard.words == ["failed"] or heard.head.status == 413


@pytest.mark.processes
async def test_tls_of_nginx_is_spoken_over_one_connection(nginx: Nginx, client: HttpClient) -> None:
    """nginx sends its session tickets when it likes; they are no reply."""
    url = f"https://127.0.0.1:{nginx.tls}/client"
    context = ssl.create_default_context(cafile=str(nginx.ca.file))
    sender = Sender(client, url, Origin.of(URL(url), context))
    assert [(await sender.send("GET", b"")).body for _ in range(3)] == [b"1", b"2", b"3"]
    large = Sender(client, f"https://127.0.0.1:{nginx.tls}/large", sender.origin)
    assert (await large.send("GET", b"")).body == bytes(range(256)) * 16_384
