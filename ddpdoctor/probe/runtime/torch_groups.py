"""Use private parts of ``torch.distributed``: backends, timeouts, Flight Recorder.

As in `ddpdoctor.probe.runtime.torch_private`, each use is guarded by a check for the feature.

Timeouts of collectives are lifted while a rank is stopped in the debugger and its peers wait. A
collective that is already waiting keeps the timeout it began with. Some versions of gloo keep the
one that their group was made with (:func:`kept_timeout`).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from ddpdoctor.probe.runtime import torch_private

# -- process groups and their backends


def backends(c10d: Any) -> Iterator[Any]:
    """Yield the backends (gloo, NCCL) of every process group: ``_world.pg_map`` (2.1 to 2.15).

    Without it, or if a backend has no setter of its timeout, timeouts stay as they are while a rank
    is in the debugger.
    """
    groups = getattr(getattr(c10d, "_world", None), "pg_map", {})
    seen: set[int] = set()
    for group in list(groups):
        for device in getattr(group, "_device_types", ()):
            try:
                backend = group._get_backend(device)
            except (AttributeError, RuntimeError):
                # The device has no backend in this group.
                continue
            if id(backend) not in seen and timeout_setter(type(backend)):
                seen.add(id(backend))
                yield backend


def store_place(c10d: Any) -> tuple[str, int, str] | None:
    """Return host, port and file of the store at which the default group's ranks met.

    It is ``_world.pg_map[group][1]`` (2.1 to 2.15), a PrefixStore around the one that listens
    (``underlying_store``, 1.11 to 2.15). None if there is no such store, or one of another kind.
    """
    world = getattr(c10d, "_world", None)
    found = getattr(world, "pg_map", {}).get(getattr(world, "default_pg", None))
    store = found[1] if found else None
    for _ in range(8):
        inner = getattr(store, "underlying_store", None)
        if inner is None:
            break
        store = inner
    host, port, path = (getattr(store, name, None) for name in ("host", "port", "path"))
    if isinstance(host, str) and isinstance(port, int):
        return host, port, ""
    return ("", 0, path) if isinstance(path, str) else None


def timeout_of(backend: Any) -> timedelta | None:
    """Return the timeout of a backend's collectives: ``options._timeout`` (2.4 to 2.15)."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the timeout of the later collectives of a backend that :func:`backends` returned.

    gloo may accept it and still keep the old one (:func:`keeps_timeout`).
    """
    getattr(backend, timeout_setter(type(backend)))(timeout)


def timeout_setter(backend_class: type[Any]) -> str:
    """Return the name of the method that sets the timeout of later collectives, or "".

    ``_set_default_timeout`` of gloo and NCCL (2.3 to 2.15). "nccl" of 2.15 has only
    ``set_timeout``. All backends inherit that method (2.13 to 2.15), which raises or warns unless a
    backend has its own, so only NCCL's is called.
    """
    if hasattr(backend_class, "_set_default_timeout"):
        return "_set_default_timeout"
    newer = backend_class.__name__.startswith("ProcessGroupNCCL")
    return "set_timeout" if newer and hasattr(backend_class, "set_timeout") else ""


def group_ranks(ddp: Any) -> list[int]:
    """Return the global ranks that share a DDP module."""
    distributed: Any = sys.modules["torch"].distributed
    return list(distributed.get_process_group_ranks(ddp.process_group))


def pipeline_ranks(stage: Any) -> list[int]:
    """Return the global ranks of a stage's pipeline. Its ``group`` is None for all ranks."""
    distributed: Any = sys.modules["torch"].distributed
    return list(distributed.get_process_group_ranks(stage.group or distributed.group.WORLD))


def calls_begun(torch: Any) -> int | None:
    """Return how many collectives the default process group has begun. None if not known.

    ``_get_sequence_number_for_group`` (1.9 to 2.15) counts them on the host.
    """
    try:
        return int(torch.distributed.group.WORLD._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def is_reduced(stage: Any) -> bool:
    """Return whether a stage's module is a DDP module that other ranks have, too."""
    return torch_private.is_ddp(stage.submod) and len(group_ranks(stage.submod)) > 1


# -- torch's Flight Recorder


def flight_recorder_switch(c10d: Any, version: str) -> str:
    """Return the variable that turns the Flight Recorder on, or "" if it is on (2.12 and later).

    ``TORCH_FR_BUFFER_SIZE`` from ``_dump_fr_trace`` on (2.8), which warns of the older name,
    ``TORCH_NCCL_TRACE_BUFFER_SIZE``. Only the version shows whether it is on by default.
    """
    words = version.split(".")
    if [int(word) if word.isdigit() else 0 for word in words[:2]] >= [2, 12]:
        return ""
    newer = hasattr(c10d, "_dump_fr_trace")
    return "TORCH_FR_BUFFER_SIZE" if newer else "TORCH_NCCL_TRACE_BUFFER_SIZE"


def flight_recorders(torch: Any) -> list[Callable[[], bytes]]:
    """Return functions that dump this process's Flight Recorders as pickles.

    The dumps have no stack traces (``includeStackTraces``, 2.4 to 2.15), for whose symbols torch
    would import its compiler, in whichever thread asks.

    ``_dump_fr_trace`` (2.8 to 2.15) has gloo's collectives, ``_dump_nccl_trace`` (2.3 to 2.15)
    NCCL's, if torch was built with it. From ``FlightRecorderHook`` on (2.15) every other backend,
    the new "nccl" among them, has a recorder under its name. Without them DDP's own collectives
    have no number, and only an idle backward shows that a rank waits for one.
    """
    c10d = torch._C._distributed_c10d
    names = ("_dump_fr_trace", "_dump_nccl_trace")
    found: list[Callable[[], bytes]] = [
        functools.partial(getattr(c10d, name), includeStackTraces=False)
        for name in names
        if hasattr(c10d, name)
    ]
    if hasattr(c10d, "FlightRecorderHook"):
        module = sys.modules["torch.distributed.distributed_c10d"]
        others = {backend.name() for backend in backends(module)} - {"gloo", "nccl"}
        found += [
            functools.partial(c10d._dump_fr_trace, includeStackTraces=False, backend=name)
            for name in sorted(others)
        ]
    return found


# -- timeouts of collectives

LIFTED_TIMEOUT = timedelta(days=7)
"""Replaces the job's timeouts. It fits into the 32-bit milliseconds of a store."""

_lifted = False
_least_timeout = timedelta(0)

_changed_timeouts: dict[int, tuple[Any, timedelta, timedelta]] = {}
"""Backends whose timeout was changed, by id: the backend, the job's timeout, and ours."""

_changing = threading.Lock()


def least_timeout() -> timedelta:
    """Return the timeout that all groups must have at least now, or zero."""
    return LIFTED_TIMEOUT if _lifted else _least_timeout


def lift_timeouts(lift: bool = True) -> None:
    """Lift the timeouts of all process groups of this process, later ones included.

    If ``lift`` is False, restore the timeout of each group, unless the job has set another one
    since.
    """
    global _lifted
    _lifted = lift
    update_timeouts()


def keep_timeouts_at_least(timeout: timedelta) -> None:
    """Allow no timeout below ``timeout`` until the process ends."""
    global _least_timeout
    _least_timeout = max(_least_timeout, timeout)
    update_timeouts()


def update_timeouts() -> None:
    """Raise or restore the timeouts of all groups, including new ones."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return
    with _changing:
        for backend in backends(c10d):
            current = timeout_of(backend)
            if current is None:
                continue
            _, users, ours = _changed_timeouts.get(id(backend), (None, current, current))
            # The job itself may have set another timeout since.
            _change_timeout(backend, current, users if current == ours else current)


def kept_timeout() -> float | None:
    """Return the seconds of the shortest timeout that can no longer be lifted, or None."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    found = [
        timeout.total_seconds()
        for backend in (backends(c10d) if c10d is not None else ())
        if (type(backend).__name__ == "ProcessGroupGloo" and not hasattr(backend, "set_timeout"))
        and (timeout := timeout_of(backend)) is not None
        and timeout < LIFTED_TIMEOUT
    ]
    return min(found, default=None)


def default_timeout() -> float | None:
    """Return the seconds of the timeout that the job gave its default group, or None."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    for backend in backends(c10d) if c10d is not None else ():
        _, users, _ = _changed_timeouts.get(id(backend), (None, timeout_of(backend), None))
        return users.total_seconds() if users is not None else None
    return None


def note_backends(backends: list[Any], timeout: timedelta) -> None:
    """Note new backends that were made with `least_timeout` instead of the job's ``timeout``."""
    with _changing:
        for backend in backends:
            current = timeout_of(backend)
            if id(backend) not in _changed_timeouts and current is not None:
                _change_timeout(backend, current, timeout)


def _change_timeout(backend: Any, current: timedelta, users: timedelta) -> None:
    wanted = max(users, least_timeout())
    if wanted != current:
        set_timeout(backend, wanted)
    if wanted == users:
        _changed_timeouts.pop(id(backend), None)
    else:
        _changed_timeouts[id(backend)] = (backend, users, wanted)
