"""What a rank answers when it is asked for its Flight Recorder."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch  # noqa: F401 (Flight looks for it)

from ddpdoctor.core.finding import Severity
from ddpdoctor.diagnose.hangs.process_activity import gpu_holds_host
from ddpdoctor.probe.observers.collective_calls import Flight
from ddpdoctor.probe.runtime import torch_groups
from ddpdoctor.run.mapped import RequestWriter
from tests.support.hanging_ranks import NOW, findings, rank, stacks, state, waiting

MARKS = [["optimizer", NOW - 42 * 10**9, True], ["other", NOW - 41 * 10**9, False]]

Answer = dict[str, Any]


class Training:
    """A thread that waits in one native call, and then goes on until it is ended."""

    def __init__(self) -> None:
        self._waits = threading.Lock()
        self._waits.acquire()
        self._goes, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        self._waits.acquire()
        while not self._over.is_set():
            self._goes.set()

    @property
    def tracker(self) -> Any:
        """What a rank's tracker knows of it."""
        return SimpleNamespace(
            backwards=[], thread=self._thread.ident, native=self._thread.native_id
        )

    def go(self) -> None:
        """Return once it goes on."""
        self._waits.release()
        self._goes.wait()

    def end(self) -> None:
        self._over.set()
        with contextlib.suppress(RuntimeError):
            self._waits.release()
        self._thread.join()


@pytest.fixture
def training() -> Iterator[Training]:
    thread = Training()
    yield thread
    thread.end()


@pytest.mark.parametrize(("goes", "captures"), [(False, False), (True, False), (False, True)])
def test_a_gpu_is_asked_only_while_the_training_thread_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    training: Training,
    goes: bool,
    captures: bool,
) -> None:
    """A query from another thread could break the capture of a graph."""
    entry = {
        "process_group": ("0", ""), "collective_seq_id": 1, "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1, "retired": True, "state": "completed", "duration_ms": 0.5,
    }  # fmt: skip
    dump = pickle.dumps({"entries": [entry]})
    monkeypatch.setattr(torch_groups, "flight_recorders", lambda _: [lambda: dump])
    if goes:
        training.go()
    tracker = training.tracker
    tracker.device = SimpleNamespace(captures=captures, standing=lambda: MARKS)
    asking = RequestWriter(str(tmp_path))
    flight = Flight(str(tmp_path), str(tmp_path / "flight.json"), str(tmp_path / "none"), tracker)
    asking.ask(1)
    flight.look()
    answer: Answer = json.loads((tmp_path / "flight.json").read_text())
    assert answer.get("device") == (None if goes or captures else MARKS)
    assert [(each["sequence"], each["duration"]) for each in answer["entries"]] == [(1, 0.5)]
    asking.close()


def late(**more: Any) -> Answer:
    """A rank whose host waits for its GPU, in front of the collective that the others are in."""
    here = stacks(1, ("/job/train.py", 70, "main"))
    spins = {"seconds": 1.0, "letters": "RR", "cpu": 1.0, "busy": 1.0}
    return rank(
        1, "other", flight=[], stacks=here, later=here, activity=spins, device=MARKS, world_size=2,
        sites={"forward": "/job/train.py:61", "optimizer": "/job/train.py:64"}, **more,
    )  # fmt: skip


def test_a_host_that_waits_for_its_gpu_is_not_at_the_guilty_line(tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, {**waiting(0), "world_size": 2}, late())
    assert (finding.code, finding.ranks, finding.severity) == ("DDP802", (1,), Severity.WARNING)
    assert str(finding.location) == "/job/train.py:64"
    assert finding.message.endswith(
        "rank 1 waits for 41 s at train.py:70 for its GPU, which is still at what was queued after "
        "optimizer at train.py:64"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"sends": True},
        {"device": [["other", NOW - 10**9, False]]},
        {"device": None},
        {"device": [["other", NOW - 42 * 10**9, True]]},
        {"later": stacks(1, ("/job/train.py", 71, "main"))},
    ],
)
def test_who_may_wait_for_something_else(change: Answer) -> None:
    assert gpu_holds_host(state(late()))
    assert not gpu_holds_host(state({**late(), **change}))
