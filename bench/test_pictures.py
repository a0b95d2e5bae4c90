"""The drawing of a run: small JSON in, pictures out. `pytest bench` runs it where matplotlib is installed."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip(
    "matplotlib", reason="`make bench-pictures` installs it: with numpy, 200 MB that no other test needs"
)

from bench import pictures

SVG = "{http://www.w3.org/2000/svg}"
LARGEST_BYTES = 60_000


def slices(cpu_us: float) -> list[dict[str, float]]:
    return [{"cpu_us": cpu_us * part, "p99_ms": cpu_us * part / 50} for part in (0.9, 1, 1.3)]


def a_run() -> dict[str, Any]:
    rows = {"upstream, no proxy": 10, "aiohttp forwarder": 150, "nginx": 18, "Envoy": 47, "mrtr-gateway": 38}
    modern = {name: slices(cpu_us) for name, cpu_us in {**rows, "FastMCP's proxy": 58_000}.items()}
    legacy = {name: slices(cpu_us) for name, cpu_us in {**rows, "ContextForge": 44_321}.items()}
    ratios = {"nginx": [0.1, 0.12, 0.13], "Envoy": [0.3, 0.3, 0.4]}
    parts = [{"calls answered": 160, "answered": 30}] * 10 + [{"calls answered": 140, "lost, and said so": 7}] * 2
    timeline = {"part_seconds": 0.5, "killed_seconds": 5.1, "restarted_seconds": 5.9, "held": 21.0, "parts": parts}
    return {
        "environment": {
            "date": "2026-11-30",
            "processor": "A Processor",
            "cpus": 2,
            "kernel": "6.1",
            "python": "3.11.7",
            "rounds": 3,
            "versions": {"mrtr-gateway": "0.1.0 1234abcd", "nginx": "1.22.1", "ContextForge": "1.0"},
        },
        "rivals": {"slices": modern},
        "rivals-legacy": {"slices": legacy},
        **{name: {"ratios": {**ratios, ours: [0.9, 1.17, 1.3]}} for name, (_, ours) in pictures.LOSSES.items()},
        "parked": {"rss_kib_holding": {"0": 51_200, "1000": 58_600, "9728": 122_880}, "kib_per_call": 7.4},
        "cold": {"records": 10_000, "rss_kib": {"bare": 51_200, "records": 55_926}},
        "timeline": {**timeline, "doubles": 0},
        "timeline-plain": {**timeline, "doubles": 3},
    }


@pytest.fixture
def drawn(tmp_path: Path) -> dict[str, Path]:
    pictures.draw(a_run(), tmp_path)
    return {name: tmp_path / f"bench-{name}.svg" for name in pictures.PICTURES}


def texts(picture: Path) -> str:
    """What a reader or a search finds in a picture."""
    return "\n".join("".join(each.itertext()) for each in ET.fromstring(picture.read_bytes()).iter(f"{SVG}text"))


def test_each_picture_says_when_on_what_and_of_which_versions_it_was_made(drawn: dict[str, Path]) -> None:
    for name, picture in drawn.items():
        shown = texts(picture)
        versions = {"echo": ", nginx 1.22.1, ContextForge 1.0", "losses": ", nginx 1.22.1"}.get(name, "")
        taken = "medians of 3 rounds, with the least and the most" if versions else "one run"
        assert f"2026-11-30; 2 x A Processor, Linux 6.1, Python 3.11.7; {taken}\n" in shown
        assert f"mrtr-gateway 0.1.0 1234abcd{versions}\n" in f"{shown}\n"
        assert picture.stat().st_size < LARGEST_BYTES


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("echo", ["CPU of a call, µs", "FastMCP's proxy", "ContextForge", "44,321", "38 · 38", "modern call"]),
        ("losses", ["ask", "1 MB there and back", "1.17", "0.12"]),
        ("held", ["held: 7.4 KiB a call, and two connections", "484 bytes a call"]),
        (
            "kill",
            ["calls per second", "errors per second", "held 21 calls", "14 lost, and said so", "3 executed twice"],
        ),
    ],
)
def test_a_picture_has_its_figures(drawn: dict[str, Path], name: str, labels: list[str]) -> None:
    shown = texts(drawn[name])
    assert [label for label in labels if label not in shown] == []
    assert "upstream, no proxy" not in shown


def test_the_same_run_is_drawn_with_the_same_bytes(drawn: dict[str, Path], tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    pictures.draw(a_run(), again)
    for name, picture in drawn.items():
        assert (again / picture.name).read_bytes() == picture.read_bytes(), name


def test_the_page_shows_every_picture_and_nothing_else() -> None:
    page = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text()
    assert re.findall(r"images/bench-(\w+)\.svg", page) == list(pictures.PICTURES)
