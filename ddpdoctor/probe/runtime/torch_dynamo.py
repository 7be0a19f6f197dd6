"""The private parts of Dynamo that the probe uses.

As with `ddpdoctor.probe.runtime.torch_private`, each is guarded by the feature.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any


def skip_frames(torch: Any, modules: Iterable[ModuleType]) -> None:
    """Have Dynamo leave the functions of ``modules`` alone, with all that they call.

    They run between the graphs of a compiled region. ``torch._C._dynamo.eval_frame`` marks code
    objects at no cost per call: ``set_code_exec_strategy`` (2.7 to 2.15), ``skip_code`` before.
    Without either, Dynamo compiles them: slower to warm up, the same results.
    """
    mark = _marker(getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None))
    if mark is None:
        return
    for module in modules:
        for owner in (module, *(v for v in vars(module).values() if isinstance(v, type))):
            for value in vars(owner).values():
                if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                    mark(value.__code__)


def skip_wrappers(torch: Any, codes: Iterable[CodeType]) -> None:
    """Have Dynamo leave functions alone that call others of the job's, but not those others."""
    mark = _marker(getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None), within=False)
    if mark is not None:
        for code in codes:
            mark(code)


def _marker(eval_frame: Any, within: bool = True) -> Callable[[CodeType], object] | None:
    setter = getattr(eval_frame, "set_code_exec_strategy", None)
    action = getattr(eval_frame, "_FrameAction", None)
    strategy = getattr(eval_frame, "_FrameExecStrategy", None)
    if setter is not None and action is not None and strategy is not None:
        skip = strategy(action.SKIP, action.SKIP if within else action.DEFAULT)
        return lambda code: setter(code, skip)
    older: Callable[[CodeType], object] | None = getattr(eval_frame, "skip_code", None)
    return older


def disable_dynamo(torch: Any, function: Any, recursive: bool) -> Any:
    """``torch._disable_dynamo`` (2.4 to 2.15), which imports Dynamo only when first called.

    Without it the function is returned as it is.
    """
    disable = getattr(torch, "_disable_dynamo", None)
    return function if disable is None else disable(function, recursive=recursive)


def has_compiled() -> bool:
    """Whether ``torch.compile`` took functions here: ``torch._dynamo.utils.counters``, 2.0 to 2.15.

    Without it users do not learn that breakpoints in such functions are not hit (debugpy#999).
    """
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    # Not by index: these make an entry where there is none, and they are the job's.
    return bool((counters or {}).get("frames", {}).get("ok"))
