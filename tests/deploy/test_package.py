"""What the wheel contains."""

import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.parts.launch import REPOSITORY


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
