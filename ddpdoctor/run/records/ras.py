"""What NCCL's RAS said of the communicators of a job, over all its nodes."""

from __future__ import annotations

from ddpdoctor.run.records.base import Part
from ddpdoctor.run.records.declaring import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RasProcess(Part):
    """A process of the job that does not answer."""

    pid: int
    host: str
    """Its node's address."""
    dead: bool = False
    """It has not answered for a minute, and is given up."""
    rank: int = -1
    """Its rank in a communicator, -1 if it is not of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RasGroup(Part):
    """Ranks of a communicator of which the same is said."""

    value: str
    """A number of operations, a status, or an error."""
    many: int
    """How many they are."""
    ranks: tuple[int, ...] = ()
    """Which, in the communicator; empty where NCCL does not list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RasDifference(Part):
    """What the ranks of a communicator differ in."""

    what: str
    """``AllReduce``: how many were launched, ``collective`` where NCCL adds up all kinds;
    ``status`` or ``error``."""
    groups: tuple[RasGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RasCommunicator(Part):
    """A communicator of which something is to be said."""

    size: int
    missing: tuple[RasProcess, ...] = ()
    differences: tuple[RasDifference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ras(Part):
    """An answer of NCCL's RAS."""

    version: str = ""
    """NCCL's."""
    total: int = 0
    """Communicators, those of which nothing is to be said among them."""
    communicators: tuple[RasCommunicator, ...] = ()
    silent: tuple[RasProcess, ...] = ()
    """Processes of the job that do not answer."""
    trouble: str = ""
    """Why there is no answer."""
