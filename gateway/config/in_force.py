"""Holds a value that a reload replaces.

Whatever lives longer than one configuration is given the holder and reads `value` when it needs it. An object that
has to act on a reload registers for it in its constructor.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")
Commit = Callable[[], None]


class InForce(Generic[T]):
    """A value that holds until it is replaced."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._preparations: list[Callable[[T], Commit]] = []
        self._actions: list[Callable[[T], None]] = []

    def before_replace(self, prepare: Callable[[T], Commit]) -> None:
        """Have `prepare` do everything that can fail; the function that it returns is called after the replacement."""
        self._preparations.append(prepare)

    def after_replace(self, act: Callable[[T], None]) -> None:
        """Have `act` called with each new value; it must not fail."""
        self._actions.append(act)

    def part(self, of: Callable[[T], U]) -> "InForce[U]":
        """Return a holder of a part of the value, which is replaced with the whole."""
        part = InForce(of(self.value))
        self.after_replace(lambda value: part.replace(of(value)))
        return part

    def replace(self, value: T) -> None:
        """Replace the value; if a preparation raises, this raises the same and nothing is replaced."""
        commits = [prepare(value) for prepare in self._preparations]
        self.value = value
        for commit in commits:
            commit()
        for act in self._actions:
            act(value)
