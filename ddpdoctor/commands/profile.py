"""``ddpdoctor profile``: profile some steps of the ranks of a live run."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import named, shown
from ddpdoctor.core.options import FILE, RANKS, Parser, number, seconds

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run

PARSER = Parser(
    "profile",
    """\
Usage: ddpdoctor profile [OPTIONS] [RUN]

Start torch.profiler in ranks of a live run, in all of them at the same step,
and write one trace for ui.perfetto.dev: its operators and kernels, beside the
steps, phases and findings that ddpdoctor records, on one clock.

RUN is a run's name or directory [default: your newest live run].

Options:
  --steps N         Profile N steps [default: 3].
  --ranks RANKS     Only these ranks, such as 0,2-3 [default: all of this node].
  --out FILE        Write there; compressed if FILE ends in .gz
                    [default: profile-RUN-STEP.json.gz].
  --memory          Record the allocations on the GPUs in place of a trace: a
                    snapshot for pytorch.org/memory_viz per rank.
  --within SECONDS  Wait so long for the steps to end [default: 120].
  -h, --help        Show this text.

The profiled steps are slower, the others are as they were. A step may take
seconds longer when torch.profiler is first loaded, and the peers wait.

Exit status: 0; 1 if a rank was not profiled; 2 if there is no such run or rank.
""",
    {"--steps": number(1, 1000), "--ranks": RANKS, "--out": FILE, "--within": seconds(1, 3600)},
)

LEAD = 1.0  # Seconds until the first profiled step, so that all ranks have been asked by then


def main(words: Sequence[str]) -> int:
    """Profile the ranks, and write the trace."""
    given = PARSER.read(words)
    name = PARSER.one_run(given)
    if "--memory" in given and "--out" in given:
        raise DoctorError("--memory writes a file per rank", "leave out --out")
    from ddpdoctor.debug import attach_points, sessions
    from ddpdoctor.debug.clients import PROFILE

    run = attach_points.debugged_run(name)
    ranks = attach_points.chosen_ranks(run, given.get("--ranks"))
    elsewhere = {each.rank: each.node for each in attach_points.points(run) if each.node}
    if "--ranks" not in given:
        ranks = frozenset(ranks) - elsewhere.keys() or ranks
    for rank in sorted(ranks):
        if rank in elsewhere:
            raise DoctorError(
                f"rank {rank} runs on {elsewhere[rank]}", "run `ddpdoctor profile` there"
            )
    folder = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    answers = sessions.ask(
        run,
        ranks,
        PROFILE,
        LEAD,
        steps=given.get("--steps", 3),
        seconds=given.get("--within", 120.0),
        memory="--memory" in given,
        folder=folder,
    )
    done = {rank: each for rank, each in answers.items() if "path" in each}
    for rank, each in answers.items():
        if rank not in done:
            print(f"ddpdoctor: rank {rank}: {shown(_reason(each))}", file=sys.stderr)
    if not done:
        return 1
    steps = sorted({each["step"] for each in done.values()})
    if len(steps) > 1:
        print(f"ddpdoctor: the ranks began at steps {steps[0]} to {steps[-1]}", file=sys.stderr)
    if "--memory" in given:
        for each in done.values():
            print(f"wrote {shown(str(each['path']))}")
    else:
        out = given.get("--out", f"profile-{run.path.name}-{steps[0]}.json.gz")
        size = _write(run, folder, out)
        count = given.get("--steps", 3)
        print(
            f"wrote {out}, {size / 1e6:.1f} MB: {named(done)}, steps {steps[0]} to "
            f"{steps[0] + count - 1}; open it in ui.perfetto.dev"
        )
    return 0 if len(done) == len(answers) else 1


def _reason(answer: dict[str, Any]) -> str:
    return str(answer.get("error") or answer.get("trouble") or "no trace").removeprefix("*** ")


def _write(run: Run, folder: str, out: str) -> int:
    """Merge the ranks' traces with the run's own timeline. Return the size in bytes."""
    import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
    from ddpdoctor.core.finding import RULES, examine
    from ddpdoctor.render import chrome_trace
    from ddpdoctor.run.names import PROFILES
    from ddpdoctor.run.reader import RunReader

    snapshot = RunReader(run.path, lenient=True).snapshot()
    profiles = chrome_trace.read_profiles(str(run.path / PROFILES / folder), snapshot)
    found = list(examine(snapshot, RULES.values()))
    try:
        return chrome_trace.write_trace(out, snapshot, found, profiles, out.endswith(".gz"))
    except OSError as error:
        raise DoctorError(
            f"cannot write {out}: {error.strerror}",
            f"the ranks' own traces are in {run.path / PROFILES / folder}",
        ) from None
