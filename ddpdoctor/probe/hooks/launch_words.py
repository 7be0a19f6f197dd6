"""How a script takes its place in the launch: the local rank it parsed, and ``nn.DataParallel``.

torchrun tells each worker its local rank in ``LOCAL_RANK``, never on the command line: a script
that reads it from an option has the option's default on every rank.
"""

from __future__ import annotations

import functools
import re
import weakref
from types import ModuleType
from typing import Any

from ddpdoctor.probe.runtime import events, rank, shield
from ddpdoctor.probe.runtime.sites import Site, caller

_READ = re.compile(r"\.local_rank\b(?!\s*=[^=])")

_OPTION = re.compile(r"--?local[-_]rank$")

_option: Site | None = None
"""Where the option was added."""

_parsed: tuple[weakref.ref[Any], Site] | None = None
_parallel: Site | None = None


def install_argparse(argparse: ModuleType) -> None:
    """Wrap ``parse_known_args``, which ``parse_args`` calls, and ``add_argument``."""
    _install_add_argument(argparse)
    parser_class = argparse.ArgumentParser
    original = parser_class.parse_known_args

    @functools.wraps(original)
    def parse_known_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        _note(result)
        return result

    parser_class.parse_known_args = parse_known_args
    events.ddp_built.append(_built)


def _install_add_argument(argparse: ModuleType) -> None:
    container_class = argparse._ActionsContainer
    original = container_class.add_argument

    @functools.wraps(original)
    def add_argument(self: Any, *args: Any, **kwargs: Any) -> Any:
        _added(args)
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise

    container_class.add_argument = add_argument


@shield.shielded
def _added(names: tuple[Any, ...]) -> None:
    global _option
    if any(isinstance(name, str) and _OPTION.match(name) for name in names):
        _option = caller()


@shield.shielded
def _note(result: Any) -> None:
    global _parsed
    if _parsed is None and hasattr(result[0], "local_rank"):
        _parsed = weakref.ref(result[0]), caller()


@shield.shielded
def _built(ddp: Any) -> None:
    """By now the script has had its chance to put the environment's local rank there."""
    global _parsed
    state = rank.current()
    if _parsed is None or state is None:
        return
    (reference, site), _parsed = _parsed, None
    options = reference()
    told, here = getattr(options, "local_rank", None), rank.environment_int("LOCAL_RANK")
    if here is None or not isinstance(told, int) or told == here:
        return
    use = _use(site)
    if not use:
        return
    added = _option if _option is not None and _option.path else site
    state.recorder.add(
        {
            "kind": "local_rank",
            "parsed": told,
            "environment": here,
            "path": added.path,
            "line": added.line,
            "used": [site.path, use],
        }
    )


def _use(site: Site) -> int:
    """The first line of the file that parsed the option which does anything with it; 0 if none."""
    try:
        with open(site.path, encoding="utf-8", errors="replace") as file:
            lines = enumerate(file, 1)
            return next((n for n, line in lines if _READ.search(line.partition("#")[0])), 0)
    except OSError:
        return 0


def install_data_parallel(module: ModuleType) -> None:
    """Wrap ``torch.nn.DataParallel``'s construction."""
    parallel_class = module.DataParallel
    original = parallel_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        _wrapped()
        try:
            original(self, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise

    parallel_class.__init__ = __init__
    events.rank_ends.append(_tell)


@shield.shielded
def _wrapped() -> None:
    global _parallel
    _parallel = _parallel or caller()


@shield.shielded
def _tell() -> None:
    state = rank.current()
    if _parallel is not None and state is not None:
        state.recorder.add(
            {"kind": "data_parallel", "path": _parallel.path, "line": _parallel.line}
        )
