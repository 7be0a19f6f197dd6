"""What was said of a run, what of it is withdrawn, and that the count at the end is what stands."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.finding import RULES, Finding, Severity
from ddpdoctor.core.job import OwnOptions
from ddpdoctor.core.relations import ABORT, END, MISPAIRED, STANDSTILL
from ddpdoctor.core.user_code import Location
from ddpdoctor.render import reporter
from ddpdoctor.render.reporter import Reporter
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.supervisor import FindingRecord, JobRecord
from ddpdoctor.run.reported import (
    MAX_MISSING,
    Event,
    FindingLog,
    Reported,
    Withdrawn,
    from_journal,
    in_words,
    to_journal,
    with_kept,
)
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase, Status
from ddpdoctor.top.run_files import SupervisorEvents
from tests.conftest import ROOT, Doctor
from tests.support.marks import sick
from tests.support.written import supervisor_records

APART = Finding(
    "DDP701", Severity.ERROR, "rank 1 has other parameters", (1,), about="module 0", moment=5
)
TWICE = Finding("DDP302", Severity.ERROR, "a second backward", (0, 1), Location("/job/t.py", 7))
SLOW = Finding("DDP610", Severity.WARNING, "rank 1 holds the others up", (1,), about="rank 1")
ALL_WAIT = Finding(
    "DDP814", Severity.WARNING, "the job stands still", (0, 1), about="unexplained",
    subjects=frozenset((STANDSTILL,)),
)  # fmt: skip
NEVER_JOINED = Finding(
    "DDP802", Severity.ERROR, "rank 1 never joined", (1,), about="error [1] 7",
    subjects=frozenset((STANDSTILL,)),
)  # fmt: skip
DATA = Finding("DDP102", Severity.ERROR, "all of the data", (0, 1), about="/job/t.py:3")
RAISED = Finding("DDP901", Severity.ERROR, "rank 1 raised", (1,), Location("/job/t.py", 9))
ORDER = Finding("DDP803", Severity.ERROR, "another operation", (1,), Location("/job/t.py", 4))


def run(*, status: int | None = None, restart: int = 0, hang: bool = False) -> Run:
    supervisor: list[JsonObject] = []
    if hang:
        supervisor.append({"kind": "hang", "time": 1, "number": 1, "restart": restart})
    if status is not None:
        supervisor.append({"kind": "job", "time": 2, "status": status})
    ranks = tuple(Rank(rank=0, restart=each, status=None) for each in range(restart + 1))
    written = supervisor_records(*supervisor)
    return Run(path=Path("/run"), manifest={}, ranks=ranks, supervisor=written)


GOES_ON = run()
OVER = run(status=0)


def words(events: Sequence[Event]) -> list[str]:
    return [in_words(e) if isinstance(e, Withdrawn) else f"says {e.finding.code}" for e in events]


def test_a_finding_is_said_once() -> None:
    said = FindingLog()
    assert words(said.take([DATA], GOES_ON)) == ["says DDP102"]
    assert words(said.take([replace(DATA, message="more is known")], GOES_ON)) == []
    assert [each.message for each in said.current] == ["more is known"]


def test_different_parameters_are_said_when_two_examinations_find_them() -> None:
    said = FindingLog()
    assert words(said.take([APART], GOES_ON)) == []
    # The cause was known a moment later.
    assert words(said.take([TWICE], GOES_ON)) == ["says DDP302"]
    said = FindingLog()
    for _ in range(2):
        assert words(said.take([APART], GOES_ON)) == []
        assert words(said.take([], GOES_ON)) == []
    said.take([APART], GOES_ON)
    assert words(said.take([APART], GOES_ON)) == ["says DDP701"]
    assert words(said.take([replace(APART, message="more is known")], GOES_ON)) == []
    assert [each.message for each in said.current] == ["more is known"]


def test_what_another_finding_explains_is_withdrawn_at_once() -> None:
    said = FindingLog()
    said.take([APART], GOES_ON)
    said.take([APART], GOES_ON)
    assert words(said.take([TWICE], GOES_ON)) == [
        "withdrawn DDP701 (rank 1): explained by DDP302 below",
        "says DDP302",
    ]
    assert said.current == [TWICE]


def test_a_standstill_that_passes_is_withdrawn_when_the_job_goes_on() -> None:
    said = FindingLog()
    said.take([ALL_WAIT], run(hang=True))
    assert words(said.take([], run(hang=True))) == []
    assert words(said.take([], GOES_ON)) == ["withdrawn DDP814 (ranks 0, 1): the job went on"]
    assert said.current == []


STARTING = Finding(
    "DDP811", Severity.WARNING, "rank 0 is still starting up", (0,), about="start", moment=5,
    subjects=frozenset((STANDSTILL,)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        (4, "withdrawn DDP811 (rank 0): a later examination does not show it"),
        (6, "over DDP811 (rank 0): the job went on"),
    ],
)
def test_a_slow_start_is_over_though_the_job_stops_again(since: int, expected: str) -> None:
    said, hangs = FindingLog(), run(hang=True)
    status = Status(1, 0, 1, 0, 0, 1, Phase.OTHER, since, 3, None, 3, 0, 0, False, "", "")
    later = replace(hangs, ranks=tuple(replace(each, status=status) for each in hangs.ranks))
    said.take([STARTING], hangs)
    heard = [each for _ in range(MAX_MISSING) for each in words(said.take([], later))]
    assert heard == [expected]


def test_a_better_look_at_a_standstill_takes_the_place_of_the_first_one() -> None:
    said = FindingLog()
    said.take([ALL_WAIT], run(hang=True))
    assert words(said.take([NEVER_JOINED], run(hang=True))) == [
        "withdrawn DDP814 (ranks 0, 1): explained by DDP802 below",
        "says DDP802",
    ]


def test_calls_that_differ_take_the_place_of_the_abort_that_they_led_to() -> None:
    log, met = FindingLog(), frozenset((MISPAIRED,))
    aborted = replace(ORDER, about="", location=None, subjects=met | {f"{END}1", ABORT})
    log.take([aborted], GOES_ON)
    found = replace(ORDER, about="/job/t.py:4", subjects=met)
    said = words(log.take([found], GOES_ON))
    assert said == ["withdrawn DDP803 (rank 1): restated below", "says DDP803"]
    assert log.current == [found]


def test_a_straggler_that_comes_and_goes_is_over_once_and_at_the_end() -> None:
    said = FindingLog()
    heard: list[str] = []
    for _ in range(5):
        heard += words(said.take([SLOW], GOES_ON))
        for _ in range(MAX_MISSING):
            heard += words(said.take([], GOES_ON))
    over = "over DDP610 (rank 1): the newest steps do not show it"
    assert heard == ["says DDP610", over, "says DDP610"]
    assert words(said.take([], OVER)) == [over]
    assert said.current == []


def test_one_examination_that_does_not_find_it_makes_no_noise() -> None:
    said = FindingLog()
    said.take([DATA, SLOW], GOES_ON)
    for _ in range(4):
        assert words(said.take([], GOES_ON)) == []
        assert words(said.take([DATA, SLOW], GOES_ON)) == []


def test_a_fact_that_later_records_speak_against_is_withdrawn() -> None:
    said = FindingLog()
    said.take([DATA], GOES_ON)
    heard = [words(said.take([], GOES_ON)) for _ in range(MAX_MISSING)]
    untrue = ["withdrawn DDP102 (ranks 0, 1): later records do not bear it out"]
    assert heard == [[], [], untrue]


def test_what_happened_stays_though_its_evidence_is_gone() -> None:
    said = FindingLog()
    said.take([ORDER], GOES_ON)
    for _ in range(2 * MAX_MISSING):
        assert words(said.take([], GOES_ON)) == []
    assert words(said.take([], OVER)) == []
    assert said.current == [ORDER]


def test_more_ranks_are_the_same_finding() -> None:
    said = FindingLog()
    said.take([RAISED], GOES_ON)
    more = replace(RAISED, ranks=(1, 2), message="ranks 1 and 2 raised")
    for found in ([more], [RAISED], [more]):
        assert words(said.take(found, GOES_ON)) == []
    assert said.current == [more]


def test_another_rank_is_another_finding() -> None:
    said = FindingLog()
    said.take([RAISED], GOES_ON)
    assert words(said.take([replace(RAISED, ranks=(0,))], GOES_ON)) == [
        "withdrawn DDP901 (rank 1): restated below",
        "says DDP901",
    ]


def test_a_warning_that_becomes_an_error_is_restated() -> None:
    said = FindingLog()
    said.take([SLOW], GOES_ON)
    assert words(said.take([replace(SLOW, severity=Severity.INFO)], GOES_ON)) == []
    assert said.current == [SLOW]
    assert words(said.take([replace(SLOW, severity=Severity.ERROR)], GOES_ON)) == [
        "withdrawn DDP610 (rank 1): restated below, as an error",
        "says DDP610",
    ]


def test_what_an_earlier_attempt_showed_stays() -> None:
    said = FindingLog()
    said.take([DATA, APART], run())
    said.take([DATA, APART], run())
    for _ in range(2 * MAX_MISSING):
        assert words(said.take([], run(restart=1))) == []
    # What explains it in this attempt says nothing of that one.
    assert words(said.take([TWICE], run(restart=1, status=0))) == ["says DDP302"]
    assert [each.code for each in said.current] == ["DDP102", "DDP302", "DDP701"]


def test_what_a_broken_rule_said_stays() -> None:
    said = FindingLog()
    said.take([DATA], GOES_ON)
    for _ in range(2 * MAX_MISSING):
        assert words(said.take([], GOES_ON, {"DDP102"})) == []
    assert said.current == [DATA]


# -- whatever happens


FINDINGS = [APART, TWICE, SLOW, ALL_WAIT, NEVER_JOINED, DATA, RAISED, ORDER]
VARIANTS = [
    *FINDINGS,
    *(replace(each, severity=Severity.INFO) for each in FINDINGS),
    *(replace(each, ranks=(0, 1, 2)) for each in FINDINGS),
    *(replace(each, location=Location("/job/other.py", 1)) for each in FINDINGS),
    Finding("DDP101", Severity.ERROR, "a sampler", (0, 1), about="s", moment=3),
    Finding("DDP999", Severity.WARNING, "of no rule"),
]


def examined(found: Sequence[Finding]) -> list[Finding]:
    """As an examination returns them: each identity once."""
    return list({finding.identity: finding for finding in found}.values())


SNAPSHOTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(VARIANTS), max_size=5).map(examined),
        st.booleans(),
        st.integers(0, 1),
    ),
    max_size=12,
)


@given(SNAPSHOTS, st.lists(st.sampled_from(VARIANTS), max_size=5).map(examined))
def test_what_was_said_less_what_was_withdrawn_is_what_stands(
    snapshots: list[tuple[list[Finding], bool, int]], last: list[Finding]
) -> None:
    said, restart = FindingLog(), 0
    left: Counter[str] = Counter()
    open_lines: dict[int, Reported] = {}
    lines = 0
    for number, (found, hang, step) in enumerate([*snapshots, (last, False, 0)]):
        restart = min(restart + (step and number % 4 == 3), 2)
        status = 0 if number == len(snapshots) else None
        for event in said.take(found, run(hang=hang, restart=restart, status=status)):
            lines += 1
            assert event.number == lines, "in the order of the lines"
            if isinstance(event, Reported):
                open_lines[event.number] = event
                left[event.finding.severity.label] += 1
            else:
                # Each line is withdrawn once, and by what it was.
                assert open_lines.pop(event.reported.number) == event.reported
                left[event.reported.finding.severity.label] -= 1
        counts = Counter(each.severity.label for each in said.current)
        assert counts == +left, "at each moment"
    # In the end all that is found is said, with its weight.
    weights = {(each.code, each.severity) for each in said.current}
    assert {(each.code, each.severity) for each in last} <= weights


# -- where it is seen


class Shown:
    """What a reporter said, line by line."""

    def __init__(self, tmp_path: Path, output: str = "text") -> None:
        self.text = ""
        self.json = tmp_path / "found.jsonl"
        options = OwnOptions(json=str(self.json), output=output)
        self.reporter = Reporter(self._say, options)

    def _say(self, text: str) -> None:
        self.text += text

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.json.read_text().splitlines()]


def in_turn(monkeypatch: pytest.MonkeyPatch, *found: list[Finding]) -> None:
    """One examination after the other finds these."""
    rest = list(found)
    monkeypatch.setattr(reporter, "examine", lambda run, rules, **_: rest.pop(0))


def test_a_line_on_the_terminal_and_a_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(tmp_path)
    in_turn(monkeypatch, [APART], [APART], [TWICE])
    shown.reporter.examine(GOES_ON)
    shown.reporter.examine(GOES_ON)
    shown.reporter.examine(OVER)
    assert "ddpdoctor: withdrawn DDP701 (rank 1): explained by DDP302 below\n" in shown.text
    first, second, third = shown.lines()
    assert (first["code"], third["code"]) == ("DDP701", "DDP302")
    assert {key: second[key] for key in list(second)[4:]} == {
        "retracts": 1, "id": APART.id, "code": "DDP701", "ranks": [1], "why": "explained",
        "by": "DDP302", "reason": "explained by DDP302 below",
    }  # fmt: skip
    assert reporter.findings_count(shown.reporter.current) == "findings: 1 error"
    assert shown.reporter.found == [TWICE]


def test_an_editor_gets_an_info_at_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(tmp_path, "problems")
    in_turn(monkeypatch, [RAISED], [replace(RAISED, ranks=(0,))])
    shown.reporter.examine(GOES_ON)
    shown.reporter.examine(GOES_ON)
    lines = shown.text.splitlines()
    assert lines[1] == "/job/t.py:9:1: info DDP901 withdrawn: restated below"


def directory(tmp_path: Path, *snapshots: tuple[list[Finding], Run]) -> Path:
    """A run directory whose journal holds what was said after each examination."""
    (tmp_path / "run.json").write_text(json.dumps({"format": FORMAT, "launcher": "torchrun"}))
    said = FindingLog()
    journal = Journal(str(tmp_path / "supervisor.jsonl"), 1 << 20)
    for found, at in snapshots:
        journal.write([to_journal(each, 9) for each in said.take(found, at)])
    journal.write([JobRecord(time=9, status=0)])
    journal.close()
    return tmp_path


def test_top_shows_what_stands(tmp_path: Path) -> None:
    path = directory(
        tmp_path, ([APART], GOES_ON), ([APART, SLOW], GOES_ON), ([TWICE, SLOW], GOES_ON)
    )
    events = SupervisorEvents(path)
    events.poll()
    assert [row.finding.code for row in events.findings] == ["DDP610", "DDP302"]


def test_a_report_has_what_happened_and_stands(tmp_path: Path) -> None:
    path = directory(
        tmp_path, ([APART], GOES_ON), ([ORDER, DATA, APART], GOES_ON), ([TWICE], GOES_ON)
    )
    snapshot = RunReader(path).snapshot()
    # The rules find nothing in this directory; what happened was said, and stands.
    assert [each.code for each in with_kept([], snapshot)] == ["DDP803"]
    found = snapshot.supervisor.of(FindingRecord)
    back = from_journal(next(each for each in found if each.code == "DDP803"))
    assert back is not None
    assert with_kept([ORDER], snapshot) == [ORDER]


@pytest.mark.slow
def test_a_symptom_waits_for_its_explanation(doctor: Doctor) -> None:
    path = sick("ddp302_slow_steps")
    file = doctor.directory / "found.jsonl"
    result = doctor.run("--json", str(file), "--nproc-per-node", "2", "--", str(path))
    result.check_success()
    # Different parameters (DDP701) are reported once two examinations find them unexplained.
    assert result.codes == ["DDP302"], result.stderr
    assert result.withdrawn == []
    assert "ddpdoctor: findings: 1 error; " in result.ours
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each.get("retracts") for each in lines] == [None, None]
    assert lines[-1]["findings"] == {"error": 1, "warning": 0, "info": 0}
    # The same from the directory, for who reads it later.
    events = SupervisorEvents(result.run_dir)
    events.poll()
    assert [row.finding.code for row in events.findings] == ["DDP302"]
    again = doctor.cli("report", "--json", str(result.run_dir))
    assert [json.loads(line)["code"] for line in again.stdout.splitlines()] == ["DDP302"]


# -- the relations themselves


DISJOINT = {("DDP401", "DDP402")}
"""Rules that explain each other, under conditions that exclude each other: whom they blame."""


def edges() -> dict[str, set[str]]:
    """Which rules explain which."""
    found: dict[str, set[str]] = {code: set(rule.supersedes) for code, rule in RULES.items()}
    for code, rule in RULES.items():
        for cause in rule.yields_to:
            if (cause, code) not in DISJOINT:
                found.setdefault(cause, set()).add(code)
    return found


def test_relations_name_rules_that_there_are() -> None:
    known = edges()
    assert known.keys() <= RULES.keys()
    assert {each for effects in known.values() for each in effects} <= RULES.keys()


def test_relations_have_no_cycle() -> None:
    known = edges()
    over: set[str] = set()

    def follow(code: str, path: tuple[str, ...]) -> None:
        assert code not in path, " > ".join((*path, code))
        if code not in over:
            for effect in sorted(known[code]):
                follow(effect, (*path, code))
            over.add(code)

    for code in sorted(known):
        follow(code, ())


def test_no_rule_calls_another_rule() -> None:
    trees = [
        ast.parse(path.read_text())
        for path in sorted((ROOT / "ddpdoctor" / "diagnose").rglob("rules*.py"))
    ]
    names = {
        each.name
        for tree in trees
        for each in tree.body
        if isinstance(each, ast.FunctionDef)
        and any(
            isinstance(d, ast.Call) and ast.unparse(d.func) == "rule" for d in each.decorator_list
        )
    }
    used: set[str] = set()
    for tree in trees:
        found = [each for each in ast.walk(tree) if isinstance(each, ast.Name)]
        own = {each.id for each in found if isinstance(each.ctx, ast.Store)}
        used |= {each.id for each in found} - own
    assert len(names) > 30
    assert sorted(names & used) == []


def test_evidence_imports_no_rules() -> None:
    """Modules of a family that find evidence stand below those that judge it."""
    package = ROOT / "ddpdoctor" / "diagnose"
    wrong = []
    for path in package.glob("*/*.py"):
        if path.name.startswith("rules"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(each.name for each in node.names)]
                wrong += [
                    f"{path}:{node.lineno}" for name in names if ".rules" in name or name == "rules"
                ]
    assert wrong == []


def test_what_is_left_to_another_node_is_withdrawn_here_and_nothing_new_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(tmp_path)
    in_turn(monkeypatch, [TWICE], [RAISED], [RAISED, TWICE])
    shown.reporter.examine(OVER, left=True)
    assert shown.text == ""
    shown.reporter.examine(GOES_ON)
    shown.reporter.examine(GOES_ON, left=True)
    assert [each.code for each in shown.reporter.current] == ["DDP901"]
    assert "DDP302" not in shown.text
