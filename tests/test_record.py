"""The wire: status pages, journals, and those who read them."""

from __future__ import annotations

import ast
import json
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddpdoctor.rules  # noqa: F401 (registers the rules)
from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import RULES, examine
from ddpdoctor.probe.runtime.recorder import QUEUE, NotYet, Recorder
from ddpdoctor.run.record import (
    EVERY,
    FORMAT,
    KINDS,
    PAGE_SIZE,
    SEGMENT_SIZE,
    Journal,
    Phase,
    Record,
    StatusPage,
    UnreadableError,
    encode,
    page_name,
    page_text,
    read_status,
    segment_line,
    segment_number,
)
from ddpdoctor.run.snapshot import Rank, RunReader, read_manifest
from tests.conftest import LIMIT

PACKAGE = Path(__file__).parent.parent / "ddpdoctor"
SMALL = 1 << 15
"""The smallest limit of a journal: two segments of 16 KiB."""


def new_page(path: Path, rank: int = 3) -> StatusPage:
    return StatusPage(str(path), rank=rank, world_size=8, local_rank=1, restart=2, started=77)


def step(number: int, pad: int = 0) -> Record:
    return {"kind": "step", "step": number, "start": number, "total": 1, "pad": "x" * pad}


def new_run(directory: Path, manifest: object = None) -> Path:
    content = {"format": FORMAT} if manifest is None else manifest
    (directory / "run.json").write_text(json.dumps(content))
    return directory


def new_journal(directory: Path) -> Path:
    """A run directory with the page of rank 0; the path where its journal belongs."""
    new_run(directory)
    new_page(directory / "rank-0000.r0.status", rank=0)
    return directory / "rank-0000.r0.jsonl"


class Reader:
    """Reads the journal of rank 0, again and again."""

    def __init__(self, journal: Path, window: int = 10_000) -> None:
        self._reader = RunReader(journal.parent, window=window)
        self.rank: Rank

    def poll(self) -> None:
        (self.rank,) = self._reader.snapshot().ranks

    @property
    def steps(self) -> list[int]:
        return [each.step for each in self.rank.steps]

    @property
    def records(self) -> list[Record]:
        return list(self.rank.records)


# -- the status page


def test_a_status_page_is_read_back(tmp_path: Path) -> None:
    page = new_page(tmp_path / "page")
    page.show(int(Phase.BACKWARD), 123, 47)
    page.totals(45, 6, 89, 2)
    page.reduced(46)
    page.set_site(page_text("/home/user/train.py:17"))
    page.set_collective(page_name("all_reduce"))
    status = read_status(str(tmp_path / "page"))
    assert status.pid == os.getpid()
    assert (status.rank, status.world_size, status.local_rank) == (3, 8, 1)
    assert (status.restart, status.started) == (2, 77)
    assert (status.phase, status.since, status.step) == (Phase.BACKWARD, 123, 45)
    assert (status.epoch, status.armed, status.last_total, status.dropped) == (6, 47, 89, 2)
    assert (status.site, status.collective) == ("/home/user/train.py:17", "all_reduce")
    assert status.reduced == 46
    assert not status.unwritten
    page.set_unwritten()
    assert read_status(str(tmp_path / "page")) == status._replace(unwritten=True)


def test_a_fresh_page_says_starting(tmp_path: Path) -> None:
    new_page(tmp_path / "page")
    status = read_status(str(tmp_path / "page"))
    assert (status.phase, status.epoch) == (Phase.STARTING, None)
    assert (status.site, status.collective) == ("", "")


@given(site=st.text(max_size=900).filter(lambda text: "\0" not in text))
@settings(max_examples=50, deadline=None)
def test_a_site_survives_or_keeps_its_end(site: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "page"
        page = new_page(path)
        page.set_site(page_text("before:1"))
        page.set_site(page_text(site))
        read = read_status(str(path)).site
    whole = site.encode("utf-8", "replace").decode()
    if len(whole.encode()) <= 703:
        assert read == whole
    else:
        # A character may be cut in two where the text begins.
        assert whole.endswith(read.lstrip("\N{REPLACEMENT CHARACTER}"))
        assert len(read.encode()) >= 700


def test_a_page_is_private_and_never_overwritten(tmp_path: Path) -> None:
    new_page(tmp_path / "page")
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        new_page(tmp_path / "page")


def test_a_page_takes_its_blocks_at_once(tmp_path: Path) -> None:
    """A store into a hole of a sparse file is a SIGBUS once the disk is full."""
    new_page(tmp_path / "page")
    assert (tmp_path / "page").stat().st_size == PAGE_SIZE
    assert (tmp_path / "page").stat().st_blocks > 0


@pytest.mark.parametrize("content", [b"", b"DDPDOCT\0", b"x" * PAGE_SIZE, bytes(PAGE_SIZE)])
def test_what_is_no_page_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "page"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match="not a status page, or was cut short"):
        read_status(str(path))


def test_a_page_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page"
    new_page(path)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", FORMAT + 1))
    with pytest.raises(UnreadableError, match=f"has format {FORMAT + 1}; .* up to format {FORMAT}"):
        read_status(str(path))


def test_a_phase_of_a_later_version_reads_as_other(tmp_path: Path) -> None:
    page = new_page(tmp_path / "page")
    page.show(99, 0, 0)
    assert read_status(str(tmp_path / "page")).phase is Phase.OTHER


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
        lines = [
            {"kind": kind, "number": number, "pad": "x" * pad}
            for number, (kind, pad) in enumerate(records)
        ]
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
    journal = Journal(str(path), 1 << 20)
    for kind, many in MANY.items():
        journal.write([{"kind": kind, "number": number} for number in range(many)])
    lines = [encode(step(number, 40)) for number in range(40_000)]
    for at in range(0, len(lines), 1000):
        journal.write(lines[at : at + 1000])
    journal.write([{"kind": kind, "number": -1} for kind in MANY])
    journal.close()
    reader = Reader(path)
    reader.poll()
    return reader


MANY = {
    kind: 3 if KINDS[kind].first == EVERY else KINDS[kind].first + 5
    for kind in sorted(set(KINDS) - {"step"})
} | {"undeclared": 3}
"""How many records of each kind there are at first."""


def test_the_oldest_steps_go(long_job: Reader) -> None:
    assert long_job.steps == list(range(long_job.steps[0], 40_000))
    assert long_job.steps[0] > 20_000


@pytest.mark.parametrize("kind", MANY)
def test_what_rules_need_later_survives_rotation(long_job: Reader, kind: str) -> None:
    first = KINDS[kind].first if kind in KINDS else 0
    numbers = [record["number"] for record in long_job.rank.of_kind(kind)]
    assert numbers == [*range(min(first, MANY[kind])), -1]


def test_rules_find_the_same_after_a_long_job(tmp_path: Path) -> None:
    place = {"path": "/job/train.py", "line": 3}
    for rank in range(2):
        new_page(tmp_path / f"rank-{rank:04}.r0.status", rank=rank)
        journal = Journal(str(tmp_path / f"rank-{rank:04}.r0.jsonl"), SMALL)
        opened = {"kind": "open", "format": FORMAT, "rank": rank, "world_size": 2}
        parsed = {"kind": "local_rank", "parsed": 0, "environment": 1, **place}
        journal.write([opened, parsed, {"kind": "data_parallel", **place}])
        journal.write([step(number, 40) for number in range(2000)])
        journal.close()
    run = RunReader(new_run(tmp_path)).snapshot()
    assert {"DDP206", "DDP214"} <= {finding.code for finding in examine(run, RULES.values())}


def test_kinds_that_are_written_often_leave_room_for_the_others(tmp_path: Path) -> None:
    path = new_journal(tmp_path)
    journal = Journal(str(path), SMALL)
    for number in range(400):
        journal.write([{"kind": "outside", "number": number, "pad": "x" * 200}])
    journal.write([{"kind": "error", "number": 0}])
    journal.write([step(number) for number in range(2000)])
    journal.close()
    reader = Reader(path)
    reader.poll()
    kept = [record["number"] for record in reader.records if record["kind"] == "outside"]
    assert kept == list(range(len(kept))) and 2 < len(kept) < 20
    assert reader.records[-1] == {"kind": "error", "number": 0}


LITERALS = {
    path.relative_to(PACKAGE): {
        node.value
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for path in PACKAGE.rglob("*.py")
}
READERS = (
    *("rules/", "analysis/", "supervise/", "debug/"),
    *("render/summary.py", "run/snapshot.py", "top/story.py"),
)


def called(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    """Whether it is a call of a function or method of that name."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name


def kinds_written() -> set[str]:
    """What stands behind "kind" in the probe and the supervisor, or is given to what writes it."""
    found: set[str] = set()
    for part in ("probe", "supervise", "debug"):
        for path in (PACKAGE / part).rglob("*.py"):
            if path.name == "stacks.py":
                # A file of its own, which is not a journal.
                continue
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Dict):
                    found |= {
                        value.value
                        for key, value in zip(node.keys, node.values, strict=True)
                        if isinstance(key, ast.Constant) and key.value == "kind"
                        if isinstance(value, ast.Constant) and isinstance(value.value, str)
                    }
                elif path.name == "changes.py" and isinstance(node, ast.Call):
                    found |= {ast.literal_eval(node.args[0])} if called(node, "_tell") else set()
    return {*found, "step", "nonfinite", "nonfinite_gradient"}


def kinds_read() -> set[str]:
    """What is asked for by ``of_kind`` and its like, or compared with a record's kind."""
    found: set[str] = set()
    for path, words in LITERALS.items():
        if str(path).startswith(READERS):
            found |= words & set(KINDS)
        calls = (
            n for n in ast.walk(ast.parse((PACKAGE / path).read_bytes())) if called(n, "of_kind")
        )
        found |= {str(a.value) for n in calls for a in n.args if isinstance(a, ast.Constant)}
    return found


def test_every_kind_is_declared() -> None:
    assert kinds_written() == set(KINDS)
    assert all(kind.doc.endswith(".") for kind in KINDS.values())


def test_every_kind_that_is_read_survives_or_says_why_not() -> None:
    read = kinds_read()
    assert read <= set(KINDS)
    # Steps are too many; of loops only late ones are judged.
    assert {kind for kind in read if not KINDS[kind].first} == {"step", "loop"}


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
    "head", [b"", segment_line(7)[:-1], segment_line(7).replace(b"7", b"x"), encode(step(1234567))]
)
def test_what_is_no_segments_first_line_has_no_number(head: bytes) -> None:
    assert segment_number(head[:SEGMENT_SIZE]) is None


def test_many_sticky_records_do_not_fill_the_journal(tmp_path: Path) -> None:
    path = new_journal(tmp_path)
    journal = Journal(str(path), SMALL)
    for number in range(2000):
        journal.write([{"kind": "fault", "number": number, "pad": "x" * 50}, step(number)])
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
    assert json.loads(encode({"kind": "note", "value": Strange()}))["value"] == "<Strange>"
    assert encode({"kind": "note", "text": "a\nb"}).count(b"\n") == 1
    assert json.loads(encode({"kind": "note", "text": "\udcff"}))["text"] == "\udcff"


def test_no_file_is_ever_unpickled() -> None:
    """A run directory may come from another machine; reading it must not run what is in it."""
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    # The Flight Recorder hands a rank's own collectives to it as a pickle, in memory.
    in_memory = PACKAGE / "probe" / "observers" / "flight.py"
    for path in set(PACKAGE.rglob("*.py")) - {in_memory}:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                assert not banned & {alias.name.split(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in banned, path
            elif isinstance(node, ast.Name):
                assert node.id not in ("eval", "exec"), f"{path}:{node.lineno}"


# -- readers


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xfe\x00garbage\n",
        b"{\n",
        b"\n\n",
        b"null\n",
        b"[1, 2]\n",
        b"17\n",
        b'"kind"\n',
        b'{"no": "kind"}\n',
        b'{"kind": 7}\n',
        b'{"kind":"step"\n',
        b'{"kind":"step"}\n',
        b'{"kind":"step","step":\n',
        b"[" * 100_000 + b"\n",
        b'{"kind":"of-a-later-version","x":[{}]}\n',
    ],
    ids=lambda line: line[:24].decode("latin-1").strip(),
)
def test_garbage_is_skipped(tmp_path: Path, garbage: bytes) -> None:
    path = new_journal(tmp_path)
    path.write_bytes(encode(step(1)) + garbage + encode(step(2)) + encode({"kind": "end"}))
    reader = Reader(path)
    reader.poll()
    assert reader.steps == [1, 2]
    known = [record for record in reader.records if record["kind"] != "of-a-later-version"]
    assert known == [{"kind": "end"}]


def test_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    path = new_journal(tmp_path)
    path.write_bytes(encode({**step(1), "of_a_later_version": {"a": 1}, "loss": 0.5}))
    reader = Reader(path)
    reader.poll()
    assert [(each.step, each.loss) for each in reader.rank.steps] == [(1, 0.5)]


@given(cut=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_a_torn_last_line_is_read_once_it_is_whole(cut: int) -> None:
    whole = b"".join(encode(step(number)) for number in range(6)) + encode({"kind": "end"})
    with tempfile.TemporaryDirectory() as name:
        path = new_journal(Path(name))
        path.write_bytes(whole[:cut])
        reader = Reader(path)
        reader.poll()
        assert reader.steps == list(range(min(6, whole[:cut].count(b"\n"))))
        with path.open("ab") as file:
            file.write(whole[cut:])
        reader.poll()
        assert reader.steps == list(range(6))
        assert reader.records == [{"kind": "end"}]


Action = tuple[str, int]


def replay(actions: list[Action], directory: Path) -> tuple[Reader, Reader]:
    """Write and poll as told; the reader that followed, and one that reads at the end."""
    path = new_journal(directory)
    journal = Journal(str(path), SMALL)
    live = Reader(path)
    for number, (what, pad) in enumerate(actions):
        if what == "poll":
            live.poll()
        elif what == "step":
            journal.write([step(number, pad)])
        else:
            journal.write([{"kind": what, "number": number, "pad": "x" * (pad % 800)}])
    journal.close()
    live.poll()
    once = Reader(path)
    once.poll()
    return live, once


def check_same(live: Reader, once: Reader) -> None:
    """Nothing on disk is missing, doubled or out of order; the live reader may know more."""
    late, steps = live.steps, once.steps
    assert late == sorted(set(late))
    assert late[len(late) - len(steps) :] == steps
    numbers = [record["number"] for record in live.records]
    assert len(set(numbers)) == len(numbers)
    assert {record["number"] for record in once.records} <= set(numbers)


@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["step", "step", "step", "poll", "site", "note"]),
            st.integers(0, 5000),
        ),
        max_size=120,
    )
)
@settings(max_examples=150, deadline=None)
def test_following_a_journal_finds_what_reading_it_once_does(actions: list[Action]) -> None:
    with tempfile.TemporaryDirectory() as name:
        check_same(*replay(actions, Path(name)))


@pytest.mark.parametrize("rotations", [1, 2, 3, 4])
def test_rotations_between_two_polls_lose_nothing_that_is_on_disk(
    tmp_path: Path, rotations: int
) -> None:
    """A file system may give the freed inode of the oldest segment to the newest."""
    burst: list[Action] = [("step", 900)] * (16 * rotations)
    actions: list[Action] = [("step", 0), ("poll", 0), *burst, ("poll", 0), *burst, ("step", 0)]
    check_same(*replay(actions, tmp_path))


@pytest.mark.parametrize("rotations", [0, 1, 2])
@pytest.mark.parametrize("segment", ["older", "newer"])
def test_a_rotation_while_a_reader_looks_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment: str, rotations: int
) -> None:
    """The writer rotates just after the reader opened a segment, or found that there is none."""
    path = new_journal(tmp_path)
    journal = Journal(str(path), SMALL)
    live = Reader(path)
    written = 0

    def write(count: int) -> None:
        nonlocal written
        journal.write([step(number, 900) for number in range(written, written + count)])
        written += count

    write(2)
    live.poll()
    for _ in range(rotations):
        write(17)
        live.poll()
    opened = path.with_name(path.name + ".1") if segment == "older" else path
    meddled = False

    real = opening.file

    def meddling(file: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal meddled
        try:
            return real(file, *args, **kwargs)
        finally:
            if not meddled and file == opened:
                meddled = True
                write(22)

    with monkeypatch.context() as patch:
        patch.setattr(opening, "file", meddling)
        live.poll()
    assert meddled
    write(1)
    journal.close()
    live.poll()
    assert live.steps == list(range(written))


@pytest.mark.parametrize("head", [b"", segment_line(1)[:9]], ids=["empty", "torn"])
def test_a_segment_whose_first_line_is_not_whole_is_not_there_yet(
    tmp_path: Path, head: bytes
) -> None:
    path = new_journal(tmp_path)
    older = [segment_line(0), *(encode(step(number)) for number in range(4))]
    newer = [segment_line(1), *(encode(step(number)) for number in range(4, 8))]
    path.write_bytes(b"".join(older[:3]))
    live = Reader(path)
    live.poll()
    assert live.steps == [0, 1]
    path.with_name(path.name + ".1").write_bytes(b"".join(older))
    path.write_bytes(head)
    once = Reader(path)
    for reader in live, once:
        reader.poll()
        assert reader.steps == [0, 1, 2, 3]
    path.write_bytes(b"".join(newer))
    for reader in live, once:
        reader.poll()
        assert reader.steps == list(range(8))


def test_a_reader_keeps_up_with_a_writer_in_another_thread(tmp_path: Path) -> None:
    path = new_journal(tmp_path)
    journal = Journal(str(path), 1 << 17)
    live = Reader(path)
    done = threading.Event()

    def write() -> None:
        try:
            for number in range(3000):
                journal.write([step(number, 100)])
                if number % 20 == 0:
                    time.sleep(0.001)
        finally:
            done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        live.poll()
    thread.join()
    journal.close()
    live.poll()
    assert live.steps == list(range(3000))


def test_a_window_keeps_the_newest_steps(tmp_path: Path) -> None:
    path = new_journal(tmp_path)
    path.write_bytes(b"".join(encode(step(number)) for number in range(100)))
    reader = Reader(path, window=7)
    reader.poll()
    assert reader.steps == list(range(93, 100))


def test_a_run_is_read_while_its_files_are_still_missing(tmp_path: Path) -> None:
    reader = RunReader(new_run(tmp_path))
    assert reader.snapshot().ranks == ()
    new_page(tmp_path / "rank-0003.r2.status", rank=3)
    (rank,) = reader.snapshot().ranks
    assert (rank.rank, rank.restart, rank.opened, rank.steps) == (3, 2, {}, ())
    (tmp_path / "rank-0003.r2.jsonl").write_bytes(encode({"kind": "open"}) + encode(step(0)))
    (rank,) = reader.snapshot().ranks
    assert rank.opened == {"kind": "open"}
    assert len(rank.steps) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "new"}', "null", "{}"])
def test_a_damaged_manifest_is_refused_in_words(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(DoctorError, match="is damaged"):
        read_manifest(tmp_path)


def test_a_missing_manifest_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(DoctorError, match="not a run directory"):
        RunReader(tmp_path)


def test_a_run_of_a_newer_format_is_refused_in_words(tmp_path: Path) -> None:
    new_run(tmp_path, {"format": FORMAT + 1})
    with pytest.raises(DoctorError, match=rf"newer ddpdoctor \(format {FORMAT + 1}; .* {FORMAT}\)"):
        RunReader(tmp_path)


def test_a_rank_of_a_newer_format_is_left_out_and_named(tmp_path: Path) -> None:
    new_run(tmp_path)
    new_page(tmp_path / "rank-0000.r0.status", rank=0)
    new_page(tmp_path / "rank-0001.r0.status", rank=1)
    (tmp_path / "rank-0000.r0.jsonl").write_bytes(encode({"kind": "open", "format": FORMAT}))
    (tmp_path / "rank-0001.r0.jsonl").write_bytes(encode({"kind": "open", "format": FORMAT + 1}))
    run = RunReader(tmp_path).snapshot()
    assert [rank.rank for rank in run.ranks] == [0]
    assert len(run.unreadable) == 1
    assert "rank-0001.r0" in run.unreadable[0]
    assert f"format {FORMAT + 1}" in run.unreadable[0]


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("rank-0000.r0.jsonl", {"kind": "open", "format": "newest"}),
        ("process-17.jsonl", {"kind": "error", "time": "soon"}),
        ("process-17.jsonl", {"kind": "error", "restart": "first"}),
        ("supervisor.jsonl", {"kind": "rank_exit", "rank": 0}),
        ("supervisor.jsonl", {"kind": "rank_exit", "rank": "zero", "restart": 0}),
        ("supervisor.jsonl", {"kind": "job"}),
        ("supervisor.jsonl", {"kind": "job", "status": "fine"}),
        ("supervisor.jsonl", {"kind": "signal"}),
    ],
)
def test_records_with_odd_values_do_not_keep_a_run_from_being_read(
    tmp_path: Path, name: str, record: Record
) -> None:
    new_run(tmp_path)
    new_page(tmp_path / "rank-0000.r0.status", rank=0)
    if not name.startswith("rank"):
        (tmp_path / "rank-0000.r0.jsonl").write_bytes(encode({"kind": "open"}))
    (tmp_path / name).write_bytes(encode(record))
    run = RunReader(tmp_path).snapshot()
    assert run.restarts == (0,)
    assert run.exit_status is None
    assert run.stopped_at is None


def test_a_damaged_page_is_named_and_its_rank_stays(tmp_path: Path) -> None:
    new_run(tmp_path)
    (tmp_path / "rank-0000.r0.status").write_bytes(b"")
    (tmp_path / "rank-0000.r0.jsonl").write_bytes(encode({"kind": "open"}) + encode(step(0)))
    run = RunReader(tmp_path).snapshot()
    (rank,) = run.ranks
    assert rank.status is None
    assert len(rank.steps) == 1
    assert "rank-0000.r0.status" in run.unreadable[0]


# -- the recorder


class Rig:
    """A recorder on files of a temporary directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "journal"
        self.page = directory / "page"
        self.journal = Journal(str(self.path), SMALL)
        self.recorder = Recorder(new_page(self.page), self.journal)

    def close(self) -> None:
        self.recorder.close(5)
        self.journal.close()

    def kinds(self) -> list[str]:
        first, *kinds = (json.loads(line)["kind"] for line in self.path.read_bytes().splitlines())
        assert first == "segment"
        return kinds


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_records_are_written_in_order_soon_after(rig: Rig) -> None:
    rig.recorder.start()
    rig.recorder.add({"kind": "a"})
    rig.recorder.add(lambda last: encode({"kind": "b"}))
    rig.recorder.add({"kind": "c"})
    deadline = time.monotonic() + LIMIT
    while len(rig.kinds()) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert rig.kinds() == ["a", "b", "c"]
    rig.recorder.add({"kind": "d"})
    rig.recorder.close(5)
    assert rig.kinds() == ["a", "b", "c", "d"]


def test_a_record_that_is_not_ready_holds_those_behind_it_until_the_last_chance(rig: Rig) -> None:

    def busy(last: bool) -> bytes:
        if not last:
            raise NotYet
        return encode({"kind": "late"})

    rig.recorder.add({"kind": "a"})
    rig.recorder.add(busy)
    rig.recorder.add({"kind": "b"})
    rig.recorder.flush(5)
    assert rig.kinds() == ["a"]
    rig.recorder.close(5)
    assert rig.kinds() == ["a", "late", "b"]


def test_a_record_that_cannot_be_made_is_a_fault_and_no_more(rig: Rig) -> None:

    def broken(last: bool) -> bytes:
        raise ZeroDivisionError

    rig.recorder.add(broken)
    rig.recorder.add({"kind": "b"})
    rig.recorder.flush(5)
    assert rig.kinds() == ["fault", "b"]


def test_a_full_queue_drops_and_counts(rig: Rig) -> None:
    for _ in range(QUEUE + 17):
        rig.recorder.add({"kind": "a"})
    assert rig.recorder.dropped == 17
    rig.recorder.flush(5)
    rig.recorder.add({"kind": "b"})
    rig.recorder.flush(5)
    assert rig.recorder.dropped == 17
    assert rig.kinds()[-1] == "b"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "note", "value": Unprintable()},
        {"kind": "note", ("no", "string"): 1},
    ],
    ids=["repr", "key"],
)
def test_a_record_that_cannot_be_encoded_does_not_end_the_writing_thread(
    rig: Rig, record: dict[Any, Any]
) -> None:
    rig.recorder.add(record)
    rig.recorder.flush(5)
    rig.recorder.add({"kind": "after"})
    rig.recorder.flush(5)
    assert "after" in rig.kinds()


def test_what_cannot_wait_is_written_while_the_writing_thread_is_at_work(rig: Rig) -> None:
    held, done = threading.Event(), threading.Event()

    def slow(last: bool) -> bytes:
        held.set()
        done.wait(30)
        return encode({"kind": "slow"})

    rig.recorder.add(slow)
    rig.recorder.start()
    assert held.wait(LIMIT)
    rig.recorder.add_now({"kind": "urgent"})
    assert rig.kinds() == ["urgent"]
    done.set()
    rig.recorder.close(30)
    assert rig.kinds() == ["urgent", "slow"]


def test_what_cannot_wait_does_not_wait_for_a_device(rig: Rig) -> None:

    def busy(last: bool) -> bytes:
        raise NotYet

    rig.recorder.add({"kind": "a"})
    rig.recorder.add(busy)
    rig.recorder.add_now({"kind": "urgent"})
    assert sorted(rig.kinds()) == ["a", "urgent"]


def test_lines_written_at_once_are_whole_while_the_journal_rotates(tmp_path: Path) -> None:
    """A thread ends one segment after the other, and no line gets into another file."""
    path = tmp_path / "journal"
    journal = Journal(str(path), SMALL)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    over = threading.Event()

    def write() -> None:
        for number in range(2_000):
            journal.write([step(number)])
            # What the job opens meanwhile must not get a descriptor of ours.
            os.close(os.open(tmp_path / "other", os.O_RDWR))
        over.set()

    thread = threading.Thread(target=write)
    thread.start()
    said = 0
    while not over.is_set():
        journal.write_now(encode({"kind": "loop", "number": said}))
        said += 1
    thread.join()
    journal.close()
    assert said
    assert os.fstat(other).st_size == 0
    os.close(other)
    segments = [path.with_name("journal.1"), path]
    lines = [line for each in segments for line in each.read_bytes().splitlines()]
    assert all(json.loads(line)["kind"] in ("segment", "step", "loop") for line in lines)
    assert all(segment_number(each.read_bytes()[:SEGMENT_SIZE]) is not None for each in segments)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_flagged_in_the_page_and_counted(rig: Rig) -> None:
    rig.journal.close()
    rig.journal._file = open("/dev/full", "ab", buffering=0)
    for _ in range(3):
        rig.recorder.add({"kind": "a"})
        assert read_status(str(rig.page)).unwritten == (rig.recorder.dropped > 0)
        rig.recorder.flush(5)
    assert read_status(str(rig.page)).unwritten
    assert rig.recorder.dropped == 3


def test_a_journal_of_a_killed_writer_is_read_to_its_end(tmp_path: Path) -> None:
    """SIGKILL in the middle of writing: at most the last line is torn, the page is whole."""
    path = new_journal(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            page = new_page(tmp_path / "page")
            journal = Journal(str(path), 1 << 20)
            for number in range(1 << 30):
                page.show(int(Phase.DATA), number, 0)
                page.totals(number, 0, 0, 0)
                journal.write([step(number)])
        finally:
            os._exit(1)
    time.sleep(0.3)
    os.kill(child, 9)
    os.waitpid(child, 0)
    reader = Reader(path, window=1 << 20)
    reader.poll()
    assert len(reader.steps) > 10
    assert reader.steps == list(range(reader.steps[0], reader.steps[0] + len(reader.steps)))
    status = read_status(str(tmp_path / "page"))
    assert status.step - reader.steps[-1] in (0, 1)
