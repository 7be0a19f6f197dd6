"""Pickles that somebody made to harm who reads them: nothing runs, and memory has a limit."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import resource
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.diagnose.hangs import flight_dumps
from ddpdoctor.diagnose.hangs.flight_dumps import DamagedPickleError, loads, read
from tests.support.flight_files import entry, write

ADDRESS_SPACE = 1 << 30
"""Bytes of a command that reads something hostile."""


class Calls:
    """Unpickled by Python, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self.path),)


class WithState:
    def __init__(self) -> None:
        self.state = 1


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False)
    | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text() | st.integers(0, 9), each)
    | st.lists(each, max_size=4).map(tuple),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(plain, st.integers(2, 5))
def test_plain_data_is_read_as_python_does(value: Any, protocol: int) -> None:
    assert loads(pickle.dumps(value, protocol)) == value


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_data_or_damage(data: bytes) -> None:
    with contextlib.suppress(DamagedPickleError):
        loads(data)


def test_a_file_that_is_cut_short_anywhere_is_damage() -> None:
    data = pickle.dumps({"entries": [entry(number, line=9) for number in range(1, 4)]}, 2)
    for end in range(len(data)):
        with pytest.raises(DamagedPickleError):
            loads(data[:end])


@pytest.mark.parametrize("protocol", range(6))
def test_no_code_runs(protocol: int, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for value in (
        Calls(made), WithState(), print, collections.OrderedDict(a=1), complex(1, 2), Path, {1},
        b"x", bytearray(b"x"),
    ):  # fmt: skip
        with pytest.raises(DamagedPickleError):
            loads(pickle.dumps({"version": value}, protocol))
    assert not made.exists()


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n(S'touch made'\ntR.",
        b"(S'touch made'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch made'\no.",
        b"}(S'__setstate__'\ncos\nsystem\nuS'touch made'\nb.",
        b"\x8c\x02os\x8c\x06system\x93\x8c\x0atouch made\x85R.",
        b"\x82\x01.",
        b"P1\n.",
        b"\x8c\x011Q.",
        b"\x97.",
        b"I" + b"9" * 1_000_000 + b"\n.",
        b"L" + b"9" * 1_000_000 + b"L\n.",
    ],
    ids=["REDUCE", "INST", "OBJ", "BUILD", "STACK_GLOBAL", "EXT1", "PERSID", "BINPERSID",
         "NEXT_BUFFER", "INT", "LONG"],
)  # fmt: skip
def test_opcodes_that_import_call_or_build_do_not_exist(
    body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DamagedPickleError):
        loads(b"\x80\x04" + body)
    assert not list(tmp_path.iterdir())


PART = 8  # Bombs whose every allocation is traced have this fraction of their size


def bomb(kind: str, part: int = 1) -> bytes:
    bombs = {
        # Python's own unpickler takes eight bytes for each number below the highest.
        "memo": b"K\x01r\xff\xff\xff\x7f",
        "text": b"\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
        "bytes": b"\x96" + struct.pack("<Q", 1 << 34) + b"x.",
        "integer": b"\x8a\xff" + b"\x7f" * 255 + b".",
        "integers": b"\x8b" + struct.pack("<i", 1 << 30) + b"x.",
        "lists": b"]" * ((16 << 20) // part) + b".",
        "dictionaries": b"(" + b"}" * ((8 << 20) // part) + b"l.",
        "marks": b"(" * ((16 << 20) // part) + b".",
        "memos": b"N" + b"\x94" * ((16 << 20) // part) + b".",
        "nested": b"]" + b"]a" * (1_000_000 // part) + b".",
        "key": b"}" + b")" + b"\x85" * 100_000 + b"Ns.",
        "laughs": b"]" + b"(h\x00h\x00h\x00h\x00e\x94" * (200_000 // part) + b".",
    }
    return b"\x80\x04" + bombs[kind]


BOMBS = (
    *("memo", "text", "bytes", "integer", "integers", "lists", "dictionaries", "marks", "memos"),
    *("nested", "key", "laughs"),
)


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_takes_no_more_than_its_share(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_dumps, "MAX_MEMORY", flight_dumps.MAX_MEMORY // PART)
    data = bomb(kind, PART)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedPickleError):
            loads(data)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1.3 * flight_dumps.MAX_MEMORY


def test_what_contains_itself_is_read(tmp_path: Path) -> None:
    """A list that is its own entry, and laughs that are billions: nothing follows them."""
    entries: list[Any] = [entry(8, line=9, done=False)]
    entries.append(entries)
    entries[0]["input_sizes"] = entries
    entries[0]["frames"] = [{"filename": entries, "line": entries}, entries]
    laughs: list[Any] = []
    for _ in range(100):
        laughs = [laughs, laughs]
    entries.append({**entry(8), "process_group": (laughs, laughs), "profiling_name": laughs})
    path = write(tmp_path, 0, [entry(7)])
    path.write_bytes(
        pickle.dumps(
            {"version": entries, "entries": entries, "pg_config": {"0": {"ranks": laughs}}}
        )
    )
    assert read([str(tmp_path)]).ranks == (0,)


# -- a directory of dumps


def report(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "report", "--flight", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE)),
    )


@pytest.mark.parametrize("kind", ["memo", "lists", "nested", "fifo", "link", "folder", "large"])
def test_a_file_of_a_directory_may_be_anything(kind: str, tmp_path: Path) -> None:
    """The others are read, and a line says what was not."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    write(folder, 0, [entry(7, line=9), entry(8, line=61, done=False)])
    write(folder, 1, [entry(7, line=9)])
    odd = folder / "nccl_trace_rank_2"
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "link":
        outside = write(tmp_path, 2, [entry(7, line=9)])
        odd.symlink_to(outside)
    elif kind == "folder":
        odd.mkdir()
    elif kind == "large":
        odd.write_bytes(b"\x80")
        os.truncate(odd, 1 << 40)
    else:
        odd.write_bytes(bomb(kind))
    done = report(folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stdout.startswith("error DDP802: rank 1 never joined all_reduce #8")
    if kind not in ("fifo", "link", "folder"):
        assert "nccl_trace_rank_2 was not read: " in done.stderr


def test_texts_of_a_dump_do_not_steer_the_terminal(tmp_path: Path) -> None:
    odd = "/job/\x1b]0;owned\x07\x1b[2J.py"
    write(tmp_path, 0, [entry(8, "all\x1b[2J", line=61, path=odd, done=False)])
    write(tmp_path, 1, [entry(7, line=9, path=odd)])
    done = report(tmp_path)
    assert done.returncode == 2
    assert "\x1b" not in done.stdout + done.stderr and "\x07" not in done.stdout


def test_a_dump_that_is_none_costs_a_line(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(pickle.dumps([1]))
    with pytest.raises(DoctorError, match="is no Flight Recorder dump"):
        read([str(tmp_path)])
