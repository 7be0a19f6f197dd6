"""``ddpdoctor scale``: run a job at several sizes, and find what limits its scaling."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.core import options
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import count, shown
from ddpdoctor.core.options import Given, Parser, Value
from ddpdoctor.render import terminal
from ddpdoctor.run import rundir
from ddpdoctor.run.overrides import KNOWN
from ddpdoctor.scale import chart, results, table
from ddpdoctor.scale.results import Launch, Outcome, Planned, Size, launch_from, rows
from ddpdoctor.scale.session import STRONG, WEAK, Session, Stopped, stop_at_signals
from ddpdoctor.supervise import command as job_command
from ddpdoctor.system.nvml import visible

DEFAULT_REPEATS = 3
DEFAULT_WARMUP = 5
RESULTS = "scale.json"
_MAX_RANKS = 1024


def _list(least: int, what: str) -> Value:
    def convert(text: str) -> tuple[int, ...]:
        numbers = text.split(",")
        if not all(each.isascii() and each.isdigit() and len(each) < 7 for each in numbers):
            raise ValueError(text)
        found = tuple(sorted({int(each) for each in numbers}))
        if found[0] < least or found[-1] > _MAX_RANKS:
            raise ValueError(text)
        return found

    return Value(convert, f"{what}, each from {least} to {_MAX_RANKS}, such as 1,2,4")


def sizes_option() -> Value:
    """Return the option that names numbers of ranks."""
    return _list(1, "numbers of ranks")


def _tried(text: str) -> tuple[str, tuple[str, ...]]:
    name, _, values = text.partition("=")
    if not name or not all(values.split(",")):
        raise ValueError(text)
    return name, tuple(dict.fromkeys(values.split(",")))


def _compared(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(text.split(",")))
    if not set(words) <= {"torch", "apex"}:
        raise ValueError(text)
    return words


PARSER = Parser(
    "scale",
    """\
Usage: ddpdoctor scale [OPTIONS] [RUN OPTIONS] [TORCHRUN OPTIONS] [--]
                       SCRIPT [ARGS...]

Run the same job, unedited, at several sizes, and say what adding ranks brings,
what keeps it from bringing more, and what to try. Each run is a `ddpdoctor run`
with its own run directory; times come from the records of its ranks.

Options:
  --nproc N,N,...   Ranks per node [default: 1, 2, 4, ... as many as GPUs are
                    visible; 1 and 2 without a GPU].
  --nnodes N,N,...  Nodes; start the same command on each, with --node-rank and
                    --rdzv-endpoint HOST:PORT. Each run takes the next port.
  --repeat N        Runs of each size, interleaved [default: 3].
  --warmup N        First steps of each run that do not count [default: 5].
  --weak            Keep the batch of a rank as it is at the smallest size.
  --strong          Keep the batch of all ranks together: each gets its part.
  --try NAME=V,V,...
                    Also run with these values, in place of the script's:
                    bucket_cap_mb, gradient_as_bucket_view, static_graph,
                    find_unused_parameters, broadcast_buffers, comm_hook
                    (fp16_compress, bf16_compress), accumulation (all-reduce
                    each n-th backward alone), num_workers, pin_memory,
                    batch_size; may be given more than once.
  --compare torch,apex
                    Also run with apex's DistributedDataParallel.
  --reference       Print published figures of ResNet-50 beside; without a
                    script, only these.
  --plot FILE       Draw throughput and efficiency into FILE.svg or FILE.png.
  --json            Print one JSON object in place of the table.
  --run-dir DIR     Keep run directories, logs and scale.json in DIR, new or
                    empty [default: a directory below <tmp>/ddpdoctor-<uid>/].
  -h, --help        Show this text.

--weak, --strong, --try and --compare change arguments of torch's own classes
in the ranks, by the probe: each change is recorded, and the script stays as it
is. Every option of `ddpdoctor run` and of torchrun is passed on.

Exit status: 0; 1 if a size crashed or hung (the others go on); 2 for bad input.
What was measured until then, or until Ctrl-C, is printed and kept.
""",
    {
        "--nproc": sizes_option(),
        "--nnodes": _list(1, "numbers of nodes"),
        "--repeat": options.number(1, 1000),
        "--warmup": options.number(0, 100_000),
        "--try": Value(_tried, "NAME=VALUE,VALUE, such as bucket_cap_mb=1,25,100", repeated=True),
        "--compare": Value(_compared, "torch,apex"),
        "--plot": options.FILE,
        "--run-dir": options.DIRECTORY,
    },
    leading=True,
)


def main(words: Sequence[str]) -> int:
    """Run the job at each size and print the results."""
    given = PARSER.read(words, job_command.PARSER.options)
    if "--reference" in given and not given.rest:
        _print(table.reference_lines(()))
        return 0
    if not given.rest:
        raise DoctorError(
            "no script to run", "for example: ddpdoctor scale --nproc 1,2 -- train.py"
        )
    nodes = given.get("--nnodes", (1,))
    sizes = results.sizes(nodes, given.get("--nproc") or _default_sizes(os.environ))
    started = launch_from(given, nodes)
    _check(given, sizes, started)
    variants = results.variants(given.get("--try", ()), given.get("--compare", ()))
    every = list(results.planned_runs(sizes, variants, given.get("--repeat", DEFAULT_REPEATS)))
    check_command(started, "scale")
    plot = chart.check_plot_file(given.get("--plot")) if "--plot" in given else None
    return _measure(given, started, every, make_folder(given), plot)


def make_folder(given: Given) -> Path:
    """Make the directory of the runs.

    Raises:
        DoctorError: The directory cannot be created.
    """
    try:
        return rundir.create_series(given.get("--run-dir"))
    except OSError as error:
        raise DoctorError(
            f"cannot make a directory for the runs: {error.filename}: {error.strerror}",
            "name another one: --run-dir DIR",
        ) from None


def _measure(
    given: Given, started: Launch, every: Sequence[Planned], folder: Path, plot: Path | None
) -> int:
    facts = {
        "command": given.rest,
        "repeats": given.get("--repeat", DEFAULT_REPEATS),
        "warmup": given.get("--warmup", DEFAULT_WARMUP),
        "scaling": next((each for each in (WEAK, STRONG) if f"--{each}" in given), ""),
        "directory": str(folder),
    }

    def keep(outcomes: Sequence[Outcome]) -> None:
        try:
            rundir.put(folder / RESULTS, table.document(outcomes, facts).encode())
        except OSError as error:
            raise DoctorError(f"cannot write {folder / RESULTS}: {error.strerror}") from None

    session = Session(folder, started.words, facts["warmup"], facts["scaling"], keep)
    stop_at_signals()
    try:
        session.run([each for each in every if started.takes_part(each)])
        status = 0
    except Stopped as stopped:
        status = 128 + stopped.number
    except KeyboardInterrupt:
        status = 130
    finally:
        _show(given, session.outcomes, facts, plot)
    failed = any(each.failure and each.status != 0 for each in session.outcomes)
    return status or int(failed)


# -- checks before anything is started


def _default_sizes(environ: Mapping[str, str]) -> tuple[int, ...]:
    gpus = visible(environ) or 2
    return tuple(1 << power for power in range(gpus.bit_length()))


def _check(given: Given, sizes: Sequence[Size], started: Launch) -> None:
    gpus, most = visible(os.environ), max(size.local for size in sizes)
    if gpus and most > gpus:
        raise DoctorError(
            f"{most} ranks on a node need {most} GPUs, and {gpus} are visible",
            "leave them out of --nproc; CUDA_VISIBLE_DEVICES= runs a job on CPUs",
        )
    if "--weak" in given and "--strong" in given:
        raise DoctorError("--weak and --strong are two ways to scale", "choose one")
    if ("--weak" in given or "--strong" in given) and len({s.nodes for s in sizes}) > 1:
        raise DoctorError(
            "--weak and --strong need a run of the smallest size on every node",
            "name one number of nodes",
        )
    known = {
        each: override for each, override in KNOWN.items() if each not in ("ddp", "seed", "weights")
    }
    for name, values in given.get("--try", ()):
        if name not in known:
            raise DoctorError(f"--try {name}: not known", f"known are {', '.join(known)}")
        for value in values:
            try:
                known[name].convert(value)
            except ValueError:
                raise DoctorError(
                    f"--try {name} needs {known[name].wanted}, not {value!r}"
                ) from None
    if "apex" in given.get("--compare", ()):
        _check_apex(gpus)


def _check_apex(gpus: int) -> None:
    if not _is_there("apex.parallel"):
        # https://github.com/NVIDIA/apex/pull/1896 removed it.
        raise DoctorError(
            "--compare apex needs NVIDIA Apex, and apex.parallel is not installed",
            "build tag 25.05 of https://github.com/NVIDIA/apex, the last that has it, or leave "
            "apex out",
        )
    if not gpus:
        raise DoctorError("--compare apex needs GPUs, and none is visible", "leave apex out")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:
        # This imports the module's package, which may fail in any way.
        return False


def check_command(started: Launch, name: str) -> None:
    """Refuse options and arguments that each ``ddpdoctor run`` of command ``name`` would refuse."""
    words = ["--no-debug", "--no-vscode", *started.typed, "--", *started.rest]
    command = job_command.build(words, os.environ)
    if not command.through_torchrun:
        raise DoctorError(
            f"{started.rest[0]} starts the ranks itself, and {name} has to choose their number",
            f"name the script alone: ddpdoctor {name} --nproc 1,2 -- train.py",
        )


# -- output


def _show(
    given: Given, outcomes: Sequence[Outcome], facts: Mapping[str, Any], plot: Path | None
) -> None:
    """Print the results, and draw the chart."""
    published = "--reference" in given
    if "--json" in given:
        print(table.document(outcomes, dict(facts), published=published))
    elif outcomes:
        _print([_title(facts), ""])
        found = rows(outcomes)
        ascii_only = terminal.only_ascii(sys.stdout, terminal.given_environment())
        _print(table.table_lines(found, ascii_only=ascii_only))
        if published:
            _print(["", *table.reference_lines(found)])
        _print(["", f"kept in {facts['directory']}"])
    sys.stdout.flush()
    if plot is not None and any(each.measured for each in outcomes):
        chart.write_chart(plot, chart.chart(_title(facts), rows(outcomes)))


def _title(facts: Mapping[str, Any]) -> str:
    scripts = [word for word in facts["command"] if word.endswith(".py")]
    name = os.path.basename((scripts or facts["command"])[0])
    scaling = f", {facts['scaling']} scaling" if facts["scaling"] else ""
    repeats, warmup = facts["repeats"], facts["warmup"]
    runs = f"median of {repeats} runs" if repeats > 1 else "1 run"
    dropped = f", without its first {count(warmup, 'step')}" if warmup else ""
    return f"{name}{scaling}: {runs} of each size{dropped}"


def _print(lines: Sequence[str] | Any) -> None:
    for line in lines:
        print(shown(line))
