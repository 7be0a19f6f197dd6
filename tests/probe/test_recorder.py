"""The recorder in a rank: its queue, its writing thread, a full disk, a killed writer."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.probe.runtime import events, rank
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.recorder import QUEUE_SIZE, Lazy, NotYet, Recorder
from ddpdoctor.run.journal import SEGMENT_SIZE, Journal, segment_number
from ddpdoctor.run.records.base import json_line
from ddpdoctor.run.records.process import FaultRecord, OpenRecord
from ddpdoctor.run.status import Phase, read_status
from tests.conftest import LIMIT
from tests.support.journals import SMALL, Reader, new_journal, new_page, step

URGENT = FaultRecord(error="urgent")


def note(kind: str) -> Lazy:
    """A line of that kind."""
    return lambda last: json_line({"kind": kind})


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
    rig.recorder.add(note("a"))
    rig.recorder.add(note("b"))
    rig.recorder.add(note("c"))
    deadline = time.monotonic() + LIMIT
    while len(rig.kinds()) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert rig.kinds() == ["a", "b", "c"]
    rig.recorder.add(note("d"))
    rig.recorder.close(5)
    assert rig.kinds() == ["a", "b", "c", "d"]


def test_a_record_that_is_not_ready_holds_the_lazy_ones_behind_it_until_the_last_chance(
    rig: Rig,
) -> None:
    """What waits for a GPU keeps its order; what the host knows does not wait for it."""

    def busy(last: bool) -> bytes:
        if not last:
            raise NotYet
        return json_line({"kind": "late"})

    rig.recorder.add(note("a"))
    rig.recorder.add(busy)
    rig.recorder.add(URGENT)
    rig.recorder.add(note("b"))
    rig.recorder.add(URGENT)
    rig.recorder.flush(5)
    assert rig.kinds() == ["a", URGENT.kind, URGENT.kind]
    rig.recorder.close(5)
    assert rig.kinds() == ["a", URGENT.kind, URGENT.kind, "late", "b"]


def test_a_record_that_cannot_be_made_is_a_fault_and_no_more(rig: Rig) -> None:

    def broken(last: bool) -> bytes:
        raise ZeroDivisionError

    rig.recorder.add(broken)
    rig.recorder.add(note("b"))
    rig.recorder.flush(5)
    assert rig.kinds() == ["fault", "b"]


def test_a_full_queue_drops_and_counts(rig: Rig) -> None:
    for _ in range(QUEUE_SIZE + 17):
        rig.recorder.add(note("a"))
    assert rig.recorder.dropped == 17
    rig.recorder.flush(5)
    rig.recorder.add(note("b"))
    rig.recorder.flush(5)
    assert rig.recorder.dropped == 17
    assert rig.kinds()[-1] == "b"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "record",
    [
        OpenRecord(format=1, rank=0, backend=Unprintable()),  # type: ignore[arg-type]
        OpenRecord(format=1, rank=0, versions={("no", "string"): "1"}),  # type: ignore[dict-item]
    ],
    ids=["repr", "key"],
)
def test_a_record_that_cannot_be_encoded_does_not_end_the_writing_thread(
    rig: Rig, record: OpenRecord
) -> None:
    rig.recorder.add(record)
    rig.recorder.flush(5)
    rig.recorder.add(note("a"))
    rig.recorder.flush(5)
    assert "a" in rig.kinds()


def test_what_cannot_wait_is_written_while_the_writing_thread_is_at_work(rig: Rig) -> None:
    held, done = threading.Event(), threading.Event()

    def slow(last: bool) -> bytes:
        held.set()
        done.wait(30)
        return json_line({"kind": "slow"})

    rig.recorder.add(slow)
    rig.recorder.start()
    assert held.wait(LIMIT)
    rig.recorder.add_now(URGENT)
    assert rig.kinds() == [URGENT.kind]
    done.set()
    rig.recorder.close(30)
    assert rig.kinds() == [URGENT.kind, "slow"]


def test_what_cannot_wait_does_not_wait_for_a_device(rig: Rig) -> None:

    def busy(last: bool) -> bytes:
        raise NotYet

    rig.recorder.add(note("a"))
    rig.recorder.add(busy)
    rig.recorder.add_now(URGENT)
    assert sorted(rig.kinds()) == ["a", URGENT.kind]


@pytest.mark.parametrize("broken", [False, True])
def test_a_device_is_asked_once_more_before_the_rank_ends(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """What an observer had it compute at the very end is written, too; if it still answers."""
    ready: list[bool] = []

    def settle() -> None:
        if broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        ready.append(True)

    def made(last: bool) -> bytes:
        return json_line({"kind": "made"}) if len(ready) == 2 else b""

    tracker: Any = SimpleNamespace(
        device=SimpleNamespace(settle=settle), finish=lambda: 3, armed=3, page_phase=lambda _: None
    )
    monkeypatch.setattr(rank, "_state", RankState(rig.recorder, tracker))
    monkeypatch.setattr(events, "rank_ends", (lambda: rig.recorder.add(made),))
    rank.end()
    assert rig.kinds() == ["end"] if broken else ["made", "end"]


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
        journal.write_now(json_line({"kind": "loop", "number": said}))
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
        rig.recorder.add(note("a"))
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
