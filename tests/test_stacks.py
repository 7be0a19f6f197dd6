"""Stacks of ranks: what is read, how ranks are merged, and whom a capture asks and how."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import ddpdoctor.probe
from ddpdoctor.core.ranks import bracketed
from ddpdoctor.render import stacks as render
from ddpdoctor.run.snapshot import glance
from ddpdoctor.stacks import asking, py_spy, saved
from ddpdoctor.stacks.capture import capture
from ddpdoctor.stacks.code import code_of
from ddpdoctor.stacks.declared import read_declared
from ddpdoctor.stacks.folding import FOLDED, fold, tail
from ddpdoctor.stacks.merge import merge
from ddpdoctor.stacks.model import CUT, MAIN, Frame, RankStacks, Thread, from_record, to_record
from ddpdoctor.stacks.parse import parse
from ddpdoctor.stacks.py_spy import find_py_spy, native_frames
from ddpdoctor.stacks.user_frames import innermost, is_user_path
from ddpdoctor.supervise.hangs import examination
from ddpdoctor.system.process_state import ChildState, ProcessState, read_signals, read_stat
from tests.candidates import HOLDS_GIL, SLEEPS, SPINS, Candidates, at, line_of
from tests.conftest import LIMIT, Doctor

ENTRY = Path(ddpdoctor.probe.__file__).parent / "entry"
TORCH = "/srv/env/lib/python3.12/site-packages/torch"

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="stacks are asked for by /proc")


@pytest.fixture
def spied() -> None:
    """For a test in which py-spy looks, if it is installed."""


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere nobody looks into a process that does not answer."""
    if "spied" not in request.fixturenames:
        monkeypatch.setattr(py_spy, "find_py_spy", lambda: None)


# -- what faulthandler writes

ALL_THREADS = """\
Thread 0x00007ffa0ef2c6c0 (most recent call first):
  File "/usr/lib/python3.10/threading.py", line 953 in run
  File "/usr/lib/python3.10/threading.py", line 973 in _bootstrap

Current thread 0x00007ffa0fa35b80 (most recent call first):
  File "<str\\xefng>", line 1 in <module>
  File "/job/tr\\u4e00in.py", line 3 in \\xfcn\\xefcode
  File "sub/main.py", line 8 in <module>
"""
"""CPython 3.10 to 3.13 write this, letter by letter."""

NAMED = """\
Thread 0x00007f2f5bfff6c0 [pin memory] (most recent call first):
  File "/job/a.py", line 2 in f

Current thread 0x00007f2f6c1b7740 [python] (most recent call first):
  File "/job/a.py", line 9 in <module>
"""
"""CPython 3.14 names the threads."""

FATAL = """\
Fatal Python error: Segmentation fault

Thread 0x00007f2f5bfff6c0 (most recent call first):
  <no Python frame>

Current thread 0x00007f2f6c1b7740 (most recent call first):
  File "/job/a.py", line 9 in <module>

Extension modules: torch._C, numpy (total: 2)
"""


def test_all_threads_are_read_outermost_frame_first() -> None:
    other, main = parse(ALL_THREADS, "/job")
    assert (other.ident, other.current) == (0x7FFA0EF2C6C0, False)
    assert [frame.function for frame in other.frames] == ["_bootstrap", "run"]
    assert (main.ident, main.current) == (0x7FFA0FA35B80, True)
    assert main.frames == (
        Frame("/job/sub/main.py", 8, "<module>"),
        Frame("/job/tr一in.py", 3, "ünïcode"),
        Frame("<strïng>", 1, "<module>"),
    )


def test_one_thread_alone_is_read() -> None:
    text = 'Stack (most recent call first):\n  File "/job/a.py", line 4 in f\n'
    assert parse(text) == (Thread(0, "", True, (Frame("/job/a.py", 4, "f"),)),)


def test_names_are_read_where_the_interpreter_writes_them() -> None:
    assert [thread.name for thread in parse(NAMED)] == ["pin memory", "python"]


def test_a_thread_without_python_and_the_list_of_modules_are_no_frames() -> None:
    without, main = parse(FATAL)
    assert without.frames == ()
    assert main.frames == (Frame("/job/a.py", 9, "<module>"),)


def test_a_stack_of_more_than_a_hundred_frames_is_said_to_be_cut() -> None:
    lines = ['  File "/job/a.py", line 5 in rec'] * 100
    (thread,) = parse("\n".join(["Stack (most recent call first):", *lines, "  ..."]))
    assert thread.frames[0] == CUT
    assert len(thread.frames) == 101


def test_what_is_not_known_and_what_is_torn_is_left_out() -> None:
    text = 'Stack (most recent call first):\n  File ???, line ??? in ???\n  File "/job/a.py", li'
    assert parse(text)[0].frames == (Frame("???", 0, "???"),)
    assert parse("") == parse("\0\xff no stack at all\n  File") == ()


# -- whose frames


@pytest.mark.parametrize(
    ("path", "mine"),
    [
        ("/job/train.py", True),
        ("/srv/lib/models/net.py", True),
        (f"{TORCH}/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        ("/opt/conda/lib/python3.13t/threading.py", False),
        (os.__file__, False),
        ("/srv/ddpdoctor/probe/hooks/collectives.py", False),
        ("<frozen runpy>", False),
        ("<string>", False),
        ("???", False),
        ("/tmp/torchinductor_me/ab/kernel.py", False),
        (f"/scratch/compiled/qw/cqw{'a2' * 24}.py", False),
        ("/job/qw/cqwerty.py", True),
    ],
)
def test_the_users_files_are_told_from_libraries(path: str, mine: bool) -> None:
    assert is_user_path(path) is mine


TRAIN = Frame("/job/train.py", 40, "main")
STEP = Frame("/job/train.py", 12, "step")
SAVE = Frame("/job/train.py", 20, "save")
CALL = Frame(f"{TORCH}/nn/modules/module.py", 1700, "_call_impl")
HOOK = Frame("/srv/ddpdoctor/probe/hooks/collectives.py", 100, "collective")
REDUCE = Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce")
RUNNER = Frame("<frozen runpy>", 88, "_run_code")


def test_libraries_are_folded_and_our_hooks_are_nobodys_business() -> None:
    stack = (RUNNER, TRAIN, CALL, STEP, HOOK, CALL, REDUCE, HOOK)
    assert fold(stack) == (TRAIN, Frame("torch", 0, FOLDED), STEP)
    assert tail(stack) == (CALL, REDUCE)
    assert innermost(stack) == STEP
    assert fold((RUNNER, CALL)) == (RUNNER, CALL)
    assert innermost((RUNNER, CALL)) is None


# -- merging


def stacks_of(rank: int, *frames: Frame, trouble: str = "") -> RankStacks:
    threads = (Thread(1, MAIN, False, frames),) if frames else ()
    return RankStacks(rank, 0, 100 + rank, "node0", threads, trouble=trouble)


def test_equal_frames_stand_once_and_the_odd_one_comes_first() -> None:
    ranks = [stacks_of(rank, TRAIN, STEP, REDUCE) for rank in (0, 1, 3)]
    merged = merge([*ranks, stacks_of(2, TRAIN, SAVE)])
    (root,) = merged.roots
    assert (root.ranks, root.frames, root.odd) == ((0, 1, 2, 3), (TRAIN,), False)
    odd, most = root.children
    assert (odd.ranks, odd.frames, odd.odd) == ((2,), (SAVE,), True)
    assert (most.ranks, most.frames, most.odd) == ((0, 1, 3), (STEP, REDUCE), False)
    assert (set(merged.odd), merged.places) == ({2}, 2)


def test_nobody_is_odd_in_a_tie_or_for_what_a_library_does() -> None:
    tie = merge([stacks_of(0, TRAIN, STEP), stacks_of(1, TRAIN, SAVE)])
    assert (tie.odd, tie.places) == (frozenset(), 2)
    below = merge(
        [stacks_of(0, TRAIN, CALL), stacks_of(1, TRAIN, REDUCE), stacks_of(2, TRAIN, REDUCE)]
    )
    assert (below.odd, below.places) == (frozenset(), 1)


def test_a_rank_may_end_where_others_go_on() -> None:
    (root,) = merge([stacks_of(0, TRAIN), stacks_of(1, TRAIN, STEP)]).roots
    assert root.ranks == (0, 1)
    assert [child.ranks for child in root.children] == [(1,)]


def test_ranks_without_a_stack_are_told_apart() -> None:
    merged = merge([stacks_of(0, TRAIN), stacks_of(1, trouble="has ended")])
    assert [each.rank for each in merged.missing] == [1]
    assert merged.roots[0].ranks == (0,)
    assert merge([]).roots == ()


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "[0]"), ([3, 0, 2, 4, 4], "[0,2-4]"), (range(8), "[0-7]")]
)
def test_rank_sets(ranks: Sequence[int], text: str) -> None:
    assert bracketed(ranks) == text


def test_a_thousand_ranks_become_a_few_lines() -> None:
    ranks = [
        stacks_of(rank, RUNNER, TRAIN, *[CALL] * 60, SAVE if rank == 700 else STEP, REDUCE)
        for rank in range(1024)
    ]
    lines = render.draw(ranks, render.Look(), {})
    assert len(lines) < 12
    assert "! [700]" in "\n".join(plain(lines))


# -- as text


def plain(lines: Sequence[render.Line]) -> list[str]:
    return ["".join(text for text, _ in line).rstrip() for line in lines]


def test_the_tree_as_text_in_80_columns_of_ascii() -> None:
    ranks = [stacks_of(rank, RUNNER, TRAIN, STEP, HOOK, REDUCE) for rank in (0, 1, 3)]
    ranks += [stacks_of(2, RUNNER, TRAIN, SAVE), stacks_of(4, trouble="stopped (SIGSTOP)")]
    code = {STEP: "loss.backward()" + " # and so on" * 9, TRAIN: "main()"}
    look = render.Look(80, ascii_only=True)
    assert plain(render.draw(ranks, look, code)) == [
        "x [4]  no stack: stopped (SIGSTOP)",
        "[0-3]",
        "  /job/train.py:40  main  main()",
        "  ! [2]  not where the other 3 are",
        "    /job/train.py:20  save",
        "  [0-1,3]",
        "    /job/train.py:12  step  loss.backward() # and so on # and so on # and so ...",
        "    ... 1 frame in torch, in all_reduce (distributed_c10d.py:3252)",
    ]
    assert render.summary(merge(ranks)) == "4 of 5 ranks: [2] is not where the other 3 are"


def test_a_long_path_keeps_its_end_and_every_line_fits() -> None:
    deep = Frame("/srv/" + "very/" * 30 + "deep/train.py", 7, "main")
    for width in (40, 80, 120):
        look = render.Look(width, ascii_only=True)
        lines = plain(render.draw([stacks_of(0, deep)], look, {deep: "main()"}))
        assert all(len(line) <= width for line in lines)
        assert "deep/train.py:7" in lines[1]


def test_the_state_of_a_process_is_said_where_it_matters() -> None:
    ranks = [
        replace(stacks_of(0, TRAIN, SAVE), state=ProcessState("D")),
        replace(stacks_of(1, TRAIN, STEP), gil_held=True),
        stacks_of(2, TRAIN, STEP),
    ]
    lines = plain(render.draw(ranks, render.Look(ascii_only=True), {}))
    assert "  ! [0]  not where the other 2 are  in disk sleep" in lines
    assert "  [1-2]  [1] in native code that holds the GIL" in lines


def test_what_is_below_differs_by_rank() -> None:
    ranks = [stacks_of(0, TRAIN, REDUCE), stacks_of(1, TRAIN, CALL), stacks_of(2, TRAIN, REDUCE)]
    assert plain(render.draw(ranks, render.Look(ascii_only=True), {}))[2:] == [
        "  [0,2] ... 1 frame in torch, in all_reduce (distributed_c10d.py:3252)",
        "  [1] ... 1 frame in torch, in _call_impl (module.py:1700)",
    ]


def test_code_is_not_shown_of_a_file_that_was_changed_since(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\nloss.backward()\n")
    frame = Frame(str(path), 2, "f")
    beyond = Frame(str(path), 20, "f")
    later = time.time_ns() + 10**9
    assert code_of([frame, beyond, CALL], later) == {frame: "loss.backward()"}
    assert code_of([frame], path.stat().st_mtime_ns - 1) == {}


# -- as JSON


def test_json_and_back() -> None:
    child = ChildState(7, "S", 0.5, "python train.py")
    one = RankStacks(
        3, 1, 44, "node1", (Thread(9, MAIN, False, (TRAIN, STEP)),), ("poll (libc.so.6)",),
        ProcessState("D", 1.5, "futex", (child,)), True, "", "no native frames",
    )  # fmt: skip
    assert from_record(json.loads(json.dumps(to_record(one)))) == one


@pytest.mark.parametrize("damaged", [{}, {"threads": 3, "state": [], "native": {}, "rank": "x"}])
def test_damaged_json_is_read_as_far_as_it_goes(damaged: dict[str, object]) -> None:
    assert from_record(damaged).threads == ()


def test_the_last_stacks_are_kept(tmp_path: Path) -> None:
    assert saved.load(tmp_path) is None
    ranks = (stacks_of(0, TRAIN), stacks_of(1, trouble="has ended"))
    saved.save(tmp_path, ranks, 5)
    assert saved.load(tmp_path) == saved.Saved(5, ranks)
    (tmp_path / saved.NAME).write_text('{"ranks": [3]}')
    assert saved.load(tmp_path) is None


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
    assert len(declared.path.read_bytes().splitlines()) == 2


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
    """The declaration speaks of another one: pids and descriptors are given away anew."""
    live = candidates.start(HOLDS_GIL)
    time.sleep(0.2)
    (declared,) = read_declared(candidates.run_dir)
    if how == "start":
        other = declared.path.with_name(f"stacks-{declared.pid}-{declared.start - 1}.txt")
        declared.path.rename(other)
        expected = "has ended"
    else:
        record = json.loads(declared.path.read_bytes().splitlines()[0])
        record[how] = 0
        declared.path.write_text(json.dumps(record) + "\n")
        expected = asking.OTHER_PROGRAM
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
    assert found.trouble == asking.OTHER_PROGRAM
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
    declared.path.write_text('{"kind": "stacks"')
    assert candidates.capture() == ()
    declared.path.unlink()
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
    dialogues = [asking.Asking(declared) for _ in range(3)]
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
    os.closerange(3, 256)
    ends = [os.pipe() for _ in range(8)]
    for _, end in ends:
        os.write(end, b"its own")
    print("ready")
    time.sleep(0.5)
    assert all(os.read(end, 99) == b"its own" for end, _ in ends)
    print("whole")
    time.sleep(600)
    """
    live = candidates.start(source)
    while "whole" not in live.out.read_text():
        (found,) = candidates.capture()
        assert found.trouble == asking.OTHER_PROGRAM
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
    lines = ["".join(text for text, _ in line) for line in render.draw((found,), render.Look(), {})]
    assert lines == ["✗ [0]  no stack: stopped (SIGSTOP)", f"  {found.note}"]


@needs_linux
def test_a_process_of_another_host_is_nobody_here(
    spied: None, candidates: Candidates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of this host may have the same pid."""
    other_py_spy(tmp_path, "exit 1", monkeypatch)
    candidates.start(SLEEPS)
    (declared,) = read_declared(candidates.run_dir)
    record = json.loads(declared.path.read_bytes().splitlines()[0])
    record |= {"host": "node2", "namespace": "another boot"}
    declared.path.write_text(json.dumps(record) + "\n")
    (found,) = candidates.capture()
    assert found.trouble == "on another host or in another container: node2"
    assert (found.threads, found.state) == ((), ProcessState())
    assert not (tmp_path / "asked").exists()
    (seen,) = examination.examine(glance(candidates.run_dir), 1, (), {})
    assert seen["stacks"]["trouble"] == found.trouble and "activity" not in seen


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
    assert "option --rank needs ranks, not 'x'" in wrong.stderr
    assert "did you mean --native?" in doctor.cli("stacks", "--nativ").stderr
    assert subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "stacks", "--help"], capture_output=True, check=True
    ).stdout.startswith(b"Usage: ddpdoctor stacks")
