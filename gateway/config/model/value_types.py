"""The types of the values in the configuration, with their ranges, and what all sections have in common.

`extra={"form": ...}` names the text form of `gateway/config/parsing/formats.py` that a value must have.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0, le=86_400)]
SomeSeconds = Annotated[float, Meta(ge=0.001, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Bytes = Annotated[int, Meta(ge=1, le=1_073_741_824)]
QuietSeconds = Annotated[float, Meta(ge=0, le=5)]
Rounds = Annotated[int, Meta(ge=0, le=9)]  # clients allow ten rounds, and the last one has the result
LongSeconds = Annotated[float, Meta(ge=60, le=31_536_000)]
PerSecond = Annotated[float, Meta(ge=0.001, le=1_000_000)]

Address = Annotated[str, Meta(extra={"form": "address"})]
Header = Annotated[str, Meta(extra={"form": "header"})]
ReplicaId = Annotated[str, Meta(extra={"form": "replica id"})]
Network = Annotated[str, Meta(extra={"form": "network"})]
Host = Annotated[str, Meta(extra={"form": "host"})]
Origin = Annotated[str, Meta(extra={"form": "origin"})]
Variable = Annotated[str, Meta(extra={"form": "variable"})]
Text = Annotated[str, Meta(min_length=1)]
Secret = Annotated[str, Meta(extra={"secret": True})]
HeaderValue = Annotated[str, Meta(extra={"form": "header value", "secret": True})]
Level = Literal["debug", "info", "warning", "error"]
Era = Literal["auto", "bridge", "mirror"]
Dialect = Literal["sep-1442", "sep-1655", "sep-1685"]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section, whose values are not printed: many are secrets, and some have one in their middle, such as a URL."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"
