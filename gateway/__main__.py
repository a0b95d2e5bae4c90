"""The command line: argv to configuration to gateway.

Exit codes: 0 (fine), 1 (bad configuration), 2 (bad usage); `probe` has 3 (it works with limits) beside them.
"""

import argparse
import base64
import secrets
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import uvloop

from gateway import __version__, health
from gateway.config import Config, ConfigError, Level, cautions, for_command, for_upstream, load, with_log_level
from gateway.demo import run as demo
from gateway.net import app, workers
from gateway.net.child import not_here
from gateway.probe import command as probe
from gateway.telemetry import TracesUnavailable, check_traces, configure_logging

_KEY_BYTES = 32


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["demo"]:
        return demo.run(arguments[1:])
    if arguments[:1] == ["health"]:
        return health.main(arguments[1:])
    arguments, command = _split(arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    options.command = command
    if bool(command) != getattr(options, "stdio", False):
        parser.error("--stdio and a command go together: --stdio -- npx some-server")
    code: int = options.run(options)
    return code


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before `--` is ours, what stands behind it is somebody else's command."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mrtr-gateway", description="Makes an old MCP server a modern, stateless one.")
    parser.add_argument("--version", action="version", version=f"mrtr-gateway {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="run the gateway",
        usage="%(prog)s (--config FILE | --upstream URL | --stdio) [options] [-- COMMAND...]",
    )
    source = serve.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="a YAML configuration")
    source.add_argument("--upstream", metavar="URL", help="one old server, served at /mcp with defaults")
    source.add_argument("--stdio", action="store_true", help="one old server, the command behind `--`, as a child")
    serve.add_argument("--listen", metavar="HOST:PORT", help="without --config: where clients connect")
    serve.add_argument("--admin", metavar="HOST:PORT", help="without --config: where /metrics and /readyz are")
    serve.add_argument(
        "--log-level", choices=get_args(Level), help="beats log.level of the configuration, also after a reload"
    )
    serve.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="with --stdio: a variable of the command, else of its own environment",
    )
    serve.set_defaults(run=_serve)
    check = commands.add_parser("check", help="check a configuration and exit")
    check.add_argument("--config", type=Path, metavar="FILE", required=True)
    check.set_defaults(run=_check)
    probe.add(commands)
    commands.add_parser("health", help="is the gateway on this machine alive? For health checks", add_help=False)
    keygen = commands.add_parser("keygen", help="print a new key for state.keys")
    keygen.set_defaults(run=_keygen)
    commands.add_parser("demo", help="watch an old server, the gateway and a modern client at work", add_help=False)
    return parser


def _serve(options: argparse.Namespace) -> int:
    try:
        config = _configuration(options)
        if config.traces:
            check_traces()
    except ConfigError as exc:
        print(exc, file=sys.stderr)
        return 1
    except TracesUnavailable as exc:
        print(exc.message, file=sys.stderr)
        return 1
    configure_logging(config.log.level, config.log.format)
    read = None if options.config is None else partial(load, options.config, log_level=options.log_level)
    try:
        if config.workers > 1:
            return uvloop.run(workers.supervise(config, read))
        uvloop.run(app.serve(config, read=read))
    except OSError as exc:
        print(f"cannot listen: {exc}; is another process using the address?", file=sys.stderr)
        return 1
    return 0


def _configuration(options: argparse.Namespace) -> Config:
    return with_log_level(_given(options), options.log_level)


def _given(options: argparse.Namespace) -> Config:
    if options.stdio:
        return for_command(options.command, options.env, options.listen, options.admin)
    if options.env:
        raise ConfigError(("--env: it goes with --stdio; write upstream.env into the file",))
    if options.config is None:
        return for_upstream(options.upstream, options.listen, options.admin)
    if options.listen or options.admin:
        raise ConfigError(("--listen, --admin: they go with --upstream; write listen and admin into the file",))
    return load(options.config)


def _check(options: argparse.Namespace) -> int:
    try:
        config = load(options.config)
    except ConfigError as exc:
        print(exc, file=sys.stderr)
        return 1
    print("configuration is valid")
    for sentence in cautions(config):
        print(f"caution: {sentence}")
    if config.traces:
        try:
            check_traces()
        except TracesUnavailable as exc:
            print(f"note: {exc.message}")
    for route in config.routes:
        if route.upstream.command is not None and (missing := not_here(route.upstream)):
            print(f"note: routes[{route.path}].upstream.{missing}, as far as can be seen on this machine")
    return 0


def _keygen(_: argparse.Namespace) -> int:
    print(base64.urlsafe_b64encode(secrets.token_bytes(_KEY_BYTES)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
