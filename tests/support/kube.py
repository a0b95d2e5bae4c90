"""Runs the real kubectl and helm on the files in deploy/.

objects = kustomize("base")
objects = helm("--set", "replicas=2")
objects["Deployment", "mrtr-gateway"]["spec"]
"""

import atexit
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.config import Config, parse
from tests.parts.launch import PARTS, REPOSITORY
from tests.support.programs import output

KUBERNETES: Final = REPOSITORY / "deploy" / "kubernetes"
CHART: Final = REPOSITORY / "deploy" / "helm" / "mrtr-gateway"
KUBECTL: Final = PARTS / "kube" / "bin" / "kubectl"
HELM: Final = PARTS / "kube" / "bin" / "helm"
KEYS_FILE: Final = "/run/secrets/mrtr-gateway/state-keys"
POD_NAME: Final = "mrtr-gateway-7d9c8b6f5-x2abc"
DIGEST: Final = re.compile(r"-[0-9a-z]{10}$")

Objects = dict[tuple[str, str], dict[str, Any]]
"""Objects by kind and name; the digest of a generated name is cut off."""


def run(program: Path | str, *arguments: str, stdin: str | None = None, cwd: Path = REPOSITORY) -> str:
    """Run it without a home and without a cluster; return its output."""
    with tempfile.TemporaryDirectory(prefix="mrtr-home-") as home:
        environment = {"PATH": os.environ["PATH"], "HOME": home, "KUBECONFIG": "/dev/null"}
        return output(program, *arguments, env=environment, input=stdin, cwd=cwd)


def read(text: str) -> Objects:
    """Read a stream of objects; two with one kind and name are an error."""
    documents = [document for document in yaml.safe_load_all(text) if document]
    found = {(one["kind"], DIGEST.sub("", one["metadata"]["name"])): one for one in documents}
    assert len(found) == len(documents)
    return found


@cache
def kustomize(folder: str) -> Objects:
    """All objects that `kubectl apply -k deploy/kubernetes/FOLDER` would send."""
    return read(run(KUBECTL, "kustomize", str(KUBERNETES / folder)))


def helm(*arguments: str, release: str = "mrtr-gateway", values: str = "{}") -> Objects:
    """All objects that `helm install RELEASE` would send; `values` is YAML."""
    return read(run(HELM, "template", release, str(CHART), "--values", "-", *arguments, stdin=values))


@cache
def keys() -> Path:
    """The file that the Secret puts into the pods, during the tests."""
    directory = tempfile.TemporaryDirectory(prefix="mrtr-keys-")
    atexit.register(directory.cleanup)
    path = Path(directory.name) / "state-keys"
    path.write_text(f"# of a test\n{'0f' * 32}\n")
    return path


def gateway_of(objects: Objects, name: str = "mrtr-gateway", **environment: str) -> Config:
    """Load the configuration that the pods would load, with the Secret's file."""
    text = objects["ConfigMap", name]["data"]["gateway.yaml"]
    assert KEYS_FILE in text
    return parse(text.replace(KEYS_FILE, str(keys())), "gateway.yaml", {"POD_NAME": POD_NAME, **environment})
