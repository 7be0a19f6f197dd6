"""Files that ``torch.save`` writes: which rank, which path, and what kind of keys.

A checkpoint that several ranks write to one path is torn now and then; one with the wrapper's
``module.`` keys does not load into a bare model.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ddpdoctor.probe.runtime import rank, shield
from ddpdoctor.probe.runtime.sites import caller

MOST = 50
"""Different paths that a rank tells; a job that names each file anew would never end."""

_DEPTH = 3
_PREFIX = "module."

_told: set[tuple[str, str]] = set()


def install(serialization: ModuleType) -> None:
    """Wrap ``torch.save`` before ``torch`` copies the name."""
    original = serialization.save

    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if rank.active is not None:
            _saved(obj, f)
        try:
            return original(obj, f, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise

    serialization.save = save  # type: ignore[attr-defined]


@shield.shielded
def _saved(obj: Any, file: Any) -> None:
    state = rank.current()
    path = _path(file)
    if state is None or not path or len(_told) >= MOST:
        return
    content = _content(obj)
    if (path, content) in _told:
        return
    _told.add((path, content))
    site = caller()
    state.recorder.add(
        {
            "kind": "save",
            "time": time.time_ns(),
            "file": path,
            "content": content,
            "step": state.tracker.steps,
            "path": site.path,
            "line": site.line,
        }
    )


def _path(file: Any) -> str:
    """The regular file that is written, through links; empty for a buffer or a device."""
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    if not isinstance(name, (str, os.PathLike)):
        return ""
    path = os.path.realpath(os.fspath(name))
    if isinstance(path, bytes) or (os.path.exists(path) and not os.path.isfile(path)):
        return ""
    return path


def _content(obj: Any, depth: int = _DEPTH) -> str:
    """What a checkpoint holds, as DDP502 judges it.

    ``module`` is a pickled model, ``wrapper`` a pickled DDP module, ``wrapped`` are keys with the
    wrapper's prefix, ``data`` is anything else, modules without parameters (a loss) among it.

    A wrapper within the wrapped model gives some of the keys the prefix; all of them have it only
    if they are the outermost wrapper's.
    """
    torch = sys.modules["torch"]
    if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
        return "wrapper"
    if isinstance(obj, torch.nn.Module):
        return "data" if next(obj.parameters(), None) is None else "module"
    if not isinstance(obj, Mapping) or not obj:
        return "data"
    tensors = [key for key, value in obj.items() if isinstance(value, torch.Tensor)]
    if tensors and all(isinstance(key, str) and key.startswith(_PREFIX) for key in tensors):
        return "wrapped"
    if depth:
        for value in list(obj.values())[:20]:
            found = _content(value, depth - 1)
            if found != "data":
                return found
    return "data"


def forget() -> None:
    """In a forked child: nothing has been told yet."""
    _told.clear()
