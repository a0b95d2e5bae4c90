"""Checks the Dockerfile, its lock files and scripts/image as far as that is possible without a build."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.programs import verdict

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
LOCKS = {name: ROOT / f"{name}.lock" for name in ("requirements", "requirements-build")}
PINNED = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?P<rest>.*)$")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def locked(name: str) -> dict[str, tuple[str, int]]:
    """(version, number of hashes) by package."""
    joined = LOCKS[name].read_text().replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = [(line, PINNED.match(line)) for line in lines]
    assert not [line for line, match in found if match is None], "neither a pinned package nor a comment"
    return {match["name"]: (match["version"], len(HASH.findall(match["rest"]))) for _, match in found if match}


def required(name: str) -> list[Requirement]:
    if name == "requirements":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        lines = [*project["dependencies"], *project["optional-dependencies"]["otel"]]
    else:
        text = (ROOT / "scripts" / "requirements-build.in").read_text()
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_file_satisfies_the_requirements(name: str) -> None:
    pins = locked(name)
    for requirement in required(name):
        assert canonicalize_name(requirement.name) in pins, f"{requirement}: run scripts/lock"
        version, _ = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: run scripts/lock"


def test_the_image_build_uses_the_projects_build_backend() -> None:
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert backend == [str(each) for each in required("requirements-build") if each.name == "hatchling"]


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_pinned_by_hashes_and_none_by_a_url(name: str) -> None:
    assert all(count > 0 for _, count in locked(name).values())
    assert "://" not in LOCKS[name].read_text()
    assert "--index" not in LOCKS[name].read_text()
    assert not re.search(r"(?:^|[\s(])/\w", LOCKS[name].read_text()), "a path of the machine that wrote it"


def test_the_lock_files_cover_several_architectures() -> None:
    """A compiled package has dozens of files; a lock file of one machine's downloads would have one of them."""
    assert all(locked("requirements")[name][1] > 20 for name in ("aiohttp", "cryptography", "msgspec", "uvloop"))


# --- the Dockerfile ---


def test_hadolint_reports_nothing() -> None:
    program = Path(sys.executable).parent / "hadolint"
    assert verdict(program, "--failure-threshold", "style", DOCKERFILE) == (0, "")


def test_the_build_context_contains_only_copied_files() -> None:
    """The first line of .dockerignore excludes everything; the other lines include what the Dockerfile copies."""
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert ignore[0] == "*"
    let_in = {line[1:] for line in ignore if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    assert let_in == {word for words in copied for word in words.split()}
    assert not re.search(r"^ADD ", DOCKERFILE.read_text(), re.MULTILINE)


# --- scripts/image ---


@pytest.fixture
def fake_docker(tmp_path: Path) -> Path:
    """A docker that only records its arguments and its secrets."""
    program = tmp_path / "docker"
    program.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, re, sys\n"
        "here = pathlib.Path(__file__).parent\n"
        "here.joinpath('arguments').write_text('\\n'.join(sys.argv[1:]))\n"
        "for name, path in re.findall(r'id=([^,]+),src=(.+)', '\\n'.join(sys.argv)):\n"
        "    here.joinpath(name).write_bytes(pathlib.Path(path).read_bytes())\n"
    )
    program.chmod(0o755)
    return tmp_path


def image(*arguments: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env = {**own, **environment, "PATH": f"{path}:{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "image", *arguments], capture_output=True, text=True, check=False, env=env
    )


def test_the_build_gets_pips_index_as_a_secret_and_not_as_an_argument(fake_docker: Path) -> None:
    authority = fake_docker / "authority.pem"
    authority.write_text("an authority")
    done = image(
        *("--with", "docker", "name:tag", "--", "--no-cache"),
        path=fake_docker,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="https://ann:secret@packages.example.com/simple",
        PIP_FIND_LINKS="/srv/wheels",
        PIP_EXTRA_INDEX_URL="file:///srv/index https://more.example.com/simple",
        PIP_CERT=str(authority),
    )
    assert (done.returncode, done.stdout) == (0, "built name:tag with docker\n"), done.stderr
    assert (fake_docker / "pip.conf").read_text().splitlines() == [
        "[global]",
        "index-url = https://ann:secret@packages.example.com/simple",
        "extra-index-url = https://more.example.com/simple",
        "cert = /run/mrtr-build/ca.crt",
    ]
    assert (fake_docker / "ca.crt").read_text() == "an authority"
    arguments = (fake_docker / "arguments").read_text()
    assert "secret@" not in arguments
    assert {"--no-cache", "name:tag"} <= set(arguments.split())
    assert re.search(r"^VERSION=\d+\.\d+\.\d+", arguments, re.MULTILINE)


def test_a_failed_build_fails_the_script(fake_docker: Path) -> None:
    (fake_docker / "docker").write_text("#!/bin/sh\nexit 5\n")
    assert image("--with", "docker", path=fake_docker).returncode == 5


@pytest.mark.parametrize("arguments", [("--with", "tar"), ("--with",), ("one", "two")])
def test_bad_usage_is_reported(arguments: tuple[str, ...], fake_docker: Path) -> None:
    done = image(*arguments, path=fake_docker)
    assert done.returncode == 2
    assert "docker, podman, buildah" in done.stderr
