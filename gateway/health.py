"""`mrtr-gateway health`: asks the gateway on this machine whether it is alive; for the health check of a container.

It runs every few seconds beside the gateway, so it imports nothing of it: that would take ten times as long. It asks
/healthz by default, which is well while the gateway drains: a container that is ended because it drains loses the
calls that it waits for. Exit codes: 0 (well), 1 (not, or nobody knows), 2 (bad usage).
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

_DEFAULT: Final = "127.0.0.1:9090"
"""`admin` of gateway/config/model.py; a test says so."""
_TIMEOUT_SECONDS: Final = 3.0
_MAX_TIMEOUT_SECONDS: Final = 60.0
_MAX_FILE_BYTES: Final = 1_048_576
_MAX_REPLY_BYTES: Final = 4_096
_SHOWN_CHARACTERS: Final = 100
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_ADDRESS: Final = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[\w.-]+)):(?P<port>[0-9]{1,5})", re.ASCII)
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  (asked, not bound)


class Unwell(Exception):
    """Why the gateway cannot be called well, with what to look at."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser("mrtr-gateway health", description="Ask whether the gateway is alive.")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the gateway's configuration: its `admin` is asked"
    )
    parser.add_argument("--admin", metavar="HOST:PORT", help=f"ask there; else GATEWAY_ADMIN, the file, or {_DEFAULT}")
    parser.add_argument("--ready", action="store_true", help="ask /readyz: should new calls come? No, while it drains")
    parser.add_argument("--timeout", type=_seconds, default=_TIMEOUT_SECONDS, metavar="SECONDS", help="for the answer")
    options = parser.parse_args(arguments)
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
        raise argparse.ArgumentTypeError(f"{text!r} is no time of up to {_MAX_TIMEOUT_SECONDS:g} seconds")
    return seconds


# --- where to ask ---


def whereabouts(flag: str | None, file: Path | None, env: Mapping[str, str]) -> tuple[str, str]:
    """(host:port, where that is from): what was given first in the order in which the gateway itself takes it."""
    if flag is not None:
        return flag, "--admin"
    if "GATEWAY_ADMIN" in env:
        return env["GATEWAY_ADMIN"], "GATEWAY_ADMIN"
    if file is None:
        return _DEFAULT, "the default"
    try:
        with file.open("rb") as opened:
            tree = yaml.load(opened.read(_MAX_FILE_BYTES), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
        found = tree.get("admin", _DEFAULT)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, AttributeError):
        # The gateway runs by what it read at its start. A file that was spoilt since is no reason to end it.
        return _DEFAULT, f"the default, for {file} cannot be read"
    if found is None:
        raise Unwell(f"admin is null in {file}, so there is nobody to ask; give the gateway an admin address")
    return _VARIABLE.sub(lambda match: env.get(match[1]) or match[2] or "", str(found)), f"admin of {file}"


def _endpoint(address: str, source: str) -> tuple[str, int]:
    """(host, port) to connect to; loopback where the gateway listens everywhere."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) <= 65_535:
        raise Unwell(f"{address[:_SHOWN_CHARACTERS]!r} ({source}) is no address; write it as {_DEFAULT}")
    host = match["six"] or match["host"]
    return _ANY.get(host, host), int(match["port"])


# --- asking ---


def _ask(address: str, source: str, path: str, seconds: float) -> str:
    """What the gateway says to `GET path`; raises Unwell unless that is 200, in time."""
    place = f"{address} ({source})"
    endpoint = _endpoint(address, source)
    deadline = time.monotonic() + seconds
    try:
        with socket.create_connection(endpoint, timeout=seconds) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            reply = _read(connection, deadline)
    except TimeoutError as exc:
        raise Unwell(f"no answer from {place} in {seconds:g} s; it hangs, or --timeout is too short") from exc
    except OSError as exc:
        raise Unwell(
            f"nobody answers at {place}: {exc.strerror or exc}; does it run, and is that its `admin`?"
        ) from exc
    head, _, body = reply.partition(b"\r\n\r\n")
    status = head.split(b"\r\n")[0].split(b" ")
    if len(status) < 2 or not status[0].startswith(b"HTTP/1."):
        raise Unwell(f"what answers at {place} is no admin listener; name the gateway's with --admin")
    text = body.decode(errors="replace").strip()
    said = "".join(letter if letter.isprintable() else "?" for letter in text)[:_SHOWN_CHARACTERS]
    if status[1] != b"200":
        raise Unwell(f"{path} at {place} says {status[1][:3].decode(errors='replace')} {said}")
    return said


def _read(connection: socket.socket, deadline: float) -> bytes:
    """The reply to its end, or as much of it as anybody may say."""
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
