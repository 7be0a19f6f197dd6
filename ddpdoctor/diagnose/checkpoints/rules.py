"""Rules for checkpoints (DDP5xx): the ranks that write them, the content, and the loads."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.checkpoints.prefixes import PREFIX, prefixed_names, refused_for_prefix
from ddpdoctor.diagnose.crashes.rank_endings import Ending, endings, first_failure
from ddpdoctor.diagnose.crashes.resource_errors import torn
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.supervisor import GpusRecord, HeldMemory
from ddpdoctor.run.records.training import (
    AppliedRecord,
    GpuLoadRecord,
    NotAppliedRecord,
    SaveRecord,
)
from ddpdoctor.run.snapshot import FOREVER, Rank, Run
from ddpdoctor.system.nvml import same_uuid

_HOLDS = {
    "wrapped": (
        'the wrapper\'s "module." names',
        "a model that is not wrapped in DDP refuses these names",
    ),
    "wrapper": (
        "the whole DDP wrapper, pickled",
        "it can be read only in a process group, with the same source tree",
    ),
    "module": (
        "a whole model, pickled",
        "it can be read only with the same source tree, and weights_only=False",
    ),
}
"""Wrong content of a checkpoint, by the probe's name for it: a description, and the consequence."""


_Writers = list[tuple[Rank, SaveRecord]]


@rule("DDP501", "save-on-every-rank", Severity.WARNING)
def save_on_every_rank(run: Run) -> Iterator[Finding]:
    """Several ranks write the same checkpoint file.

    What it finds
        The same path, on the same machine, passed to `torch.save` by more than one rank. An error
        if a rank then could not read it. torch's message about such a file varies ("legacy .tar
        format", "failed finding central directory", "Weights only load failed"), and its advice to
        load it unsafely is wrong.

    Why it is bad
        The writes overlap. A rank that reads the file, or a job that is stopped and restarted,
        finds a damaged checkpoint: 2 of 30 loads failed in a test with two ranks.

    How to fix it
        Save on rank 0 only, under a temporary name, rename it, and call a barrier before other
        ranks read it. If each rank has its own state to save, put the rank into the file name.

    Example
        Wrong:
            torch.save(model.module.state_dict(), "last.pt")  # on every rank
        Right:
            if dist.get_rank() == 0:
                torch.save(model.module.state_dict(), "last.tmp")
                os.replace("last.tmp", "last.pt")
            dist.barrier()

    When it stays silent
        For paths that contain the rank, in-memory buffers, and the same path on different machines.
    """
    writers: dict[tuple[str, str], _Writers] = defaultdict(list)
    for rank in run.last:
        for record in rank.records.of(SaveRecord):
            writers[rank.opened.host, record.file].append((rank, record))
    by_line: dict[Location | None, list[tuple[str, _Writers]]] = defaultdict(list)
    for (_, file), found in writers.items():
        if len({rank.rank for rank, _ in found}) > 1:
            _, first = min(found, key=lambda each: each[1].time)
            by_line[first.location].append((file, found))
    reader = torn(run)
    for place, files in by_line.items():
        ranks = tuple(sorted({rank.rank for _, found in files for rank, _ in found}))
        name = os.path.basename(files[0][0])
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        message = f"{len(ranks)} ranks write the same checkpoint, {name}{more}"
        evidence = [
            f"{file} was written by "
            + ", ".join(f"rank {rank.rank} in step {record.step}" for rank, record in found[:4])
            for file, found in files[:3]
        ]
        severity, traceback = Severity.WARNING, ""
        if reader is not None and reader.file.path in dict(files):
            severity, traceback = Severity.ERROR, reader.traceback
            broken = os.path.basename(reader.file.path)
            message = f"{reader.name} could not read {broken}: {len(ranks)} ranks write it at once"
            evidence += [
                f"it says: {_short(reader.text)}",
                f"it was read at {reader.location}",
                "torch's advice (weights_only=False) does not help here, and is unsafe",
            ]
        yield Finding(
            code="DDP501",
            severity=severity,
            message=message,
            ranks=ranks,
            location=place,
            evidence=tuple(evidence),
            traceback=traceback,
            fix="Save on rank 0 alone (`if dist.get_rank() == 0:`), then a barrier before any rank "
            "reads it; or put the rank into the file's name.",
            about=str(place),
        )


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


@rule("DDP502", "save-wrapped-state", Severity.INFO)
def save_wrapped_state(run: Run) -> Iterator[Finding]:
    """The DDP wrapper's state was saved instead of the model's.

    What it finds
        A checkpoint whose parameter names all begin with `module.`, or a pickled model or wrapper.
        A warning if the job itself could not load such names. An error if the job failed because
        the names in a checkpoint and in the model differ by that prefix.

    Why it is bad
        The names match only a model that is wrapped in DDP again: a single process or an inference
        script fails with "Missing key(s) in state_dict". A pickled model needs the same source
        tree, and a pickled wrapper also needs a process group.

    How to fix it
        Save `model.module.state_dict()`, and load it before you wrap the model, or into
        `model.module`.

    Example
        Wrong: `torch.save(model.state_dict(), path)` with `model = DDP(net)`.
        Right: `torch.save(model.module.state_dict(), path)`

    When it stays silent
        If the keys are the model's, for modules without parameters, and if the script handles the
        failed load.
    """
    cause = first_failure(run, run.restarts[-1])
    names = prefixed_names(run, cause) if cause is not None else None
    if cause is not None and names is not None:
        yield _refused(run, cause, *names)
        proven = names[1].startswith(PREFIX)
    else:
        # The job survived the failed load. It may have skipped all names.
        proven = any(
            record.prefix == PREFIX and record.of == "checkpoint"
            for rank in run.last
            for record in _not_applied(rank)
        )
    for rank in run.last:
        for record in rank.records.of(SaveRecord):
            if record.content not in _HOLDS:
                continue
            what, needs = _HOLDS[record.content]
            warns = proven and record.content == "wrapped"
            yield Finding(
                code="DDP502",
                severity=Severity.WARNING if warns else Severity.INFO,
                message=f"the checkpoint {os.path.basename(record.file)} holds {what}",
                ranks=(rank.rank,),
                location=record.location,
                evidence=(f"{record.file} was written by rank {rank.rank}", needs),
                fix="Save `model.module.state_dict()`, which loads with and without DDP.",
                about=f"{record.path}:{record.line}",
            )


def _refused(run: Run, cause: Ending, wanted: str, given: str) -> Finding:
    """Report the load whose exception ended the job."""
    fix = "The checkpoint came from a bare model: load it into `model.module`, or before the wrap."
    if given.startswith(PREFIX):
        fix = (
            "The checkpoint came from a DDP wrapper: save `model.module.state_dict()`, load this "
            "one into the wrapper, or strip the prefix "
            '({k.removeprefix("module."): v for k, v in state.items()}).'
        )
    same = [each for each in endings(run, run.restarts[-1]) if refused_for_prefix(run, each)]
    return Finding(
        code="DDP502",
        severity=Severity.ERROR,
        message=f"{cause.name} could not load a checkpoint: its names differ from the model's by "
        'the wrapper\'s prefix "module."',
        ranks=tuple(sorted({each.rank for each in same if each.rank is not None})),
        location=cause.location,
        evidence=(
            f'the model has "{wanted}", the checkpoint "{given}"',
            *(f"{each.name} failed on it, too" for each in same[:4] if each.rank != cause.rank),
        ),
        fix=fix,
        traceback=cause.traceback,
        about="load",
    )


@rule("DDP509", "checkpoint-not-applied", Severity.ERROR)
def checkpoint_not_applied(run: Run) -> Iterator[Finding]:
    """A checkpoint was loaded with `strict=False`, and few or none of its names match the model.

    What it finds
        A `load_state_dict(..., strict=False)` in which at most half of the names match, with
        unmatched names in both the checkpoint and the model. An error if none matches.

    Why it is bad
        `strict=False` silently skips names that do not match: the model keeps its random weights,
        and training starts from scratch.

    How to fix it
        Make the names equal: strip or add the prefix, or load into `model.module`. Check the
        `missing_keys` and `unexpected_keys` that the call returns.

    Example
        Wrong:
            net.load_state_dict(torch.load("ddp.pt"), strict=False)  # names begin with module.
        Right:
            state = torch.load("ddp.pt")
            net.load_state_dict({k.removeprefix("module."): v for k, v in state.items()})

    When it stays silent
        If more than half of the names match (a new head), if one of the two sides has no unmatched
        names (an adapter, part of a model, a shard of a checkpoint), and if a later load into the
        same module matches.
    """
    found: dict[Location | None, list[tuple[Rank, NotAppliedRecord]]] = defaultdict(list)
    for rank in run.last:
        for record in _not_applied(rank):
            found[record.location].append((rank, record))
    for place, loads in found.items():
        record = loads[0][1]
        ranks = tuple(sorted({rank.rank for rank, _ in loads}))
        evidence = [
            f"the model expects {record.wanted} names, {_names(record.missing)} among them",
            f"the checkpoint has {_names(record.unexpected)} instead",
        ]
        prefix = _short(record.prefix)
        if prefix:
            whose = "checkpoint's" if record.of == "checkpoint" else "model's"
            evidence.append(f'they differ by the prefix "{prefix}" of the {whose} names')
        yield Finding(
            code="DDP509",
            severity=Severity.WARNING if record.matched else Severity.ERROR,
            message=f"{named(ranks)} loaded a checkpoint with strict=False, and "
            f"{record.matched or 'none'} of {record.given} names in it fit the model",
            ranks=ranks,
            location=place,
            evidence=tuple(evidence),
            fix=_rename(record, prefix),
            about=str(place),
        )


def _not_applied(rank: Rank) -> Iterator[NotAppliedRecord]:
    """Yield the loads that matched few names and were not followed by a better one."""
    good = {record.number for record in rank.records.of(AppliedRecord)}
    loads = rank.records.of(NotAppliedRecord) if rank.watched(AppliedRecord) else ()
    return (each for each in loads if each.number not in good)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f'"{_short(name)}"' for name in names)


def _rename(record: NotAppliedRecord, prefix: str) -> str:
    """Describe how to make the names equal."""
    if not prefix:
        return (
            "Compare the names of both, and rename those of the checkpoint; then load it with "
            "strict=True, or check the missing_keys that the call returns."
        )
    if record.of == "checkpoint":
        return f'Strip the prefix: {{k.removeprefix("{prefix}"): v for k, v in state.items()}}.'
    if prefix == PREFIX:
        return "Load it into `model.module`, or before the wrap."
    return f"Load it into `model.{prefix.rstrip('.')}`, or add the prefix to the names."


@dataclass(frozen=True)
class _ForeignMemory:
    """Memory that a rank holds on a GPU of other ranks."""

    rank: Rank
    held: HeldMemory
    owners: tuple[int, ...]
    load: GpuLoadRecord | None  # The first load that put a tensor there

    @property
    def gpu(self) -> str:
        return f"GPU {self.held.gpu}"

    @property
    def evidence(self) -> str:
        size = self.held.bytes
        much = f"{size / 2**20:.0f} MiB" if size is not None else "memory"
        name = f" ({self.held.name})" if self.held.name else ""
        owners = f"{named(self.owners)}'s own"
        return f"rank {self.rank.rank} holds {much} on {self.gpu}{name}, {owners}"


@rule("DDP503", "load-on-another-gpu", Severity.WARNING)
def load_on_another_gpu(run: Run) -> Iterator[Finding]:
    """A rank holds memory on another rank's GPU.

    What it finds
        A rank's process that the driver lists on a GPU on which another rank trains and this one
        does not. The finding names the `torch.load` that put tensors there, if one did.

    Why it is bad
        Without `map_location`, every rank loads a checkpoint's tensors onto the GPU that they were
        saved from, usually GPU 0. Each rank keeps a CUDA context of a few hundred MB there, plus a
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
    by_line: dict[Location | None, dict[tuple[int, str], _ForeignMemory]] = defaultdict(dict)
    for each in _foreign_memory(run):
        key = (each.rank.rank, same_uuid(each.held.device_uuid))
        by_line[each.load.location if each.load else None].setdefault(key, each)
    for place, memory in by_line.items():
        found = [memory[key] for key in sorted(memory)]
        ranks = tuple(dict.fromkeys(each.rank.rank for each in found))
        first = found[0]
        gpus = list(dict.fromkeys(each.gpu for each in found))
        whose = f"rank {first.owners[0]}'s" if len(gpus) == 1 else "other ranks'"
        message = (
            f"{named(ranks)} {'hold' if len(ranks) > 1 else 'holds'} memory on {', '.join(gpus)}, "
            f"{whose} own"
        )
        fix = (
            "Call torch.cuda.set_device(local_rank) before anything else uses CUDA; do not use "
            '"cuda:0" on every rank.'
        )
        if first.load is not None:
            how = "without map_location" if not first.load.mapped else "because of its map_location"
            message += f": torch.load put tensors there {how}"
            fix = 'Give torch.load map_location="cpu", or the rank\'s own device.'
        yield Finding(
            code="DDP503",
            about=str(place),
            severity=Severity.WARNING,
            message=message,
            ranks=ranks,
            location=place,
            evidence=tuple(each.evidence for each in found[:8]),
            fix=fix,
        )


def _foreign_memory(run: Run) -> Iterator[_ForeignMemory]:
    ranks = {rank.rank: rank for rank in run.last}
    # The GPUs that hold each rank's DDP modules.
    owned = {
        number: {
            same_uuid(uuid) for record in rank.records.of(DdpRecord) for uuid in record.device_uuids
        }
        for number, rank in ranks.items()
    }
    debugged = min((span.start for span in run.debugged), default=FOREVER)
    for sample in run.supervisor.of(GpusRecord):
        if sample.time >= debugged:
            return
        held: dict[int, dict[str, HeldMemory]] = defaultdict(dict)
        for each in sample.held:
            if each.restart == run.restarts[-1]:
                held[each.rank][same_uuid(each.device_uuid)] = each
        for number, gpus in sorted(held.items()):
            own = owned.get(number, set())
            # A process that is not on the rank's own GPU may have its pid by chance.
            if not own & gpus.keys():
                continue
            for uuid in sorted(gpus.keys() - own):
                owners = tuple(other for other in ranks if uuid in owned[other])
                if owners:
                    load = _first_load(ranks[number], uuid, sample.time)
                    yield _ForeignMemory(ranks[number], gpus[uuid], owners, load)


def _first_load(rank: Rank, uuid: str, before: int) -> GpuLoadRecord | None:
    """Return the first load, up to ``before``, that put a tensor on a GPU."""
    return next(
        (
            record
            for record in rank.records.of(GpuLoadRecord)
            if same_uuid(record.device_uuid) == uuid and record.time <= before
        ),
        None,
    )
