"""The errors of a configuration, with helpers that word them."""

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

_KEY_LIKE = re.compile(r"[A-Za-z0-9+/_=-]{32,}")
# A URL's user name, password, query and fragment may be secrets and may contain any character.
_BEFORE_AT = re.compile(r"(?<=://).*@|[^\s\"]*@", re.DOTALL)
_QUERY = re.compile(r'([?#]).*(?="$)', re.DOTALL)
_SHOWN_CHARACTERS = 60


class Problem(NamedTuple):
    """One error: its path in the configuration, and a text that ends with the fix."""

    path: str
    text: str
    place: tuple[int, int] | None = None
    """Its line and column in the file, if they are known; the first of each is 1."""

    def __str__(self) -> str:
        return f"line {self.place[0]}: {self.text}" if self.place and not self.path else self.sentence

    @property
    def sentence(self) -> str:
        """It without its place, beginning with its path; a remark has that in its text already."""
        return self.text if self.text.startswith(self.path) else f"{self.path}: {self.text}"

    def located(self, source: str) -> str:
        """Return it beginning with its place in the file, as compilers write it, if it has one there."""
        if self.place is None:
            return str(self)
        return f"{source}:{self.place[0]}:{self.place[1]}: {self.sentence}"

    def placed(self, places: Mapping[str, tuple[int, int]]) -> Self:
        """Return the problem with the place of its path, or of what that is in; one of the environment has none."""
        path = self.path
        while path and path not in places:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        is_elsewhere = "(from GATEWAY_" in self.text or self.path.startswith("GATEWAY_")
        return self if self.place or is_elsewhere else self._replace(place=places.get(path))


class ConfigError(Exception):
    """The configuration cannot be used, for every reason in `found`."""

    def __init__(self, found: Iterable[Problem], source: str = "configuration") -> None:
        self.found = tuple(found)
        self.source = source
        self.problems = tuple(map(str, self.found))
        super().__init__("\n".join(self.problems))


def unusable(path: str, text: str) -> ConfigError:
    """Return the error for one key."""
    return ConfigError([Problem(path, text)])


@contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Add what a ConfigError says to the problems, and go on."""
    try:
        yield
    except ConfigError as exc:
        problems += exc.found


def touches(one: str, other: str) -> bool:
    """Return whether one path is inside the other, or equal to it."""
    return one == other or one.startswith((f"{other}.", f"{other}[")) or other.startswith((f"{one}.", f"{one}["))


class Given(str):
    """A text from the environment or the command line; it may be a number, and is never substituted again."""

    __slots__ = ("origin",)
    origin: str

    def __new__(cls, text: str, origin: str) -> Self:
        """Remember `origin`: the names of the variables or the flag."""
        given = super().__new__(cls, text)
        given.origin = origin
        return given


def shown(value: object) -> str:
    """Return `value` as an error may quote it: short, on one line, without possible keys or passwords."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = json.dumps(str(value) if isinstance(value, str) else value, ensure_ascii=False)
    # So that a person sees them: a no-break space looks like an indentation.
    text = "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)
    text = _QUERY.sub(r"\1...", _BEFORE_AT.sub("...@", _KEY_LIKE.sub("(hidden)", text)))
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '..."'
    return f"{cut} (from {value.origin})" if isinstance(value, Given) else cut


def nearest(name: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """Return the known name that was probably meant, if any: a similar one, or one that `name` is a part of.

    With a cutoff of 0.6, "version" would be a misspelt "sessions".
    """
    names, name = {each.lower(): each for each in known}, name.lower()
    found = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    found += [each for each in names if each.startswith(f"{name}_") or name.startswith(f"{each}_")]
    found += [each for each in names if sorted(each) == sorted(name) or each.endswith(f"-{name}")]
    return names[found[0]] if found else None


def joined(path: str, key: str | int) -> str:
    """Return the path of `key` in `path`: `routes[0].path`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    name = key if re.fullmatch(r"[\w.-]{1,31}", key) else shown(key)
    return f"{path}.{name}" if path else name


def unreadable(file: str | Path, exc: OSError) -> str:
    """Return why a file cannot be read, with the user of this process: in a container that is rarely its owner."""
    if "\n" in str(file):  # not quoted, because it may be a private key
        return "is the text of a file; write that into a file, and its path here"
    fix = "write the path in full, without ~" if "~" in Path(file).parts else "check its path and permissions"
    return f"cannot be read ({exc.strerror}); {fix} ({file}, read as uid {os.geteuid()})"
