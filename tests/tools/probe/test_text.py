"""A report as text: 80 columns, the states in words, colours only if they are asked for."""

import re

import pytest

from gateway.tools.probe.report.findings import Check, Feature, ProbedServer, ProbeReport
from tests.support.probing import Terminal, as_text

LONG = "word " * 60
ESCAPES = re.compile(r"\033\[\d+m")


def whole() -> ProbeReport:
    checks = (
        Check(name="address", state="ok", found="127.0.0.1", why="A note."),
        Check(name="http", state="warning", found=LONG, why=LONG, fix=LONG),
        Check(name="session", state="failed", found="", why="w", fix="f"),
    )
    feature = Feature(name="calls", title="tools", answer="partly", short="all but 1", why=LONG, fix="Mend it.")
    plain = Feature(name="progress", title="progress", answer="yes", short="yes")
    upstream = ProbedServer(
        target="http://h/mcp",
        route="/mcp",
        state="failed",
        checks=checks,
        features=(feature, plain),
        unknown=(LONG,),
        configuration="routes:\n  - path: /mcp\n",
    )
    return ProbeReport(gateway="1", state="failed", exit_code=1, checks=checks[:1], upstreams=(upstream,))


def test_the_lines_fit_a_terminal_and_name_each_part() -> None:
    text = as_text(whole()).splitlines()
    assert max(map(len, text)) < 80
    for part in (
        "The configuration, on this machine",
        "/mcp -> http://h/mcp",
        "ok       address        127.0.0.1",
        "FAILED   session        ",
        "Through the gateway",
        "tools: all but 1",
        "    fix: Mend it.",
        "progress: yes",
        "Unknown without calling a tool",
        "Suggested configuration",
        "  - path: /mcp",
        "The server cannot be used this way: see FAILED above.",
    ):
        assert part in text
    assert any(line.strip() == "note: A note." for line in text)
    assert not ESCAPES.search("".join(text))


def test_colours_change_nothing_but_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    coloured = as_text(whole(), Terminal())
    assert ESCAPES.sub("", coloured) == as_text(whole())
    assert "\033[31mFAILED" in coloured
