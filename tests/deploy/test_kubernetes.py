"""The manifests and the chart of deploy/: real kubectl and helm build them, the schemas of Kubernetes check them.

What they mean together (ports, times, names) is compared with the configuration that their pods load.
"""

import base64
import copy
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from msgspec.structs import replace

from gateway import __version__
from gateway.config.parsing.state_keys import decode_key, read_key_lines
from tests.parts.launch import REPOSITORY
from tests.support.configurations import drain_seconds
from tests.support.kube import (
    CHART,
    HELM,
    KEYS_FILE,
    KUBECTL,
    KUBERNETES,
    POD_NAME,
    Objects,
    gateway_of,
    helm,
    kustomize,
    read,
    run,
)
from tests.support.programs import ProgramError, output

pytestmark = [
    pytest.mark.skipif(not KUBECTL.exists() or not HELM.exists(), reason="scripts/parts has not been run"),
]

OLDEST = {"base": "1.25", "example": "1.25", "sidecar": "1.29", "chart": "1.25"}
"""The oldest Kubernetes that the README and the chart name."""
NEWEST = "1.37"
CUSTOM = {"PodMonitor", "PrometheusRule"}
"""Kinds that are not part of Kubernetes itself."""
MONITORED = ("--set", "monitoring.podMonitor=true", "--set", "monitoring.rules=true")
OWN_NAMES = ("mrtr-gateway", "mrtr-gateway.default", "mrtr-gateway.default.svc")
STRICT = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def built(what: str) -> Objects:
    return helm(*MONITORED) if what == "chart" else kustomize(what)


def the(kind: str, objects: Objects) -> dict[str, Any]:
    """The only object of that kind."""
    (found,) = (each for (its_kind, _), each in objects.items() if its_kind == kind)
    return found


def pod_of(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = the("Deployment", objects)["spec"]["template"]["spec"]
    return spec


def labels_of(objects: Objects) -> dict[str, str]:
    labels: dict[str, str] = the("Deployment", objects)["spec"]["template"]["metadata"]["labels"]
    return labels


def container_of(objects: Objects) -> dict[str, Any]:
    """The gateway's container, wherever it is."""
    pod = pod_of(objects)
    containers = [*pod["containers"], *pod.get("initContainers", [])]
    (found,) = (each for each in containers if "serve" in each.get("args", []))
    assert isinstance(found, dict)
    return found


# --- what the programs say ---


@pytest.mark.parametrize("version", ["oldest", NEWEST])
@pytest.mark.parametrize("what", OLDEST)
def test_the_objects_match_the_kubernetes_schema(what: str, version: str) -> None:
    version = OLDEST[what] if version == "oldest" else version
    kinds = set()
    for (kind, _), one in built(what).items():
        if kind not in CUSTOM:
            assert kubernetes_validate.validate(one, version, strict=True) == version
            kinds.add(kind)
    assert kinds >= {"ConfigMap", "Deployment", "Service", "NetworkPolicy"}


def test_helm_lint_reports_nothing() -> None:
    said = run(HELM, "lint", "--strict", str(CHART))
    assert "0 chart(s) failed" in said
    assert "[WARNING]" not in said


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ("{config: {holdd: {ttl_seconds: 3}}}", "additional properties 'holdd' not allowed"),
        ("{config: {hold: {drain_seconds: never}}}", "at '/config/hold/drain_seconds'"),
        ("{config: {hold: {drain_seconds: '${DRAIN}'}}}", "write a number, the pods' grace period is made of it"),
        ("{autoscaling: {max: 4}}", "additional properties 'max' not allowed"),
    ],
)
def test_the_chart_refuses_values_with_which_no_pod_could_start(values: str, complaint: str) -> None:
    with pytest.raises(ProgramError, match=re.escape(complaint)):
        helm(values=values)


def test_the_schema_of_the_values_is_the_output_of_its_script() -> None:
    printed = output(sys.executable, REPOSITORY / "scripts" / "print_values_schema")
    wanted = "run scripts/print_values_schema > deploy/helm/mrtr-gateway/values.schema.json"
    assert (CHART / "values.schema.json").read_text() == printed, wanted


def test_the_values_and_their_schema_have_the_same_keys() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() == schema["properties"].keys() - {"global"}


def test_the_chart_has_the_gateways_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
    for folder in ("example", "sidecar"):
        (image,) = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())["images"]
        assert image["newTag"] == __version__


def test_every_manifest_is_in_a_kustomization() -> None:
    for folder in ("base", "example", "sidecar", "monitoring"):
        kustomization = KUBERNETES / folder / "kustomization.yaml"
        text = kustomization.read_text()
        unused = [path.name for path in (KUBERNETES / folder).glob("*.yaml") if path.name not in text]
        assert unused in ([], ["kustomization.yaml"]), folder


# --- the chart and the manifests are the same ---


def comparable(objects: Objects) -> Objects:
    """Remove what Helm and Kustomize add in different ways: labels, digests, and the configuration's text."""
    ours = copy.deepcopy(objects)
    for (kind, _), one in ours.items():
        one["metadata"] = {"name": re.sub(r"-[0-9a-z]{10}$", "", one["metadata"]["name"])}
        text = json.dumps(one, sort_keys=True)
        text = text.replace('"app.kubernetes.io/instance": "mrtr-gateway", ', "")
        text = re.sub(r'"name": "mrtr-gateway-[0-9a-z]{10}"', '"name": "mrtr-gateway"', text)
        text = re.sub(r'"image": "mrtr-gateway:[^"]*"', '"image": "mrtr-gateway"', text)
        text = re.sub(r'"annotations": {"checksum/config": "\w+"}, ', "", text)
        text = text.replace('"imagePullPolicy": "IfNotPresent", ', "")
        one.clear()
        one.update(json.loads(text) if kind != "ConfigMap" else {})
    return ours


def test_the_chart_and_the_manifests_create_the_same_objects() -> None:
    assert comparable(helm()) == comparable(kustomize("base"))
    chart, base = gateway_of(helm()), gateway_of(kustomize("base"))
    assert replace(chart, security=base.security) == base, "only the chart knows its namespace"
    assert set(chart.security.allowed_hosts) > set(base.security.allowed_hosts)


def test_two_releases_do_not_interfere() -> None:
    one, other = helm(release="mrtr-gateway"), helm(release="second")
    assert not one.keys() & other.keys()
    assert labels_of(one) != labels_of(other)
    config = gateway_of(other, "second-mrtr-gateway")
    assert config.replica.peers_dns == "second-mrtr-gateway-peers:8081"
    assert config.security.allowed_hosts[0] == "second-mrtr-gateway"


def test_the_host_that_helm_prints_is_allowed() -> None:
    said = run(HELM, "install", "mrtr-gateway", str(CHART), "--dry-run=client", "--namespace", "mcp")
    (host,) = re.findall(r"connect to http://([^/]+)/mcp$", said, re.MULTILINE)
    assert host in gateway_of(helm("--namespace", "mcp")).security.allowed_hosts


def test_the_users_values_take_precedence_over_the_charts() -> None:
    values = """
        config:
          listen: 0.0.0.0:18080
          replica: {listen: "0.0.0.0:18081", peers_dns: "mrtr-gateway-peers:18081"}
          hold: {drain_seconds: 600}
          limits: {body_bytes: 16777216}
        hosts: [mcp.example.com]
        extraEnv: [{name: API_KEY, valueFrom: {secretKeyRef: {name: api, key: key}}}]
        autoscaling: {enabled: false}
        replicas: 2
        networkPolicy: {monitoringNamespace: observed}
    """
    objects = helm(values=values)
    config = gateway_of(objects)
    assert (config.listen, config.replica.listen) == ("0.0.0.0:18080", "0.0.0.0:18081")
    assert config.limits.body_bytes == 16_777_216
    assert config.security.allowed_hosts == (*OWN_NAMES, "mcp.example.com")
    assert_consistent(objects)
    assert pod_of(objects)["terminationGracePeriodSeconds"] > 600
    assert [each["name"] for each in container_of(objects)["env"]] == ["POD_NAME", "API_KEY"]
    assert ("HorizontalPodAutoscaler", "mrtr-gateway") not in objects
    assert objects["Deployment", "mrtr-gateway"]["spec"]["replicas"] == 2


def test_what_a_cluster_asks_of_a_pod_can_be_set() -> None:
    digest = "sha256:" + "0f" * 32
    values = f"""
        image: {{repository: registry.example.com/gateway, digest: "{digest}"}}
        hosts: [mcp.example.com]
        ingress: {{enabled: true, className: nginx, tls: [{{hosts: [mcp.example.com], secretName: mcp}}]}}
        serviceAccount: {{create: true, annotations: {{role: gateway}}}}
        podLabels: {{team: tools}}
        priorityClassName: high
        topologySpreadConstraints: [{{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}}]
        networkPolicy: {{egress: [{{ports: [{{port: 443}}]}}]}}
    """
    objects = helm(values=values)
    for (_, name), one in objects.items():
        assert name in {"mrtr-gateway", "mrtr-gateway-peers"}
        assert kubernetes_validate.validate(one, NEWEST, strict=True) == NEWEST
    pod = pod_of(objects)
    assert container_of(objects)["image"] == f"registry.example.com/gateway@{digest}"
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("mrtr-gateway", "high")
    assert [each["topologyKey"] for each in pod["topologySpreadConstraints"]] == ["zone"]
    assert labels_of(objects)["team"] == "tools"
    assert "team" not in objects["Service", "mrtr-gateway"]["spec"]["selector"]
    assert objects["ServiceAccount", "mrtr-gateway"]["metadata"]["annotations"] == {"role": "gateway"}
    policy = objects["NetworkPolicy", "mrtr-gateway"]["spec"]
    assert (policy["policyTypes"], policy["egress"]) == (["Ingress", "Egress"], [{"ports": [{"port": 443}]}])
    ingress = objects["Ingress", "mrtr-gateway"]["spec"]
    assert ingress["ingressClassName"] == "nginx"
    (rule,) = ingress["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["backend"]["service"]) == (
        "mcp.example.com",
        {"name": "mrtr-gateway", "port": {"name": "http"}},
    )
    assert rule["host"] in gateway_of(objects).security.allowed_hosts


@pytest.mark.parametrize("label", ["name", "instance"])
def test_a_label_of_the_selectors_cannot_be_given_again(label: str) -> None:
    with pytest.raises(ProgramError, match=rf"/podLabels/app\.kubernetes\.io~1{label}': false schema"):
        helm(values=f"{{podLabels: {{app.kubernetes.io/{label}: other}}}}")


def test_an_ingress_without_names_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"ingress\.enabled needs the names of the clients in hosts"):
        helm(values="{ingress: {enabled: true}}")


FILES = {
    path: files
    for path in sorted((REPOSITORY / "config").glob("*.yaml"))
    if (files := re.findall(r"^ +\w+_file: ((?!null)\S+)", path.read_text(), re.MULTILINE))
}
"""The files that each example names."""


def test_the_examples_that_name_files_are_found() -> None:
    assert {path.name for path in FILES} >= {"routes.yaml", "tls.yaml"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_files_that_an_example_names_can_be_mounted(path: Path) -> None:
    """The pods load the example with the files of the mounted volume; nothing else of theirs names a file."""
    files = FILES[path]
    config = yaml.safe_load(path.read_text())
    for key in ("listen", "admin", "replica", "state"):
        config.pop(key, None)
    mounted = [
        {"name": "files", "mountPath": f"/etc/mrtr-gateway-files/{folder}", "subPath": folder}
        for folder in sorted({file.partition("/")[0] for file in files})
    ]
    moved = json.loads(re.sub(r'("\w+_file": ")(?!/)', r"\1/etc/mrtr-gateway-files/", json.dumps(config)))
    volume = {"name": "files", "secret": {"secretName": "files"}}
    objects = helm(values=json.dumps({"config": moved, "extraVolumes": [volume], "extraVolumeMounts": mounted}))
    assert volume in pod_of(objects)["volumes"]
    folders = [mount["mountPath"] for mount in container_of(objects)["volumeMounts"]]
    named = re.findall(r"_file: (\S+)", objects["ConfigMap", "mrtr-gateway"]["data"]["gateway.yaml"])
    assert len(named) == len(files) + 1  # the keys
    assert [file for file in named if not any(file.startswith(f"{folder}/") for folder in folders)] == []


def test_a_change_of_the_configuration_rolls_the_pods() -> None:
    def stamp(drain: int) -> str:
        objects = helm(values=f"{{config: {{hold: {{drain_seconds: {drain}}}}}}}")
        annotations = objects["Deployment", "mrtr-gateway"]["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    assert stamp(30) != stamp(31)
    (configuration,) = (volume for volume in pod_of(kustomize("base"))["volumes"] if "configMap" in volume)
    assert re.fullmatch(r"mrtr-gateway-[0-9a-z]{10}", configuration["configMap"]["name"])


# --- what they mean together ---


def assert_consistent(objects: Objects) -> None:
    """Ports, names and labels agree with one another and with the configuration."""
    config, container, labels = gateway_of(objects), container_of(objects), labels_of(objects)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    listening = {"http": config.listen, "peer": config.replica.listen, "admin": config.admin}
    assert {name: f"0.0.0.0:{port}" for name, port in ports.items()} == listening
    service, peers = objects["Service", "mrtr-gateway"], objects["Service", "mrtr-gateway-peers"]
    assert config.replica.peers_dns == f"{peers['metadata']['name']}:{peers['spec']['ports'][0]['port']}"
    assert peers["spec"]["ports"][0]["port"] == ports["peer"], "a headless service does not translate ports"
    assert [one["spec"]["ports"][0]["targetPort"] for one in (service, peers)] == ["http", "peer"]
    assert [
        service["spec"]["selector"],
        peers["spec"]["selector"],
        objects["Deployment", "mrtr-gateway"]["spec"]["selector"]["matchLabels"],
        objects["PodDisruptionBudget", "mrtr-gateway"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy", "mrtr-gateway"]["spec"]["podSelector"]["matchLabels"],
        pod_of(objects)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ] == [labels] * 6
    assert (peers["spec"]["clusterIP"], peers["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["metadata"]["name"] in config.security.allowed_hosts


@pytest.mark.parametrize("folder", ["base", "example"])
def test_ports_names_and_labels_agree(folder: str) -> None:
    assert_consistent(kustomize(folder))


@pytest.mark.parametrize("folder", ["base", "example", "sidecar"])
def test_every_pod_is_a_replica_with_its_own_name_and_the_shared_keys(folder: str) -> None:
    objects = kustomize(folder)
    config = gateway_of(objects)
    assert config.replica.id == POD_NAME
    assert len(config.state.raw_keys()) == 1
    container = container_of(objects)
    assert container["env"] == [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod_of(objects)["volumes"]}
    (secret,) = (volume["name"] for volume in volumes.values() if "secret" in volume)
    assert f"{mounts[secret]}/state-keys" == KEYS_FILE
    assert volumes[secret]["secret"]["defaultMode"] == 0o440
    (files,) = (volume["name"] for volume in volumes.values() if "configMap" in volume)
    assert container["args"] == ["serve", "--config", f"{mounts[files]}/gateway.yaml"]
    # A mount below a read-only mount is impossible.
    assert not any(
        one != other and one.startswith(f"{other}/") for one in mounts.values() for other in mounts.values()
    )


def test_no_secret_is_in_the_manifests() -> None:
    assert not [key for what in OLDEST for key in built(what) if key[0] == "Secret"]


@pytest.mark.parametrize("folder", ["base", "example", "sidecar"])
def test_the_gateway_runs_with_the_fewest_privileges(folder: str) -> None:
    objects = kustomize(folder)
    pod, container = pod_of(objects).get("securityContext", {}), container_of(objects)["securityContext"]
    assert {key: container[key] for key in STRICT} == STRICT
    together = {**pod, **container}
    assert together["runAsNonRoot"] is True
    assert together["runAsUser"] == together["runAsGroup"] == together["fsGroup"] == 65532
    assert together["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("folder", ["base", "example", "sidecar"])
def test_only_replicas_reach_the_peer_port(folder: str) -> None:
    objects = kustomize(folder)
    policy = the("NetworkPolicy", objects)
    peer, admin = ("gateway-peer", "gateway-admin") if folder == "sidecar" else ("peer", "admin")
    allowed = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["spec"]["ingress"]}
    assert len(allowed) == 3
    assert allowed[peer] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert allowed[admin] is not None
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels_of(objects).items()


@pytest.mark.parametrize("what", ["base", "example", "sidecar", "chart"])
def test_nodes_are_drained_one_pod_at_a_time(what: str) -> None:
    objects = built(what)
    budget = the("PodDisruptionBudget", objects)
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels_of(objects).items()


@pytest.mark.parametrize("folder", ["base", "example"])
def test_a_pod_has_time_to_drain(folder: str) -> None:
    objects = kustomize(folder)
    assert pod_of(objects)["terminationGracePeriodSeconds"] > drain_seconds(gateway_of(objects))
    assert "lifecycle" not in container_of(objects), "the gateway itself waits for the balancers"


@pytest.mark.parametrize("folder", ["base", "sidecar"])
def test_the_probes_use_the_gateways_health_checks(folder: str) -> None:
    container = container_of(kustomize(folder))
    admin = "gateway-admin" if folder == "sidecar" else "admin"
    probes = {name: container[name]["httpGet"] for name in container if name.endswith("Probe")}
    assert probes == {
        "startupProbe": {"path": "/healthz", "port": admin},
        "livenessProbe": {"path": "/healthz", "port": admin},
        "readinessProbe": {"path": "/readyz", "port": admin},
    }


def test_a_drain_is_noticed_before_new_calls_are_refused() -> None:
    for folder in ("base", "example", "sidecar"):
        probe, config = container_of(kustomize(folder))["readinessProbe"], gateway_of(kustomize(folder))
        assert probe["periodSeconds"] * probe["failureThreshold"] < config.hold.drain_delay_seconds


def test_the_autoscaler_removes_one_pod_at_a_time_and_the_deployment_sets_no_replicas() -> None:
    objects = kustomize("base")
    scaler = objects["HorizontalPodAutoscaler", "mrtr-gateway"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == "mrtr-gateway"
    assert "replicas" not in objects["Deployment", "mrtr-gateway"]["spec"]
    down = scaler["behavior"]["scaleDown"]
    ((policy),) = down["policies"]
    assert policy["value"] == 1
    assert policy["periodSeconds"] > drain_seconds(gateway_of(objects))
    assert down["stabilizationWindowSeconds"] >= gateway_of(objects).hold.ttl_seconds


# --- beside the server in one pod ---


def test_the_sidecar_is_native_and_the_server_is_unchanged() -> None:
    shipped = read((KUBERNETES / "sidecar" / "old-server.yaml").read_text())
    objects = kustomize("sidecar")
    pod = pod_of(objects)
    (before,) = pod_of(shipped)["containers"]
    (after,) = pod["containers"]
    assert {key: value for key, value in after.items() if key != "lifecycle"} == before
    (gateway,) = pod["initContainers"]
    assert gateway["restartPolicy"] == "Always"
    config = gateway_of(objects)
    assert config.routes[0].upstream.url == f"http://127.0.0.1:{before['ports'][0]['containerPort']}/mcp"
    ports = {port["name"]: f"0.0.0.0:{port['containerPort']}" for port in gateway["ports"]}
    assert ports == {"gateway": config.listen, "gateway-peer": config.replica.listen, "gateway-admin": config.admin}


def test_clients_reach_the_gateway_at_the_servers_address() -> None:
    service = kustomize("sidecar")["Service", "old-server"]
    assert service["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "gateway"}]
    assert service["metadata"]["name"] in gateway_of(kustomize("sidecar")).security.allowed_hosts


def test_the_gateways_of_the_pods_find_one_another() -> None:
    objects = kustomize("sidecar")
    peers = objects["Service", "old-server-peers"]
    (port,) = peers["spec"]["ports"]
    assert gateway_of(objects).replica.peers_dns == f"{peers['metadata']['name']}:{port['port']}"
    assert port["targetPort"] == "gateway-peer"
    assert (peers["spec"]["clusterIP"], peers["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert peers["spec"]["selector"].items() <= labels_of(objects).items()


def test_the_server_outlives_the_gateways_drain() -> None:
    """Kubernetes ends sidecars last, so without both hooks the server of held calls would end first."""
    pod = pod_of(kustomize("sidecar"))
    config = gateway_of(kustomize("sidecar"))
    (server,), (gateway,) = pod["containers"], pod["initContainers"]
    waits = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert gateway["lifecycle"]["preStop"] == {"exec": {"command": ["sh", "-c", "kill -TERM 1"]}}
    assert waits > drain_seconds(config)
    assert pod["terminationGracePeriodSeconds"] > waits + 10


# --- monitoring ---


def test_the_pod_monitor_selects_the_pods_and_sets_the_job_of_the_alerts() -> None:
    (KUBERNETES / "monitoring" / "kustomization.yaml").read_text().index("pod-monitor.yaml")
    shipped = yaml.safe_load((KUBERNETES / "monitoring" / "pod-monitor.yaml").read_text())
    for monitor, objects in ((shipped, kustomize("base")), (helm(*MONITORED)["PodMonitor", "mrtr-gateway"], helm())):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels_of(objects).items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in {port["name"] for port in container_of(objects)["ports"]}
        assert endpoint["path"] == "/metrics"
        assert labels_of(objects)[monitor["spec"]["jobLabel"]] == "mrtr-gateway"


def test_the_pod_monitor_of_the_sidecar_selects_it() -> None:
    monitor = yaml.safe_load((KUBERNETES / "sidecar" / "pod-monitor.yaml").read_text())
    objects = kustomize("sidecar")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels_of(objects).items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in container_of(objects)["ports"]}
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "mrtr-gateway"}]


def test_the_chart_has_the_alerts_unchanged() -> None:
    rules = helm(*MONITORED)["PrometheusRule", "mrtr-gateway"]["spec"]
    assert rules == yaml.safe_load((REPOSITORY / "deploy" / "prometheus" / "alerts.yml").read_text())
    assert rules["groups"]


@pytest.mark.parametrize("address", ["http://gw:9464", "http://gw:9464/"])
def test_the_runbook_of_the_charts_alerts_can_have_an_address(address: str) -> None:
    objects = helm(*MONITORED, "--set", f"monitoring.runbookUrl={address}")
    (group,) = objects["PrometheusRule", "mrtr-gateway"]["spec"]["groups"]
    for rule in group["rules"]:
        wanted = f"http://gw:9464/docs/monitoring.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == wanted


def test_the_monitoring_component_can_be_added(tmp_path: Path) -> None:
    parts = {"resources": ["base"], "components": ["monitoring"]}
    paths = {key: [os.path.relpath(KUBERNETES / name, tmp_path) for name in names] for key, names in parts.items()}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(paths))
    kinds = {kind for kind, _ in read(run(KUBECTL, "kustomize", str(tmp_path)))}
    assert kinds >= {"PodMonitor", "Deployment"}


# --- what the READMEs say ---


def block(readme: Path, holds: str) -> str:
    """The only code block with these words."""
    (found,) = (
        text
        for text in re.findall(r"^ *```\n(.*?)^ *```$", readme.read_text(), re.MULTILINE | re.DOTALL)
        if holds in text
    )
    return str(found)


def test_the_command_of_the_readme_makes_a_prometheus_rule_from_the_alerts() -> None:
    command, _, sent_to = block(KUBERNETES / "README.md", "kind: PrometheusRule").rpartition("|")
    assert sent_to.strip() == "kubectl -n mcp apply -f -"
    rule = yaml.safe_load(run("bash", "-c", command))
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((REPOSITORY / "deploy" / "prometheus" / "alerts.yml").read_text())


def test_the_values_of_the_readme_are_sufficient() -> None:
    objects = helm(values=block(CHART.parent / "README.md", "repository: registry"))
    assert container_of(objects)["image"] == "registry.example.com/mrtr-gateway:0.1.0"
    assert gateway_of(objects).security.allowed_hosts == (*OWN_NAMES, "mcp.example.com")


@pytest.mark.parametrize("readme", [KUBERNETES / "README.md", CHART.parent / "README.md"])
def test_the_pods_mount_the_secret_of_the_readme(readme: Path) -> None:
    """kubectl itself makes the Secret, with a key of this program."""
    command = block(readme, "create secret").replace("\\\n", "").strip().splitlines()[0]
    command = command.replace("mrtr-gateway keygen", f"{sys.executable} -m gateway keygen")
    said = run("bash", "-c", command.replace("kubectl", str(KUBECTL), 1) + " --dry-run=client -o yaml")
    secret = yaml.safe_load(said)
    objects = kustomize("base")
    (mounted,) = (volume["secret"] for volume in pod_of(objects)["volumes"] if "secret" in volume)
    assert secret["metadata"]["name"] == mounted["secretName"]
    key = base64.b64decode(secret["data"][Path(KEYS_FILE).name]).decode()
    assert len(read_key_lines(key)) == 1
    assert len(decode_key(read_key_lines(key)[0])) >= 32
