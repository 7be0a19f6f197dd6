"""The stacks of all ranks at the hang, or those that were taken last, as a merged tree."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ddpdoctor.analysis.hang_snapshot import hang_snapshot
from ddpdoctor.core.opening import integer
from ddpdoctor.core.ranks import spans
from ddpdoctor.render.console import shown_path
from ddpdoctor.render.stacks import inner_frames, summary
from ddpdoctor.run.snapshot import Run
from ddpdoctor.stacks import saved
from ddpdoctor.stacks.code import Code, code_of
from ddpdoctor.stacks.merge import Merged, Node, merge
from ddpdoctor.stacks.model import CUT, Frame, RankStacks
from ddpdoctor.stacks.user_frames import FOLDED, fold, tail


def content(run: Run) -> dict[str, Any] | None:
    """The tree and when it was taken; None if no stacks were taken."""
    hang = hang_snapshot(run)
    if hang is not None:
        stacks = [each.stacks for each in hang.ranks if each.stacks is not None]
        when, what = hang.record.time, "while the job made no progress"
    else:
        kept = saved.load(run.path)
        stacks = list(kept.stacks) if kept is not None else []
        when, what = (kept.time if kept is not None else 0), "taken last"
    if not stacks:
        return None
    merged = merge(stacks, fold)
    frames = [frame for each in stacks for thread in each.threads for frame in thread.frames]
    code = code_of(frames, integer(run.manifest, "started"))
    mains = {each.rank: main.frames for each in stacks if (main := each.main) is not None}
    at = time.strftime("%H:%M:%S", time.localtime(when / 1e9))
    return {
        "head": f"{what}, at {at}: {summary(merged)}",
        "roots": [_node(root, code, mains) for root in merged.roots],
        "missing": _missing(merged),
    }


def _node(node: Node, code: Code, mains: Mapping[int, Sequence[Frame]]) -> dict[str, Any]:
    deeper = {rank for each in node.children for rank in each.ranks}
    ends: dict[str, list[int]] = defaultdict(list)
    for rank in node.ranks:
        if rank not in deeper and (below := tail(mains[rank])):
            ends[inner_frames(below)].append(rank)
    return {
        "ranks": spans(node.ranks),
        "count": len(node.ranks),
        "odd": node.odd,
        "frames": [_frame(frame, code) for frame in node.frames],
        "ends": [[spans(ranks), text] for text, ranks in ends.items()],
        "children": [_node(each, code, mains) for each in node.children],
    }


def _frame(frame: Frame, code: Code) -> list[str]:
    """Place, function and source of a frame; of library frames between, only a sentence."""
    if frame == CUT:
        return ["the frames above are not known"]
    if frame.function == FOLDED:
        return [f"in {frame.path}"]
    place = f"{shown_path(frame.path)}:{frame.line}" if frame.line else shown_path(frame.path)
    return [place, frame.function, code.get(frame, "")]


def _missing(merged: Merged) -> list[list[str]]:
    """Ranks without a stack, and why."""
    troubles: dict[str, list[int]] = defaultdict(list)
    each: RankStacks
    for each in merged.missing:
        troubles[each.trouble or "no main thread"].append(each.rank)
    return [[spans(ranks), trouble] for trouble, ranks in troubles.items()]
