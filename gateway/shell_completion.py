"""Prints the shell completion of the command line, made from the help of its commands."""

import argparse
import re
from collections.abc import Mapping
from typing import Final

SHELLS: Final = ("bash", "fish", "zsh")
_OPTION: Final = re.compile(r"(?<![\w-])-(?:[a-zA-Z]\b|-[a-z][a-z-]*)")
_CHOICES: Final = re.compile(r"(--[a-z][a-z-]*) \{([^}]+)\}")
_BASH: Final = """\
_mrtr_gateway() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words
  case ${{COMP_WORDS[COMP_CWORD-1]}} in
{choices}
  esac
  case $COMP_CWORD:${{COMP_WORDS[1]}} in
    1:*) words="{commands} help version -h --help -V --version" ;;
    2:completion) words="{shells}" ;;
{options}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _mrtr_gateway mrtr-gateway
"""
_ZSH: Final = "autoload -U +X bashcompinit && bashcompinit\n"
_FISH: Final = "complete -c mrtr-gateway -n '__fish_{}' {}-a '{}'\n"


def script(shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the text that a shell's start file evaluates."""
    helps = {name: command.format_help() for name, command in commands.items()}
    options = {name: " ".join(sorted({*_OPTION.findall(text)})) for name, text in helps.items()}
    if shell == "fish":
        options["completion"] += " " + " ".join(SHELLS)
        words = (_FISH.format(f"seen_subcommand_from {name}", "", text) for name, text in options.items())
        return _FISH.format("use_subcommand", "-f ", " ".join(commands)) + "".join(words)
    choices = {name: words.replace(",", " ") for text in helps.values() for name, words in _CHOICES.findall(text)}
    cases = (
        f'    {name}) COMPREPLY=($(compgen -W "{words}" -- "$word")); return ;;' for name, words in choices.items()
    )
    bash = _BASH.format(
        choices="\n".join(cases),
        commands=" ".join(commands),
        shells=" ".join(SHELLS),
        options="\n".join(f'    *:{name}) words="{words}" ;;' for name, words in options.items()),
    )
    return _ZSH + bash if shell == "zsh" else bash
