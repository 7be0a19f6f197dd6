"""The table of known failures: one file for each family, one entry for each failure.

To add one, write an entry into the file of its family: the text in the log (``pattern``), its
meaning (``says``), the fix (``fix``, or "as" with the name of an earlier entry), and printed lines
that show it, as short as possible (``examples``). An entry of a new code brings the code's page.
The keys are those of `Failure` and `Known`. Parts of a pattern are joined. The tests check that
each example is recognised as its own entry, and as no other.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor.core import plugins
from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.entry import Failure, Known, Weight, check_failure

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILES = (
    "rendezvous", "resources", "nccl", "cuda", "network", "script", "frameworks", "endings",
)  # fmt: skip
"""In the order in which entries count that match one line at the same weight."""


def _own() -> Iterator[Failure]:
    fixes: dict[str, str] = {}
    for name in _FILES:
        text = Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8")
        for entry in tomllib.loads(text)["failure"]:
            known = Known(
                entry.pop("code"), entry.pop("name"), Weight[entry.pop("weight")], entry.pop("seen")
            )
            severity = Severity[entry.pop("severity", "ERROR")]
            for key in ("pattern", "within", "unless"):
                entry[key] = "".join(entry.get(key, ""))
            for key in ("says", "fix"):
                entry[key] = " ".join(entry[key].split())
            name = entry["fix"].removeprefix("as ")
            fixes[known.name] = entry["fix"] = fixes.get(name, entry["fix"])
            for key in ("examples", "yields_to", "follows"):
                entry[key] = tuple(entry.get(key, ()))
            yield Failure(known, severity=severity, **entry)


def _with_plugins() -> tuple[Failure, ...]:
    """Add the failures of plug-ins behind ours."""
    failures = {each.known.name: each for each in _own()}
    own = {each.code for each in failures.values()}

    def take(loaded: Any) -> None:
        for failure in [loaded] if isinstance(loaded, Failure) else loaded:
            check_failure(failure)
            if failure.known.name in failures:
                raise ValueError(f"there is a failure {failure.known.name} already")
            failures[failure.known.name] = failure

    plugins.load(plugins.FAILURES, failures, take, known=own)
    return tuple(failures.values())


class Advice(NamedTuple):
    """The next step after an exception.

    Attributes:
        pattern: Matches the exception with its message.
        step: What to do. It can refer to groups of the pattern.
        within: Matches its traceback.
    """

    pattern: re.Pattern[str]
    step: str
    within: re.Pattern[str]


class Phase(NamedTuple):
    """What a process was doing, by a frame of its traceback.

    Attributes:
        frame: Matches the frame with its source.
        doing: The predicate of a sentence.
        usual: What usually fails there.
    """

    frame: re.Pattern[str]
    doing: str
    usual: str


def _advice(which: str) -> tuple[Advice, ...]:
    return tuple(
        Advice(re.compile(pattern), step, re.compile("".join(within)))
        for pattern, step, *within in _ADVICE[which]
    )


_ADVICE = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))

PHRASES = _advice("phrases")
"""By certain words. These steps replace the fix of a failure in the table."""

KINDS = _advice("kinds")
"""By the type of an exception that nothing else explains."""

WORDS = _advice("words")
"""By words in any exception. They say less than the others."""

PHASES = tuple(
    Phase(re.compile(frame, re.MULTILINE), doing, usual)
    for frame, doing, usual in _ADVICE["phases"]
)

TABLE = _with_plugins()
"""All of them; of two that match one line at the same weight, the first one counts."""
