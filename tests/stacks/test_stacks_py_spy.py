"""py-spy: native frames, and ranks that cannot answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddpdoctor.nodes import hang_examination
from ddpdoctor.render import stack_text as render
from ddpdoctor.run.reader import glance
from ddpdoctor.run.records.supervisor import ProcessState, RankStacks
from ddpdoctor.stacks import capture as capture_module
from ddpdoctor.stacks.capture import capture, find_py_spy, native_frames, read_declared
from ddpdoctor.system.proc import read_stat
from tests.conftest import Doctor
from tests.support.candidates import HOLDS_GIL, SLEEPS, Candidates, at, line_of

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="stacks are asked for by /proc")


@pytest.fixture
def spied() -> None:
    """For a test in which py-spy looks, if it is installed."""


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere nobody looks into a process that does not answer."""
    if "spied" not in request.fixturenames:
        monkeypatch.setattr(capture_module, "find_py_spy", lambda: None)


# -- native frames


def test_native_frames_are_those_below_python() -> None:
    def frame(name: str, module: str | None) -> dict[str, object]:
        return {"name": name, "module": module, "filename": "x"}

    dump = [
        {"pid": 5, "os_thread_id": 6, "frames": [frame("other", "/lib/a.so")]},
        {
            "pid": 5,
            "os_thread_id": 5,
            "frames": [
                frame("0x7fff12", "/lib/libc.so.6"),
                frame("wait", "/lib/libtorch_cpu.so"),
                frame("step", None),
                frame("main", "/lib/libc.so.6"),
            ],
        },
    ]
    assert native_frames(dump) == ("wait (libtorch_cpu.so)", "? (libc.so.6)")


@needs_linux
def test_py_spy_tells_what_native_code_does(spied: None, candidates: Candidates) -> None:
    if find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    candidates.start(HOLDS_GIL)
    time.sleep(0.2)
    (found,) = capture(glance(candidates.run_dir), patience=20, native=True)
    if "not permitted" in found.note:
        pytest.skip("ptrace is not permitted here")
    assert any(frame.startswith("pause (libc") for frame in found.native), found


@needs_linux
def test_without_py_spy_it_is_said(
    spied: None, candidates: Candidates, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates.start(SLEEPS)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    (found,) = capture(glance(candidates.run_dir), patience=20, native=True)
    assert found.main is not None
    assert "py-spy is not installed" in found.note


def look_into_stopped(candidates: Candidates) -> RankStacks:
    live = candidates.start(SLEEPS)
    os.kill(live.process.pid, signal.SIGSTOP)
    while (stat := read_stat(live.process.pid)) is not None and stat.letter != "T":
        time.sleep(0.01)
    (found,) = capture(glance(candidates.run_dir), patience=2)
    return found


@needs_linux
def test_py_spy_looks_into_who_cannot_answer(spied: None, candidates: Candidates) -> None:
    if find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    found = look_into_stopped(candidates)
    pid = candidates.started[0].process.pid
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    if "not permitted" in found.note:
        pytest.skip("ptrace is not permitted here")
    assert (found.trouble, found.note) == (
        "",
        "stopped (SIGSTOP); its stack was read by py-spy",
    )
    live = candidates.started[0]
    assert at(found.main) == line_of(live, "here")
    # The helper's, and none of ddpdoctor's own.
    assert [at(each) for each in found.threads[1:]] == [line_of(live, "naps")]
    # It answers itself when it goes on.
    os.kill(pid, signal.SIGCONT)
    (found,) = candidates.capture()
    assert (found.trouble, found.note) == ("", "")
    assert at(found.main) == line_of(live, "here")


def other_py_spy(directory: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory / "py-spy"
    path.write_text(f'#!/bin/sh\necho "$*" >> {directory}/asked\n{text}\n')
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(directory / "python"))


# What 0.4.3 prints as another user, and of a process that is stopped.
REFUSED = "Permission Denied: Try running again with elevated permissions by going 'sudo env !!'"
FAILED = "Error: Failed to get stack traces\n\nCaused by:\n    0: Failed to suspend process"


@needs_linux
@pytest.mark.parametrize(
    ("script", "note"),
    [
        (f'echo "{REFUSED}" >&2; exit 1', "py-spy may not look into the process (ptrace is not"),
        (f'echo "{FAILED}" >&2; exit 1', "py-spy says: Error: Failed to get stack traces"),
        ("exec sleep 600", "py-spy took over "),
        ("echo []", "py-spy saw no main thread"),
        ("echo '[{}]'", "the output of this py-spy is not understood"),
        ("exit 1", "py-spy failed without a message"),
    ],
    ids=["refused", "failed", "silent", "empty", "unknown", "mute"],
)
def test_a_py_spy_that_is_no_help_is_said_and_not_waited_for(
    spied: None,
    candidates: Candidates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    note: str,
) -> None:
    other_py_spy(tmp_path, script, monkeypatch)
    found = look_into_stopped(candidates)
    assert (found.trouble, found.threads) == ("stopped (SIGSTOP)", ())
    assert found.note.startswith(note)
    pid = candidates.started[0].process.pid
    assert (tmp_path / "asked").read_text() == f"dump --nonblocking --json --pid {pid}\n"
    lines = [
        "".join(text for text, _ in line) for line in render.draw((found,), render.StackStyle(), {})
    ]
    assert lines == ["✗ [0]  no stack: stopped (SIGSTOP)", f"  {found.note}"]


@needs_linux
def test_a_process_of_another_host_is_nobody_here(
    spied: None, candidates: Candidates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of this host may have the same pid."""
    other_py_spy(tmp_path, "exit 1", monkeypatch)
    candidates.start(SLEEPS)
    (declared,) = read_declared(candidates.run_dir)
    record = json.loads(Path(declared.path).read_bytes().splitlines()[0])
    record |= {"host": "node2", "namespace": "another boot"}
    Path(declared.path).write_text(json.dumps(record) + "\n")
    (found,) = candidates.capture()
    assert found.trouble == "on another host or in another container: node2"
    assert (found.threads, found.state) == ((), ProcessState())
    assert not (tmp_path / "asked").exists()
    (seen,) = hang_examination.examine(glance(candidates.run_dir), 1, (), {}, {})
    assert seen.stacks is not None and seen.stacks.trouble == found.trouble
    assert seen.activity is None


@needs_linux
def test_a_process_that_answers_is_not_looked_into(
    spied: None, candidates: Candidates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_py_spy(tmp_path, "exit 1", monkeypatch)
    candidates.start(SLEEPS)
    (found,) = candidates.capture()
    assert found.main is not None
    assert not (tmp_path / "asked").exists()


def test_the_command_needs_no_torch_and_says_what_is_wrong(doctor: Doctor) -> None:
    none = doctor.cli("stacks")
    assert (none.status, none.stdout) == (2, "")
    assert none.stderr.splitlines()[0] == "ddpdoctor: error: no run is live"
    wrong = doctor.cli("stacks", "--rank", "x")
    assert "option --rank needs ranks such as 0,2-3, not 'x'" in wrong.stderr
    assert "did you mean --native?" in doctor.cli("stacks", "--nativ").stderr
    assert subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "stacks", "--help"], capture_output=True, check=True
    ).stdout.startswith(b"Usage: ddpdoctor stacks")
