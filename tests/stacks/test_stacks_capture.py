"""Whom a capture of stacks asks, and how."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddpdoctor.run.records.supervisor import MAIN
from ddpdoctor.stacks import capture
from ddpdoctor.stacks.capture import read_declared
from ddpdoctor.stacks.frames import merge
from ddpdoctor.system.proc import read_stat
from ddpdoctor.system.process_activity import read_signals
from tests.conftest import LIMIT, Doctor
from tests.support.candidates import HOLDS_GIL, SLEEPS, SPINS, Candidates, at, line_of

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="stacks are asked for by /proc")


@pytest.fixture
def spied() -> None:
    """For a test in which py-spy looks, if it is installed."""


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere nobody looks into a process that does not answer."""
    if "spied" not in request.fixturenames:
        monkeypatch.setattr(capture, "find_py_spy", lambda: None)


# -- asking processes: real ones with the real probe, which need no torch to be candidates


@needs_linux
def test_eight_processes_are_asked_together(candidates: Candidates) -> None:
    lives = [candidates.start(SPINS if rank == 5 else SLEEPS, rank) for rank in range(8)]
    found = candidates.capture()
    assert [each.rank for each in found] == list(range(8))
    assert [each.trouble for each in found] == [""] * 8
    assert [each.pid for each in found] == [live.process.pid for live in lives]
    assert [at(each.main) for each in found] == [
        line_of(live, "spins" if rank == 5 else "here") for rank, live in enumerate(lives)
    ]
    assert [thread.name for thread in found[0].threads] == [MAIN, "helper"]
    assert at(found[0].threads[1]) == line_of(lives[0], "naps")
    assert not any(each.gil_held for each in found)
    assert merge(found).odd == {5}
    assert found[5].state.letter == "R"
    assert found[0].state.letter == "S"


@needs_linux
def test_native_code_that_holds_the_gil_is_no_obstacle(candidates: Candidates) -> None:
    live = candidates.start(HOLDS_GIL)
    time.sleep(0.2)
    (found,) = candidates.capture()
    assert (found.trouble, found.gil_held) == ("", True)
    assert at(found.main) == line_of(live, "here")
    assert [at(each) for each in found.threads[1:]] == [line_of(live, "naps")]


@needs_linux
def test_native_code_that_never_gives_the_gil_back_is_seen_again_and_again(
    candidates: Candidates,
) -> None:
    """The first request was read, and nobody reads the others."""
    source = """
    import ctypes
    libc = ctypes.PyDLL(None)
    print("ready")
    # The handler of a signal runs within it, and it goes on.
    libc.qsort(bytes(1 << 22), 1 << 22, 1, libc.usleep)  # here
    """
    live = candidates.start(source)
    time.sleep(0.2)
    for _ in range(3):
        (found,) = candidates.capture()
        assert (found.trouble, found.gil_held) == ("", True)
        assert at(found.main) == line_of(live, "here")


@needs_linux
def test_a_stopped_process_is_said_to_be_and_finds_nothing_when_it_goes_on(
    candidates: Candidates,
) -> None:
    live = candidates.start(SLEEPS)
    live.process.send_signal(signal.SIGSTOP)
    while psutil.Process(live.process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    for _ in range(3):
        (found,) = candidates.capture()
        assert (found.trouble, found.main, found.state.letter) == ("stopped (SIGSTOP)", None, "T")
    (declared,) = read_declared(candidates.run_dir)
    live.process.send_signal(signal.SIGCONT)
    (found,) = candidates.capture()
    assert at(found.main) == line_of(live, "here")
    assert len(Path(declared.path).read_bytes().splitlines()) == 2


@needs_linux
def test_a_dead_process_is_said_to_be(candidates: Candidates) -> None:
    live = candidates.start(SLEEPS)
    live.process.kill()
    # Not waited for: it is a zombie.
    while psutil.Process(live.process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    (found,) = candidates.capture()
    assert (found.trouble, found.threads) == ("has ended", ())
    live.process.wait()
    (found,) = candidates.capture()
    assert found.trouble == "has ended"


@needs_linux
@pytest.mark.parametrize("how", ["start", "pipe_inode", "file"])
def test_a_process_that_is_not_the_one_it_was_is_left_alone(
    candidates: Candidates, how: str, token: str
) -> None:
    """The declaration speaks of another one: pids and descriptors are reused."""
    live = candidates.start(HOLDS_GIL)
    time.sleep(0.2)
    (declared,) = read_declared(candidates.run_dir)
    if how == "start":
        other = Path(declared.path).with_name(f"stacks-{declared.pid}-{declared.start - 1}.txt")
        Path(declared.path).rename(other)
        expected = "has ended"
    else:
        record = json.loads(Path(declared.path).read_bytes().splitlines()[0])
        record[how] = 0
        Path(declared.path).write_text(json.dumps(record) + "\n")
        expected = capture.OTHER_PROGRAM
    (found,) = candidates.capture()
    assert (found.trouble, found.threads) == (expected, ())
    assert live.process.poll() is None


@needs_linux
def test_after_exec_nothing_is_sent_to_what_does_not_expect_it(candidates: Candidates) -> None:
    source = """
    import os
    print("ready", flush=True)
    os.execvp("sleep", ["sleep", "600"])
    """
    live = candidates.start(source)
    process = psutil.Process(live.process.pid)
    while process.name() != "sleep":
        time.sleep(0.01)
    (found,) = candidates.capture()
    assert found.trouble == capture.OTHER_PROGRAM
    assert live.process.poll() is None


@needs_linux
def test_a_python_that_is_started_by_exec_can_be_asked_again(candidates: Candidates) -> None:
    source = """
    import os, sys, time
    if len(sys.argv) == 1:
        os.execv(sys.executable, [sys.executable, "-u", __file__, "again"])
    print("ready")
    time.sleep(600)  # here
    """
    live = candidates.start(source)
    (found,) = candidates.capture()
    assert at(found.main) == line_of(live, "here")


@needs_linux
def test_children_of_a_candidate_are_none(candidates: Candidates) -> None:
    source = """
    import os, subprocess, sys, time
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if os.fork() == 0:
        time.sleep(600)
    print("ready")
    time.sleep(600)  # here
    """
    live = candidates.start(source)
    # Both have to have come to their sleep.
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        (found,) = candidates.capture()
        if [child.letter for child in found.state.children] == ["S", "S"]:
            break
    assert [child.letter for child in found.state.children] == ["S", "S"]
    assert (found.pid, at(found.main)) == (live.process.pid, line_of(live, "here"))
    assert any("time.sleep(600)" in child.command for child in found.state.children)
    for child in found.state.children:
        os.kill(child.pid, signal.SIGKILL)


@needs_linux
def test_a_signal_that_the_job_takes_is_not_sent(candidates: Candidates) -> None:
    source = """
    import signal, time
    from ddpdoctor.probe.runtime import stacks
    taken = []
    number = stacks._declared.signal
    print("had", number)
    assert number and signal.getsignal(number) is signal.SIG_DFL
    signal.signal(number, lambda *_: taken.append(number))
    print("ready")
    while not taken:
        time.sleep(0.1)
    print("taken")
    """
    live = candidates.start(source)
    (before,) = read_declared(candidates.run_dir)
    assert all(each.main is not None for each in candidates.capture())
    while not (after := read_declared(candidates.run_dir)) or after == [before]:
        time.sleep(0.01)
    assert after[0].signal not in (0, before.signal)
    assert all(each.main is not None for each in candidates.capture())
    assert "taken" not in live.out.read_text()


@needs_linux
def test_a_process_that_said_nothing_is_not_asked(candidates: Candidates, doctor: Doctor) -> None:
    """Another run's process, or one whose declaration was not written: nobody signals it."""
    live = candidates.start(SLEEPS)
    (declared,) = read_declared(candidates.run_dir)
    Path(declared.path).write_text('{"kind": "stacks"')
    assert candidates.capture() == ()
    Path(declared.path).unlink()
    assert candidates.capture() == ()
    assert live.process.poll() is None


@needs_linux
def test_every_one_of_many_requests_in_a_row_is_answered(candidates: Candidates) -> None:
    live = candidates.start(SPINS)
    line = line_of(live, "spins")
    assert [at(candidates.capture()[0].main) for _ in range(100)] == [line] * 100


@needs_linux
def test_what_is_asked_twice_at_once_is_answered_twice(candidates: Candidates) -> None:
    live = candidates.start(SLEEPS)
    (declared,) = read_declared(candidates.run_dir)
    dialogues = [capture.StackRequest(declared) for _ in range(3)]
    turns = [each.turns() for each in dialogues]
    while turns:
        for each in list(turns):
            if next(each, StopIteration) is StopIteration:
                turns.remove(each)
        time.sleep(0.001)
    assert [each.trouble for each in dialogues] == [""] * 3
    assert {at(each.threads[0]) for each in dialogues} == {line_of(live, "here")}


@needs_linux
def test_the_jobs_own_faulthandler_works_as_before(candidates: Candidates, tmp_path: Path) -> None:
    source = """
    import faulthandler, os, signal, sys, time
    faulthandler.enable(open("own-fatal", "w"))
    faulthandler.register(signal.SIGUSR1, file=open("own-usr1", "w"), all_threads=False)
    faulthandler.dump_traceback_later(0.1, repeat=False, file=open("own-later", "w"))
    assert faulthandler.is_enabled()
    print("ready")
    while True: time.sleep(0.05)  # here
    """
    live = candidates.start(source)
    (found,) = candidates.capture()
    assert found.trouble == ""
    live.process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + LIMIT
    names = ("own-usr1", "own-later")
    while time.monotonic() < deadline and not all(
        (tmp_path / name).read_text().strip() for name in names
    ):
        time.sleep(0.05)
    for name in names:
        assert f'.py", line {line_of(live, "here")} in <module>' in (tmp_path / name).read_text()
    live.process.send_signal(signal.SIGSEGV)
    assert live.process.wait(LIMIT) == -signal.SIGSEGV
    assert "Segmentation fault" in (tmp_path / "own-fatal").read_text()


@needs_linux
def test_a_full_disk_is_not_taken_for_a_held_gil(candidates: Candidates) -> None:
    """A signal would be sent then, to a process that runs Python."""
    source = """
    import resource
    print("ready")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    while True: pass
    """
    live = candidates.start(source)
    while not (found := candidates.capture()[0]).trouble:
        pass
    assert found.trouble == "could not write its answer: is the disk full?"
    assert not found.gil_held
    assert live.process.poll() is None


@needs_linux
def test_a_job_that_closes_all_files_loses_nothing_but_its_stacks(candidates: Candidates) -> None:
    source = """
    import os, time
    os.closerange(3, 1024)
    reading, writing = os.pipe()
    # Those of ddpdoctor have high numbers, which the job's pipe has now.
    for number in range(writing + 1, 1024):
        os.dup2(writing, number)
    os.write(writing, b"its own")
    print("ready")
    time.sleep(0.5)
    assert os.read(reading, 999) == b"its own"
    print("whole")
    time.sleep(600)
    """
    live = candidates.start(source)
    while "whole" not in live.out.read_text():
        (found,) = candidates.capture()
        assert found.trouble == capture.OTHER_PROGRAM
        assert live.process.poll() is None, live.err.read_text()


@needs_linux
def test_nothing_of_the_job_is_kept_by_being_asked(candidates: Candidates) -> None:
    source = """
    import gc, time, weakref
    gc.disable()

    class Tensor:
        pass

    def step():
        big = Tensor()
        print("ready")
        time.sleep(1)
        return weakref.ref(big)

    kept = step()
    time.sleep(0.2)
    print("kept" if kept() else "gone")
    time.sleep(600)
    """
    live = candidates.start(source)
    while not {"kept", "gone"} & set(live.out.read_text().split()):
        assert candidates.capture()[0].main is not None
    assert "gone" in live.out.read_text()


@needs_linux
def test_being_asked_interrupts_nothing(candidates: Candidates) -> None:
    """A sleep in C that a signal would cut short, and Python's own, which go on."""
    source = """
    import ctypes, time
    libc = ctypes.CDLL(None)
    print("ready")
    started = time.monotonic()
    left = libc.sleep(2)
    time.sleep(1)
    print("slept", left, time.monotonic() - started >= 3)
    """
    live = candidates.start(source)
    answers = 0
    while live.process.poll() is None:
        answers += sum(each.main is not None for each in candidates.capture())
    assert live.process.wait(LIMIT) == 0
    assert "slept 0 True" in live.out.read_text()
    assert answers > 10


PYTHONS = [
    path
    for minor in range(10, 15)
    if minor != sys.version_info[1]
    for path in (Path(f"/usr/bin/python3.{minor}"), Path(f"/usr/local/bin/python3.{minor}"))
    if path.exists()
]
"""Others than the one that runs the tests, where there are any."""


@needs_linux
@pytest.mark.parametrize("python", PYTHONS or [Path(sys.executable)], ids=lambda path: path.name)
@pytest.mark.parametrize("source", [SLEEPS, HOLDS_GIL], ids=["answers", "holds the GIL"])
def test_other_pythons_answer_as_well(candidates: Candidates, python: Path, source: str) -> None:
    live = candidates.start(source, python=str(python))
    time.sleep(0.2)
    (found,) = candidates.capture()
    assert at(found.main) == line_of(live, "here")
    assert at(found.threads[1]) == line_of(live, "naps")


def test_processes_that_are_not_there() -> None:
    assert read_stat(2**22 + 1) is None
    assert read_signals(2**22 + 1, 2**22 + 1) is None
    own = read_stat(os.getpid())
    assert own is None or own.letter == "R"
