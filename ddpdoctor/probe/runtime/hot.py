"""What runs in every step, as compiled code where this package's was compiled for this Python.

``_hot.c`` is compiled when ddpdoctor is installed, if there is a C compiler, and fits one version
of Python alone: that of the job may be another one. Then, and with ``DDPDOCTOR_PURE_PYTHON`` set in
the environment, the same is done in Python.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddpdoctor.probe.runtime import events, rank, shield, sites

core: Any = None
"""The compiled module, None without."""

if not os.environ.get("DDPDOCTOR_PURE_PYTHON"):
    with contextlib.suppress(ImportError):
        core = importlib.import_module("ddpdoctor.probe.runtime._hot")

if TYPE_CHECKING or core is None:
    from ddpdoctor.probe.runtime.phases import Phases
    from ddpdoctor.probe.runtime.sites import Chain
else:
    Phases, Chain = core.Phases, core.Chain
    core.bind(vars(rank), vars(events), shield.off, shield.fault, sites.walk, sites.memos)

step_begins: Callable[[Any], bool] | None = None if core is None else core.step_begins
"""What an optimizer's step that begins is in a light step; False: nothing was done."""

step_ended: Callable[[Any], bool] | None = None if core is None else core.step_ended
"""The same of one that has ended."""

__all__ = ["Chain", "Phases", "core", "step_begins", "step_ended"]
