"""What each rank draws from its data: the indices of map-style data sets, the content of others.

A pass over a loader is told when it has begun to train, when it has drawn more than its share, and
when it is over; the first few passes of a loader are followed, later ones now and then.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpdoctor.probe.observers import contents, datasets, loops, sketches
from ddpdoctor.probe.observers.passes import Pass, digest_of, sample_of
from ddpdoctor.probe.runtime import events, rank, shield, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.sites import Site, site_of
from ddpdoctor.run.records.base import JsonObject

MOST = 32
"""Passes that are followed, of all loaders together."""

BATCHES = 24
"""Batches of a pass over an iterable-style data set that are looked at."""

ROWS = 8
"""Samples of a batch that are looked at."""

CHUNK = 32
"""Batches of indices that wait for the writing thread at most."""

SKETCHED = 2
"""Passes over a loader whose samples are all looked at, the first ones."""

SKETCH_AHEAD = 10_000_000
"""Nanoseconds that this may take in advance of the eighth of the budget that it has."""

KNOWN = 64
"""Loaders and samplers that are remembered with the line that built them."""

_FACTS = ("rank", "num_replicas", "seed", "epoch", "shuffle", "drop_last", "replacement")
_HOOK = "samples"


class _Built:
    """A loader or sampler, the line that built it, and its number."""

    __slots__ = ("number", "site", "thing", "used")

    def __init__(self, thing: Any, site: Site, number: int) -> None:
        self.thing = weakref.ref(thing)
        self.site = site
        self.number = number
        self.used = False


class _Book:
    """What a class built, newest last."""

    def __init__(self) -> None:
        self._entries: list[_Built] = []
        self._count = 0

    def add(self, thing: Any, site: Site) -> _Built:
        """Remember a thing that was just built."""
        if len(self._entries) >= KNOWN:
            self._entries = [each for each in self._entries if each.thing() is not None][-KNOWN:]
        self._count += 1
        built = _Built(thing, site, self._count)
        self._entries.append(built)
        return built

    def find(self, thing: Any) -> _Built | None:
        """The entry of a thing that is still there."""
        return next((each for each in reversed(self._entries) if each.thing() is thing), None)

    def living(self) -> list[tuple[Any, _Built]]:
        """The things that are still there, newest first."""
        pairs = ((each.thing(), each) for each in reversed(self._entries))
        return [(thing, each) for thing, each in pairs if thing is not None]


_loaders = _Book()
_samplers = _Book()
_subsets = _Book()
_passes: dict[tuple[Site, Site | None], int] = {}
_open: dict[tuple[Site, Site | None], Pass] = {}
_waiting: list[Pass] = []
_evaluated: list[Pass] = []
_followed = 0
_collectives = 0
_reductions = 0
_gathers = 0
_sketched = 0
"""Nanoseconds that it took to look at all samples."""


def forget() -> None:
    """In a forked child: the parent's passes are the parent's."""
    global _followed, _collectives, _reductions, _gathers, _sketched
    _passes.clear()
    _open.clear()
    _waiting.clear()
    _evaluated.clear()
    _followed = _collectives = _reductions = _gathers = _sketched = 0


# -- what was built where


def install(dataloader: ModuleType) -> None:
    """Hook ``torch.utils.data.dataloader``."""
    base = torch_private.loader_iterator_base(dataloader)
    if base is None:
        return
    _wrap_next_index(base)
    _wrap_setattr(dataloader.DataLoader)
    events.batch_fetched.append(shield.shielded(_fetched))
    events.loader_exhausted.append(shield.shielded(_exhausted))
    events.forward_begins.append(shield.shielded(_forward))
    events.backward_ended.append(shield.shielded(_trained))
    events.collective_begins.append(shield.shielded(_collective))
    events.rank_ends.append(shield.shielded(_ended))


def install_distributed(module: ModuleType) -> None:
    """Notice each ``DistributedSampler`` as it is made."""
    _notice(module.DistributedSampler, "dataset", _samplers)


def install_subsets(module: ModuleType) -> None:
    """Notice each ``Subset`` as it is made."""
    _notice(module.Subset, "indices", _subsets)


def _notice(made: Any, first: str, book: _Book) -> None:
    """Note things of a class when their ``__init__`` sets the attribute ``first``.

    So no frame of ours is around any part of theirs, and what the class looks like stays the same.
    """
    if "__setattr__" in vars(made):
        return

    def __setattr__(self: Any, attr: str, val: Any) -> None:
        super(made, self).__setattr__(attr, val)
        if attr == first:
            _note(book, self)

    made.__setattr__ = __setattr__


def _wrap_setattr(loader_class: Any) -> None:
    original = loader_class.__setattr__

    @functools.wraps(original)
    def __setattr__(self: Any, attr: str, val: Any) -> None:
        try:
            original(self, attr, val)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        if attr == torch_private.LOADER_BUILT:
            _note(_loaders, self)

    loader_class.__setattr__ = __setattr__


@shield.shielded
def _note(book: _Book, thing: Any) -> None:
    book.add(thing, site_of(sys._getframe(3)))


# -- passes


def _wrap_next_index(base: Any) -> None:
    original = base._next_index

    @functools.wraps(original)
    def _next_index(self: Any) -> Any:
        try:
            index = original(self)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        if rank.active is not None and _HOOK not in shield.off:
            try:
                _drawn(self, index)
            except Exception as error:
                shield.fault(_HOOK, error)
        return index

    base._next_index = _next_index


def _drawn(iterator: Any, index: Any) -> None:
    begun = torch_private.pass_of(iterator)
    known = getattr(iterator, "_ddpdoctor_pass", None)
    if known is None or known[0] is not begun:
        known = iterator._ddpdoctor_pass = (begun, _begin(iterator))
    drawn: Pass | None = known[1]
    state = rank.current()
    if drawn is None or state is None or drawn.facts.get("iterable"):
        return
    began = clock()
    exceeds = drawn.draw(index)
    drawn.batches += 1
    if exceeds:
        state.recorder.add(drawn.told("share"))
    elif drawn.batches % CHUNK == 0:
        state.recorder.add(drawn.digested())
    state.budget.spend(clock() - began)
    if state.budget.left() < 0:
        # What was told of the pass stands; the rest of it is not followed.
        drawn.over = True
        iterator._ddpdoctor_pass = (begun, None)


def _begin(iterator: Any) -> Pass | None:
    """A pass begins; None if it is not to be followed."""
    global _followed
    state = rank.current()
    if state is None or state.closed:
        return None
    site = site_of(sys._getframe(3))
    built = _loader_of(iterator)
    key = (site, built.site if built is not None else None)
    number = _passes[key] = _passes.get(key, -1) + 1
    before = _open.pop(key, None)
    if before is not None:
        _close(before, "left")
    often = number < (2 if torch_private.is_iterable_style(iterator) else 4)
    often = often or number & (number - 1) == 0
    if not often or _followed >= MOST or len(_passes) > MOST or state.budget.left() <= 0:
        return None
    began = clock()
    made = built.site if built is not None else site
    armed = state.tracker.armed
    facts: JsonObject = {
        "kind": "pass",
        "time": time.time_ns(),
        "pass": _followed,
        "number": number,
        "path": site.path,
        "line": site.line,
        "made": [made.path, made.line],
        "armed": armed,
        "workers": torch_private.workers_of(iterator),
        "collates": torch_private.batches_at_once(iterator),
    }
    drawn = _map_style(iterator, facts, state.budget.left())
    drawn.collectives = _collectives, _reductions, _gathers
    _followed += 1
    _open[key] = drawn
    state.budget.spend(clock() - began)
    return drawn


def _loader_of(iterator: Any) -> _Built | None:
    """The loader that an iterator came from."""
    outer = getattr(iterator, "_index_sampler", None)
    dataset = torch_private.dataset_of(iterator)
    for loader, built in _loaders.living():
        mine = (loader.batch_sampler, loader.sampler)
        if loader.dataset is dataset and any(each is outer for each in mine):
            return built
    return None


def _map_style(iterator: Any, facts: JsonObject, left: int) -> Pass:
    """The pass of an iterator, with the facts about its samplers and data set."""
    dataset = torch_private.dataset_of(iterator)
    facts["dataset"] = type(dataset).__name__
    if torch_private.is_iterable_style(iterator):
        facts["iterable"] = True
        facts["in_order"] = torch_private.keeps_order(iterator)
        return Pass(facts, 0, {}, 0, None)
    samplers = torch_private.samplers_of(iterator)
    _tell_samplers(samplers, dataset, facts)
    try:
        found = datasets.bottom(dataset, left)
        length = len(dataset) if found is None else found.length
    except Exception:
        # Lengths and indices are the job's own code, and may be anything.
        return Pass(facts, 0, {}, 0, None)
    lookup = None if found is None else found.lookup
    if found is not None:
        split = _subsets.find(found.subset)
        if split is not None and split.site.path:
            facts["split"] = [split.site.path, split.site.line]
        facts["subset"] = None if lookup is None else digest_of(lookup)
        facts["subset_length"] = None if lookup is None else len(lookup)
        if lookup is None:
            return Pass(facts, 0, {}, 0, None)
    facts["length"] = length
    batches = _batches(samplers)
    if batches is not None:
        facts["batches"] = batches
    wanted = sample_of(length)
    if lookup is not None:
        inside = frozenset(wanted)
        followed = {place: name for place, name in enumerate(lookup) if name in inside}
    else:
        followed = dict(zip(wanted, wanted, strict=True))
    facts["followed"] = len(followed)
    world = sys.modules["torch"].distributed.get_world_size()
    whole = length if lookup is None else len(lookup)
    return Pass(facts, length, followed, -(-3 * whole // (2 * world)), lookup)


def _tell_samplers(samplers: list[Any], dataset: Any, facts: JsonObject) -> None:
    """What the samplers say of themselves, without running any code of theirs."""
    said: JsonObject = {}
    for sampler in samplers:
        words = getattr(sampler, "__dict__", {})
        for name in _FACTS:
            if type(words.get(name)) in (int, bool):
                said.setdefault(name, words[name])
        if hasattr(type(sampler), "set_epoch"):
            said["set_epoch"] = True
    facts["sampler"] = {
        "name": type(samplers[0]).__name__ if samplers else "",
        "torch": all(_is_torchs(type(each)) for each in samplers),
        **said,
    }
    inner = samplers[0] if samplers else None
    built = _samplers.find(inner)
    if built is None and inner is not None:
        try:
            built = _samplers.add(inner, Site("", 0))
        except TypeError:
            return
    if built is not None:
        built.used = True
        facts["sampler"]["id"] = built.number
        if built.site.path:
            facts["sampler"]["made"] = [built.site.path, built.site.line]
    idle = [
        each.site
        for thing, each in _samplers.living()
        if not each.used and getattr(thing, "dataset", None) is dataset and each.site.path
    ]
    if idle:
        facts["idle"] = [[site.path, site.line] for site in idle[:2]]


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.utils.data")


def _batches(samplers: list[Any]) -> int | None:
    """How many batches the pass will have; None if only code of the job's could tell."""
    if not samplers:
        return None
    lengths = (getattr(type(each), "__len__", None) for each in samplers)
    if not all(str(getattr(each, "__module__", "")).startswith("torch.") for each in lengths):
        return None
    try:
        return len(samplers[-1])
    except Exception:
        return None


# -- what becomes of a pass


def _fetched(iterator: Any, data: Any) -> None:
    known = getattr(iterator, "_ddpdoctor_pass", None)
    drawn: Pass | None = known[1] if known is not None else None
    if drawn is None:
        if _waiting:
            _waiting.clear()
        return
    first = drawn.fetched == 0
    drawn.fetched += 1
    if not drawn.over and sys.modules["torch"].is_grad_enabled():
        # A pass that begins takes the place of those that were left before their end.
        if first:
            _waiting.clear()
        elif drawn in _waiting:
            _waiting.remove(drawn)
        _waiting.append(drawn)
        if drawn.facts["number"] < SKETCHED and drawn.facts["collates"]:
            _sketch(drawn, data)
    if drawn.facts.get("iterable"):
        if drawn.fetched <= BATCHES:
            _look(drawn, data)
            state = rank.current()
            if drawn.fetched == BATCHES and state is not None:
                state.recorder.add(drawn.told("seen"))
        return
    places = drawn.arrived()
    if places and torch_private.keeps_order(iterator):
        _look_at(drawn, data, places)


def _look(drawn: Pass, data: Any) -> None:
    """Look at the samples of a batch that has no indices."""
    began = clock()
    leaves = contents.leaves(data)
    if leaves:
        size = len(leaves[0]) if drawn.facts["collates"] else None
        places = [0] if size is None else list(range(min(size, ROWS)))
        hashes = contents.hashes(data, places, size)
        if hashes is not None:
            drawn.see([drawn.fetched - 1] * len(places), hashes)
    _spend(began)


def _look_at(drawn: Pass, data: Any, places: list[tuple[int, int, int]]) -> None:
    """Look at the samples of a batch whose indices are followed."""
    began = clock()
    hashes = contents.hashes(data, [place for place, _, _ in places], places[0][2])
    if hashes is not None:
        drawn.see([index for _, index, _ in places], hashes)
    _spend(began)


def _sketch(drawn: Pass, data: Any) -> None:
    """Look at all samples of a batch, whatever they are called."""
    global _sketched
    state = rank.current()
    if state is None or _sketched > SKETCH_AHEAD + state.budget.earned() // 8:
        return
    began = clock()
    rows = sketches.rows(data)
    if rows is not None:
        drawn.gave(rows)
        if drawn.facts.get("iterable") and drawn.fetched % CHUNK == 0:
            state.recorder.add(drawn.digested())
    spent = clock() - began
    _sketched += spent
    state.budget.spend(spent)


def _spend(began: int) -> None:
    state = rank.current()
    if state is not None:
        state.budget.spend(clock() - began)


def _forward(ddp: Any, armed: bool) -> None:
    for drawn in _waiting:
        if not drawn.marks:
            drawn.joins = torch_private.joins(ddp)


def _trained() -> None:
    if not _waiting:
        return
    state = rank.current()
    last = _waiting[-1]
    for drawn in _waiting:
        # Loaders that train together are read in step; one that evaluates in between is not.
        if drawn.fetched != last.fetched:
            continue
        drawn.marks += 1
        if state is not None and drawn.marks == 2:
            state.recorder.add(_told_first(drawn))
    _waiting.clear()
    _judge_evaluations()


def _told_first(drawn: Pass) -> Callable[[bool], bytes | JsonObject]:
    """The pass as it begins to train, with a word about its loop the first time."""
    line = drawn.told("trains")
    facts = drawn.facts
    if "batches" not in facts:
        return line
    path, number = facts["path"], facts["line"]

    def with_loop(last: bool) -> bytes | JsonObject:
        record = line(last)
        if isinstance(record, dict):
            record["to_end"] = loops.runs_to_end(path, number)
        return record

    return with_loop


def _collective(name: str) -> None:
    global _collectives, _reductions, _gathers
    _collectives += 1
    if "reduce" in name:
        _reductions += 1
    elif "gather" in name:
        _gathers += 1


def _judge_evaluations() -> None:
    """What ranks had to tell each other of an evaluation they have told by the next step."""
    if not _evaluated:
        return
    state = rank.current()
    for drawn in _evaluated:
        every, reductions, gathers = drawn.collectives
        drawn.facts["collectives"] = _collectives - every
        drawn.facts["reductions"] = _reductions - reductions
        drawn.facts["gathers"] = _gathers - gathers
        if state is not None:
            state.recorder.add(drawn.told("ended"))
    _evaluated.clear()


def _exhausted(iterator: Any) -> None:
    known = getattr(iterator, "_ddpdoctor_pass", None)
    if known is not None and known[1] is not None:
        _close(known[1], "ended")


def _close(drawn: Pass, how: str) -> None:
    """Tell a pass for the last time."""
    if drawn.over:
        return
    drawn.over = True
    drawn.lookup = None
    if drawn in _waiting:
        _waiting.remove(drawn)
    state = rank.current()
    if state is not None:
        drawn.facts["armed_after"] = state.tracker.armed
        drawn.facts["closed"] = time.time_ns()
        state.recorder.add(drawn.told(how))
        if how == "ended" and drawn.facts["armed"] and not drawn.marks:
            _evaluated.append(drawn)


def _ended() -> None:
    for drawn in list(_open.values()):
        _close(drawn, "left")
    _open.clear()
    _judge_evaluations()
