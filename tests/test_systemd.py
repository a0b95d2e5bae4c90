"""The unit of deploy/systemd: systemd's own programs judge it, and a real gateway gets what it sends."""

import asyncio
import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from gateway.config import Config, load
from tests.gateway_process import STATE_KEY, gateway
from tests.kube import drain_seconds
from tests.parts.launch import REPOSITORY

SYSTEMD: Final = REPOSITORY / "deploy" / "systemd"
UNIT: Final = SYSTEMD / "mrtr-gateway.service"
PROGRAM: Final = "/opt/mrtr-gateway/bin/mrtr-gateway"
EXPOSURE: Final = 15
"""In tenths, of 100. What is left is that it needs the network; without any wall it is 96."""

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
    """The unit with a program that is there."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace(PROGRAM, shutil.which("true") or "/bin/true"))
    return path


def analyze(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    return done.returncode, done.stdout + done.stderr


@needs_systemd
def test_systemd_accepts_the_unit(installed: Path) -> None:
    assert analyze("verify", "--man=no", installed) == (0, "")


@needs_systemd
@pytest.mark.parametrize(("old", "new"), [("ProtectClock=", "ProtectClok="), ("Type=exec", "Type=exac")])
def test_systemd_says_when_the_unit_is_wrong(installed: Path, old: str, new: str) -> None:
    """It ignores what it does not know, with exit code 0: so the output counts."""
    installed.write_text(installed.read_text().replace(old, new))
    assert new.strip("=").rpartition("=")[2] in analyze("verify", "--man=no", installed)[1]


@needs_systemd
def test_systemd_accepts_the_unit_with_the_addition_for_children(installed: Path) -> None:
    addition = installed.parent / f"{UNIT.name}.d"
    addition.mkdir()
    shutil.copy(SYSTEMD / "stdio.conf", addition)
    assert analyze("verify", "--man=no", installed) == (0, "")


@needs_systemd
def test_the_service_has_walls_around_it(installed: Path) -> None:
    offline = ("security", "--offline=true")
    assert analyze(*offline, f"--threshold={EXPOSURE}", installed)[0] == 0
    installed.write_text(
        re.sub(r"^(Protect|Private|Restrict|SystemCall|Capab)\w+=.*\n", "", UNIT.read_text(), flags=re.MULTILINE)
    )
    assert analyze(*offline, f"--threshold={EXPOSURE}", installed)[0] != 0


def test_its_configuration_loads_and_has_the_key_from_the_credential(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    assert config.state.raw_keys() == (bytes.fromhex(STATE_KEY),)


def test_systemd_waits_longer_than_a_drain_takes(tmp_path: Path) -> None:
    (patience,) = settings()["TimeoutStopSec"]
    assert int(patience) > drain_seconds(configuration(tmp_path))
    assert settings()["KillMode"] == ["mixed"]


def test_there_are_descriptors_for_what_may_be_held(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    (files,) = settings()["LimitNOFILE"]
    assert int(files) > 2 * config.hold.max_calls + config.limits.connections


def commands(key: str, config: Path, pid: int) -> list[list[str]]:
    """The unit's own commands, for this program, this file and this process."""
    found = []
    for line in settings()[key]:
        words = shlex.split(line.replace("$MAINPID", str(pid)).replace("/etc/mrtr-gateway/gateway.yaml", str(config)))
        found.append([sys.executable, "-m", "gateway", *words[1:]] if words[0] == PROGRAM else words)
    return found


def do(command: list[str]) -> int:
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False).returncode


async def test_a_reload_is_heard_and_a_bad_file_is_refused_before() -> None:
    """systemd stops at the first command that fails, and `systemctl reload` fails with it."""
    async with gateway("http://127.0.0.1:9/mcp") as gw:
        assert gw.process is not None
        config = gw.directory / "gateway.yaml"
        check, hang_up = commands("ExecReload", config, gw.process.pid)
        assert await asyncio.to_thread(do, check) == 0
        assert do(hang_up) == 0

        async def loaded_again() -> bool:
            return len(gw.log("config.loaded")) > 0

        await gw.until(loaded_again, "read its file again")
        good = config.read_text()
        gw.write("routes: []")
        assert await asyncio.to_thread(do, check) != 0
        gw.write(good)


def test_what_it_starts_is_a_command_of_the_program() -> None:
    (command,) = commands("ExecStart", SYSTEMD / "gateway.yaml", 0)
    assert command[3:] == ["serve", "--config", str(SYSTEMD / "gateway.yaml")]


def test_the_addition_for_children_only_opens_what_it_names() -> None:
    parser = configparser.ConfigParser(strict=False)
    parser.read_string((SYSTEMD / "stdio.conf").read_text())
    assert {key.lower() for key in parser["Service"]} == {"cachedirectory", "environment", "memorydenywriteexecute"}
