"""Runs `mrtr-gateway health`, the health check of a container: asks the gateway on this machine whether it is alive.

It runs every few seconds, so it imports nothing of the gateway: that would take ten times as long. By default it asks
/healthz, which succeeds while the gateway drains: killing a draining container would lose the calls it waits for.
Exit codes: 0 (healthy), 1 (unhealthy or unknown), 2 (usage error).
"""

import argparse
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

_DEFAULT: Final = "127.0.0.1:9464"
"""The default of `admin` in the configuration; a test compares them."""
_FILE_VARIABLE: Final = "GATEWAY_CONFIG"
"""As in `gateway.config`; a test compares them."""
_TIMEOUT_SECONDS: Final = 3.0
_MAX_TIMEOUT_SECONDS: Final = 60.0
_MAX_FILE_BYTES: Final = 1_048_576
_MAX_REPLY_BYTES: Final = 4_096
_SHOWN_CHARACTERS: Final = 100
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_ADDRESS: Final = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[\w.-]+)):(?P<port>[0-9]{1,5})", re.ASCII)
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  (compared, not bound)


class Unwell(Exception):
    """Why the gateway is unhealthy, and what to check."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser("mrtr-gateway health", description="Check whether the gateway is alive.")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    what = f"the gateway's configuration, for its `admin` (default: ${_FILE_VARIABLE})"
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help=what)
    parser.add_argument(
        "--admin", metavar="HOST:PORT", help=f"admin address; default: GATEWAY_ADMIN, the file's, or {_DEFAULT}"
    )
    parser.add_argument("--ready", action="store_true", help="ask /readyz: it fails while the gateway drains")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="time limit for the answer (default: %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    """Ask; return the exit code."""
    path = "/readyz" if options.ready else "/healthz"
    try:
        address, source = whereabouts(options.admin, options.config, os.environ)
        said = _ask(address, source, path, options.timeout)
    except Unwell as exc:
        print(f"not healthy: {exc}", file=sys.stderr)
        return 1
    print(f"healthy: {path} says {said}")
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and {_MAX_TIMEOUT_SECONDS:g} seconds")
    return seconds


# --- where to ask ---


def whereabouts(flag: str | None, file: Path | None, env: Mapping[str, str]) -> tuple[str, str]:
    """Return (host:port, its source), with the same precedence as in the gateway."""
    if flag is not None:
        return flag, "--admin"
    if "GATEWAY_ADMIN" in env:
        return env["GATEWAY_ADMIN"], "GATEWAY_ADMIN"
    if file is None and _FILE_VARIABLE not in env:
        return _DEFAULT, "the default"
    file = file or Path(env[_FILE_VARIABLE])
    try:
        with file.open("rb") as opened:
            tree = yaml.load(opened.read(_MAX_FILE_BYTES), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
        found = tree.get("admin", _DEFAULT)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, AttributeError):
        # The gateway runs with what it read at start: a file that was damaged since does not make it unhealthy.
        return _DEFAULT, f"the default, because {file} cannot be read"
    if found is None:
        raise Unwell(f"admin is null in {file}, so there is no listener to ask; set admin in the configuration")
    return _VARIABLE.sub(lambda match: env.get(match[1]) or match[2] or "", str(found)), f"admin of {file}"


# --- asking ---


def _ask(address: str, source: str, path: str, seconds: float) -> str:
    """Return the body of `GET path`; raises Unwell unless the status is 200, in time."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) <= 65_535:
        raise Unwell(f"{address[:_SHOWN_CHARACTERS]!r} ({source}) is not an address; use the form {_DEFAULT}")
    host = match["six"] or match["host"]
    host = _ANY.get(host, host)  # loopback if the gateway listens on all addresses
    place = f"{address} ({source})"
    deadline = time.monotonic() + seconds
    try:
        with socket.create_connection((host, int(match["port"])), timeout=seconds) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            reply = _read(connection, deadline)
    except TimeoutError as exc:
        raise Unwell(f"no answer from {place} in {seconds:g} s; the gateway hangs, or --timeout is too short") from exc
    except OSError as exc:
        raise Unwell(
            f"no connection to {place}: {exc.strerror or exc}; check that it runs, and that this is its `admin`"
        ) from exc
    head, _, body = reply.partition(b"\r\n\r\n")
    status = head.split(b"\r\n")[0].split(b" ")
    if len(status) < 2 or not status[0].startswith(b"HTTP/1."):
        raise Unwell(f"the answer at {place} is not from an admin listener; pass the gateway's with --admin")
    text = body.decode(errors="replace").strip()
    said = "".join(letter if letter.isprintable() else "?" for letter in text)[:_SHOWN_CHARACTERS]
    if status[1] != b"200":
        raise Unwell(f"{path} at {place} says {status[1][:3].decode(errors='replace')} {said}")
    return said


def _read(connection: socket.socket, deadline: float) -> bytes:
    """Read the reply to its end, or up to its maximum size."""
    reply = b""
    while len(reply) < _MAX_REPLY_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        piece = connection.recv(_MAX_REPLY_BYTES - len(reply))
        if not piece:
            break
        reply += piece
    return reply
