"""What all sections of the configuration have in common: they are frozen and strict, and print no values."""

from msgspec import Struct


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section. Many values are secrets, and some have one in their middle, such as a URL."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"
