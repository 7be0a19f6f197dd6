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

from ddpdoctor.probe import events, rank, shield
from ddpdoctor.probe.sites import Site, caller

_READ = re.compile(r"\.local_rank\b(?!\s*=[^=])")

_parsed: tuple[weakref.ref[Any], Site] | None = None
_parallel: Site | None = None


def install_argparse(argparse: ModuleType) -> None:
    """Wrap ``ArgumentParser.parse_known_args``, which ``parse_args`` calls."""
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
    if here is None or not isinstance(told, int) or told == here or not _is_read(site):
        return
    state.recorder.add(
        {
            "kind": "local_rank",
            "parsed": told,
            "environment": here,
            "path": site.path,
            "line": site.line,
        }
    )


def _is_read(site: Site) -> bool:
    """Whether the file that parsed the option does anything with it."""
    try:
        with open(site.path, encoding="utf-8", errors="replace") as file:
            return any(_READ.search(line.partition("#")[0]) for line in file)
    except OSError:
        return False


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
