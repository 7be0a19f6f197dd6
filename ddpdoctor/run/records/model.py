"""Records of DDP modules, their gradients and optimizers, and fingerprints that compare replicas.

``ddp`` and ``module`` are the number of a DDP module: they are numbered in the order in which they
were built. ``armed`` counts the forward passes so far whose backward was to be all-reduced:
records of two ranks are of the same moment if step and ``armed`` are the same.
"""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple, Union

from ddpdoctor.run.records.base import Part, PlacedRecord, Record
from ddpdoctor.run.records.declaring import dataclass

# -- records of DDP modules, of their gradients and of the optimizers that use them


class Parameter(NamedTuple):
    """A parameter; in JSON a list."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """``float32``"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpRecord(PlacedRecord):
    """A DDP module was built."""

    kind = "ddp"

    time: int = 0
    module: str = ""
    """The class of the model."""
    device: str = ""
    device_name: str = ""
    device_uuid: str = ""
    device_uuids: tuple[str, ...] = ()
    """The GPUs that it lies on, several where it is parallel itself."""
    device_ids: tuple[int, ...] | None = None
    group_ranks: tuple[int, ...] = ()
    """The ranks that share it."""
    bucket_cap_bytes: int | None = None
    bucket_sizes: str = ""
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    parameters: tuple[Parameter, ...] = ()
    """Those that it reduces, in its order."""
    buffers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord(PlacedRecord):
    """A stage of a pipeline was built (``torch.distributed.pipelining``)."""

    kind = "stage"
    kept = 64

    stage: int
    """From 0."""
    stages: int
    """How many the pipeline has."""
    group: tuple[int, ...] = ()
    """The ranks of the pipeline, which are one replica of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord(PlacedRecord):
    """The parameters that a rank gave to DDP; long."""

    kind = "model"
    kept = 8

    time: int = 0
    number: int
    """Which model of the rank."""
    type: str
    """Its class."""
    group: tuple[int, ...]
    """The ranks of the process group."""
    parameters: tuple[Parameter, ...]
    """The first of them."""
    count: int
    """How many there are."""


class GradientlessParameter(NamedTuple):
    """A parameter that got no gradient; in JSON a list."""

    name: str
    owner: str
    """The class of the module that holds it."""
    why: str
    """``unused``, ``frozen`` or ``replaced``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoGradientRecord(PlacedRecord):
    """Parameters that got no gradient."""

    kind = "no_gradient"

    time: int = 0
    step: int
    ddp: int
    iteration: int = 0
    """Which synchronized backward of the module."""
    parameters: tuple[GradientlessParameter, ...]
    """The first of them."""
    count: int
    """How many there are."""
    of: int
    """How many parameters the module reduces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreducedRecord(PlacedRecord):
    """Gradients that were not all-reduced, and an optimizer stepped."""

    kind = "unreduced"

    step: int
    ddp: int
    cause: str
    """``around``, ``second backward``, ``forward in no_sync``, ``unfrozen``, ``added`` or
    ``replaced``."""
    gradients: dict[str, float] = field(default_factory=dict)
    """Norms by the names of parameters."""
    parameters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSyncVainRecord(PlacedRecord):
    """A no_sync() that saved nothing."""

    kind = "no_sync_vain"

    step: int
    ddp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FindUnusedRecord(Record):
    """find_unused_parameters, and whether any were unused."""

    kind = "find_unused"

    ddp: int
    iterations: int
    """Synchronized backwards that were looked at."""
    parameters: int
    least: float | None = None
    """The least number of ranks, in any of them, that used a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNormRecord(Record):
    """BatchNorms that take their statistics from the batch of one rank."""

    kind = "batchnorm"

    ddp: int
    layers: tuple[str, ...]
    """The first of them."""
    count: int
    """How many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnownedRecord(PlacedRecord):
    """Parameters that no optimizer holds."""

    kind = "unowned"

    time: int = 0
    ddp: int
    steps: tuple[int, int]
    """The steps before which their values were looked at."""
    parameters: tuple[str, ...]
    """The first of them."""
    count: int
    """How many there are."""
    of: int
    """How many parameters the module reduces."""
    orphans: int
    """Parameters of the optimizer that get no gradient and belong to no DDP module."""
    optimizer: str
    unchanged: bool = False
    """Their values were the same at both steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemadeRecord(PlacedRecord):
    """Optimizers or schedulers re-created at each step or epoch."""

    kind = "remade"

    time: int = 0
    step: int
    since: int
    """The step from which on they were."""
    optimizer: str = ""
    scheduler: str = ""
    times: int
    every: str
    """``step`` or ``epoch``."""
    position: float | None = None
    """What the last schedule but one came to, of ``end``."""
    end: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnzeroedRecord(PlacedRecord):
    """Gradients that were never set to zero."""

    kind = "unzeroed"

    optimizer: str
    step: int
    carried: int
    """Steps in a row after which the gradients were still there."""
    after: tuple[float, ...] = ()
    """Norms of a parameter's gradient when a step had ended, and when the next backward began."""
    before: tuple[float, ...] = ()
    edited: tuple[float, ...] = ()
    """Norms of gradients that were changed otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRecord(PlacedRecord):
    """Gradients were clipped by another call than before, or by none."""

    kind = "clip"
    kept = 64

    step: int
    call: str = ""
    """The function; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditRecord(Record):
    """Other gradients than before were changed ahead of the step."""

    kind = "edit"
    kept = 64

    step: int
    ddp: int
    count: int
    names: tuple[str, ...]
    """The first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(Part):
    """Where a loss stopped being finite."""

    what: str
    """``input`` (a batch, or a constant), ``parameter`` or ``operation``."""
    operations: tuple[str, ...] = ()
    """Their names, the first to run first."""
    module: str | None = None
    """The module whose parameters are nearest; None if none is known."""
    within: bool = False
    """The operation uses them itself."""
    infinite: Origin | None = None
    """The same of an infinite value that entered the operation, if NaN came out of it."""
    order: tuple[int, int] | None = None
    """Of a single operation: its place among those of its name behind the last parameter, from 0,
    and how many these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteRecord(Record):
    """A loss that was not finite; a few of a rank."""

    kind = "nonfinite"

    time: int = 0
    step: int
    loss: str = ""
    """``nan``, ``inf``."""
    spread: bool = False
    """After the optimizer's step small parameters were not finite either."""
    origin: Origin | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteGradientRecord(Record):
    """A gradient of the rank alone that was not finite; a few."""

    kind = "nonfinite_gradient"

    time: int = 0
    step: int
    names: tuple[str, ...] = ()
    """The parameters."""
    spread: bool = False
    """After the optimizer's step they were not finite either."""


# -- records by which replicas are compared between ranks


Hyper = Union[float, "tuple[float | None, ...]", None]
"""A hyper-parameter; None for a value of another type."""


class PackedTensor(NamedTuple):
    """Elements of a tensor; in JSON a list."""

    elements: int
    """How many it has."""
    format: str
    """``f`` or ``d``, as `struct` has it."""
    data: str
    """Those looked at, in base64."""


class IndexedTensor(NamedTuple):
    """The same, with the place of the tensor among the names of its module; in JSON a list."""

    place: int
    elements: int
    format: str
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsRecord(Record):
    """The names of what fingerprints are of; written again when they change."""

    kind = "tensors"

    module: int
    type: str = ""
    """The class of the model."""
    group: tuple[int, ...]
    """The ranks that share it."""
    hook: str | None = ""
    """The communication hook; None if torch does not tell."""
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintRecord(Record):
    """Hashes of the parameters after a step."""

    kind = "fingerprint"
    # Whether replicas differ from the first step on is what tells one cause from another.
    kept = 16

    step: int
    module: int
    armed: int = 0
    parameters: str | None = None
    gradients: str | None = None
    detail: str | None = None
    """Of each tensor four bytes of its hash and its norm, in base64."""
    hyper: tuple[tuple[tuple[Hyper, ...], ...], ...] | None = None
    """By optimizer and parameter group: learning rate, momentum, betas, weight decay."""
    scale: float | None = None
    """The GradScaler's."""
    state: str | None = None
    """Hash of the optimizers' states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherRecord(Record):
    """Hashes of the parameters after collectives of their size."""

    kind = "together"
    # Replicas that were made equal again by the job itself do not diverge.
    kept = 16

    step: int
    module: int
    armed: int = 0
    parameters: str | None = None
    """None where the overhead budget did not allow to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementsRecord(Record):
    """Elements of tensors that were suspected to differ; long."""

    kind = "elements"
    kept = 8

    step: int
    module: int
    armed: int = 0
    tensors: tuple[IndexedTensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuffersRecord(Record):
    """Hashes of the buffers after a step."""

    kind = "buffers"
    kept = 16

    step: int
    module: int
    armed: int
    broadcast: bool
    """DDP broadcasts them."""
    names: tuple[str, ...]
    hashes: tuple[str, ...] = ()
    samples: tuple[PackedTensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsRecord(PlacedRecord):
    """Running statistics in an evaluation."""

    kind = "statistics"
    kept = 16

    time: int = 0
    module: int
    group: tuple[int, ...]
    """The ranks that share the module."""
    armed: int
    layers: int
    """How many layers keep statistics."""
    names: tuple[str, ...]
    """Those of the first of them."""
    hashes: tuple[str, ...] = ()
    """Of mean and variance in turn."""
    samples: tuple[PackedTensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideRecord(Record):
    """Parameters were changed between two optimizer steps."""

    kind = "outside"
    kept = 1024

    step: int
    """The step before."""
    module: int
    count: int
    names: tuple[str, ...]
    """The first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRecord(PlacedRecord):
    """What loads and cuts have in common."""

    time: int = 0
    step: int
    what: str = ""
    """The class of what was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord(ChangeRecord):
    """Weights were loaded into a module; 64 of a rank."""

    kind = "load"

    module: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRecord(ChangeRecord):
    """An optimizer's state was loaded; 64 of a rank."""

    kind = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRecord(ChangeRecord):
    """A scheduler cut the learning rate; 64 of a rank."""

    kind = "cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloRecord(Record):
    """A rank that trains without DDP: what of it other ranks share."""

    kind = "solo"
    kept = 16

    time: int = 0
    step: int
    optimizer: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tensors whose norms follow."""
    parameters: int = 0
    elements: int = 0
    hyper: tuple[tuple[Hyper, ...], ...] = ()
    """By parameter group: learning rate, momentum, betas, weight decay."""
    calls: int | None = None
    """Collectives that the rank has called."""
    before: int = 0
    """Of those that carry as much as a gradient: how many when the training began."""
    wide: int | None = None
    """And how many by now."""
    outside: bool = False
    """Parameters were changed between two steps."""
    gradients: tuple[float, ...] = ()
    """Norms, as the optimizer is about to use them."""
    values: tuple[float, ...] = ()
    """Norms of the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloEndRecord(Record):
    """The same at its end."""

    kind = "solo_end"

    time: int = 0
    steps: int
    wrapped: bool
    """Something like DDP was built."""
    calls: int | None
    wide: int | None
    outside: bool
