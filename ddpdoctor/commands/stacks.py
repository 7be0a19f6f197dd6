"""``ddpdoctor stacks``: show where the ranks of a live run, or of any job, are in the code."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import json_text, named, shown
from ddpdoctor.core.opening import as_copy, stranger
from ddpdoctor.core.options import RANKS, Given, Parser

if TYPE_CHECKING:
    from ddpdoctor.render.terminal import Line
    from ddpdoctor.run.records.supervisor import RankStacks
    from ddpdoctor.stacks.frames import Node

PARSER = Parser(
    "stacks",
    """\
Usage: ddpdoctor stacks [OPTIONS] [RUN | PID]

Show where the ranks of a live run are in the code, now: their stacks merged
into one tree, outliers first, marked with !. The ranks keep running; native
code that holds the GIL is no obstacle.

RUN is a run's name or directory [default: your newest live run]. Of a run that
has ended you see the stacks that were taken last. PID is a rank, or the
launcher, of a job that runs without ddpdoctor; py-spy reads its stacks.

Options:
  --job             Your newest job that runs without ddpdoctor.
  --rank RANKS      Only these ranks, such as 0,2-3. May be repeated.
  --all-threads     Include threads other than the main one.
  --all-frames      Include the frames of torch and other libraries.
  --locals          The variables of the user's innermost frames, in one line
                    each; no code of the job runs for that, and no GPU is waited
                    for.
  --native          Native frames, from py-spy if it is installed; this stops
                    each rank for a second or two.
  --json            The stacks as JSON: per rank, and merged.
  -h, --help        Show this text.

A rank that cannot be asked (on another host, dead, another user's) is shown
with the reason. No rank is waited for longer than 3 seconds; --native may take
as long again. A stopped rank is examined with py-spy, if that is installed and
permitted.

Exit status: 0; 2 if there is no such run, or nothing to show.
""",
    {"--rank": RANKS._replace(repeated=True)},
)

_MAX_WIDTH = 160


@dataclass(frozen=True)
class _Taken:
    """The stacks of the ranks of a run or job."""

    name: str
    started: int  # Unix nanoseconds. Source files changed later are not what runs.
    stacks: tuple[RankStacks, ...]
    time: int  # Unix nanoseconds
    state: str  # Why the stacks are not current; empty if they are


def main(words: Sequence[str]) -> int:
    """Take the stacks of the ranks and print them."""
    given = PARSER.read(words)
    ranks = set().union(*given.get("--rank", ())) or None
    name = PARSER.one_run(given)
    taken = _of_job(name, ranks, given) if is_of_job(name, given) else _take(name, ranks, given)
    if missing := (ranks or set()) - {each.rank for each in taken.stacks}:
        raise DoctorError(
            f"{taken.name} has no {named(missing)}", "leave out --rank to see all ranks"
        )
    if "--json" in given:
        print(json_text(_as_json(taken), indent=1))
    else:
        _print(taken, given)
    return 0


def is_of_job(name: str | None, given: Given) -> bool:
    """Return whether the command line names a process, or the newest job, rather than a run.

    Raises:
        DoctorError: The command line names both.
    """
    if "--job" in given and name is not None:
        raise PARSER.wrong(f"--job is your newest job, and {name} names another", "leave one out")
    is_pid = name is not None and name.isascii() and name.isdigit() and len(name) < 20
    return "--job" in given or is_pid


def _of_job(name: str | None, ranks: set[int] | None, given: Given) -> _Taken:
    """Read the stacks of a job that runs without ddpdoctor."""
    from ddpdoctor.stacks import capture
    from ddpdoctor.supervise import unprobed

    if "--locals" in given:
        raise DoctorError("--locals needs ddpdoctor in the ranks", "start them with ddpdoctor run")
    job = unprobed.find(int(name) if name is not None else None)
    wanted = [each for each in job.ranks.items() if ranks is None or each[0] in ranks]
    found = unprobed.read(wanted)
    if "--native" in given:
        found = capture.add_native(found, capture.CAPTURE_TIMEOUT)
    return _Taken(job.name, job.started, tuple(found), time.time_ns(), "")


def _take(name: str | None, ranks: set[int] | None, given: Given) -> _Taken:
    from ddpdoctor.run import rundir

    others: list[Path] = []
    if name is not None:
        path = rundir.find(name)
    else:
        path, *others = rundir.some_live()
    if others:
        names = ", ".join(each.name for each in others[:3])
        text = f"{path.name} is the newest live run of several: {names}"
        print(f"ddpdoctor: {shown(text)}", file=sys.stderr)
    if remark := as_copy(path):
        print(f"ddpdoctor: {shown(remark)}", file=sys.stderr)
    if not rundir.is_live(path):
        return _last(path, ranks)
    from ddpdoctor.nodes.asking import capture_everywhere
    from ddpdoctor.run.reader import glance
    from ddpdoctor.stacks.frames import save_stacks

    try:
        run = glance(path)
    except OSError as error:
        raise DoctorError(f"{path} cannot be read: {error.strerror}") from None
    native, variables = "--native" in given, "--locals" in given
    found = capture_everywhere(run, ranks, native=native, variables=variables)
    now = time.time_ns()
    if ranks is None:
        # Keep them, to show them again when the run is over.
        with contextlib.suppress(OSError):
            save_stacks(path, found, now)
    return _Taken(path.name, _started(path), found, now, "")


def _last(path: Path, ranks: set[int] | None) -> _Taken:
    from ddpdoctor.stacks.frames import STACKS_FILE, load_stacks

    saved = load_stacks(path)
    if saved is None and (path / STACKS_FILE).exists():
        raise DoctorError(f"{path / STACKS_FILE} is damaged, or too large to be read")
    if saved is None or not saved.stacks:
        raise DoctorError(
            f"{path.name} {_over(path)}, and no stacks were taken while it ran",
            "`ddpdoctor stacks` looks at a live run",
        )
    wanted = (each for each in saved.stacks if ranks is None or each.rank in ranks)
    return _Taken(path.name, _started(path), tuple(wanted), saved.time, _over(path))


def _started(path: Path) -> int:
    from ddpdoctor.core.opening import integer
    from ddpdoctor.run.reader import read_manifest

    return integer(read_manifest(path), "started")


def _over(path: Path) -> str:
    """Return why the ranks of a run cannot be asked."""
    return "has ended" if stranger(path) is None else "is another user's"


def _as_json(taken: _Taken) -> dict[str, Any]:
    from ddpdoctor.stacks.frames import merge, stacks_record

    merged = merge(taken.stacks)
    return {
        "run": taken.name,
        "live": not taken.state,
        **stacks_record(taken.stacks, taken.time),
        "odd": sorted(merged.odd),
        "merged": [_node(root) for root in merged.roots],
    }


def _node(node: Node) -> dict[str, Any]:
    return {
        "ranks": list(node.ranks),
        "odd": node.odd,
        "frames": [frame._asdict() for frame in node.frames],
        "children": [_node(child) for child in node.children],
    }


def _print(taken: _Taken, given: Given) -> None:
    from ddpdoctor.render.stack_text import stacks_summary
    from ddpdoctor.stacks.frames import merge

    when = time.strftime("%H:%M:%S", time.localtime(taken.time / 1e9))
    state = f"{taken.state}; its last stacks, of {when}" if taken.state else f"at {when}"
    head = f"{taken.name} {state}: {stacks_summary(merge(taken.stacks))}"
    print_stacks(head, taken.stacks, taken.started, given)


def print_stacks(head: str, stacks: Sequence[RankStacks], started: int, given: Given) -> None:
    """Print the merged stacks of ranks that started at a time in Unix nanoseconds."""
    from rich.console import Console
    from rich.text import Text

    from ddpdoctor.render import stack_text as render
    from ddpdoctor.render import terminal
    from ddpdoctor.stacks.frames import code_of_stacks

    look = render.StackStyle(
        width=terminal.columns(_MAX_WIDTH),
        ascii_only=terminal.only_ascii(sys.stdout, terminal.given_environment()),
        all_frames="--all-frames" in given,
    )
    code = code_of_stacks(stacks, started)
    lines: list[Line] = [((head, "bold"),), *render.draw(stacks, look, code)]
    if "--locals" in given:
        lines += render.draw_variables(stacks, look)
    if "--all-threads" in given:
        lines += render.draw_others(stacks, look, code)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line in lines:
        spans = terminal.cleaned(line, look.ascii_only)
        console.print(Text.assemble(*((text, terminal.style_of(name)) for text, name in spans)))
