"""On which GPUs the ranks' processes hold memory, looked up now and then for rules to judge."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from ddpdoctor.run.environment import namespace
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.records.supervisor import GpusRecord, HeldMemory
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import Phase
from ddpdoctor.system.gpu.nvml import NvmlReader

FIRST = 5.0
"""Seconds after the first step that a rank on a GPU has closed."""

AGAIN = 60.0
"""Seconds between two looks."""


class GpuWatch:
    """Asks the driver on its own thread, since it may take seconds, or hang with the driver.

    Of other people's processes nothing is kept. Pids are compared where they mean the same: of
    ranks in another pid namespace nothing is said, and the rule asks for more.

    Args:
        make: Makes the reader, on that thread.
        first: As `FIRST`.
        again: As `AGAIN`.
    """

    def __init__(
        self,
        make: Callable[[], NvmlReader] = NvmlReader,
        first: float = FIRST,
        again: float = AGAIN,
    ) -> None:
        self._make = make
        self._reader: NvmlReader | None = None
        self._first, self._again = first, again
        self._namespace = namespace()
        self._due: float | None = None
        self._thread: threading.Thread | None = None
        self._seen: list[GpusRecord | FaultRecord] = []
        self._reported: set[tuple[object, ...]] = set()

    def look_at(self, run: Run) -> Iterator[GpusRecord | FaultRecord]:
        """Start a look when one is due; what the last one saw, if that is news."""
        ranks = self._ranks(run)
        now = time.monotonic()
        if self._due is None and ranks:
            self._due = now + self._first
        if self._due is not None and now >= self._due and ranks and not self._looks():
            self._due = now + self._again
            self._thread = threading.Thread(
                target=self._look, args=(ranks,), name="ddpdoctor-gpus", daemon=True
            )
            self._thread.start()
        while self._seen:
            record = self._seen.pop(0)
            if isinstance(record, FaultRecord):
                self._due = float("inf")
                yield record
                continue
            key = {(each.rank, each.restart, each.device_uuid) for each in record.held}
            if key - self._reported:
                self._reported |= key
                yield record

    def _looks(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _ranks(self, run: Run) -> dict[int, tuple[int, int]]:
        """The ranks that train on a GPU of this machine, by pid."""
        return {
            rank.status.pid: (rank.rank, rank.restart)
            for rank in run.last
            if rank.status is not None
            and rank.status.step > 0
            and rank.status.phase != Phase.ENDED
            and rank.exit is None
            and rank.opened.namespace == self._namespace
            and any(record.device_uuid for record in rank.records.of(DdpRecord))
        }

    def _look(self, ranks: dict[int, tuple[int, int]]) -> None:
        try:
            self._seen.append(self._held(ranks))
        except Exception as error:
            self._seen.append(FaultRecord(time=time.time_ns(), error=repr(error)))

    def _held(self, ranks: dict[int, tuple[int, int]]) -> GpusRecord:
        if self._reader is None:
            self._reader = self._make()
        held: list[HeldMemory] = []
        for device in self._reader.devices():
            # A partition has another UUID for the driver than the whole.
            for process in (not device.mig and self._reader.processes(device)) or ():
                place = ranks.get(process.pid)
                if place is not None:
                    held.append(
                        HeldMemory(
                            rank=place[0],
                            restart=place[1],
                            device_uuid=device.uuid,
                            gpu=device.index,
                            name=device.name,
                            bytes=process.memory,
                        )
                    )
        return GpusRecord(time=time.time_ns(), held=tuple(held))
