"""What a rank does with the batches of its training loops: it trains on them, skips some, leaves.

A loop here is one pass over a loader. It is told when it begins to train, when a batch was passed
over without a backward, and when it is over; a rule compares what the ranks told. Whether a loop
was left before its loader's end shows when the iterator is let go: the frame that does so stands at
the very statement that left the loop.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

from ddpdoctor.probe.runtime import events, rank, shield, torch_private
from ddpdoctor.probe.runtime.sites import Site, sites_of

MOST = 2048
"""Loops that one rank tells of."""

IDLE = 8
"""Batches without a backward that a loop tells one by one."""

FRAMES = 6
"""Lines of the user's code that are told, outwards: the loop may be that of a caller."""


class _Loop:
    """One pass over a loader."""

    __slots__ = (
        "after",
        "backwards",
        "before",
        "fetched",
        "forwards",
        "idle",
        "idled",
        "joins",
        "number",
        "ref",
        "sites",
    )

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites
        self.number = -1
        """The loop's number among those that were told, -1 as long as it was not."""
        self.before = self.after = _reduced
        """Reduced backwards begun before the loop, and by now, those of other loops left out."""
        self.fetched = 0
        self.forwards = 0
        """Forwards before the last fetch; ``backwards`` likewise."""
        self.backwards = 0
        self.idle: list[tuple[int, int, bool]] = []
        """Batch, training step, and whether there was a forward."""
        self.idled = 0
        self.joins = False
        self.ref: weakref.ref[Any] | None = None


_forwards = _backwards = _reduced = 0
_armed = False
_told = 0
_current: _Loop | None = None
_open: set[_Loop] = set()


def forget() -> None:
    """In a forked child: the parent's loops are the parent's."""
    global _forwards, _backwards, _reduced, _armed, _told, _current
    _forwards = _backwards = _reduced = _told = 0
    _armed = False
    _current = None
    _open.clear()


def install() -> None:
    """Listen to the moments of training."""
    events.batch_fetched.append(shield.shielded(_fetched))
    events.loader_exhausted.append(shield.shielded(_exhausted))
    events.buffers_begin.append(shield.shielded(_buffers))
    events.forward_begins.append(shield.shielded(_forward))
    events.backward_begins.append(shield.shielded(_backward))
    events.rank_fails.append(shield.shielded(_failed))
    events.rank_ends.append(shield.shielded(_ended))


# -- batches


def _fetched(iterator: Any, data: Any) -> None:
    global _current
    if not sys.modules["torch"].is_grad_enabled():
        return
    loop: _Loop | None = getattr(iterator, "_ddpdoctor_loop", None)
    if loop is None or torch_private.is_first_batch(iterator):
        # Persistent workers go on with the same iterator.
        if loop is not None:
            _close(loop, "left")
        loop = iterator._ddpdoctor_loop = _begin(iterator)
    else:
        _look_back(loop)
    loop.fetched += 1
    loop.forwards, loop.backwards = _forwards, _backwards
    _current = loop


def _begin(iterator: Any) -> _Loop:
    loop = _Loop(sites_of(sys._getframe(2), FRAMES))
    _open.add(loop)

    @shield.shielded
    def let_go(_: Any) -> None:
        _close(loop, "left", sites_of(sys._getframe(1), FRAMES))

    loop.ref = weakref.ref(iterator, let_go)
    return loop


def _look_back(loop: _Loop) -> None:
    """Another batch is taken: was there a backward since the last one?"""
    if loop.backwards != _backwards:
        return
    loop.idled += 1
    state = rank.current()
    if state is None or len(loop.idle) >= IDLE:
        return
    loop.idle.append((loop.fetched - 1, state.tracker.steps, loop.forwards != _forwards))
    if loop.number >= 0:
        _tell(loop, "skips", {"idle": list(loop.idle)})


def _exhausted(iterator: Any) -> None:
    loop: _Loop | None = getattr(iterator, "_ddpdoctor_loop", None)
    if loop is not None and loop in _open:
        _look_back(loop)
        partner = _current
        _close(loop, "ended")
        # Of loaders in one zip the first that ends is the end of the loop, told by the last.
        if partner is not None and partner is not loop and loop.sites == partner.sites:
            _look_back(partner)
            _close(partner, "ended")


# -- passes


def _buffers(ddp: Any) -> None:
    """DDP's broadcast in front of a forward: ranks that left are missed here already."""
    if sys.modules["torch"].is_grad_enabled():
        _trains(ddp)


def _forward(ddp: Any, armed: bool) -> None:
    global _forwards, _armed
    _forwards += 1
    if armed:
        _armed = True
        _trains(ddp)


def _trains(ddp: Any) -> None:
    if _current is not None and _current.number < 0:
        _current.joins = torch_private.joins(ddp)
        _tell_first(_current)


def _backward() -> None:
    global _backwards, _reduced, _armed
    _backwards += 1
    if not _armed:
        return
    _armed = False
    _reduced += 1
    state = rank.current()
    if state is not None:
        state.recorder.page.reduced(_reduced)
    loop = _current
    if loop is not None:
        loop.after = _reduced


# -- what is told


def _tell_first(loop: _Loop) -> None:
    global _told
    if _told >= MOST:
        return
    loop.number = _told
    _told += 1
    frames = [[site.path, site.line] for site in loop.sites]
    words = {"frames": frames, "before": loop.before, "joins": loop.joins, "idle": list(loop.idle)}
    _tell(loop, "trains", words)


def _close(loop: _Loop, how: str, sites: list[Site] | None = None) -> None:
    """Tell a loop for the last time."""
    global _current
    if loop not in _open:
        return
    _open.discard(loop)
    if _current is loop:
        _current = None
    if loop.number < 0:
        return
    words: dict[str, Any] = {
        "fetched": loop.fetched,
        "after": loop.after,
        "idle": list(loop.idle),
        "idled": loop.idled,
    }
    if sites:
        words["left_at"] = [[site.path, site.line] for site in sites]
    _tell(loop, how, words)


def _tell(loop: _Loop, how: str, words: dict[str, Any]) -> None:
    state = rank.current()
    if state is not None and not state.closed:
        # The next collective may meet another one, and gloo then aborts the process at once.
        state.recorder.add_now(
            {
                "kind": "loop",
                "time": time.time_ns(),
                "loop": loop.number,
                "state": how,
                "step": state.tracker.steps,
                **words,
            }
        )


def _failed(error: BaseException) -> None:
    for loop in list(_open):
        _close(loop, "failed")


def _ended() -> None:
    for loop in list(_open):
        _close(loop, "left")
