"""``d``, below what the ranks do: their stacks, merged, or all threads of one rank."""

from __future__ import annotations

import time
from functools import lru_cache

from ddpdoctor.render import stacks as render
from ddpdoctor.stacks.merge import merge
from ddpdoctor.top.line import Line
from ddpdoctor.top.marks import Marks
from ddpdoctor.top.taken import Taken
from ddpdoctor.top.wrapping import wrapped


def draw(taken: Taken | None, rank: int | None, room: int, marks: Marks) -> list[Line]:
    """The stacks; of one rank, with its other threads.

    Args:
        taken: What there is; None while they are being taken.
        rank: Only this one.
        room: Columns.
        marks: For the terminal.
    """
    if taken is None:
        return [(("taking the stacks ...", "dim"),)]
    if taken.trouble:
        return wrapped(taken.trouble, room, "dim")
    return list(_drawn(taken, rank, room, marks.ascii_only))


@lru_cache(maxsize=8)
def _drawn(taken: Taken, rank: int | None, room: int, ascii_only: bool) -> tuple[Line, ...]:
    stacks = tuple(each for each in taken.stacks if rank is None or each.rank == rank)
    when = time.strftime("%H:%M:%S", time.localtime(taken.time))
    head = f"stacks at {when}" if taken.live else f"the last stacks that were taken, at {when}"
    look, code = render.Look(room, ascii_only), taken.code or {}
    lines = wrapped(f"{head}: {render.summary(merge(stacks))}", room, "dim")
    lines += render.draw(stacks, look, code)
    return (*lines, *(render.draw_others(stacks, look, code) if rank is not None else ()))
