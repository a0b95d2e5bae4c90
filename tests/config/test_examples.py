"""The examples in config/: each loads, fits its schema, does what its first sentence says, and starts."""

import functools
import json
import shutil
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from multidict import CIMultiDict

from gateway.auth.host_check import HostCheck
from gateway.config import Config, cautions, contexts, load, validity
from gateway.http.upstream_headers import for_call
from gateway.protocol.errors import Forbidden
from gateway.server.process import Gateway
from tests.parts.launch import REPOSITORY, free_port
from tests.support.authority import Authority

CONFIG: Final = REPOSITORY / "config"
EXAMPLES: Final = sorted(CONFIG.glob("*.yaml"))
ENVIRONMENT: Final = {"MRTR_STATE_KEY": bytes(range(32)).hex(), "POD_NAME": "mrtr-gateway-0"}
EDITOR_LINE: Final = "# yaml-language-server: $schema=./mrtr-gateway.schema.json"
SECRET: Final = "search-secret"
CLIENT: Final = "Bearer of-the-client"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples lie with all files that they name."""
    folder = tmp_path_factory.mktemp("config")
    for path in EXAMPLES:
        shutil.copy(path, folder)
    (folder / "secrets").mkdir()
    (folder / "secrets" / "search-key").write_text(f"{SECRET}\n")
    (folder / "tls").mkdir()
    for name in ("clients-ca", "internal-ca"):
        Authority(folder / "tls", name)
    authority = Authority(folder / "tls")
    for name in ("gateway", "gateway-client"):
        signed = authority.sign(name)
        (folder / "tls" / f"{name}.key").write_bytes(signed.read_bytes())
    return folder


# --- what each of them says ---

KEYS: Final[dict[str, dict[str, object]]] = {
    "minimal.yaml": {"listen": "127.0.0.1:8080", "path": "/mcp", "upstream.url": "http://127.0.0.1:9000/mcp"},
    "full.yaml": {},
    "one-server.yaml": {"listen": "0.0.0.0:8080", "admin": "127.0.0.1:9464", "state.keys": (bytes(range(32)).hex(),)},
    "stdio.yaml": {"upstream.url": None, "upstream.env": {"LOG_LEVEL": "info"}},
    "routes.yaml": {"principal.source": "jwt", "timeouts.idle_seconds": 300},
    "replicas.yaml": {"state.keys": (bytes(range(32)).hex(),)},
    "replicas-dns.yaml": {"replica.id": "mrtr-gateway-0", "replica.peers": {}},
    "workers.yaml": {"workers": 4, "hold.max_calls": 2500},
    "tls.yaml": {},
    "oauth.yaml": {"public_url": "https://mcp.example.com"},
    "jwt.yaml": {"principal.source": "jwt"},
    "trusted-proxy.yaml": {"principal.trusted_proxies": ("10.0.0.0/28",), "principal.header": "x-auth-user"},
    "replay.yaml": {"continuation": "replay", "state.ttl_seconds": 3600, "hold.ttl_seconds": 3600},
    "ephemeral.yaml": {"continuation": "hold", "ephemeral": ("weather_*", "search_*")},
    "affinity.yaml": {"sessions.affinity": "principal", "sessions.idle_seconds": 1800},
    "caching.yaml": {"cache.ttl_ms": 60_000, "cache.scope": "private"},
    "subscriptions.yaml": {"sessions.max_per_principal": 50, "timeouts.send_seconds": 10},
    "http-sse.yaml": {"upstream.transport": "sse"},
}
"""By file: the keys that do what its first sentence says, those of its route without a prefix."""
SERVED: Final = {
    "one-server.yaml": "mcp.example.com",
    "stdio.yaml": "127.0.0.1:8080",
    "oauth.yaml": "mcp.example.com",
}
"""By file: the only host that is served."""
SENT: Final = {
    ("routes.yaml", "/tickets"): {"authorization": CLIENT},
    ("routes.yaml", "/search"): {"x-api-key": SECRET},
    ("routes.yaml", "/reports"): {"x-team": "red"},
    ("oauth.yaml", "/mcp"): {"authorization": CLIENT},
    ("jwt.yaml", "/mcp"): {},
    ("trusted-proxy.yaml", "/mcp"): {"authorization": CLIENT, "x-auth-user": "ada"},
}
"""By file and route: what goes upstream of a client's headers."""


def value_of(config: Config, key: str) -> object:
    """Look in the only route first, then among the shared keys."""
    for section in (config.routes[0], config):
        with suppress(AttributeError):
            found = functools.reduce(getattr, key.split("."), section)
            if found is not None or key.startswith("upstream."):
                return found
    return None


def test_every_example_is_known_here() -> None:
    assert {path.name for path in EXAMPLES} == KEYS.keys()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_does_what_it_says(path: Path, folder: Path) -> None:
    keys, (editor, sentence, *_) = KEYS[path.name], path.read_text().splitlines()
    assert editor == EDITOR_LINE
    assert sentence.startswith("# ")
    config = load(folder / path.name, ENVIRONMENT)
    assert {key: value_of(config, key) for key in keys} == keys
    assert list(cautions(config, validity(config))) == [], "nobody should copy what is warned of"
    if host := SERVED.get(path.name):
        hosts = HostCheck(config.security, config.listen)
        hosts.check(CIMultiDict(Host=host))
        with pytest.raises(Forbidden):
            hosts.check(CIMultiDict(Host="evil.example"))
    for route in config.routes:
        if (sent := SENT.get((path.name, route.path))) is not None:
            headers = CIMultiDict({"Authorization": CLIENT, "X-Team": "red", "X-Auth-User": "ada"})
            assert {name.lower(): value for name, value in for_call(route, headers).items()} == sent
    replica = config.replica
    if replica.peers:
        assert (next(iter(replica.peers)), replica.peers[replica.id or ""]) == (replica.id, replica.listen)


def test_the_example_of_tls_verifies_both_sides(folder: Path) -> None:
    made = contexts(load(folder / "tls.yaml", ENVIRONMENT))
    upstream = made.upstreams["/mcp"]
    assert made.listener is not None
    assert upstream is not None
    assert made.listener.verify_mode == upstream.verify_mode == ssl.CERT_REQUIRED
    assert upstream.check_hostname
    assert [dict(pair[0] for pair in ca["subject"])["commonName"] for ca in upstream.get_ca_certs()] == [
        "test internal-ca"
    ]


def schema_check(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(CONFIG / "mrtr-gateway.schema.json")]
    return subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)


def test_every_example_fits_the_schema() -> None:
    done = schema_check(*EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr


WRONG: Final = {
    "an unknown key": "routes: [{upstream: {url: 'http://a/'}, retries: 3}]",
    "a wrong type": "routes: [{upstream: {url: 'http://a/'}}]\nworkers: many",
    "a value out of range": "routes: [{upstream: {url: 'http://a/'}, legs: {rounds: 10}}]",
    "no routes": "listen: 127.0.0.1:8080",
}


def test_the_schema_refuses_what_the_loader_refuses(tmp_path: Path) -> None:
    for name, text in WRONG.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    done = schema_check(*tmp_path.glob("*.yaml"))
    assert done.returncode == 1
    assert {name for name in WRONG if f"{name}.yaml" in done.stdout} == WRONG.keys(), done.stdout


VARIABLES: Final = """
hold: {ttl_seconds: "${T:-5}"}
log: {level: "${L:-info}"}
routes:
  - upstream: {url: "http://a/", tls: {}}
    timeouts: {idle_seconds: "${T:-5}"}
    sessions: {max: "${M:-7}"}
    cache: {ttl_ms: "${M:-7}", scope: "${S:-public}"}
"""


def test_the_schema_takes_variables_where_the_loader_does(tmp_path: Path) -> None:
    path = tmp_path / "variables.yaml"
    path.write_text(VARIABLES)
    (route,) = load(path, {}).routes
    assert (route.timeouts.idle_seconds, route.sessions.max, route.cache.of("tools/list")) == (5, 7, (7, "public"))
    done = schema_check(path)
    assert done.returncode == 0, done.stdout


# --- they run ---


def on_free_ports(path: Path) -> Path:
    """The same file with other addresses, and a program that is there."""
    given: dict[str, Any] = yaml.safe_load(path.read_text())
    replica = given.get("replica", {})
    for section, key in ((given, "listen"), (given, "admin"), (replica, "listen")):
        section[key] = f"127.0.0.1:{free_port()}"
    if replica.get("peers"):
        replica["peers"][replica["id"]] = replica["listen"]
    for route in given["routes"]:
        if route["upstream"].get("command"):
            route["upstream"] |= {"command": ["cat"], "warm": 0}  # tests/e2e/test_matrix.py has real ones
    moved = path.with_name(f"moved-{path.name}")
    moved.write_text(json.dumps(given))
    return moved


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
async def test_an_example_starts(path: Path, folder: Path) -> None:
    """In one process each; tests/e2e/test_workers.py starts several."""
    gateway = Gateway(load(on_free_ports(folder / path.name), ENVIRONMENT))
    try:
        await gateway.start()
        assert gateway.reload.is_open
    finally:
        await gateway.close()
