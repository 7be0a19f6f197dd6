"""``ddpdoctor mcp``: the commands of ddpdoctor as tools of an AI assistant."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.options import Parser

PARSER = Parser(
    "mcp",
    """\
Usage: ddpdoctor mcp [OPTIONS]

Serve an AI assistant by the Model Context Protocol on stdin and stdout: your
runs, their findings, steps and stacks, logs, lint, check and explain, as tools.
Needs the package mcp: pip install 'ddpdoctor[mcp]'.

Options:
  --allow-control   Offer the tools evaluate and debug, too: they run code in the
                    ranks of a live job, and can pause it.
  --skill           Print the page that teaches an assistant how to debug a job,
                    for its AGENTS.md or its folder of skills, and exit.
  -h, --help        Show this text.

All text of jobs, logs and source code is marked as data, and is cut where it is
long. An MCP client passes few variables on: set TMPDIR in its configuration if
your runs are there.
""",
)

SKILL = Path(__file__).with_name("mcp_skill.md")


def main(words: Sequence[str]) -> int:
    """Serve one assistant until it disconnects."""
    given = PARSER.read(words)
    if given.rest:
        raise DoctorError("mcp takes no argument", "its client names runs and files")
    if "--skill" in given:
        sys.stdout.write(SKILL.read_text())
        return 0
    try:
        from ddpdoctor.commands.mcp_server import serve
    except ImportError as error:
        raise DoctorError(
            f"mcp needs the package of that name: {error}",
            "install it: pip install 'ddpdoctor[mcp]'",
        ) from None
    # The front matter is only for skill files.
    serve(SKILL.read_text().split("---\n", 2)[2].strip(), control="--allow-control" in given)
    return 0
