"""The stacks behind a key: taken of a live run, or what was kept of one that is over.

Taking them waits for ranks that do not answer, so it is done in a thread of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir
from ddpdoctor.run.record import integer
from ddpdoctor.run.snapshot import glance, read_manifest
from ddpdoctor.stacks import saved
from ddpdoctor.stacks.capture import capture
from ddpdoctor.stacks.code import Code, code_of
from ddpdoctor.stacks.model import RankStacks
from ddpdoctor.top.snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class Taken:
    """Stacks of one moment, or why there are none."""

    stacks: tuple[RankStacks, ...] = ()
    code: Code | None = None
    time: float = 0.0
    """Unix seconds."""
    live: bool = True
    trouble: str = ""


def take(snapshot: Snapshot, replayed: bool, ranks: Collection[int] | None = None) -> Taken:
    """The stacks of the run that a snapshot shows, as it is now.

    Args:
        snapshot: What is on the screen.
        replayed: Whether it is played back, from a recording or a run that is over.
        ranks: Only these.
    """
    if snapshot.kind != "run" or not snapshot.path:
        made_up = snapshot.kind == "demo"
        return Taken(trouble="a made-up job has no stacks" if made_up else "no run is shown")
    path = Path(snapshot.path)
    try:
        if replayed or not snapshot.live:
            return _kept(path, ranks)
        stacks = capture(glance(path), ranks)
        now = time.time_ns()
        if ranks is None:
            with contextlib.suppress(OSError):
                saved.save(path, stacks, now)
        return Taken(stacks, _code(path, stacks), now / 1e9)
    except (OSError, DoctorError) as error:
        return Taken(trouble=f"no stacks can be taken: {error}")


def _kept(path: Path, ranks: Collection[int] | None) -> Taken:
    kept = None if rundir.is_live(path) else saved.load(path)
    if kept is None:
        return Taken(trouble="what is played back has no stacks: none were taken while it ran")
    stacks = tuple(each for each in kept.stacks if ranks is None or each.rank in ranks)
    return Taken(stacks, _code(path, stacks), kept.time / 1e9, live=False)


def _code(path: Path, stacks: Collection[RankStacks]) -> Code:
    frames = [frame for each in stacks for thread in each.threads for frame in thread.frames]
    return code_of(frames, integer(read_manifest(path), "started"))
