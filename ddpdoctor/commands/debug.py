"""``ddpdoctor debug``: debug the ranks of a live run at a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.core.options import RANKS, Parser, text

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
    from ddpdoctor.commands.debug_prompt import Prompt
    from ddpdoctor.debug import attach_points
    from ddpdoctor.debug.sessions import Sessions

    run = attach_points.debugged_run(PARSER.one_run(given))
    sessions = Sessions(run.path, all_code="--all-code" in given)
    chosen = given.get("--ranks")
    if chosen:
        attach_points.chosen_ranks(run, chosen)
    prompt = Prompt(sessions, chosen)
    try:
        return prompt.run(given.get("--command"))
    finally:
        sessions.leave()
