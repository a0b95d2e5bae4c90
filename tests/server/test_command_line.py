"""What `serve` and `check` do with log levels, traces and bodies before anything is served."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway import __main__ as command
from gateway.config import Config, ConfigError, ConfigFile
from tests.parts.launch import REPOSITORY

UPSTREAM = "http://127.0.0.1:9/mcp"


def written(path: Path, **sections: Any) -> Path:
    tree = {"listen": "127.0.0.1:0", "admin": None, "routes": [{"upstream": {"url": UPSTREAM}}], **sections}
    path.write_text(json.dumps(tree))
    return path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, ConfigFile | None]]:
    """What `serve` would have run, with the levels that it set."""
    found: list[tuple[Config, ConfigFile | None]] = []

    async def serve(config: Config, worker: None = None, file: ConfigFile | None = None) -> None:
        found.append((config, file))

    monkeypatch.setattr(command, "serve", serve)
    monkeypatch.setattr(command, "configure_logging", lambda level, _: levels.append(level))
    levels.clear()
    return found


levels: list[str] = []


@pytest.mark.parametrize(("given", "level"), [((), "warning"), (("--log-level", "debug"), "debug")])
def test_the_level_of_the_command_line_beats_that_of_the_file_also_after_a_reload(
    tmp_path: Path, served: list[tuple[Config, ConfigFile | None]], given: tuple[str, ...], level: str
) -> None:
    path = written(tmp_path / "gateway.yaml", log={"level": "warning"})
    assert command.main(["serve", "--config", str(path), *given]) == 0
    ((config, file),) = served
    assert levels == [level]
    assert config.log.level == level
    assert file is not None
    assert file.load() == config, "a reload of the same file changes nothing"
    _ = written(path, log={"level": "warning"}, traces=False, hold={"ttl_seconds": 7})
    assert (file.load().log.level, file.load().hold.ttl_seconds) == (level, 7)


@pytest.mark.parametrize("name", ["serve", "check", "wrap"])
def test_every_command_names_the_line_of_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"routes:\n- upstream: {{url: {UPSTREAM}}}\n  path: mcp\n")
    assert command.main([name, "--config", str(path)]) == 1
    program = "mrtr-gateway: " if name == "wrap" else ""
    assert capsys.readouterr().err.startswith(f"{program}{path}:3:3: routes[0].path: ")


def test_the_level_goes_with_an_upstream_too(served: list[tuple[Config, ConfigFile | None]]) -> None:
    assert command.main(["serve", "--upstream", UPSTREAM, "--log-level", "error"]) == 0
    assert levels == ["error"]
    assert served[0][0].log.level == "error"


def test_another_level_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["serve", "--upstream", UPSTREAM, "--log-level", "loud"])
    assert "'debug', 'info', 'warning', 'error'" in capsys.readouterr().err


def test_check_warns_of_bodies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "gateway.yaml", debug={"bodies": True})
    assert command.main(["check", "--config", str(path)]) == 0
    assert "caution: debug.bodies is true" in capsys.readouterr().out
    path = written(tmp_path / "gateway.yaml")
    assert command.main(["check", "--config", str(path)]) == 0
    assert "caution" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sections", "shown", "code"),
    [
        ({}, "", 0),
        ({"hold": {"ttl_seconds": 900}}, "note: routes[/mcp]: hold.ttl_seconds (900)", 1),
        ({"debug": {"bodies": True}}, "caution: debug.bodies is true", 1),
    ],
)
def test_a_strict_check_fails_on_cautions_and_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sections: dict[str, Any], shown: str, code: int
) -> None:
    path = str(written(tmp_path / "gateway.yaml", **sections))
    assert command.main(["check", "--config", path, "--strict"]) == code
    assert command.main(["check", "--config", path]) == 0
    out = capsys.readouterr().out
    assert out.count(shown) == 2 or not shown
    assert out.startswith("configuration is valid\n")


def test_a_level_that_the_file_gets_wrong_stays_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "gateway.yaml", log={"level": "loud"})
    with pytest.raises(ConfigError, match="loud"):
        ConfigFile(path, "debug").load()


def test_the_program_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == "", "a script that forgot the command must not take this for output"
    for name in ("serve", "check", "probe", "doctor", "health", "schema", "keygen", "demo"):
        assert f"\n    {name} " in printed.err


def test_the_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    defaults = {
        "serve": ("127.0.0.1:8080", str(Config(routes=()).admin), "log.level, which is info by default"),
        "probe": ("auto", "the `timeouts` of the configuration; handshake_seconds is 10 by default"),
        "health": ("3",),
    }
    for name, words in defaults.items():
        with pytest.raises(SystemExit, match="0"):
            command.main([name, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        for word in words:
            assert f"(default: {word})" in shown, name


def test_schema_prints_the_published_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["schema"]) == 0
    assert capsys.readouterr().out == (REPOSITORY / "config" / "mrtr-gateway.schema.json").read_text()
