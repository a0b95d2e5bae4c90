"""Reads the files that a configuration names, relative to its folder.

Errors never quote the content of a file that may hold secrets.
"""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from gateway.config.model.config import Config, State
from gateway.config.model.route import Credentials
from gateway.config.parsing.formats import FORMS
from gateway.config.parsing.problems import Problem, collected, unreadable, unusable
from gateway.config.parsing.state_keys import read_key_lines
from gateway.config.tls import contexts, named_files

_MAX_FILE_BYTES = 1_048_576
_Section = TypeVar("_Section", bound=Struct)


def with_files(config: Config, folder: Path) -> tuple[Config, list[Problem]]:
    """Return the configuration with the secrets of its files and absolute paths, and the problems found."""
    problems: list[Problem] = []
    state, routes = config.state, []
    with collected(problems):
        state = _with_keys(state, folder)
    if problems:
        state = replace(state, keys_file=None)  # so that no rule takes `keys` for what is in the file
    for place, given in enumerate(config.routes):
        tls = _placed(given.upstream.tls, folder)
        route = replace(given, upstream=replace(given.upstream, tls=tls))
        with collected(problems):
            credentials = _with_secret(route.credentials, folder, f"routes[{place}].credentials.token_file")
            route = replace(route, credentials=credentials)
        routes.append(route)
    config = replace(
        config,
        state=state,
        tls=_placed(config.tls, folder),
        principal=_placed(config.principal, folder),
        routes=tuple(routes),
    )
    with collected(problems):
        # To find what cannot be used. They are built again when the configuration is applied.
        _ = contexts(config)
    return config, problems


def _placed(section: _Section, folder: Path) -> _Section:
    given = {key: path for key, path in asdict(section).items() if key.endswith("_file") and path is not None}
    return replace(section, **{key: str(folder / path) for key, path in given.items()}) if given else section


def _with_keys(state: State, folder: Path) -> State:
    path = "state.keys_file"
    if state.keys_file is None:
        return state
    if state.keys:
        raise unusable(path, "is set together with state.keys; keep only one of them")
    keys = read_key_lines(_read(folder / state.keys_file, path, "write one key per line"))
    if not keys:
        raise unusable(path, "contains no key; add one with `mrtr-gateway keygen`")
    return replace(state, keys=keys)


def _with_secret(credentials: Credentials, folder: Path, path: str) -> Credentials:
    if credentials.token_file is None:
        return credentials
    if credentials.token is not None:
        raise unusable(path, "is set together with token; keep only one of them")
    token = _read(folder / credentials.token_file, path, "write the secret in one line").strip()
    if FORMS["header value"].parse(token) is None:
        raise unusable(path, "is not one line of plain text; write the secret and nothing else")
    return replace(credentials, token=token)


def _read(file: Path, path: str, fix: str) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_FILE_BYTES).decode()
    except OSError as exc:
        raise unusable(path, unreadable(file, exc)) from exc
    except UnicodeDecodeError as exc:
        raise unusable(path, f"is not UTF-8 text; {fix}") from exc


def contents(config: Config) -> dict[str, bytes]:
    """Return a digest of each file that a reload reads again, by its key, except for missing files.

    A renewed certificate usually keeps its path, so the configuration alone does not show the change.
    """
    found = {}
    for key, path in named_files(config):
        with suppress(OSError):
            found[key] = hashlib.sha256(Path(path).read_bytes()).digest()
    return found
