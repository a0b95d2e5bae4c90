"""Every history that once failed, as small as it could be made, is run again."""

from pathlib import Path

import pytest

from tests.simulation.history import History
from tests.simulation.oracle import complaints
from tests.simulation.plan import of_text

STORIES = sorted((Path(__file__).parent / "stories").glob("*.json"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_that_once_went_wrong_goes_well(path: Path) -> None:
    assert complaints(History(of_text(path.read_text())).run()) == []
