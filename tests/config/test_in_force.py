"""A value that a reload replaces: whole or not at all."""

import pytest

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


def test_if_one_preparation_fails_nothing_is_replaced() -> None:
    holder, done = InForce(1), []

    def refuse(value: int) -> None:
        raise ValueError(value)

    holder.before_replace(lambda value: lambda: done.append(value))
    holder.before_replace(refuse)  # type: ignore[arg-type]
    holder.after_replace(done.append)
    with pytest.raises(ValueError, match="2"):
        holder.replace(2)
    assert (holder.value, done) == (1, [])


def test_what_was_prepared_is_taken_over_before_others_act() -> None:
    holder, done = InForce(1), []
    holder.after_replace(lambda _: done.append("act"))
    holder.before_replace(lambda _: lambda: done.append("commit"))
    holder.replace(2)
    assert done == ["commit", "act"]
