"""Reads the files that a configuration names, relative to its folder.

Errors never quote the content of a file that may hold secrets.
"""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gateway.config.model.config import Config, State
from gateway.config.model.route import Route
from gateway.config.parsing.formats import FORMS
from gateway.config.parsing.problems import ConfigError, Problem, unreadable
from gateway.config.parsing.state_keys import read_key_lines
from gateway.config.tls import contexts, named_files

_MAX_FILE_BYTES = 1_048_576
_Section = TypeVar("_Section", bound=Struct)


def with_files(config: Config, folder: Path) -> tuple[Config, list[Problem]]:
    """Return the configuration with the secrets of its files and absolute paths, and the problems found."""
    problems: list[Problem] = []
    config = replace(
        config,
        state=_with_keys(config.state, folder, problems),
        tls=_placed(config.tls, folder, "cert_file", "key_file", "client_ca_file"),
        principal=_placed(config.principal, folder, "jwks_file", "jwks_ca_file"),
        routes=tuple(
            _with_secrets(route, folder, f"routes[{place}]", problems) for place, route in enumerate(config.routes)
        ),
    )
    try:
        _ = contexts(config)
    except ConfigError as exc:
        problems += exc.found
    return config, problems


def _placed(section: _Section, folder: Path, *keys: str) -> _Section:
    given = {key: getattr(section, key) for key in keys}
    paths = {key: str(folder / path) for key, path in given.items() if path is not None}
    return replace(section, **paths) if paths else section


def _with_keys(state: State, folder: Path, problems: list[Problem]) -> State:
    path = "state.keys_file"
    if state.keys_file is None:
        return state
    if state.keys:
        problems.append(Problem(path, "is set together with state.keys; keep only one of them"))
        return state
    text = _read(folder / state.keys_file, path, "write one key per line", problems)
    if text is None:
        return state
    keys = read_key_lines(text)
    if not keys:
        problems.append(Problem(path, "contains no key; add one with `mrtr-gateway keygen`"))
    return replace(state, keys=keys)


def _with_secrets(route: Route, folder: Path, path: str, problems: list[Problem]) -> Route:
    tls = _placed(route.upstream.tls, folder, "ca_file", "cert_file", "key_file")
    route = replace(route, upstream=replace(route.upstream, tls=tls))
    credentials = route.credentials
    if credentials.token_file is None:
        return route
    path = f"{path}.credentials.token_file"
    if credentials.token is not None:
        problems.append(Problem(path, "is set together with token; keep only one of them"))
        return route
    text = _read(folder / credentials.token_file, path, "write the secret in one line", problems)
    if text is None:
        return route
    if FORMS["header value"].parse(text.strip()) is None:
        problems.append(Problem(path, "is not one line of plain text; write the secret and nothing else"))
        return route
    return replace(route, credentials=replace(credentials, token=text.strip()))


def _read(file: Path, path: str, fix: str, problems: list[Problem]) -> str | None:
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_FILE_BYTES).decode()
    except OSError as exc:
        problems.append(Problem(path, unreadable(file, exc)))
    except UnicodeDecodeError:
        problems.append(Problem(path, f"is not UTF-8 text; {fix}"))
    return None


def contents(config: Config) -> dict[str, bytes]:
    """Return a digest of each file that a reload reads again, by its key, except for missing files.

    A renewed certificate usually keeps its path, so the configuration alone does not show the change.
    """
    found = {}
    for key, path in named_files(config):
        with suppress(OSError):
            found[key] = hashlib.sha256(Path(path).read_bytes()).digest()
    return found
