"""Print two runs side by side, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core import formatting
from ddpdoctor.core.formatting import json_text, named
from ddpdoctor.diagnose.speed.compare import Change, Comparison
from ddpdoctor.render.json_lines import FORMAT

MAX_RANKS = 8  # Ranks with a line of their own
_MIN_CHANGE = 0.01  # Changes below this share of a step do not count


def lines(found: Comparison) -> Iterator[str]:
    """Yield the comparison as text, the verdict first."""
    yield _verdict(found)
    yield ""
    yield f"  {'a step, median':<16}{'before':>10}{'after':>10}   change"
    for each in (*found.phases, found.total):
        yield f"  {each.name:<16}{_time(each.before):>10}{_time(each.after):>10}   {_change(each)}"
    if found.unsplit:
        yield "  The wait for others is part of backward in one of the runs: compare their sum."
    if found.ranks:
        yield ""
        yield "own time of ranks"
        for each in found.ranks[:MAX_RANKS]:
            where = found.slowest_phase[each.name]
            times = f"{_time(each.before):>10}{_time(each.after):>10}"
            yield f"  {'rank ' + each.name:<16}{times}   {_change(each)}, most of it in {where}"
        more = [int(each.name) for each in found.ranks[MAX_RANKS:]]
        if more:
            yield f"  and {named(more)}"
    yield ""
    yield "changed" if found.facts or found.script else "command, versions and code are the same"
    for fact in found.facts:
        yield f"  {fact.name}"
        yield f"    before: {fact.before or '-'}"
        yield f"    after:  {fact.after or '-'}"
    for line in found.script:
        yield f"  {line}"


def json_lines(found: Comparison) -> Iterator[str]:
    """Yield the comparison as one JSON object. Times are seconds, of ``ranks`` their own time."""
    yield json_text(
        {
            "format": FORMAT,
            "before": found.names[0],
            "after": found.names[1],
            "step": _seconds(found.total),
            "phases": {each.name: _seconds(each) for each in found.phases},
            "ranks": {
                each.name: {**_seconds(each), "phase": found.slowest_phase[each.name]}
                for each in found.ranks
            },
            "changed": {each.name: [each.before, each.after] for each in found.facts},
            "script": list(found.script),
        }
    )


def _verdict(found: Comparison) -> str:
    before, after = found.names
    total = found.total
    if total.before is None or total.after is None:
        missing = " and ".join(
            name for name, value in zip(found.names, (total.before, total.after), strict=True)
            if value is None
        )  # fmt: skip
        return f"{before} and {after} cannot be compared by speed: {missing} closed no step"
    if abs(total.difference) < _MIN_CHANGE * total.before:
        return f"{after} is as fast as {before}: {_time(total.after)} a step"
    sign = 1 if total.difference > 0 else -1
    text = f"{after} is {'slower' if sign > 0 else 'faster'} than {before}: {_change(total)} a step"
    # A rank's own time is the cause of a longer wait, if it explains it.
    *own, wait = found.phases
    most = max(own, key=lambda each: sign * each.difference)
    rank = max(found.ranks, key=lambda each: sign * each.difference, default=None)
    half = abs(total.difference) / 2
    if rank and sign * rank.difference >= max(half, 2 * sign * most.difference):
        return f"{text}, on rank {rank.name}, in {found.slowest_phase[rank.name]}"
    if sign * most.difference < half <= sign * wait.difference:
        what = "waiting for the other ranks" if len(found.ranks) > 1 else "the all-reduce"
        return f"{text}, most of it in {what}"
    return f"{text}, most of it in {most.name}"


def _change(each: Change) -> str:
    """Return the change, as in ``+41.0 ms (+18 %)``."""
    if each.before is None or each.after is None:
        return "-"
    sign = "+" if each.difference >= 0 else "-"
    share = f" ({sign}{abs(each.difference) / each.before:.0%})" if each.before > 0 else ""
    return f"{sign}{_time(abs(each.difference))}{share}"


def _time(nanoseconds: float | None) -> str:
    return formatting.MISSING if nanoseconds is None else formatting.time(nanoseconds / 1e9)


def _seconds(each: Change) -> dict[str, float | None]:
    return {
        "before": None if each.before is None else each.before / 1e9,
        "after": None if each.after is None else each.after / 1e9,
    }
