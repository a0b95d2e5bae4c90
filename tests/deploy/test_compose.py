"""Checks deploy/compose as far as that is possible without Docker; tests/e2e/test_container.py runs it."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway import __version__
from gateway.config import Config, Hold, Limits, load, parse
from tests.support.cluster import DEPLOY, FILES, Balancer, Place, needs, replaced
from tests.support.compose import FOLDERS, Unset, podman_options, read
from tests.support.configurations import drain_seconds
from tests.support.programs import output

ENVIRONMENT = {"MRTR_UPSTREAM": "http://old-server:9000/mcp", "MRTR_STATE_KEY": "0f" * 32}


def services(folder: str) -> dict[str, dict[str, Any]]:
    """The services that are gateways."""
    return {name: each for name, each in read(folder, ENVIRONMENT)["services"].items() if "build" in each}


def configuration(folder: str, service: str, tmp_path: Path) -> Config:
    """The configuration as the container of that service reads it."""
    text = (FOLDERS[folder] / "config.yaml").read_text()
    keys = tmp_path / "state_keys"
    keys.write_text("0f" * 32)
    environment: dict[str, str] = services(folder)[service]["environment"]
    return parse(text.replace("/run/secrets/state_keys", str(keys)), str(tmp_path / "config.yaml"), environment)


EVERY = [(folder, service) for folder in FOLDERS for service in services(folder)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_compose_file_matches_the_schema(folder: str) -> None:
    schema = ("-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec")
    _ = output(sys.executable, *schema, FOLDERS[folder] / "compose.yaml")


@pytest.mark.parametrize(("folder", "service"), EVERY)
def test_the_configuration_loads_with_the_containers_environment(folder: str, service: str, tmp_path: Path) -> None:
    config = configuration(folder, service, tmp_path)
    assert config.routes[0].upstream.url == ENVIRONMENT["MRTR_UPSTREAM"]
    assert len(config.state.raw_keys()) == 1
    assert {config.listen, config.admin} == {"0.0.0.0:8080", "0.0.0.0:9464"}, "as the image exposes them"
    assert {"localhost", "127.0.0.1"} <= set(config.security.allowed_hosts)


@pytest.mark.parametrize(("folder", "service"), EVERY)
def test_a_container_has_time_to_drain_and_no_more_rights_than_it_needs(
    folder: str, service: str, tmp_path: Path
) -> None:
    config, given = configuration(folder, service, tmp_path), services(folder)[service]
    assert float(given["stop_grace_period"].removesuffix("s")) > drain_seconds(config)
    assert (given["read_only"], given["cap_drop"], given["security_opt"]) == (
        True,
        ["ALL"],
        ["no-new-privileges:true"],
    )
    assert given["image"] == f"mrtr-gateway:{__version__}"
    assert (FOLDERS[folder] / given["build"]["context"] / "Dockerfile").exists()
    assert all(Path(option.split("=")[1].split(":")[0]).exists() for option in mounted(folder, service))


def mounted(folder: str, service: str) -> list[str]:
    """The mounts, without secrets."""
    options = podman_options(read(folder, ENVIRONMENT), service, FOLDERS[folder])
    return [option for option in options if option.startswith("--volume=") and "/run/secrets/" not in option]


@pytest.mark.parametrize("folder", FOLDERS)
def test_ports_are_published_only_to_this_host(folder: str) -> None:
    published = [port for each in read(folder, ENVIRONMENT)["services"].values() for port in each.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_a_missing_variable_is_an_error() -> None:
    for folder, name in (("gateway", "MRTR_UPSTREAM"), ("replicas", "MRTR_UPSTREAM"), ("replicas", "MRTR_STATE_KEY")):
        with pytest.raises(Unset):
            read(folder, {**ENVIRONMENT, name: ""})


def test_containers_and_units_may_open_the_files_that_the_defaults_need() -> None:
    names = ("compose/gateway/compose.yaml", "compose/replicas/compose.yaml", "swarm/stack.yaml", "ecs/service.yaml")
    for name in (*names, "systemd/mrtr-gateway.service"):
        (limit,) = re.findall(r"(?:nofile: |LimitNOFILE=|HardLimit: )(\d+)", (DEPLOY / name).read_text())
        assert int(limit) > 2 * Hold().max_calls + Limits().connections + 32, name


@pytest.mark.parametrize(("folder", "secret"), [("gateway", "state_keys"), ("replicas", ".env")])
def test_no_key_is_committed(folder: str, secret: str) -> None:
    _ = output("git", "check-ignore", FOLDERS[folder] / secret, cwd=FOLDERS[folder])


def test_the_replicas_know_one_another(tmp_path: Path) -> None:
    names = list(services("replicas"))
    for name in names:
        replica = configuration("replicas", name, tmp_path).replica
        assert replica.id == name
        assert replica.peers == {each: f"{each}:8081" for each in names}
    assert read("replicas", ENVIRONMENT)["services"]["nginx"]["depends_on"].keys() == set(names)


# --- nginx ---


def test_the_nginx_files_differ_only_in_addresses() -> None:
    theirs = FILES["nginx"].read_text()
    for number, name in enumerate(services("replicas"), start=1):
        theirs = replaced(theirs, f"10.0.0.1{number}:8080", f"{name}:8080")
    assert (FOLDERS["replicas"] / "nginx.conf").read_text() == theirs


@needs("nginx")
def test_nginx_accepts_the_file(tmp_path: Path) -> None:
    balancer = Balancer("nginx", tmp_path, "127.0.0.1:20000")
    # Names are looked up when the file is read; here they do not resolve.
    text = re.sub(r"\bgw-(\d):8080", r"10.0.0.1\1:8080", (FOLDERS["replicas"] / "nginx.conf").read_text())
    balancer.configure([Place(name, f"127.0.0.1:{20000 + n}", "") for n, name in enumerate("ab")], text)
    _ = output(*balancer.command(check=True))


def test_the_image_has_a_configuration() -> None:
    path = FOLDERS["gateway"].parents[1] / "container" / "config.yaml"
    config = load(path, ENVIRONMENT)
    assert (config.listen, config.admin) == ("0.0.0.0:8080", "0.0.0.0:9464")
    assert [route.upstream.url for route in config.routes] == [ENVIRONMENT["MRTR_UPSTREAM"]]
