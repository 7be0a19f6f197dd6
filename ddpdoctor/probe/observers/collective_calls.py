"""Record the rank's collectives: calls from Python in its ring, DDP's own by the Flight Recorder.

All ranks of a group call its collectives in one order, so the same number has to be the same call
on each of them. For each function of ``torch.distributed`` a small one with the same parameters is
made when it is wrapped, so that Python itself binds the arguments: at every call,
``Signature.bind`` would take several times as long.

torch's Flight Recorder is read when asked, in the writing thread, which needs the GIL and nothing
of the training thread: 15 ms of a full recorder, of 2,000 calls. A rank whose GIL is held by native
code does not answer. It is read without its stack traces: to put names to them torch imports its
compiler, 822 modules (73 MB) in torch 2.13, and a job that imports these at the same moment dies of
it. Which line called what is known from the rank's own ring and from its backward passes.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import io
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ddpdoctor.core.formatting import spans
from ddpdoctor.probe.runtime import torch_groups, torch_private
from ddpdoctor.probe.runtime.hot import Calls
from ddpdoctor.probe.runtime.phases import Backward
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.mapped import Asked, UnreadableError
from ddpdoctor.run.ring import (
    ASYNC,
    ENTRIES,
    POINT_TO_POINT,
    Collective,
    RingWriter,
    chain_text,
    entry_rest,
    packed_rest,
    read_ring,
)

if TYPE_CHECKING:
    from ddpdoctor.probe.observers.steps import StepTracker


# -- what a call of a collective is about: tensor, reduce operation, root and group


Call: TypeAlias = "tuple[Any, Any, int | None, int | None, Any, int]"
"""What all ranks have to agree on; a plain tuple, for it is made at every call.

The tensor (None where there is none, or where ranks may differ in it), the reduce operation, the
root as a global rank, the root as a rank of the group, the group, and flags as in the ring.
"""

TENSORS: dict[str, str] = {
    "all_gather": "tensor",
    "all_gather_coalesced": "input_tensor_list[0]",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_object": "None",
    "all_gather_single": "input_tensor",
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors[0]",
    # Each rank may send another number of elements.
    "all_to_all": "None",
    "all_to_all_single": "None",
    "barrier": "None",
    "broadcast": "tensor",
    "broadcast_object_list": "None",
    "gather": "tensor",
    "gather_into_tensor": "tensor",
    "gather_object": "None",
    "gather_single": "tensor",
    "monitored_barrier": "None",
    "recv": "tensor",
    "reduce": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_single": "output",
    "reduce_scatter_tensor": "output",
    "scatter": "tensor",
    "scatter_object_list": "None",
    "send": "tensor",
}
"""The functions of ``torch.distributed`` that wait for other ranks, of all versions, and the tensor
whose shape and dtype all ranks share.

``all_gather_single`` and ``reduce_scatter_single`` are what ``all_gather_into_tensor`` and
``reduce_scatter_tensor`` call from 2.13 on; ``gather_single`` is in 2.15.
"""


PARAMETERS = (("op",), ("src", "dst"), ("group_src", "group_dst"), ("group",), ("async_op",))
"""Of the arguments but the tensor, what functions call them."""


def parameter_places(
    name: str, function: Callable[..., Any]
) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """Names and positions of the tensor's parameter and those of `PARAMETERS`.

    The position is -1, and the name empty, where the function has none. None if the calls of that
    function are more than their tensor tells.
    """
    tensor = TENSORS[name].removesuffix("[0]")
    if tensor == "None" and not name.endswith("barrier"):
        return None
    names = list(inspect.signature(function).parameters)
    wanted = ((tensor,), *PARAMETERS)
    found = tuple(next((each for each in several if each in names), "") for several in wanted)
    return found, tuple(names.index(each) if each else -1 for each in found)


def binder(name: str, function: Callable[..., Any]) -> Callable[..., Call]:
    """What makes a `Call` of the arguments of a call of ``function``, one of `TENSORS`.

    It raises what such a call raises where the arguments are none of the function's: TypeError,
    and IndexError for an empty list.
    """
    parameters = inspect.signature(function).parameters.values()
    bare = [
        each.replace(
            annotation=each.empty, default=each.empty if each.default is each.empty else None
        )
        for each in parameters
    ]
    names = {each.name for each in bare}

    def first_of(*wanted: str) -> str:
        return next((each for each in wanted if each in names), "None")

    flags = f"{ASYNC} if async_op else 0" if "async_op" in names else "0"
    call = [
        TENSORS[name],
        *(first_of(*wanted) for wanted in PARAMETERS[:-1]),
        str(POINT_TO_POINT) if name in ("send", "recv") else flags,
    ]
    made: Callable[..., Call] = eval(  # as `dataclasses` makes an `__init__`
        f"lambda {str(inspect.Signature(bare))[1:-1]}: ({', '.join(call)})", {}
    )
    return made


# -- ledger


DEFAULT_GROUP = ""
OBJECT_ELEMENTS = 1 << 50
"""Elements that an object counts as, whose size is not known."""

_MOST_WORKS = 256
"""Asynchronous calls that are not waited for yet, of which is known which they are."""

NARROW_TENSOR = 64
"""Elements below which a tensor is a number or a metric, and no gradient."""

_now = time.time_ns


class _GroupCalls:
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
    known: _GroupCalls
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
        self._groups: dict[str, _GroupCalls] = {}
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
            self.wide += numel > NARROW_TENSOR
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
                self._carry(OBJECT_ELEMENTS)
        self.count += 1
        self._ring.begin_as(self.count, _now(), sequence, numel, last.rest)
        return self.count

    def like(
        self, name: str, tensor: Any, op: Any, root: Any, group_root: Any, group: Any, later: Any
    ) -> tuple[_GroupCalls, bytes, Any, tuple[int, ...], int] | None:
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

    def _meet(self, group: Any) -> _GroupCalls | None:
        """A group that is used for the first time; None if this rank is not in it."""
        world = self._distributed.group.WORLD
        actual = world if group is None else group
        name = getattr(actual, "group_name", None)
        if name is None:
            return None
        ranks = spans(self._distributed.get_process_group_ranks(actual))
        made = self._groups.get(name)
        if made is None:
            made = self._groups[name] = _GroupCalls(name, self._ring.text(f"{name}|{ranks}"))
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
        if torch_private.has_compiled():
            self._ring.set_partial()


# -- flight


MOST_GROUPS = 16
"""Groups that are reported, those used last."""

RECORDED_CALLS = 2000
"""Collectives that torch's Flight Recorder keeps, as later versions do by themselves, and that are
reported."""

LOOK_SECONDS, RAN_SECONDS = 0.25, 0.01
"""Seconds in which the training thread may show that it goes on, and for how many of them it has to
run, unless it sleeps: without a core it stays where it is, too."""

Caller = Callable[["int | None"], tuple[str, ...]]
"""The user's lines, ``path:line``, that called the collective made at a Unix time in nanoseconds:
its own and those that led to it, innermost first; empty where that is not known."""


def install_flight_recorder(distributed: ModuleType) -> None:
    """Turn the Flight Recorder on, unless the job has decided itself; torch reads this later."""
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        torch: Any = sys.modules["torch"]
        c10d = torch._C._distributed_c10d
        switch = torch_groups.flight_recorder_switch(c10d, str(torch.__version__))
        if switch:
            os.environ[switch] = str(RECORDED_CALLS)


class Flight:
    """Answers with the Flight Recorder's entries, in a file of the run directory.

    With all of them: which one matters shows only beside those of the other ranks, and this rank
    may be many calls ahead of it.

    Args:
        directory: The run directory.
        path: The file to answer in.
        ring: The rank's ring of collectives.
        tracker: The rank's steps: its newest backward passes, and its device's clock.

    Raises:
        OSError: Nothing asks in that run directory.
        ValueError: Nothing does.
    """

    def __init__(self, directory: str, path: str, ring: str, tracker: StepTracker) -> None:
        self._asked = Asked(directory)
        self._path = path
        self._ring = ring
        self._tracker = tracker

    def look(self) -> None:
        """Answer if there is a new request; runs in the writing thread."""
        number = self._asked.news()
        if number:
            answer = {"asked": number, "time": time.time_ns(), **self._entries()}
            fresh = f"{self._path}.new"
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            # `dumps`, not `dump`, which would encode in Python.
            text = json.dumps(answer, separators=(",", ":"), default=str)
            with open(os.open(fresh, flags, 0o600), "w") as file:
                file.write(text)
            os.replace(fresh, self._path)

    def _entries(self) -> dict[str, Any]:
        dumps = torch_groups.flight_recorders(sys.modules["torch"])
        if not dumps:
            return {"trouble": "this torch has no Flight Recorder"}
        entries = [entry for dump in dumps for entry in _read_dump(dump())]
        if not entries:
            # Off, or NCCL's alone: whether a collective of gloo is stuck it does not say.
            return {"trouble": "the Flight Recorder recorded nothing"}
        answer: dict[str, Any] = {"entries": reported_calls(entries, self._place())}
        clock = self._tracker.device
        if clock is not None and not clock.captures and self._stands():
            answer["device"] = clock.standing()
        return answer

    def _stands(self) -> bool:
        """Return whether the training thread stays in one native call.

        It captures no graph then, which a query from this thread could break: a capture goes on.
        """

        def at() -> tuple[FrameType | None, int]:
            frame = sys._current_frames().get(thread)
            return frame, frame.f_lasti if frame is not None else -1

        thread = self._tracker.thread
        before = at()
        if before[0] is None:
            return False
        # Of a thread that has a frame: of one that has ended to ask would crash.
        clock = time.pthread_getcpuclockid(thread)
        ran = time.clock_gettime(clock)
        time.sleep(LOOK_SECONDS)
        if before != at():
            return False
        return time.clock_gettime(clock) - ran >= RAN_SECONDS or _sleeps(self._tracker.native)

    def _place(self) -> Caller:
        try:
            collectives = read_ring(self._ring).collectives
        except (OSError, UnreadableError):
            collectives = ()
        return callers_of(collectives, self._tracker.backwards)


def _sleeps(thread: int) -> bool:
    """Whether a thread of this process, by the kernel's number, waits for something but a core."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"
    return False


class _PlainUnpickler(pickle.Unpickler):
    """Reads what is made of Python's own types, as a dump is: nothing else has to be imported."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a Flight Recorder's dump")


def _read_dump(dump: bytes) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = _PlainUnpickler(io.BytesIO(dump)).load().get("entries", [])
    return entries


def callers_of(collectives: Sequence[Collective], backwards: Sequence[Backward]) -> Caller:
    """Who called the collectives of a Flight Recorder, which are made while their callers run.

    Args:
        collectives: Those that were called from Python, oldest first.
        backwards: Backward passes, in which DDP calls its own.
    """
    begins = [each.began for each in collectives]
    begun: set[int] = set()

    def place(created: int | None) -> tuple[str, ...]:
        if created is None:
            return ()
        at = bisect.bisect_right(begins, created) - 1
        if at >= 0:
            call = collectives[at]
            # One that is waited for may be made of several; one that goes on is itself alone.
            if at not in begun if call.asynchronous else created <= (call.ended or created):
                begun.add(at)
                return call.site, *call.callers
        for passed in backwards:
            began, ended, site = passed
            if began <= created <= (ended or created):
                return (site.text,)
        return ()

    return place


def reported_calls(entries: list[dict[str, Any]], place: Caller) -> list[dict[str, Any]]:
    """The collectives of the groups used last, of all recorders, in the order of calls."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    # Each recorder counts for itself.
    for order, entry in enumerate(sorted(entries, key=_created)[-RECORDED_CALLS:]):
        each = _reported_call(order, entry, place)
        key = each["group"], each["backend"]
        calls = groups.pop(key, [])
        calls.append(each)
        # In the order of use, the last one at the end.
        groups[key] = calls
    return [each for last in list(groups.values())[-MOST_GROUPS:] for each in last]


def _created(entry: dict[str, Any]) -> int:
    return entry.get("time_created_ns") or 0


def _reported_call(order: int, entry: dict[str, Any], place: Caller) -> dict[str, Any]:
    backend, _, name = str(entry.get("profiling_name", "")).rpartition(":")
    return {
        "id": order,
        "group": str(entry["process_group"][0]),
        "sequence": entry.get("collective_seq_id"),
        "point_to_point": bool(entry.get("is_p2p")),
        "backend": backend,
        "name": name,
        "shapes": (entry.get("input_sizes") or [])[:4],
        "dtypes": (entry.get("input_dtypes") or [])[:4],
        "created": entry.get("time_created_ns"),
        "retired": bool(entry.get("retired")),
        "state": entry.get("state"),
        # Known only where the starts of collectives are recorded, too.
        "duration": entry.get("duration_ms"),
        "lines": list(place(entry.get("time_created_ns"))),
    }
