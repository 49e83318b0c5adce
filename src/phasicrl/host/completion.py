"""What a shell needs to complete commands of this program. Kind: pure.

A script has all words in it, taken from the help, so that a completion starts no Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

Command = tuple[str, ...]
"""A command by its words, without the program's name; empty: the program itself."""


def listed(said: str) -> list[str]:
    """The words that may come next by the lists "commands:" and "presets:" of a help text."""
    _, found, below = re.sub(r"\n(commands|presets):\n", "\0", said).partition("\0")
    return [line.split()[0] for line in below.split("\n\n")[0].splitlines()] if found else []


def options(said: str) -> dict[str, list[str]]:
    """The options of a help text, each with the values that it names in braces."""
    found = re.findall(
        r"^[│| ]*(--[a-z][\w.-]*)(?:, (--[\w.-]+))?(?: \{([^}]*)\})?", said, re.MULTILINE
    )
    return {
        name: values.split(",") if values else []
        for first, second, values in found
        for name in (first, second)
        if name
    }


def bash_script(
    helps: Mapping[Command, str], presets: Command, names: Mapping[str, Iterable[str]]
) -> str:
    """A script for bash; zsh reads it after `ZSH_HEAD`.

    Args:
        helps: what `--help` says of each command.
        presets: a command whose next word is a preset, after which `helps` has its options.
        names: what no help lists in braces: words behind a command, and values of an option
            (`plot --reference`).
    """
    words, values = [], []
    for command, said in helps.items():
        name, next_words = " ".join(command), listed(said)
        if not next_words or command == ():
            given = options(said)
            next_words = next_words or [*given, *names.get(name, ())]
            values += [
                f"    {_quoted(f'{name} {option}')}) words={_quoted(' '.join(choices))} ;;"
                for option, known in given.items()
                if (choices := [*known, *names.get(f"{name} {option}", ())])
            ]
        words.append(f"    {_quoted(name)}) words={_quoted(' '.join(next_words))} ;;")
    deep = sorted({" ".join(command[:1]) for command in helps if len(command) == 2})
    return _SCRIPT.format(
        deep="|".join(deep) or "''", preset=" ".join(presets), words="\n".join(words),
        values="\n".join(values),
    )  # fmt: skip


def _quoted(text: str) -> str:
    return f"'{text}'"


ZSH_HEAD = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
"""What zsh needs before a script for bash."""
_SCRIPT = """# Completion of phasicrl
_phasicrl() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" verb="" words=""
  (( COMP_CWORD > 1 )) && verb="${{COMP_WORDS[1]}}"
  case "$verb" in
    {deep}) (( COMP_CWORD > 2 )) && verb="$verb ${{COMP_WORDS[2]}}" ;;
  esac
  [[ "$verb" == '{preset} '* ]] && verb='{preset} PRESET'
  case "$verb" in
{words}
  esac
  case "$verb $prev" in
{values}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _phasicrl phasicrl
"""
