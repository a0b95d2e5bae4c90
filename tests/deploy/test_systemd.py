"""The unit of deploy/systemd: systemd's own programs judge it, and a real systemd starts, reloads and stops it."""

import configparser
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from gateway.config import Config, load
from tests.parts.launch import REPOSITORY, die_with_parent, free_port
from tests.support.cluster import replaced
from tests.support.configurations import drain_seconds
from tests.support.gateway_process import STATE_KEY
from tests.support.programs import verdict

SYSTEMD: Final = REPOSITORY / "deploy" / "systemd"
UNIT: Final = SYSTEMD / "mrtr-gateway.service"
PROGRAM: Final = "/opt/mrtr-gateway/bin/mrtr-gateway"
EXPOSURE: Final = 15
"""In tenths, of 100. The rest is the network, which the gateway needs; without a sandbox it is 96."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="apt install systemd")


def settings(path: Path = UNIT) -> dict[str, list[str]]:
    """The section [Service]: every value of each key, in order."""
    found: dict[str, list[str]] = {}
    section = path.read_text().partition("[Service]")[2].partition("[Install]")[0]
    for line in section.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def configuration(directory: Path) -> Config:
    """Load gateway.yaml with the credential where systemd would put it."""
    (name, _, _) = settings()["LoadCredential"][0].partition(":")
    (directory / name).write_text(STATE_KEY)
    return load(SYSTEMD / "gateway.yaml", {"CREDENTIALS_DIRECTORY": str(directory)})


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit, with a program that exists here."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace(PROGRAM, shutil.which("true") or "/bin/true"))
    return path


def analyze(*arguments: str | Path) -> tuple[int, str]:
    return verdict("systemd-analyze", "--no-pager", *arguments, env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"})


@needs_systemd
def test_systemd_accepts_the_unit(installed: Path) -> None:
    assert analyze("verify", "--man=no", installed) == (0, "")


@needs_systemd
@pytest.mark.parametrize(("old", "new"), [("ProtectClock=", "ProtectClok="), ("Type=exec", "Type=exac")])
def test_systemd_rejects_a_wrong_unit(installed: Path, old: str, new: str) -> None:
    """systemd ignores unknown settings with exit code 0, so the output counts."""
    installed.write_text(installed.read_text().replace(old, new))
    assert new.strip("=").rpartition("=")[2] in analyze("verify", "--man=no", installed)[1]


@needs_systemd
def test_systemd_accepts_the_unit_with_the_drop_in_for_stdio(installed: Path) -> None:
    addition = installed.parent / f"{UNIT.name}.d"
    addition.mkdir()
    shutil.copy(SYSTEMD / "stdio.conf", addition)
    assert analyze("verify", "--man=no", installed) == (0, "")


@needs_systemd
def test_the_service_is_sandboxed(installed: Path) -> None:
    offline = ("security", "--offline=true")
    assert analyze(*offline, f"--threshold={EXPOSURE}", installed)[0] == 0
    installed.write_text(
        re.sub(r"^(Protect|Private|Restrict|SystemCall|Capab)\w+=.*\n", "", UNIT.read_text(), flags=re.MULTILINE)
    )
    assert analyze(*offline, f"--threshold={EXPOSURE}", installed)[0] != 0


def test_the_configuration_loads_with_the_key_from_the_credential(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    assert config.state.raw_keys() == (bytes.fromhex(STATE_KEY),)


def test_systemd_waits_longer_than_a_drain_takes(tmp_path: Path) -> None:
    (patience,) = settings()["TimeoutStopSec"]
    assert int(patience) > drain_seconds(configuration(tmp_path))
    assert settings()["KillMode"] == ["mixed"]


def test_the_limit_of_open_files_covers_the_caps(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    (files,) = settings()["LimitNOFILE"]
    assert int(files) > 2 * config.hold.max_calls + config.limits.connections


def test_the_drop_in_for_stdio_only_loosens_the_settings_that_it_names() -> None:
    parser = configparser.ConfigParser(strict=False)
    parser.read_string((SYSTEMD / "stdio.conf").read_text())
    assert {key.lower() for key in parser["Service"]} == {
        "cachedirectory",
        "environment",
        "memorydenywriteexecute",
        "systemcallfilter",
    }


# --- a real systemd ---

BOOT: Final = """
set -eu
mount --make-rprivate / && mount --make-rshared /
for folder in /run /opt /etc/systemd/system /lib/systemd/system-generators; do mount -t tmpfs tmpfs $folder; done
if [ -d /sys/fs/cgroup/systemd ] && ! mountpoint -q /sys/fs/cgroup/systemd; then
  mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
fi
mkdir -p /opt/mrtr-gateway/bin /opt/mrtr-gateway/etc && mount --bind {here}/etc /opt/mrtr-gateway/etc
printf '#!/bin/sh\\nexec {python} -m gateway "$@"\\n' > {program} && chmod 755 {program}
cp -r {here}/units/. /etc/systemd/system/
container=docker exec /lib/systemd/systemd --system --unit=nothing.target --show-status=no
"""
"""A systemd of its own with nothing to start; the unit's paths exist only in its namespaces."""

NOTHING: Final = "[Unit]\nDefaultDependencies=no\n"
ADDITION: Final = """
[Unit]
DefaultDependencies=no
[Service]
# The program of the tests; an installed one is in /opt.
ProtectHome=tmpfs
BindReadOnlyPaths={seen}
Environment=PYTHONPATH={repository}
LimitNOFILE={files}
StandardError=append:{here}/stderr
"""


def can_boot() -> bool:
    """Whether this machine allows mount namespaces."""
    if os.geteuid() != 0 or not Path("/lib/systemd/systemd").exists():
        return False
    tried = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "mount", "-t", "tmpfs", "tmpfs", "/opt"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


class Systemd:
    """A running systemd that has the unit."""

    def __init__(self, here: Path, pid: int, admin: str) -> None:
        self.here = here
        self.pid = pid
        self.admin = admin

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command where this systemd is process 1."""
        return subprocess.run(
            ["nsenter", "--target", str(self.pid), "--mount", "--pid", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def ctl(self, *words: str) -> int:
        return self.inside("systemctl", *words).returncode

    def show(self, name: str) -> str:
        return self.inside("systemctl", "show", "--value", "--property", name, UNIT.name).stdout.strip()

    def events(self) -> list[str]:
        path = self.here / "stderr"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["event"] for line in lines if line.startswith("{")]

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            told = [path.read_text() for path in (self.here / "boot.log", self.here / "stderr") if path.exists()]
            assert time.monotonic() < deadline, f"not in {seconds} s: {what}; {told}"
            time.sleep(0.05)

    def ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{self.admin}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
        return False


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    tmp_path.chmod(0o755)
    units, etc = tmp_path / "units", tmp_path / "etc"
    addition = units / f"{UNIT.name}.d"
    addition.mkdir(parents=True)
    etc.mkdir()
    (units / UNIT.name).write_text(UNIT.read_text().replace("/etc/mrtr-gateway", "/opt/mrtr-gateway/etc"))
    (units / "nothing.target").write_text(NOTHING)
    seen = f"{REPOSITORY} {sys.base_prefix}"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    (addition / "test.conf").write_text(ADDITION.format(seen=seen, repository=REPOSITORY, files=files, here=tmp_path))
    (etc / "state-keys").write_text(STATE_KEY)
    (etc / "state-keys").chmod(0o600)
    listen, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    text = replaced((SYSTEMD / "gateway.yaml").read_text(), "127.0.0.1:8080", listen)
    (etc / "gateway.yaml").write_text(replaced(text, "127.0.0.1:9464", admin))
    boot = BOOT.format(here=tmp_path, python=sys.executable, program=PROGRAM)
    with (tmp_path / "boot.log").open("wb") as log:
        namespaces = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
        outer = subprocess.Popen(
            [*namespaces, "sh", "-c", boot],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread has been started
        )
    try:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        found = Systemd(tmp_path, 0, admin)
        found.until(lambda: bool(children.read_text().strip()), "unshare has a child")
        found.pid = int(children.read_text())
        found.until(lambda: found.ctl("list-units") == 0, "systemd answers")
        yield found
    finally:
        outer.kill()
        outer.wait()


@pytest.mark.skipif(not can_boot(), reason="needs systemd, and root that may mount")
def test_a_real_systemd_starts_reloads_and_stops_the_gateway(systemd: Systemd) -> None:
    assert systemd.ctl("start", UNIT.name) == 0
    systemd.until(systemd.ready, "the gateway is ready behind its walls")
    pid = systemd.show("MainPID")
    status = dict(line.split(":\t", 1) for line in systemd.inside("cat", f"/proc/{pid}/status").stdout.splitlines())
    assert "0" not in status["Uid"].split()
    assert (status["NoNewPrivs"], status["Seccomp"], int(status["CapEff"], 16)) == ("1", "2", 0)

    assert systemd.ctl("reload", UNIT.name) == 0
    systemd.until(lambda: "config.loaded" in systemd.events(), "the file was read again")
    file = systemd.here / "etc" / "gateway.yaml"
    good = file.read_text()
    file.write_text(good + "nonsense: 1\n")
    assert systemd.ctl("reload", UNIT.name) != 0
    file.write_text(good)
    assert (systemd.show("MainPID"), systemd.show("NRestarts")) == (pid, "0")
    assert "config.rejected" not in systemd.events(), "a bad file is refused before the gateway hears of it"

    assert systemd.ctl("stop", UNIT.name) == 0
    assert systemd.events()[-2:] == ["server.draining", "server.stopped"]
    assert (systemd.show("Result"), systemd.show("ExecMainStatus")) == ("success", "0")
