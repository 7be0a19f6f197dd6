"""Record the rank's collectives: Python calls in its ring, and DDP's own from the Flight Recorder.

All ranks of a group call its collectives in the same order, so calls with the same number must be
equal on all ranks. For each function of ``torch.distributed`` we generate a small function with the
same parameters, so that Python itself binds the arguments. ``Signature.bind`` would take several
times as long for every call.

The writing thread reads torch's Flight Recorder when the supervisor requests it. It needs only the
GIL: 15 ms for a full recorder of 2,000 calls. A rank whose GIL is held by native code does not
answer. Stack traces are left out: to name their functions torch imports its compiler, 822 modules
(73 MB) in torch 2.13, and a job that imports these at the same moment crashes. The rank's ring and
its backward passes show which line called what.
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
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ddpdoctor.core.formatting import spans
from ddpdoctor.probe.runtime import rank, torch_groups, torch_private
from ddpdoctor.probe.runtime.hot import Calls
from ddpdoctor.probe.runtime.phases import Backward
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.mapped import RequestReader, UnreadableError
from ddpdoctor.run.records.model import GraphCutRecord
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


# -- the arguments of a call: tensor, reduce operation, root and group

Call: TypeAlias = "tuple[Any, Any, int | None, int | None, Any, int]"
"""The properties that must be equal on all ranks. A plain tuple, since each call creates one.

The tensor (None if there is none, or if ranks may differ in it), the reduce operation, the
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
    # The numbers of elements may differ between ranks.
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
"""Functions of ``torch.distributed`` of any version that wait for other ranks, each with the tensor
whose shape and dtype are equal on all ranks.

From 2.13 on ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` call ``all_gather_single`` and
``reduce_scatter_single``. 2.15 has ``gather_single``.
"""

PARAMETERS = (("op",), ("src", "dst"), ("group_src", "group_dst"), ("group",), ("async_op",))
"""The functions' names for the other arguments."""


def parameter_places(
    name: str, function: Callable[..., Any]
) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """Return names and positions of the tensor's parameter and those of `PARAMETERS`.

    A missing parameter has the name "" and the position -1. None if no tensor distinguishes calls
    of the function.
    """
    tensor = TENSORS[name].removesuffix("[0]")
    if tensor == "None" and not name.endswith("barrier"):
        return None
    names = list(inspect.signature(function).parameters)
    wanted = ((tensor,), *PARAMETERS)
    found = tuple(next((each for each in several if each in names), "") for several in wanted)
    return found, tuple(names.index(each) if each else -1 for each in found)


def binder(name: str, function: Callable[..., Any]) -> Callable[..., Call]:
    """Return a function that makes a `Call` from the arguments of ``function``, one of `TENSORS`.

    It raises TypeError for wrong arguments, as the function does, and IndexError for an empty list.
    """
    parameters = inspect.signature(function).parameters.values()
    bare = [
        each.replace(
            annotation=each.empty, default=each.empty if each.default is each.empty else None
        )
        for each in parameters
    ]
    names = {each.name for each in bare}

    flags = f"{ASYNC} if async_op else 0" if "async_op" in names else "0"
    call = [
        TENSORS[name],
        *(next((each for each in wanted if each in names), "None") for wanted in PARAMETERS[:-1]),
        str(POINT_TO_POINT) if name in ("send", "recv") else flags,
    ]
    made: Callable[..., Call] = eval(  # as `dataclasses` makes an `__init__`
        f"lambda {str(inspect.Signature(bare))[1:-1]}: ({', '.join(call)})", {}
    )
    return made


# -- calls from Python

DEFAULT_GROUP = ""
OBJECT_ELEMENTS = 1 << 50  # assumed number of elements of an object of unknown size
_MAX_WORKS = 256  # maximum number of pending asynchronous calls
NARROW_TENSOR = 64  # maximum number of elements of a metric; larger tensors may be gradients

_now = time.time_ns


@dataclass(eq=False)
class _GroupCalls:
    name: str
    text: int
    calls: int = 0


class _Alike(NamedTuple):
    """The properties of equal calls, and their stored form."""

    chain: tuple[Site, ...]
    group: Any
    op: Any
    dtype: Any
    shape: tuple[int, ...]
    roots: tuple[int | None, int | None, int]
    known: _GroupCalls
    rest: tuple[int, ...]


class Ledger(Calls):
    """The calls of one rank. ``steps`` returns the number of ended training steps."""

    def __init__(self, ring: RingWriter, steps: Callable[[], int]) -> None:
        super().__init__(ring.memory)
        self._ring = ring
        self._steps = steps
        self._distributed: Any = sys.modules["torch"].distributed
        self._sum = ring.text("SUM")
        self._groups: dict[str, _GroupCalls] = {}
        self._names: dict[str, int] = {}
        self._last: dict[str, _Alike] = {}  # the last call by name, which a loop often repeats
        self._dtypes: dict[Any, int] = {None: 0}
        self._ops: dict[Any, int] = {}
        self._sites: dict[Site, int] = {}
        self._chains: dict[tuple[Site, ...], int] = {}
        self._works: dict[int, int] = {}
        self._elsewhere: set[str] = set()  # groups in which other threads call collectives as well
        self._waited = 0
        self._when_carried: Callable[[int], None] | None = None

    def watch(self, elements: int, moved: Callable[[int], None]) -> None:
        """Call ``moved`` once collectives have carried this many elements in a step. Never if 0."""
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
        """Call the function passed to `watch`."""
        self.enough = 0
        if self._when_carried is not None:
            self._when_carried(self.carried)

    def begin(self, name: str, call: Call, chain: tuple[Site, ...]) -> int:
        """Record a call that begins, and the lines that led to it, innermost first.

        Return its order, or 0 if this rank is not in its group.
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
            # The object may contain a whole model.
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
        """Return the stored form of the last call, so that compiled code can store equal calls.

        The arguments are those of the call. Missing ones are None.

        Returns:
            Its group, the end of its entry, dtype, shape and number of elements. None if the last
            call of that name was different.
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
        """Store the properties of equal calls. Return None if this rank is not in their group."""
        tensor, op, root, group_root, group, flags = call
        if getattr(tensor, "grad_fn", None) is not None:
            _note_graph(name, tensor, chain[0], self._steps())
        # The default group may be re-created, but not renamed.
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
        """Note a collective that is called outside the training thread.

        A communication hook may call its next collective in the thread that ended the last one, or
        in the training thread if that was fast. So the numbers of the observed calls differ between
        ranks, unless only the other thread uses the group.
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
        """Store the text of new lines. Return its number."""
        numbers = []
        for site in chain:
            number = self._sites.get(site)
            if number is None:
                number = self._sites[site] = self._ring.text(site.text)
            numbers.append(number)
        place = self._ring.text(chain_text(numbers)) if len(numbers) > 1 else numbers[0]
        if place:
            self._chains[chain] = place
        # Without room for the callers, the line itself may still fit.
        return place or numbers[0]

    def _reduce(self, name: str, op: Any) -> int:
        if op is None:
            return self._sum if "reduce" in name else 0
        try:
            return self._ops[op]
        except (KeyError, TypeError):
            # A reduce operation with a factor is not hashable.
            text = str(op)
        number = self._ops.get(text)
        if number is None:
            number = self._ops[text] = self._ring.text(text.rpartition(".")[2])
        with contextlib.suppress(TypeError):
            self._ops[op] = number
        return number

    def _meet(self, group: Any) -> _GroupCalls | None:
        """Store a group at its first use. Return None if this rank is not in it."""
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
            # Both names refer to the same group.
            self._groups[DEFAULT_GROUP] = made
        return made

    def returned(self, order: int, result: object) -> None:
        """Record that a call returned. An asynchronous call continues."""
        if result is None or not hasattr(result, "is_completed"):
            self._end(order, _now())
            return
        if len(self._works) >= _MAX_WORKS:
            self._works.clear()
        self._works[id(result)] = order

    def waits_for(self, work: object) -> bool:
        """Record a wait for an asynchronous call. Return False if the call is unknown."""
        self._waited = self._works.pop(id(work), 0)
        if self._waited:
            self._ring.waits_for(self._waited)
        else:
            self.wide += 1
        return bool(self._waited)

    def waited(self, now: int) -> None:
        """Record that the wait is over."""
        self._ring.waits_for(0)
        self._end(self._waited, now)

    def _end(self, order: int, now: int) -> None:
        if self.count - order < ENTRIES:
            self._ring.end(order, now)

    def set_partial(self) -> None:
        """Record that calls may be missing."""
        self._ring.set_partial()

    def look(self) -> None:
        """Note that compiled code called collectives, which are not observed.

        Called by the writing thread.
        """
        if torch_private.has_compiled():
            self._ring.set_partial()


# -- collectives that autograd does not know

MAX_CUTS = 8  # maximum number of recorded lines
MAX_REDUCED = 4  # maximum number of reduced tensors that are remembered

reduced_graphs: list[tuple[Any, str, Site]] = []
"""The ``grad_fn`` of tensors that were reduced in place, until the next backward begins."""


def _note_graph(name: str, tensor: Any, site: Site, step: int) -> None:
    """Note a call whose output loses the tensor's graph.

    ``torch.distributed.nn.functional`` calls collectives with gradients off.
    """
    torch: Any = sys.modules["torch"]
    if not torch.is_grad_enabled():
        return
    if "gather" in name or name.startswith("all_to_all"):
        record = GraphCutRecord(step=step, call=name, **site.place)
        rank.add(record, MAX_CUTS, ("cut", name, site))
    elif name == "all_reduce" and tensor.numel() == 1 and len(reduced_graphs) < MAX_REDUCED:
        reduced_graphs.append((tensor.grad_fn, name, site))


# -- the Flight Recorder

MAX_GROUPS = 16  # maximum number of reported groups, the last used ones
RECORDED_CALLS = 2000  # size of the recorder, the default of later versions

LOOK_SECONDS, RAN_SECONDS = 0.25, 0.01
"""Seconds for which the training thread is watched, and the CPU seconds that it must use meanwhile
unless it sleeps: a thread without a core does not move either."""

Caller = Callable[["int | None"], tuple[str, ...]]
"""Returns the user's lines, ``path:line``, that called the collective at a Unix time in
nanoseconds, innermost first. Empty if unknown."""


def install_flight_recorder(distributed: ModuleType) -> None:
    """Turn the Flight Recorder on unless the job configured it. torch reads the variable later."""
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        torch: Any = sys.modules["torch"]
        c10d = torch._C._distributed_c10d
        switch = torch_groups.flight_recorder_switch(c10d, str(torch.__version__))
        if switch:
            os.environ[switch] = str(RECORDED_CALLS)


class Flight:
    """Write the Flight Recorder's entries for the supervisor into a file of the run directory.

    Write all entries: only a comparison with other ranks shows which one matters, and this rank may
    be many calls past that one. ``path`` is the file to answer in, ``ring`` that of the rank's
    collectives. ``tracker`` has its newest backward passes, and its device's clock.

    Raises:
        OSError: The run directory has no file of requests.
        ValueError: The file of requests is invalid.
    """

    def __init__(self, directory: str, path: str, ring: str, tracker: StepTracker) -> None:
        self._asked = RequestReader(directory)
        self._path = path
        self._ring = ring
        self._tracker = tracker

    def look(self) -> None:
        """Answer a new request. Called in the writing thread."""
        number = self._asked.news()
        if number:
            answer = {"asked": number, "time": time.time_ns(), **self._entries()}
            fresh = f"{self._path}.new"
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            # `dump` would use the slower encoder in Python.
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
            # It is off, or records only NCCL while gloo may be stuck.
            return {"trouble": "the Flight Recorder recorded nothing"}
        answer: dict[str, Any] = {"entries": reported_calls(entries, self._place())}
        clock = self._tracker.device
        if clock is not None and not clock.captures and self._stands():
            answer["device"] = clock.standing()
        return answer

    def _stands(self) -> bool:
        """Return whether the training thread stays in one native call.

        Then it captures no CUDA graph, which a query from this thread could break.
        """

        def at() -> tuple[FrameType | None, int]:
            frame = sys._current_frames().get(thread)
            return frame, frame.f_lasti if frame is not None else -1

        thread = self._tracker.thread
        before = at()
        if before[0] is None:
            return False
        # This call would crash for an ended thread. A thread with a frame has not ended.
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
    """Return whether a thread, given by its native id, sleeps instead of waiting for a core."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"
    return False


class _PlainUnpickler(pickle.Unpickler):
    """Unpickle only built-in types, of which a dump consists. Import nothing."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a Flight Recorder's dump")


def _read_dump(dump: bytes) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = _PlainUnpickler(io.BytesIO(dump)).load().get("entries", [])
    return entries


def callers_of(collectives: Sequence[Collective], backwards: Sequence[Backward]) -> Caller:
    """Return a function that finds the callers of a recorded collective by its time.

    Collectives are called from Python, oldest first, or by DDP in backward passes.
    """
    begins = [each.began for each in collectives]
    begun: set[int] = set()

    def place(created: int | None) -> tuple[str, ...]:
        if created is None:
            return ()
        at = bisect.bisect_right(begins, created) - 1
        if at >= 0:
            call = collectives[at]
            # A blocking call may consist of several collectives. An asynchronous call is a single
            # one.
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
    """Return the collectives of the last used groups, of all recorders, in call order."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    # Each recorder has its own numbers.
    in_order = sorted(entries, key=lambda entry: entry.get("time_created_ns") or 0)
    for order, entry in enumerate(in_order[-RECORDED_CALLS:]):
        each = _reported_call(order, entry, place)
        key = each["group"], each["backend"]
        calls = groups.pop(key, [])
        calls.append(each)
        # Keep groups in the order of use.
        groups[key] = calls
    return [each for last in list(groups.values())[-MAX_GROUPS:] for each in last]


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
        # Only known if the starts of collectives are recorded as well.
        "duration": entry.get("duration_ms"),
        "lines": list(place(entry.get("time_created_ns"))),
    }
