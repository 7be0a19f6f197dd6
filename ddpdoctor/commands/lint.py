"""``ddpdoctor lint``: find misuse of DistributedDataParallel without running the code."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Severity
from ddpdoctor.core.formatting import count
from ddpdoctor.core.options import CODES, Given, Parser, Selection, one_of
from ddpdoctor.lint import files, fixes, output
from ddpdoctor.lint.check import Problem, check
from ddpdoctor.lint.launch_files import YAML

PARSER = Parser(
    "lint",
    """\
Usage: ddpdoctor lint [OPTIONS] PATH...

Find misuse of DistributedDataParallel in training code without running it.
PATH is a Python file, a notebook, a launch file (a batch or shell script, a
PyTorchJob manifest, a configuration of Accelerate or DeepSpeed), or a folder.
Files that import each other are read together. Of frameworks with a loop of
their own (Lightning, Accelerate, ...) nothing is reported.

Options:
  --output FORMAT   text; problems: a line each, as an editor's problem matcher
                    understands it (path:line:col: severity CODE message); json:
                    an object a line; sarif: SARIF 2.1.0; github: annotations of
                    GitHub Actions.
  --select CODES    Report these alone: codes, or how they begin: DDP1,DDP401.
  --ignore CODES    Do not report these.
  --severity LEVEL  Report what is at least as severe: info, warning, error
                    [default: warning].
  --pedantic        Report infos, too.
  --fail-on LEVEL   Exit with 1 if a problem is at least as severe [default:
                    warning].
  --fix             Fix what has one safe answer. Comments and layout stay.
  --diff            Show what --fix would change, and change nothing.
  --statistics      Count the problems of each rule instead of showing them.
  --watch           Check again whenever a file changes, until Ctrl-C.
  -h, --help        Show this text.

`# noqa: DDP103` at a line's end silences the rule there.

Exit status: 0 no problem, 1 problems (see --fail-on), 2 the command line is
wrong.
""",
    {
        "--output": one_of("text", "problems", "json", "sarif", "github"),
        "--select": CODES,
        "--ignore": CODES,
        "--severity": one_of("info", "warning", "error"),
        "--fail-on": one_of("info", "warning", "error"),
    },
)

_EVERY = 0.5  # Seconds between two checks of the files with --watch


def main(words: Sequence[str]) -> int:
    """Check files, and print their problems."""
    given = PARSER.read(words)
    if given.help:
        sys.stdout.write(PARSER.help)
        return 0
    if not given.rest:
        raise DoctorError("lint needs a file or a folder", "for example: ddpdoctor lint train.py")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if "--watch" in given:
        return _watch(given)
    # Syntax trees are used until the end, and searching them for garbage takes a third longer.
    gc.disable()
    if "--diff" in given:
        return _diff(given)
    if "--fix" in given:
        _fix(given)
    found, checked = _check(given)
    _print(given, found, checked)
    limit = Severity[given.get("--fail-on", "warning").upper()]
    return int(any(each.severity >= limit for each in found))


def _check(given: Given) -> tuple[list[Problem], int]:
    sources = [files.read(path) for path in files.find(given.rest)]
    unread = [each.path for each in sources if each.launch and each.path.endswith(YAML)]
    if unread and find_spec("yaml") is None:
        print(f"ddpdoctor: {count(len(unread), 'manifest')} not read, such as {unread[0]}: "
              "pip install 'ddpdoctor[yaml]'", file=sys.stderr)  # fmt: skip
    return _selected(given, sources), len(sources)


def _selected(given: Given, sources: list[files.SourceFile]) -> list[Problem]:
    least = Severity[given.get("--severity", "warning").upper()]
    if "--pedantic" in given:
        least = Severity.INFO
    selection = Selection.given(given)
    return [each for each in check(sources) if each.severity >= least and each.code in selection]


_ROUNDS = 10  # Maximum rounds of fixes, since one may make another possible


def _fix(given: Given) -> None:
    """Fix files until no more fixes are possible."""
    fixed = 0
    for _ in range(_ROUNDS):
        changes = _changes(given)
        for path, (_, after, changed) in changes.items():
            try:
                fixes.write(path, after)
            except OSError as error:
                raise DoctorError(f"{path} cannot be written: {error.strerror}") from None
            fixed += changed
        if not changes:
            break
    print(f"fixed {fixed}", file=sys.stderr)


def _diff(given: Given) -> int:
    """Print the changes of one round of fixes. Return the exit status."""
    changes = _changes(given)
    for path, (before, after, _) in changes.items():
        sys.stdout.writelines(fixes.diff(path, before, after))
    return int(bool(changes))


def _changes(given: Given) -> dict[str, tuple[str, str, int]]:
    """Return the texts before and after safe fixes, and the number of fixes, by file."""
    sources = {each.path: each for each in map(files.read, files.find(given.rest))}
    edits: dict[str, list[tuple[fixes.Edit, ...]]] = {}
    for each in _selected(given, list(sources.values())):
        if each.edits:
            edits.setdefault(each.path, []).append(each.edits)
    changes = {}
    for path, several in edits.items():
        all_ = [edit for one in several for edit in one]
        texts = fixes.texts(path, sources[path].lines, all_)
        if texts is not None and texts[0] != texts[1]:
            changes[path] = (*texts, len(several))
    return changes


def _print(given: Given, found: list[Problem], count: int) -> None:
    form = given.get("--output", "text")
    if "--statistics" in given:
        said = output.statistics(found) + (output.summary(found, count) + "\n")
    elif form == "text":
        said = output.text(found, count)
    else:
        said = {
            "problems": output.problems_lines,
            "json": output.json_lines,
            "sarif": output.sarif,
            "github": output.github,
        }[form](found)
    sys.stdout.write(said)
    sys.stdout.flush()


def _watch(given: Given) -> int:
    """Check whenever a file changes. The lines around each check are for problem matchers."""
    seen: dict[str, int] | None = None
    while True:
        now = files.modified(given.rest)
        if now != seen:
            seen = now
            print("ddpdoctor lint: checking", flush=True)
            found, count = _check(given)
            _print(given, found, count)
            print("ddpdoctor lint: done", flush=True)
        time.sleep(_EVERY)
