"""Use private parts of ``torch.distributed``: backends, timeouts, Flight Recorder.

As with `ddpdoctor.probe.runtime.torch_private`, each is guarded by the feature.

Timeouts of collectives are lifted while a rank is stopped in the debugger: its peers wait for it. A
collective that was already waiting keeps the timeout it began with. Some gloo keeps the one that
its group was made with (:func:`kept_timeout`).
"""

from __future__ import annotations

import datetime
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from ddpdoctor.probe.runtime import torch_private

# -- the private parts of ``torch.distributed`` that the probe uses: backends, Flight Recorder


def backends(c10d: Any) -> Iterator[Any]:
    """The backends (gloo, NCCL) of every process group: ``_world.pg_map`` (2.1 to 2.15).

    Without it, or where a backend has no setter of its timeout, timeouts stay as they are while a
    rank is in the debugger.
    """
    groups = getattr(getattr(c10d, "_world", None), "pg_map", {})
    seen: set[int] = set()
    for group in list(groups):
        for device in getattr(group, "_device_types", ()):
            try:
                backend = group._get_backend(device)
            except (AttributeError, RuntimeError):
                # The device has none in this group.
                continue
            if id(backend) not in seen and timeout_setter(type(backend)):
                seen.add(id(backend))
                yield backend


def timeout_of(backend: Any) -> timedelta | None:
    """The timeout of a backend's collectives: ``options._timeout`` (2.4 to 2.15), or None."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the timeout of a backend's later collectives, of one that :func:`backends` gave.

    gloo may let it be set and keep the old one all the same (:func:`keeps_timeout`).
    """
    getattr(backend, timeout_setter(type(backend)))(timeout)


def timeout_setter(backend_class: type[Any]) -> str:
    """The method that sets the timeout of a backend's later collectives, empty without one.

    ``_set_default_timeout`` of gloo and NCCL (2.3 to 2.15). What "nccl" is in 2.15 has only
    ``set_timeout``. All backends inherit a method of that name (2.13 to 2.15), which only raises or
    warns where a backend has none itself, so NCCL's alone is called.
    """
    if hasattr(backend_class, "_set_default_timeout"):
        return "_set_default_timeout"
    newer = backend_class.__name__.startswith("ProcessGroupNCCL")
    return "set_timeout" if newer and hasattr(backend_class, "set_timeout") else ""


def keeps_timeout(backend: Any) -> bool:
    """Whether a backend keeps the timeout that it was made with: gloo without ``set_timeout``.

    So in 2.4 and 2.8; in 2.13 it has that, and each collective takes the new timeout.
    """
    return type(backend).__name__ == "ProcessGroupGloo" and not hasattr(backend, "set_timeout")


def group_ranks(ddp: Any) -> list[int]:
    """The global ranks that share a DDP module."""
    distributed: Any = sys.modules["torch"].distributed
    return list(distributed.get_process_group_ranks(ddp.process_group))


def pipeline_ranks(stage: Any) -> list[int]:
    """The global ranks of the pipeline that a stage belongs to: ``group``, None for all of them."""
    distributed: Any = sys.modules["torch"].distributed
    return list(distributed.get_process_group_ranks(stage.group or distributed.group.WORLD))


def is_reduced(stage: Any) -> bool:
    """Whether a stage's module is a DDP module that other ranks have, too."""
    return torch_private.is_ddp(stage.submod) and len(group_ranks(stage.submod)) > 1


def flight_recorder_switch(c10d: Any, version: str) -> str:
    """The variable that turns torch's Flight Recorder on, empty where it is on by itself (2.12).

    ``TORCH_FR_BUFFER_SIZE`` from ``_dump_fr_trace`` on (2.8), which warns of the older name,
    ``TORCH_NCCL_TRACE_BUFFER_SIZE``. The default shows in nothing but the version's number.

    Args:
        c10d: ``torch._C._distributed_c10d``.
        version: torch's.
    """
    words = version.split(".")
    if [int(word) if word.isdigit() else 0 for word in words[:2]] >= [2, 12]:
        return ""
    newer = hasattr(c10d, "_dump_fr_trace")
    return "TORCH_FR_BUFFER_SIZE" if newer else "TORCH_NCCL_TRACE_BUFFER_SIZE"


def flight_recorders(torch: Any) -> list[Callable[[], bytes]]:
    """What dump torch's Flight Recorders as pickles of our own process; empty without any.

    Without stack traces (``includeStackTraces``, 2.4 to 2.15), whose symbols torch would import its
    compiler for, in whichever thread asks.

    ``_dump_fr_trace`` (2.8 to 2.15) has what gloo did, ``_dump_nccl_trace`` (2.3 to 2.15) what NCCL
    did, where torch was built with it. From ``FlightRecorderHook`` on (2.15) every other backend,
    that which "nccl" then is among them, has a recorder under its name. Without them a wait for
    DDP's own collectives is known by the backward that idles, and they have no number.
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


# -- collective timeouts, lifted while a rank is stopped in the debugger: its peers wait for it


LIFTED_TIMEOUT = datetime.timedelta(days=7)
"""What takes the place of the job's timeouts; it fits into the 32-bit milliseconds of a store."""

_lifted = False
_least_timeout = datetime.timedelta(0)

_changed_timeouts: dict[int, tuple[Any, datetime.timedelta, datetime.timedelta]] = {}
"""Backends whose timeout was changed, by id: the backend, the job's timeout, and ours."""

_changing = threading.Lock()


def least_timeout() -> datetime.timedelta:
    """What every timeout has to be at least now; zero as long as nothing is wanted."""
    return LIFTED_TIMEOUT if _lifted else _least_timeout


def lift_timeouts() -> None:
    """Lift the timeouts of all process groups of this process, and of those that come later."""
    global _lifted
    _lifted = True
    update_timeouts()


def restore_timeouts() -> None:
    """Give every group back the timeout it had, unless the job has set another one meanwhile."""
    global _lifted
    _lifted = False
    update_timeouts()


def keep_timeouts_at_least(timeout: datetime.timedelta) -> None:
    """Have no timeout below ``timeout``, to the end of the process."""
    global _least_timeout
    _least_timeout = max(_least_timeout, timeout)
    update_timeouts()


def update_timeouts() -> None:
    """Bring the timeouts of all groups, new ones included, to where they have to be."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return
    with _changing:
        for backend in backends(c10d):
            current = timeout_of(backend)
            if current is None:
                continue
            _, users, ours = _changed_timeouts.get(id(backend), (None, current, current))
            if current != ours:
                # Set by the job itself since.
                users = current
            _change_timeout(backend, current, users)


def kept_timeout() -> float | None:
    """The seconds of the shortest timeout that cannot be lifted any more; None where all can."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    found = [
        timeout.total_seconds()
        for backend in (backends(c10d) if c10d is not None else ())
        if keeps_timeout(backend)
        and (timeout := timeout_of(backend)) is not None
        and timeout < LIFTED_TIMEOUT
    ]
    return min(found, default=None)


def note_backends(backends: list[Any], timeout: datetime.timedelta) -> None:
    """New backends were made with :func:`least` in place of the job's ``timeout``."""
    with _changing:
        for backend in backends:
            current = timeout_of(backend)
            if id(backend) not in _changed_timeouts and current is not None:
                _change_timeout(backend, current, timeout)


def _change_timeout(backend: Any, current: datetime.timedelta, users: datetime.timedelta) -> None:
    wanted = max(users, least_timeout())
    if wanted != current:
        set_timeout(backend, wanted)
    if wanted == users:
        _changed_timeouts.pop(id(backend), None)
    else:
        _changed_timeouts[id(backend)] = (backend, users, wanted)
