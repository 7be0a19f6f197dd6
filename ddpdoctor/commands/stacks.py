"""``ddpdoctor stacks``: where the ranks of a live run are in the code."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.core.control_characters import json_text, shown
from ddpdoctor.core.errors import DoctorError

if TYPE_CHECKING:
    from ddpdoctor.render.lines import Line
    from ddpdoctor.render.stacks import Look
    from ddpdoctor.stacks.merge import Node
    from ddpdoctor.stacks.model import RankStacks

HELP = """\
Usage: ddpdoctor stacks [OPTIONS] [RUN]

Show where the ranks of a live run are in the code, now: their stacks merged
into one tree, with the ranks that are not where most are first, marked with !.
The ranks go on; native code that holds the GIL is no obstacle.

RUN is a run's name or directory [default: your newest live run]. Of a run that
has ended you see the stacks that were taken last.

Options:
  --rank RANKS      Only these ranks, such as 0,2-3. May be repeated.
  --all-threads     Other threads than the main one, too.
  --all-frames      Every frame, those of torch and other libraries, too.
  --native          Native frames, from py-spy if it is installed; this stops
                    each rank for a second or two.
  --json            The stacks as JSON: per rank, and merged.
  -h, --help        Show this text.

A rank that cannot be asked (on another host, dead, another user's) says so, and
none is waited for longer than 3 seconds; --native may take as long again. One
that is stopped is looked into by py-spy, if that is installed and may.

Exit status: 0; 2 if there is no such run, or nothing to show.
"""

_FLAGS = ("--all-threads", "--all-frames", "--native", "--json", "--help", "-h")
_VALUES = ("--rank",)
_WIDEST = 160


@dataclass
class _Options:
    flags: set[str] = field(default_factory=set)
    ranks: set[int] | None = None
    run: str | None = None


@dataclass(frozen=True)
class _Taken:
    """Stacks, and what there is to say about them."""

    path: Path
    stacks: tuple[RankStacks, ...]
    time: int
    """Unix nanoseconds."""
    live: bool


def main(words: Sequence[str]) -> int:
    """Take the stacks and print them.

    Raises:
        DoctorError: There is no such run, or nothing to show.
    """
    options = _parse(words)
    if options.flags & {"-h", "--help"}:
        sys.stdout.write(HELP)
        return 0
    taken = _take(options)
    missing = (options.ranks or set()) - {each.rank for each in taken.stacks}
    if missing:
        from ddpdoctor.core.ranks import named

        raise DoctorError(
            f"{taken.path.name} has no {named(missing)}",
            "without --rank you see the ranks there are",
        )
    if "--json" in options.flags:
        print(json_text(_as_json(taken), indent=1))
    else:
        _print(taken, options)
    return 0


def _parse(words: Sequence[str]) -> _Options:
    options, queue = _Options(), list(words)
    while queue:
        word = queue.pop(0)
        name, equals, given = word.partition("=")
        if name in _VALUES:
            if not equals and not queue:
                raise DoctorError(f"option {name} needs a value", "for example: --rank 0,2-3")
            options.ranks = (options.ranks or set()) | _ranks(given if equals else queue.pop(0))
        elif word in _FLAGS:
            options.flags.add(word)
        elif word.startswith("-"):
            import difflib

            close = difflib.get_close_matches(word, [*_VALUES, *_FLAGS], n=1)
            hint = f"did you mean {close[0]}?" if close else "`ddpdoctor stacks --help` lists them"
            raise DoctorError(f"unknown option {word}", hint)
        elif options.run is None:
            options.run = word
        else:
            raise DoctorError(f"one run at a time: {options.run}, {word}")
    return options


def _ranks(text: str) -> frozenset[int]:
    from ddpdoctor.core.ranks import rank_set

    try:
        return rank_set(text)
    except ValueError:
        raise DoctorError(
            f"option --rank needs ranks, not {text!r}", "for example: --rank 0,2-3"
        ) from None


def _take(options: _Options) -> _Taken:
    from ddpdoctor.run import rundir

    others: list[Path] = []
    if options.run is not None:
        path = rundir.find(options.run)
    else:
        path, *others = rundir.some_live()
    if others:
        names = ", ".join(each.name for each in others[:3])
        text = f"{path.name} is the newest live run of several: {names}"
        print(f"ddpdoctor: {shown(text)}", file=sys.stderr)
    if not rundir.is_live(path):
        return _last(path, options)
    from ddpdoctor.run.snapshot import glance
    from ddpdoctor.stacks.capture import capture
    from ddpdoctor.stacks.saved import save

    try:
        run = glance(path)
    except OSError as error:
        raise DoctorError(f"{path} cannot be read: {error.strerror}") from None
    found = capture(
        run,
        options.ranks,
        native="--native" in options.flags,
    )
    now = time.time_ns()
    if options.ranks is None:
        # What somebody looked at is what they will want to see again when the run is over.
        with contextlib.suppress(OSError):
            save(path, found, now)
    return _Taken(path, found, now, live=True)


def _last(path: Path, options: _Options) -> _Taken:
    from ddpdoctor.stacks.saved import NAME, load

    saved = load(path)
    if saved is None and (path / NAME).exists():
        raise DoctorError(f"{path / NAME} is damaged, or too large to be read")
    if saved is None or not saved.stacks:
        raise DoctorError(
            f"{path.name} has ended, and no stacks were taken while it ran",
            "`ddpdoctor stacks` looks at a live run",
        )
    wanted = (each for each in saved.stacks if options.ranks is None or each.rank in options.ranks)
    return _Taken(path, tuple(wanted), saved.time, live=False)


def _as_json(taken: _Taken) -> dict[str, Any]:
    from ddpdoctor.stacks.merge import merge
    from ddpdoctor.stacks.saved import as_record

    merged = merge(taken.stacks)
    return {
        "run": taken.path.name,
        "live": taken.live,
        **as_record(taken.stacks, taken.time),
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


def _print(taken: _Taken, options: _Options) -> None:
    from ddpdoctor.render import stacks as render
    from ddpdoctor.render import terminal
    from ddpdoctor.stacks.code import code_of
    from ddpdoctor.stacks.merge import merge

    look = render.Look(
        width=min(shutil.get_terminal_size((80, 24)).columns, _WIDEST),
        ascii_only=terminal.only_ascii(sys.stdout, terminal.given_environment()),
        all_frames="--all-frames" in options.flags,
    )
    frames = [frame for each in taken.stacks for thread in each.threads for frame in thread.frames]
    code = code_of(frames, _started(taken.path))
    when = time.strftime("%H:%M:%S", time.localtime(taken.time / 1e9))
    head = f"{taken.path.name} at {when}: {render.summary(merge(taken.stacks))}"
    if not taken.live:
        head = f"{taken.path.name} has ended; its last stacks, of {when}: " + (
            render.summary(merge(taken.stacks))
        )
    lines: list[Line] = [((head, "bold"),), *render.draw(taken.stacks, look, code)]
    if "--all-threads" in options.flags:
        lines += render.draw_others(taken.stacks, look, code)
    _write(lines, look)


def _started(path: Path) -> int:
    """When the run started; a source that was changed since is not what runs."""
    from ddpdoctor.run.record import integer
    from ddpdoctor.run.snapshot import read_manifest

    return integer(read_manifest(path), "started")


def _write(lines: Sequence[Line], look: Look) -> None:
    from rich.console import Console
    from rich.text import Text

    from ddpdoctor.render.lines import cleaned
    from ddpdoctor.render.lines import look as style

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line in lines:
        spans = cleaned(line, look.ascii_only)
        console.print(Text.assemble(*((text, style(name)) for text, name in spans)))
