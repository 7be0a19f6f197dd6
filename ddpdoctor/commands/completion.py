"""``ddpdoctor completion``: print a script that completes commands and options."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence

from ddpdoctor.core.commands import COMMANDS
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.options import DIRECTORY, Described, Parser, known_options

PARSER = Parser(
    "completion",
    """\
Usage: ddpdoctor completion bash|zsh|fish

Print a script that completes commands and options:

  bash    source <(ddpdoctor completion bash)         in ~/.bashrc
  zsh     source <(ddpdoctor completion zsh)          in ~/.zshrc, after compinit
  fish    ddpdoctor completion fish | source          in config.fish

Options:
  -h, --help        Show this text.
""",
)


def main(words: Sequence[str]) -> int:
    """Print the script for a shell."""
    given = PARSER.read(words)
    scripts = {"bash": bash, "zsh": zsh, "fish": fish}
    if len(given.rest) != 1 or given.rest[0] not in scripts:
        raise DoctorError("name one shell: bash, zsh or fish", "ddpdoctor completion bash")
    sys.stdout.write(scripts[given.rest[0]]())
    return 0


def parsers() -> dict[str, Parser]:
    """Return the command line of each command, by name."""
    modules = {name: importlib.import_module(f"ddpdoctor.commands.{name}") for name in COMMANDS}
    return {name: module.PARSER for name, module in modules.items()}


def _options(parser: Parser) -> Iterator[tuple[Described, str]]:
    """Yield the options of a command, and torchrun's where the command passes them on.

    Each comes with the kind of its value: ``words``, ``directory``, ``file``, or empty.
    """
    for each in parser.described:
        if each.choices:
            yield each, "words"
        elif parser.values.get(each.name) == DIRECTORY:
            yield each, "directory"
        else:
            yield each, "file" if each.metavar and not each.metavar.startswith("[") else ""
    for name, takes in known_options().takes_value.items() if parser.leading else ():
        if name.startswith("--") and "_" not in name and name not in parser.options:
            each = Described(name, "VALUE" if takes else "", "passed on to torchrun")
            yield each, "file" if takes else ""


_BASH = """\
_ddpdoctor() {
  local current="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" options word
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "COMMANDS" -- "$current"))
    return
  fi
  # All words after -- belong to the job.
  for word in "${COMP_WORDS[@]:2:COMP_CWORD-2}"; do
    [[ $word == "--" ]] && return
  done
  case "$command:${COMP_WORDS[COMP_CWORD-1]}" in
VALUES
  esac
  case "$command" in
OPTIONS
  esac
  [[ $current == -* ]] && COMPREPLY=($(compgen -W "$options" -- "$current"))
}
complete -o default -F _ddpdoctor ddpdoctor
"""

_ZSH = """\
#compdef ddpdoctor
_ddpdoctor() {
  local -a commands options
  commands=(
COMMANDS
  )
  if ((CURRENT == 2)); then
    _describe command commands
    return
  fi
  case $words[2] in
OPTIONS
  esac
  shift words
  ((CURRENT--))
  _arguments : $options '*:file:_files'
}
if [[ $funcstack[1] == _ddpdoctor ]]; then _ddpdoctor "$@"
else compdef _ddpdoctor ddpdoctor; fi
"""


def bash() -> str:
    """Return the script for bash."""
    options, values = [], []
    for command, parser in parsers().items():
        known = list(_options(parser))
        options.append(f'    {command}) options="{" ".join(each.name for each, _ in known)}" ;;')
        for each, kind in known:
            flags = {"words": f'-W "{" ".join(each.choices)}"', "directory": "-d", "file": "-f"}
            if kind:
                reply = f'COMPREPLY=($(compgen {flags[kind]} -- "$current"))'
                values.append(f"    {command}:{each.name}) {reply}; return ;;")
    script = _BASH.replace("COMMANDS", " ".join(COMMANDS)).replace("VALUES", "\n".join(values))
    return script.replace("OPTIONS", "\n".join(options))


def zsh() -> str:
    """Return the script for zsh."""
    escapes = str.maketrans({":": "\\:", "[": "(", "]": ")"})
    cases = []
    for command, parser in parsers().items():
        cases.append(f"    {command}) options=(")
        for each, kind in _options(parser):
            value = ""
            if each.metavar:
                where = {"words": f"({' '.join(each.choices)})", "directory": "_directories"}
                optional = ":" if each.metavar.startswith("[") else ""
                name = each.metavar.strip("[]").translate(escapes)
                value = f":{optional}{name}:{where.get(kind, '_files')}"
            cases.append(f"      {_quoted(f'*{each.name}[{each.text.translate(escapes)}]{value}')}")
        cases.append("    ) ;;")
    commands = (f"{name}:{summary.translate(escapes)}" for name, summary in COMMANDS.items())
    script = _ZSH.replace("COMMANDS", "\n".join(f"    {_quoted(each)}" for each in commands))
    return script.replace("OPTIONS", "\n".join(cases))


def fish() -> str:
    """Return the script for fish."""
    lines = [
        f"complete -c ddpdoctor -n __fish_use_subcommand -f -a {name} -d {_quoted(summary)}"
        for name, summary in COMMANDS.items()
    ]
    for command, parser in parsers().items():
        for each, kind in _options(parser):
            value = {
                "words": f" -x -a {_quoted(' '.join(each.choices))}",
                "directory": " -x -a '(__fish_complete_directories)'",
                "file": " -r",
            }.get(kind, "")
            lines.append(
                f"complete -c ddpdoctor -n '__fish_seen_subcommand_from {command}'"
                f" -l {each.name[2:]} -d {_quoted(each.text)}{value}"
            )
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    """Return a word in quotes that all three shells understand."""
    return "'" + text.replace("'", "'\\''") + "'"
