"""Every history that once failed, as small as it could be made, is run again."""

from pathlib import Path

import pytest

from tests.simulation.history import History, Outcome
from tests.simulation.oracle import complaints
from tests.simulation.plan import of_text

STORIES = sorted((Path(__file__).parent / "stories").glob("*.json"))


def story(name: str) -> Outcome:
    """What becomes of the history in a file of `stories/`."""
    return History(of_text((Path(__file__).parent / "stories" / f"{name}.json").read_text())).run()


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_that_once_went_wrong_goes_well(path: Path) -> None:
    assert complaints(story(path.stem)) == []
