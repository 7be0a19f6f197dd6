"""Run directories and logs that somebody made to harm who reads them."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ddpdoctor
from ddpdoctor.core import opening
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.hangs.hang_snapshot import RankState
from ddpdoctor.failures.files import texts_of
from ddpdoctor.failures.lines import LONGEST
from ddpdoctor.failures.log import read
from ddpdoctor.render import console
from ddpdoctor.run import mapped, rundir
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.reader import MAX_KEPT, JournalReader, RunReader
from ddpdoctor.run.records.base import json_line
from ddpdoctor.run.records.model import DdpRecord, FingerprintRecord
from ddpdoctor.run.records.process import EndRecord
from ddpdoctor.run.records.supervisor import Frame, HangRecord, RankStacks, Thread
from ddpdoctor.run.records.typed_json import decoder
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks import frames
from ddpdoctor.top import run_files
from tests.support.written import MS, T0, Written

PACKAGE = Path(ddpdoctor.__file__).parent
LIMIT_S = 60
MEMORY = 1 << 30
"""Bytes of address space of a command that reads something hostile."""

FILES = (
    "run.json",
    "lock",
    "supervisor.jsonl",
    "rank-0000.r0.status",
    "rank-0000.r0.jsonl",
    "rank-0000.r0.jsonl.1",
    "rank-0000.r0.fault",
    "rank-0000.r0.collectives",
    "process-7.jsonl",
    "stderr.log",
    "stacks.json",
    "gpus-here.json",
    "hang-0001.json",
    "traceback-DDP901-rank-0001.txt",
)
"""The files of a run directory that somebody may replace."""

COMMANDS = (("report",), ("report", "--json"), ("top", "--once"), ("stacks",))


@pytest.fixture
def directory(written: Written) -> Path:
    """A run that is over, with every file that one can have."""
    path = written.path
    error = {
        "kind": "error", "time": T0, "exception": "ValueError", "message": "no", "path": "/a.py",
        "line": 1, "traceback": 'Traceback (most recent call last):\n  File "/a.py", line 1\n',
    }  # fmt: skip
    steps = [
        {"kind": "step", "step": number, "start": T0 + number * 10 * MS, "data": MS, "total": MS}
        for number in range(20)
    ]
    written.rank(0, steps, steps=20)
    written.rank(1, [*steps, error], steps=20)
    mapped.create(str(path / "rank-0000.r0.collectives"), 1 << 12).close()
    hang = {"kind": "hang", "time": T0, "restart": 0, "file": "hang-0001.json"}
    written.supervisor.append(hang)
    (path / "hang-0001.json").write_text(json.dumps(hang))
    written.exit(1, 1, T0)
    written.findings(status=1, stderr="ValueError: no\n")
    (path / "lock").touch()
    frame = Frame("/a.py", 1, "main")
    stacks = RankStacks(0, 0, 1, "here", (Thread(1, "MainThread", False, (frame,)),))
    frames.save_stacks(path, [stacks], T0)
    return path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """A command, of which neither time nor memory is unlimited."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    return subprocess.run(
        [sys.executable, "-m", "ddpdoctor", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=LIMIT_S,
        preexec_fn=limit,
    )


def replace(path: Path, what: str) -> None:
    """Put something hostile in a file's place."""
    path.unlink(missing_ok=True)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "zeros":
        path.symlink_to("/dev/zero")
    elif what == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to(what)


def check(result: subprocess.CompletedProcess[str]) -> None:
    assert "Traceback (most recent call last)" not in result.stderr, result.stderr
    assert "MemoryError" not in result.stderr + result.stdout
    assert result.returncode in (0, 1, 2, 3), result


@pytest.mark.parametrize("what", ["fifo", "zeros", "sparse"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_file_may_be_anything(what: str, command: tuple[str, ...], directory: Path) -> None:
    for name in FILES:
        replace(directory / name, what)
    check(run(*command, str(directory)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["fifo", "zeros", "sparse", "directory"])
def test_any_file_may_be_anything(what: str, name: str, directory: Path) -> None:
    replace(directory / name, what)
    for command in COMMANDS:
        check(run(*command, str(directory)))


def test_no_link_leads_out_of_a_run_directory(directory: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    for name in FILES:
        copy = secret / name
        copy.parent.mkdir(exist_ok=True)
        if (directory / name).exists():
            shutil.copy(directory / name, copy)
        else:
            copy.write_text("RuntimeError: of somebody else\n")
    whole = RunReader(directory).snapshot()
    assert whole.ranks[0].records and whole.stderr and whole.supervisor
    for name in FILES:
        if name != "run.json":
            replace(directory / name, str(secret / name))
    found = RunReader(directory).snapshot()
    assert (found.stderr, found.supervisor, found.strays) == ("", (), ())
    assert found.ranks[0].status is None and found.ranks[0].records == ()
    assert found.ranks[1].status is not None
    assert frames.load_stacks(directory) is None
    assert rundir.is_live(directory) is False
    replace(directory / "run.json", str(secret / "run.json"))
    with pytest.raises(ddpdoctor.core.errors.DoctorError, match=r"run\.json is a link"):
        RunReader(directory)


def test_a_device_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", None)
    with pytest.raises(OSError, match="is not a regular file"):
        opening.opened("/dev/null", links=True)


def test_what_is_written_follows_no_link(directory: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (".stacks.json.new", "stacks.json"):
        replace(directory / name, str(victim))
    frames.save_stacks(directory, [], T0)
    assert victim.read_text() == "precious"
    assert not (directory / "stacks.json").is_symlink()
    replace(directory / "lock", str(victim))
    with pytest.raises(OSError, match=r"File exists|symbolic links"):
        rundir.Lock(directory)


# -- sources, which records name


@contextlib.contextmanager
def ends_soon() -> Iterator[None]:
    """Fails where something waits for ever, which no signal of Python's own ends."""
    done = threading.Event()

    def give_up() -> None:
        if not done.wait(LIMIT_S):
            os._exit(99)

    threading.Thread(target=give_up, daemon=True).start()
    yield
    done.set()


@pytest.mark.parametrize("what", ["fifo", "zeros", "sparse"])
def test_a_source_may_be_anything(what: str, tmp_path: Path, written: Written) -> None:
    source = tmp_path / "train.py"
    replace(source, what)
    finding = Finding("DDP901", Severity.ERROR, "it failed", (0,), Location(str(source), 3))
    with ends_soon():
        assert f"{source}:3" in console.render(finding, colour=False, width=80)
        place = {"path": str(source), "line": 3}
        records = [{"kind": "error", "time": T0, "exception": "ValueError", **place}]
        site = {"kind": "site", "phase": "wait", "site": f"{source}:3"}
        loop = {"kind": "loop", "time": T0, "path": str(source), "line": 3, "state": "left"}
        for rank in range(2):
            written.rank(rank, [site, loop, *records], phase=Phase.WAIT)
        written.exit(0, 1, T0)
        written.findings(status=1)


# -- much of it


def test_a_long_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.r0.jsonl"
    long = b'{"kind":"error","message":"' + b"x" * (20 << 20) + b'"}\n'
    after = b'{"kind":"end","time":1}\n'
    path.write_bytes(long + after)
    reader = JournalReader(path)
    reader.poll()
    assert reader.records == (EndRecord(time=1),)
    with path.open("ab") as file:
        file.write(b'{"kind":"exit","time":2}\n')
    assert reader.poll()
    assert [record.kind for record in reader.records] == ["end", "exit"]


def test_records_that_are_many_leave_room_for_those_that_are_rare(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.r0.jsonl"
    journal = Journal(str(path), 1 << 30)
    filler = "x" * 10_000
    line = {"kind": "fingerprint", "x": filler}
    journal.write([DdpRecord(module="Net")])
    journal.write(json_line({**line, "step": each}) for each in range(6_000))
    journal.close()
    reader = JournalReader(path)
    reader.poll()
    assert reader.records[0] == DdpRecord(module="Net")
    assert reader.records.of(FingerprintRecord)[-1].step == 5_999
    assert len(reader.records) * 10_000 <= MAX_KEPT
    assert "older records" in reader.left_out


MOST_MEMORY = 200 << 20
"""Bytes that a command takes at most, whatever the directory."""

MEASURED = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=2)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""

LISTS = b"[" + b"[]," * 130_000 + b"1]"
"""400 KB that take 9 MB once they are parsed."""


def many_journals(written: Written) -> None:
    for rank in range(24):
        records = [b'{"kind":"ddp","number":%d,"x":%s}\n' % (each, LISTS) for each in range(2)]
        written.rank(rank, [])
        with (written.path / f"rank-{rank:04d}.r0.jsonl").open("ab") as journal:
            journal.writelines(records)
        (written.path / f"process-{rank}.jsonl").write_bytes(b"".join(records))


def many_texts(written: Written) -> None:
    for rank in range(300):
        written.rank(rank, [])
        with (written.path / f"rank-{rank:04d}.r0.fault").open("wb") as file:
            file.truncate(1 << 20)


def many_lines(written: Written) -> None:
    written.rank(0, [])
    with (written.path / "rank-0000.r0.jsonl").open("ab") as journal:
        journal.writelines(b'{"kind":"x%d"}\n' % each for each in range(1_000_000))


def one_examination(written: Written) -> None:
    written.rank(0, [])
    written.supervisor.append({"kind": "hang", "time": T0, "restart": 0, "file": "hang-0001.json"})
    ranks = b",".join([b'{"rank":0,"x":%s}' % LISTS] * 38)
    hang = b'{"kind":"hang","time":1,"restart":0,"ranks":[%s]}' % ranks
    (written.path / "hang-0001.json").write_bytes(hang)


def one_set_of_stacks(written: Written) -> None:
    written.rank(0, [])
    frames = b",".join([b'{"path":"/a.py","line":1,"function":"f"}'] * 350_000)
    threads = b'[{"ident":1,"name":"MainThread","frames":[%s]}]' % frames
    stacks = b'{"format":1,"time":1,"ranks":[{"rank":0,"threads":%s}]}' % threads
    (written.path / "stacks.json").write_bytes(stacks)


def many_nodes(written: Written) -> None:
    written.rank(0, [])
    for node in range(60):
        told = b'{"format":1,"host":"h%d","gpus":[{"index":1,"uuid":"GPU-1","throttle":%s}]}'
        (written.path / f"gpus-h{node}.json").write_bytes(told % (node, LISTS))


@pytest.mark.parametrize(
    "make",
    [
        *(many_journals, many_texts, one_examination, one_set_of_stacks, many_nodes),
        pytest.param(many_lines, marks=pytest.mark.slow),
    ],
    ids=lambda make: make.__name__,
)
def test_memory_has_one_limit(
    make: Callable[[Written], None], written: Written, tmp_path: Path
) -> None:
    make(written)
    written.findings(status=1)
    for command in COMMANDS:
        words = [sys.executable, "-m", "ddpdoctor", *command, str(written.path)]
        # A small process in between: what is forked off this one starts with its size.
        with (tmp_path / "said").open("wb") as said:
            done = subprocess.run(
                [sys.executable, "-c", MEASURED, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                check=True,
            )
        status, kilobytes = map(int, done.stdout.split())
        text = (tmp_path / "said").read_text()
        assert status in (0, 1, 2), text
        assert "Traceback (most recent call last)" not in text
        assert kilobytes << 10 <= MOST_MEMORY, (command, kilobytes)
        if command == ("report",) and make in (many_journals, many_lines):
            # What is left out is said, in one line.
            assert len([line for line in text.splitlines() if line.startswith("not read:")]) == 1


@pytest.mark.parametrize(
    "text",
    [
        *(b"[],", b"{},", b'{"":1},', b'"ab",', b"1.5,", b"999,", b"[1],", b"[1,1,1,1,1],"),
        *('"\N{GRINNING FACE}aaaaaaa",'.encode(), b'"\\ud83d\\ude00",', b"[[[[]]]],"),
        *(b'{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1},', b'{"a":{"b":"c"}},', b"1e9,", b"null,"),
    ],
)
def test_json_takes_no_more_than_it_is_said_to_take(text: bytes) -> None:
    data = b"[" + text * (200_000 // len(text)) + b"1]"
    tracemalloc.start()
    value = opening.loads(data)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert value[-1] == 1
    assert taken <= opening.expanded(data) <= max(6 * taken, 60 * len(data))


@pytest.mark.parametrize(
    "text", [b'{"x":%s}' % (b"9" * 400), b"[" * 100_000, b'{"x":-1%s}' % (b"0" * 5_000)]
)
def test_json_that_computes_for_ever(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        opening.loads(text)
    assert (
        opening.loads(b'{"x":"%s","y":12345678901234567890}' % (b"9" * 400))["y"]
        == 12345678901234567890
    )


def test_a_log_of_one_line_is_searched_at_both_ends() -> None:
    line = b"RuntimeError: CUDA error: out of memory " + b"RuntimeError: " * 1_500_000
    (sighting, *_) = read("job.log", [line])
    assert len(sighting.text) <= LONGEST + 5


@pytest.mark.parametrize("inside", [False, True])
def test_a_log_that_is_a_fifo(inside: bool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0.log")
    (tmp_path / "rank1.log").symlink_to("/dev/zero")
    (tmp_path / "rank2.log").write_text("Traceback (most recent call last):\nValueError: no\n")
    result = run("report", "--log", str(tmp_path if inside else tmp_path / "rank0.log"))
    check(result)
    if inside:
        assert (result.returncode, "ValueError" in result.stdout) == (2, True)
    else:
        assert result.returncode == 3
        assert "rank0.log: is not a regular file" in result.stderr
        assert "- for standard input" in result.stderr


def test_the_output_of_a_command_is_a_log(tmp_path: Path) -> None:
    words = f"{sys.executable} -m ddpdoctor report --log <(echo Traceback; echo 'ValueError: no')"
    result = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode in (0, 2), result.stderr
    assert "1 file" in result.stdout


def test_of_a_sparse_log_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpdoctor.failures.files.MAX_BYTES", 1 << 20)
    path = tmp_path / "job.log"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\nValueError: no\n")
    data = b"".join(piece for _, pieces in texts_of(str(path)) for piece in pieces)
    assert len(data) == 1 << 20
    assert data.endswith(b"ValueError: no\n")


# -- one module opens

READS = {"read_text", "read_bytes"}

OF_THE_KERNEL = {
    "supervise/hang_watch.py",  # /proc/pressure
    "supervise/rank_processes.py",  # /proc, /dev/kmsg
    "supervise/keeper.py",  # /proc, /dev/null
    "supervise/keepers.py",  # a pipe's end
    "supervise/job_signals.py",  # /dev/tty
    "supervise/command.py",  # the user's own script
    "run/names.py",  # a directory, for a short address
    "run/vitals.py",  # appends
    "failures/table/__init__.py",  # our own table
}

READERS = (
    *(
        path
        for part in ("run", "top", "stacks", "diagnose", "render", "failures")
        for path in sorted((PACKAGE / part).rglob("*.py"))
    ),
    *sorted((PACKAGE / "supervise").glob("hang_*.py")),
    *(PACKAGE / "supervise" / name for name in ("nccl_ras.py", "run_watch.py", "slow_ranks.py")),
    PACKAGE / "commands" / "report.py",
    PACKAGE / "commands" / "stacks.py",
    PACKAGE / "commands" / "top.py",
)


def opens(path: Path) -> Iterator[str]:
    """Where a file opens another one to read it, by other means than `ddpdoctor.core.opening`."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import) and any(each.name == "linecache" for each in node.names):
            yield f"{path}:{node.lineno}: linecache"
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node)
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        owner = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
        if name in READS or (name == "open" and owner in ("", "os", "io", "gzip", "path")):
            writes = "O_CREAT" in text or ", 'w" in text or ", 'a" in text or ", flags" in text
            if not writes and "/proc/" not in text:
                yield f"{path}:{node.lineno}: {text}"


def test_one_module_opens() -> None:
    checked = [path for path in READERS if str(path.relative_to(PACKAGE)) not in OF_THE_KERNEL]
    assert len(checked) > 60
    assert [each for path in checked for each in opens(path)] == []


@pytest.mark.parametrize("command", [[], True, 7, {"a": 1}, None])
def test_a_command_that_is_none_is_shown_as_nothing(command: object) -> None:
    assert (
        run_files.job_command({"command": command})
        == run_files.command_line({"command": command})
        == ""
    )


@pytest.mark.parametrize("value", [True, 7, "x", [7, "x", None], {"a": []}, None])
def test_a_hang_with_values_of_other_kinds_is_read(value: object) -> None:
    names = ("activity", "sites", "stacks", "later", "exit", "collectives", "flight", "workers")
    recorded = {"rank": 0, **dict.fromkeys((*names, "device"), value)}
    line = {"time": 1, "number": 1, "restart": 0, "seconds": 9.0, "ranks": [recorded]}
    (evidence,) = decoder(HangRecord)(line).ranks
    rank = RankState(evidence, 1)
    assert rank.activity.letters == "" and rank.ring == () and not rank.flight
