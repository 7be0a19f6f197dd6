"""``ddpdoctor compare``: compare two runs, and fail if one is slower or takes more memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from ddpdoctor.commands.report import chosen, is_foreign, print_lines, snapshot
from ddpdoctor.core import formatting
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import binary_size, json_text, named, shown
from ddpdoctor.core.options import FILE, Parser, Value
from ddpdoctor.diagnose.speed.compare import Change, Comparison, Judged, compare, judge
from ddpdoctor.render.json_lines import FORMAT

UNREADABLE = 3  # Exit status if there is nothing to compare
_SHARE = re.compile(r"\+?(\d{1,4}(?:\.\d{1,3})?)%")
_TIME_LIMIT, _MEMORY_LIMIT = "--max-step-time", "--max-memory"


def _share(word: str) -> float:
    match = _SHARE.fullmatch(word)
    if match is None:
        raise ValueError
    return float(match[1]) / 100


_LIMIT = Value(_share, "an increase in percent, such as +5%")

PARSER = Parser(
    "compare",
    """\
Usage: ddpdoctor compare [OPTIONS] RUN RUN

Compare two runs, the older one first: the times of a step and of its parts,
the memory, and what changed in command, versions and code. With a limit it is
a gate for CI.

RUN is a run's id, its directory, or a copy of it from another machine.

Options:
  --max-step-time PERCENT
                    Fail if the median step takes so much longer, such as +5%.
  --max-memory PERCENT
                    Fail if the rank with the most memory takes so much more.
  --junit FILE      Write each limit as a test case into a JUnit file.
  --json            Print one JSON object.
  -h, --help        Show this text.

The first 10 steps do not count. A step that is slower by more than its limit
is no failure while the runs' own variation explains it. Memory is the peak of
torch's allocator on a GPU, otherwise the resident memory of the rank.

Exit status: 0; 1 a limit is exceeded; 2 for bad input; 3 there is no such run,
or a limit cannot be judged, such as for a run of few steps.
""",
    {_TIME_LIMIT: _LIMIT, _MEMORY_LIMIT: _LIMIT, "--junit": FILE},
)


def main(words: Sequence[str]) -> int:
    """Compare two runs. Returns the exit status."""
    given = PARSER.read(words)
    if len(given.rest) != 2:
        raise DoctorError("compare takes two runs", "ddpdoctor compare BEFORE AFTER")
    limits = {name: given.get(name) for name in (_TIME_LIMIT, _MEMORY_LIMIT) if name in given}
    if "--junit" in given and not limits:
        raise DoctorError("--junit needs a limit", "for example: --max-step-time +5%")
    try:
        found = _compared(given.rest)
    except DoctorError as error:
        raise DoctorError(error.message, error.hint, status=UNREADABLE) from None
    changes = {_TIME_LIMIT: found.total, _MEMORY_LIMIT: found.memory}
    judged = [judge(name[2:], changes[name], limit) for name, limit in limits.items()]
    print_lines(_json(found, judged) if "--json" in given else _lines(found, judged))
    if "--junit" in given:
        _write_junit(given.get("--junit"), found, judged)
    if any(each.unknown for each in judged):
        return UNREADABLE
    return int(any(each.exceeded for each in judged))


def report(names: Sequence[str], *, json: bool) -> int:
    """Print the comparison of two runs. Returns 0, because a difference is not a finding."""
    found = _compared(names)
    print_lines(_json(found) if json else _lines(found))
    return 0


def _compared(names: Sequence[str]) -> Comparison:
    paths = [chosen(name)[0] for name in names]
    for path in paths:
        is_foreign(path)
    before, after = map(snapshot, paths)
    return compare(before, after)


_MAX_RANKS = 8  # Maximum number of ranks that get their own line
_MIN_CHANGE = 0.01  # Changes below this share of a step do not count


def _lines(found: Comparison, judged: Sequence[Judged] = ()) -> Iterator[str]:
    """Yield the comparison as text, the verdict first."""
    yield from map(_limit_line, judged)
    yield _verdict(found)
    yield ""
    yield f"  {'a step, median':<16}{'before':>10}{'after':>10}   change"
    for each in (*found.phases, found.total):
        yield f"  {each.name:<16}{_time(each.before):>10}{_time(each.after):>10}   {_change(each)}"
    if found.memory.before and found.memory.after:
        sizes = f"{binary_size(found.memory.before):>10}{binary_size(found.memory.after):>10}"
        share = found.memory.difference / found.memory.before
        yield f"  {found.memory.name:<16}{sizes}   {share:+.0%}"
    if found.unsplit:
        yield "  The wait for others is part of backward in one of the runs: compare their sum."
    if found.ranks:
        yield ""
        yield "own time of ranks"
        for each in found.ranks[:_MAX_RANKS]:
            where = found.slowest_phase[each.name]
            times = f"{_time(each.before):>10}{_time(each.after):>10}"
            yield f"  {'rank ' + each.name:<16}{times}   {_change(each)}, most of it in {where}"
        if more := [int(each.name) for each in found.ranks[_MAX_RANKS:]]:
            yield f"  and {named(more)}"
    yield ""
    yield "changed" if found.facts or found.script else "command, versions and code are the same"
    for fact in found.facts:
        yield f"  {fact.name}"
        yield f"    before: {fact.before or '-'}"
        yield f"    after:  {fact.after or '-'}"
    for line in found.script:
        yield f"  {line}"


def _json(found: Comparison, judged: Sequence[Judged] = ()) -> Iterator[str]:
    """Yield the comparison as one JSON object. Times are in seconds; ``ranks`` has own times."""
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
            "memory": {"before": found.memory.before, "after": found.memory.after},
            "limits": {
                each.name: {
                    "limit": each.limit,
                    "change": each.share,
                    "variation": each.noise,
                    "exceeded": each.exceeded,
                    "unknown": each.unknown,
                }
                for each in judged
            },
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
    # If a rank's own time explains a longer wait, it is the cause.
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


def _limit_line(each: Judged) -> str:
    """Return a line on whether a limit was kept."""
    name = each.name.removeprefix("max-").replace("-", " ")
    if each.unknown:
        return f"not judged: {name}: {each.unknown}"
    change = f"{name} {each.share:+.1%}, limit {each.limit:+.1%}"
    if each.exceeded:
        return f"failed: {change}"
    if each.share > each.limit:
        return f"passed: {change}, within the variation of {each.noise:.1%}"
    return f"passed: {change}"


def _in_xml(text: str) -> str:
    """Replace the characters that XML cannot hold."""
    return shown(text).translate({0xFFFE: "?", 0xFFFF: "?"})


def _write_junit(name: str, found: Comparison, judged: Sequence[Judged]) -> None:
    """Write each limit as a test case.

    Raises:
        DoctorError: The file cannot be written.
    """
    suite = ElementTree.Element(
        "testsuite",
        name="ddpdoctor compare",
        tests=str(len(judged)),
        failures=str(sum(each.exceeded for each in judged)),
        errors=str(sum(bool(each.unknown) for each in judged)),
    )
    for each in judged:
        case = ElementTree.SubElement(suite, "testcase", classname="ddpdoctor", name=each.name)
        line = _in_xml(_limit_line(each))
        if each.unknown or each.exceeded:
            kind = "error" if each.unknown else "failure"
            ElementTree.SubElement(case, kind, message=line).text = "\n".join(
                map(_in_xml, _lines(found))
            )
        else:
            ElementTree.SubElement(case, "system-out").text = line
    try:
        Path(name).write_bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))
    except OSError as error:
        raise DoctorError(
            f"cannot write {name}: {error.strerror}", "name another file", status=UNREADABLE
        ) from None
