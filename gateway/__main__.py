"""The command line: arguments in, a running gateway or an exit code out.

Exit codes: 0 (success), 1 (invalid configuration, or `wrap` had no server), 2 (usage error); `probe` also has 3 (it
works with limits).
"""

import argparse
import base64
import errno
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from gateway import __version__, container_health, world
from gateway.config import (
    KEY_BYTES,
    Config,
    ConfigError,
    ConfigFile,
    Era,
    Level,
    Problem,
    cautions,
    digest,
    for_command,
    for_upstream,
    load,
    notes,
    unusable,
    validity,
    with_log_level,
)
from gateway.config.load import examine, lines
from gateway.config.parsing.environment import FILE_VARIABLE
from gateway.config.parsing.problems import nearest
from gateway.config.programs import not_here
from gateway.config.schema import json_schema
from gateway.plugins.loader import PluginMissing, plugin
from gateway.runtime import event_loop
from gateway.server.serve import ignore_signals, serve
from gateway.server.wrap import wrap
from gateway.shell_completion import SHELLS, CommandLine, script
from gateway.stdio_front.settings import for_host
from gateway.telemetry import Event, TracesUnavailable, check_traces, configure_logging, get_logger
from gateway.tools.demo import run as demo
from gateway.tools.probe import command as probe

log = get_logger()

_USAGE = 2
_DEFAULTS = Config(routes=())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    elif arguments[:1] == ["version"]:
        arguments = ["--version"]
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except OSError as exc:
        if exc.errno not in {errno.EPIPE, errno.ENOSPC}:
            raise
        # The reader has closed the pipe (`| head`), or the disk is full; without this Python would report it again at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if exc.errno == errno.EPIPE:
            return 128 + signal.SIGPIPE
        print(f"mrtr-gateway: the output cannot be written ({exc.strerror}); make room for it", file=sys.stderr)
        return 1
    return code


def _run(arguments: list[str]) -> int:
    # Our arguments come before `--`, the server's command after it.
    place = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, command = arguments[:place], arguments[place + 1 :]
    parser = _parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return _USAGE
    if (hint := _meant(arguments[0], parser.get_default("commands"))) is not None:
        parser.error(f'"{arguments[0]}" is not a command; did you mean `{parser.prog} {hint}`?')
    options = parser.parse_args(arguments)
    options.command = command
    is_stdio = getattr(options, "stdio", False)
    if "file" in options:
        given = [each for each in (options.file, options.config, is_stdio, getattr(options, "upstream", None)) if each]
        if len(given) > 1:
            also = ", --upstream URL and --stdio" if "stdio" in options else ""
            parser.error(f"give one of FILE, --config FILE{also}")
        if not given and FILE_VARIABLE not in os.environ:
            parser.error(f"no configuration; write {parser.prog} {arguments[0]} FILE, or set {FILE_VARIABLE}")
        options.config = options.config or options.file or (None if given else Path(os.environ[FILE_VARIABLE]))
    if options.run is not _wrap and command and not is_stdio:
        parser.error("a command after `--` needs --stdio; add it, or remove the command")
    if is_stdio and not command:
        parser.error("--stdio needs the server's command: --stdio -- npx some-server")
    return _carried_out(options)


def _meant(word: str, names: Sequence[str]) -> str | None:
    """Return the command that a word was probably meant for, if it is none itself; argparse does not say it."""
    if word in names or word.startswith("-"):
        return None
    return f"serve {word}" if word.endswith((".yaml", ".yml")) else nearest(word, names)


def _carried_out(options: argparse.Namespace) -> int:
    try:
        code: int = options.run(options)
    except ConfigError as exc:
        # What a host prints of the programs that it starts says neither which program this is nor what it read.
        for problem in exc.found:
            source = "" if problem.place else f"{exc.source}, "
            program = f"mrtr-gateway: {source}" if options.run is _wrap else ""
            print(f"{program}{problem.located(exc.source)}", file=sys.stderr)
        return 1
    except (TracesUnavailable, PluginMissing) as exc:
        print(exc, file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = CommandLine(
        "mrtr-gateway", description="Makes a legacy MCP server a modern, stateless one."
    )
    parser.add_argument("-V", "--version", action="version", version=f"mrtr-gateway {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="run the gateway",
        usage="%(prog)s (FILE | --upstream URL | --stdio) [options] [-- COMMAND...]",
    )
    _add_file(serve)
    serve.add_argument("--upstream", metavar="URL", help="URL of one legacy server, served at /mcp with defaults")
    serve.add_argument(
        "--stdio", action="store_true", help="run one legacy server, the command after `--`, as a child process"
    )
    serve.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"without --config: address for clients (default: {_DEFAULTS.listen})",
    )
    serve.add_argument(
        "--admin",
        metavar="HOST:PORT",
        help=f"without --config: address for /metrics, /readyz and /status (default: {_DEFAULTS.admin})",
    )
    serve.add_argument(
        "--log-level",
        choices=get_args(Level),
        help="overrides log.level of the configuration, even after a reload "
        f"(default: log.level, which is {_DEFAULTS.log.level} by default)",
    )
    serve.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="with --stdio: an environment variable for the command; without =VALUE, the gateway's own",
    )
    serve.set_defaults(run=_serve)
    _add_wrap(commands)
    check = commands.add_parser("check", help="check a configuration and exit")
    _add_file(check)
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    check.add_argument("--strict", action="store_true", help="exit with 1 if there is a caution or a note")
    check.set_defaults(run=_check)
    probe.add(commands)
    health = commands.add_parser("health", help="check whether the gateway on this machine is alive")
    container_health.add_arguments(health)
    health.set_defaults(run=container_health.run)
    schema = commands.add_parser("schema", help="print the JSON Schema of the configuration file")
    schema.set_defaults(run=_schema)
    shell = commands.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell",
        description="bash and zsh read it with: source <(mrtr-gateway completion bash). zsh needs `autoload -Uz "
        "compinit && compinit` before it. fish: mrtr-gateway completion fish | source",
    )
    shell.add_argument("shell", choices=SHELLS)
    shell.set_defaults(run=_completion, parser=parser)
    keygen = commands.add_parser("keygen", help="print a new key for state.keys")
    keygen.set_defaults(run=_keygen)
    demo.add(commands)
    # `main` turns these two into options; they stand here for the help and for shells.
    commands.add_parser("version", help="print the version")
    help_ = commands.add_parser("help", help="print this help, or that of a command")
    help_.add_argument("command", nargs="?", choices=tuple(commands.choices))
    parser.set_defaults(commands=tuple(commands.choices))
    return parser


def _add_file(command: argparse.ArgumentParser) -> None:
    what = f"YAML configuration file (default: ${FILE_VARIABLE})"
    command.add_argument("file", nargs="?", type=Path, metavar="FILE", help=what)
    command.add_argument("-c", "--config", type=Path, metavar="FILE", help="the same")


def _add_wrap(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    wrapping = commands.add_parser(
        "wrap",
        help="stand between a host that speaks stdio and any server",
        usage="%(prog)s (-- COMMAND... | --upstream URL | --config FILE [--route PATH]) [options]",
        description="What a host starts instead of its server. The host may be modern or legacy, and so may the "
        "server. Nothing listens on a port, and the log goes to stderr.",
    )
    wrapping.add_argument("--upstream", metavar="URL", help="URL of the server, instead of a command after `--`")
    wrapping.add_argument(
        "-c", "--config", type=Path, metavar="FILE", help="YAML configuration file that has the server"
    )
    wrapping.add_argument("--route", metavar="PATH", help="with --config: the route to use (default: the first one)")
    wrapping.add_argument(
        "--era",
        choices=get_args(Era),
        help="overrides the route's `era`: which side of a server is used that speaks both protocols",
    )
    wrapping.add_argument("--log-level", choices=get_args(Level), help="overrides log.level of the configuration")
    wrapping.set_defaults(run=_wrap)


def _wrap(options: argparse.Namespace) -> int:
    count = sum(map(bool, (options.command, options.upstream, options.config)))
    if count != 1:
        what = "-- COMMAND, --upstream URL or --config FILE"
        print(f"wrap takes exactly one of {what}; you gave {count}", file=sys.stderr)
        return _USAGE
    if options.route is not None and options.config is None:
        print(
            "--route chooses a route of the file that --config names; add --config FILE, or remove it", file=sys.stderr
        )
        return _USAGE
    if options.config is not None:
        given = load(options.config)
    elif options.upstream is not None:
        given = for_upstream(options.upstream)
    else:
        given = for_command(options.command)
    config = _logged(for_host(given, options.route, os.environ, options.era), options.log_level)
    had_server = event_loop.run(wrap(config))
    ignore_signals()
    return 0 if had_server else 1


def _logged(config: Config, level: Level | None) -> Config:
    """Begin the log; return the configuration with its level. Raises TracesUnavailable."""
    config = with_log_level(config, level)
    if config.traces:
        check_traces()
    configure_logging(config.log.level, config.log.format)
    return config


def _serve(options: argparse.Namespace) -> int:
    if options.stdio:
        given = for_command(options.command, options.env, options.listen, options.admin)
    elif options.env:
        raise unusable("--env", "needs --stdio; with --config, set upstream.env in the file")
    elif options.config is None:
        given = for_upstream(options.upstream, options.listen, options.admin)
    elif options.listen or options.admin:
        raise unusable("--listen, --admin", "not allowed with --config; set listen and admin in the file")
    else:
        given = load(options.config)
    config = _logged(given, options.log_level)
    file = None if options.config is None else ConfigFile(options.config, options.log_level)
    try:
        if config.workers > 1:
            code: int = event_loop.run(plugin("workers")(config, file))
            return code
        event_loop.run(serve(config, file=file))
    except OSError as exc:
        log.error(Event.SERVER_FAILED, cause=exc.strerror or str(exc))  # noqa: TRY400 - for an operator, who needs no trace
        return 1
    return 0


def _check(options: argparse.Namespace) -> int:
    file: Path = options.config
    reading = examine(file)
    found: dict[str, Sequence[Problem]] = {"problems": reading.problems, "cautions": [], "notes": []}
    if reading.config is not None:
        for kind, remarks in _remarks(reading.config).items():
            found[kind] = reading.placed(reading.config, remarks)
    is_valid = not reading.problems
    loaded = digest(reading.config) if is_valid and reading.config is not None else None
    if options.json:
        listed = {kind: [_listed(each, file) for each in some] for kind, some in found.items()}
        print(json.dumps({"valid": is_valid, "configuration": loaded, **listed}, indent=2))
    else:
        kinds = {"problems": "", "cautions": "caution: ", "notes": "note: "}
        shown = ((kinds[kind] + each.sentence, each.place) for kind, some in found.items() for each in some)
        texts = lines((Problem("", text, place) for text, place in shown), str(file))
        if is_valid:
            asks = f"no server was asked: `mrtr-gateway doctor --config {file}` asks them"
            texts = [f"configuration is valid, digest {loaded}", *texts, asks]
        print(*texts, sep="\n", file=sys.stdout if is_valid else sys.stderr)
    return 1 if not is_valid or (options.strict and (found["cautions"] or found["notes"])) else 0


def _listed(problem: Problem, file: Path) -> dict[str, object]:
    line, column = problem.place or (None, None)
    key = problem.path if problem.path != str(file) else None
    return {"file": str(file), "line": line, "column": column, "key": key or None, "text": problem.sentence}


def _remarks(config: Config) -> dict[str, list[str]]:
    """Return the cautions and notes about a configuration and about this machine."""
    warned, noted = list(cautions(config, validity(config))), list(notes(config))
    for route in config.routes:
        if route.upstream.command is not None and (missing := not_here(route.upstream)):
            what = f"routes[{route.path}].upstream.{missing.key}: {missing.in_full} on this machine"
            warned.append(f"{what}; correct it, or ignore this if the gateway runs on another one")
    if config.traces:
        try:
            check_traces()
        except TracesUnavailable as exc:
            noted.append(exc.message)
    return {"cautions": warned, "notes": noted}


def _schema(_: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=2))
    return 0


def _completion(options: argparse.Namespace) -> int:
    print(script(options.shell, options.parser), end="")
    return 0


def _keygen(_: argparse.Namespace) -> int:
    print(base64.urlsafe_b64encode(world.random_bytes(KEY_BYTES)).decode())
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        _ = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # as in entry.py
    sys.exit(main())
