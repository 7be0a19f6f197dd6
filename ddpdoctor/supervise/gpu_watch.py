"""Ask the driver for the memory held on GPUs, and for the GPUs' state if a rank is slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from ddpdoctor.run.names import namespace
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.records.supervisor import (
    GpusRecord,
    GpuState,
    HeldMemory,
    ProfileRequestRecord,
)
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import Phase
from ddpdoctor.system.gpu_health import Health, health
from ddpdoctor.system.nvml import Device, NvmlReader, Reading

FIRST = 5.0  # Seconds from a rank's first complete step on a GPU to the first query
AGAIN = 60.0  # Seconds between two queries

READINGS, PAUSE = 3, 0.25
"""Number of readings of the GPUs once a rank seems slow, and seconds between two of them."""

_NEVER = float("inf")


class GpuWatch:
    """Query the driver in a thread, since that may take seconds, or hang with the driver.

    Of other users' processes only the number is kept. Ranks in another pid namespace are skipped,
    because their pids mean something else.

    Args:
        make: Makes the reader, in that thread.
        first: As `FIRST`.
        again: As `AGAIN`.
        pause: As `PAUSE`.
    """

    def __init__(
        self,
        make: Callable[[], NvmlReader] = NvmlReader,
        first: float = FIRST,
        again: float = AGAIN,
        pause: float = PAUSE,
    ) -> None:
        self._make = make
        self._reader: NvmlReader | None = None
        self._first, self._again, self._pause = first, again, pause
        self._namespace = namespace()
        self._due: float | None = None
        self._thread: threading.Thread | None = None
        self._results: list[GpusRecord | FaultRecord] = []
        self._reported: set[tuple[object, ...]] = set()
        self._slow = 0  # How often ranks were suspected to be slow

    def look_at(self, run: Run) -> Iterator[GpusRecord | FaultRecord]:
        """Start a query when one is due. Yield the results of the last one if they are new."""
        ranks = self._ranks(run)
        now = time.monotonic()
        if self._due is None and ranks:
            self._due = now + self._first
        asked = sum(each.rank is not None for each in run.supervisor.of(ProfileRequestRecord))
        suspected = asked > self._slow
        due = self._due is not None and (now >= self._due or (suspected and self._due < _NEVER))
        if due and ranks and not (self._thread is not None and self._thread.is_alive()):
            self._due, self._slow = now + self._again, asked
            readings = READINGS if suspected else 0
            self._thread = threading.Thread(
                target=self._query, args=(ranks, readings), name="ddpdoctor-gpus", daemon=True
            )
            self._thread.start()
        while self._results:
            record = self._results.pop(0)
            if isinstance(record, FaultRecord):
                self._due = _NEVER
                yield record
                continue
            key = {(each.rank, each.restart, each.device_uuid) for each in record.held}
            if record.states or key - self._reported:
                self._reported |= key
                yield record

    def _ranks(self, run: Run) -> dict[int, tuple[int, int]]:
        """Return the rank and restart of each process that trains on a GPU of this machine."""
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

    def _query(self, ranks: dict[int, tuple[int, int]], readings: int) -> None:
        try:
            self._results.append(self._held(ranks, readings))
        except Exception as error:
            self._results.append(FaultRecord(time=time.time_ns(), error=repr(error)))

    def _held(self, ranks: dict[int, tuple[int, int]], readings: int) -> GpusRecord:
        if self._reader is None:
            self._reader = self._make()
        held: list[HeldMemory] = []
        foreign: dict[Device, set[int]] = {}
        for device in self._reader.devices():
            # The driver lists processes by the whole GPU, whose UUID is not that of a partition.
            processes = (not device.mig and self._reader.processes(device)) or ()
            foreign[device] = {process.pid for process in processes} - ranks.keys()
            for process in processes:
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
        states = self._states(held, foreign, readings) if readings else []
        return GpusRecord(time=time.time_ns(), held=tuple(held), states=tuple(states))

    def _states(
        self, held: Sequence[HeldMemory], foreign: Mapping[Device, set[int]], readings: int
    ) -> Iterator[GpuState]:
        """Yield the state of the GPUs on which ranks hold memory, by several readings."""
        assert self._reader is not None
        users = {device: [each for each in held if each.gpu == device.index] for device in foreign}
        seen: dict[Device, list[Reading]] = {device: [] for device in foreign if users[device]}
        for number in range(readings):
            if number:
                time.sleep(self._pause)
            for device, found in seen.items():
                found.append(self._reader.rest(device))
        for device, found in seen.items():
            computing = self._reader.computing(device)
            others = foreign[device] if computing is None else foreign[device] & computing
            lasting = health(self._reader, device)
            for user in users[device]:
                yield _state(user, found, lasting, len(others))


def _state(user: HeldMemory, readings: Sequence[Reading], lasting: Health, others: int) -> GpuState:
    clocks = [each.clock * 1e6 for each in readings if each.clock is not None]
    reasons = [each.throttled or () for each in readings]
    return GpuState(
        rank=user.rank,
        restart=user.restart,
        device_uuid=user.device_uuid,
        gpu=user.gpu,
        others=others,
        clock=max(clocks, default=None),
        power_limit=readings[-1].power_limit,
        throttled=tuple(word for word in reasons[0] if all(word in each for each in reasons)),
        width=lasting.width,
        links=len(lasting.links),
        links_up=sum(lasting.links),
        remapping=lasting.rows_pending or lasting.rows_failed,
        uncorrected=readings[-1].ecc_errors,
    )
