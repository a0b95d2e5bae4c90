"""What makes a run of many histories fail, beside a history that went wrong."""

import pytest

from tests.simulation import campaign, coverage


@pytest.mark.parametrize(("count", "lacks", "fails"), [(10_000, 1, True), (10_000, 0, False), (9_999, 1, False)])
def test_a_row_that_ten_thousand_histories_never_meet_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    lacks: int,
    fails: bool,  # noqa: FBT001
) -> None:
    met = coverage.Met()
    met.rows.update(coverage.all_rows()[lacks:])
    monkeypatch.setattr(campaign, "_results", lambda *_: [([], met)])
    assert bool(campaign.many(0, count, 1)) is fails
