"""Whether the kernel's neighbour table has room for the nodes of the job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, check, judged, skipped, typed, warning
from ddpdoctor.preflight.situation import Situation

NEARLY = 0.9
"""The share of the table from which it counts as full."""


@check("neighbour-table", "DDP013")
def neighbour_table(situation: Situation) -> Outcome:
    """The kernel's neighbour (ARP) table is full or too small for the nodes of the job.

    What it finds
        An IPv4 neighbour table filled to 90 % of net.ipv4.neigh.default.gc_thresh3, or one that the
        nodes of this job would fill.

    Why it is bad
        The kernel drops packets to machines that are not in the table ("neighbour: arp_cache:
        neighbor table overflow!" in its log). Connections to some nodes hang now and then.

    How to fix it
        Raise gc_thresh1, gc_thresh2 and gc_thresh3 on every node.

    Example
        Wrong: 1,024 entries, the kernel's default, in a flat network of 2,000 nodes.
        Right: `sysctl -w net.ipv4.neigh.default.gc_thresh3=16384`

    When it stays silent
        Below these limits, and on systems that do not report the table.
    """
    thresholds = situation.proc / "sys" / "net" / "ipv4" / "neigh" / "default"
    entries = 0
    try:
        most = int((thresholds / "gc_thresh3").read_text())
        # The second row's first column, in hexadecimal: every row has the same.
        row = (situation.proc / "net" / "stat" / "arp_cache").read_text().splitlines()[1]
        entries = int(row.split()[0], 16)
    except (OSError, ValueError, IndexError):
        with contextlib.suppress(OSError):
            entries = len((situation.proc / "net" / "arp").read_text().splitlines()) - 1
        if not (thresholds / "gc_thresh3").exists():
            return skipped("this kernel does not say (inside a container's network)")
        most = int((thresholds / "gc_thresh3").read_text())
    return judged(f"{entries} of {most} entries", _findings(situation, entries, most))


def _findings(situation: Situation, entries: int, most: int) -> Iterator[Finding]:
    nodes = situation.options.nnodes
    coming = entries + nodes if nodes > 1 else entries
    if most <= 0 or coming < NEARLY * most:
        return
    wanted = 1 << max(12, (4 * coming).bit_length())
    yield warning(
        f"the kernel's neighbour table holds {entries} of {most} entries"
        + (f", and the job has {nodes} nodes" if nodes > 1 else ""),
        fix="Raise its thresholds, on every node.",
        paste=typed(
            "sudo sysctl -w net.ipv4.neigh.default.gc_thresh1={} "
            "net.ipv4.neigh.default.gc_thresh2={} net.ipv4.neigh.default.gc_thresh3={}",
            wanted // 4,
            wanted // 2,
            wanted,
        ),
    )
