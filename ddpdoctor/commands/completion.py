"""``ddpdoctor completion``: a script with which a shell completes commands and options."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence

from ddpdoctor.core.commands import COMMANDS
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.options import DIRECTORY, Described, Parser
from ddpdoctor.core.torchrun import known_options

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
    """Print the script of a shell.

    Raises:
        DoctorError: There is none for it.
    """
    given = PARSER.read(words)
    if given.help:
        sys.stdout.write(PARSER.help)
        return 0
    scripts = {"bash": bash, "zsh": zsh, "fish": fish}
    if len(given.rest) != 1 or given.rest[0] not in scripts:
        raise DoctorError("name one shell: bash, zsh or fish", "ddpdoctor completion bash")
    sys.stdout.write(scripts[given.rest[0]]())
    return 0


def parsers() -> dict[str, Parser]:
    """The command line of each command, by name."""
    modules = {name: importlib.import_module(f"ddpdoctor.commands.{name}") for name in COMMANDS}
    return {name: module.PARSER for name, module in modules.items()}


def _options(parser: Parser) -> Iterator[Described]:
    """The options of a command, and torchrun's where they are passed on."""
    yield from parser.described
    for name, takes in known_options().takes_value.items() if parser.leading else ():
        if name.startswith("--") and "_" not in name and name not in parser.options:
            yield Described(name, "VALUE" if takes else "", "passed on to torchrun")


def bash() -> str:
    """The script for bash."""
    options, values = [], []
    for command, parser in parsers().items():
        known = list(_options(parser))
        options.append(f'    {command}) options="{" ".join(each.name for each in known)}" ;;')
        for each in known:
            if each.choices:
                what = f'-W "{" ".join(each.choices)}"'
            elif parser.values.get(each.name) == DIRECTORY:
                what = "-d"
            else:
                what = "-f" if each.metavar and not each.metavar.startswith("[") else ""
            if what:
                reply = f'COMPREPLY=($(compgen {what} -- "$current"))'
                values.append(f"    {command}:{each.name}) {reply}; return ;;")
    return "\n".join(
        [
            "_ddpdoctor() {",
            '  local current="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" options word',
            "  COMPREPLY=()",
            "  if ((COMP_CWORD == 1)); then",
            f'    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)}" -- "$current"))',
            "    return",
            "  fi",
            "  # Behind -- all is the job's own.",
            '  for word in "${COMP_WORDS[@]:2:COMP_CWORD-2}"; do',
            '    [[ $word == "--" ]] && return',
            "  done",
            '  case "$command:${COMP_WORDS[COMP_CWORD-1]}" in',
            *values,
            "  esac",
            '  case "$command" in',
            *options,
            "  esac",
            '  [[ $current == -* ]] && COMPREPLY=($(compgen -W "$options" -- "$current"))',
            "}",
            "complete -o default -F _ddpdoctor ddpdoctor",
            "",
        ]
    )


def zsh() -> str:
    """The script for zsh."""
    cases = []
    for command, parser in parsers().items():
        cases.append(f"    {command}) options=(")
        for each in _options(parser):
            text = each.text.translate(_IN_ZSH)
            value = ""
            if each.metavar:
                where = f"({' '.join(each.choices)})" if each.choices else "_files"
                where = "_directories" if parser.values.get(each.name) == DIRECTORY else where
                optional = ":" if each.metavar.startswith("[") else ""
                value = f":{optional}{each.metavar.strip('[]').translate(_IN_ZSH)}:{where}"
            cases.append(f"      {_quoted(f'*{each.name}[{text}]{value}')}")
        cases.append("    ) ;;")
    commands = [
        f"    {_quoted(f'{name}:{summary.translate(_IN_ZSH)}')}"
        for name, summary in COMMANDS.items()
    ]
    return "\n".join(
        [
            "#compdef ddpdoctor",
            "_ddpdoctor() {",
            "  local -a commands options",
            "  commands=(",
            *commands,
            "  )",
            "  if ((CURRENT == 2)); then",
            "    _describe command commands",
            "    return",
            "  fi",
            "  case $words[2] in",
            *cases,
            "  esac",
            "  shift words",
            "  ((CURRENT--))",
            "  _arguments : $options '*:file:_files'",
            "}",
            'if [[ $funcstack[1] == _ddpdoctor ]]; then _ddpdoctor "$@"',
            "else compdef _ddpdoctor ddpdoctor; fi",
            "",
        ]
    )


def fish() -> str:
    """The script for fish."""
    lines = [
        f"complete -c ddpdoctor -n __fish_use_subcommand -f -a {name} -d {_quoted(summary)}"
        for name, summary in COMMANDS.items()
    ]
    for command, parser in parsers().items():
        for each in _options(parser):
            line = f"complete -c ddpdoctor -n '__fish_seen_subcommand_from {command}'"
            line += f" -l {each.name[2:]} -d {_quoted(each.text)}"
            if each.choices:
                line += f" -x -a {_quoted(' '.join(each.choices))}"
            elif parser.values.get(each.name) == DIRECTORY:
                line += " -x -a '(__fish_complete_directories)'"
            elif each.metavar and not each.metavar.startswith("["):
                line += " -r"
            lines.append(line)
    return "\n".join([*lines, ""])


_IN_ZSH = str.maketrans({":": "\\:", "[": "(", "]": ")"})


def _quoted(text: str) -> str:
    """A word as all three shells read it."""
    return "'" + text.replace("'", "'\\''") + "'"
