"""Tells whether aiohttp parses HTTP with its C parser."""

from aiohttp import http_parser


def parser_caution(parser: type = http_parser.HttpRequestParser) -> str | None:
    """Return a warning if requests are parsed in Python.

    Two parsers that read a malformed request differently are what request smuggling needs, and the gateway's tests run
    against the C parser.
    """
    if parser is not http_parser.HttpRequestParserPy:
        return None
    return (
        "aiohttp parses HTTP in Python: it was installed without its C parser, or AIOHTTP_NO_EXTENSIONS is set; the "
        "gateway's tests against request smuggling run with the C parser, which is also several times faster; "
        "install aiohttp from its wheel, and unset the variable"
    )
