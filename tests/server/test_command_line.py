"""What `serve` and `check` do with log levels, traces and bodies before anything is served."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway import __main__ as command
from gateway.config import Config, ConfigError, ConfigFile, digest, load
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
    assert command.main([name, "-c", str(path)]) == 1
    program = "mrtr-gateway: " if name == "wrap" else ""
    assert capsys.readouterr().err.startswith(f"{program}{path}:3:3: routes[0].path: ")


def test_a_host_is_told_what_was_read_of_an_error_without_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing.yaml"
    assert command.main(["wrap", "--config", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"mrtr-gateway: {path}, {path}: cannot be read (")


def test_the_level_goes_with_an_upstream_too(served: list[tuple[Config, ConfigFile | None]]) -> None:
    assert command.main(["serve", "--upstream", UPSTREAM, "--log-level", "error"]) == 0
    assert levels == ["error"]
    ((config, file),) = served
    assert (config.log.level, file) == ("error", None), "there is no file to read again"


def test_another_level_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["serve", "--upstream", UPSTREAM, "--log-level", "loud"])
    assert "'debug', 'info', 'warning', 'error'" in capsys.readouterr().err


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
    assert out.startswith("configuration is valid, digest ")


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


@pytest.mark.parametrize(
    "given", [("{}",), ("-c", "{}"), ("--config", "{}"), ()], ids=["FILE", "-c", "--config", "env"]
)
def test_a_file_is_named_in_the_ways_of_other_programs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    served: list[tuple[Config, ConfigFile | None]],
    given: tuple[str, ...],
) -> None:
    path = str(written(tmp_path / "gateway.yaml"))
    if not given:
        monkeypatch.setenv("GATEWAY_CONFIG", path)
    words = [word.format(path) for word in given]
    assert command.main(["check", *words]) == 0
    assert f"no server was asked: `mrtr-gateway doctor --config {path}` asks them" in capsys.readouterr().out
    assert command.main(["serve", *words]) == 0
    assert [file.path for _, file in served if file is not None] == [Path(path)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check"], "no configuration; write mrtr-gateway check FILE, or set GATEWAY_CONFIG"),
        (["serve"], "no configuration; write mrtr-gateway serve FILE, or set GATEWAY_CONFIG"),
        (["chekc", "a.yaml"], '"chekc" is not a command; did you mean `mrtr-gateway check`?'),
        (["help", "chekc"], '"chekc" is not a command; did you mean `mrtr-gateway check`?'),
        (["gateway.yaml"], '"gateway.yaml" is not a command; did you mean `mrtr-gateway serve gateway.yaml`?'),
        (["else"], "invalid choice: 'else'"),
        (["check", "a.yaml", "-c", "b.yaml"], "give one of FILE"),
        (["serve", "a.yaml", "--upstream", UPSTREAM], "give one of FILE"),
        (["serve", "--upstream", UPSTREAM, "--stdio", "--", "x"], "give one of FILE"),
    ],
    ids=" ".join,
)
def test_wrong_words_are_bad_usage_and_say_what_to_write(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(words)
    assert said in capsys.readouterr().err


def test_check_answers_programs_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        f"routes:\n- upstream: {{url: '{UPSTREAM}'}}\n  forward_headers: [traceparent]\ndebug:\n  bodies: true\n"
    )
    assert command.main(["check", "--json", "--strict", str(path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["valid"], found["problems"], found["notes"]) == (True, [], [])
    assert found["configuration"] == digest(load(path))
    assert [each | {"text": each["text"].partition(" ")[0]} for each in found["cautions"]] == [
        {"file": str(path), "line": line, "column": 3, "key": key, "text": key}
        for line, key in ((3, "routes[/mcp].forward_headers"), (5, "debug.bodies"))
    ], "the text begins with the key"
    path.write_text(f"listen: 8090\nroutes: [{{upstream: {{url: '{UPSTREAM}'}}}}]\n")
    assert command.main(["check", "--json", str(path)]) == 1
    found = json.loads(capsys.readouterr().out)
    text = 'listen: 8090 is not host:port; write "127.0.0.1:8090"'
    wrong = {"file": str(path), "line": 1, "column": 1, "key": "listen", "text": text}
    assert found == {"valid": False, "configuration": None, "problems": [wrong], "cautions": [], "notes": []}
    path.unlink()
    assert command.main(["check", "--json", str(path)]) == 1
    found = json.loads(capsys.readouterr().out)
    (unread,) = found["problems"]
    assert unread["text"].startswith(f"{path}: cannot be read")
    assert (unread["line"], unread["column"], unread["key"]) == (None, None, None)


def test_check_shows_the_cautions_beside_the_errors_as_far_as_they_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        f"""\
debug: {{bodies: true}}
hold: {{ttl: 900}}
principal: {{source: jvt}}
routes:
- upstream: {{url: '{UPSTREAM}'}}
  credentials: {{mode: replace, token: secret}}
  forward_headers: [traceparent, x-forwarded-token]
  bind_headres: []
- upstream: {{command: [/nope]}}
  path: two
- upstream: {{command: [nope]}}
  path: /three
state: {{keys: [short, '{"A" * 43}']}}
listen: 0.0.0.0:80
"""
    )
    assert command.main(["check", str(path)]) == 1
    out, err = capsys.readouterr()
    found = [line.removeprefix(f"{path}:").split(": ", 1)[1] for line in err.splitlines()]
    assert out == ""
    assert [" ".join(each.split()[:2]) for each in found] == [
        "note: security.allowed_hosts",
        "caution: debug.bodies",
        "hold.ttl: unknown",
        'principal.source: "jvt"',
        "caution: routes[/mcp].forward_headers",
        "routes[0].bind_headres: unknown",
        "routes[1].upstream.command: there",
        'routes[1].path: "two"',
        "caution: routes[/three].upstream.command:",
        "state.keys[0]: is",
        "note: state.keys[1]",
    ], "neither the value that is in place of a wrong one nor what a misspelt key may turn off is remarked on"


@pytest.mark.parametrize(
    ("word", "shown"),
    [(["version"], "mrtr-gateway "), (["-V"], "mrtr-gateway "), (["help"], "usage: "), (["help", "check"], "[FILE]")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_words_for_the_version_and_the_help(capsys: pytest.CaptureFixture[str], word: list[str], shown: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(word)
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("name", ["schema", "keygen"])
def test_a_full_disk_is_told_without_a_traceback(name: str) -> None:
    program = f"{sys.executable} -m gateway {name} >/dev/full"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    said = "mrtr-gateway: the output cannot be written (No space left on device); make room for it\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_reader_that_has_seen_enough_sees_no_traceback() -> None:
    program = f"{sys.executable} -m gateway schema | head -1"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert (done.stdout, done.stderr) == ("{\n", "")
