"""Records of DDP modules, their gradients and optimizers, and fingerprints that compare replicas.

``ddp`` and ``module`` are the number of a DDP module, in the order in which they were built.
``armed`` counts the forward passes so far whose backward is to be all-reduced. Records of two
ranks belong to the same time if their steps and ``armed`` are equal.
"""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple, Union

from ddpdoctor.run.records.base import Part, PlacedRecord, Record, dataclass

# -- DDP modules, gradients and optimizers


class Parameter(NamedTuple):
    """A parameter. In JSON a list."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # ``float32``


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpRecord(PlacedRecord, kind="ddp"):
    """A DDP module was built."""

    time: int = 0
    module: str = ""  # The class of the model
    device: str = ""
    device_name: str = ""
    device_uuid: str = ""
    device_uuids: tuple[str, ...] = ()  # Its GPUs, several if the model is split over GPUs
    group_ranks: tuple[int, ...] = ()  # The ranks that share the module
    bucket_cap_bytes: int | None = None
    find_unused_parameters: bool = False
    parameters: tuple[Parameter, ...] = ()  # The parameters that it reduces, in its order
    buffers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord(PlacedRecord, kind="stage", kept=64):
    """A pipeline stage was built (``torch.distributed.pipelining``)."""

    stage: int  # From 0
    stages: int  # Number of stages of the pipeline
    group: tuple[int, ...] = ()
    """The ranks of the pipeline, which together hold one replica of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord(PlacedRecord, kind="model", kept=8):
    """The parameters that a rank gave to DDP. A long record."""

    time: int = 0
    number: int  # Number of the model on the rank
    type: str  # The class of the model
    group: tuple[int, ...]  # The ranks of the process group
    parameters: tuple[Parameter, ...]  # The first of them
    count: int  # Number of all of them


class GradientlessParameter(NamedTuple):
    """A parameter that got no gradient. In JSON a list."""

    name: str
    owner: str  # The class of the module that holds it
    why: str  # ``unused``, ``frozen`` or ``replaced``


@dataclass(frozen=True, slots=True, kw_only=True)
class NoGradientRecord(PlacedRecord, kind="no_gradient"):
    """Parameters that got no gradient."""

    time: int = 0
    step: int
    ddp: int
    iteration: int = 0  # Number of the module's synchronized backward
    parameters: tuple[GradientlessParameter, ...]  # The first of them
    count: int  # Number of all of them
    of: int  # Number of parameters that the module reduces


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverUsedRecord(PlacedRecord, kind="never_used"):
    """Parameters without a gradient in every backward, in a module whose options allow that.

    Written again when fewer are left.
    """

    ddp: int
    backwards: int  # Synchronized backwards that were examined
    parameters: tuple[GradientlessParameter, ...]  # The first of them
    count: int  # Number of all of them
    of: int  # Number of parameters that the module reduces
    part: float = 0.0  # Their share of the module's elements


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCutRecord(PlacedRecord, kind="graph_cut"):
    """A collective was given a tensor that needs a gradient, and its output has none."""

    step: int
    call: str  # The function: ``all_gather``


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleRecord(PlacedRecord, kind="loss_scale"):
    """A backward began with a loss that was reduced over the ranks, or divided by their number.

    The line is that of the reduction, or of the backward if nothing was reduced.
    """

    step: int
    call: str = ""  # The function that reduced it
    factor: float  # The factor applied after the reduction, or before the backward


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientScaleRecord(Record, kind="gradient_scale"):
    """The factor that the job applied to a gradient between backward and optimizer step."""

    step: int  # The last of these steps
    name: str  # The parameter
    factors: tuple[float, ...] = ()  # In the first steps that changed it


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreducedRecord(PlacedRecord, kind="unreduced"):
    """An optimizer stepped with gradients that were not all-reduced."""

    step: int
    ddp: int  # For parameters outside DDP modules: -1 minus the number of the optimizer
    cause: str
    """``around``, ``second backward``, ``forward in no_sync``, ``step in no_sync``,
    ``no backward``, ``unfrozen``, ``added`` or ``replaced``. ``outside``: parameters in no DDP
    module."""
    gradients: dict[str, float] = field(default_factory=dict)  # Norms by parameter name
    parameters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSyncVainRecord(PlacedRecord, kind="no_sync_vain"):
    """A no_sync() that saved no communication."""

    step: int
    ddp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FindUnusedRecord(Record, kind="find_unused"):
    """The effect of find_unused_parameters: whether any parameters were unused."""

    ddp: int
    iterations: int  # Synchronized backwards that were examined
    parameters: int
    least: float | None = None  # The smallest number of ranks that used a parameter in any of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantLossRecord(PlacedRecord, kind="constant_loss"):
    """A backward that DDP was to reduce had a loss that depends on no parameter. At most 16.

    ``path`` and ``line`` are those of the backward.
    """

    step: int
    backward: int  # Its number among the reduced backwards of the rank, from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNormRecord(Record, kind="batchnorm"):
    """BatchNorm layers that compute statistics from one rank's batch."""

    ddp: int
    layers: tuple[str, ...]  # The first of them
    count: int  # Number of all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class UnownedRecord(PlacedRecord, kind="unowned"):
    """Parameters that belong to no optimizer."""

    time: int = 0
    ddp: int
    steps: tuple[int, int]  # The steps before which their values were compared
    parameters: tuple[str, ...]  # The first of them
    count: int  # Number of all of them
    of: int  # Number of parameters that the module reduces
    orphans: int  # Parameters of the optimizer without gradient that belong to no DDP module
    optimizer: str
    unchanged: bool = False  # Their values were equal at both steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RemadeRecord(PlacedRecord, kind="remade"):
    """Optimizers or schedulers re-created at each step or epoch."""

    time: int = 0
    step: int
    since: int  # The first step at which one was re-created
    optimizer: str = ""
    scheduler: str = ""
    times: int
    every: str  # ``step`` or ``epoch``
    position: float | None = None  # The position that the last but one schedule reached, of ``end``
    end: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord(PlacedRecord, kind="schedule"):
    """The last state of a learning rate scheduler, written at the end of a rank."""

    scheduler: str  # Its class
    position: int  # Its ``last_epoch`` before the last optimizer step
    steps: int  # Training steps since it was built, up to then
    numbers: tuple[int, ...] = ()  # Whole numbers among its options, one of which may be its length


@dataclass(frozen=True, slots=True, kw_only=True)
class UnzeroedRecord(PlacedRecord, kind="unzeroed"):
    """Gradients that were never zeroed."""

    optimizer: str
    step: int
    carried: int  # Consecutive steps after which the gradients were still there
    after: tuple[float, ...] = ()
    """Norms of a parameter's gradient after a step. ``before``: before the next backward."""
    before: tuple[float, ...] = ()
    edited: tuple[float, ...] = ()  # Norms of gradients that other code changed


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRecord(PlacedRecord, kind="clip", kept=64):
    """The call that clips gradients changed."""

    step: int
    call: str = ""  # The function. Empty if gradients are no longer clipped.


@dataclass(frozen=True, slots=True, kw_only=True)
class MisplacedClipRecord(PlacedRecord, kind="misplaced_clip"):
    """Gradients were clipped too early, in several steps in a row."""

    step: int
    call: str  # The function
    what: str
    """``scaled``: they were still multiplied by a GradScaler's scale. ``early``: the backward that
    computes them came afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditRecord(Record, kind="edit", kept=64):
    """The job changes a different set of gradients before the step than it did earlier."""

    step: int
    ddp: int
    count: int
    names: tuple[str, ...]  # The first of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(Part):
    """The place where a loss stopped being finite."""

    what: str  # ``input`` (a batch, or a constant), ``parameter`` or ``operation``
    operations: tuple[str, ...] = ()  # Their names in the order of execution
    module: str | None = None  # The module with the nearest parameters, if known
    within: bool = False  # The operation itself uses these parameters
    infinite: Origin | None = None
    """Origin of an infinite value that entered an operation which returned NaN."""
    order: tuple[int, int] | None = None
    """For a single operation: its index among those of its name after the last parameter, and
    their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteRecord(Record, kind="nonfinite"):
    """A loss that was not finite. A few per rank."""

    time: int = 0
    step: int
    loss: str = ""  # ``nan``, ``inf``
    spread: bool = False  # After the optimizer's step, small parameters were not finite either
    origin: Origin | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteGradientRecord(Record, kind="nonfinite_gradient"):
    """A gradient that was not finite before it was reduced. A few per rank."""

    time: int = 0
    step: int
    names: tuple[str, ...] = ()  # The parameters
    spread: bool = False  # After the optimizer's step, they were not finite either


# -- Fingerprints for comparing replicas


Hyper = Union[float, "tuple[float | None, ...]", None]
"""A hyperparameter. None for a value of another type."""


class PackedTensor(NamedTuple):
    """Elements of a tensor. In JSON a list."""

    elements: int  # Number of elements of the tensor
    format: str  # ``f`` or ``d``, as in `struct`
    data: str  # The sampled elements, in base64


class IndexedTensor(NamedTuple):
    """Elements of the tensor at ``place`` among its module's names. In JSON a list."""

    place: int
    elements: int
    format: str
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsRecord(Record, kind="tensors"):
    """The tensors that fingerprints cover. Written again when they change."""

    module: int
    type: str = ""  # The class of the model
    group: tuple[int, ...]  # The ranks that share the module
    hook: str | None = ""  # The communication hook. None if torch does not report it.
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintRecord(Record, kind="fingerprint"):
    """Hashes of the parameters after a step."""

    # Replicas that differ from the first step have other causes.
    kept = 16

    step: int
    module: int
    armed: int = 0
    parameters: str | None = None
    gradients: str | None = None
    detail: str | None = None  # For each tensor four bytes of its hash, and its norm, in base64
    hyper: tuple[tuple[tuple[Hyper, ...], ...], ...] | None = None
    """By optimizer and parameter group: learning rate, momentum, betas, weight decay."""
    scale: float | None = None  # Scale of the GradScaler
    state: str | None = None  # Hash of the optimizers' states


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherRecord(Record, kind="together"):
    """Hashes of the parameters after a collective of their size."""

    # Replicas that the job itself makes equal again do not diverge.
    kept = 16

    step: int
    module: int
    armed: int = 0
    parameters: str | None = None  # None if the overhead budget did not allow it


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementsRecord(Record, kind="elements", kept=8):
    """Elements of tensors that are suspected to differ. A long record."""

    step: int
    module: int
    armed: int = 0
    tensors: tuple[IndexedTensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuffersRecord(Record, kind="buffers", kept=16):
    """Hashes of the buffers at the first forward of a step."""

    step: int
    module: int
    armed: int
    broadcast: bool  # DDP broadcasts them
    names: tuple[str, ...]
    hashes: tuple[str, ...] = ()
    samples: tuple[PackedTensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsRecord(PlacedRecord, kind="statistics", kept=16):
    """Running statistics of normalization layers in an evaluation."""

    time: int = 0
    module: int
    group: tuple[int, ...]  # The ranks that share the module
    armed: int
    layers: int  # Number of layers with statistics
    names: tuple[str, ...]  # Names of the first of them
    hashes: tuple[str, ...] = ()  # Hashes of mean and variance, alternating
    samples: tuple[PackedTensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModelRecord(Record, kind="other_model", kept=16):
    """Weights of a model outside DDP in evaluation mode, when an evaluation began."""

    number: int  # Number of the model on the rank
    type: str  # The class of the model
    armed: int
    values: tuple[float, ...] = ()  # Norms of some parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideRecord(Record, kind="outside", kept=1024):
    """Parameters were changed between two optimizer steps."""

    step: int  # The earlier step
    module: int
    count: int
    names: tuple[str, ...]  # The first of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRecord(PlacedRecord):
    """Common fields of loads and cuts."""

    time: int = 0
    step: int
    what: str = ""  # The class of the changed object


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord(ChangeRecord, kind="load"):
    """Weights were loaded into a module. At most 64 per rank."""

    module: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRecord(ChangeRecord, kind="resume"):
    """An optimizer's state was loaded. At most 64 per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRecord(ChangeRecord, kind="cut"):
    """A scheduler cut the learning rate. At most 64 per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloRecord(Record, kind="solo", kept=16):
    """A rank that trains without DDP: facts to compare with other ranks."""

    time: int = 0
    step: int
    optimizer: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors in ``gradients`` and ``values``."""
    parameters: int = 0
    elements: int = 0
    hyper: tuple[tuple[Hyper, ...], ...] = ()
    """By parameter group: learning rate, momentum, betas, weight decay."""
    calls: int | None = None  # Number of collectives that the rank has called
    before: int = 0  # Number of collectives as large as a gradient when training began
    wide: int | None = None  # Number of collectives as large as a gradient so far
    outside: bool = False  # Parameters were changed between two steps
    gradients: tuple[float, ...] = ()
    """Norms of the gradients, as the optimizer is about to use them."""
    values: tuple[float, ...] = ()  # Norms of the parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloEndRecord(Record, kind="solo_end"):
    """The end of a rank that trained without DDP."""

    time: int = 0
    steps: int
    wrapped: bool  # Whether a DDP module was built
    calls: int | None
    wide: int | None
    outside: bool
