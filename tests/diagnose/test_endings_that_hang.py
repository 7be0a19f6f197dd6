"""Ranks whose script is over and whose process does not end (DDP815)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import RULES, Finding, Severity
from ddpdoctor.run.snapshot import Run
from ddpdoctor.stacks.capture import find_py_spy
from ddpdoctor.stacks.frames import ENDING
from tests.conftest import Doctor
from tests.support.hanging_ranks import TRAIN, findings, rank, stacks, waiting

SHUTDOWN = ("/usr/lib/python3.11/threading.py", 1590, "_shutdown")
CHILDREN = ("/usr/lib/python3.11/multiprocessing/util.py", 360, "_exit_function")
IDLE = {"seconds": 1.0, "letters": "SS", "cpu": 0.0}


def at_the_end(number: int, *frames: tuple[str, int, str], **more: Any) -> dict[str, Any]:
    """A rank whose main thread is there, and its helper thread in ``upload``."""
    told = stacks(number, *frames)
    path, line, name = ("/job/upload.py", 5, "upload")
    helper = {"ident": 2, "name": "uploader", "awaited": True}
    told["threads"].append({**helper, "frames": [{"path": path, "line": line, "function": name}]})
    other = {"ident": 3, "name": "daemon", "awaited": False}
    told["threads"].append({**other, "frames": [{"path": path, "line": 9, "function": "serve"}]})
    return rank(number, "other", stacks=told, **more)


def only(found: list[Finding]) -> Finding:
    (finding,) = found
    assert finding.code == "DDP815"
    return finding


def test_a_thread_that_is_no_daemon(tmp_path: Path) -> None:
    found = only(findings(tmp_path, at_the_end(0, SHUTDOWN), at_the_end(1, SHUTDOWN)))
    assert found.message == (
        "ranks 0 and 1 have been at the end of the script for 41 s, waiting for the thread "
        "'uploader', which is at upload.py:5"
    )
    assert (found.severity, found.ranks) == (Severity.WARNING, (0, 1))
    assert str(found.location) == "/job/upload.py:5"
    assert "daemon=True" in found.fix


def test_a_child_process(tmp_path: Path) -> None:
    child = {"pid": 77, "letter": "S", "cpu_seconds": 1.0, "command": "python work.py"}
    tracker = {"pid": 76, "letter": "S", "cpu_seconds": 0.1, "command": "resource_tracker"}
    told = stacks(0, CHILDREN, state={"letter": "S", "children": [tracker, child]})
    found = only(findings(tmp_path, rank(0, "ended", ended=True, stacks=told)))
    assert "waiting for the child process 77" in found.message
    assert found.evidence == ("child 77, S: python work.py",)


def test_what_was_registered_for_the_end(tmp_path: Path) -> None:
    told = stacks(0, ("/job/log.py", 8, "finish"))
    found = only(findings(tmp_path, rank(0, "ended", ended=True, stacks=told)))
    assert "at the end of the script for 41 s, in `finish` log.py:8" in found.message
    assert found.severity is Severity.WARNING


@pytest.mark.parametrize(("cpu", "severity"), [(0.0, Severity.ERROR), (1.0, None)])
def test_native_code_that_does_not_return(
    tmp_path: Path, cpu: float, severity: Severity | None
) -> None:
    """While it frees its memory, say, nothing is wrong."""
    told = {**stacks(0), "threads": [], "trouble": ENDING}
    ended = rank(0, "ended", ended=True, stacks=told, activity={**IDLE, "cpu": cpu})
    found = findings(tmp_path, ended)
    assert [each.severity for each in found] == ([severity] if severity else [])
    if found:
        assert "where Python's own shutdown does not come to its end (idle)" in found[0].message
        assert "destroy_process_group()" in found[0].fix


def test_what_works_at_its_end_is_given_time(tmp_path: Path) -> None:
    busy = [
        {**IDLE, "cpu": 0.9},
        {**IDLE, "children_cpu": 0.9},
        {**IDLE, "characters": 50 << 20},
        {**IDLE, "network": True},
        {**IDLE, "children_network": True},
    ]
    for activity in busy:
        assert findings(tmp_path, at_the_end(0, SHUTDOWN, activity=activity)) == []
    told = stacks(0, ("/job/log.py", 8, "finish"))
    assert findings(tmp_path, rank(0, "ended", ended=True, stacks=told, activity=busy[3])) == []
    long_ago = {"since": rank(0, "other")["since"] - 300_000_000_000}
    only(findings(tmp_path, at_the_end(0, SHUTDOWN, activity=busy[0], **long_ago)))


@pytest.mark.parametrize(
    ("frames", "note", "stands"),
    [
        ((SHUTDOWN,), "", True),
        ((), ENDING, False),
        ((("/job/log.py", 8, "finish"),), ENDING, False),
    ],
)
def test_what_a_rank_waited_for_stands_when_the_job_is_over(
    tmp_path: Path, frames: tuple[tuple[str, int, str], ...], note: str, stands: bool
) -> None:
    """A shutdown that was only slow does not."""
    told = {**at_the_end(0, *frames), "ended": True}
    told["stacks"]["note"] = note
    found = only(findings(tmp_path, told))
    lapsed = RULES["DDP815"].lapses(found, Run(tmp_path, {}, ()))
    assert (lapsed is None) is stands


def test_whoever_has_gone_is_not_at_its_end(tmp_path: Path) -> None:
    gone = {**stacks(0), "threads": [], "trouble": "has ended"}
    zombie = rank(0, "ended", ended=True, stacks=gone, activity={**IDLE, "letters": "ZZ"})
    unseen = rank(1, "ended", ended=True, stacks=gone)
    del unseen["activity"]
    reaped = {**unseen, "rank": 2, "exit": {"time": unseen["since"], "code": 0}}
    assert findings(tmp_path, zombie, unseen, reaped) == []


def test_whoever_is_at_the_end_will_not_come_any_more(tmp_path: Path) -> None:
    found = only(findings(tmp_path, waiting(0), at_the_end(1, SHUTDOWN)))
    assert (found.severity, found.ranks) == (Severity.ERROR, (1,))
    assert "rank 0 waits for it in DDP's all_reduce #9" in found.message


def test_a_script_that_calls_its_own_shutdown_is_not_at_its_end(tmp_path: Path) -> None:
    found = findings(tmp_path, at_the_end(0, TRAIN, ("/job/threading.py", 3, "_shutdown")))
    assert "DDP815" not in [each.code for each in found]


JOB = """
import ctypes
import gc
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Library:
    # Native code that keeps the GIL, called while Python itself is taken down.
    def __init__(self):
        self.sleep = ctypes.PyDLL(None).sleep

    def __del__(self):
        self.sleep(600)

dist.init_process_group("gloo")
library = Library() if dist.get_rank() == 1 else None
ddp = DistributedDataParallel(nn.Linear(4, 2))
for _ in range(5):
    ddp(torch.ones(2, 4)).sum().backward()
del ddp
gc.collect()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_real_shutdown_that_does_not_end_is_ended_if_asked(doctor: Doctor) -> None:
    doctor.write("train.py", JOB)
    options = ("--hang-after", "2", "--kill-on-hang", "--nproc-per-node", "2")
    said = doctor.run(*options, "--", "train.py")
    assert said.status == 4, said.stderr
    words = " ".join(said.ours.replace("ddpdoctor: ", "").split())
    assert "error DDP815: rank 1 has been at the end of the script for" in words
    assert "where Python's own shutdown does not come to its end" in words
    if find_py_spy() is not None:
        assert "below `__del__` train.py:" in words


def test_one_long_line_of_stderr_takes_no_time() -> None:
    from ddpdoctor.diagnose.crashes.rank_endings import _aborted

    words = "Watchdog caught collective operation timeout"
    # Each rank's mark was searched to the line's end: minutes for a megabyte.
    assert _aborted("[rank0]: " * 120_000) == frozenset()
    assert _aborted(words * 20_000) == frozenset()
    assert _aborted(f"x\n[rank3]:[E1] {words}\n{words}\n") == {3}
