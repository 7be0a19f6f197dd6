"""Following a journal while it is written, rotated and damaged."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core import opening
from ddpdoctor.run.journal import Journal, segment_line
from ddpdoctor.run.records.base import json_line
from tests.support.journals import SMALL, Reader, new_journal, numbered, step

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
    path.write_bytes(step(1) + garbage + step(2) + json_line({"kind": "end"}))
    reader = Reader(path)
    reader.poll()
    assert reader.steps == [1, 2]
    assert [record.kind for record in reader.rank.records] == ["end"]


def test_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    path = new_journal(tmp_path)
    later = {"kind": "step", "step": 1, "of_a_later_version": {"a": 1}, "loss": 0.5}
    path.write_bytes(json_line(later))
    reader = Reader(path)
    reader.poll()
    assert [(each.step, each.loss) for each in reader.rank.steps] == [(1, 0.5)]


@given(cut=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_a_torn_last_line_is_read_once_it_is_whole(cut: int) -> None:
    whole = b"".join(step(number) for number in range(6)) + json_line({"kind": "end"})
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
        assert [record.kind for record in reader.rank.records] == ["end"]


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
            journal.write([numbered(what, number, pad % 800)])
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
    older = [segment_line(0), *(step(number) for number in range(4))]
    newer = [segment_line(1), *(step(number) for number in range(4, 8))]
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
    done, seen = threading.Event(), [0]

    def write() -> None:
        try:
            for number in range(3000):
                journal.write([step(number, 100)])
                # Who gets no core for long is overtaken by a journal that keeps its newest part.
                while number % 20 == 0 and number - seen[0] > 200:
                    time.sleep(0.001)
        finally:
            done.set()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    while not done.is_set():
        live.poll()
        seen[0] = live.steps[-1] if live.steps else 0
    thread.join()
    journal.close()
    live.poll()
    assert live.steps == list(range(3000))


def test_a_window_keeps_the_newest_steps(tmp_path: Path) -> None:
    path = new_journal(tmp_path)
    path.write_bytes(b"".join(step(number) for number in range(100)))
    reader = Reader(path, window=7)
    reader.poll()
    assert reader.steps == list(range(93, 100))
