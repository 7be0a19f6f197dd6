"""The numbers that evaluations printed, read from a run's output."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.core.syntax import last_name
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.loops.metric_sources import Shown, shown_of
from ddpdoctor.diagnose.parity.evaluation import Evaluation, evaluations_of
from ddpdoctor.run.snapshot import Run

MAX_LINE = 400  # Characters of a line of output
MAX_PARTS = 12  # Values in a line
WORDS = 3  # Words before a number that name it
_LOGS = ("info", "debug", "warning")
_NUMBER = r"(?:tensor\()?([-+]?(?:\d[\d,]*\.?\d*(?:e[-+]?\d+)?|nan|inf))"
_PLACE = re.compile(r"%(?:[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]|%)|\{[^{}]*\}")


class Metric(NamedTuple):
    """A number that a line prints after an evaluation."""

    at: Location
    name: str  # The words before it
    evaluation: Evaluation
    values: tuple[str, ...]  # As they were printed, in their order


def metrics_of(run: Run) -> dict[tuple[Location, int], Metric]:
    """Return the printed results of evaluations, by line and number of the value in it."""
    try:
        output = opening.ending(run.path.with_name(f"{run.path.name}.log"), opening.MOST_TEXT)
    except OSError:
        return {}
    lines = [
        each for each in output.decode("utf-8", "replace").splitlines() if len(each) < MAX_LINE
    ]
    found: dict[tuple[Location, int], Metric] = {}
    for at, evaluation in evaluations_of(run).items():
        for shown in shown_of(run, at):
            parts = _parts_of(shown.call) if shown.call is not None else []
            for number, (name, values) in enumerate(_printed(parts, shown, lines)):
                found.setdefault(
                    (shown.at, number), Metric(shown.at, name, evaluation, tuple(values))
                )
    return found


Parts = list[str | ast.expr]
"""A line of output: texts, and the expressions between them."""


def _printed(parts: Parts, shown: Shown, lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield a name for each result in a line, and the values that it has in the output."""
    texts = [each for each in parts if isinstance(each, str)]
    longest = max((each.strip() for each in texts), key=len, default="")
    if not re.search("[A-Za-z]", longest) or "\n" in longest or len(parts) > 2 * MAX_PARTS:
        return
    names, pattern = [], ""
    for number, each in enumerate(parts):
        if isinstance(each, str):
            pattern += re.escape(each.strip("\n"))
        elif shown.holds(each):
            before = parts[number - 1] if number else ""
            words = re.findall(r"[^\W_][\w@.-]*", before if isinstance(before, str) else "")
            names.append(" ".join(words[-WORDS:]) or last_name(each) or "the result")
            pattern += _NUMBER
        else:
            pattern += f".{{0,{MAX_LINE}}}?"
    matches = [re.search(pattern, line, re.IGNORECASE) for line in lines if longest in line]
    for number, name in enumerate(names, 1):
        yield name, [each[number] for each in matches if each is not None]


def _parts_of(call: ast.Call) -> Parts:
    """Return the parts of what a call prints. Empty if that is not known."""
    called, args = last_name(call.func), list(call.args)
    if called in _LOGS and args:
        return _filled(args[0], args[1:]) if len(args) > 1 else _parts(args[0])
    if called != "print" or any(each.arg == "sep" for each in call.keywords):
        return []
    found: Parts = []
    for each in args:
        found += [*([" "] if found else []), *_parts(each)]
    return found


def _parts(value: ast.expr) -> Parts:
    if isinstance(value, ast.Constant):
        return [str(value.value)]
    if isinstance(value, ast.JoinedStr):
        inner = (
            each.value if isinstance(each, ast.FormattedValue) else each for each in value.values
        )
        return [
            part
            for each in inner
            for part in (_parts(each) if isinstance(each, ast.Constant) else [each])
        ]
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mod):
        right = value.right
        return _filled(value.left, right.elts if isinstance(right, ast.Tuple) else [right])
    if isinstance(value, ast.Call) and last_name(value.func) == "format":
        assert isinstance(value.func, ast.Attribute)
        return _filled(value.func.value, value.args)
    return [value]


def _filled(template: ast.expr, values: Sequence[ast.expr]) -> Parts:
    """Return the parts of a template with values: ``"%.3f" % loss``, ``"{:.3f}".format(loss)``."""
    if not isinstance(template, ast.Constant) or not isinstance(template.value, str):
        return []
    text = template.value
    places = [each for each in _PLACE.finditer(text) if each[0] != "%%"]
    if len(places) != len(values):
        return []
    ends = [0, *(each.end() for each in places)]
    starts = [*(each.start() for each in places), len(text)]
    texts: Parts = [
        text[end:start].replace("%%", "%") for end, start in zip(ends, starts, strict=True)
    ]
    between = [part for pair in zip(texts, values, strict=False) for part in pair]
    return [*between, texts[-1]]
