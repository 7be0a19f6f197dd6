"""What is looked at again before it is said."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import RULES, examine
from ddpdoctor.nodes import hang_examination
from ddpdoctor.run.mapped import RequestWriter
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.process import EndRecord
from ddpdoctor.run.records.supervisor import RankEvidence, RankExitRecord
from ddpdoctor.run.snapshot import NO_RECORDS, Rank, Records, Run
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks.frames import ENDING, stacks_from_record
from ddpdoctor.supervise import hang_watch
from ddpdoctor.supervise.hang_watch import HangWatch
from ddpdoctor.system import process_activity
from tests.conftest import LIMIT
from tests.support.hanging_ranks import stacks, status
from tests.support.starved import needs_linux

# -- looked at again


class Told:
    """What the watch writes and says."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def kinds(self) -> list[str]:
        return [record.kind for record in self.records]


class Watched:
    """A hang watch over one rank, in a shutdown that does not end, whose process sleeps."""

    def __init__(self, path: Path, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.told = path, Told()
        self.page = status(0, Phase.ENDED)._replace(pid=pid)
        self.exits: RankExitRecord | None = None
        self.started = True
        self.watch = HangWatch(
            path,
            RequestWriter(str(path)),
            0.1,
            self.told.records.append,
            self.told.note,
            lambda: None,
        )
        told = {**stacks(0, ("/job/log.py", 8, "finish")), "trouble": ENDING}
        seen = stacks_from_record({**told, "pid": pid, "state": {"letter": "S"}})
        monkeypatch.setattr(hang_examination, "capture", lambda *_, **__: (seen,))
        monkeypatch.setattr(hang_examination, "flights", lambda *_: {})
        monkeypatch.setattr(hang_examination, "COMPARED_SECONDS", 0.05)
        monkeypatch.setattr(hang_watch, "is_loaded", lambda: False)
        # Nobody to hold with py-spy.
        monkeypatch.setattr(HangWatch, "_look_below", lambda *_: False)

    def run(self) -> Run:
        one = Rank(0, 0, self.page, records=Records([EndRecord(time=1)]), exit=self.exits)
        written = Records(self.told.records)
        ranks = (one,) if self.started else ()
        return Run(self.path, {}, ranks, supervisor=written, taken=time.time_ns())

    def examined(self) -> None:
        deadline = time.monotonic() + LIMIT
        while not self.watch.look(self.run()):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def hangs(self) -> bool:
        found = examine(self.run(), RULES.values())
        return self.watch.judged(found)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    code = "print(flush=True); input()"
    pipe = subprocess.PIPE
    sleeper = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe)
    assert sleeper.stdout is not None and sleeper.stdout.readline()
    while process_activity.sample(sleeper.pid).letter != "S":
        time.sleep(0.01)
    made = Watched(tmp_path, sleeper.pid, monkeypatch)
    yield made
    made.watch.close()
    sleeper.kill()
    sleeper.communicate()


@needs_linux
def test_what_still_hangs_is_confirmed(watched: Watched) -> None:
    watched.examined()
    assert watched.hangs() and watched.watch.confirmed(watched.run())
    assert watched.told.kinds == ["hang"]


@needs_linux
def test_a_start_that_came_to_ranks_is_over_though_one_of_them_fails(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they do from then on is looked at as ever."""
    monkeypatch.setattr(hang_watch, "SETTLE_TIME", 0.1)
    watched.started = False
    watched.examined()
    watched.started = True
    failed = RankExitRecord(rank=1, restart=0, status=1, time=time.time_ns())
    other = Rank(1, 0, status(1, Phase.ENDED), records=NO_RECORDS, exit=failed)
    alone = watched.run
    monkeypatch.setattr(watched, "run", lambda: replace(alone(), ranks=(*alone().ranks, other)))
    while watched.told.kinds != ["hang", "hang_over", "hang"]:
        watched.examined()


@needs_linux
def test_a_rank_that_ended_meanwhile_does_not_hang(watched: Watched) -> None:
    watched.examined()
    assert watched.hangs()
    watched.exits = RankExitRecord(rank=0, restart=0, status=0, time=time.time_ns())
    assert not watched.watch.confirmed(watched.run())
    assert watched.told.kinds == ["hang", "hang_over"]
    assert not watched.hangs() and examine(watched.run(), RULES.values()) == []


@needs_linux
@pytest.mark.parametrize("gives_up", [True, False])
def test_a_rank_that_gives_up_while_it_is_looked_at_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, gives_up: bool
) -> None:
    """Its page is of the end, its stack of before: the earlier look is the one to go by."""
    watched.examined()
    look, looks = hang_examination.examine, threading.Event()

    def late(*seen: Any) -> list[RankEvidence]:
        looks.set()
        found = look(*seen)
        return [replace(each, since=time.time_ns()) for each in found] if gives_up else found

    monkeypatch.setattr(hang_examination, "examine", late)
    deadline = time.monotonic() + LIMIT
    while not looks.is_set():
        assert time.monotonic() < deadline
        watched.watch.look(watched.run())
        time.sleep(0.05)
    watched.watch.end(watched.run(), 1)
    assert watched.told.kinds == (["hang"] if gives_up else ["hang", "hang"])


@needs_linux
def test_a_rank_that_moved_meanwhile_does_not_hang(watched: Watched) -> None:
    watched.examined()
    watched.page = watched.page._replace(phase=Phase.OTHER, since=5)
    assert watched.hangs() and not watched.watch.confirmed(watched.run())
    # It goes on for good.
    deadline = time.monotonic() + LIMIT
    while "hang_over" not in watched.told.kinds and time.monotonic() < deadline:
        watched.page = watched.page._replace(since=watched.page.since + 1)
        watched.watch.look(watched.run())
        time.sleep(0.1)
    assert "hang_over" in watched.told.kinds


@needs_linux
def test_what_a_rank_did_before_it_moved_last_is_no_life_in_its_silence(watched: Watched) -> None:
    seen: dict[int, hang_examination.Seen] = {}
    (first,) = hang_examination.examine(watched.run(), 1, (), {}, seen)
    for later, told in ((0, True), (1, False)):
        watched.page = watched.page._replace(since=first.since + later)
        (again,) = hang_examination.examine(watched.run(), 2, (), {0: first}, seen)
        assert again.activity is not None
        assert (again.activity.since_cpu is not None) is told


@needs_linux
def test_a_rank_that_was_awake_meanwhile_does_not_hang(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.examined()
    assert watched.hangs()
    found = process_activity.compared
    works: dict[str, Any] = {"busy": 0.9, "letters": "SR"}
    monkeypatch.setattr(process_activity, "compared", lambda *seen: replace(found(*seen), **works))
    assert not watched.watch.confirmed(watched.run())
    # The rules take it from the same file.
    assert examine(watched.run(), RULES.values()) == []


@needs_linux
def test_what_is_not_true_any_more_is_not_said(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = HangWatch._gather

    def and_ends(self: HangWatch, *told: Any) -> None:
        gather(self, *told)
        watched.exits = RankExitRecord(rank=0, restart=0, status=0, time=time.time_ns())

    monkeypatch.setattr(HangWatch, "_gather", and_ends)
    deadline = time.monotonic() + LIMIT
    while watched.exits is None and time.monotonic() < deadline:
        assert not watched.watch.look(watched.run())
        time.sleep(0.05)
    for _ in range(5):
        assert not watched.watch.look(watched.run())
        time.sleep(0.05)
    assert watched.exits is not None and watched.told.kinds == []
