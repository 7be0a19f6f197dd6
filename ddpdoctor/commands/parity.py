"""``ddpdoctor parity``: compare the training of a job on one rank with that on several."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor.commands.scale import check_command, make_folder, sizes_option
from ddpdoctor.core import options
from ddpdoctor.core.commands import in_own_process
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import (
    RULES,
    Finding,
    Severity,
    examine,
    explains,
    to_record,
    worst_first,
)
from ddpdoctor.core.formatting import count, json_text, shown
from ddpdoctor.core.options import Given, Parser
from ddpdoctor.diagnose.parity import rows
from ddpdoctor.diagnose.parity.curves import Curves, beyond_noise, curves_of
from ddpdoctor.diagnose.parity.rules import models
from ddpdoctor.diagnose.parity.rules_data import epochs
from ddpdoctor.diagnose.parity.rules_evaluation import (
    CAUSES,
    compared_evaluations,
    compared_metrics,
    metric_differs,
    with_metrics,
)
from ddpdoctor.diagnose.parity.rules_rates import rates
from ddpdoctor.diagnose.parity.training import Training, training_of, wrapped_at
from ddpdoctor.render import console, curves, terminal
from ddpdoctor.render.html import parity_page as html
from ddpdoctor.replay.gradients import Comparison, Difference
from ddpdoctor.run.names import CAPSULE, TRAINED
from ddpdoctor.run.overrides import SEED, WEIGHTS
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import FaultRecord, OverrideRecord
from ddpdoctor.run.records.training import CapsuleRecord
from ddpdoctor.run.rundir import put
from ddpdoctor.run.snapshot import Run
from ddpdoctor.scale import results
from ddpdoctor.scale.results import AS_IT_IS, Launch, Planned, Variant, launch_from
from ddpdoctor.scale.session import Stopped, run_once, stop_at_signals
from ddpdoctor.supervise import command as job_command

DEFAULT_STEPS = 100
REPLAYED_STEP = 5  # A step after the first ones, in which torch and the job still prepare
WRITE_TIMEOUT = 1.0  # Seconds after the last step, in which the ranks write what they recorded
REPLAY_TIMEOUT = 600.0  # Seconds
SAME_WEIGHTS = 1e-9  # Relative difference of the norms of the same weights

PARSER = Parser(
    "parity",
    """\
Usage: ddpdoctor parity [OPTIONS] [RUN OPTIONS] [TORCHRUN OPTIONS] [--]
                        SCRIPT [ARGS...]
       ddpdoctor parity [OPTIONS] RUN RUN...

Run the same job, unedited, on few and on more ranks for a while, and print what
changes in the training, why it matters, and the line: the batch and the
learning rate at equal samples seen, epochs, losses, and the gradient. Or
compare runs that it made before, by their directories.

Options:
  --nproc N,N,...   Ranks [default: 1,2].
  --steps N         End each run after N optimizer steps [default: 100].
  --seeds N         Run the smallest size N times, with other seeds each, and say
                    whether a loss of more ranks is beyond their differences.
  --evaluate        Run each size once more with weights that stay as they were
                    before the first step, and compare the metrics it prints.
  --curves          Draw the losses over samples seen, also if they are the same.
  --html FILE       Write table, losses and findings as a page.
  --replay          Keep step 5 of each rank, compute it again in one process,
                    and compare the average of the ranks' gradients with DDP's.
  -v, --verbose     Print all rows, also if all sizes train alike.
  --json            Print one JSON object.
  --run-dir DIR     Keep run directories and logs in DIR, new or empty
                    [default: a directory below <tmp>/ddpdoctor-<uid>/].
  -h, --help        Show this text.

A run that is compared waits for its GPUs to read losses: its times mean
nothing. A kept step is a file in the run directory that only you can read.

Exit status: 0; 1 if a warning or an error was found, or a size failed; 2 for
bad input.
""",
    {
        "--nproc": sizes_option(),
        "--steps": options.number(2, 4096),
        "--seeds": options.number(2, 32),
        "--html": options.FILE,
        "--run-dir": options.DIRECTORY,
    },
    leading=True,
)


class Compared(NamedTuple):
    """One size that was run."""

    run: Run
    training: Training
    findings: tuple[Finding, ...]
    replayed: Comparison | None
    seed: int  # 0 for the script's own
    kept: bool  # Its weights stay as they were before the first step


class Result(NamedTuple):
    """The results to report for the compared sizes, smallest first."""

    every: list[Compared]
    found: list[Finding]
    failed: Sequence[str]  # Why other sizes cannot be compared
    drawn: Curves | None
    remarks: list[str]

    @property
    def differs(self) -> bool:
        """Whether a size trains or evaluates in another way."""
        return any(each.severity > Severity.INFO for each in self.found)


class _Enough(Exception):
    """The run has made enough steps."""


def main(words: Sequence[str]) -> int:
    """Run or read each size, and print what differs."""
    given = PARSER.read(words, job_command.PARSER.options)
    if not given.rest:
        raise DoctorError(
            "no script to run", "for example: ddpdoctor parity --nproc 1,2 -- train.py"
        )
    given_runs = [Path(each) for each in given.rest]
    if all((each / "run.json").is_file() for each in given_runs):
        if len(given_runs) < 2:
            raise DoctorError("one run alone cannot be compared", "name another one")
        runs = [_read(each) for each in given_runs]
        failed: list[str] = []
    else:
        try:
            runs, failed = _made(given)
        except Stopped as stopped:
            return 128 + stopped.number
    return _report(given, runs, failed)


def _report(given: Given, runs: list[Compared], failed: Sequence[str]) -> int:
    """Print what differs between runs. Returns the exit status."""
    runs.sort(key=lambda each: each.training.ranks)
    every = [each for each in runs if not each.seed and not each.kept]
    kept = [each for each in runs if each.kept]
    seeds = [each.training for each in runs if each.seed]
    metrics, said = _metrics(kept)
    noise = beyond_noise([each.training for each in every], seeds)
    result = Result(
        every,
        _findings(every, metrics),
        failed,
        curves_of([each.training for each in every], seeds),
        [*noise, *_not_followed(every), *said],
    )
    if "--json" in given:
        print(json_text(_document(result)))
    else:
        wanted = "--curves" in given or bool(seeds) or result.differs
        _print(result, "--verbose" in given, wanted)
    sys.stdout.flush()
    if "--html" in given and len(every) > 1:
        _write_page(Path(given.get("--html")), result)
    return int(bool(failed) or result.differs)


def _made(given: Given) -> tuple[list[Compared], list[str]]:
    """Run each size. Return the comparable ones, and why the others cannot be compared."""
    launch = launch_from(given, (1,))
    sizes = results.sizes((1,), given.get("--nproc", (1, 2)))
    if len(sizes) < 2:
        raise DoctorError("one size alone cannot be compared", "such as --nproc 1,2")
    check_command(launch, "parity")
    folder = make_folder(given)
    stop_at_signals()
    variables = {TRAINED: "1"}
    if "--replay" in given:
        variables[CAPSULE] = str(REPLAYED_STEP)
    every: list[Compared] = []
    failed: list[str] = []
    runs = [(size, AS_IT_IS) for size in sizes]
    for number in range(1, given.get("--seeds", 1)):
        runs.append((sizes[0], Variant(f"{SEED}={number}", {SEED: str(number)})))
    if "--evaluate" in given:
        runs += [(size, Variant(f"{WEIGHTS}=kept", {WEIGHTS: "kept"})) for size in sizes]
    line = terminal.StatusLine()
    try:
        for number, (size, variant) in enumerate(runs, 1):
            planned = Planned(number, size, variant, 1)
            directory = folder / planned.directory
            asked = {TRAINED: "1"} if variant.overrides else variables
            steps = given.get("--steps", DEFAULT_STEPS)
            if WEIGHTS in variant.overrides:
                # An evaluation at the end of each epoch is seen twice.
                epochs = (e.training.epoch for e in every if e.training.ranks == size.ranks)
                steps = max([steps, *(2 * each.steps + 2 for each in epochs if each is not None)])
            try:
                _run(planned, launch, folder, steps, asked, line)
                every.append(_read(directory, CAPSULE in asked))
            except DoctorError as error:
                failed.append(f"{planned.words}: {error.message}; its output: {directory}.log")
    finally:
        line.close()
    return every, failed


def _run(
    planned: Planned,
    launch: Launch,
    folder: Path,
    steps: int,
    variables: dict[str, str],
    line: terminal.StatusLine,
) -> None:
    enough: list[float] = []

    def made(number: int) -> None:
        line.show(f"{planned.words}: {count(number, 'step') if number else 'starts'}")
        if number >= steps:
            enough.append(time.monotonic())
            if enough[-1] - enough[0] > WRITE_TIMEOUT:
                raise _Enough

    words = ["--overhead-budget", "100", *launch.words(planned)]
    with contextlib.suppress(_Enough):
        run_once(planned, words, planned.variant.overrides, folder, made, variables)


def _read(directory: Path, replays: bool = False) -> Compared:
    """Read a run. ``replays``: its ranks were asked to keep a step.

    Raises:
        DoctorError: The ranks recorded no data to compare.
    """
    run = RunReader(directory, lenient=True).snapshot()
    training = training_of(run)
    if training is None or training.steps < 2 or not training.batch:
        errors = examine(run, list(RULES.values()), failed=lambda *_: None)
        for each in worst_first(errors):
            if each.severity == Severity.ERROR:
                raise DoctorError(each.message, f"see: ddpdoctor report {directory}")
        raise DoctorError(
            "no rank recorded a step of a DDP module" if run.ranks else "it started no rank",
            "parity compares jobs that wrap their model at every size",
        )
    built = (each for rank in run.last for each in rank.records.of(DdpRecord))
    parts = [each for each in built if each.group_ranks and len(each.group_ranks) < run.world_size]
    if parts:
        raise DoctorError(
            f"a DDP module is replicated on {len(parts[0].group_ranks)} of {run.world_size} ranks",
            "parity compares jobs whose ranks all have the same model",
        )
    rules = [each for each in RULES.values() if each.code in _EXAMINED]
    found = examine(run, rules, failed=lambda *_: None)
    records = (each for rank in run.last for each in rank.records.of(OverrideRecord))
    moved = {each.name: each.value for each in records}
    replayed = None if moved.keys() & {SEED, WEIGHTS} else _replayed(run, replays)
    seed, kept = int(moved.get(SEED, 0)), WEIGHTS in moved
    return Compared(run, training, tuple(found), replayed, seed, kept)


_EXAMINED = frozenset(
    ("DDP101", "DDP102", "DDP103", "DDP105", "DDP106", "DDP107", "DDP110", "DDP113", "DDP114",
     "DDP115", "DDP116", "DDP117", "DDP317", "DDP329", "DDP330", "DDP337", "DDP342", "DDP601",
     "DDP701", "DDP702")
)  # fmt: skip
"""Rules whose findings on one run affect its training. Findings of other rules are left out."""


def _replayed(run: Run, asked: bool) -> Comparison | None:
    """Compute the kept step of a run again, in another process. None if none was asked for."""
    if not list(run.path.glob("capsule-*.pickle")):
        kept = (each for rank in run.last for each in rank.records.of(CapsuleRecord))
        why = next((each.why_not for each in kept if each.why_not), "")
        short = f"the run ended before step {REPLAYED_STEP}" if asked else ""
        return Comparison(why_not=why or short) if why or short else None
    command = in_own_process(str(run.path), module="ddpdoctor.replay.gradients")
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=REPLAY_TIMEOUT, stdin=subprocess.DEVNULL
        )
        values = json.loads(done.stdout.splitlines()[-1])
        values["different"] = [Difference(**each) for each in values["different"]]
        return Comparison(**values)
    except subprocess.TimeoutExpired:
        return Comparison(why_not=f"it took more than {REPLAY_TIMEOUT:.0f} s")
    except (ValueError, IndexError, KeyError, TypeError):
        return Comparison(why_not="the process that computed it failed")


def compared(base: Training, other: Training) -> Iterator[Finding]:
    """Yield what changed in the training between a smaller and a larger size."""
    for compare in (rates, epochs, models):
        yield from compare(base, other)


def _metrics(kept: Sequence[Compared]) -> tuple[list[Finding], list[str]]:
    """Compare what evaluations of the same weights print. Return also what to remark on it."""
    found: list[Finding] = []
    remarks: list[str] = []
    for each in kept[1:]:
        base = kept[0]
        sizes = f"{count(base.training.ranks, 'rank')} and {each.training.ranks}"
        one, other = base.training.weights or 0.0, each.training.weights or 0.0
        pairs = list(compared_metrics(base.run, each.run))
        ranks = (*base.run.last, *each.run.last)
        if any(rank.records.of(FaultRecord) for rank in ranks):
            remarks.append(f"the metrics of {sizes} were not compared: a part of the probe failed")
        elif not math.isclose(one, other, rel_tol=SAME_WEIGHTS):
            remarks.append(f"the metrics of {sizes} were not compared: other initial weights")
        elif not pairs:
            remarks.append(
                f"the metrics of {sizes} were not compared: no line printed the same number after "
                f"two evaluations in {each.training.steps} steps (--steps)"
            )
        else:
            found += metric_differs(pairs, base.training.ranks, each.training.ranks)
            same = {one.name: one.values[0] for one, now in pairs if one.values[0] in now.values}
            words = ", ".join(f"{name} {value}" for name, value in same.items())
            if words:
                remarks.append(f"{sizes} evaluate the same weights alike: {words}")
    return found, remarks


def _findings(every: Sequence[Compared], metrics: Sequence[Finding]) -> list[Finding]:
    found: list[Finding] = []
    for each in every[1:]:
        found += compared(every[0].training, each.training)
        found += compared_evaluations(every[0].run, each.run)
        found += each.findings
    for each in every:
        found += _wrong_gradient(each)
    # Report a fault of several sizes once. What a single run shows replaces what two sizes do.
    single = {each.identity: each for each in with_metrics(found, metrics)}.values()
    return worst_first(
        each for each in single if not any(explains(cause, each) for cause in single)
    )


def _wrong_gradient(each: Compared) -> list[Finding]:
    replayed = each.replayed
    if replayed is None or replayed.why_not or not replayed.different:
        return []
    first = replayed.different[0]
    if replayed.scale is not None:
        message = (
            f"DDP's gradient is {replayed.scale:.3g} times the average of the ranks' gradients"
        )
    else:
        message = (
            f"DDP's gradient is not the average of the ranks' gradients in "
            f"{len(replayed.different)} of {count(replayed.parameters, 'parameter')}, first "
            f"{first.name}"
        )
    evidence = [
        f"step {replayed.step} computed again from the inputs and weights of {replayed.ranks} "
        "ranks, with the gradient that each loss gave",
        f"{first.name}: {first.ratio:.3g} times as long, cosine {first.cosine:.4f}",
    ]
    return [
        Finding(
            code="DDP338",
            severity=Severity.ERROR,
            message=message,
            ranks=tuple(range(replayed.world_size)),
            location=wrapped_at(each.run),
            evidence=(*evidence, *replayed.remarks),
            fix="Look for code that changes gradients apart from averaging: no_sync() around the "
            "last backward, a communication hook, a forward that bypasses DDP.",
            about="gradient",
        )
    ]


# -- output


def _print(result: Result, full: bool, curved: bool) -> None:
    every = result.every
    for text in result.failed:
        print(shown(f"ddpdoctor: {text}"))
    if len(every) < 2:
        print("ddpdoctor: fewer than two sizes can be compared")
    else:
        full = full or any(each.code != _SAME_RATE for each in result.found)
        for name, *cells in _table(every, full):
            print(shown(f"{name:<30}" + "".join(f"{cell:>18}" for cell in cells)))
        if full:
            print()
        for finding in result.found if full else ():
            colour = terminal.wants_colour(sys.stdout.fileno())
            width = terminal.width(sys.stdout.fileno())
            print(console.render(finding, colour=colour, width=width))
    if result.drawn is not None and curved:
        _print_curves(result.drawn)
    for each in result.remarks:
        print(shown(f"ddpdoctor: {each}"))
    if len(every) > 1:
        print(f"ddpdoctor: {_verdict(result)}")
        print(shown(f"ddpdoctor: kept in {every[0].run.path.parent}"))


def _print_curves(drawn: Curves) -> None:
    """Print the losses over samples as a picture."""
    low, high = drawn.low, drawn.high
    first = next(iter(drawn.sizes))
    band = (f"{drawn.seeds} seeds of {count(first, 'rank')}", low, high) if low else None
    sizes = [(count(ranks, "rank"), values) for ranks, values in drawn.sizes.items()]
    print("loss over samples seen")
    print("\n".join(curves.drawn(sizes, f" {drawn.samples[-1]}", band)))


def _write_page(path: Path, result: Result) -> None:
    every = result.every
    page = html.parity_page(
        title=" ".join(every[0].run.command),
        verdict=_verdict(result).removesuffix(", see above"),
        differs=result.differs,
        remarks=[*result.remarks, *result.failed],
        findings=result.found,
        table=_table(every),
        curves=result.drawn,
        runs=[(count(each.training.ranks, "rank"), str(each.run.path)) for each in every],
        written=console.written_before(every[0].run),
    )
    try:
        put(path, page.encode())
    except OSError as error:
        raise DoctorError(f"cannot write {path}: {error.strerror}") from None


_SAME_RATE = "DDP339"
"""A remark on most jobs. Alone it is a part of the verdict, unless --verbose asks for more."""


def _verdict(result: Result) -> str:
    base, last, found = result.every[0].training, result.every[-1].training, result.found
    if result.differs:
        wrong = {each.code for each in found if each.severity > Severity.INFO}
        what = "evaluate" if wrong <= {*CAUSES, "DDP343"} else "train"
        return f"{count(last.ranks, 'rank')} {what} differently from {base.ranks}, see above"
    growth = last.batch / base.batch if base.batch else 1.0
    times = f"{growth:.3g} times the batch" if abs(growth - 1) > 0.01 else "the same batch"
    same = f", at the same learning rate ({_SAME_RATE})"
    return f"the same training, {times}" + same * any(each.code == _SAME_RATE for each in found)


def _table(every: Sequence[Compared], full: bool = True) -> list[rows.Row]:
    """Return the rows of the table, fewer of them for sizes that train alike."""
    trainings, replayed = [each.training for each in every], [each.replayed for each in every]
    found = [*rows.head(trainings), *(rows.body(trainings) if full else ())]
    if any(each is not None for each in replayed):
        found += [
            ("DDP's gradient", *map(_gradient, replayed)),
            ("gradient of the whole batch", *map(_whole, replayed)),
        ]
    return found


def _gradient(replayed: Comparison | None) -> str:
    if replayed is None:
        return "-"
    if replayed.why_not:
        return "not computed"
    if not replayed.different:
        return "the average"
    return f"{replayed.scale:.3g} x average" if replayed.scale else "another"


def _whole(replayed: Comparison | None) -> str:
    if replayed is None or replayed.whole is None:
        return "-"
    if replayed.whole >= 0.01:
        return f"differs by {replayed.whole:.0%}"
    scale = replayed.whole_scale or 1.0
    return "the same" if abs(scale - 1) < 0.01 else f"{scale:.3g} x average"


def _not_followed(every: Sequence[Compared]) -> Iterator[str]:
    """Yield what a replayed step could not reproduce, and why."""
    for each in every:
        replayed, ranks = each.replayed, count(each.training.ranks, "rank")
        if replayed is None:
            continue
        if replayed.why_not:
            yield f"the step of {ranks} was not computed again: {replayed.why_not}"
        elif replayed.whole_why:
            how = (
                ", and is taken for a mean over its predictions"
                if replayed.whole_by == "predictions"
                else ""
            )
            yield f"the loss of {ranks} was not followed{how}: {replayed.whole_why}"


def _document(result: Result) -> dict[str, Any]:
    drawn = result.drawn
    sizes = []
    for each in result.every:
        training, replayed = each.training, each.replayed
        sizes.append(
            {
                "ranks": training.ranks,
                "directory": str(each.run.path),
                "steps": training.steps,
                "batch": training.batch,
                "rates": [list(point) for point in training.rates],
                "losses": [list(point) for point in training.losses],
                "weight_decay": training.decay,
                "epoch": training.epoch
                and {
                    "length": training.epoch.length,
                    "samples": training.epoch.drawn,
                    "steps": training.epoch.steps,
                    "missing": training.epoch.missing,
                    "doubled": training.epoch.doubled,
                },
                "schedule": training.schedule
                and {
                    "warm_up": training.schedule.peak,
                    "half": training.schedule.half,
                    "end": training.schedule.end,
                },
                "average_half_life": training.half_life,
                "clipped": training.clipped,
                "gradient": replayed
                and {
                    "step": replayed.step,
                    "parameters": replayed.parameters,
                    "different": [e.name for e in replayed.different],
                    "scale": replayed.scale,
                    "whole": replayed.whole,
                    "whole_scale": replayed.whole_scale,
                    "whole_by": replayed.whole_by,
                    "whole_why": replayed.whole_why,
                    "why_not": replayed.why_not,
                },
            }
        )
    return {
        "format": 1,
        "sizes": sizes,
        "curves": drawn
        and {
            "samples": list(drawn.samples),
            "losses": [{"ranks": n, "values": list(v)} for n, v in drawn.sizes.items()],
            "band": {"seeds": drawn.seeds, "low": list(drawn.low), "high": list(drawn.high)}
            if drawn.low
            else None,
        },
        "remarks": result.remarks,
        "findings": [to_record(each) for each in result.found],
        "failed": list(result.failed),
        "verdict": _verdict(result) if len(result.every) > 1 else "",
    }
