"""Run the hooks of every step as compiled code, if it was compiled for this Python.

``_hot.c`` is compiled when ddpdoctor is installed, if there is a C compiler, and fits one version
of Python only. If the job's Python is another one, or with ``DDPDOCTOR_PURE_PYTHON`` set in the
environment, the same is done in Python.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

from ddpdoctor.probe.runtime import events, rank, shield, sites

P = ParamSpec("P")

core: Any = None  # the compiled module, if there is one
CONTRACT = 5
"""The version of its interface. A module of another version, left in a checkout, is ignored."""

if not os.environ.get("DDPDOCTOR_PURE_PYTHON"):
    with contextlib.suppress(ImportError):
        core = importlib.import_module("ddpdoctor.probe.runtime._hot")
        core = core if getattr(core, "CONTRACT", 0) == CONTRACT else None

if TYPE_CHECKING or core is None:
    from ddpdoctor.probe.runtime.phases import Calls, Phases
    from ddpdoctor.probe.runtime.sites import Chain
else:
    Calls, Chain, Phases = core.Calls, core.Chain, core.Phases
    core.bind(vars(rank), vars(events), shield.off, shield.fault, sites.walk, sites.memos)
    events.shielded = lambda function: core.Shielded(function, shield.name_of(function))


def _for_python(optimizer: Any) -> bool:
    return False


step_begins: Callable[[Any], bool] = _for_python if core is None else core.step_begins
"""Begin an optimizer's step if compiled code can, as in a light step. Return whether it did."""

step_ended: Callable[[Any], bool] = _for_python if core is None else core.step_ended
"""End an optimizer's step in the same way."""


def deferring(hook: Callable[P, None]) -> Callable[P, None]:
    """Defer Ctrl-C in a hook that C++ calls until the work of C++ is done, as without the hook.

    Return the hook itself without the compiled module, because Python cannot do that.
    """
    return hook if core is None else core.deferring(hook)


def initializes(more: int) -> None:
    """Add to the number of calls under way that step an optimizer without training."""
    if core is not None:
        core.initializes(more)


def use_torch(torch: Any) -> None:
    """Give the core the parts of torch that it needs."""
    if core is not None:
        core.use_torch(torch.is_grad_enabled, vars(torch.compiler))


__all__ = [
    "Calls", "Chain", "Phases", "core", "deferring", "initializes",
    "step_begins", "step_ended", "use_torch",
]  # fmt: skip
