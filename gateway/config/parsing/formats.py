"""The text forms of configuration values: addresses, URLs, header names, networks."""

import re
from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})", re.ASCII)
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?", re.ASCII)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_PATH = re.compile(r"/|(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+", re.ASCII)
_URL_TEXT = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+", re.ASCII)
_HEADER_VALUE = re.compile(r"(?=.{1,8192}\Z)[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?", re.ASCII)
_PORT = re.compile(r"(?:https?://)?[^/?#@]*:([0-9]{1,9})(?:[/?#]|$)", re.ASCII)
_MAX_PORT = 65_535
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_REPLICA_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)

# RFC 9110 section 7.6.1: these headers concern one connection and are never forwarded.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The gateway writes these headers itself, downstream and upstream.
_OWN = frozenset(
    {"accept", "accept-encoding", "authorization", "expect", "forwarded", "host", "last-event-id", "origin", "via"}
)
_OWN_PREFIXES = ("mcp-", "content-", "sec-", "access-control-")


class TextForm(NamedTuple):
    """A text form; errors quote `name` and `example`.

    `parse` returns the normalised text, or None if the text does not fit. It raises ValueError with a
    whole sentence if it can tell more.
    """

    name: str
    example: str
    parse: Callable[[str], str | None]


def split_address(text: str) -> tuple[str, int]:
    """Return (host, port) of `host:port`, IPv6 without its brackets; raises ValueError for anything else."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > _MAX_PORT or not _is_host(match["host"]):
        raise ValueError(f"{text!r} is not host:port")
    return match["host"].strip("[]"), int(match["port"])


def _is_host(host: str) -> bool:
    if not host.startswith("[") and not re.fullmatch(r"[0-9.]+", host):
        return _NAME.fullmatch(host) is not None
    try:
        found = ip_address(host.strip("[]"))
    except ValueError:
        return False
    return isinstance(found, IPv6Address) == host.startswith("[")


def _check_port(text: str) -> None:
    port = _PORT.match(text)
    if port is not None and int(port[1]) > _MAX_PORT:
        raise ValueError(f"has a port over {_MAX_PORT}; correct it")


def _address(text: str) -> str | None:
    _check_port(text)
    try:
        split_address(text)
    except ValueError:
        return None
    return text


def _url(text: str) -> str | None:
    _check_port(text)
    parts = _split(text)
    if parts is None or parts.scheme not in {"http", "https"} or not parts.hostname:
        return None
    if not _is_host(f"[{parts.hostname}]" if "[" in parts.netloc else parts.hostname):
        return None
    if "@" in parts.netloc:
        raise ValueError("contains a user name; remove it: the client's Authorization goes upstream")
    if "#" in text:
        raise ValueError("has a fragment, which is never sent; remove the # and what follows")
    return text


@lru_cache(maxsize=256)
def redacted_url(url: str) -> str:
    """Return the parts of a URL that are never secret: scheme, host, port and path.

    User name, password, query and fragment may be: hosted servers take API keys in the query.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a URL that cannot be read"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _split(text: str) -> SplitResult | None:
    if not _URL_TEXT.fullmatch(text):
        return None
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises if the port is not a number
    except ValueError:
        return None
    return parts


def _origin(text: str) -> str | None:
    _literal(text)
    parts = _split(text)
    if parts is None or not parts.hostname or text != f"{parts.scheme}://{parts.netloc}" or "@" in text:
        return None
    return text.lower()


def _host(text: str) -> str | None:
    return text.lower() if _is_host(text) or _address(text) is not None else None


def _literal(text: str) -> None:
    if "*" in text:
        raise ValueError("has a *, which stands for nothing here; list each one in full")


def _path(text: str) -> str | None:
    _literal(text)
    return text if _PATH.fullmatch(text) and not {".", ".."} & set(text.split("/")) else None


def _header(text: str) -> str | None:
    name = text.lower()
    _literal(name)
    if _TOKEN.fullmatch(name) is None:
        return None
    if name in HOP_BY_HOP:
        raise ValueError("concerns one connection and is never forwarded; remove it")
    if name == "authorization":
        raise ValueError(
            "is the header of routes[].credentials (mode: forward, the default, sends the client's); remove it here"
        )
    if name in _OWN or name.startswith(_OWN_PREFIXES):
        raise ValueError("is written by the gateway itself; remove it")
    return name


def sendable_header(name: str, value: str) -> tuple[str, str]:
    """Return a header given on the command line, its name in lower case; raises ValueError, without the value.

    `Authorization` is allowed: here it is the header that a client would send.
    """
    known = "authorization" if name.lower() == "authorization" else _header(name)
    if known is None:
        raise ValueError("this is not a header name")
    if _HEADER_VALUE.fullmatch(value) is None:
        raise ValueError(f"the value of {known} is not one line of plain text")
    return known, value


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str | None]:
    return lambda text: text if pattern.fullmatch(text) else None


def _network(text: str) -> str | None:
    try:
        return str(ip_network(text))
    except ValueError:
        return None


FORMS = {
    "address": TextForm("host:port", "127.0.0.1:8080", _address),
    "header": TextForm("a header name", "x-tenant", _header),
    "header value": TextForm("one line of plain text for a header", "acme", _matching(_HEADER_VALUE)),
    "host": TextForm("a host name", "gateway.example.com", _host),
    "network": TextForm("an IP network", "10.0.0.0/8", _network),
    "origin": TextForm("an origin", "https://app.example.com", _origin),
    "path": TextForm("a plain absolute path", "/mcp", _path),
    "replica id": TextForm("a replica id", "gw-1", _matching(_REPLICA_ID)),
    "variable": TextForm("a variable name", "API_KEY", _matching(_VARIABLE)),
    "url": TextForm("an http(s) URL", "http://127.0.0.1:9000/mcp", _url),
}
