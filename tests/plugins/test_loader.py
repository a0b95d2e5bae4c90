"""Plug-ins: loaded only by a configuration that asks for them, and the core does without them."""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from gateway.plugins import loader
from gateway.plugins.loader import PluginMissing, find, plugin

FOLDERS = {path.parent.name for path in Path(loader.__file__).parent.glob("*/__init__.py")}
STARTED = """
import asyncio, sys
from gateway.config import parse
from gateway.server.process import Gateway

async def start():
    gateway = Gateway(parse(sys.argv[1], "test", {}))
    await gateway.start()
    await gateway.close()

asyncio.run(start())
print(*sorted({name.split(".")[2] for name in sys.modules if name.startswith("gateway.plugins.")} - {"loader"}))
"""
CHILD = "{upstream: {command: [cat]}, dialects: [%s]}"
URL = "{upstream: {url: 'http://127.0.0.1:9/mcp'}}"


def test_each_folder_of_plugins_is_an_entry_point() -> None:
    points = distribution("mrtr-gateway").entry_points.select(group=loader._GROUP)
    assert {point.name.replace("-", "_") for point in points} == FOLDERS
    assert all(plugin(point.name) is point.load() for point in points)


def test_the_error_about_a_missing_one_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginMissing, match=r"the plug-in none is missing.*pip install mrtr-gateway"):
        plugin("none")
    monkeypatch.setattr(loader, "_PACKAGE", "mrtr-gateway-that-nobody-installed")
    assert find("none") is None


def test_another_package_cannot_bring_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "foreign-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{loader._GROUP}]\nforeign = json\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(distribution("foreign").entry_points.names) == ["foreign"]
    assert find("foreign") is None


@pytest.mark.parametrize(
    ("configuration", "loaded"),
    [
        (f"{{listen: '127.0.0.1:0', admin: null, routes: [{CHILD % 'sep-1655'}]}}", ""),
        (f"{{listen: '127.0.0.1:0', admin: null, routes: [{CHILD % 'sep-1442'}]}}", "sep_1442"),
        (f"{{listen: '127.0.0.1:0', admin: null, routes: [{URL}]}}", "oauth"),
        (f"{{listen: '127.0.0.1:0', admin: '127.0.0.1:0', routes: [{CHILD % ''}]}}", "status_page"),
        (f"{{listen: '127.0.0.1:0', admin: null, traces: true, routes: [{CHILD % ''}]}}", "otel"),
    ],
    ids=["none", "sep-1442", "oauth", "status page", "otel"],
)
def test_a_gateway_loads_those_that_its_configuration_asks_for(configuration: str, loaded: str) -> None:
    done = subprocess.run([sys.executable, "-c", STARTED, configuration], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == loaded, done.stderr


WITHOUT = """
import sys
from gateway.__main__ import main
from gateway.plugins import loader

loader._GROUP = "no plug-ins"
sys.exit(main(["serve", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("configuration", "missing"),
    [
        (f"{{listen: '127.0.0.1:1', admin: null, workers: 2, routes: [{CHILD % ''}]}}", "workers"),
        (f"{{listen: '127.0.0.1:0', admin: null, routes: [{CHILD % 'sep-1442'}]}}", "sep-1442"),
    ],
    ids=["workers", "sep-1442"],
)
def test_an_operator_whose_configuration_needs_a_missing_one_gets_a_sentence(
    configuration: str, missing: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(configuration)
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(f"the plug-in {missing} is missing; `pip install mrtr-gateway` brings it\n")
    assert "Traceback" not in done.stderr


def test_the_stories_are_the_same_without_any() -> None:
    command = ("-m", "pytest", "-q", "-x", "-p", "tests.support.without_plugins", "-p", "no:cacheprovider")
    done = subprocess.run([sys.executable, *command, "tests/stories"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
