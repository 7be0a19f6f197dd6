"""Records of what each rank drew of the data, and of checkpoints."""

from __future__ import annotations

from typing import NamedTuple

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import Part, PlacedRecord, Record
from ddpdoctor.run.records.declaring import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerFacts(Part):
    """What a sampler's attributes say; None for those that it does not have."""

    name: str = ""
    """Its class."""
    torch: bool = False
    """It, and what it wraps, are torch's own."""
    rank: int | None = None
    num_replicas: int | None = None
    seed: int | None = None
    epoch: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    replacement: bool | None = None
    set_epoch: bool = False
    """It has the method."""
    id: int | None = None
    """Its number among the samplers of the rank."""
    made: Location | None = None
    """The line that built it."""


class Head(NamedTuple):
    """The draws at the beginning of a pass; in JSON a list."""

    draws: int
    digest: int
    """A hash of them in their order."""


class Sketch(NamedTuple):
    """Samples by their content; in JSON a list."""

    looked: int
    """How many were hashed."""
    repeats: int
    """How often one of those kept came again."""
    hashes: tuple[int, ...]
    """The smallest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord(PlacedRecord):
    """What a pass over a loader drew; 32 passes of a rank.

    ``path`` and ``line`` are where the loader is read. Each pass is written several times; the last
    record counts.
    """

    kind = "pass"

    time: int = 0
    pass_: int
    """Which pass of the rank it is."""
    number: int
    """Which pass over its loader it is, from 0."""
    state: str
    """``ended`` or ``left`` once it is over; ``unfollowed`` where the overhead budget ended the
    recording before: what came later is not known."""
    made: Location | None = None
    """The line that built the loader."""
    armed: int = 0
    """Forward passes before it whose backward was to be all-reduced."""
    workers: int = 0
    collates: bool = False
    """The loader fetches a batch at once."""
    dataset: str = ""
    """The class of the data set."""
    iterable: bool = False
    in_order: bool = True
    """The workers' batches come in turn."""
    sampler: SamplerFacts | None = None
    idle: tuple[Location, ...] = ()
    """Lines that built samplers of the same data set that no loader was given."""
    split: Location | None = None
    """The line that split the data set."""
    subset: int | None = None
    """A hash of the indices of a ``Subset``."""
    subset_length: int | None = None
    length: int | None = None
    """Indices of the space that all ranks share; None if it is not known."""
    batches: int | None = None
    """How many there will be; None if only the job's code could tell."""
    followed: int = 0
    """Indices of that space that all ranks follow."""
    fetched: int = 0
    """Batches that the training loop got."""
    marks: int = 0
    """Batches after which a backward pass came."""
    joins: bool = False
    """It is within ``join()``."""
    collectives: int | None = None
    """Collectives that the rank called meanwhile; reductions and gathers of them follow."""
    reductions: int | None = None
    gathers: int | None = None
    armed_after: int | None = None
    """``armed`` when it was over."""
    closed: int = 0
    """Unix nanoseconds at which it was over."""
    to_end: bool = False
    """The loop in the source has no way out before its end."""
    draws: int = 0
    order: int | None = None
    """A hash of the draws in their order."""
    falls: int = 0
    """Draws below the one before."""
    repeats: int = 0
    """Followed indices that were drawn again."""
    opaque: bool = False
    """Its indices are no whole numbers."""
    hits: tuple[int, ...] = ()
    """What it drew of the followed indices."""
    rows: tuple[tuple[int | None, ...], ...] = ()
    """Samples by their content: the index (None without one), then hashes of what it held."""
    head: Head | None = None
    sketch: Sketch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord(PlacedRecord):
    """A checkpoint was saved; 50 of a rank."""

    kind = "save"

    time: int
    file: str
    content: str
    """``module``, ``wrapper``, ``wrapped`` or ``data``."""
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoadRecord(PlacedRecord):
    """torch.load put tensors on a GPU; 50 of a rank."""

    kind = "gpu_load"

    time: int = 0
    device: str
    device_uuid: str
    mapped: bool
    """A ``map_location`` was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAppliedRecord(PlacedRecord):
    """Most of a checkpoint was passed over by strict=False."""

    kind = "not_applied"

    number: int = -1
    matched: int
    """Names that fit."""
    given: int
    """Names of the checkpoint."""
    wanted: int
    """Names of the model."""
    missing: tuple[str, ...]
    """The first names of the model that the checkpoint has not."""
    unexpected: tuple[str, ...]
    """The first names of the checkpoint that the model has not."""
    prefix: str = ""
    """What most names of one side begin with."""
    of: str = ""
    """Which side that is: ``checkpoint`` or ``model``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRecord(Record):
    """A load that was not applied was made up for."""

    kind = "applied"

    number: int
