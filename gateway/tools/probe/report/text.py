"""Formats a report as text: 80 columns, the state in words, colour on a terminal."""

import re
import textwrap
from collections.abc import Iterator
from typing import Final

from gateway.tools.probe.report.findings import Check, ProbeReport, State

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


def lines(report: ProbeReport, *, colour: bool) -> Iterator[str]:
    """Yield the report, line by line."""
    found: list[str] = []
    if report.checks:
        found += (_paint("head", "The configuration, on this machine"), "", *_checks(report.checks))
    for upstream in report.upstreams:
        before = "" if upstream.route is None else f"{upstream.route} -> "
        found += [""] if report.checks else []
        found += (_paint("head", f"{before}{upstream.target}"), "", *_checks(upstream.checks))
        judged: list[str] = []
        for feature in upstream.features:
            judged.append(f"{feature.title}: {_paint(feature.answer, feature.short)}")
            for label, text in (("", feature.why), ("fix: ", feature.fix)):
                judged += _wrapped(label + text, "    ") if text else []
        parts = {
            "Through the gateway": judged,
            "Unknown without calling a tool": [
                line for sentence in upstream.unknown for line in _wrapped(sentence, "  ", first="- ")
            ],
            "Suggested configuration": (upstream.configuration or "").splitlines(),
        }
        for title, body in parts.items():
            found += ("", _paint("head", title), "", *body) if body else ()
    for line in (*found, "", _paint(report.state, _SUMMARY[report.state])):
        yield line if colour else _ESCAPE.sub("", line)


def _paint(kind: str, text: str) -> str:
    return f"\033[{_COLOURS[kind]}m{text}\033[0m"


def _checks(checks: tuple[Check, ...]) -> Iterator[str]:
    indent = " " * (_WORD + _NAME)
    for check in checks:
        first, *rest = _wrapped(check.found, indent) or [""]
        word = check.state.upper() if check.state == "failed" else check.state
        yield f"{_paint(check.state, f'{word:<{_WORD}}')}{check.name:<{_NAME}}{first.lstrip()}"
        yield from rest
        for label, text in (("note" if check.state == "ok" else "why", check.why), ("fix", check.fix)):
            if text:
                yield from _wrapped(f"{label}: {text}", indent + "  ")


def _wrapped(text: str, indent: str, *, first: str | None = None) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=indent if first is None else first, subsequent_indent=indent)
