"""Parameters that are changed between a fingerprint and the next optimizer step, by other code."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from ddpdoctor.probe.observers.tensor_hashes import MOST_TENSORS
from ddpdoctor.run.records.replicas import OutsideRecord

NAMED = 8
"""Parameters that a record names; it counts the rest."""


class Versions:
    """How often parameters had been written, and where they lay, after a step.

    Args:
        step: Its number; -1 before the first one.
    """

    def __init__(self, step: int = -1) -> None:
        self._step = step
        self._noted: list[tuple[int, str, weakref.ref[Any], int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._noted)

    def note(self, module: int, named: list[tuple[str, Any]]) -> None:
        """Note the parameters of a module as they are now."""
        self._noted += [
            (module, name, weakref.ref(each), each._version, each.data_ptr())
            for name, each in named[:MOST_TENSORS]
        ]

    def changed(self) -> Iterator[OutsideRecord]:
        """What has been changed since, by module; all is forgotten."""
        noted, self._noted = self._noted, []
        changed: dict[int, list[str]] = {}
        for module, name, ref, *before in noted:
            parameter = ref()
            if parameter is not None and [parameter._version, parameter.data_ptr()] != before:
                changed.setdefault(module, []).append(name)
        for module, names in changed.items():
            yield OutsideRecord(
                step=self._step, module=module, count=len(names), names=tuple(names[:NAMED])
            )
