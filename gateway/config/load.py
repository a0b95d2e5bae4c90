"""Loads a configuration: text -> tree -> structs -> rules, with all problems in one ConfigError."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import inspect, structs

from gateway.config.files import with_files
from gateway.config.model.config import Config
from gateway.config.model.value_types import Level
from gateway.config.parsing.decoder import Walker
from gateway.config.parsing.environment import override
from gateway.config.parsing.problems import ConfigError, Given, Problem, touches, unreadable, unusable
from gateway.config.parsing.yaml_tree import MAX_TEXT_CHARACTERS, Document, read_tree
from gateway.config.programs import absent
from gateway.config.rules import broken_rules


class ConfigFile(NamedTuple):
    """The file of a configuration, which a reload reads again."""

    path: Path
    log_level: Level | None = None
    """Replaces the file's `log.level`."""

    def load(self) -> Config:
        """Return the configuration; raises ConfigError if it cannot be read or used."""
        return with_log_level(load(self.path), self.log_level)


class Reading(NamedTuple):
    """What a configuration comes to, with the default in place of each value that is refused."""

    config: Config | None
    """None if nothing could be read."""
    problems: Sequence[Problem]
    """In the order of the file."""
    spoilt: Sequence[str] = ()
    """The paths that may hold a default, and those of the problems."""
    places: Mapping[str, tuple[int, int]] = {}
    """As of `Document`, with those of misspelt keys, too."""

    def placed(self, config: Config, remarks: Iterable[str]) -> list[Problem]:
        """Return the remarks that come of what is written, and repeat no problem, in the order of the file."""
        # Problems name a route by its index, remarks by its path.
        names = {f"routes[{number}": f"routes[{route.path}" for number, route in enumerate(config.routes)}

        def named(path: str) -> str:
            route, end, key = path.partition("]")
            return names.get(route, route) + end + key

        places, spoilt = {named(path): place for path, place in self.places.items()}, list(map(named, self.spoilt))
        found = []
        for remark in remarks:
            key = remark.partition(" ")[0].rstrip(":")
            if not any(_explains(path, key, remark) for path in spoilt):
                found.append(Problem(key, remark).placed(places))
        return sorted(found, key=_in_file)


def _explains(spoilt: str, key: str, remark: str) -> bool:
    """Whether a remark on a key comes of a value that may be a default."""
    route, end, name = spoilt.rpartition("].")
    # A remark names the other keys that it comes of. A name like "path" may be no more than a word of it.
    is_named = re.search(r"[._]", name) is not None and name in remark and f"{key}.".startswith(route + end)
    return is_named or touches(key, spoilt)


def load(path: Path | str, env: Mapping[str, str] = os.environ) -> Config:
    """Return the configuration in a YAML file; raises ConfigError if it cannot be read or used."""
    return _finish(_document(path), str(path), env)


def examine(path: Path) -> Reading:
    """Read a file whatever is wrong with it, such as an absolute path of a program that is not on this machine."""
    try:
        return _read(_document(path), str(path), os.environ, needs_programs=True)
    except ConfigError as exc:
        return Reading(None, exc.found)


def placed(path: Path, problems: Iterable[Problem]) -> list[Problem]:
    """Return problems with their places in a file; raises ConfigError if it cannot be read."""
    places = _document(path).places
    return [problem.placed(places) for problem in problems]


def _document(path: Path | str) -> Document:
    try:
        with Path(path).open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            # `read_tree` refuses a text with so many, however long it is, and bytes that are not UTF-8.
            return read_tree(file.read(MAX_TEXT_CHARACTERS + 1))
    except OSError as exc:
        raise ConfigError([Problem(str(path), unreadable(path, exc))], str(path)) from exc


def lines(problems: Iterable[Problem], source: str) -> list[str]:
    """Return problems, or remarks, as lines in the order of the file."""
    return [each.located(source) for each in sorted(problems, key=_in_file)]


def with_log_level(config: Config, level: Level | None) -> Config:
    """Return the configuration with this `log.level`, if one is given."""
    return config if level is None else structs.replace(config, log=structs.replace(config.log, level=level))


def parse(text: str, source: str, env: Mapping[str, str] = os.environ) -> Config:
    """Return the configuration in a YAML text; `*_file` paths are relative to the folder of `source`."""
    return _finish(read_tree(text), source, env)


def for_upstream(url: str, listen: str | None = None, admin: str | None = None) -> Config:
    """Return the configuration of `serve --upstream URL`: one route; flags override the environment."""
    return _for_one({"url": Given(url, "--upstream")}, listen, admin)


def for_command(
    command: Sequence[str], given: Sequence[str] = (), listen: str | None = None, admin: str | None = None
) -> Config:
    """Return the configuration of `serve --stdio -- COMMAND`, as `for_upstream`; the words are used unchanged.

    `given` are extra variables for the command: NAME=VALUE, or NAME for the gateway's own value.
    """
    variables: dict[str, object] = {}
    for word in given:
        name, has_value, value = word.partition("=")
        if not has_value and name not in os.environ:
            raise unusable(f"--env {name}", f"is not set; export {name}, or write {name}=VALUE")
        variables[name] = Given(value if has_value else os.environ[name], "--env")
    words = [Given(word, "--stdio") for word in command]  # `${` in a word is the command's own business
    return _for_one({"command": words, "env": variables}, listen, admin)


def _for_one(upstream: dict[str, object], listen: str | None, admin: str | None) -> Config:
    flags = {name: text for name, text in (("listen", listen), ("admin", admin)) if text is not None}
    overruled = {f"GATEWAY_{name.upper()}" for name in flags}
    unset = {name: text for name, text in os.environ.items() if name not in overruled}
    tree: dict[str, object] = {name: Given(text, f"--{name}") for name, text in flags.items()}
    tree["routes"] = [{"upstream": upstream}]
    return _finish(Document(tree, [], {}), "command line", unset)


def config_shape() -> inspect.StructType:
    """Return the type information of `Config`."""
    shape = inspect.type_info(Config)
    assert isinstance(shape, inspect.StructType)
    return shape


def _finish(document: Document, source: str, env: Mapping[str, str]) -> Config:
    reading = _read(document, source, env)
    if reading.config is None or reading.problems:
        raise ConfigError(reading.problems, source)
    return reading.config


def _read(document: Document, source: str, env: Mapping[str, str], *, needs_programs: bool = False) -> Reading:
    """Build and check the configuration; a broken rule is not reported if a refused value explains it."""
    shape = config_shape()
    walker = Walker(shape, env)
    problems = document.problems + override(document.tree, shape, env)
    config = walker.read(shape, document.tree, "")
    problems += walker.problems
    if not isinstance(config, Config):
        config, spoilt = None, []
    else:
        config, of_files = with_files(config, Path(source).absolute().parent)
        # An unreadable `keys_file` leaves `keys` empty, which must not count as a second problem.
        spoilt = [*walker.spoilt, *(problem.path.removesuffix("_file") for problem in of_files)]
        problems += of_files
        rules = [*broken_rules(config), *(absent(config) if needs_programs else ())]
        problems += [rule for rule in rules if not any(touches(rule.path, path) for path in spoilt)]
    spoilt += [problem.path for problem in problems]
    written = {path: key for path, key in walker.written.items() if key in document.places}
    places = document.places | {path: document.places[key] for path, key in written.items()}
    return Reading(config, sorted((problem.placed(places) for problem in problems), key=_in_file), spoilt, places)


def _in_file(problem: Problem) -> tuple[int, int]:
    return problem.place or (0, 0)


def digest(config: Config) -> str:
    """Return 12 hex digits of SHA-256 over the configuration without its secrets (only their presence counts).

    The replica's own id and addresses do not count either, so that replicas can be compared.
    """
    plain = msgspec.to_builtins(config)
    for section, key in ((plain, "listen"), (plain, "admin"), (plain["replica"], "id"), (plain["replica"], "listen")):
        del section[key]
    plain["state"]["keys"] = len(config.state.keys)
    plain["state"]["session_keys"] = len(config.state.session_keys)
    for route in plain["routes"]:
        route["credentials"]["token"] = route["credentials"]["token"] is not None
        route["set_headers"] = list(route["set_headers"])
        route["upstream"]["env"] = sorted(route["upstream"]["env"])
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()[:12]
