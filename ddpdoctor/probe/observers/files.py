"""Files that ``torch.save`` writes, and GPUs that ``torch.load`` puts tensors on.

A checkpoint that several ranks write to one path is torn now and then; one with the wrapper's
``module.`` keys does not load into a bare model. Without ``map_location`` every rank loads tensors
to where they were saved from, mostly the first GPU, and makes a CUDA context there that stays.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from ddpdoctor.probe.runtime import rank, torch_private
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.sites import caller
from ddpdoctor.run.records.data import GpuLoadRecord, SaveRecord

MOST = 50
"""Different paths, and loads, that a rank records; a job may give each file a new name."""

_DEPTH = 3
_PREFIX = "module."


def loaded(device: Any, mapped: bool) -> None:
    """``torch.load`` put a storage on a GPU; ``mapped``: it was given a ``map_location``."""
    site = caller()
    record = GpuLoadRecord(
        time=time.time_ns(),
        device=str(device),
        device_uuid=torch_private.device_uuid(sys.modules["torch"], device),
        mapped=mapped,
        **site.place,
    )
    rank.add(record, MOST, once=("load", site.path, site.line, str(device)))


class Checkpoints(Observer):
    """The checkpoints that a rank saves."""

    def saves(self, content: Any, file: Any) -> None:
        """Record the file, once for each kind of content."""
        path = regular_file(file)
        if path:
            kind = _content(content)
            record = SaveRecord(
                time=time.time_ns(),
                file=path,
                content=kind,
                step=self.state.tracker.steps,
                **caller().place,
            )
            self.state.add(record, MOST, once=("save", path, kind))


def path_of(file: Any) -> str:
    """The path, through links, of what was given to ``torch.save`` or ``torch.load``, or empty."""
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    path = os.fspath(name) if isinstance(name, (str, os.PathLike)) else ""
    return os.path.realpath(path) if isinstance(path, str) and path else ""


def regular_file(file: Any) -> str:
    """The same of a regular file; empty for a buffer or a device."""
    path = path_of(file)
    return "" if os.path.exists(path) and not os.path.isfile(path) else path


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
    nested = list(obj.values())[:20] if depth else []
    return next(
        (found for each in nested if (found := _content(each, depth - 1)) != "data"), "data"
    )
