"""Fingerprint models after training steps, to show where ranks differ, and since which step.

Ranks do not communicate: each writes its own hashes, and a rule compares the files. Some
fingerprints are *rich*: one hash and norm per tensor, and hashes of the gradients and of the
optimizer's state, at several times the cost. All fingerprints of suspected steps are rich. After
the first of them, elements of the differing tensors are written.

Without DDP (`Independent`) the norms of a few gradients and of their parameters are recorded before
some optimizer steps. A rule compares the ranks to find whether anything was exchanged.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpdoctor.probe.observers import readback, steps
from ddpdoctor.probe.observers.collective_calls import Ledger
from ddpdoctor.probe.observers.ddp_modules import Replicas
from ddpdoctor.probe.observers.optimizers import options_of, parameters_of
from ddpdoctor.probe.observers.overhead import LONGEST_INTERVAL, Pace, Suspected
from ddpdoctor.probe.observers.readback import (
    Elements,
    Readback,
    capturing,
    hash_of,
    hash_pieces,
    hashable,
    when_ready,
)
from ddpdoctor.probe.runtime import events, torch_groups, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.mapped import Suspicion
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import (
    ElementsRecord,
    FingerprintRecord,
    IndexedTensor,
    OutsideRecord,
    SoloEndRecord,
    SoloRecord,
    TensorsRecord,
    TogetherRecord,
)

# -- hashes of a module's tensors

MAX_TENSORS = 4096  # maximum number of tensors with their own hash in a rich fingerprint
LARGEST_NORM = 3.4e38  # larger norms are written as infinite, as in single precision


class ModuleHashes:
    """The hashes of one module, which a device computes. Create it with gradients off.

    A ``rich`` one hashes gradients, too, and gives each tensor its own hash and norm.
    """

    def __init__(self, number: int, parameters: list[Any], rich: bool) -> None:
        self._number = number
        self._parameters = hashes_of(parameters)
        self._gradients: Readback | None = None
        self._norms: Readback | None = None
        if rich:
            gradients = [each.grad for each in parameters]
            self._gradients = hashes_of(g for g in gradients if g is not None and hashable(g))
            self._norms = tensor_norms(parameters[:MAX_TENSORS])

    def reads(self) -> list[Readback]:
        """Return the results that the record waits for."""
        reads = (self._parameters, self._gradients, self._norms)
        return [each for each in reads if each is not None]

    def record(self, step: int, armed: int) -> FingerprintRecord:
        """Return the record once `reads` are ready."""
        hashes, gradients, norms = self._parameters.numbers(), self._gradients, self._norms
        return FingerprintRecord(
            step=step,
            module=self._number,
            armed=armed,
            parameters=combined(hashes),
            gradients=None if gradients is None else combined(gradients.numbers()),
            detail=None if norms is None else packed(hashes, norms.numbers()),
        )


def compared_tensors(ddp: Any) -> list[tuple[str, Any]]:
    """Return names and parameters that DDP keeps equal, trained or not."""
    return [(name, each) for name, each in torch_private.synced_parameters(ddp) if hashable(each)]


def hashes_of(tensors: Iterable[Any]) -> Readback:
    """Start to hash tensors, with gradients off."""
    return Readback([hash_of(each) for each in tensors])


def packed(hashes: Iterable[int], norms: Iterable[float]) -> str:
    """Encode four bytes of each tensor's hash, and its norm, as text."""
    data = b"".join(
        # Take the upper half, which depends on all bits.
        struct.pack(
            "<If", hash_ >> 32 & 0xFFFFFFFF, norm if norm < LARGEST_NORM else norm * math.inf
        )
        for hash_, norm in zip(hashes, norms, strict=False)
    )
    return base64.b64encode(data).decode()


def combined(hashes: Sequence[int]) -> str:
    """Combine any number of hashes into one."""
    data = struct.pack(f"<{len(hashes)}q", *hashes)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def tensor_norms(tensors: Sequence[Any]) -> Readback:
    """Compute each tensor's norm in double precision. It is 0 for tensors without a norm."""
    torch: Any = sys.modules["torch"]
    found = [
        torch.linalg.vector_norm(each.detach(), dtype=torch.float64)
        if each.is_floating_point() and each.element_size() > 1
        else torch.zeros((), dtype=torch.float64, device=each.device)
        for each in tensors
    ]
    return Readback(found)


def state_hashes(optimizers: Iterable[Any]) -> Readback | None:
    """Hash the tensors of the optimizers' states, in the order of their parameters."""
    tensor: Any = sys.modules["torch"].Tensor
    found = []
    for optimizer in optimizers:
        if torch_private.is_sharded(optimizer):
            continue
        for parameter in parameters_of(optimizer):
            values = optimizer.state.get(parameter)
            if isinstance(values, dict):
                kept = (each for each in values.values() if isinstance(each, tensor))
                found += [each for each in kept if hashable(each)]
    return hashes_of(found) if found else None


# -- changes of parameters between steps

NAMED_CHANGED = 8  # maximum number of parameters that a record names; it counts all


class Versions:
    """The version counters and addresses of parameters after a step (-1: before the first one)."""

    def __init__(self, step: int = -1) -> None:
        self._step = step
        self._noted: list[tuple[int, str, weakref.ref[Any], int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._noted)

    def note(self, module: int, named: list[tuple[str, Any]]) -> None:
        """Note the current state of a module's parameters."""
        self._noted += [
            (module, name, weakref.ref(each), each._version, each.data_ptr())
            for name, each in named[:MAX_TENSORS]
        ]

    def changed(self) -> Iterator[OutsideRecord]:
        """Yield the changes since `note` by module, and forget the noted state."""
        noted, self._noted = self._noted, []
        changed: dict[int, list[str]] = {}
        for module, name, ref, *before in noted:
            parameter = ref()
            if parameter is not None and [parameter._version, parameter.data_ptr()] != before:
                changed.setdefault(module, []).append(name)
        for module, names in changed.items():
            yield OutsideRecord(
                step=self._step, module=module, count=len(names), names=tuple(names[:NAMED_CHANGED])
            )


# -- fingerprints

RICH_STEPS = 16  # number of first steps, whose fingerprints are rich
RICH_PRICE = 4  # assumed cost of a rich fingerprint in plain ones, while only one cost is known
KERNEL_COST = 20_000  # nanoseconds to launch the hash of a tensor, or of a piece of it on a GPU
NEXT_STEP_COST = 100_000
"""Nanoseconds by which a fingerprint slows the next step down, since it evicts data from caches.

Charged unless every step has a fingerprint. In the first steps a credit pays.
"""

RARE = 1000  # ratio of the time since the last fingerprint to the cost of one beyond the budget
RICH_EVERY = 8  # interval of rich fingerprints among later ones
RICH_BYTES = 1 << 18  # bytes of rich fingerprints after which the interval doubles
MAX_OPTIMIZERS = 8  # maximum number of optimizers whose state is hashed
MAX_PENDING = 8  # maximum number of fingerprints that wait for a device
DENSE_AVERAGES = 8  # number of first possible averagings of parameters, all compared


@dataclass
class _Pending:
    """Records that wait for a device."""

    reads: list[Readback]
    make: Callable[[], Iterable[Record]]


class Fingerprints(Observer):
    """The fingerprints of one rank."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self.pace = Pace()
        self._replicas = replicas
        self._names: dict[int, list[str]] = {}
        self._trained: dict[int, int] = {}  # elements of the parameters that are trained, by module
        self._optimizers: list[weakref.ref[Any]] = []
        self._cost = 0
        self._rich_cost = 0
        self._taken = time.monotonic_ns()
        self._loaded: set[bool] = set()
        """Whether a GPU has loaded the kernels of plain (False) and rich (True) fingerprints."""
        self._rich_stride = RICH_EVERY
        self._rich_bytes = 0
        self._pending: deque[_Pending] = deque()
        self._versions = Versions()
        self._moved = 0  # number of elements in collectives that may carry all parameters
        self._together = 0
        self._alarm = -1  # the step at which this observer is woken
        self._suspected = Suspected(state)
        self._suspected.watch(lambda: self.wake("step_ended"))

    def ddp_built(self, ddp: Any) -> None:
        """Note the parameters of a new module."""
        number = self._replicas.number_of(ddp)
        if number is None:
            return
        tensors = compared_tensors(ddp)
        self._trained[number] = sum(each.numel() for _, each in tensors if each.requires_grad)
        if not self.state.tracker.steps:
            self._versions.note(number, tensors)
        if self.state.ledger is not None:
            self._await_together(self.state.ledger)
        self.wake("step_begins", "step_ended")

    def optimizer_made(self) -> None:
        """Watch for the optimizer's first step."""
        self.wake("step_ended")

    def step_begins(self, optimizer: Any) -> None:
        """Record parameters that changed since the last fingerprint."""
        with self.state.budget.spending():
            if self._moved:
                self._look_together(self.state.tracker.steps - 1)
            self.rest("step_begins")
            behind = bool(self._versions)
            for record in self._versions.changed():
                self.state.recorder.add(record)
        if behind and self.pace.interval > 1:
            self.state.budget.spend_behind(NEXT_STEP_COST)

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Take a fingerprint if a training step ended."""
        with self.state.budget.spending():
            self._follow(optimizer, number)

    def _follow(self, optimizer: Any, number: int) -> None:
        known = any(each() is optimizer for each in reversed(self._optimizers))
        if not known and len(self._optimizers) < MAX_OPTIMIZERS:
            self._optimizers.append(weakref.ref(optimizer))
        if self._moved:
            self._look_together(number)
        if self._pending:
            self._drain()
        if self.state.tracker.steps == number:
            return
        # After join() ranks may have taken different numbers of steps.
        if not steps.uneven_inputs:
            self._look_at(number)
        if self._pending or self._suspected.active:
            return
        due = number + self.pace.interval & -self.pace.interval
        if due > number + 1:
            if self._alarm <= number:
                self._alarm = due
                events.before_step(due, lambda: self.wake("step_ended"))
            self.rest("step_ended")

    def _look_at(self, number: int) -> None:
        """Take the fingerprint of a step that has ended, if it is due or suspected."""
        closely = self._suspected.at(number, self._rich_cost)
        if not (closely or self.pace.due(number)) or not self._replicas.alive:
            return
        if len(self._pending) >= MAX_PENDING or capturing(sys.modules["torch"]):
            return
        if closely is not None and closely.step == number:
            self._write_elements(closely)
        self._pay_and_take(number, closely is not None)

    def _pay_and_take(self, number: int, closely: bool) -> None:
        """Take the fingerprint of a step, as rich as the budget allows."""
        budget = self.state.budget
        left = budget.left()
        cost = self._cost or self._guess()
        rare = left < cost and self._is_rare(number, cost, closely)
        if left < cost and not rare:
            if not closely:
                self.pace.spare()
            return
        every = self.pace.interval * self._rich_stride
        wanted = closely or number < RICH_STEPS or not number & (every - 1)
        rich = wanted and left >= (self._rich_cost or RICH_PRICE * cost)
        start = clock()
        with sys.modules["torch"].no_grad():
            self._take(number, rich)
        spent = clock() - start
        if rich not in self._loaded and any(each.is_cuda for each in self._parameters()):
            usual = (RICH_PRICE if rich else 1) * self._guess()
            budget.spend_first(spent, usual)
            spent = min(spent, usual)
        else:
            budget.spend(spent)
        if rare:
            budget.grant(spent)
        self._taken = time.monotonic_ns()
        self._loaded.update((rich, False))
        if rich:
            self._rich_cost = spent
            self._cost = self._cost or spent // RICH_PRICE
        else:
            self._cost = spent
        if not closely:
            self.pace.took(surplus=budget.left() > 4 * self._cost)

    def _is_rare(self, number: int, cost: int, closely: bool) -> bool:
        """Return whether a fingerprint costs next to nothing beside the time since the last one.

        On a machine under load, following the steps takes all of the budget. The ranks take these
        at the same steps.
        """
        again = closely or (number >= RICH_STEPS and not number & (number - 1))
        enough = RARE * cost <= time.monotonic_ns() - self._taken
        return again and enough and self.state.budget.enabled

    def rank_ends(self) -> None:
        """Write the fingerprints that are ready."""
        self._drain()

    # -- averaging

    def _await_together(self, ledger: Ledger) -> None:
        """Request a call once a step's collectives may have carried all parameters of a module."""
        sizes = [self._trained.get(each.number, 0) for each in self._replicas.alive]

        def moved(elements: int) -> None:
            self._moved = elements
            self.wake("step_begins", "step_ended")

        ledger.watch(min((size for size in sizes if size), default=0), moved)

    def _look_together(self, step: int) -> None:
        """Hash all parameters after collectives that may have averaged them, as local SGD does."""
        moved, self._moved = self._moved, 0
        if self.state.ledger is not None:
            self._await_together(self.state.ledger)
        modules = [
            (each.number, ddp)
            for each, ddp in self._replicas.living()
            if 0 < self._trained.get(each.number, 0) <= moved
        ]
        if not modules:
            return
        self._together += 1
        count = self._together
        if count > DENSE_AVERAGES and count & (count - 1):
            return
        torch: Any = sys.modules["torch"]
        paid = self.state.budget.left() >= (self._cost or self._guess())
        paid = paid and len(self._pending) < MAX_PENDING and not capturing(torch)
        for number, ddp in modules:
            armed = self.state.tracker.armed
            record = TogetherRecord(step=step, module=number, armed=armed)
            if not paid:
                self.state.recorder.add(record)
                continue
            with torch.no_grad():
                read = hashes_of(tensor for _, tensor in compared_tensors(ddp))

            def make(
                record: TogetherRecord = record, read: Readback = read
            ) -> list[TogetherRecord]:
                return [replace(record, parameters=combined(read.numbers()))]

            self._pending.append(_Pending([read], make))
        self._drain()

    # -- taking and writing

    def _write_elements(self, suspicion: Suspicion) -> None:
        """Write elements of the suspected tensors."""
        modules = {each.number: ddp for each, ddp in self._replicas.living()}
        ddp = modules.get(suspicion.module)
        if ddp is None or not suspicion.tensors:
            return
        named = compared_tensors(ddp)
        with sys.modules["torch"].no_grad():
            elements = {
                index: Elements(named[index][1])
                for index in suspicion.tensors
                if 0 <= index < len(named) and named[index][1].numel()
            }
        armed = self.state.tracker.armed

        def make() -> list[Record]:
            tensors = tuple(IndexedTensor(at, *each.packed()) for at, each in elements.items())
            step, number = suspicion.step, suspicion.module
            return [ElementsRecord(step=step, module=number, armed=armed, tensors=tensors)]

        self._pending.append(_Pending([each.read for each in elements.values()], make))
        self._drain()

    def _guess(self) -> int:
        """Estimate the cost of the first fingerprint, without loading a GPU's kernels."""
        return sum(
            KERNEL_COST * hash_pieces(parameter)
            if parameter.is_cuda
            else KERNEL_COST + parameter.numel()
            for parameter in self._parameters()
        )

    def _parameters(self) -> Iterator[Any]:
        for _, ddp in self._replicas.living():
            yield from (parameter for _, parameter in compared_tensors(ddp))

    def _take(self, number: int, rich: bool) -> None:
        modules: list[ModuleHashes] = []
        self._versions = Versions(number)
        self.wake("step_begins")
        for each, ddp in self._replicas.living():
            named = compared_tensors(ddp)
            names = [name for name, _ in named]
            if names != self._names.get(each.number, []):
                self._names[each.number] = names
                self.state.recorder.add(
                    TensorsRecord(
                        module=each.number,
                        type=type(ddp.module).__name__,
                        group=tuple(torch_groups.group_ranks(ddp)),
                        hook=torch_private.comm_hook(ddp),
                        names=tuple(names[:MAX_TENSORS]),
                    )
                )
            self._versions.note(each.number, named)
            modules.append(ModuleHashes(each.number, [tensor for _, tensor in named], rich))
        if not modules:
            return
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        hyper = tuple(options_of(each) for each in alive)
        scale = _scale()
        state = state_hashes(alive) if rich else None
        reads = [read for each in modules for read in each.reads()]
        reads += [read for read in (scale, state) if read is not None]
        armed = self.state.tracker.armed

        def make() -> list[FingerprintRecord]:
            found = [each.record(number, armed) for each in modules]
            # Optimizers and scaler belong to no module. Put them into the first record.
            found[0] = replace(
                found[0],
                hyper=hyper,
                scale=None if scale is None else scale.numbers()[0],
                state=None if state is None else combined(state.numbers()),
            )
            return found

        self._pending.append(_Pending(reads, make))
        self._drain()

    def _drain(self) -> None:
        """Write the fingerprints that are ready, on the training thread.

        A query from another thread would break the capture of a CUDA graph.
        """
        while self._pending and not capturing(sys.modules["torch"]):
            if not all(each.ready for each in self._pending[0].reads):
                return
            for record in self._pending.popleft().make():
                if isinstance(record, FingerprintRecord):
                    self._rich_bytes += len(record.detail or "")
                self.state.recorder.add(record)
            if self._rich_bytes > RICH_BYTES:
                self._rich_bytes = 0
                self._rich_stride = min(self._rich_stride * 2, LONGEST_INTERVAL)


def _scale() -> Readback | None:
    scale = torch_private.scale_of(steps.current_scaler())
    if scale is None or not hashable(scale):
        return None
    return Readback([scale.detach().reshape(())])


# -- training without DDP: whether the ranks of a group still train one model

DENSE_STEPS = 8  # number of first steps, all measured; then the powers of two
SURE_STEPS = 4  # number of first steps measured even without budget: short jobs have no more
SOLO_PARAMETERS = 3  # maximum number of measured parameters
MAX_SOLO_ELEMENTS = 1 << 20  # maximum size of a measured parameter, unless all are larger


class Independent(Observer):
    """The training of a rank without DDP."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._begun = False
        self._last = -1  # the last measured training step
        self._before = 0  # collectives before the first step that may have carried parameters
        self._outside = False  # whether parameters were changed between steps of the optimizer
        self._versions: list[tuple[weakref.ref[Any], int]] = []
        self._wrapped = False

    def ddp_built(self, ddp: Any) -> None:
        """Stop, because other observers follow DDP modules."""
        self._wrapped = True
        self.rest("step_begins", "step_ended")

    def step_begins(self, optimizer: Any) -> None:
        """Measure the gradients of some steps."""
        if self._wrapped:
            return
        ledger, budget = self.state.ledger, self.state.budget
        if not self._begun:
            self._begun = True
            self._before = ledger.wide if ledger is not None else 0
        for reference, version in self._versions:
            parameter = reference()
            if parameter is not None and parameter._version != version:
                self._outside = True
        self._versions = []
        number = self.state.tracker.steps
        if number == self._last or (number >= DENSE_STEPS and number & (number - 1)):
            return
        if budget.left() < 0 and number >= SURE_STEPS:
            return
        if sys.modules["torch"].distributed.get_world_size() < 2:
            return
        self._last = number
        with budget.spending():
            self._look(optimizer, number)

    def _look(self, optimizer: Any, number: int) -> None:
        parameters = parameters_of(optimizer)
        reached = [each for each in parameters if readback.has_plain_gradient(each)]
        small = [each for each in reached if 0 < each.numel() <= MAX_SOLO_ELEMENTS] or reached
        measured = sorted(small, key=lambda each: -each.numel())[:SOLO_PARAMETERS]
        read = readback.gradients_and_values(measured)
        if read is None:
            return
        ledger = self.state.ledger
        record = SoloRecord(
            time=time.time_ns(),
            step=number,
            optimizer=type(optimizer).__name__,
            shapes=tuple(tuple(each.shape) for each in measured),
            parameters=len(parameters),
            elements=sum(each.numel() for each in parameters),
            # Ranks with different options are meant to differ.
            hyper=options_of(optimizer),
            calls=ledger.count if ledger is not None else None,
            before=self._before,
            wide=ledger.wide if ledger is not None else None,
            outside=self._outside,
        )

        def with_norms(values: list[float]) -> SoloRecord:
            return replace(record, gradients=tuple(values[::2]), values=tuple(values[1::2]))

        self.state.recorder.add(when_ready([read], with_norms))

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Note the state of the first parameter after the step."""
        if not self._begun or self._outside or self._wrapped:
            return
        first = next(iter(parameters_of(optimizer)), None)
        if first is not None:
            self._versions.append((weakref.ref(first), first._version))

    def rank_ends(self) -> None:
        """Record the total number of collectives and steps."""
        if self._last < 0:
            return
        ledger = self.state.ledger
        self.state.recorder.add(
            SoloEndRecord(
                time=time.time_ns(),
                steps=self.state.tracker.steps,
                wrapped=self._wrapped,
                calls=ledger.count if ledger is not None else None,
                wide=ledger.wide if ledger is not None else None,
                outside=self._outside,
            )
        )
