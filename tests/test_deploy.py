"""What deploy/ ships is right as far as the programs that read it can tell; tests/e2e/test_replicas.py runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Config, ConfigError, parse
from tests.cluster import CONFIGURATIONS, DEPLOY, FILES, Balancer, BalancerName, Place, installed, program

KUBERNETES = DEPLOY / "kubernetes"
ENVIRONMENT = {"MRTR_STATE_KEY": "0f" * 32, "POD_NAME": "mrtr-gateway-7d9c8b6f5-x2abc"}
PLACES = [Place(f"gw-{number}", f"127.0.0.1:{20000 + number}", f"127.0.0.1:{21000 + number}") for number in (1, 2)]
DEFAULTS = parse("routes: [{upstream: {url: 'http://127.0.0.1:9000/mcp'}}]", "defaults", {})


def only(*names: BalancerName) -> list[Any]:
    """Parameters for those that are installed."""
    return [
        pytest.param(name, marks=pytest.mark.skipif(not installed(name), reason=f"apt install {name}"))
        for name in names
    ]


def objects() -> dict[tuple[str, str], dict[str, Any]]:
    """All that Kustomize would apply, by kind and name."""
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    found = [one for name in listed for one in yaml.safe_load_all((KUBERNETES / name).read_text())]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def gateway_in_kubernetes(**environment: str) -> Config:
    text = objects()["ConfigMap", "mrtr-gateway"]["data"]["gateway.yaml"]
    return parse(text, "gateway.yaml", {**ENVIRONMENT, **environment})


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = objects()["Deployment", "mrtr-gateway"]["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    assert isinstance(found, dict)
    return found


# --- balancers ---


def verdict(command: list[str]) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", only("nginx", "haproxy"))
def test_the_balancer_accepts_its_file(name: BalancerName, tmp_path: Path) -> None:
    balancer = Balancer(name, tmp_path, "127.0.0.1:20000")
    balancer.configure(PLACES)
    code, said = verdict(balancer.command(check=True))
    assert code == 0, said
    assert "warn" not in said.lower(), said


@pytest.mark.parametrize("name", only("nginx", "haproxy"))
def test_the_balancer_would_refuse_a_wrong_file(name: BalancerName, tmp_path: Path) -> None:
    balancer = Balancer(name, tmp_path, "127.0.0.1:20000")
    balancer.configure(PLACES)
    balancer.configuration.write_text(balancer.configuration.read_text().replace("roundrobin", "x").replace("4m", "x"))
    assert verdict(balancer.command(check=True))[0] != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="the file names paths and users that only root may use")
@pytest.mark.parametrize("name", only("haproxy"))
def test_haproxy_accepts_the_file_as_it_is(name: BalancerName) -> None:
    found = program(name)
    assert found is not None
    code, said = verdict([found, "-c", "-f", str(FILES[name])])
    assert code == 0, said


@pytest.mark.parametrize("name", FILES)
def test_only_addresses_and_paths_are_replaced_for_the_tests(name: BalancerName, tmp_path: Path) -> None:
    """A line that the tests run and the file does not have would be tested in vain."""
    shipped = FILES[name].read_text()
    places = [Place(f"gw-{number}", f"10.0.0.1{number}:8080", "10.0.0.1:9090") for number in (1, 2, 3)]
    used = CONFIGURATIONS[name](shipped, tmp_path, "127.0.0.1:80", places)
    paths = re.compile(r"/\S*/|127\.0\.0\.1:|(?<=bind ):| port 9090$", re.MULTILINE)
    ours = {paths.sub("", line) for line in used.splitlines()}
    theirs = {paths.sub("", line) for line in shipped.splitlines()}
    assert {line for line in ours - theirs if "_temp_path" not in line} == set()
    assert theirs - ours == set() or os.geteuid() != 0


def test_both_refuse_the_bodies_that_the_gateway_refuses() -> None:
    limit = DEFAULTS.limits.body_bytes
    (nginx,) = re.findall(r"client_max_body_size (\d+)m;", FILES["nginx"].read_text())
    (haproxy,) = re.findall(r"req\.body_size gt (\d+)", FILES["haproxy"].read_text())
    assert (int(nginx) * 1024**2, int(haproxy)) == (limit, limit)


def test_both_bear_more_silence_than_the_gateway_keeps() -> None:
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


def test_neither_sends_a_request_twice() -> None:
    assert re.findall(r"proxy_next_upstream (.*);", directives("nginx")) == ["error timeout"]
    assert re.findall(r"retry-on (.*)", directives("haproxy")) == ["conn-failure"]


# --- Kubernetes ---


def test_kubernetes_would_accept_the_manifests() -> None:
    files = [
        KUBERNETES / name for name in yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    ]
    code, said = verdict([sys.executable, "-m", "kubernetes_validate.__main__", "--strict", *map(str, files)])
    assert code == 0, said
    assert said.count(" passed for resource ") == len(files)


def test_kubernetes_would_refuse_a_wrong_manifest(tmp_path: Path) -> None:
    wrong = tmp_path / "service.yaml"
    wrong.write_text((KUBERNETES / "service.yaml").read_text().replace("sessionAffinity", "sessionAffinty"))
    assert verdict([sys.executable, "-m", "kubernetes_validate.__main__", "--strict", str(wrong)])[0] != 0


def test_every_manifest_is_listed() -> None:
    files = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"])


def test_the_configuration_of_the_pods_loads() -> None:
    config = gateway_in_kubernetes()
    assert config.replica.id == ENVIRONMENT["POD_NAME"]
    assert len(config.state.raw_keys()) == 1


def test_the_key_in_the_secret_is_one_that_nobody_can_start_with() -> None:
    placeholder = objects()["Secret", "mrtr-gateway"]["stringData"]["state-key"]
    with pytest.raises(ConfigError, match="make one with `mrtr-gateway keygen`"):
        gateway_in_kubernetes(MRTR_STATE_KEY=placeholder)


def test_the_pods_get_what_their_configuration_reads() -> None:
    text = objects()["ConfigMap", "mrtr-gateway"]["data"]["gateway.yaml"]
    given = {one["name"]: one["valueFrom"] for one in container()["env"]}
    assert given.keys() == set(re.findall(r"\$\{(\w+)\}", text)) == ENVIRONMENT.keys()
    assert given["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    secret = given["MRTR_STATE_KEY"]["secretKeyRef"]
    assert secret["key"] in objects()["Secret", secret["name"]]["stringData"]


def test_ports_names_and_labels_agree() -> None:
    config = gateway_in_kubernetes()
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    listening = {"http": config.listen, "peer": config.replica.listen, "admin": config.admin}
    assert {name: f"0.0.0.0:{port}" for name, port in ports.items()} == listening
    service, peers = objects()["Service", "mrtr-gateway"], objects()["Service", "mrtr-gateway-peers"]
    assert config.replica.peers_dns == f"{peers['metadata']['name']}:{peers['spec']['ports'][0]['port']}"
    assert peers["spec"]["ports"][0]["port"] == ports["peer"], "a headless service does not translate ports"
    assert [one["spec"]["ports"][0]["targetPort"] for one in (service, peers)] == ["http", "peer"]
    labels = objects()["Deployment", "mrtr-gateway"]["spec"]["template"]["metadata"]["labels"]
    budget, policy = objects()["PodDisruptionBudget", "mrtr-gateway"], objects()["NetworkPolicy", "mrtr-gateway"]
    assert [
        service["spec"]["selector"],
        peers["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
        policy["spec"]["podSelector"]["matchLabels"],
    ] == [labels] * 4
    assert (peers["spec"]["clusterIP"], peers["spec"]["publishNotReadyAddresses"]) == ("None", True)


def test_only_replicas_reach_the_peer_port() -> None:
    rules = objects()["NetworkPolicy", "mrtr-gateway"]["spec"]["ingress"]
    labels = objects()["Deployment", "mrtr-gateway"]["spec"]["template"]["metadata"]["labels"]
    allowed = {rule["ports"][0]["port"]: rule.get("from") for rule in rules}
    assert allowed.keys() == {"http", "peer", "admin"}
    assert allowed["peer"] == [{"podSelector": {"matchLabels": labels}}]
    assert allowed["admin"] is not None


def test_a_pod_has_time_to_drain() -> None:
    config = gateway_in_kubernetes()
    needed = config.hold.drain_delay_seconds + config.hold.drain_seconds + config.timeouts.cancel_seconds
    assert pod()["terminationGracePeriodSeconds"] > needed
    assert "lifecycle" not in container(), "the gateway itself waits for the balancers"


def test_probes_ask_what_the_gateway_answers() -> None:
    probes = {name: container()[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")}
    assert probes == {
        "livenessProbe": {"path": "/healthz", "port": "admin"},
        "readinessProbe": {"path": "/readyz", "port": "admin"},
    }
