"""GPUs that are another rank's own (DDP503)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding, Location, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.run.records.data import GpuLoadRecord
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.supervisor import GpusRecord, HeldMemory
from ddpdoctor.run.snapshot import FOREVER, Rank, Run
from ddpdoctor.system.gpu.reader import same_uuid


@dataclass(frozen=True)
class _Stray:
    """Memory that a rank holds on a GPU which is others' own."""

    rank: Rank
    held: HeldMemory
    owners: tuple[int, ...]
    load: GpuLoadRecord | None

    @property
    def location(self) -> Location | None:
        return None if self.load is None else self.load.location

    @property
    def gpu(self) -> str:
        return f"GPU {self.held.gpu}"


@rule("DDP503", "load-on-another-gpu", Severity.WARNING)
def load_on_another_gpu(run: Run) -> Iterator[Finding]:
    """A rank holds memory on another rank's GPU.

    What it finds
        A rank's process on a GPU, as listed by the driver, on which another rank trains and this
        one does not. The line is that of a `torch.load` that put tensors there.

    Why it is bad
        Without `map_location`, every rank loads a checkpoint's tensors onto the GPU that they were
        saved from, usually GPU 0. Each rank keeps a CUDA context of some hundred MB there, plus a
        copy of the weights: GPU 0 runs out of memory first.

    How to fix it
        Load with `map_location="cpu"`, or the rank's device. If nothing was loaded there, call
        `torch.cuda.set_device(local_rank)` before anything else uses CUDA.

    Example
        Wrong: `state = torch.load("last.pt")` on every rank.
        Right: `state = torch.load("last.pt", map_location=f"cuda:{local_rank}")`

    When it stays silent
        For ranks that share a GPU, models on several GPUs, GPUs that no other rank trains on,
        partitioned GPUs (MIG), and once a rank is in the debugger. If the driver cannot be queried,
        or its pids are not the ranks' (in a container, say).
    """
    strays: dict[Location | None, dict[tuple[int, str], _Stray]] = defaultdict(dict)
    for each in _strays(run):
        key = (each.rank.rank, same_uuid(each.held.device_uuid))
        strays[each.location].setdefault(key, each)
    for place, found in strays.items():
        yield _finding(place, [found[key] for key in sorted(found)])


def _strays(run: Run) -> Iterator[_Stray]:
    ranks = {rank.rank: rank for rank in run.last}
    owned = {number: _own(rank) for number, rank in ranks.items()}
    debugged = min((span.start for span in run.debugged), default=FOREVER)
    for look in run.supervisor.of(GpusRecord):
        if look.time >= debugged:
            return
        held: dict[int, dict[str, HeldMemory]] = defaultdict(dict)
        for each in look.held:
            if each.restart == run.restarts[-1]:
                held[each.rank][same_uuid(each.device_uuid)] = each
        for number, gpus in sorted(held.items()):
            own = owned.get(number, frozenset())
            # A process that is not seen on its own GPU may only share its number with a rank.
            if not own & gpus.keys():
                continue
            for uuid in sorted(gpus.keys() - own):
                owners = tuple(other for other in ranks if uuid in owned[other])
                if owners:
                    load = _load(ranks[number], uuid, look.time)
                    yield _Stray(ranks[number], gpus[uuid], owners, load)


def _own(rank: Rank) -> frozenset[str]:
    """The GPUs that the rank's DDP modules lie on."""
    built = rank.records.of(DdpRecord)
    return frozenset(same_uuid(uuid) for record in built for uuid in record.device_uuids)


def _load(rank: Rank, uuid: str, before: int) -> GpuLoadRecord | None:
    """The first load that put something on a GPU."""
    return next(
        (
            record
            for record in rank.records.of(GpuLoadRecord)
            if same_uuid(record.device_uuid) == uuid and record.time <= before
        ),
        None,
    )


def _finding(place: Location | None, found: list[_Stray]) -> Finding:
    ranks = tuple(dict.fromkeys(each.rank.rank for each in found))
    first = found[0]
    gpus = list(dict.fromkeys(each.gpu for each in found))
    whose = f"rank {first.owners[0]}'s" if len(gpus) == 1 else "other ranks'"
    message = f"{named(ranks)} {'hold' if len(ranks) > 1 else 'holds'} memory on {', '.join(gpus)}"
    message += f", {whose} own"
    fix = (
        "Call torch.cuda.set_device(local_rank) before anything else uses CUDA; no device is to be "
        'named "cuda:0" on every rank.'
    )
    if first.load is not None:
        how = "without map_location" if not first.load.mapped else "by its map_location"
        message += f": torch.load put tensors there {how}"
        fix = 'Give torch.load map_location="cpu", or the rank\'s own device.'
    return Finding(
        code="DDP503",
        about=str(place),
        severity=Severity.WARNING,
        message=message,
        ranks=ranks,
        location=place,
        evidence=tuple(_evidence(each) for each in found[:8]),
        fix=fix,
    )


def _evidence(stray: _Stray) -> str:
    size = stray.held.bytes
    much = f"{size / 2**20:.0f} MiB" if size is not None else "memory"
    name = f" ({stray.held.name})" if stray.held.name else ""
    return f"rank {stray.rank.rank} holds {much} on {stray.gpu}{name}, {named(stray.owners)}'s own"
