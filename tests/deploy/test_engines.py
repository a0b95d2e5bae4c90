"""The files for engines that are not here: the gateway reads the configuration that each one makes.

No Nomad, ECS or Cloud Run runs here. What can be checked without them: the configuration is valid, its drain fits into
the engine's time to end, its ports are those that the engine connects, and a reference names something.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from gateway.config import Config, parse
from tests.parts.launch import REPOSITORY
from tests.support.configurations import drain_seconds

DEPLOY: Final = REPOSITORY / "deploy"
IMAGE: Final = (DEPLOY / "container" / "config.yaml").read_text()
"""What the image serves with, unless variables change it."""


class Tagged(yaml.SafeLoader):
    """Reads CloudFormation's short forms: `!Ref A` is {"Ref": "A"}."""


def _tagged(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    assert isinstance(node, yaml.ScalarNode)
    return {suffix: loader.construct_scalar(node)}


Tagged.add_multi_constructor("!", _tagged)


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((DEPLOY / "ecs" / "service.yaml").read_text(), Tagged)  # a SafeLoader
    return found


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "cloud-run" / "service.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def job() -> str:
    return (DEPLOY / "nomad" / "mrtr-gateway.nomad.hcl").read_text()


def with_keys(variables: dict[str, str]) -> dict[str, str]:
    """A key in place of the file, which is not here."""
    assert "GATEWAY_STATE__KEYS_FILE" in variables
    return {name: value for name, value in variables.items() if name != "GATEWAY_STATE__KEYS_FILE"}


def of_image(variables: dict[str, str]) -> Config:
    return parse(IMAGE + f'state: {{keys: ["{"0f" * 32}"]}}\n', "image", with_keys(variables))


# --- ECS ---


def mentions(tree: Any) -> Iterator[tuple[str, str]]:
    """Every reference of a stack: (Ref or GetAtt, the name)."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key in {"Ref", "GetAtt"}:
                yield key, value
            else:
                yield from mentions(value)
    elif isinstance(tree, list):
        for each in tree:
            yield from mentions(each)


def test_every_reference_of_the_stack_names_a_part_of_it(stack: dict[str, Any]) -> None:
    resources, parameters = stack["Resources"], stack["Parameters"]
    found = list(mentions(resources))
    assert len(found) > 10
    for kind, name in found:
        known = resources if kind == "GetAtt" else {**resources, **parameters, "AWS::Region": None}
        assert name.partition(".")[0] in known, (kind, name)
    unused = set(parameters) - {name for _, name in found}
    assert not unused
    for resource in resources.values():
        assert set(resource) <= {"Type", "Properties", "DependsOn"}
        assert resource.get("DependsOn", "Task") in resources


def test_a_task_of_ecs_has_a_valid_configuration_and_time_to_drain(stack: dict[str, Any]) -> None:
    (container,) = stack["Resources"]["Task"]["Properties"]["ContainerDefinitions"]
    variables = {each["Name"]: each["Value"] for each in container["Environment"]}
    (command,) = container["Command"]
    (path,) = re.findall(r"export GATEWAY_STATE__KEYS_FILE=(\S+);", command)
    assert f"printf '%s\\n' \"$STATE_KEY\" > {path};" in command
    upstream = {"MRTR_UPSTREAM": "http://old:9000/mcp"}
    config = of_image({**variables, **upstream, "GATEWAY_STATE__KEYS_FILE": path})
    assert drain_seconds(config) < container["StopTimeout"] <= 120
    assert {each["ContainerPort"] for each in container["PortMappings"]} == {8080, 8081, 9464}
    group = stack["Resources"]["TargetGroup"]["Properties"]
    assert (config.listen, config.admin) == (f"0.0.0.0:{group['Port']}", f"0.0.0.0:{group['HealthCheckPort']}")
    assert config.replica.listen == "0.0.0.0:8081"
    namespace = stack["Resources"]["Namespace"]["Properties"]["Name"]
    assert config.replica.peers_dns == f"{stack['Resources']['Peers']['Properties']['Name']}.{namespace}:8081"


def test_the_service_of_ecs_waits_for_the_rule_that_uses_its_target_group(stack: dict[str, Any]) -> None:
    resources = stack["Resources"]
    assert resources["Service"]["DependsOn"] == "Rule"
    (action,) = resources["Rule"]["Properties"]["Actions"]
    (balancer,) = resources["Service"]["Properties"]["LoadBalancers"]
    assert action["TargetGroupArn"] == balancer["TargetGroupArn"] == {"Ref": "TargetGroup"}


# --- Cloud Run ---


def test_the_instance_of_cloud_run_ends_within_its_ten_seconds(service: dict[str, Any]) -> None:
    (container,) = service["spec"]["template"]["spec"]["containers"]
    config = of_image({each["name"]: each["value"] for each in container["env"]})
    assert drain_seconds(config) < 10
    assert config.listen == f"0.0.0.0:{container['ports'][0]['containerPort']}"
    path = next(each["value"] for each in container["env"] if each["name"] == "GATEWAY_STATE__KEYS_FILE")
    (mount,), (volume,) = container["volumeMounts"], service["spec"]["template"]["spec"]["volumes"]
    (item,) = volume["secret"]["items"]
    assert (path, mount["name"]) == (f"{mount['mountPath']}/{item['path']}", volume["name"])
    scale = service["spec"]["template"]["metadata"]["annotations"]
    assert {scale[f"autoscaling.knative.dev/{bound}Scale"] for bound in ("min", "max")} == {"1"}


# --- Nomad ---

VARIABLES: Final = {
    "NOMAD_PORT_http": "25000",
    "NOMAD_PORT_admin": "25001",
    "NOMAD_SECRETS_DIR": "/secrets",
    "NOMAD_ALLOC_ID": "11e1c1c6-0f56-4f3e-b2ac-2a3c1d1b7c11",
    "NOMAD_ADDR_peer": "10.0.0.7:8081",
}


def test_the_template_of_nomad_renders_a_valid_configuration(job: str) -> None:
    (template,) = re.findall(r"<<-YAML\n(.*?)\n +YAML\n", job, re.DOTALL)
    rendered = re.sub(r'\{\{ env "(\w+)" \}\}', lambda found: VARIABLES[found[1]], template)
    assert "{{" not in rendered
    config = parse(rendered.replace("keys_file: /secrets/state_keys", f'keys: ["{"0f" * 32}"]'), "job", {})
    assert config.replica.id == VARIABLES["NOMAD_ALLOC_ID"]
    assert config.replica.listen == VARIABLES["NOMAD_ADDR_peer"]
    (port,) = re.findall(r'port "peer" \{\s+static = (\d+)', job)
    assert config.replica.peers_dns == f"mrtr-gateway-peer.service.consul:{port}"
    (seconds,) = re.findall(r'kill_timeout += "(\d+)s"', job)
    assert drain_seconds(config) < int(seconds)


def test_the_job_of_nomad_is_balanced_in_its_braces(job: str) -> None:
    code = re.sub(r"<<-YAML\n.*?\n +YAML\n", "", job, flags=re.DOTALL)
    code = re.sub(r'"(?:\\.|[^"\\])*"|#[^\n]*', "", code)
    depth = 0
    for brace in re.findall(r"[{}]", code):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0
