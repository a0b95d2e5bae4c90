"""A value that a reload replaces."""

from gateway.config import InForce


def test_a_part_is_replaced_with_the_whole() -> None:
    whole = InForce({"a": 1})
    part = whole.part(lambda value: value["a"])
    whole.replace({"a": 2})
    assert part.value == 2


def test_a_replacement_is_acted_on_when_the_value_is_the_new_one() -> None:
    holder, seen = InForce(1), []
    holder.after_replace(lambda value: seen.append((value, holder.value)))
    holder.replace(2)
    assert seen == [(2, 2)]
