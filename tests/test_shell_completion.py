"""What a shell completes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from gateway import __main__ as command
from gateway.shell_completion import SHELLS


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert command.main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in words)
    state = f"COMP_WORDS=(mrtr-gateway {line}); COMP_CWORD={len(words)}"
    ask = f"{state}; _mrtr_gateway; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="apt install bash")
def test_bash_completes_commands_options_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    script = printed("bash", capsys)
    assert completed(script, "s") == ["serve", "schema"]
    assert "--upstream" in completed(script, "serve", "--up")
    assert completed(script, "serve", "--log-level", "w") == ["warning"]
    assert completed(script, "completion", "") == list(SHELLS)
    assert completed(script, "check", "--st") == ["--strict"]
    assert completed(script, "health", "--") == ["--admin", "--config", "--help", "--ready", "--timeout"]
    assert completed(script, "demo", "--") == ["--cache", "--help"]
    assert completed(script, "wrap", "-") == [
        "--config",
        "--era",
        "--help",
        "--log-level",
        "--route",
        "--upstream",
        "-c",
        "-h",
    ]
    assert completed(script, "-V") == ["-V"]


@pytest.mark.parametrize("shell", ["fish", "zsh"])
def test_other_shells_accept_their_script(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = printed(shell, capsys)
    assert "mrtr-gateway" in script
    for word in ("serve", "probe", "strict"):
        assert word in script
    if shutil.which(shell) is not None:
        path = tmp_path / "completion"
        path.write_text(script)
        assert subprocess.run([shell, "-n", str(path)], check=False).returncode == 0
