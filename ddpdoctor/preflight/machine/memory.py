"""Whether the ranks of this node have memory to start with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged
from ddpdoctor.preflight.machine import cgroups, container
from ddpdoctor.preflight.situation import Situation, visible_gpus
from ddpdoctor.preflight.sizes import GIB, KIB, MIB, shown

BARE = 300 * MIB
"""What a rank holds once torch is imported and a small model trains on the CPU, measured."""

WITH_CUDA = 2 * GIB
"""The same with CUDA's libraries and a context."""


@check("memory", "DDP011")
def memory(situation: Situation) -> Outcome:
    """The memory that is left is not even enough for the ranks to start.

    What it finds
        Less memory left, of the machine or of the container's limit, than 300 MiB for each rank, or
        2 GiB with a GPU: what a rank holds before it has loaded any data.

    Why it is bad
        The kernel kills a rank with SIGKILL, without a message; the others wait for it, and report
        "Connection closed by peer".

    How to fix it
        Raise the container's limit, end what holds the memory, or start fewer ranks.

    Example
        Wrong: `docker run --memory 1g ...` with eight ranks.
        Right: `docker run --memory 64g ...`.

    When it stays silent
        When there is more than that. What model and data need it cannot know.

    Since
        0.1.0
    """
    left, limit, source = available(situation)
    each = WITH_CUDA if situation.shared(visible_gpus) else BARE
    detail = f"{shown(left)} of {shown(limit)} left by {source}"
    return judged(detail, _findings(situation, left, limit, source, each * situation.nproc))


def available(situation: Situation) -> tuple[int, int, str]:
    """Bytes left, bytes allowed, and what allows them."""
    total = left = 0
    with contextlib.suppress(OSError):
        rows = (situation.proc / "meminfo").read_text().splitlines()
        values = {row.partition(":")[0]: row.partition(":")[2].split() for row in rows}
        total = int(values["MemTotal"][0]) * KIB
        left = int((values.get("MemAvailable") or values["MemFree"])[0]) * KIB
    if not total:
        import psutil

        facts = psutil.virtual_memory()
        total, left = facts.total, facts.available
    group = cgroups.memory(situation)
    if group is not None and group[1] - group[0] < left:
        return max(0, group[1] - group[0]), group[1], "the container's limit"
    return left, total, "the machine"


def _findings(
    situation: Situation, left: int, limit: int, source: str, wanted: int
) -> Iterator[Finding]:
    if left >= wanted:
        return
    nproc = situation.nproc
    inside = container.kind(situation)
    paste = "ps aux --sort=-rss | head"
    if limit < wanted and source != "the machine":
        paste = (
            f"{inside} run --memory {max(1, 2 * wanted // GIB)}g ..."
            if inside in ("docker", "podman")
            else f"#SBATCH --mem={max(1, 2 * wanted // GIB)}G"
            if "SLURM_JOB_ID" in situation.environ
            else paste
        )
    yield Finding(
        "DDP011",
        Severity.ERROR if left < wanted // 2 else Severity.WARNING,
        f"{shown(left)} of memory are left by {source}, and {nproc} ranks need {shown(wanted)} to "
        "start",
        evidence=(f"the limit is {shown(limit)}",),
        fix="Raise the limit, end what holds the memory, or start fewer ranks.",
        paste=paste,
    )
