"""``ddpdoctor debug``: debug the ranks of a live run at a prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddpdoctor.core.opening import integer
from ddpdoctor.core.options import RANKS, Parser, text

if TYPE_CHECKING:
    from ddpdoctor.run.records.supervisor import RankStacks
    from ddpdoctor.run.snapshot import Run

PARSER = Parser(
    "debug",
    """\
Usage: ddpdoctor debug [OPTIONS] [RUN]

Debug the ranks of a live run at a prompt, with pdb's commands, on all chosen
ranks at once. What ranks have in common is shown once. `help` lists the
commands, Ctrl-C pauses the ranks, `q` leaves them running.

RUN is a run's name or directory [default: your newest live run].

Options:
  --ranks RANKS     The ranks that commands are for, such as 0,2-3
                    [default: all; `ranks` chooses others later].
  --all-code        Step into the code of libraries, too.
  -c, --command CMD
                    Run this command instead of a prompt. May be repeated.
                    Without a terminal, commands come from standard input.
  -h, --help        Show this text.

A rank is attached to once a command needs it. Ranks that wait at breakpoint(),
or with --debug-on-error at an exception, are attached to at once.

Exit status: 0; 1 if one of the given commands failed; 2 if there is no such run
or rank.
""",
    {"--ranks": RANKS, "--command": text("a command")._replace(repeated=True)},
)


def main(words: Sequence[str]) -> int:
    """Debug a run at a prompt, or by commands."""
    given = PARSER.read(words)
    from ddpdoctor.debug import attach_points
    from ddpdoctor.debug.prompt import Prompt
    from ddpdoctor.debug.sessions import Sessions

    run = attach_points.debugged_run(PARSER.one_run(given))
    sessions = Sessions(run.path, all_code="--all-code" in given)
    chosen = given.get("--ranks")
    if chosen:
        attach_points.chosen_ranks(run, chosen)
    prompt = Prompt(sessions, chosen, _drawn_stacks)
    try:
        return prompt.run(given.get("--command"))
    finally:
        sessions.leave()


def _drawn_stacks(stacks: Sequence[RankStacks], run: Run) -> Iterator[str]:
    from ddpdoctor.render import stack_text, terminal
    from ddpdoctor.stacks.frames import code_of_stacks

    ascii_only = terminal.only_ascii(sys.stdout, terminal.given_environment())
    style = stack_text.StackStyle(terminal.columns(160), ascii_only)
    code = code_of_stacks(stacks, integer(run.manifest, "started"))
    for line in stack_text.draw(stacks, style, code):
        yield terminal.plain(terminal.cleaned(line, ascii_only))
