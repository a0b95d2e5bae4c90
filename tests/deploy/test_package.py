"""What the wheel and the sdist contain, and that two builds of them are the same."""

import hashlib
import os
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from gateway.plugins.status_page.documents import TITLES
from tests.parts.launch import REPOSITORY
from tests.support.programs import output, verdict


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in a wheel that is built from this folder."""
    (built,) = WheelBuilder(str(REPOSITORY)).build(directory=str(tmp_path_factory.mktemp("dist")))
    with zipfile.ZipFile(Path(built)) as wheel:
        return set(wheel.namelist())


def test_the_wheel_ships_the_marker_of_a_typed_package(shipped: set[str]) -> None:
    assert "gateway/py.typed" in shipped


def test_the_wheel_ships_every_source_file_and_the_style_sheet(shipped: set[str]) -> None:
    folder = REPOSITORY / "gateway"
    needed = {str(path.relative_to(REPOSITORY)) for kind in ("*.py", "*.css") for path in folder.rglob(kind)}
    assert needed <= shipped


def test_the_package_ships_the_pages_that_the_status_page_links_to(shipped: set[str]) -> None:
    assert {f"gateway/docs/{name}" for name in TITLES} <= shipped
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert {f"/docs/{name}" for name in TITLES} <= set(listed["include"])


def test_the_package_names_no_address_that_does_not_exist() -> None:
    """The repository has no public address yet; a placeholder would lead users to a stranger's page."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert not [url for url in project.get("urls", {}).values() if "OWNER" in url or "example" in url]


def build(tree: Path) -> dict[str, str]:
    """Run `scripts/release` in a folder; return the digests of what it built."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    _ = output(sys.executable, tree / "scripts" / "release", "--draft", "--without-image", cwd=tree, env=environment)
    sums = (tree / "dist" / "SHA256SUMS").read_text()
    found = {name: digest for digest, name in re.findall(r"^(\w{64})  (\S+)$", sums, re.MULTILINE)}
    for name, digest in found.items():
        assert hashlib.sha256((tree / "dist" / name).read_bytes()).hexdigest() == digest
    return found


def copied(folder: Path) -> Path:
    """Copy the tracked files, with other time stamps and under another path."""
    listed = output("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=REPOSITORY)
    for name in filter(None, listed.split("\0")):
        source, target = REPOSITORY / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            _ = shutil.copyfile(source, target)
            target.chmod(source.stat().st_mode)
    _ = output("git", "init", "--quiet", cwd=folder)
    return folder


def test_two_builds_of_a_release_are_byte_identical(tmp_path: Path) -> None:
    first, second = (build(copied(tmp_path / name)) for name in ("one", "two"))
    assert first == second
    kinds = sorted(re.sub(r"^mrtr_gateway-[^-]*?(?=-py3|\.tar|\.cdx)", "", name) for name in first)
    assert kinds == ["-py3-none-any.whl", ".cdx.json", ".tar.gz"]


def test_a_release_needs_a_clean_folder(tmp_path: Path) -> None:
    tree = copied(tmp_path / "tree")
    code, said = verdict(sys.executable, tree / "scripts" / "release", cwd=tree)
    assert code == 1
    assert "there are changes that are not committed" in said
    assert not (tree / "dist").exists()


def test_the_sdist_has_the_package_and_no_page_of_another_folder(tmp_path: Path) -> None:
    _ = build(tree := copied(tmp_path / "tree"))
    (built,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in names}
    assert tops <= {
        "gateway",
        "config",
        "docs",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "PKG-INFO",
        "pyproject.toml",
        ".gitignore",
    }
    assert {name for name in names if name.endswith("README.md")} == {"README.md", "docs/README.md"}
    assert "gateway/py.typed" in names


def test_the_package_asks_for_uvloop_only_where_it_exists() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (uvloop,) = (each for each in project["dependencies"] if each.startswith("uvloop"))
    assert "sys_platform != 'win32'" in uvloop
    assert "platform_python_implementation == 'CPython'" in uvloop
