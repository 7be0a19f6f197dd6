"""Collective timeouts, lifted while a rank is stopped in the debugger: its peers wait for it.

A collective that was already waiting keeps the timeout it began with. Some gloo keeps the one that
its group was made with (:func:`kept`).
"""

from __future__ import annotations

import datetime
import sys
import threading
from typing import Any

from ddpdoctor.probe.runtime import torch_groups

LIFTED = datetime.timedelta(days=7)
"""What takes the place of the job's timeouts; it fits into the 32-bit milliseconds of a store."""

_lifted = False
_least = datetime.timedelta(0)

_users: dict[int, tuple[Any, datetime.timedelta, datetime.timedelta]] = {}
"""Backends whose timeout was changed, by id: the backend, the job's timeout, and ours."""

_changing = threading.Lock()


def least() -> datetime.timedelta:
    """What every timeout has to be at least now; zero as long as nothing is wanted."""
    return LIFTED if _lifted else _least


def lift() -> None:
    """Lift the timeouts of all process groups of this process, and of those that come later."""
    global _lifted
    _lifted = True
    sweep()


def restore() -> None:
    """Give every group back the timeout it had, unless the job has set another one meanwhile."""
    global _lifted
    _lifted = False
    sweep()


def keep_at_least(timeout: datetime.timedelta) -> None:
    """Have no timeout below ``timeout``, to the end of the process."""
    global _least
    _least = max(_least, timeout)
    sweep()


def sweep() -> None:
    """Bring the timeouts of all groups, new ones included, to where they have to be."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return
    with _changing:
        for backend in torch_groups.backends(c10d):
            current = torch_groups.timeout_of(backend)
            if current is None:
                continue
            _, users, ours = _users.get(id(backend), (None, current, current))
            if current != ours:
                # Set by the job itself since.
                users = current
            _set(backend, current, users)


def kept() -> float | None:
    """The seconds of the shortest timeout that cannot be lifted any more; None where all can."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    found = [
        timeout.total_seconds()
        for backend in (torch_groups.backends(c10d) if c10d is not None else ())
        if torch_groups.keeps_timeout(backend)
        and (timeout := torch_groups.timeout_of(backend)) is not None
        and timeout < LIFTED
    ]
    return min(found, default=None)


def made(backends: list[Any], timeout: datetime.timedelta) -> None:
    """New backends were made with :func:`least` in place of the job's ``timeout``."""
    with _changing:
        for backend in backends:
            current = torch_groups.timeout_of(backend)
            if id(backend) not in _users and current is not None:
                _set(backend, current, timeout)


def _set(backend: Any, current: datetime.timedelta, users: datetime.timedelta) -> None:
    wanted = max(users, least())
    if wanted != current:
        torch_groups.set_timeout(backend, wanted)
    if wanted == users:
        _users.pop(id(backend), None)
    else:
        _users[id(backend)] = (backend, users, wanted)
