"""Writes the rank's calls of collectives into its ring: the numbers that they have in their groups.

All ranks of a group call its collectives in one order, so the same number has to be the same call
on each of them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ddpdoctor.core.ranks import spans
from ddpdoctor.probe.observers.calls import Call
from ddpdoctor.probe.runtime import torch_dynamo
from ddpdoctor.probe.runtime.hot import Calls
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.ring import (
    ASYNC,
    ENTRIES,
    POINT_TO_POINT,
    RingWriter,
    chain_text,
    entry_rest,
    packed_rest,
)

DEFAULT_GROUP = ""
OBJECT = 1 << 50
"""Elements that an object counts as, whose size is not known."""

_MOST_WORKS = 256
"""Asynchronous calls that are not waited for yet, of which is known which they are."""

NARROW = 64
"""Elements below which a tensor is a number or a metric, and no gradient."""

_now = time.time_ns


class _Group:
    __slots__ = ("calls", "name", "text")

    def __init__(self, name: str, text: int) -> None:
        self.name = name
        self.text = text
        self.calls = 0


class _Alike(NamedTuple):
    """What the calls of one place have in common, and what is stored of that."""

    chain: tuple[Site, ...]
    group: Any
    op: Any
    dtype: Any
    shape: tuple[int, ...]
    roots: tuple[int | None, int | None, int]
    known: _Group
    rest: tuple[int, ...]


class Ledger(Calls):
    """The calls of one rank.

    Args:
        ring: Where they are written.
        steps: How many training steps have ended.
    """

    def __init__(self, ring: RingWriter, steps: Callable[[], int]) -> None:
        super().__init__(ring.memory)
        self._ring = ring
        self._steps = steps
        self._distributed: Any = sys.modules["torch"].distributed
        self._sum = ring.text("SUM")
        self._groups: dict[str, _Group] = {}
        self._names: dict[str, int] = {}
        self._last: dict[str, _Alike] = {}
        """By the name of a collective, its last call: a loop calls it alike again and again."""
        self._dtypes: dict[Any, int] = {None: 0}
        self._ops: dict[Any, int] = {}
        self._sites: dict[Site, int] = {}
        self._chains: dict[tuple[Site, ...], int] = {}
        self._works: dict[int, int] = {}
        self._elsewhere: set[str] = set()
        """Groups in which other threads call collectives, too."""
        self._waited = 0
        self._when_carried: Callable[[int], None] | None = None

    def watch(self, elements: int, moved: Callable[[int], None]) -> None:
        """Call ``moved``, once, when collectives have carried so many elements within one step.

        Args:
            elements: How many are enough; 0: it is not to be called.
            moved: Gets how many there were.
        """
        self.enough, self._when_carried = elements, moved

    def _carry(self, elements: int) -> None:
        if not self.enough:
            return
        step = self._steps()
        if step != self.carried_in:
            self.carried, self.carried_in = 0, step
        self.carried += elements
        if self.carried >= self.enough:
            self.carried_enough()

    def carried_enough(self) -> None:
        """Collectives have carried as much as is waited for."""
        self.enough = 0
        if self._when_carried is not None:
            self._when_carried(self.carried)

    def begin(self, name: str, call: Call, chain: tuple[Site, ...]) -> int:
        """Write down a call that begins; its order, 0 if this rank is not in its group.

        Args:
            name: Of the collective.
            call: What it is about.
            chain: The lines that led to it, innermost first.
        """
        tensor, op, root, group_root, group, flags = call
        if tensor is None:
            shape, numel, dtype = (), -1, None
            self.wide += name[:10] == "all_to_all"
        else:
            shape, numel, dtype = tensor.shape, tensor.numel(), tensor.dtype
            self.wide += numel > NARROW
        last = self._last.get(name)
        if (
            last is None
            or last.chain is not chain
            or last.group is not group
            or last.op is not op
            or last.dtype is not dtype
            or last.shape != shape
            or last.roots != (root, group_root, flags)
        ):
            last = self._met(name, call, chain, shape, dtype)
            if last is None:
                return 0
        if flags & POINT_TO_POINT:
            sequence = 0
        else:
            known = last.known
            if self._elsewhere and known.name in self._elsewhere:
                self.set_partial()
            sequence = known.calls = known.calls + 1
            # An object may hold a whole model.
            if numel > 0:
                self._carry(numel)
            elif numel < 0 and "object" in name:
                self._carry(OBJECT)
        self.count += 1
        self._ring.begin_as(self.count, _now(), sequence, numel, last.rest)
        return self.count

    def like(
        self, name: str, tensor: Any, op: Any, root: Any, group_root: Any, group: Any, later: Any
    ) -> tuple[_Group, bytes, Any, tuple[int, ...], int] | None:
        """What is stored of a call that was just written down, for those that are like it.

        Args:
            name: Of the collective.
            tensor: And so on: what it was called with, None where it is left out.
            op: Of a reduction.
            root: The global rank of source or destination.
            group_root: The rank in its group.
            group: The process group.
            later: Whether it is asynchronous.

        Returns:
            Its group, the end of its entry, dtype, shape and number of elements; None if the last
            call of that name was another one.
        """
        last = self._last.get(name)
        if last is None or last.group is not group or last.op is not op:
            return None
        if last.roots[:2] != (root, group_root) or bool(last.roots[2] & ASYNC) is not bool(later):
            return None
        numel = -1
        if tensor is not None:
            numel = tensor.numel()
            if tensor.dtype is not last.dtype or tensor.shape != last.shape:
                return None
        return last.known, packed_rest(last.rest), last.dtype, last.shape, numel

    def _met(
        self, name: str, call: Call, chain: tuple[Site, ...], shape: tuple[int, ...], dtype: Any
    ) -> _Alike | None:
        """What a call has in common with those like it; None if this rank is not in its group."""
        _, op, root, group_root, group, flags = call
        # The default group's name is looked up once: it may be re-created, but not renamed.
        known = self._groups.get(DEFAULT_GROUP if group is None else group.group_name)
        if known is None:
            known = self._meet(group)
            if known is None:
                return None
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = self._ring.text(name)
        place = self._chains.get(chain) or self._place(chain)
        kind = self._dtypes.get(dtype)
        if kind is None:
            kind = self._dtypes[dtype] = self._ring.text(str(dtype).removeprefix("torch."))
        roots = (root, group_root, flags)
        if group_root is not None:
            root = self._distributed.get_global_rank(
                group or self._distributed.group.WORLD, group_root
            )
        texts = (number, known.text, kind, self._reduce(name, op), place)
        rest = entry_rest(texts, shape, -1 if root is None else root, flags)
        made = self._last[name] = _Alike(chain, group, op, dtype, shape, roots, known, rest)
        return made

    def begin_elsewhere(self, call: Call) -> None:
        """Another thread than the training one calls a collective.

        A communication hook may call its next collective in the thread that ended the one before,
        or in the training thread if that was quick. So the calls that are seen have other numbers
        on each rank, unless that group is the other thread's alone.
        """
        group = self._distributed.group.WORLD if call[4] is None else call[4]
        name = getattr(group, "group_name", None)
        if name is None or call[5] & POINT_TO_POINT:
            return
        self._elsewhere.add(name)
        self.elsewhere = True
        if any(each.name == name and each.calls for each in list(self._groups.values())):
            self.set_partial()

    def _place(self, chain: tuple[Site, ...]) -> int:
        """The number of a text for lines that were not met before."""
        numbers = []
        for site in chain:
            number = self._sites.get(site)
            if number is None:
                number = self._sites[site] = self._ring.text(site.text)
            numbers.append(number)
        place = self._ring.text(chain_text(numbers)) if len(numbers) > 1 else numbers[0]
        if place:
            self._chains[chain] = place
        # Where there is no room left for the callers, the line itself may be known.
        return place or numbers[0]

    def _reduce(self, name: str, op: Any) -> int:
        if op is None:
            return self._sum if "reduce" in name else 0
        try:
            return self._ops[op]
        except (KeyError, TypeError):
            # Operations with a factor of their own are no keys.
            text = str(op)
        number = self._ops.get(text)
        if number is None:
            number = self._ops[text] = self._ring.text(text.rpartition(".")[2])
        with contextlib.suppress(TypeError):
            self._ops[op] = number
        return number

    def _meet(self, group: Any) -> _Group | None:
        """A group that is used for the first time; None if this rank is not in it."""
        world = self._distributed.group.WORLD
        actual = world if group is None else group
        name = getattr(actual, "group_name", None)
        if name is None:
            return None
        ranks = spans(self._distributed.get_process_group_ranks(actual))
        made = self._groups.get(name)
        if made is None:
            made = self._groups[name] = _Group(name, self._ring.text(f"{name}|{ranks}"))
        if actual is world:
            # Under both names it is one group.
            self._groups[DEFAULT_GROUP] = made
        return made

    def returned(self, order: int, result: object) -> None:
        """The call returned; an asynchronous one goes on."""
        if result is None or not hasattr(result, "is_completed"):
            self._end(order, _now())
            return
        if len(self._works) >= _MOST_WORKS:
            self._works.clear()
        self._works[id(result)] = order

    def waits_for(self, work: object) -> bool:
        """Somebody waits for an asynchronous call; False if it is none of these."""
        self._waited = self._works.pop(id(work), 0)
        if self._waited:
            self._ring.waits_for(self._waited)
        else:
            self.wide += 1
        return bool(self._waited)

    def waited(self, now: int) -> None:
        """The wait is over."""
        self._ring.waits_for(0)
        self._end(self._waited, now)

    def _end(self, order: int, now: int) -> None:
        if self.count - order < ENTRIES:
            self._ring.end(order, now)

    def set_partial(self) -> None:
        """Say that calls may be missing."""
        self._ring.set_partial()

    def look(self) -> None:
        """From the writing thread: compiled code calls its collectives itself."""
        if torch_dynamo.has_compiled():
            self._ring.set_partial()
