"""Explain why a size is less efficient than the smallest one, and what to try."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ddpdoctor.core import formatting
from ddpdoctor.core.finding import Finding
from ddpdoctor.scale.results import Measured

GOOD = 0.97
"""Efficiency from which on there is nothing to explain."""

BETTER = 1.1
"""Efficiency from which on the smallest size is no good base."""

STRAGGLERS = ("DDP610", "DDP612")
"""The findings that name a rank, or a stage of a pipeline, that the others wait for."""

MIN_SLOWDOWN = 1.15
"""How many times as long a rank on CPUs computes if it lacks cores."""

MIN_SHARE = 0.3
"""Share of the loss that waits for a core must have to be the cause."""


@dataclass(frozen=True)
class Cause:
    """The cause of most of the loss."""

    name: str
    """For machines: ``communication``, ``data``, ``straggler``, ``cores``, ``batch``, ``compute``,
    ``other``, or ``none`` if nothing is lost."""
    words: str
    """The sentence, without its subject."""
    tries: tuple[str, ...] = ()
    """What to try, each a line, with the ``--try`` that measures it."""


NONE = Cause("none", "as efficient as the smallest size")

FASTER = Cause(
    "none",
    "each rank is faster than at the smallest size, which something else slowed down: a busy "
    "machine, or data that were not cached yet",
)

_BUCKETS = "other bucket sizes: --try bucket_cap_mb=1,25,100"
_VIEWS = "no copies into buckets: --try gradient_as_bucket_view=true"
_SELDOM = "all-reduce every n-th backward alone (no_sync): --try accumulation=4"
_HALF = "half the bytes: --try comm_hook=bf16_compress"
_WORKERS = "loader workers: --try num_workers=2,4,8, and persistent_workers=True"
_LARGER = "more samples a rank: --try batch_size=..., or accumulation with no_sync"


def cause(
    base: Measured, this: Measured, efficiency: float, findings: Sequence[Finding] = ()
) -> Cause:
    """Return the cause of most of the loss at a size.

    Args:
        base: The smallest size.
        this: The size.
        efficiency: Of this one against that.
        findings: What the rules found in its run.
    """
    if efficiency >= GOOD:
        return NONE if efficiency < BETTER else FASTER
    share = this.samples / base.samples if this.samples and base.samples else 1.0
    lost = (1.0 - efficiency) * this.step
    straggler = next((each for each in findings if each.code in STRAGGLERS), None)
    if straggler is not None:
        return Cause(
            "straggler",
            f"a straggler: {straggler.message}",
            (straggler.fix or "ddpdoctor report shows the line",),
        )
    grown = {
        "data": this.data - base.data * share,
        "compute": this.compute - base.compute * share,
        "communication": (this.exposed or 0.0) - (base.exposed or 0.0),
        "other": this.other - base.other * share,
    }
    if this.cpu and _lacks_cores(base, this, share, lost):
        return _cores(base, this, share, lost)
    most = max(grown, key=grown.__getitem__)
    if most == "communication":
        return _communication(this)
    if most == "compute":
        return _compute(base, this, share)
    if most == "data":
        return Cause(
            "data",
            f"data loading: a rank waits {_of(this.data, this)} for its batch, and "
            f"{formatting.time(base.data)} at the smallest size",
            (_WORKERS, "cheaper samples, or a faster disk that all ranks share"),
        )
    return Cause(
        "other",
        f"code between the phases: {_of(this.other, this)}, and {formatting.time(base.other)} "
        "at the smallest size",
        ("look for collectives, .item() and files in the loop: ddpdoctor report shows the lines",),
    )


def _lacks_cores(base: Measured, this: Measured, share: float, lost: float) -> bool:
    """Return whether ranks share cores, so that each is slower and all wait for each other."""
    waited = (this.core_wait or 0.0) - (base.core_wait or 0.0) * share
    grown = this.compute - base.compute * share
    slower = this.compute > MIN_SLOWDOWN * base.compute * share and share >= 1.0
    return waited >= MIN_SHARE * lost or (slower and grown >= MIN_SHARE * lost)


def _cores(base: Measured, this: Measured, share: float, lost: float) -> Cause:
    cores = _cores_here()
    if this.core_wait is not None and this.core_wait >= MIN_SHARE * lost:
        how = f"a rank waits {_of(this.core_wait, this)} for one"
    else:
        how = f"a rank computes {this.compute / (base.compute * share):.1f} times as long as one"
        how += " alone" if base.ranks == 1 else f" of {base.ranks}"
    ranks, has = formatting.count(this.local, "rank"), formatting.count(cores, "core")
    if this.local <= cores:
        return Cause(
            "cores",
            f"oversubscribed cores: {how}, although {ranks} have {has}: other programs, their own "
            "threads and workers, or the memory that they share hold them up",
            (
                "fewer threads and workers a rank (OMP_NUM_THREADS, num_workers), or a machine "
                "that is idle",
            ),
        )
    return Cause(
        "cores",
        f"oversubscribed cores: {how}, as {ranks} share {has}",
        ("fewer ranks, fewer threads a rank (OMP_NUM_THREADS), or more cores for the job",),
    )


def _cores_here() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _communication(this: Measured) -> Cause:
    exposed = this.exposed or 0.0
    size = ""
    if this.gradient_bytes:
        size = f" ({formatting.size(this.gradient_bytes)}B of gradients"
        if this.bucket_bytes:
            size += f", in buckets of {formatting.size(this.bucket_bytes)}B"
        size += ")"
    words = f"communication that nothing overlaps: {_of(exposed, this)}{size}"
    if exposed > this.forward + this.backward:
        return Cause(
            "batch",
            f"too small a batch: forward and backward take "
            f"{formatting.time(this.forward + this.backward)}, and cannot hide {words}",
            (_LARGER, _SELDOM, _HALF, _BUCKETS),
        )
    return Cause("communication", words, (_BUCKETS, _VIEWS, _SELDOM, _HALF))


def _compute(base: Measured, this: Measured, share: float) -> Cause:
    longer = this.compute / (base.compute * share) if base.compute else 1.0
    if share < 1.0:
        return Cause(
            "batch",
            f"too small a batch: {this.samples:g} samples a rank take {longer:.1f} times their "
            f"part of what {base.samples:g} take",
            (_LARGER,),
        )
    if this.exposed is None:
        return Cause(
            "communication",
            f"communication within the backward pass, which takes {_of(this.backward, this)}, "
            f"and {formatting.time(base.backward)} at the smallest size "
            "(more steps tell how much of it)",
            (_BUCKETS, _VIEWS, _SELDOM, _HALF),
        )
    return Cause(
        "compute",
        f"the computation itself takes {longer:.2f} times as long beside other ranks",
        ("look for devices that are throttled or shared: ddpdoctor check, ddpdoctor top",),
    )


def _of(seconds: float, this: Measured) -> str:
    """Return a part of a step, as in ``62.1 ms of 433 ms``."""
    return f"{formatting.time(seconds)} of {formatting.time(this.step)}"
