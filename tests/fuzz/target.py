"""A fuzz target with its findings: what a target is, what counts as a finding, which findings are known."""

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import gateway

_GATEWAY: Final = Path(gateway.__file__).parent
CORPUS: Final = Path(__file__).parent / "corpus"
KNOWN: Final = Path(__file__).parent / "known"
"""Inputs that break a promise today, in a folder for each target. `test_corpus.py` fails once one is mended."""


class Target(NamedTuple):
    """One part of the gateway under attack.

    `check` takes any bytes. It returns if the part kept its promises for them, and raises anything else than the
    documented error, or AssertionError, if it did not.
    """

    name: str
    check: Callable[[bytes], None]

    def seeds(self) -> list[bytes]:
        """The inputs of the corpus, in the order of their names."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir())]

    def known(self) -> Iterator[Path]:
        """The files of the findings that are known."""
        folder = KNOWN / self.name
        yield from sorted(folder.iterdir()) if folder.is_dir() else ()


class Finding(NamedTuple):
    """One broken promise."""

    target: str
    signature: str
    """What two inputs with the same cause have in common."""
    trace: str


def judge(target: Target, data: bytes) -> Finding | None:
    """Run a target on one input; the finding, if it is one."""
    try:
        target.check(data)
    except Exception as exc:  # noqa: BLE001  (whatever a target raises is a finding)
        return Finding(target.name, signature(exc), "".join(traceback.format_exception(exc, limit=-6)))
    return None


def signature(exc: BaseException) -> str:
    """Where the error came from: its type, and the innermost function of the gateway or the oracle's words.

    The text of an error often quotes the input, so it is left out. Two inputs with one signature count as one finding.
    """
    frames = traceback.extract_tb(exc.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_GATEWAY)]
    last = frames[-1]
    if isinstance(exc, AssertionError) and Path(last.filename).is_relative_to(CORPUS.parent):
        return f"AssertionError: {last.line}"
    inner = ours[-1] if ours else last
    return f"{type(exc).__name__} in {inner.name}"


def known_signatures(target: Target) -> set[str]:
    """The signatures of the findings that are known, computed from their inputs, so that renames do not matter."""
    found = (judge(target, path.read_bytes()) for path in target.known())
    return {finding.signature for finding in found if finding is not None}
