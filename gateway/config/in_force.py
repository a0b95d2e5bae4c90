"""Holds a value that a reload replaces.

Whatever lives longer than one configuration is given the holder and reads `value` when it needs it. An object that
has to act on a reload registers for it in its constructor.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class InForce(Generic[T]):
    """A value that holds until it is replaced."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._actions: list[Callable[[T], None]] = []

    def after_replace(self, act: Callable[[T], None]) -> None:
        """Have `act` called with each new value; it must not fail."""
        self._actions.append(act)

    def part(self, of: Callable[[T], U]) -> "InForce[U]":
        """Return a holder of a part of the value, which is replaced with the whole."""
        part = InForce(of(self.value))
        self.after_replace(lambda value: part.replace(of(value)))
        return part

    def replace(self, value: T) -> None:
        """Replace the value, and have everything act on it."""
        self.value = value
        for act in self._actions:
            act(value)
