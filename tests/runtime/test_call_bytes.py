import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import InForce, Limits
from gateway.protocol.errors import Busy
from gateway.runtime.call_bytes import CallBytes
from gateway.telemetry.metrics.registry import BudgetStatus
from tests.support.memory import left_by

ADA, BOB = b"ada", b"bob"


def budget(limit: int = 100, share: int = 60) -> CallBytes:
    return CallBytes(InForce(Limits(calls_bytes=limit, calls_bytes_per_principal=share)))


@pytest.mark.parametrize(
    ("taken", "count", "refused"),
    [
        ([], 60, None),
        ([], 61, (429, "limits.calls_bytes_per_principal")),
        ([(ADA, 60)], 1, (429, "limits.calls_bytes_per_principal")),
        ([(BOB, 60)], 40, None),
        ([(BOB, 60)], 41, (503, "(limits.calls_bytes)")),
    ],
)
def test_a_call_that_does_not_fit_is_refused(
    taken: list[tuple[bytes, int]], count: int, refused: tuple[int, str] | None
) -> None:
    calls = budget()
    for who, size in taken:
        _ = calls.take(who, size)
    before = calls.used
    if refused is None:
        assert calls.take(ADA, count).count == count
        assert calls.used == before + count
        return
    with pytest.raises(Busy) as caught:
        _ = calls.take(ADA, count)
    assert (caught.value.status, calls.used) == (refused[0], before)
    assert refused[1] in caught.value.message
    assert int(caught.value.headers["Retry-After"]) > 0


def test_what_has_begun_is_never_refused() -> None:
    calls = budget()
    weight = calls.take(ADA, 10)
    weight.change(1_000)
    continued = calls.take(ADA, 500, is_continued=True)
    assert calls.status() == BudgetStatus(used=1_500, limit=100, given_way=0)
    weight.change(5)
    assert calls.used == 505
    continued.release()
    assert calls.used == 5


def test_a_weight_is_released_once() -> None:
    calls = budget()
    weight = calls.take(ADA, 10)
    for _ in range(2):
        weight.release()
    weight.change(50)
    assert calls.used == 0
    with pytest.raises(KeyError, match="bug"), calls.take(ADA, 10):
        raise KeyError("bug")
    assert calls.used == 0


def test_a_reload_changes_what_new_calls_may_take() -> None:
    limits = InForce(Limits(calls_bytes=100))
    calls = CallBytes(limits)
    first = calls.take(ADA, 25)
    limits.replace(Limits(calls_bytes=40, calls_bytes_per_principal=40))
    with pytest.raises(Busy, match="at most 40 bytes"):
        _ = calls.take(ADA, 16)
    assert calls.take(ADA, 15).count == 15
    assert first.count == 25


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 60)), max_size=60))
def test_the_sums_are_those_of_the_weights(steps: list[tuple[int, int]]) -> None:
    limits = InForce(Limits(calls_bytes_per_principal=1 << 30))
    calls = CallBytes(limits)
    names = [b"%d" % (number % 3) for number in range(5)]
    weights = [calls.take(name, 0) for name in names]
    for which, count in steps:
        if count < 0:
            weights[which].release()
            weights[which] = calls.take(names[which], 0)
        else:
            weights[which].change(count)
        assert calls.used == sum(weight.count for weight in weights)
        sums = {name: sum(w.count for w, of in zip(weights, names, strict=True) if of == name) for name in names}
        for name, size in sums.items():
            limits.replace(Limits(calls_bytes_per_principal=size))
            with pytest.raises(Busy):
                _ = calls.take(name, 1)
            limits.replace(Limits(calls_bytes_per_principal=size + 1))
            calls.take(name, 1).release()


def test_a_caller_without_calls_takes_no_memory() -> None:
    calls = budget()
    assert left_by(lambda: [calls.take(b"%d" % number, 1).release() for number in range(1000)]) < 10_000
