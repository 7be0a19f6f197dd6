"""Which gradients DDP reduces and which it does not: kept by what really reached the parameters.

A forward through DDP arms its next backward; only a backward so armed is reduced. Parameters whose
gradients came otherwise are looked at when an optimizer steps them: the norms of gradient and
parameter are written down, and by comparing the ranks a rule sees whether it did any harm.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

from ddpdoctor.probe.observers import norms, optimizers, pacing
from ddpdoctor.probe.observers.readback import Readback
from ddpdoctor.probe.observers.replicas import Unreduced, Watched, built, watched
from ddpdoctor.probe.runtime import events, rank, shield, sites, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.records.base import JsonObject

CLOSELY = 10
"""Synchronized backwards of a DDP module that are looked at one by one."""

MEASURED = 4
"""Parameters whose norms are written down at a time."""

NAMED = 8
"""Parameters that a record names; it counts the rest."""

SIGHTINGS = 256
"""Up to its 10th time each kind of unreduced gradient is looked at, then at the powers of two."""

WALK = 512
"""Synchronized backwards between two walks through a module in search of new parameters, once the
powers of two are further apart."""

UNFINISHED = "Expected to have finished reduction"
"""What DDP says when it missed gradients."""

NORMALIZING = 3
"""The synchronized backward at which it is seen which BatchNorm layers train."""

USED_FOR = 50
"""Synchronized backwards after which it is told that no parameter was ever unused."""

USED_IN_ALL = 5
"""The same at the end of a rank that had fewer."""


def forward(ddp: Any, armed: bool) -> None:
    """A forward in grad mode begins."""
    for each in watched:
        if each.ddp() is ddp:
            break
    else:
        return
    each.forwards += 1
    if armed:
        each.armed += 1
    else:
        each.unarmed += 1
    if each.reduced < CLOSELY:
        each.site = sites.caller()


def backward_begins() -> None:
    """Remember the gradients as they are, where this backward may reach them unreduced."""
    state = rank.current()
    if state is None or not state.budget.enabled:
        return
    for each in watched:
        ddp = each.ddp()
        if ddp is None:
            continue
        # A backward before this one may have raised.
        each.sure, each.marks = False, None
        each.cause = _cause(each, bool(ddp.require_backward_grad_sync))
        if not each.cause:
            # Whose backward it is needs no proof where there is one module, and it is known.
            if each.reduced >= CLOSELY and len(watched) == 1:
                each.sure = each.armed > 0
            else:
                each.marks = each.take_marks(each.probes)
        elif state.budget.left() >= 0:
            began = clock()
            each.marks = each.take_marks(each.witnesses)
            state.budget.spend(2 * (clock() - began))


def _cause(each: Watched, syncs: bool) -> str:
    """Why the gradients of a backward that begins now would not be reduced as one may think."""
    if each.armed:
        return "" if syncs else "backward in no_sync"
    if each.unarmed:
        return "forward in no_sync" if syncs else ""
    return "second backward" if each.forwards else "around"


def backward_ended() -> None:
    """See which modules the backward has touched, and whether it was reduced."""
    state = rank.current()
    if state is None:
        return
    for each in watched:
        if each.sure:
            each.sure, each.due, each.unreduced = False, True, None
            each.reduced += 1
            each.armed = each.unarmed = 0
            continue
        marks, each.marks = each.marks, None
        ddp = each.ddp()
        if marks is None or ddp is None:
            continue
        changed = each.changed(marks)
        if each.armed and each.reduced < CLOSELY:
            # Which parameters it reached is all told by DDP; the one looked at may be unused.
            changed = changed or _stirred(each, ddp)
        if not changed:
            continue
        if each.cause == "backward in no_sync" and not each.unarmed and not pacing.settling:
            _tell_vain(state, each)
        if each.armed:
            each.reduced += 1
            each.due = True
            each.unreduced = None
        elif each.cause and each.unreduced is None:
            each.unreduced = Unreduced(each.cause, sites.caller(), changed[:MEASURED])
        each.armed = each.unarmed = 0


def _stirred(each: Watched, ddp: Any) -> list[int]:
    times = torch_private.gradient_ready_times(ddp) or []
    return [index for index, when in enumerate(times) if when != each.ready[index]][:1]


def step_begins(optimizer: Any) -> None:
    """An optimizer is about to use the gradients: what is missing or unreduced is so for good."""
    state = rank.current()
    if state is None or not state.budget.enabled:
        return
    for each in watched:
        ddp = each.ddp()
        if ddp is None:
            continue
        if each.due:
            each.due = False
            if each.reduced == NORMALIZING:
                _look_for_batchnorm(state, each, ddp)
            # Only now is it known: a static graph is set at the end of DDP's constructor.
            if getattr(ddp, "static_graph", False):
                pass
            elif not ddp.find_unused_parameters:
                if each.reduced <= CLOSELY:
                    _look_for_missing(state, each, ddp)
            elif each.reduced <= USED_FOR:
                _look_for_unused(state, each, ddp)
            if _worth_a_walk(each) and state.budget.left() >= 0:
                _look_for_strangers(state, each, ddp)
        each.forwards = 0
        if pacing.settling:
            # Its forward may have come while nobody counted.
            each.unreduced = None
        if each.unreduced is not None or each.strangers:
            _look_at_unreduced(state, each, optimizers.owned(optimizer))


def _look_at_unreduced(state: rank.RankState, each: Watched, owned: frozenset[int]) -> None:
    """Write down those gradients without a reduction that this optimizer uses."""
    unreduced = each.unreduced
    if unreduced is not None and not each.ids.isdisjoint(owned):
        each.unreduced = None
        reached = [
            (each.names[index], parameter)
            for index in unreduced.indices
            if (parameter := each.parameter(index)) is not None and id(parameter) in owned
        ]
        sighted(state, each, unreduced.cause, unreduced.site, reached)
    for why in {why for _, _, why in each.strangers}:
        reached = [
            (name, parameter)
            for name, reference, reason in each.strangers
            if reason == why and (parameter := reference()) is not None and id(parameter) in owned
        ]
        if reached:
            sighted(state, each, why, each.site, reached)


def _worth_a_walk(each: Watched) -> bool:
    count = each.reduced
    if not count & (count - 1) or count % WALK == 0:
        return True
    return bool(each.guards) and not each.strangers and each.thawed


def _look_for_strangers(state: rank.RankState, each: Watched, ddp: Any) -> None:
    """Find parameters that need a gradient now and did not belong to the module that DDP saw."""
    began = clock()
    each.strangers = [
        (
            name,
            weakref.ref(parameter),
            "unfrozen"
            if id(parameter) in each.frozen
            else "replaced"
            if name in each.names
            else "added",
        )
        for name, parameter in torch_private.reduced_parameters(ddp)
        if id(parameter) not in each.ids
    ]
    state.budget.spend(clock() - began)


def sighted(
    state: rank.RankState, each: Watched, cause: str, site: Site, reached: list[tuple[str, Any]]
) -> None:
    """Write down the norms of unreduced gradients and of their parameters, before the step."""
    count = each.sightings[cause] = each.sightings.get(cause, 0) + 1
    if count > SIGHTINGS or (count > CLOSELY and count & (count - 1)) or state.budget.left() < 0:
        return
    began = clock()
    shown = [
        (name, parameter)
        for name, parameter in reached
        if parameter.grad is not None and norms.plain(parameter) and norms.plain(parameter.grad)
    ][:MEASURED]
    tensors = [tensor for _, parameter in shown for tensor in (parameter.grad, parameter)]
    read = norms.norms(tensors)
    if read is not None:
        names = [name for name, _ in shown]
        record: JsonObject = {
            "kind": "unreduced",
            "step": state.tracker.steps,
            "ddp": each.number,
            "cause": cause,
            "path": site.path,
            "line": site.line,
        }

        def with_norms(values: list[float]) -> JsonObject:
            gradients = dict(zip(names, values[::2], strict=True))
            return {
                **record,
                "gradients": gradients,
                "parameters": dict(zip(names, values[1::2], strict=True)),
            }

        state.recorder.add(norms.lazy([read], with_norms))
    state.budget.spend(clock() - began)


def _tell_vain(state: rank.RankState, each: Watched) -> None:
    """``no_sync()`` stood around the backward alone: it was reduced all the same."""
    if "vain" in each.told:
        return
    each.told.add("vain")
    site = sites.caller()
    state.recorder.add(
        {
            "kind": "no_sync_vain",
            "step": state.tracker.steps,
            "ddp": each.number,
            "path": site.path,
            "line": site.line,
        }
    )


def _look_for_missing(state: rank.RankState, each: Watched, ddp: Any) -> None:
    """Which parameters got no gradient in the synchronized backward that just ended."""
    began = clock()
    times = torch_private.gradient_ready_times(ddp)
    if times is None:
        times = [
            0 if (p := each.parameter(index)) is None or p.grad is None else began
            for index in range(len(each.names))
        ]
    missing = [
        index
        for index, (now, before) in enumerate(zip(times, each.ready, strict=False))
        if now == before and (not now or _bare(each, index))
    ]
    each.ready = times
    if missing and len(missing) < len(times) and "missing" not in each.told:
        each.told.add("missing")
        state.recorder.add(_missing_record(state, each, ddp, missing))
    state.budget.spend(clock() - began)


def _bare(each: Watched, index: int) -> bool:
    parameter = each.parameter(index)
    return parameter is None or parameter.grad is None


def rank_fails(error: BaseException) -> None:
    """If DDP missed gradients: which of its parameters were frozen or replaced meanwhile."""
    state = rank.current()
    if state is None or UNFINISHED not in str(error):
        return
    for each in watched:
        ddp = each.ddp()
        if ddp is None or "missing" in each.told:
            continue
        present = {id(parameter) for parameter in ddp.module.parameters()}
        gone = [
            index
            for index in range(len(each.names))
            if (parameter := each.parameter(index)) is None
            or id(parameter) not in present
            or not parameter.requires_grad
        ]
        if gone:
            state.recorder.add(_missing_record(state, each, ddp, gone))


def _missing_record(
    state: rank.RankState, each: Watched, ddp: Any, missing: list[int]
) -> JsonObject:
    present = {id(parameter) for parameter in ddp.module.parameters()}
    owners = {
        name: type(module).__name__
        for name, module in ddp.module.named_modules(remove_duplicate=False)
    }
    shown = []
    for index in missing[:NAMED]:
        parameter, name = each.parameter(index), each.names[index]
        why = "unused"
        if parameter is None or id(parameter) not in present:
            why = "replaced"
        elif not parameter.requires_grad:
            why = "frozen"
        shown.append([name, owners.get(name.rpartition(".")[0], ""), why])
    return {
        "kind": "no_gradient",
        "time": time.time_ns(),
        "step": state.tracker.steps,
        "ddp": each.number,
        "iteration": each.reduced,
        "parameters": shown,
        "count": len(missing),
        "of": len(each.names),
        "path": each.site.path,
        "line": each.site.line,
    }


def _look_for_batchnorm(state: rank.RankState, each: Watched, ddp: Any) -> None:
    """Write down the BatchNorm layers that take their statistics from this rank's batch alone."""
    layers = [
        name
        for name, module in ddp.module.named_modules()
        if module.training and torch_private.normalizes_alone(module)
    ]
    if layers:
        state.recorder.add(
            {
                "kind": "batchnorm",
                "ddp": each.number,
                "layers": layers[:NAMED],
                "count": len(layers),
            }
        )


def _look_for_unused(state: rank.RankState, each: Watched, ddp: Any) -> None:
    """Keep the least use of any parameter; after enough backwards, tell it."""
    began = clock()
    used = torch_private.used_map(ddp)
    if used is None:
        return
    least = used.min().double()
    each.least = least if each.least is None else each.least.minimum(least)
    if each.reduced == USED_FOR:
        _tell_use(state, each)
    state.budget.spend(clock() - began)


def _tell_use(state: rank.RankState, each: Watched) -> None:
    record: JsonObject = {
        "kind": "find_unused",
        "ddp": each.number,
        "iterations": each.reduced,
        "parameters": len(each.names),
    }
    state.recorder.add(
        norms.lazy([Readback([each.least])], lambda values: {**record, "least": values[0]})
    )
    each.least = None


def rank_ends() -> None:
    """Tell of a short job, too, that no parameter was ever unused."""
    state = rank.current()
    for each in watched:
        if state is not None and each.least is not None and each.reduced >= USED_IN_ALL:
            _tell_use(state, each)


def install() -> None:
    """Subscribe to the moments in which gradients come and go."""
    os.register_at_fork(after_in_child=watched.clear)
    events.ddp_built.append(shield.shielded(built))
    events.forward_begins.append(pacing.paced(forward))
    events.backward_begins.append(pacing.paced(backward_begins))
    events.backward_ended.append(pacing.paced(backward_ended))
    events.step_begins.append(pacing.paced(step_begins))
    events.rank_ends.append(shield.shielded(rank_ends))
    events.rank_fails.append(shield.shielded(rank_fails))
