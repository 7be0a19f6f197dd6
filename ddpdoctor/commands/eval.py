"""``ddpdoctor eval``: evaluate an expression in the ranks of a live run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ddpdoctor.core.formatting import grouped, grouped_lines, json_text
from ddpdoctor.core.options import RANKS, Parser, seconds

PARSER = Parser(
    "eval",
    """\
Usage: ddpdoctor eval [OPTIONS] EXPRESSION [RUN]

Evaluate a Python expression in the ranks of a live run, at the end of a step,
without stopping them: ddpdoctor eval 'loss.item()'. What ranks have in common
is shown once.

RUN is a run's name or directory [default: your newest live run].

Options:
  --ranks RANKS     Only these ranks, such as 0,2-3 [default: all].
  --within SECONDS  Wait so long for the step to end [default: 10].
  --json            The values as JSON.
  -h, --help        Show this text.

The expression sees the variables of the function that called
optimizer.step(), then of its callers and their modules. It runs in the job, on
the training thread, with the job's rights: read with it, and change nothing.
It runs once more if the ranks were not at the same step.
The peers wait for the rank meanwhile, and what reads a GPU's tensor waits for
the GPU. After 2 seconds of Python it is interrupted; a call of native code,
such as a collective, cannot be. Values are cut after 4096 characters.

Exit status: 0; 1 if a rank has no value; 2 if there is no such run or rank.
""",
    {"--ranks": RANKS, "--within": seconds(0.1, 3600)},
)

LEADS = 0.5, 3.0
"""Seconds until the chosen step ends, so that all ranks have been asked by then. The second value
is for another try if the first was too short."""


def main(words: Sequence[str]) -> int:
    """Evaluate the expression and print its values."""
    given = PARSER.read(words)
    if not 1 <= len(given.rest) <= 2:
        raise PARSER.wrong("name an expression, in quotes, and at most one run")
    from ddpdoctor.debug import attach_points, sessions
    from ddpdoctor.debug.clients import EVALUATE

    expression = given.rest[0]
    run = attach_points.debugged_run(given.rest[1] if len(given.rest) == 2 else None)
    ranks = attach_points.chosen_ranks(run, given.get("--ranks"))
    for lead in LEADS:
        within = given.get("--within", 10.0)
        answers = sessions.ask(run, ranks, EVALUATE, lead, expression=expression, seconds=within)
        steps = {each["step"] for each in answers.values() if "step" in each}
        if len(steps) <= 1 or any("trouble" in each for each in answers.values()):
            break
    texts = {rank: each.get("value") or sessions.trouble(each) for rank, each in answers.items()}
    if "--json" in given:
        document = {
            "format": 1,
            "run": run.path.name,
            "expression": expression,
            "ranks": [
                {
                    "rank": rank,
                    "step": each.get("step"),
                    "value": each.get("value"),
                    "error": None
                    if "value" in each
                    else each.get("error") or sessions.trouble(each),
                }
                for rank, each in answers.items()
            ],
            "groups": [same for same, _ in grouped(texts)],
        }
        print(json_text(document, indent=1))
    else:
        for line in grouped_lines(texts):
            print(line)
        if len(steps) > 1:
            text = f"the ranks are not at one step: steps {min(steps)} to {max(steps)}"
            print(f"ddpdoctor: {text}", file=sys.stderr)
    return 0 if all("value" in each for each in answers.values()) else 1
