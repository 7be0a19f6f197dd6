"""Call a function right after a module was imported, without importing it ourselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from ddpdoctor.probe.runtime.shield import fault

OnImport = Callable[[ModuleType], None]


class _Finder:
    """A finder that finds what the others find, and adds a call after the module ran."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[OnImport]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callbacks = self.waiting.pop(name, None)
        if callbacks is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _after_exec(spec, callbacks)
                return spec
        return None


def _after_exec(spec: ModuleSpec, callbacks: list[OnImport]) -> None:
    loader = spec.loader
    if loader is None or not hasattr(loader, "exec_module"):
        return
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # The loader belongs to this one module; afterwards nothing of ours is left on it.
        del loader.__dict__["exec_module"]
        original(module)
        for callback in callbacks:
            _call(callback, module)

    loader.__dict__["exec_module"] = exec_module


def _call(callback: OnImport, module: ModuleType) -> None:
    """A hook that cannot be installed must not make the job's import fail."""
    try:
        callback(module)
    except Exception as error:
        fault(f"{callback.__module__}.{callback.__qualname__}", error)


_finder = _Finder()


def when_imported(name: str, callback: OnImport) -> None:
    """Call ``callback(module)`` once ``name`` is imported, at once if it already is."""
    module = sys.modules.get(name)
    if module is not None:
        _call(callback, module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(callback)
