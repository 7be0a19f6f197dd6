"""Collective timeouts, lifted while a rank stands in the debugger: its peers wait for it.

A collective that was already waiting keeps the timeout it began with.
"""

from __future__ import annotations

import datetime
import sys
import threading
from typing import Any

from ddpdoctor.probe import torch_private

LIFTED = datetime.timedelta(days=7)
"""What takes the place of the job's timeouts; it fits into the 32-bit milliseconds of a store."""

lifted = False
"""Whether the timeouts are lifted now; new groups are asked for accordingly."""

_pinned = False

_users: list[tuple[Any, datetime.timedelta]] = []
"""Backends whose timeout was lifted, with the one they had."""

_changing = threading.Lock()


def lift(to_the_end: bool = False) -> None:
    """Lift the timeouts of all process groups of this process, and of those that come later."""
    global lifted, _pinned
    lifted = True
    _pinned |= to_the_end
    sweep()


def sweep() -> None:
    """Lift the timeouts of groups that are new since they were lifted."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not lifted:
        return
    with _changing:
        known = {id(backend) for backend, _ in _users}
        for backend in torch_private.backends(c10d):
            timeout = torch_private.timeout_of(backend)
            if id(backend) not in known and timeout is not None and timeout < LIFTED:
                torch_private.set_timeout(backend, LIFTED)
                _users.append((backend, timeout))


def made(backends: list[Any], timeout: datetime.timedelta) -> None:
    """New backends were made with `LIFTED` in place of the job's ``timeout``."""
    with _changing:
        known = {id(backend) for backend, _ in _users}
        _users.extend((backend, timeout) for backend in backends if id(backend) not in known)


def restore() -> None:
    """Give every group back the timeout it had, unless the job has set another one meanwhile."""
    global lifted
    if _pinned:
        return
    lifted = False
    with _changing:
        for backend, timeout in _users:
            if torch_private.timeout_of(backend) == LIFTED:
                torch_private.set_timeout(backend, timeout)
        _users.clear()
