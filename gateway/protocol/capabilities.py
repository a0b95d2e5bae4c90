"""What a client declared that a server may ask it."""

import msgspec


class Capabilities(msgspec.Struct, frozen=True):
    """What this request's client declared that it can be asked."""

    form: bool = False
    url: bool = False
    sampling: bool = False
    sampling_tools: bool = False
    roots: bool = False
