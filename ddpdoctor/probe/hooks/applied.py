"""What ``load_state_dict(strict=False)`` applied: it passes over names that do not fit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ddpdoctor.probe.runtime import events, rank, shield
from ddpdoctor.probe.runtime.sites import caller
from ddpdoctor.run.records.base import JsonObject

MOST = 50
"""Loads that a rank tells."""

SHARE = 0.5
"""More of the names than this match where a head alone is new."""

_SHOWN = 3

_early: dict[int, JsonObject] = {}
"""Loads that applied little, by module, before this process was a rank."""

_told: dict[int, int] = {}
"""The numbers of those that were told, by module."""


def install(module: ModuleType) -> None:
    """Wrap ``torch.nn.Module.load_state_dict``."""
    original = module.Module.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, state_dict, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        _loaded(self, state_dict, result)
        return result

    module.Module.load_state_dict = load_state_dict
    events.ddp_built.append(_joined)
    events.rank_ends.append(_flush)


@shield.shielded
def _loaded(module: Any, given: Any, result: Any) -> None:
    missing = getattr(result, "missing_keys", None)
    unexpected = getattr(result, "unexpected_keys", None)
    if not isinstance(given, Mapping) or missing is None or unexpected is None:
        return
    record = _record(given, list(missing), list(unexpected))
    state = rank.current()
    key = id(module)
    _early.pop(key, None)
    if record is None:
        number = _told.pop(key, None)
        if number is not None and state is not None:
            state.recorder.add({"kind": "applied", "number": number})
    elif len(_told) + len(_early) < MOST:
        _early[key] = record
        if state is not None:
            _flush()


def _record(
    given: Mapping[Any, Any], missing: list[str], unexpected: list[str]
) -> JsonObject | None:
    """What was passed over, if it was most; None where names are left over on one side only.

    A part of a checkpoint for a part of a model leaves none over on the side of the smaller one.
    """
    if not missing or not unexpected:
        return None
    matched = len(given) - len(unexpected)
    fits = min(len(given), matched + len(missing))
    if matched > SHARE * fits:
        return None
    site = caller()
    return {
        "kind": "not_applied",
        "matched": matched,
        "given": len(given),
        "wanted": matched + len(missing),
        "missing": missing[:_SHOWN],
        "unexpected": unexpected[:_SHOWN],
        **_prefix(missing, unexpected),
        "path": site.path,
        "line": site.line,
    }


def _prefix(missing: Sequence[str], unexpected: Sequence[str]) -> JsonObject:
    """The prefix that most names have on one side only: ``of`` the checkpoint or the model."""
    for of, short, long in (
        ("checkpoint", missing, unexpected),
        ("model", unexpected, missing),
    ):
        first = next((name for name in long if name.endswith("." + short[0])), "")
        prefix = first[: len(first) - len(short[0])]
        known = set(long)
        if prefix and sum(prefix + name in known for name in short) > SHARE * len(short):
            return {"prefix": prefix, "of": of}
    return {}


@shield.shielded
def _joined(ddp: Any) -> None:
    _flush()


@shield.shielded
def _flush() -> None:
    state = rank.current()
    while state is not None and _early:
        key, record = _early.popitem()
        _told[key] = len(_told)
        state.recorder.add({**record, "number": _told[key]})


def forget() -> None:
    """In a forked child: nothing has been told yet."""
    _early.clear()
    _told.clear()
