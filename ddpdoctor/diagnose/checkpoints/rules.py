"""Rules for checkpoints (DDP5xx): who writes them, what is in them, and where they are loaded."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.user_code import Location
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

# -- checkpoints (DDP5xx): who writes them, and what is in them


_REFUSED = re.compile(r"Error\(s\) in loading state_dict for (\w+)")
_MISSING = re.compile(r"Missing key\(s\) in state_dict: ([^\n]+)")
_UNEXPECTED = re.compile(r"Unexpected key\(s\) in state_dict: ([^\n]+)")
_KEY = re.compile(r"\"([^\"]+)\"")
_PREFIX = "module."

MOST_KEYS = 0.8
"""The part of the names that has to differ by the prefix alone."""

_HOLDS = {
    "wrapped": 'the wrapper\'s "module." names',
    "wrapper": "the whole DDP wrapper, pickled",
    "module": "a whole model, pickled",
}
"""What a checkpoint holds that it should not, as the probe reports it."""

_NEEDS = {
    "wrapped": "a model that is not wrapped in DDP refuses these names",
    "wrapper": "it can be read only in a process group, with the same sources at hand",
    "module": "it can be read only with the same sources at hand, and weights_only=False",
}


@rule("DDP501", "save-on-every-rank", Severity.WARNING)
def save_on_every_rank(run: Run) -> Iterator[Finding]:
    """Several ranks write the same checkpoint file.

    What it finds
        The same path, on the same machine, passed to `torch.save` by more than one rank. An error
        if a rank then could not read it. torch's message about such a file varies ("legacy .tar
        format", "failed finding central directory", "Weights only load failed"), and its advice to
        load it unsafely is wrong.

    Why it is bad
        The writes overlap. A rank that reads the file, or a job that is stopped meanwhile, finds a
        damaged checkpoint: 2 of 30 loads failed in a test with two ranks.

    How to fix it
        Save on rank 0 only, to a temporary name that is renamed afterwards, with a barrier before
        other ranks read it. If each rank has a state to save, put the rank into the file name.

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
    writers: dict[tuple[str, str], list[tuple[Rank, SaveRecord]]] = defaultdict(list)
    for rank in run.last:
        for record in rank.records.of(SaveRecord):
            writers[rank.opened.host, record.file].append((rank, record))
    guilty: dict[Location | None, list[tuple[str, list[tuple[Rank, SaveRecord]]]]] = defaultdict(
        list
    )
    for (_, file), found in writers.items():
        if len({rank.rank for rank, _ in found}) > 1:
            _, first = min(found, key=lambda each: each[1].time)
            guilty[first.location].append((file, found))
    reader = torn(run)
    for place, files in guilty.items():
        ranks = tuple(sorted({rank.rank for _, found in files for rank, _ in found}))
        name = os.path.basename(files[0][0])
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        message = f"{len(ranks)} ranks write the same checkpoint, {name}{more}"
        evidence = [_wrote(file, found) for file, found in files[:3]]
        severity, traceback = Severity.WARNING, ""
        if reader is not None and reader.file.path in [file for file, _ in files]:
            severity, traceback = Severity.ERROR, reader.traceback
            broken = os.path.basename(reader.file.path)
            message = f"{reader.name} could not read {broken}: {len(ranks)} ranks write it at once"
            evidence += [
                f"it says: {_short(reader.text)}",
                f"it was read at {reader.location}",
                "what torch advises (weights_only=False) does not help here, and is unsafe",
            ]
        yield Finding(
            code="DDP501",
            severity=severity,
            message=message,
            ranks=ranks,
            location=place,
            evidence=tuple(evidence),
            traceback=traceback,
            fix="Save on rank 0 alone (`if dist.get_rank() == 0:`), then a barrier before anybody "
            "reads it; or put the rank into the file's name.",
            about=str(place),
        )


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def _wrote(file: str, found: list[tuple[Rank, SaveRecord]]) -> str:
    parts = [f"rank {rank.rank} in step {record.step}" for rank, record in found[:4]]
    return f"{file} was written by {', '.join(parts)}"


@rule("DDP502", "save-wrapped-state", Severity.INFO)
def save_wrapped_state(run: Run) -> Iterator[Finding]:
    """The state of the DDP wrapper was saved instead of the model's.

    What it finds
        A checkpoint whose parameter names all begin with `module.`, or a pickled model or wrapper.
        A warning if the job itself could not load such names. An error if the job failed because
        the names in a checkpoint and in the model differ by that prefix.

    Why it is bad
        The names match only a model that is wrapped in DDP again: a single process or an inference
        script fails with "Missing key(s) in state_dict". A pickled model needs the same source
        tree, a pickled wrapper even a process group.

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
    yield from _refused(run)
    proven = _cannot_be_loaded(run)
    for rank in run.last:
        for record in rank.records.of(SaveRecord):
            what = _HOLDS.get(record.content)
            if what is None:
                continue
            yield Finding(
                code="DDP502",
                severity=Severity.WARNING
                if proven and record.content == "wrapped"
                else Severity.INFO,
                message=f"the checkpoint {os.path.basename(record.file)} holds {what}",
                ranks=(rank.rank,),
                location=record.location,
                evidence=(
                    f"{record.file} was written by rank {rank.rank}",
                    _NEEDS[record.content],
                ),
                fix="Save `model.module.state_dict()`, which loads with and without DDP.",
                about=f"{record.path}:{record.line}",
            )


def _cannot_be_loaded(run: Run) -> bool:
    """Whether a load of this job met the wrapper's prefix, and failed or passed over all names."""
    cause = first_failure(run, run.restarts[-1])
    if cause is not None and refused_for_prefix(run, cause):
        names = _by_prefix(cause.message)
        return names is not None and names[1].startswith(_PREFIX)
    return any(
        record.prefix == _PREFIX and record.of == "checkpoint"
        for rank in run.last
        for record in _not_applied(rank)
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
        matched, given = record.matched, record.given
        ranks = tuple(sorted({rank.rank for rank, _ in loads}))
        share = f"{matched} of {given}" if matched else f"none of {given}"
        evidence = [
            f"the model wants {record.wanted} names, {_names(record.missing)} among them",
            f"the checkpoint has {_names(record.unexpected)} instead",
        ]
        prefix = _short(record.prefix)
        if prefix:
            whose = "checkpoint's" if record.of == "checkpoint" else "model's"
            evidence.append(f'they differ by the prefix "{prefix}" of the {whose} names')
        yield Finding(
            code="DDP509",
            severity=Severity.WARNING if matched else Severity.ERROR,
            message=f"{named(ranks)} loaded a checkpoint with strict=False, and {share} names in "
            "it fit the model",
            ranks=ranks,
            location=place,
            evidence=tuple(evidence),
            fix=_rename(record, prefix),
            about=str(place),
        )


def _not_applied(rank: Rank) -> Iterator[NotAppliedRecord]:
    """The loads that applied little, without those that were made good later."""
    good = {record.number for record in rank.records.of(AppliedRecord)}
    return (each for each in rank.records.of(NotAppliedRecord) if each.number not in good)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f'"{_short(name)}"' for name in names)


def _rename(record: NotAppliedRecord, prefix: str) -> str:
    if not prefix:
        return (
            "Compare the names of both, and rename those of the checkpoint; then load it with "
            "strict=True, or check the missing_keys that the call returns."
        )
    if record.of == "checkpoint":
        return f'Strip the prefix: {{k.removeprefix("{prefix}"): v for k, v in state.items()}}.'
    if prefix == _PREFIX:
        return "Load it into `model.module`, or before the wrap."
    return f"Load it into `model.{prefix.rstrip('.')}`, or add the prefix to the names."


def refused_for_prefix(run: Run, cause: Ending) -> bool:
    """Whether DDP502 names an exception: a load that failed on the wrapper's prefix."""
    return (
        cause.kind == "exception" and _by_prefix(cause.message) is not None and run.exit_status != 0
    )


def _by_prefix(message: str) -> tuple[str, str] | None:
    """A name as the model has it and as the checkpoint has it, if the prefix is all between them.

    What else is missing does not matter: buffers, say, that are new.
    """
    found = _MISSING.search(message), _UNEXPECTED.search(message)
    if _REFUSED.search(message) is None or found[0] is None or found[1] is None:
        return None
    wanted, given = (_KEY.findall(each[1]) for each in found if each is not None)
    for change in (_PREFIX.__add__, _without_prefix):
        pairs = [(name, change(name)) for name in wanted if change(name) in given]
        if pairs and MOST_KEYS * min(len(wanted), len(given)) <= len(pairs):
            return pairs[0]
    return None


def _without_prefix(name: str) -> str:
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else ""


def _refused(run: Run) -> Iterator[Finding]:
    """The load whose exception ended the job."""
    restart = run.restarts[-1]
    cause = first_failure(run, restart)
    if cause is None or not refused_for_prefix(run, cause):
        return
    names = _by_prefix(cause.message)
    assert names is not None
    wanted, given = names
    if given.startswith(_PREFIX):
        fix = "The checkpoint came from a DDP wrapper: save `model.module.state_dict()`, load it "
        fix += "into the wrapper, or strip the prefix "
        fix += '({k.removeprefix("module."): v for k, v in state.items()}).'
    else:
        fix = "The checkpoint came from a bare model: load it into `model.module`, or before the "
        fix += "wrap."
    same = [each for each in endings(run, restart) if refused_for_prefix(run, each)]
    yield Finding(
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


# -- GPUs that are another rank's own (DDP503)


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
