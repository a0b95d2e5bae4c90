"""A deadline for one wait of a task, like asyncio.timeout, on a coarse timer: no timer of its own."""

import asyncio
from typing import Self

from gateway.runtime.coarse_timer import CoarseTimer


class CoarseTimeout:
    """A context manager that cancels its task when the timer rings, and raises TimeoutError for that."""

    __slots__ = ("_before", "_is_expired", "_task", "_timer")

    def __init__(self, timer: CoarseTimer) -> None:
        self._timer = timer
        self._is_expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "only a task can be cancelled"
        self._task = task
        self._before = task.cancelling()  # a deadline around this one may have passed already
        self._timer.arm(self, self._expire)
        return self

    def __exit__(self, kind: object, exc: BaseException | None, _traceback: object) -> None:
        self._timer.disarm(self)
        # The task may also be cancelled by another: then it stays cancelled.
        if self._is_expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from exc

    def _expire(self) -> None:
        self._is_expired = True
        _ = self._task.cancel()
