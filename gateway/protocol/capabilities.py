"""The client capabilities that decide which questions a server may ask."""

import msgspec


class Capabilities(msgspec.Struct, frozen=True):
    """The kinds of questions that the client of one request declared it can answer."""

    form: bool = False
    url: bool = False
    sampling: bool = False
    sampling_tools: bool = False
    roots: bool = False
