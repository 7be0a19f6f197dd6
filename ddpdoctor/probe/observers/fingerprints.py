"""Fingerprints of DDP's modules after a training step: what differs between ranks, and since when.

Ranks compare nothing among themselves: each writes its own hashes, and a rule compares the files.
So all ranks have to look at the same steps although each has a budget of its own. A rank looks at
the multiples of its interval, which is a power of two: two ranks always share the multiples of the
larger one. Now and then a fingerprint is *rich*: one hash and norm per tensor, and hashes of the
gradients and of the optimizer's state, at several times the price.

Where the supervisor suspects that ranks differ it names a step a little ahead (see
`ddpdoctor.run.requests.Suspicion`): from there on each is looked at, richly, and after the first of
them elements of the tensors that differ are written. A separate credit pays for that, at most twice
in the life of a rank.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ddpdoctor.probe.observers import modes
from ddpdoctor.probe.observers.elements import Elements
from ddpdoctor.probe.observers.hashing import hash_of, hashable
from ddpdoctor.probe.observers.readback import Readback, capturing
from ddpdoctor.probe.runtime import events, rank, shield, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.requests import SUSPICION, Suspicion, SuspicionReader

DENSE = 64
"""Steps at the beginning that are looked at one by one; later this many per doubling."""

RICH_STEPS = 16
"""Steps at the beginning whose fingerprints are rich."""

RICH_EVERY = 8
"""Of later fingerprints, every eighth is rich."""

RICH_BYTES = 1 << 18
"""Bytes of rich fingerprints, after which they are written half as often."""

MOST_TENSORS = 4096
"""Tensors of a module that a rich fingerprint tells one by one."""

MOST_GROUPS = 4
"""Parameter groups of an optimizer that a fingerprint tells."""

MOST_OPTIMIZERS = 8
"""Optimizers of a rank that are looked at."""

MOST_PENDING = 8
"""Fingerprints that wait for a device; no more are taken until it has passed them."""

HYPER = ("lr", "momentum", "betas", "weight_decay")
"""What a fingerprint tells of a parameter group, in this order."""

LARGEST = 3.4e38
"""Norms from here on are written as infinite: in single precision they are."""

TOGETHER = 8
"""Times that parameters may have been averaged that are looked at; later the powers of two."""

SUSPICIONS = 2
"""Suspicions that this rank pays for: the first may not know yet which tensors to write."""

GRANT = 50_000_000
"""Nanoseconds that a suspicion may cost, unless two rich fingerprints cost more."""

MOST_GRANTED = 1_000_000_000
"""Nanoseconds that a suspicion may cost at most."""

LONGEST = 1 << 20


class Pace:
    """Which steps this rank looks at.

    Args:
        dense: Looks per doubling of the interval.
    """

    def __init__(self, dense: int = DENSE) -> None:
        self.interval = 1
        self._dense = dense
        self._floor = 1
        self._taken = 0

    def due(self, step: int) -> bool:
        """Whether the step is one of this rank's."""
        return not step & (self.interval - 1)

    def spare(self) -> None:
        """What was due could not be paid for."""
        self.interval = min(self.interval * 2, LONGEST)

    def took(self, surplus: bool) -> None:
        """What was due was done; ``surplus`` if several more could be paid for."""
        self._taken += 1
        if self._taken >= self._dense:
            self._taken = 0
            self._floor = min(self._floor * 2, LONGEST)
            self.interval = max(self.interval, self._floor)
        elif surplus and self.interval > self._floor:
            self.interval //= 2


class _Module:
    """A DDP module, as long as it lives."""

    def __init__(self, number: int, ddp: Any) -> None:
        self.number = number
        self.ref = weakref.ref(ddp)
        self.names: list[str] = []
        self.trained = sum(each.numel() for _, each in self.tensors(ddp) if each.requires_grad)
        """Elements of the parameters that are trained."""

    def tensors(self, ddp: Any) -> list[tuple[str, Any]]:
        """Names and parameters that DDP keeps equal, trained or not."""
        ignored: set[str] = getattr(ddp, "parameters_to_ignore", None) or set()
        return [
            (name, parameter)
            for name, parameter in ddp.module.named_parameters()
            if name not in ignored and hashable(parameter)
        ]


_Version = tuple[int, str, "weakref.ref[Any]", int, int]
"""Of a parameter: its module and name, itself, how often it was written, and where it lies."""


def _versions(module: _Module, named: list[tuple[str, Any]]) -> list[_Version]:
    return [
        (module.number, name, weakref.ref(each), each._version, each.data_ptr())
        for name, each in named[:MOST_TENSORS]
    ]


class Fingerprints:
    """The fingerprints of one rank.

    Args:
        state: The rank, whose budget pays.
    """

    def __init__(self, state: rank.RankState) -> None:
        self.state = state
        self.pace = Pace()
        self.modules: list[_Module] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._cost = 0
        self._rich_cost = 0
        self._rich_stride = RICH_EVERY
        self._rich_bytes = 0
        self._pending: deque[tuple[list[JsonObject], list[Readback], list[Callable[[], None]]]] = (
            deque()
        )
        self._versions: list[_Version] = []
        self._versions_step = -1
        self._moved = 0
        self._together = 0
        self._reader = _reader()
        self._suspicion: Suspicion | None = None
        self._suspicions = 0

    # -- moments

    def built(self, ddp: Any) -> None:
        """A DDP module was built."""
        module = _Module(len(self.modules), ddp)
        self.modules.append(module)
        if not self.state.tracker.steps:
            self._versions += _versions(module, module.tensors(ddp))

    def step_begins(self) -> None:
        """Were parameters changed since the last fingerprint, which the step before took?"""
        self._look_together(self.state.tracker.steps - 1)
        versions, self._versions = self._versions, []
        if not versions:
            return
        start = clock()
        changed: dict[int, list[str]] = {}
        for module, name, ref, *before in versions:
            parameter = ref()
            if parameter is not None and [parameter._version, parameter.data_ptr()] != before:
                changed.setdefault(module, []).append(name)
        for module, names in changed.items():
            self.state.recorder.add(
                {
                    "kind": "outside",
                    "step": self._versions_step,
                    "module": module,
                    "count": len(names),
                    "names": names[:8],
                }
            )
        self.state.budget.spend(clock() - start)

    def step_ended(self, optimizer: Any, number: int) -> None:
        """An optimizer's step ended: take a fingerprint if it closed a training step."""
        self._remember(optimizer)
        self._look_together(number)
        if self._pending:
            self._drain()
        # After join() a rank may have taken fewer steps than others: numbers tell nothing any more.
        if self.state.tracker.steps == number or modes.uneven_inputs:
            return
        closely = self._looks_closely(number)
        if not (closely or self.pace.due(number)) or not self.modules:
            return
        torch: Any = sys.modules["torch"]
        if len(self._pending) >= MOST_PENDING or capturing(torch):
            return
        budget = self.state.budget
        if closely is not None and closely.step == number:
            self._write_elements(closely)
        left = budget.left()
        rich = (
            closely is not None
            or number < RICH_STEPS
            or not number & (self.pace.interval * self._rich_stride - 1)
        )
        cost = self._cost or self._guess()
        if left < cost:
            if closely is None:
                self.pace.spare()
            return
        rich = rich and left >= (self._rich_cost or 4 * cost)
        start = clock()
        with torch.no_grad():
            self._take(number, rich)
        spent = clock() - start
        budget.spend(spent)
        if rich:
            self._rich_cost = spent
            self._cost = self._cost or spent
        else:
            self._cost = spent
        if closely is None:
            self.pace.took(surplus=budget.left() > 4 * self._cost)

    def rank_ends(self) -> None:
        """Write what is still on its way, if it came."""
        self._drain()

    # -- averaging

    def _look_together(self, step: int) -> None:
        """After collectives that may have carried all parameters: are the ranks equal now?

        Replicas of a local SGD are equal after their averaging and never after a step.
        """
        ledger = self.state.ledger
        if ledger is None or ledger.moved == self._moved:
            return
        moved, self._moved = ledger.moved - self._moved, ledger.moved
        modules = [each for each in self.modules if 0 < each.trained <= moved]
        if not modules:
            return
        self._together += 1
        count = self._together
        if count > TOGETHER and count & (count - 1):
            return
        torch: Any = sys.modules["torch"]
        paid = self.state.budget.left() >= (self._cost or self._guess())
        paid = paid and len(self._pending) < MOST_PENDING and not capturing(torch)
        start = clock()
        for module in modules:
            ddp = module.ref()
            if ddp is None:
                continue
            record: JsonObject = {
                "kind": "together",
                "step": step,
                "module": module.number,
                "armed": self.state.tracker.armed,
            }
            if not paid:
                self.state.recorder.add(record)
                continue
            with torch.no_grad():
                read = Readback([hash_of(each) for _, each in module.tensors(ddp)])
            self._pending.append(
                ([record], [read], [_finisher(record, {"parameters": read}, None)])
            )
        self._drain()
        self.state.budget.spend(clock() - start)

    # -- suspicion

    def _looks_closely(self, number: int) -> Suspicion | None:
        """The suspicion for which a step is looked at, whatever the pace says."""
        if self._reader is not None and (news := self._reader.news()) is not None:
            self._suspect(news, number)
        suspicion = self._suspicion
        if suspicion is None or number < suspicion.step:
            return None
        if number >= suspicion.step + suspicion.steps:
            self._suspicion = None
            return None
        return suspicion

    def _suspect(self, news: Suspicion, number: int) -> None:
        if (
            news.restart != self.state.restart
            or self._suspicions >= SUSPICIONS
            # Too late for the step that all ranks share.
            or number > news.step
        ):
            return
        self._suspicions += 1
        self._suspicion = news
        budget = self.state.budget
        needed = max(GRANT, 2 * self._rich_cost) - budget.left()
        budget.grant(max(0, min(needed, MOST_GRANTED)))

    def _write_elements(self, suspicion: Suspicion) -> None:
        """Write elements of the tensors that a suspicion names."""
        module = next((each for each in self.modules if each.number == suspicion.module), None)
        ddp = module.ref() if module is not None else None
        if module is None or ddp is None or not suspicion.tensors:
            return
        start = clock()
        named = module.tensors(ddp)
        with sys.modules["torch"].no_grad():
            elements = {
                index: Elements(named[index][1])
                for index in suspicion.tensors
                if 0 <= index < len(named) and named[index][1].numel()
            }
        record: JsonObject = {
            "kind": "elements",
            "step": suspicion.step,
            "module": module.number,
            "armed": self.state.tracker.armed,
        }

        def finish() -> None:
            record["tensors"] = [[index, *each.packed()] for index, each in elements.items()]

        self._pending.append(([record], [each.read for each in elements.values()], [finish]))
        self._drain()
        self.state.budget.spend(clock() - start)

    # -- parts

    def _guess(self) -> int:
        """Nanoseconds that the first fingerprint will cost."""
        return sum(
            20_000 + parameter.numel()
            for module in self.modules
            if (ddp := module.ref()) is not None
            for _, parameter in module.tensors(ddp)
        )

    def _remember(self, optimizer: Any) -> None:
        for each in self._optimizers:
            if each() is optimizer:
                return
        if len(self._optimizers) < MOST_OPTIMIZERS:
            self._optimizers.append(weakref.ref(optimizer))

    def _take(self, number: int, rich: bool) -> None:
        records: list[JsonObject] = []
        readbacks: list[Readback] = []
        finishers: list[Callable[[], None]] = []
        self._versions, self._versions_step = [], number
        for module in self.modules:
            ddp = module.ref()
            if ddp is None:
                continue
            named = module.tensors(ddp)
            self._tell_names(module, ddp, [name for name, _ in named])
            self._versions += _versions(module, named)
            record: JsonObject = {
                "kind": "fingerprint",
                "step": number,
                "module": module.number,
                "armed": self.state.tracker.armed,
            }
            parameters = [each for _, each in named]
            kinds: dict[str, Sequence[Any]] = {"parameters": parameters}
            norms: Readback | None = None
            if rich:
                grads = [each.grad for each in parameters]
                kinds["gradients"] = [g for g in grads if g is not None and hashable(g)]
                norms = _norms(parameters[:MOST_TENSORS])
            hashes = {
                kind: Readback([hash_of(each) for each in tensors])
                for kind, tensors in kinds.items()
            }
            records.append(record)
            readbacks.extend(hashes.values())
            if norms is not None:
                readbacks.append(norms)
            finishers.append(_finisher(record, hashes, norms))
        if not records:
            return
        # Of an optimizer there is one, whatever the number of modules.
        first = records[0]
        groups = [_groups(each) for ref in self._optimizers if (each := ref()) is not None]
        first["hyper"] = groups
        scale = torch_private.scale_of(modes.scaler())
        if scale is not None and hashable(scale):
            scales = Readback([scale.detach().reshape(())])
            readbacks.append(scales)
            finishers.append(lambda: first.update(scale=scales.numbers()[0]))
        if rich:
            state = [each for ref in self._optimizers for each in _state(ref())]
            if state:
                read = Readback([hash_of(each) for each in state])
                readbacks.append(read)
                finishers.append(lambda: first.update(state=_combined(read.numbers())))
        self._pending.append((records, readbacks, finishers))
        self._drain()

    def _tell_names(self, module: _Module, ddp: Any, names: list[str]) -> None:
        if names == module.names:
            return
        module.names = names
        self.state.recorder.add(
            {
                "kind": "tensors",
                "module": module.number,
                "type": type(ddp.module).__name__,
                "group": torch_private.group_ranks(ddp),
                "hook": torch_private.comm_hook(ddp),
                "names": names[:MOST_TENSORS],
            }
        )

    def _drain(self) -> None:
        """Write the fingerprints that the device has passed; on the training thread, as any query.

        A query from another thread would break the capture of a CUDA graph.
        """
        while self._pending and not capturing(sys.modules["torch"]):
            records, readbacks, finishers = self._pending[0]
            if not all(each.ready for each in readbacks):
                return
            self._pending.popleft()
            for finish in finishers:
                finish()
            for record in records:
                self._rich_bytes += len(record.get("detail", ""))
                self.state.recorder.add(record)
            if self._rich_bytes > RICH_BYTES:
                self._rich_bytes = 0
                self._rich_stride = min(self._rich_stride * 2, LONGEST)


def _finisher(
    record: JsonObject, hashes: dict[str, Readback], norms: Readback | None
) -> Callable[[], None]:
    def finish() -> None:
        for kind, read in hashes.items():
            numbers = read.numbers()
            record[kind] = _combined(numbers)
            if kind == "parameters" and norms is not None:
                record["detail"] = packed(numbers, norms.numbers())

    return finish


def packed(hashes: Iterable[int], norms: Iterable[float]) -> str:
    """Per tensor, four bytes of its hash and its norm, as text."""
    data = b"".join(
        # The upper half: it depends on all bits.
        struct.pack("<If", hash_ >> 32 & 0xFFFFFFFF, norm if norm < LARGEST else norm * math.inf)
        for hash_, norm in zip(hashes, norms, strict=False)
    )
    return base64.b64encode(data).decode()


def _combined(hashes: Sequence[int]) -> str:
    """One hash of many; of an empty sequence, too."""
    data = struct.pack(f"<{len(hashes)}q", *hashes)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _norms(tensors: Sequence[Any]) -> Readback | None:
    """A norm per tensor, in double precision as no other fits all; 0 for what has none."""
    torch: Any = sys.modules["torch"]
    found = [
        torch.linalg.vector_norm(each.detach(), dtype=torch.float64)
        if each.is_floating_point() and each.element_size() > 1
        else torch.zeros((), dtype=torch.float64, device=each.device)
        for each in tensors
    ]
    return Readback(found)


def _groups(optimizer: Any) -> list[list[Any]]:
    """`HYPER` of each parameter group, as far as it is on the CPU."""
    return [
        [_number(group.get(name)) for name in HYPER]
        for group in optimizer.param_groups[:MOST_GROUPS]
    ]


def _number(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return [_number(each) for each in value]
    # A tensor on a GPU would have to be waited for.
    device = getattr(value, "device", None)
    if device is not None and device.type == "cpu" and value.numel() == 1:
        return float(value)
    return None


def _state(optimizer: Any) -> list[Any]:
    """The tensors of an optimizer's state, in the order of its parameters."""
    if optimizer is None or torch_private.is_sharded(optimizer):
        return []
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = optimizer.state.get(parameter)
            if isinstance(values, dict):
                found += [each for each in values.values() if _is_tensor(each) and hashable(each)]
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, sys.modules["torch"].Tensor)


def _reader() -> SuspicionReader | None:
    """Where the supervisor tells its suspicions; None without one, or one that is too new."""
    try:
        return SuspicionReader(os.path.join(rank.run_directory(), SUSPICION))
    except (KeyError, OSError, ValueError, UnreadableError):
        return None


_fingerprints: Fingerprints | None = None


def _mine() -> Fingerprints | None:
    """The fingerprints of this process as the rank that it is now; None without a budget."""
    global _fingerprints
    state = rank.current()
    if state is None or not state.budget.enabled:
        return None
    if _fingerprints is None or _fingerprints.state is not state:
        _fingerprints = Fingerprints(state)
    return _fingerprints


def modules_that_hold(module: Any) -> list[int]:
    """The numbers of the DDP modules that a module is, or is a part of."""
    if _fingerprints is None:
        return []
    return [
        each.number
        for each in _fingerprints.modules
        if (ddp := each.ref()) is not None and any(part is module for part in ddp.modules())
    ]


def modules() -> list[_Module]:
    """The DDP modules of this rank."""
    return [] if _fingerprints is None else _fingerprints.modules


def number_of(ddp: Any) -> int | None:
    """The number of a DDP module among this rank's."""
    if _fingerprints is None:
        return None
    return next((each.number for each in _fingerprints.modules if each.ref() is ddp), None)


@shield.shielded
def _built(ddp: Any) -> None:
    mine = _mine()
    if mine is not None:
        mine.built(ddp)


@shield.shielded
def _step_begins(optimizer: Any) -> None:
    mine = _mine()
    if mine is not None:
        mine.step_begins()


@shield.shielded
def _step_ended(optimizer: Any, number: int) -> None:
    mine = _mine()
    if mine is not None:
        mine.step_ended(optimizer, number)


@shield.shielded
def _rank_ends() -> None:
    mine = _mine()
    if mine is not None:
        mine.rank_ends()


def install() -> None:
    """Listen to the moments of training."""
    events.ddp_built.append(_built)
    events.step_begins.append(_step_begins)
    events.step_ended.append(_step_ended)
    events.rank_ends.append(_rank_ends)
