"""Call hooks around functions of torch and of Python, once their module is imported.

The probe imports none of them. Results and exceptions of a wrapped function stay as they are, and
no frame of ours shows in the traceback (from Python 3.11 on). A function that does not exist is not
wrapped, and facts that depend on it are unknown.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from ddpdoctor.probe.runtime import hot, rank, shield
from ddpdoctor.probe.runtime.shield import fault

# -- imports

OnImport = Callable[[ModuleType], None]


class _ImportFinder:
    """Find modules with the other finders. Call the callbacks once a module has run."""

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
                _after_exec(spec.loader, callbacks)
                return spec
        return None


def _after_exec(loader: Any, callbacks: list[OnImport]) -> None:
    if not hasattr(loader, "exec_module"):
        return
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # The loader belongs to this one module. Leave nothing of ours on it.
        del loader.__dict__["exec_module"]
        original(module)
        for callback in callbacks:
            _call_shielded(callback, module)

    loader.__dict__["exec_module"] = exec_module


def _call_shielded(callback: OnImport, module: ModuleType) -> None:
    # A hook that cannot be installed must not make the job's import fail.
    try:
        callback(module)
    except Exception as error:
        fault(shield.name_of(callback), error)


_import_finder = _ImportFinder()


def when_imported(name: str, callback: OnImport) -> None:
    """Call ``callback(module)`` once ``name`` is imported, at once if it already is."""
    module = sys.modules.get(name)
    if module is not None:
        _call_shielded(callback, module)
        return
    if _import_finder not in sys.meta_path:
        sys.meta_path.insert(0, _import_finder)
    _import_finder.waiting.setdefault(name, []).append(callback)


# -- wrappers

Begin = Callable[..., Any]
End = Callable[[Any, Any, "BaseException | None"], object]


def before(owner: Any, name: str, function: Callable[..., object]) -> None:
    """Call ``function`` with the arguments of ``owner.name`` before each call of it."""
    original = getattr(owner, name, None)
    if original is None:
        return
    safely = shield.shielded(function)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        safely(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise

    setattr(owner, name, call)


def after(owner: Any, name: str, function: Callable[..., object]) -> None:
    """Call ``function`` with result and arguments of each call of ``owner.name`` that returned."""
    original = getattr(owner, name, None)
    if original is None:
        return
    safely = shield.shielded(function)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        safely(result, *args, **kwargs)
        return result

    setattr(owner, name, call)


def around(
    owner: Any,
    name: str,
    hook: str,
    begin: Begin,
    end: End,
    *,
    compiled: bool = False,
    idle: str = "",
    light: str = "",
    waits: bool = False,
) -> None:
    """Call ``begin`` and ``end`` around each call of ``owner.name`` in a rank.

    Args:
        owner: The class or module.
        name: The function's name.
        hook: The name of a fault in either, which switches off both.
        begin: Called with the arguments. If it returns None, ``end`` is not called.
        end: Called with the results of ``begin`` and of the function, and the exception.
        compiled: Whether Dynamo may trace the wrapper. It then sees only the original.
        idle: An attribute of the first argument. If it is true, call the original only.
        light: The kind of call, if compiled code follows it in light steps: autograd's ``engine``,
            or a loader's ``batch`` or ``indices``.
        waits: Whether to ignore the call within a collective, which waits itself.
    """
    original = getattr(owner, name, None)
    if original is None:
        return
    if hot.core is not None and not compiled and not idle:
        # Dynamo would break its graph at such a function.
        made = hot.core.Around(original, hook, begin, end, light, waits)
        setattr(owner, name, functools.update_wrapper(made, original))
        return
    off = shield.off

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if compiled and rank.is_tracing():
            return original(*args, **kwargs)
        begun = None
        rests = idle and getattr(args[0], idle, True)
        if rank.active is not None and hook not in off and not rests:
            try:
                begun = begin(*args, **kwargs)
            except Exception as broken:
                shield.fault(hook, broken)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            if begun is not None:
                _end(hook, end, begun, error)
            raise
        if begun is not None:
            try:
                end(begun, result, None)
            except Exception as broken:
                shield.fault(hook, broken)
        return result

    setattr(owner, name, call)


def _end(hook: str, end: End, begun: Any, error: BaseException) -> None:
    try:
        end(begun, None, error)
    except Exception as broken:
        shield.fault(hook, broken)


CODES = tuple(
    code
    for function in (before, after, around)
    for code in function.__code__.co_consts
    if isinstance(code, CodeType)
)
"""The code of the wrappers, which Dynamo must not compile."""
