"""Measure the ranks' traffic to other nodes, once they wait for most of a step."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.supervisor import LinkRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.system import proc
from ddpdoctor.system.network import Traffic, traffic

RECENT_STEPS = 64
MIN_WAIT = 0.5  # Minimum share of steps that ranks spend waiting
FIRST_WINDOW, MAX_WINDOW = 5.0, 300.0  # Seconds. Each window is twice as long as the one before.
MIN_SENT = 64 << 10  # Minimum bytes that a link sends in a window to be recorded
MAX_LINKS = 16  # Maximum number of recorded links per window, those with the most bytes

MIN_BUSY = 0.5  # Minimum share of a window in which a full connection has data in flight

MIN_RATE = 0.25
"""Minimum rate of a full connection while data are in flight, as a share of the rate that the
kernel estimates for the path. A connection that mainly waits for acknowledgements of small messages
is far below.
"""


class LinkWatch:
    """Record the links to other nodes, unless no rank waits for the network."""

    def __init__(
        self,
        write: Callable[[Record], None],
        read: Callable[[set[int]], dict[int, Traffic]] = traffic,
    ) -> None:
        self._write = write
        self._read = read
        self._due = 0.0
        self._window = FIRST_WINDOW
        self._before: tuple[float, dict[int, Traffic]] | None = None

    def look(self, run: Run) -> bool:
        """Measure for a window if one is due. Returns whether the rules should examine the run."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self._window
        own = [each for each in run.last if not each.elsewhere and each.exit is None]
        if not own or len(own) == run.world_size or not _wait(own):
            self._before = None
            return False
        before, self._before = self._before, None
        inodes = {
            inode
            for rank in own
            if rank.status is not None
            for inode in proc.sockets(Path("/proc") / str(rank.status.pid))
        }
        found = self._read(inodes)
        self._before = now, found
        if before is not None:
            self._window = min(2 * self._window, MAX_WINDOW)
            self._due = now + self._window
            links = sorted(_links(before[1], found, now - before[0]), key=lambda each: -each.sent)
            for each in links[:MAX_LINKS]:
                self._write(each)
        return False

    def close(self) -> None:
        """Do nothing: no file is open."""


def _wait(ranks: Sequence[Rank]) -> bool:
    """Return whether ranks wait for most of their newest steps, as far as measured."""
    steps = [step for rank in ranks for step in rank.steps[-RECENT_STEPS:]]
    steps = [step for step in steps if step.split] or steps
    total = sum(step.total for step in steps)
    # Steps that are not split have their waits in the backward.
    waits = sum(step.wait if step.split else step.backward + step.wait for step in steps)
    return total > 0 and waits >= MIN_WAIT * total


def _links(
    before: dict[int, Traffic], now: dict[int, Traffic], seconds: float
) -> Iterator[LinkRecord]:
    """Yield the traffic over each link in a window."""
    by_link: dict[tuple[str, str], list[tuple[Traffic, Traffic]]] = defaultdict(list)
    for inode, each in now.items():
        if inode in before:
            by_link[each.source, each.target].append((before[inode], each))
    for (source, target), connections in by_link.items():
        sent = sum(new.sent - old.sent for old, new in connections)
        if sent < MIN_SENT:
            continue
        full = [
            (new.sent - old.sent, new.busy - old.busy)
            for old, new in connections
            if new.busy - old.busy >= MIN_BUSY * seconds
            and new.sent - old.sent >= MIN_RATE * new.rate * (new.busy - old.busy)
        ]
        busy = max((each for _, each in full), default=0.0)
        yield LinkRecord(
            time=time.time_ns(),
            host=socket.gethostname(),
            source=source,
            target=target,
            seconds=round(seconds, 1),
            sent=sent,
            busy=round(min(busy / seconds, 1.0), 2),
            rate=round(sum(each for each, _ in full) / busy) if busy else 0,
            rtt=max(new.rtt for _, new in connections),
        )
