"""What a shell completes."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway import __main__ as command
from gateway.shell_completion import SHELLS

COMMANDS = ["check", "completion", "demo", "doctor", "health", "help", "keygen", "probe", "schema", "serve", "version"]
COMMANDS += ["wrap"]
FILE = "pyproject.toml"


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert command.main(["completion", shell]) == 0
    return capsys.readouterr().out


def in_shell(shell: str, text: str) -> list[str]:
    """What a shell prints that runs a text."""
    options = ["-f"] if shell == "zsh" else []
    done = subprocess.run([shell, *options, "-c", text], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def in_bash(script: str, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in ("mrtr-gateway", *words))
    call = f"_shtab_mrtr_gateway mrtr-gateway '{words[-1]}' '{[*words][-2:-1] or ['mrtr-gateway']}'"
    state = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}"
    return in_shell("bash", f"{script}\n{state}; {call}; printf '%s\\n' \"${{COMPREPLY[@]}}\"")


def in_fish(script: str, *words: str) -> list[str]:
    """What fish offers for the last of these words, without the descriptions."""
    line = " ".join(("mrtr-gateway", *words))
    return in_shell("fish", f"{script}\ncomplete -C '{line}' | cut -f1")


@pytest.mark.parametrize(("shell", "offered"), [("bash", in_bash), ("fish", in_fish)])
def test_a_shell_completes_commands_options_choices_and_files(
    shell: str, offered: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"apt install {shell}")
    script = printed(shell, capsys)

    def complete(*words: str) -> list[str]:
        return sorted(offered(script, *words))

    assert complete("s") == ["schema", "serve"]
    assert complete("") == complete("help", "") == COMMANDS
    assert complete("-") == ["--help", "--version", "-V", "-h"]
    assert complete("completion", "") == sorted(SHELLS)
    assert complete("serve", "--log-level", "w") == ["warning"]
    assert complete("check", "--st") == ["--strict"]
    assert complete("health", "--") == ["--admin", "--config", "--help", "--ready", "--timeout"]
    assert complete("demo", "--") == ["--cache", "--help"]
    assert {"--config", "--era", "-c", "-h"} < {*complete("wrap", "-")}
    for words in (("check",), ("serve", "-c"), ("wrap", "-c"), ("doctor", "--ca-file"), ("health", "-c")):
        assert FILE in complete(*words, FILE[:4])


@pytest.mark.skipif(shutil.which("zsh") is None, reason="apt install zsh")
@pytest.mark.parametrize("how", ['eval "$(cat {})"', "source {}"])
def test_zsh_takes_the_script_in_either_way(how: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(printed("zsh", capsys))
    begin = "autoload -Uz compinit && compinit -u -D"
    shown = in_shell("zsh", f"{begin}; {how.format(script)}; print $_comps[mrtr-gateway]")
    assert shown == ["_shtab_mrtr_gateway"]
