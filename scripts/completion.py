#!/usr/bin/env python3
"""Writes the completion of the command for a shell from the table of src/cli/main.c, so that it knows every command and option.

completion.py bash|zsh|fish src/cli/main.c > nebula
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

# Which words are tags, and which options take a directory or a file. Others take a word that no shell can guess.
TAGS = ("inspect", "verify", "restore", "diff", "trace", "pin", "unpin", "flush")
NAMES = ("inspect", "restore")  # a file of the tag may follow
DIRECTORIES = ("path", "to", "in", "with", "hf", "config")
FILES = ("history", "textfile", "token-file", "out", "limits", "rename", "mapping", "write")


@dataclass(frozen=True)
class Command:
    name: str
    summary: str
    options: list[str]


def commands(source: str) -> list[Command]:
    """Returns the commands of the table. The options are those of the usage."""
    table = source.split("cli_commands[] = {")[1].split("\n};")[0]
    entry = re.compile(r'\{ "([a-z]+)",\s*"((?:[^"\\]|\\.)*)",\s*"((?:[^"\\]|\\.)*)",')
    option = re.compile(r"--([a-z][a-z0-9-]*)")
    found = [Command(name, summary, sorted({*option.findall(usage), "help"})) for name, usage, summary in entry.findall(table)]
    if len(found) != table.count("command_"):
        raise SystemExit("completion.py: an entry of the table in src/cli/main.c is not understood")
    return found


LIST = """nebula list --json ${storage:+--path="$storage"} 2>/dev/null | sed -n 's/^ *"tag": "\\(.*\\)",*$/\\1/p'"""
INSPECT = """nebula inspect "$tag" --json ${storage:+--path="$storage"} 2>/dev/null | sed -n '/"ranks"/q; s/^ *"name": "\\(.*\\)",*$/\\1/p'"""


def bash(table: list[Command]) -> str:
    options = "\n".join(f"        {one.name}) options='{' '.join('--' + name for name in one.options)}' ;;" for one in table)
    return f"""# bash completion of nebula
# Offers the lines of stdin that begin with $word. Names come from storage, and other users may have chosen them: compgen -W
# would expand them, and so run a command that stands in a name.
_nebula_offer() {{
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        [[ $line != "$word"* ]] || COMPREPLY+=("$line")
    done
}}
_nebula() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} command=${{COMP_WORDS[1]}} options= storage= tag= i
    local IFS=$'\\n'
    COMPREPLY=()
    for ((i = 2; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i - 1]}} in
        --path) storage=${{COMP_WORDS[i]}} ;;
        esac
        [[ ${{COMP_WORDS[i]}} == -* || ${{COMP_WORDS[i - 1]}} == --* ]] || tag=${{COMP_WORDS[i]}}
    done
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W '{chr(10).join(one.name for one in table)}' -- "$word"))
        return
    fi
    case $before in
    {"|".join("--" + name for name in DIRECTORIES)}) COMPREPLY=($(compgen -d -- "$word")); return ;;
    {"|".join("--" + name for name in FILES)}) COMPREPLY=($(compgen -f -- "$word")); return ;;
    --tag) _nebula_offer < <({LIST}); return ;;
    esac
    case $command in
{options}
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "${{options// /$'\\n'}}" -- "$word"))
        return
    fi
    case $command in
    {"|".join(NAMES)})
        [[ -z $tag ]] || {{ _nebula_offer < <({INSPECT}); return; }}
        ;;&
    {"|".join(TAGS)}) _nebula_offer < <(echo latest; {LIST}) ;;
    help) COMPREPLY=($(compgen -W '{chr(10).join(one.name for one in table)}' -- "$word")) ;;
    copy | follow) COMPREPLY=($(compgen -d -- "$word")) ;;
    esac
}}
complete -o filenames -F _nebula nebula
"""


def zsh(table: list[Command]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("'", "'\\''") + "'"

    listed = "\n".join(f"        {quoted(f'{one.name}:{one.summary}')}" for one in table)
    options = "\n".join(f"    {one.name}) choices=({' '.join('--' + name for name in one.options)}) ;;" for one in table)
    return f"""#compdef nebula
local -a subcommands choices
local storage= tag= i # path, commands and options are the shell's own
for ((i = 3; i < CURRENT; i++)); do
    [[ $words[i-1] == --path ]] && storage=$words[i]
    [[ $words[i] == -* || $words[i-1] == --* ]] || tag=$words[i]
done
if ((CURRENT == 2)); then
    subcommands=(
{listed}
    )
    _describe command subcommands
    return
fi
case $words[CURRENT-1] in
    {"|".join("--" + name for name in DIRECTORIES)}) _files -/; return ;;
    {"|".join("--" + name for name in FILES)}) _files; return ;;
    --tag) compadd -- ${{(f)"$({LIST})"}}; return ;;
esac
case $words[2] in
{options}
esac
if [[ $PREFIX == -* ]]; then
    compadd -- $choices
    return
fi
case $words[2] in
    {"|".join(NAMES)})
        if [[ -n $tag ]]; then
            compadd -- ${{(f)"$({INSPECT})"}}
            return
        fi ;|
    {"|".join(TAGS)}) compadd -- latest ${{(f)"$({LIST})"}} ;;
    help) compadd -- {" ".join(one.name for one in table)} ;;
    copy|follow) _files -/ ;;
esac
"""


def fish(table: list[Command]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [
        "# fish completion of nebula",
        "function __nebula_path",
        "    set -l words (commandline -opc)",
        "    if set -l at (contains -i -- --path $words)",
        "        echo --path\\n$words[(math $at + 1)]",
        "    end",
        "end",
        "function __nebula_tags",
        '    nebula list --json (__nebula_path) 2>/dev/null | sed -n \'s/^ *"tag": "\\(.*\\)",*$/\\1/p\'',
        "end",
        "complete -c nebula -f",
    ]
    for one in table:
        lines.append(f"complete -c nebula -n __fish_use_subcommand -a {one.name} -d {quoted(one.summary)}")
        here = f"-n '__fish_seen_subcommand_from {one.name}'"
        for name in one.options:
            kind = " -x -a '(__nebula_tags)'" if name == "tag" else " -r -F" if name in FILES else ""
            kind = " -r -a '(__fish_complete_directories)'" if name in DIRECTORIES else kind
            lines.append(f"complete -c nebula {here} -l {name}{kind}")
        if one.name in TAGS:
            lines.append(f"complete -c nebula {here} -a 'latest (__nebula_tags)'")
        if one.name == "help":
            lines.append(f"complete -c nebula {here} -a {quoted(' '.join(other.name for other in table))}")
        if one.name in ("copy", "follow"):
            lines.append(f"complete -c nebula {here} -a '(__fish_complete_directories)'")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write({"bash": bash, "zsh": zsh, "fish": fish}[sys.argv[1]](commands(Path(sys.argv[2]).read_text())))
