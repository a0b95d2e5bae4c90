"""The examples in config/: each loads, fits its schema, does what its first sentence says, and starts."""

import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from multidict import CIMultiDict

from gateway.auth.host_check import HostCheck
from gateway.config import Config, Route, cautions, contexts, load, on_route
from gateway.http.upstream_headers import for_call
from gateway.identity.principal import is_trusted
from gateway.protocol.errors import Forbidden
from gateway.server.process import Gateway
from tests.parts.launch import REPOSITORY, free_port
from tests.support.authority import Authority

CONFIG: Final = REPOSITORY / "config"
EXAMPLES: Final = sorted(CONFIG.glob("*.yaml"))
ENVIRONMENT: Final = {"MRTR_STATE_KEY": "0f" * 32, "POD_NAME": "mrtr-gateway-0"}
EDITOR_LINE: Final = "# yaml-language-server: $schema=./mrtr-gateway.schema.json"
SECRET: Final = "search-secret"
CLIENT: Final = "Bearer of-the-client"

Check = Callable[[Config], object]
SAYS: dict[str, tuple[str, Check]] = {}
"""By file: the sentence that it begins with, and what must be true for that."""


def says(name: str, sentence: str) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        SAYS[name] = (sentence, check)
        return check

    return keep


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


def example(folder: Path, name: str) -> Config:
    return load(folder / name, ENVIRONMENT)


def only(config: Config) -> Route:
    (route,) = config.routes
    return route


def upstream_sees(route: Route, **headers: str) -> dict[str, str]:
    sent = CIMultiDict({"Authorization": CLIENT, **headers})
    return {name.lower(): value for name, value in for_call(route, sent).items()}


def is_served(config: Config, host: str) -> bool:
    try:
        HostCheck(config.security, config.listen).check(CIMultiDict(Host=host))
    except Forbidden:
        return False
    return True


# --- what each of them says ---


@says(
    "minimal.yaml",
    "The minimum: clients reach the legacy server at 127.0.0.1:9000 through http://127.0.0.1:8080/mcp.",
)
def minimal(config: Config) -> None:
    assert (config.listen, only(config).path) == ("127.0.0.1:8080", "/mcp")
    assert only(config).upstream.url == "http://127.0.0.1:9000/mcp"


@says("full.yaml", "Every key with its default; only `routes` is required (see minimal.yaml).")
def full(config: Config) -> None:
    assert config == load(CONFIG / "minimal.yaml", {})  # every key: test_model.py compares them with the model's


@says(
    "one-server.yaml",
    "One gateway in front of one existing legacy server, for clients on a network.",
)
def one_server(config: Config) -> None:
    assert config.listen.startswith("0.0.0.0:")
    assert config.admin is not None
    assert config.admin.startswith("127.0.0.1:")
    assert (is_served(config, "mcp.example.com"), is_served(config, "evil.example")) == (True, False)
    assert config.state.raw_keys()


@says(
    "stdio.yaml",
    "A legacy server that speaks stdio and runs as child processes of the gateway (docs/clients-and-servers.md).",
)
def stdio(config: Config) -> None:
    upstream = only(config).upstream
    assert upstream.command is not None
    assert upstream.url is None
    assert (is_served(config, "127.0.0.1:8080"), is_served(config, "evil.example")) == (True, False)
    assert upstream.env == {"LOG_LEVEL": "info"}


@says(
    "routes.yaml",
    "Several legacy servers behind one gateway, each with the credential that it needs (docs/routes.md).",
)
def routes(config: Config) -> None:
    routes = {route.path: route for route in config.routes}
    assert len({route.upstream.url for route in config.routes}) == 3
    assert upstream_sees(routes["/tickets"]) == {"authorization": CLIENT}
    assert upstream_sees(routes["/search"]) == {"x-api-key": SECRET}
    assert upstream_sees(routes["/reports"], **{"X-Team": "red"}) == {"x-team": "red"}
    assert on_route(config, routes["/reports"]).timeouts.idle_seconds == 1800
    assert on_route(config, routes["/tickets"]).timeouts.idle_seconds == config.timeouts.idle_seconds == 300
    assert config.principal.source == "jwt"


@says(
    "replicas.yaml",
    "The first of three replicas behind a load balancer that needs no stickiness (docs/load-balancers.md).",
)
def replicas(config: Config) -> None:
    replica = config.replica
    assert len(replica.peers) == 3
    assert replica.id == next(iter(replica.peers))
    assert replica.peers[replica.id] == replica.listen
    assert config.state.raw_keys()


@says(
    "replicas-dns.yaml",
    "Any number of replicas that find each other through DNS, all with the same file (docs/load-balancers.md).",
)
def replicas_dns(config: Config) -> None:
    assert config.replica.id == ENVIRONMENT["POD_NAME"]
    assert config.replica.peers == {}
    assert config.replica.peers_dns is not None
    assert config.replica.listen is not None
    assert config.replica.peers_dns.rpartition(":")[2] == config.replica.listen.rpartition(":")[2]


@says(
    "workers.yaml",
    "Four processes on one machine that share a port and serve each other's calls (docs/workers.md).",
)
def workers(config: Config) -> None:
    assert config.workers == 4
    assert config.sessions.max > config.hold.max_calls
    assert config.workers * config.hold.max_calls == 10_000


@says(
    "tls.yaml",
    "TLS on both sides: https for clients, and https to a legacy server with a private authority (docs/tls.md).",
)
def tls(config: Config) -> None:
    made = contexts(config)
    upstream = made.upstreams[only(config).path]
    assert made.listener is not None
    assert made.listener.verify_mode == ssl.CERT_REQUIRED
    assert upstream is not None
    assert (upstream.verify_mode, upstream.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert [dict(pair[0] for pair in ca["subject"])["commonName"] for ca in upstream.get_ca_certs()] == [
        "test internal-ca"
    ]


@says(
    "oauth.yaml",
    "OAuth through the gateway: clients sign in at the legacy server's own authorization server, under the gateway's "
    "public name (docs/authorization.md).",
)
def oauth(config: Config) -> None:
    assert config.public_url == "https://mcp.example.com"
    assert upstream_sees(only(config)) == {"authorization": CLIENT}
    assert is_served(config, "mcp.example.com")


@says(
    "jwt.yaml",
    "The gateway verifies callers: it accepts only bearer tokens that the issuer signed for this service "
    "(docs/authorization.md).",
)
def jwt(config: Config) -> None:
    assert config.principal.source == "jwt"
    assert config.principal.issuer is not None
    assert config.principal.jwks_url is not None
    assert config.principal.audience
    assert upstream_sees(only(config)) == {}


@says(
    "trusted-proxy.yaml",
    "A proxy in front signs users in and names them in a header, which the gateway trusts from that proxy alone "
    "(docs/authorization.md).",
)
def trusted_proxy(config: Config) -> None:
    networks = [ip_network(network) for network in config.principal.trusted_proxies]
    assert (is_trusted("10.0.0.7", networks), is_trusted("10.0.0.77", networks)) == (True, False)
    assert config.principal.header is not None
    assert upstream_sees(only(config), **{"X-Auth-User": "ada"})[config.principal.header] == "ada"


@says(
    "replay.yaml",
    "The gateway holds nothing between rounds: each answer runs the tool again from its start (continuation: replay).",
)
def replay(config: Config) -> None:
    assert only(config).continuation == "replay"
    assert min(config.state.ttl_seconds, config.hold.ttl_seconds) == 3600


@says(
    "ephemeral.yaml",
    "If a call is lost and its tool may run twice, the gateway runs it again (docs/continuity.md).",
)
def ephemeral(config: Config) -> None:
    route = only(config)
    tools = ("weather_today", "search_flights", "book_flight")
    listed = [any(fnmatchcase(tool, pattern) for pattern in route.ephemeral) for tool in tools]
    assert (route.continuation, listed) == ("hold", [True, True, False])


@says(
    "affinity.yaml",
    "All calls of a caller go to one session of the legacy server, which keeps a cart, a login or a counter in it "
    "(docs/continuity.md).",
)
def affinity(config: Config) -> None:
    assert only(config).sessions.affinity == "principal"
    assert on_route(config, only(config)).sessions.idle_seconds == 1800


@says(
    "caching.yaml",
    "Clients may cache the list of tools for a minute, and the gateway answers lists from its memory "
    "(docs/caching.md).",
)
def caching(config: Config) -> None:
    cache = only(config).cache
    assert [cache.of(method) for method in ("tools/list", "resources/read", "prompts/list")] == [
        (60_000, "public"),
        (1_000, "private"),
        (0, "private"),
    ]
    assert cache.lists_seconds == 30


@says(
    "subscriptions.yaml",
    "Limits for subscriptions: how many streams one caller may keep open, and how soon the gateway cuts off a client "
    "that stopped reading (docs/caching.md).",
)
def subscriptions(config: Config) -> None:
    held = on_route(config, only(config))
    assert held.sessions.max_per_principal == 50 < held.sessions.max < held.limits.connections
    assert held.timeouts.send_seconds == 10


@says("http-sse.yaml", "A legacy server that speaks HTTP+SSE, the transport of 2024-11-05 (docs/upstreams.md).")
def http_sse(config: Config) -> None:
    upstream = only(config).upstream
    assert upstream.transport == "sse"
    assert (upstream.url or "").endswith("/sse")


# --- all of them ---


def first_sentence(path: Path) -> str:
    """The comment behind the editor's line, up to its end."""
    lines = path.read_text().splitlines()[1:]
    comment = []
    for line in lines:
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# "))
    return " ".join(comment)


def test_every_example_is_known_here() -> None:
    assert {path.name for path in EXAMPLES} == SAYS.keys()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_does_what_it_says(path: Path, folder: Path) -> None:
    sentence, check = SAYS[path.name]
    assert path.read_text().splitlines()[0] == EDITOR_LINE
    assert first_sentence(path).startswith(sentence)
    config = example(folder, path.name)
    check(config)
    assert list(cautions(config)) == [], "nobody should copy what is warned of"


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
    cache: {methods: {tools/list: {ttl_ms: "${M:-7}", scope: "${S:-public}"}}}
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
            route["upstream"] |= {"command": ["cat"], "warm": 0}  # tests/e2e/test_stdio.py has real ones
    moved = path.with_name(f"moved-{path.name}")
    moved.write_text(json.dumps(given))
    return moved


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
async def test_an_example_starts(path: Path, folder: Path) -> None:
    """In one process each; tests/e2e/test_workers.py starts several."""
    gateway = Gateway(load(on_free_ports(folder / path.name), ENVIRONMENT))
    try:
        await gateway.start()
        assert gateway.ready
    finally:
        await gateway.close()
