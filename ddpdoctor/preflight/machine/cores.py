"""Whether there is a core for each rank, and how many threads they will start."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, finding, judged, typed, warning
from ddpdoctor.preflight.command_lines import corrected_line
from ddpdoctor.preflight.machine import container
from ddpdoctor.preflight.situation import Situation, visible_gpus
from ddpdoctor.preflight.words import counted


@check("cores", "DDP012")
def cores(situation: Situation) -> Outcome:
    """There are fewer cores than ranks, or the ranks start more threads than there are cores.

    What it finds
        Fewer cores than ranks, by CPU affinity and the container's quota. An OMP_NUM_THREADS with
        which the ranks start more than twice as many threads as there are cores.

    Why it is bad
        Ranks that share a core wait for each other in every collective, and the slowest one sets
        the pace. With more threads than cores, OpenMP's spinning barriers can make a step take ten
        times as long.

    How to fix it
        Start fewer ranks, give the container more cores, or set OMP_NUM_THREADS to cores / ranks.

    Example
        Wrong: `OMP_NUM_THREADS=64` with eight ranks on 64 cores.
        Right: `OMP_NUM_THREADS=8`. torchrun sets 1 if the variable is not set.

    When it stays silent
        With at least as many cores as ranks, and if OMP_NUM_THREADS is not set (torchrun then sets
        1). Two ranks on a single core without a GPU, as on small test machines, are reported as
        information.
    """
    have, nproc = available(situation), situation.nproc
    threads = situation.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    detail = f"{counted(have, 'core')} for {counted(nproc, 'rank')}"
    if not threads.isdigit():
        return judged(detail, _findings(situation, have, 1))
    return judged(f"{detail}, OMP_NUM_THREADS={threads}", _findings(situation, have, int(threads)))


def available(situation: Situation) -> float:
    """How many cores' time this process and its children can have."""
    try:
        count = float(len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        count = float(os.cpu_count() or 1)
    quota = container.cores(situation)
    return count if quota is None else min(count, quota)


def _findings(situation: Situation, have: float, threads: int) -> Iterator[Finding]:
    nproc = situation.nproc
    quota = container.cores(situation)
    where = "the quota of the container" if quota is not None and quota <= have else "the affinity"
    if have < nproc:
        # Two ranks are what is started by default, also where there is a single core to try it.
        small = (
            nproc == 2 and situation.options.nproc is None and not situation.shared(visible_gpus)
        )
        yield finding(
            Severity.INFO if small else Severity.WARNING,
            f"{nproc} ranks will share {counted(have, 'core')} and wait for each other",
            evidence=(f"{counted(have, 'core')} by {where}; this machine has {os.cpu_count()}",),
            fix="Give the container or the batch job more cores, or start fewer ranks.",
            paste=typed("#SBATCH --cpus-per-task={}", nproc)
            if "SLURM_JOB_ID" in situation.environ
            else container.run_line(situation, f"--cpus={nproc}")
            if quota is not None and container.kind(situation) in ("docker", "podman")
            else corrected_line(situation, nproc=max(1, int(have))),
            about="cores",
        )
    elif threads > 1 and threads * nproc > 2 * have:
        fair = max(1, int(have / nproc))
        yield warning(
            f"OMP_NUM_THREADS={threads} makes {threads * nproc} threads of {nproc} ranks, on "
            f"{counted(have, 'core')}",
            fix=f"Give each rank {counted(fair, 'thread')}.",
            paste=typed("export OMP_NUM_THREADS={}", fair),
            about="threads",
        )
