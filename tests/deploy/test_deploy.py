"""Checks the balancers' files of deploy/ with their own programs; tests/e2e/test_replicas.py runs them."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.config import parse
from tests.support.cluster import CONFIGURATIONS, DEPLOY, FILES, Balancer, BalancerName, Place, needs, program
from tests.support.programs import output, verdict

PLACES = [Place(f"gw-{number}", f"127.0.0.1:{20000 + number}", f"127.0.0.1:{21000 + number}") for number in (1, 2)]
DEFAULTS = parse("routes: [{upstream: {url: 'http://127.0.0.1:9000/mcp'}}]", "defaults", {})


# --- balancers ---


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in FILES])
def test_the_balancer_accepts_its_file(name: BalancerName, tmp_path: Path) -> None:
    balancer = Balancer(name, tmp_path, "127.0.0.1:20000")
    balancer.configure(PLACES)
    code, said = verdict(*balancer.command(check=True))
    assert code == 0, said
    assert "warn" not in said.lower(), said


@pytest.mark.skipif(os.geteuid() != 0, reason="the file names paths and users that only root may use")
@needs("haproxy")
def test_haproxy_accepts_the_unchanged_file() -> None:
    _ = output(program("haproxy") or "haproxy", "-c", "-f", FILES["haproxy"])


@pytest.mark.parametrize("name", FILES)
def test_only_addresses_and_paths_are_replaced_for_the_tests(name: BalancerName, tmp_path: Path) -> None:
    """The tests must not run lines that the shipped file lacks."""
    shipped = FILES[name].read_text()
    places = [Place(f"gw-{number}", f"10.0.0.1{number}:8080", "10.0.0.1:9464") for number in (1, 2, 3)]
    used = CONFIGURATIONS[name](shipped, tmp_path, "127.0.0.1:80", places)
    paths = re.compile(r"/\S*/|127\.0\.0\.1:|(?<=bind ):| port 9464$", re.MULTILINE)
    ours = {paths.sub("", line) for line in used.splitlines()}
    theirs = {paths.sub("", line) for line in shipped.splitlines()}
    assert {line for line in ours - theirs if "_temp_path" not in line} == set()
    assert theirs - ours == set() or os.geteuid() != 0


def test_both_balancers_refuse_the_bodies_that_the_gateway_refuses() -> None:
    limit = DEFAULTS.limits.body_bytes
    (nginx,) = re.findall(r"client_max_body_size (\d+)m;", FILES["nginx"].read_text())
    (haproxy,) = re.findall(r"req\.body_size gt (\d+)", FILES["haproxy"].read_text())
    assert (int(nginx) * 1024**2, int(haproxy)) == (limit, limit)


def test_both_balancers_wait_longer_than_the_keep_alive_interval() -> None:
    nginx, haproxy = FILES["nginx"].read_text(), FILES["haproxy"].read_text()
    patience = re.findall(r"proxy_read_timeout (\d+)s", nginx) + re.findall(
        r"timeout (?:server|client) (\d+)s", haproxy
    )
    assert len(patience) == 3
    assert all(int(seconds) > 2 * DEFAULTS.timeouts.keepalive_seconds for seconds in patience)


def test_haproxy_notices_a_drain_in_time() -> None:
    text = FILES["haproxy"].read_text()
    ((interval, fall),) = re.findall(r"inter (\d+)ms fall (\d+)", text)
    assert int(interval) / 1000 * int(fall) < DEFAULTS.hold.drain_delay_seconds


def directives(name: BalancerName) -> str:
    return "\n".join(line.partition("#")[0] for line in FILES[name].read_text().splitlines())


def test_nginx_stores_nothing() -> None:
    assert re.findall(r"(?:proxy_buffering|proxy_cache|gzip) (\w+);", directives("nginx")) == ["off"] * 3


def test_neither_balancer_sends_a_request_twice() -> None:
    assert re.findall(r"proxy_next_upstream (.*);", directives("nginx")) == ["error timeout"]
    assert re.findall(r"retry-on (.*)", directives("haproxy")) == ["conn-failure"]


# --- what editors check ---

SCHEMA_LINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)$", re.MULTILINE)
WITH_SCHEMA = [path for path in sorted(DEPLOY.glob("**/*.yaml")) if SCHEMA_LINE.search(path.read_text())]


@pytest.mark.parametrize("path", WITH_SCHEMA, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_the_schema_that_a_file_names_exists_and_accepts_it(path: Path) -> None:
    (named,) = SCHEMA_LINE.findall(path.read_text())
    schema = json.loads((path.parent / named).read_text())
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(path.read_text()))


def test_every_configuration_names_its_schema() -> None:
    assert {path.name for path in WITH_SCHEMA} >= {"gateway.yaml", "values.yaml"}
    assert not {*DEPLOY.glob("**/gateway.yaml"), *DEPLOY.glob("**/config.yaml")} - set(WITH_SCHEMA)


# --- files of programs that are not here ---

NOT_RUN = ["traefik/traefik.yaml", "traefik/dynamic.yaml", "envoy/envoy.yaml"]


def values(tree: Any) -> Iterator[str]:
    """Every scalar of a tree, as text."""
    if isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from values(each)
    else:
        yield str(tree)


@pytest.mark.parametrize("name", NOT_RUN)
def test_the_files_of_programs_that_are_not_here_parse(name: str) -> None:
    assert yaml.safe_load((DEPLOY / name).read_text())


@pytest.mark.parametrize("name", ["traefik/dynamic.yaml", "envoy/envoy.yaml"])
def test_each_balancer_checks_readiness_at_the_admin_port(name: str) -> None:
    found = set(values(yaml.safe_load((DEPLOY / name).read_text())))
    assert {"/readyz", "9464"} <= found
