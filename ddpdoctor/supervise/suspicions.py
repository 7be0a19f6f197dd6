"""Fingerprints that differ between ranks: the supervisor lets the ranks look closely, and waits.

The rules judge; here it is only seen, early and cheaply, that there may be something to judge. The
ranks are given a step that none of them has reached, so that all look at the same ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from ddpdoctor.analysis.replicas import AVERAGED, PATIENCE, unpacked
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.replicas import ElementsRecord, FingerprintRecord, TensorsRecord
from ddpdoctor.run.records.supervisor import SuspicionRecord
from ddpdoctor.run.requests import Suspicion, SuspicionWriter
from ddpdoctor.run.snapshot import Rank, Run

STEPS = 16
"""Steps that ranks look at one by one."""

TENSORS = 3
"""Tensors whose elements ranks write: the first ones that differ."""

AHEAD = 0.1
"""Seconds that ranks have to hear of it before they come to the end of the step that is named."""

MOST_OPEN = 1024
"""Fingerprints that wait for those of the other ranks."""

_Key = tuple[int, int, int]
"""Module, step, forwards whose backward was reduced."""


class Suspicions:
    """Compares the fingerprints of a run as they come in.

    Args:
        page: Where ranks read what is suspected.
        write: Writes a record of the supervisor.
    """

    def __init__(self, page: SuspicionWriter, write: Callable[[Record], None]) -> None:
        self._page = page
        self._write = write
        self._begin(0)

    def _begin(self, restart: int) -> None:
        self._restart = restart
        self._read: dict[int, int] = {}
        self._groups: dict[int, dict[int, tuple[int, ...]]] = {}
        self._open: dict[_Key, dict[int, FingerprintRecord]] = {}
        self._suspected = False
        """The ranks were asked to look."""
        self._located: Suspicion | None = None
        """The one that named tensors, which is the last."""
        self._waiting: set[int] = set()
        """Ranks that have not written what they were asked for."""
        self._until: float | None = None

    def look(self, run: Run) -> bool:
        """Take in what is new.

        Returns:
            Whether the rules should look now: what ranks were asked for is there, or was waited for
            long enough.
        """
        if run.restarts[-1] != self._restart:
            self._begin(run.restarts[-1])
        for rank in run.last:
            fresh = rank.records[self._read.get(rank.rank, 0) :]
            self._read[rank.rank] = len(rank.records)
            for record in fresh:
                if isinstance(record, FingerprintRecord) and self._located is None:
                    self._compare(run, rank, record)
                elif isinstance(record, TensorsRecord):
                    averaged = AVERAGED in (record.hook or "")
                    groups = self._groups.setdefault(record.module, {})
                    groups[rank.rank] = () if averaged else record.group
                elif isinstance(record, ElementsRecord):
                    self._waiting.discard(rank.rank)
        arrived = self._located is not None and not self._waiting
        if self._until is None or not (arrived or time.monotonic() >= self._until):
            return False
        self._until = None
        return True

    def close(self) -> None:
        """Let go of the file."""
        self._page.close()

    def _compare(self, run: Run, rank: Rank, record: FingerprintRecord) -> None:
        """Put a fingerprint to those of the other ranks."""
        module = record.module
        group = self._groups.get(module, {}).get(rank.rank, ())
        # Those of other nodes are seen by their own supervisor.
        mine = {each.rank for each in run.last} & set(group)
        if len(mine) < 2:
            return
        key = (module, record.step, record.armed)
        prints = self._open.setdefault(key, {})
        prints[rank.rank] = record
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        if not mine <= prints.keys():
            return
        self._open.pop(key, None)
        if len({each.parameters for each in prints.values()}) > 1:
            self._suspect(run, module, key[1], tuple(_differing(list(prints.values()))))

    def _suspect(self, run: Run, module: int, seen: int, tensors: tuple[int, ...]) -> None:
        """Ask the ranks, for the first time, or now that it is known for which tensors."""
        if self._located is not None or (self._suspected and not tensors):
            return
        newest = max((each.status.step for each in run.last if each.status is not None), default=0)
        totals = [each.total for rank in run.last for each in rank.steps[-64:] if each.total > 0]
        # A quick one, as a step may be when other processes leave the machine to it.
        quick = sorted(totals)[len(totals) // 4] if totals else AHEAD * 1e9
        ahead = 1 + math.ceil(AHEAD * 1e9 / quick)
        suspicion = Suspicion(self._restart, newest + ahead, STEPS, module, tensors[:TENSORS])
        self._page.write(suspicion)
        self._suspected = True
        self._until = time.monotonic() + PATIENCE
        if tensors:
            self._located = suspicion
            self._waiting = {rank for rank, group in self._groups[module].items() if group}
        self._write(
            SuspicionRecord(
                time=time.time_ns(),
                restart=self._restart,
                module=module,
                seen=seen,
                step=suspicion.step,
                tensors=suspicion.tensors,
            )
        )


def _differing(prints: list[FingerprintRecord]) -> Iterator[int]:
    """The places of the tensors that differ, if the fingerprints show them."""
    details = [unpacked(each.detail or "") for each in prints]
    for index, tensors in enumerate(zip(*details, strict=False)):
        if len({hash_ for hash_, _ in tensors}) > 1:
            yield index
