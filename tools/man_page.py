"""Writes the man page from the help texts: ``python -m tools.man_page``.

The wheel holds it, as ``share/man/man1/ddpdoctor.1``.
"""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.commands.completion import parsers
from ddpdoctor.core.commands import COMMANDS

PAGE = Path(__file__).parent.parent / "docs" / "ddpdoctor.1"

_HEAD = r"""
.TH DDPDOCTOR 1
.SH NAME
ddpdoctor \- debugger and diagnostics for PyTorch DistributedDataParallel jobs
.SH SYNOPSIS
.B ddpdoctor
.I COMMAND
[\fIARGS\fR...]
.SH DESCRIPTION
ddpdoctor names the rank, the line and the cause when a distributed job does not start, hangs,
crashes, or runs slower than it should, and what to change.
.SH COMMANDS
""".lstrip()

_FOOT = r"""
.SH FILES
.TP
.IR pyproject.toml ", " ddpdoctor.toml
Options: [tool.ddpdoctor.run] hang\-after = 60, or [run] in ddpdoctor.toml.
""".lstrip()


def page() -> str:
    """The page, in the macros of man(7)."""
    known = parsers()
    sections = [
        f".SS {_escaped(f'ddpdoctor {name}')}\n{_escaped(summary)}\n.PP\n.nf\n"
        f"{_escaped(known[name].help)}.fi\n"
        for name, summary in COMMANDS.items()
    ]
    return _HEAD + "".join(sections) + _FOOT


def _escaped(text: str) -> str:
    lines = text.replace("\\", "\\e").replace("-", "\\-").splitlines(keepends=True)
    # A line that begins with one of these would be a macro.
    return "".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
