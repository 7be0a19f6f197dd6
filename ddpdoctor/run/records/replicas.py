"""Records by which replicas are compared between ranks.

``module`` is the number of a DDP module: they are numbered in the order in which they were built.
``armed`` counts the forward passes so far whose backward was to be all-reduced: records of two
ranks are of the same moment if step and ``armed`` are the same.
"""

from __future__ import annotations

from typing import NamedTuple, Union

from ddpdoctor.run.records.base import PlacedRecord, Record
from ddpdoctor.run.records.declaring import dataclass

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
