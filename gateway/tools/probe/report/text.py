"""Prints a report as text: 80 columns, the state in words, colour on a terminal."""

import os
import re
import textwrap
from typing import Final, TextIO

from gateway.tools.probe.report.findings import Check, ProbedServer, State

_COLUMNS: Final = 79
_WORD: Final = 9
_NAME: Final = 15
_COLOURS: Final[dict[str, str]] = {
    "ok": "32",
    "yes": "32",
    "warning": "33",
    "partly": "33",
    "failed": "31",
    "no": "31",
    "not offered": "2",
    "head": "1",
}
_ESCAPE: Final = re.compile(r"\033\[\d+m")
_SUMMARY: Final[dict[State, str]] = {
    "ok": "No problems found.",
    "warning": "It works, with the warnings and limits above.",
    "failed": "The server cannot be used this way: see FAILED above.",
}


class TextReport:
    """Prints a report, each part as soon as it is known; without a file, nothing."""

    def __init__(self, out: TextIO | None) -> None:
        self._out = out
        is_terminal = out is not None and out.isatty()
        self._is_coloured = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._has_begun = False

    def begin(self, title: str) -> None:
        """Print what the checks that follow are about."""
        self._print(*[""] * self._has_begun, _paint("head", title), "")
        self._has_begun = True

    def check(self, check: Check) -> None:
        """Print one check."""
        indent = " " * (_WORD + _NAME)
        first, *rest = _wrapped(check.found, indent) or [""]
        word = check.state.upper() if check.state == "failed" else check.state
        self._print(f"{_paint(check.state, f'{word:<{_WORD}}')}{check.name:<{_NAME}}{first.lstrip()}", *rest)
        for label, text in (("note" if check.state == "ok" else "why", check.why), ("fix", check.fix)):
            if text:
                self._print(*_wrapped(f"{label}: {text}", indent + "  "))

    def conclude(self, server: ProbedServer) -> None:
        """Print what follows from the checks of a server."""
        judged: list[str] = []
        for feature in server.features:
            judged.append(f"{feature.title}: {_paint(feature.answer, feature.short)}")
            for label, text in (("", feature.why), ("fix: ", feature.fix)):
                judged += _wrapped(label + text, "    ") if text else []
        parts = {
            "Through the gateway": judged,
            "Unknown without calling a tool": [
                line for sentence in server.unknown for line in _wrapped(sentence, "  ", first="- ")
            ],
            "Suggested configuration": (server.configuration or "").splitlines(),
        }
        for title, body in parts.items():
            if body:
                self._print("", _paint("head", title), "", *body)

    def end(self, state: State) -> None:
        """Print the state of the whole."""
        self._print("", _paint(state, _SUMMARY[state]))

    def _print(self, *lines: str) -> None:
        if self._out is not None:
            text = "\n".join(lines)
            print(text if self._is_coloured else _ESCAPE.sub("", text), file=self._out, flush=True)


def _paint(kind: str, text: str) -> str:
    return f"\033[{_COLOURS[kind]}m{text}\033[0m"


def _wrapped(text: str, indent: str, *, first: str | None = None) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=indent if first is None else first, subsequent_indent=indent)
