"""Reads the Compose files of deploy/ and converts one of their services into options of podman."""

import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.cluster import DEPLOY

FOLDERS: Final = {name: DEPLOY / "compose" / name for name in ("gateway", "replicas")}
VARIABLE: Final = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")
IGNORED: Final = {"image", "build", "ports", "extra_hosts", "stop_grace_period", "restart", "logging"}
"""Without Docker, images are not pulled, ports are not published, and the host's network is shared."""


class Unset(Exception):
    """A required variable is missing; the message is the file's."""


def filled(value: Any, env: Mapping[str, str]) -> Any:
    """Interpolate as Compose does, as far as our files need it."""

    def fill(match: re.Match[str]) -> str:
        found = env.get(match["name"], "")
        if not found and match["kind"] == "?":
            raise Unset(match["rest"])
        return found or (match["rest"] if match["kind"] == "-" else "")

    if isinstance(value, dict):
        return {key: filled(each, env) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, env) for each in value]
    return VARIABLE.sub(fill, value) if isinstance(value, str) else value


def read(folder: str, env: Mapping[str, str]) -> dict[str, Any]:
    """The whole file, interpolated."""
    found = filled(yaml.safe_load((FOLDERS[folder] / "compose.yaml").read_text()), env)
    assert isinstance(found, dict)
    return found


def podman_options(compose: Mapping[str, Any], service: str, folder: Path) -> list[str]:
    """The options of `podman run` for a service; paths of the host start in `folder`. A key it does not know fails."""
    options = []
    for key, value in compose["services"][service].items():
        match key:
            case "environment":
                options += [f"--env={name}={text}" for name, text in value.items()]
            case "volumes":
                options += [f"--volume={folder / each}" for each in value]
            case "secrets":
                files = {name: folder / compose["secrets"][name]["file"] for name in value}
                options += [f"--volume={path}:/run/secrets/{name}:ro" for name, path in files.items()]
            case "read_only":
                options += [f"--read-only={str(value).lower()}", "--read-only-tmpfs=false"]
            case "cap_drop":
                options += [f"--cap-drop={each}" for each in value]
            case "security_opt":
                options += [f"--security-opt={each}" for each in value]
            case "ulimits":
                most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # of this machine
                options += [f"--ulimit={name}={min(number, most)}" for name, number in value.items()]
            case _:
                assert key in IGNORED, f"{service}: {key}"
    return options
