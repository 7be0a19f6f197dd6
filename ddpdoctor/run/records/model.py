"""Records of DDP modules, of their gradients and of the optimizers that use them.

``ddp`` is the number of a DDP module: they are numbered in the order in which they were built.
"""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from ddpdoctor.run.records.base import Part, PlacedRecord, Record
from ddpdoctor.run.records.declaring import dataclass


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
