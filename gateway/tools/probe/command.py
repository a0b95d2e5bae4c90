"""The command line of `probe`, also called `doctor`: parses arguments, has the report printed, sets the exit code.

0: everything works; 3: it works with limits; 1: it cannot be used, or the configuration is wrong; 2: usage error.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs
from multidict import CIMultiDict

from gateway import __version__
from gateway.config import (
    Config,
    ConfigError,
    Route,
    Timeouts,
    UpstreamTls,
    contexts,
    for_command,
    for_upstream,
    load,
    on_route,
    sendable_header,
)
from gateway.config.parsing.environment import FILE_VARIABLE
from gateway.http.upstream_headers import for_call
from gateway.protocol.errors import GatewayError
from gateway.runtime import event_loop
from gateway.telemetry import configure_logging
from gateway.tools.probe.report.findings import ProbeReport, report
from gateway.tools.probe.report.text import TextReport
from gateway.tools.probe.runner import run_probe
from gateway.tools.probe.steps.context import Subject
from gateway.tools.probe.steps.environment import look_around

_USAGE: Final = 2
_INTERRUPTED: Final = 130
_TERMINATED: Final = 143
_TOKEN_BYTES: Final = 16_384
_LONGEST_SECONDS: Final = 3600.0
_NO_COMMAND: Final = "does not apply to a command: it receives no headers and has no TLS"
_REFUSED: Final[dict[str, dict[str, str]]] = {
    "a URL": {"route": "needs --config", "env": "needs --stdio"},
    "--config": dict.fromkeys(("ca_file", "insecure", "env"), "set it in the configuration file instead"),
    "--stdio": {
        "route": "needs --config",
        **dict.fromkeys(("header", "bearer_file", "ca_file", "insecure"), _NO_COMMAND),
    },
}
"""Options that do not go with what is examined."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both names to a command line."""
    for name, words in (
        ("probe", "check what a legacy server can do behind the gateway, and what prevents it"),
        ("doctor", "the same command as probe, meant for a whole configuration: --config FILE"),
    ):
        parser = commands.add_parser(
            name,
            help=words,
            usage=f"mrtr-gateway {name} (URL | --config FILE | --stdio) [options] [-- COMMAND...]",
            description="Checks step by step what works, what does not, why, and how to fix it. Runs no tool. "
            "Exit codes: 0 everything works, 3 it works with limits, 1 it cannot be used, 2 usage error.",
        )
        _arguments(parser)
        parser.set_defaults(run=run)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", metavar="URL", help="a server's MCP endpoint")
    what = f"check this configuration and every upstream in it (default: ${FILE_VARIABLE})"
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help=what)
    parser.add_argument("--stdio", action="store_true", help="the server is the command after `--`")
    parser.add_argument("--route", metavar="PATH", help="with --config: this route only")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="with --stdio: an environment variable for the command",
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="send this header, as a client of the gateway would",
    )
    for name, help_ in (
        ("--bearer-file", "read a token for `Authorization: Bearer`"),
        ("--ca-file", "trust these certificate authorities (PEM)"),
    ):
        parser.add_argument(name, type=Path, metavar="FILE", help=help_)
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="do not verify the certificate: an attacker on the path can read everything",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "streamable-http", "sse"),
        default="auto",
        help="the transport to use (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="time limit for each step (default: the `timeouts` of the configuration; "
        f"handshake_seconds is {Timeouts().handshake_seconds:g} by default)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= _LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {_LONGEST_SECONDS:g} seconds")
    return value


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    if options.url is None and options.config is None and not options.stdio and FILE_VARIABLE in os.environ:
        options.config = Path(os.environ[FILE_VARIABLE])
    try:
        subjects, config = _subjects(options)
    except (ConfigError, ValueError) as exc:
        print(str(exc).replace("--upstream", "URL"), file=sys.stderr)  # `for_upstream` names the flag of `serve`
        return 1 if isinstance(exc, ConfigError) and options.config is not None else _USAGE
    configure_logging("error", "console")
    text = TextReport(None if options.json else sys.stdout)
    try:
        found = event_loop.run(_report(subjects, config, text))
    except KeyboardInterrupt:
        print("interrupted; all sessions are closed", file=sys.stderr)
        return _INTERRUPTED
    except asyncio.CancelledError:
        print("terminated; all sessions are closed", file=sys.stderr)
        return _TERMINATED
    text.end(found.state)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    return found.exit_code


async def _report(subjects: Sequence[Subject], config: Config | None, text: TextReport) -> ProbeReport:
    task = asyncio.current_task()
    assert task is not None
    # So that the sessions end, as they do after Ctrl-C.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    secrets = [word for subject in subjects for word in subject.secrets]
    checks = () if config is None else tuple((await look_around(config, secrets, text)).checks)
    upstreams = [await run_probe(each, text, route=None if config is None else each.route.path) for each in subjects]
    return report(__version__, checks, tuple(upstreams))


# -- subjects ----------------------------------------------------------------------------------------------------


def _subjects(options: argparse.Namespace) -> tuple[list[Subject], Config | None]:
    """Return the servers to examine, and the configuration if given; raises ConfigError or ValueError."""
    given = {"a URL": options.url is not None, "--config": options.config is not None, "--stdio": options.stdio}
    if sum(given.values()) != 1:
        raise ValueError("give exactly one of: a URL, --config FILE, or --stdio -- COMMAND")
    if options.url is not None and "://" not in options.url and Path(options.url).is_file():
        raise ValueError(f"{options.url} is a file, not a URL; write --config {options.url}")
    source = next(name for name, is_given in given.items() if is_given)
    for name, why in _REFUSED[source].items():
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')}: {why}")
    headers = _headers(options)
    if options.config is not None:
        config = load(options.config)
        routes = [route for route in config.routes if options.route in (None, route.path)]
        if not routes:
            known = ", ".join(route.path for route in config.routes)
            raise ValueError(f"--route: the configuration has no route {options.route}; its routes are {known}")
        return [_subject(config, route, headers, options) for route in routes], config
    if (options.ca_file or options.insecure) and not options.url.startswith("https:"):
        raise ValueError("--ca-file, --insecure: only for an https URL")
    config = for_command(options.command, options.env) if options.stdio else for_upstream(options.url)
    (route,) = config.routes
    # Absolute, because paths in the suggested configuration are relative to its file.
    ca_file = None if options.ca_file is None else str(options.ca_file.absolute())
    tls = UpstreamTls(ca_file=ca_file, verify=not options.insecure)
    # No warm children: the probe starts one at a time.
    upstream = structs.replace(route.upstream, tls=tls, transport=options.transport, warm=0)
    others = tuple(name for name in headers if name != "authorization")
    route = structs.replace(route, upstream=upstream, forward_headers=others)
    return [_subject(structs.replace(config, routes=(route,)), route, headers, options)], None


def _subject(config: Config, route: Route, headers: Mapping[str, str], options: argparse.Namespace) -> Subject:
    there = on_route(config, route)
    if options.timeout is not None:
        names = ("connect_seconds", "handshake_seconds", "answer_seconds", "cancel_seconds")
        there = structs.replace(
            there, timeouts=structs.replace(there.timeouts, **dict.fromkeys(names, options.timeout))
        )
    try:
        tls = contexts(config).upstreams[route.path]
        sent = for_call(route, CIMultiDict(headers))
    except ConfigError as exc:
        if options.config is not None:
            raise
        raise ValueError(str(exc).replace("routes[0].upstream.tls.ca_file", "--ca-file")) from exc
    except GatewayError as exc:
        raise ValueError(exc.message) from exc
    return Subject(route=route, config=there, headers=sent, tls=tls)


def _headers(options: argparse.Namespace) -> dict[str, str]:
    headers = dict(map(_header, options.header))
    if options.bearer_file is None:
        return headers
    if "authorization" in headers:
        raise ValueError("--bearer-file: --header sets Authorization too; use only one of them")
    try:
        with options.bearer_file.open("rb") as file:
            token = file.read(_TOKEN_BYTES).decode().strip()
    except OSError as exc:
        raise ValueError(f"--bearer-file: {options.bearer_file} cannot be read ({exc.strerror})") from exc
    except UnicodeDecodeError as exc:
        raise ValueError(f"--bearer-file: {options.bearer_file} is not a text file") from exc
    _, headers["authorization"] = _header(f"Authorization: Bearer {token}", "--bearer-file")
    return headers


def _header(text: str, option: str = "--header") -> tuple[str, str]:
    """Return the name in lower case, and the value; raises ValueError, which does not repeat the value."""
    name, colon, value = text.partition(":")
    try:
        return sendable_header(name.strip(), value.strip()) if colon else sendable_header("", "")
    except ValueError as exc:
        raise ValueError(f"{option}: {exc}; write it as 'Name: value'") from exc
