"""Follow loaders and the loops over them: where they are built, and the use of their batches.

Loaders, samplers and subsets are remembered with the lines that built them. A loop is one pass over
a loader. It is recorded when it begins to train, if a batch had no backward, and at its end. A rule
compares the ranks. When a loop drops its iterator early, the current frame shows the statement that
left it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any

from ddpdoctor.core.user_code import Location
from ddpdoctor.probe.runtime import shield, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import NOWHERE, Site, sites_of
from ddpdoctor.run.records.training import IdleBatch, LoopRecord, SamplerFacts

# -- loaders, samplers and subsets

MAX_BUILT = 64  # maximum number of remembered objects of a class
_SAMPLER_FACTS = ("rank", "num_replicas", "seed", "epoch", "shuffle", "drop_last", "replacement")


@dataclass(eq=False)
class Built:
    """A loader or sampler, the line that built it, and its number."""

    thing: weakref.ref[Any]
    site: Site
    number: int
    used: bool = False


class Book:
    """The objects of a class, newest last."""

    def __init__(self) -> None:
        self._entries: list[Built] = []
        self._count = 0

    def add(self, thing: Any, site: Site) -> Built:
        """Remember a new object."""
        if len(self._entries) >= MAX_BUILT:
            self._entries = [each for each in self._entries if each.thing() is not None][
                -MAX_BUILT:
            ]
        self._count += 1
        built = Built(weakref.ref(thing), site, self._count)
        self._entries.append(built)
        return built

    def find(self, thing: Any) -> Built | None:
        """Return the entry of an object that still exists."""
        return next((each for each in reversed(self._entries) if each.thing() is thing), None)

    def living(self) -> list[tuple[Any, Built]]:
        """Return the objects that still exist, newest first."""
        pairs = ((each.thing(), each) for each in reversed(self._entries))
        return [(thing, each) for thing, each in pairs if thing is not None]


built_loaders = Book()
built_samplers = Book()
built_subsets = Book()


def loader_of(dataset: Any, index_sampler: Any) -> Built | None:
    """Return the loader whose iterator has that data set and sampler."""
    for loader, built in built_loaders.living():
        mine = (loader.batch_sampler, loader.sampler)
        if loader.dataset is dataset and any(each is index_sampler for each in mine):
            return built
    return None


def sampler_facts(mine: list[Any]) -> SamplerFacts:
    """Describe the sampler and batch sampler of a pass without running their code."""
    known: dict[str, Any] = {}
    for sampler in mine:
        attributes = getattr(sampler, "__dict__", {})
        for name in _SAMPLER_FACTS:
            if type(attributes.get(name)) in (int, bool):
                known.setdefault(name, attributes[name])
    inner = mine[0] if mine else None
    built = use_sampler(mine)
    return SamplerFacts(
        name=type(inner).__name__ if mine else "",
        torch=all(type(each).__module__.startswith("torch.utils.data") for each in mine),
        set_epoch=any(hasattr(type(each), "set_epoch") for each in mine),
        id=built.number if built is not None else None,
        made=built.site.location if built is not None and built.site.path else None,
        **known,
    )


def use_sampler(mine: list[Any]) -> Built | None:
    """Note that a loader uses a sampler, even if the pass is not recorded."""
    inner = mine[0] if mine else None
    built = built_samplers.find(inner)
    if built is None and inner is not None:
        # Some objects do not support weak references.
        with contextlib.suppress(TypeError):
            built = built_samplers.add(inner, NOWHERE)
    if built is not None:
        built.used = True
    return built


def idle_samplers(dataset: Any) -> tuple[Location, ...]:
    """Return the lines of the newest two samplers of a data set that no loader uses."""
    idle = [
        each.site.location
        for thing, each in built_samplers.living()
        if not each.used and getattr(thing, "dataset", None) is dataset and each.site.path
    ]
    return tuple(idle[:2])


def batch_count(mine: list[Any]) -> int | None:
    """Return the number of batches of a pass. None if only code of the job can compute it."""
    if not mine:
        return None
    lengths = (getattr(type(each), "__len__", None) for each in mine)
    if not all(str(getattr(each, "__module__", "")).startswith("torch.") for each in lengths):
        return None
    try:
        return len(mine[-1])
    except Exception:
        return None


# -- whether a loop takes all batches, by its source

LARGEST_SOURCE = 300_000  # maximum size of a source file in bytes
_PLAIN_ITERABLES = (ast.Name, ast.Attribute, ast.Subscript)
_WRAPPERS = ("enumerate", "tqdm")


@functools.lru_cache(maxsize=32)
def runs_to_end(path: str, line: int) -> bool:
    """Return whether a ``for`` at that line is known to take every batch."""
    try:
        with open(path, "rb") as file:
            source = file.read(LARGEST_SOURCE + 1)
        tree = ast.parse(source) if len(source) <= LARGEST_SOURCE else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    if tree is None:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or 0):
            iterated = node.iter
            while isinstance(iterated, ast.Call):
                called = iterated.func
                name = (
                    called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                )
                if name not in _WRAPPERS or not iterated.args:
                    return False
                iterated = iterated.args[0]
            return isinstance(iterated, _PLAIN_ITERABLES) and not any(map(_leaves_loop, node.body))
    return False


def _leaves_loop(node: ast.AST, inner: bool = False) -> bool:
    """Return whether a statement of the loop's body may leave the loop or yield."""
    if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
        return True
    if isinstance(node, ast.Break):
        return not inner
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return False
    inner = inner or isinstance(node, (ast.For, ast.AsyncFor, ast.While))
    return any(_leaves_loop(child, inner) for child in ast.iter_child_nodes(node))


# -- loops

MAX_LOOPS = 2048  # maximum number of recorded loops
MAX_IDLE = 8  # maximum number of separately recorded batches without a backward
MAX_FRAMES = 6  # maximum number of recorded user lines, outwards: the loop may be in a caller


class _Loop:
    """One pass over a loader."""

    def __init__(self, sites: list[Site], reduced: int) -> None:
        self.sites = sites
        self.number = -1  # index among the recorded loops, or -1
        self.before = self.after = reduced
        """Reduced backwards begun before the loop and up to now, without those of other loops."""
        self.fetched = 0
        self.forwards = 0  # forwards before the last fetch; ``backwards`` likewise
        self.backwards = 0
        self.idle: list[IdleBatch] = []
        self.idled = 0
        self.joins = False
        self.ref: weakref.ref[Any] | None = None


class Loops(Observer):
    """The training loops of a rank."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._tracker = state.tracker
        self._reduced = 0  # reduced backwards when the current loop last became current
        self._recorded = 0
        self._current: _Loop | None = None
        self._open: set[_Loop] = set()

    def loop_turns(self, iterator: Any) -> None:
        """Begin a loop or continue it."""
        self._catch_up()
        loop: _Loop | None = getattr(iterator, "_ddpdoctor_loop", None)
        if loop is None or torch_private.is_first_batch(iterator):
            # Persistent workers reuse the iterator.
            if loop is not None:
                self._close(loop, "left")
            loop = iterator._ddpdoctor_loop = self._begin(iterator)
        else:
            self._count_idle(loop)
        loop.fetched += 1
        loop.forwards, loop.backwards = self._tracker.forwards, self._tracker.backward_count
        self._go_on(loop)
        if loop.number < 0 and self._recorded < MAX_LOOPS:
            # Another loop may have trained since this one began.
            self.wake("forward_begins", "buffers_begin")
        else:
            self._tracker.looped = id(iterator)
            self._tracker.loop_backwards = loop.backwards

    def _catch_up(self) -> None:
        """Count the batches of the current loop since the last call."""
        tracker, loop = self._tracker, self._current
        if loop is not None and tracker.loop_batches:
            loop.fetched += tracker.loop_batches
            loop.forwards, loop.backwards = tracker.loop_forwards, tracker.loop_backwards
        tracker.looped = tracker.loop_batches = 0

    def _begin(self, iterator: Any) -> _Loop:
        loop = _Loop(sites_of(sys._getframe(2), MAX_FRAMES), self._tracker.reduced)
        self._open.add(loop)

        @shield.shielded
        def let_go(_: Any) -> None:
            if loop in self._open:
                began = clock()
                self._close(loop, "left", sites_of(sys._getframe(1), MAX_FRAMES))
                self._tracker.detail.charge(began)

        loop.ref = weakref.ref(iterator, let_go)
        return loop

    def _go_on(self, loop: _Loop | None) -> None:
        """Attribute backwards to this loop from now on."""
        reduced = self._tracker.reduced
        if self._current is not None and reduced != self._reduced:
            self._current.after = reduced
        self._current, self._reduced = loop, reduced

    def _count_idle(self, loop: _Loop) -> None:
        """Note the last batch if no backward followed it before the next batch."""
        if loop.backwards != self._tracker.backward_count:
            return
        loop.idled += 1
        if len(loop.idle) >= MAX_IDLE:
            return
        forward = loop.forwards != self._tracker.forwards
        loop.idle.append(IdleBatch(loop.fetched - 1, self.state.tracker.steps, forward))
        if loop.number >= 0:
            self._record(loop, "skips")

    def loader_exhausted(self, iterator: Any) -> None:
        """End the loop of an exhausted loader."""
        loop: _Loop | None = getattr(iterator, "_ddpdoctor_loop", None)
        if loop is None or loop not in self._open:
            return
        self._catch_up()
        self._count_idle(loop)
        partner = self._current
        self._close(loop, "ended")
        # Zipped loaders end together. The current loop is that of the loader fetched last.
        if partner is not None and partner is not loop and loop.sites == partner.sites:
            self._count_idle(partner)
            self._close(partner, "ended")

    def buffers_begin(self, ddp: Any) -> None:
        """Record the loop before DDP's broadcast, which waits for ranks that left the loop."""
        if sys.modules["torch"].is_grad_enabled():
            self._trains(ddp)

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """Record that a loop trains, at its first forward whose backward will be reduced."""
        if armed:
            self._trains(ddp)
            self.rest("forward_begins", "buffers_begin")

    def _trains(self, ddp: Any) -> None:
        loop = self._current
        if loop is not None and loop.number < 0:
            loop.joins = torch_private.joins(ddp)
            if self._recorded < MAX_LOOPS:
                loop.number = self._recorded
                self._recorded += 1
                began = clock()
                self._record(loop, "trains")
                self._tracker.detail.charge(began)

    def _close(self, loop: _Loop, how: str, sites: list[Site] | None = None) -> None:
        """Record the end of a loop."""
        if loop not in self._open:
            return
        self._catch_up()
        self._open.discard(loop)
        if self._current is loop:
            self._go_on(None)
        if loop.number >= 0:
            self._record(loop, how, sites)

    def _record(self, loop: _Loop, how: str, sites: list[Site] | None = None) -> None:
        if self.state.closed:
            return
        begins, over = how == "trains", how not in ("trains", "skips")
        # The next collective may meet a different one of another rank, and gloo then aborts at
        # once.
        self.state.recorder.add_now(
            LoopRecord(
                time=time.time_ns(),
                loop=loop.number,
                state=how,
                step=self.state.tracker.steps,
                frames=_locations(loop.sites) if begins else (),
                before=loop.before if begins else None,
                joins=begins and loop.joins,
                fetched=loop.fetched if over else None,
                after=loop.after if over else 0,
                idle=tuple(loop.idle),
                idled=loop.idled if over else 0,
                left_at=_locations(sites or []),
            ),
            flush=False,
        )

    def rank_fails(self, error: BaseException) -> None:
        """Record the end of all loops."""
        for loop in list(self._open):
            self._close(loop, "failed")

    def rank_ends(self) -> None:
        """Record the end of all loops."""
        for loop in list(self._open):
            self._close(loop, "left")


def _locations(sites: list[Site]) -> tuple[Location, ...]:
    return tuple(site.location for site in sites)
