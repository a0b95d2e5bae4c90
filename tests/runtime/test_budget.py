from hypothesis import given
from hypothesis import strategies as st

from gateway.config import InForce
from gateway.runtime.budget import Budget
from gateway.telemetry.metrics.registry import BudgetStatus


class Holder:
    def __init__(self, budget: Budget) -> None:
        self.has_given_way = 0
        self.share = budget.share(self._give_way)

    def _give_way(self) -> None:
        self.has_given_way += 1


def test_the_oldest_holder_gives_way_when_the_budget_is_full() -> None:
    budget = Budget("limits.x", InForce(100))
    first, second, third = (Holder(budget) for _ in range(3))
    first.share.hold(40)
    second.share.hold(60)
    assert not first.has_given_way
    third.share.hold(1)
    assert (first.has_given_way, second.has_given_way, third.has_given_way) == (1, 0, 0)
    assert (budget.used, budget.given_way) == (61, 1)


def test_the_status_has_what_is_used_and_how_many_gave_way() -> None:
    budget = Budget("limits.results_bytes", InForce(10))
    for _ in range(2):
        budget.share(lambda: None).hold(8)
    assert budget.status() == BudgetStatus(used=8, limit=10, given_way=1)


def test_a_holder_that_alone_exceeds_the_budget_gives_way_itself() -> None:
    budget = Budget("limits.x", InForce(100))
    holder = Holder(budget)
    holder.share.hold(101)
    assert holder.has_given_way == 1
    assert budget.used == 0


def test_what_is_released_is_free_for_others_and_never_gives_way() -> None:
    budget = Budget("limits.x", InForce(100))
    empty, first, second, third = (Holder(budget) for _ in range(4))
    empty.share.hold(1)
    empty.share.hold(0)
    first.share.hold(100)
    first.share.release()
    first.share.release()
    first.share.hold(1)
    second.share.hold(100)
    assert not first.has_given_way
    assert not second.has_given_way
    assert budget.used == 100
    third.share.hold(1)
    assert [each.has_given_way for each in (empty, first, second, third)] == [0, 0, 1, 0]


def test_a_lower_limit_holds_from_the_next_bytes_on() -> None:
    limit = InForce(100)
    budget = Budget("limits.x", limit)
    first, second = Holder(budget), Holder(budget)
    first.share.hold(80)
    limit.replace(50)
    assert budget.limit == 50
    assert not first.has_given_way
    second.share.hold(1)
    assert first.has_given_way == 1
    assert budget.used == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 60)), max_size=60))
def test_the_budget_never_holds_more_than_its_limit_nor_loses_count(steps: list[tuple[int, int]]) -> None:
    budget = Budget("limits.x", InForce(100))
    holders = [Holder(budget) for _ in range(5)]
    for which, count in steps:
        holder = holders[which]
        if count < 0:
            holder.share.release()
            holders[which] = Holder(budget)
        else:
            holder.share.hold(count)
        assert budget.used == sum(each.share.used for each in holders if not each.has_given_way)
        assert budget.used <= 100
        assert all(each.has_given_way <= 1 for each in holders)
