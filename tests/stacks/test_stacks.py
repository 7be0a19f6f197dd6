"""Stacks of ranks as they are read from what interpreters write."""

from __future__ import annotations

import os

import pytest

from ddpdoctor.run.records.supervisor import Frame, Thread
from ddpdoctor.stacks import capture
from ddpdoctor.stacks.capture import parse_dump
from ddpdoctor.stacks.frames import CUT, is_user_path

TORCH = "/srv/env/lib/python3.12/site-packages/torch"


@pytest.fixture
def spied() -> None:
    """For a test in which py-spy looks, if it is installed."""


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere nobody looks into a process that does not answer."""
    if "spied" not in request.fixturenames:
        monkeypatch.setattr(capture, "find_py_spy", lambda: None)


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
    other, main = parse_dump(ALL_THREADS, "/job")
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
    assert parse_dump(text) == (Thread(0, "", True, (Frame("/job/a.py", 4, "f"),)),)


def test_names_are_read_where_the_interpreter_writes_them() -> None:
    assert [thread.name for thread in parse_dump(NAMED)] == ["pin memory", "python"]


def test_a_thread_without_python_and_the_list_of_modules_are_no_frames() -> None:
    without, main = parse_dump(FATAL)
    assert without.frames == ()
    assert main.frames == (Frame("/job/a.py", 9, "<module>"),)


def test_a_stack_of_more_than_a_hundred_frames_is_said_to_be_cut() -> None:
    lines = ['  File "/job/a.py", line 5 in rec'] * 100
    (thread,) = parse_dump("\n".join(["Stack (most recent call first):", *lines, "  ..."]))
    assert thread.frames[0] == CUT
    assert len(thread.frames) == 101


def test_what_is_not_known_and_what_is_torn_is_left_out() -> None:
    text = 'Stack (most recent call first):\n  File ???, line ??? in ???\n  File "/job/a.py", li'
    assert parse_dump(text)[0].frames == (Frame("???", 0, "???"),)
    assert parse_dump("") == parse_dump("\0\xff no stack at all\n  File") == ()


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
