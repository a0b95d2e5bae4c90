"""Prints the shell completion of the command line, made from its parser."""

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "fish", "zsh")

_BASH = """\
_mrtr_gateway() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words
  case ${{COMP_WORDS[COMP_CWORD-1]}} in
{choices}
  esac
  case $COMP_CWORD:${{COMP_WORDS[1]}} in
    1:*) words="{commands}" ;;
{options}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _mrtr_gateway mrtr-gateway
"""


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the text that a shell's start file evaluates."""
    if shell == "fish":
        return "\n".join(_fish(parser)) + "\n"
    text = _bash(parser)
    return text if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{text}"


def _commands(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Return the parser of each command, with its help."""
    (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001
    helps = {action.dest: action.help or "" for action in group._get_subactions()}  # noqa: SLF001
    return {name: (command, helps[name]) for name, command in group.choices.items()}


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.option_strings)  # noqa: SLF001


def _bash(parser: argparse.ArgumentParser) -> str:
    commands = _commands(parser)
    choices = {
        (name, " ".join(map(str, action.choices)))
        for command, _ in commands.values()
        for action in _options(command)
        if action.choices
        for name in action.option_strings
    }
    cases = [
        f'    {name}) COMPREPLY=($(compgen -W "{words}" -- "$word")); return ;;' for name, words in sorted(choices)
    ]
    options = [
        f'    *:{name}) words="{" ".join(word for action in _options(command) for word in action.option_strings)}" ;;'
        for name, (command, _) in commands.items()
    ]
    options.insert(0, f'    2:completion) words="{" ".join(SHELLS)}" ;;')
    return _BASH.format(choices="\n".join(cases), commands=" ".join(commands), options="\n".join(options))


def _fish(parser: argparse.ArgumentParser) -> Iterator[str]:
    for name, (command, text) in _commands(parser).items():
        yield f"complete -c mrtr-gateway -n __fish_use_subcommand -f -a {name} -d {_quoted(text)}"
        for action in _options(command):
            long = next((word for word in action.option_strings if word.startswith("--")), "")
            if not long:
                continue
            takes = "" if action.nargs == 0 else " -r"
            words = f" -a {_quoted(' '.join(map(str, action.choices)))}" if action.choices else ""
            where = f"-n '__fish_seen_subcommand_from {name}'"
            yield f"complete -c mrtr-gateway {where} -l {long.removeprefix('--')}{takes}{words}"
    yield f"complete -c mrtr-gateway -n '__fish_seen_subcommand_from completion' -f -a '{' '.join(SHELLS)}'"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
