"""The journal of a rank: rotation, what survives it, what is written how."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.finding import RULES, examine
from ddpdoctor.run.journal import SEGMENT_SIZE, Journal, segment_line, segment_number
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import EVERY, json_line
from ddpdoctor.run.records.process import DataParallelRecord, LocalRankRecord, OpenRecord
from ddpdoctor.run.records.typed_json import RANK_RECORDS, SUPERVISOR_RECORDS
from tests.support.journals import (
    PACKAGE,
    SMALL,
    Reader,
    new_journal,
    new_page,
    new_run,
    numbered,
    step,
)

KINDS = RANK_RECORDS | SUPERVISOR_RECORDS

# -- the journal


def files(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*journal*"))


@given(
    records=st.lists(
        st.tuples(st.sampled_from(["step", "site", "note"]), st.integers(0, 6000)), max_size=60
    ),
    batch=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_a_journal_is_bounded(records: list[tuple[str, int]], batch: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        journal = Journal(str(directory / "journal"), SMALL)
        lines = [numbered(kind, number, pad) for number, (kind, pad) in enumerate(records)]
        for at in range(0, len(lines), batch):
            journal.write(lines[at : at + batch])
            assert files(directory) <= SMALL
        journal.close()
        whole = b"".join(path.read_bytes() for path in directory.iterdir())
        for line in whole.splitlines():
            json.loads(line)


@pytest.fixture(scope="module")
def long_job(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A small journal: records of every kind and of one more come first, then 40,000 steps."""
    path = new_journal(tmp_path_factory.mktemp("long"))
    journal = Journal(str(path), 5 << 18)
    for kind, many in MANY.items():
        journal.write([numbered(kind, number) for number in range(many)])
    lines = [step(number, 40) for number in range(40_000)]
    for at in range(0, len(lines), 1000):
        journal.write(lines[at : at + 1000])
    journal.write([numbered(kind, -1) for kind in MANY])
    journal.close()
    reader = Reader(path)
    reader.poll()
    return reader


MANY = {
    kind: 3 if KINDS[kind].kept == EVERY else KINDS[kind].kept + 5
    for kind in sorted(set(KINDS) - {"step"})
} | {"undeclared": 3}
"""How many records of each kind there are at first."""


def test_the_oldest_steps_go(long_job: Reader) -> None:
    assert long_job.steps == list(range(long_job.steps[0], 40_000))
    assert long_job.steps[0] > 20_000


@pytest.mark.parametrize("kind", MANY)
def test_what_rules_need_later_survives_rotation(long_job: Reader, kind: str) -> None:
    first = KINDS[kind].kept if kind in KINDS else 0
    numbers = [each["number"] for each in long_job.records if each["kind"] == kind]
    assert numbers == [*range(min(first, MANY[kind])), -1]


def test_rules_find_the_same_after_a_long_job(tmp_path: Path) -> None:
    for rank in range(2):
        new_page(tmp_path / f"rank-{rank:04}.r0.status", rank=rank)
        journal = Journal(str(tmp_path / f"rank-{rank:04}.r0.jsonl"), SMALL)
        opened = OpenRecord(format=FORMAT, rank=rank, world_size=2)
        parsed = LocalRankRecord(parsed=0, environment=1, path="/job/train.py", line=3)
        journal.write([opened, parsed, DataParallelRecord(path="/job/train.py", line=3)])
        journal.write([step(number, 40) for number in range(2000)])
        journal.close()
    run = RunReader(new_run(tmp_path)).snapshot()
    assert {"DDP206", "DDP214"} <= {finding.code for finding in examine(run, RULES.values())}


def test_kinds_that_are_written_often_leave_room_for_the_others(tmp_path: Path) -> None:
    path = new_journal(tmp_path)
    journal = Journal(str(path), SMALL)
    for number in range(400):
        journal.write([numbered("outside", number, 200)])
    journal.write([numbered("error", 0)])
    journal.write([step(number) for number in range(2000)])
    journal.close()
    reader = Reader(path)
    reader.poll()
    kept = [record["number"] for record in reader.records if record["kind"] == "outside"]
    assert kept == list(range(len(kept))) and 2 < len(kept) < 20
    assert reader.records[-1] == {"kind": "error", "number": 0}


def test_kinds_are_kept_or_say_why_not() -> None:
    # Steps are too many; of loops only late ones are judged.
    assert {kind for kind, declared in KINDS.items() if not declared.kept} == {"step", "loop"}


def test_every_kind_is_written_and_read() -> None:
    words = {path: set(re.findall(r"\w+", path.read_text())) for path in PACKAGE.rglob("*.py")}
    for kind, declared in KINDS.items():
        name = declared.__name__
        users = {path for path, each in words.items() if name in each}
        parts = {path.relative_to(PACKAGE).parts[0] for path in users}
        writers = {"probe", "supervise", "debug", "core", "nodes"}
        in_run = {"reported.py", "vitals.py"} & {path.name for path in users}
        assert parts & writers or in_run, kind
        read = parts & {"diagnose", "render", "top", "commands", "nodes"} or kind in NEEDLESS
        assert read or name in words[PACKAGE / "run" / "snapshot.py"], kind


NEEDLESS = {"fault", "rank_exit", "finding", "retraction", "vitals"}
"""Kinds for a person who looks into the journal, or for `ddpdoctor.run` itself, which gives reports
the curves of ``vitals``."""


def test_segments_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path), SMALL)
    for number in range(3):
        assert segment_number(path.read_bytes()[:SEGMENT_SIZE]) == number
        journal.write([step(each, 900) for each in range(18)])
    journal.close()
    assert segment_number((tmp_path / "journal.1").read_bytes()[:SEGMENT_SIZE]) == 2
    assert json.loads(segment_line(7)) == {"kind": "segment", "number": f"{7:012}"}


@pytest.mark.parametrize(
    "head", [b"", segment_line(7)[:-1], segment_line(7).replace(b"7", b"x"), step(1234567)]
)
def test_what_is_no_segments_first_line_has_no_number(head: bytes) -> None:
    assert segment_number(head[:SEGMENT_SIZE]) is None


def test_many_sticky_records_do_not_fill_the_journal(tmp_path: Path) -> None:
    path = new_journal(tmp_path)
    journal = Journal(str(path), SMALL)
    for number in range(2000):
        journal.write([numbered("fault", number, 50), step(number)])
        assert sum(each.stat().st_size for each in tmp_path.glob("*.jsonl*")) <= SMALL
    journal.close()
    reader = Reader(path)
    reader.poll()
    assert reader.steps[-1] == 1999
    assert reader.records[0]["number"] == 0


def test_a_journal_is_private_and_never_overwritten(tmp_path: Path) -> None:
    Journal(str(tmp_path / "journal"), SMALL).close()
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Journal(str(tmp_path / "journal"), SMALL)


class Strange:
    def __repr__(self) -> str:
        raise AssertionError("the job's own code")


def test_a_value_without_a_word_in_json_becomes_its_type() -> None:
    assert json.loads(json_line({"kind": "note", "value": Strange()}))["value"] == "<Strange>"
    assert json_line({"kind": "note", "text": "a\nb"}).count(b"\n") == 1
    assert json.loads(json_line({"kind": "note", "text": "\udcff"}))["text"] == "\udcff"
