"""Ask the driver who holds memory on the GPUs, and how the GPUs do once a rank is slow."""

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

FIRST = 5.0
"""Seconds after the first step that a rank on a GPU has closed."""

AGAIN = 60.0
"""Seconds between two looks."""

READINGS, PAUSE = 3, 0.25
"""Readings of GPUs once a rank seems slow, and seconds between two: clocks change."""

_NEVER = float("inf")


class GpuWatch:
    """Asks the driver on its own thread, since it may take seconds, or hang with the driver.

    Of other people's processes their number is kept, and nothing else. Pids are compared where they
    mean the same: of ranks in another pid namespace nothing is said, and the rule asks for more.

    Args:
        make: Makes the reader, on that thread.
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
        self._seen: list[GpusRecord | FaultRecord] = []
        self._reported: set[tuple[object, ...]] = set()
        self._slow = 0
        """How many times ranks were suspected to be slow."""

    def look_at(self, run: Run) -> Iterator[GpusRecord | FaultRecord]:
        """Start a look when one is due; what the last one saw, if that is news."""
        ranks = self._ranks(run)
        now = time.monotonic()
        if self._due is None and ranks:
            self._due = now + self._first
        asked = sum(each.rank is not None for each in run.supervisor.of(ProfileRequestRecord))
        suspected = asked > self._slow
        due = self._due is not None and (now >= self._due or (suspected and self._due < _NEVER))
        if due and ranks and not self._looks():
            self._due, self._slow = now + self._again, asked
            readings = READINGS if suspected else 0
            self._thread = threading.Thread(
                target=self._look, args=(ranks, readings), name="ddpdoctor-gpus", daemon=True
            )
            self._thread.start()
        while self._seen:
            record = self._seen.pop(0)
            if isinstance(record, FaultRecord):
                self._due = _NEVER
                yield record
                continue
            key = {(each.rank, each.restart, each.device_uuid) for each in record.held}
            if record.states or key - self._reported:
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

    def _look(self, ranks: dict[int, tuple[int, int]], readings: int) -> None:
        try:
            self._seen.append(self._held(ranks, readings))
        except Exception as error:
            self._seen.append(FaultRecord(time=time.time_ns(), error=repr(error)))

    def _held(self, ranks: dict[int, tuple[int, int]], readings: int) -> GpusRecord:
        if self._reader is None:
            self._reader = self._make()
        held: list[HeldMemory] = []
        foreign: dict[Device, set[int]] = {}
        for device in self._reader.devices():
            # A partition has another UUID for the driver than the whole.
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
        """How the GPUs fare that ranks hold memory on, by several readings."""
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
