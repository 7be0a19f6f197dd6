"""Files of torch's Flight Recorder, of jobs that ran without ddpdoctor."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.hangs import flight_dumps
from tests.support.flight_files import NOW, SECOND, entry, write
from tests.support.written import examined

ROOT = Path(__file__).parents[2]

SCRIPT = """\
import torch.distributed as dist


def train(model, loader, rank, log):
    for step, batch in enumerate(loader):
        loss = model(batch).sum()
        loss.backward()
        log.append(loss)
        metric = loss.detach()
        if not (rank == 1 and step == 60):
            dist.all_reduce(metric)
        log.append(metric.item())
"""
METRIC = 11


def found(folder: Path, *names: str) -> list[Finding]:
    """What the rules say of the files of a directory."""
    dumps = flight_dumps.read([str(folder / name) for name in names] or [str(folder)])
    return [each for each in examined(dumps.run) if dumps.proves(each.code)]


def steps(
    first: int, last: int, skipped: int = 0, path: str = "/job/train.py"
) -> list[dict[str, Any]]:
    """DDP's all-reduce and the metric's of each step, but that of one step; the last is pending."""
    calls: list[tuple[str, int, int]] = []
    for step in range(first, last + 1):
        calls.append(("all_reduce", 132608, 0))
        if step != skipped:
            calls.append(("all_reduce", 1, METRIC))
    number = 2 * first
    return [
        entry(number + at, name, size, line=line, path=path)
        for at, (name, size, line) in enumerate(calls)
    ]


def pending(entries: Sequence[Mapping[str, Any]], since: int) -> list[dict[str, Any]]:
    """The same where nothing is done from a number on."""
    return [
        {**each, "state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
        if each["collective_seq_id"] >= since
        else dict(each)
        for each in entries
    ]


def test_the_line_that_a_rank_passed_over_is_named_though_it_went_on(tmp_path: Path) -> None:
    """On a GPU the host of the rank that skipped a call goes on, dozens of calls ahead."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    whole = steps(50, 60, path=str(script))
    write(tmp_path, 0, pending(whole, 121))
    write(tmp_path, 1, pending(steps(50, 76, skipped=60, path=str(script)), 121))
    (finding,) = found(tmp_path)
    assert finding.code in ("DDP401", "DDP803") and finding.severity is Severity.ERROR
    assert "all_reduce #121 (1 float, default group)" in finding.message
    assert "if not (rank == 1 and step == 60)" in finding.message
    assert finding.location is not None and finding.location.path == str(script)
    assert finding.location.line in (METRIC - 1, METRIC)


def test_who_never_called_is_named_with_its_last_call(tmp_path: Path) -> None:
    last = entry(7, line=20)
    write(tmp_path, 0, [last, entry(8, "all_reduce", 5, line=61, done=False)])
    write(tmp_path, 1, [last])
    (finding,) = found(tmp_path)
    assert (finding.code, finding.severity, finding.ranks) == ("DDP802", Severity.ERROR, (1,))
    assert finding.location == Location("/job/train.py", 20)
    assert finding.message == (
        "rank 1 never joined all_reduce #8 (5 floats, default group), where rank 0 waits in "
        "train.py:61; rank 1 last called all_reduce #7 (64 floats, default group) at train.py:20"
    )
    assert "for 610 s" in finding.evidence[0]


def test_who_called_nothing_at_all_is_named(tmp_path: Path) -> None:
    write(tmp_path, 0, [entry(1, line=61, done=False)])
    write(tmp_path, 1, [])
    (finding,) = found(tmp_path)
    assert finding.ranks == (1,)
    assert finding.message.endswith("rank 1 called no collective")


@pytest.mark.parametrize(
    ("one", "other", "word"),
    [
        (("all_reduce", {}), ("broadcast", {}), "called different collectives"),
        (("all_reduce", {"dtype": "Float"}), ("all_reduce", {"dtype": "Half"}), "dtypes"),
    ],
)
def test_calls_that_do_not_fit_are_named(
    tmp_path: Path, one: tuple[str, Any], other: tuple[str, Any], word: str
) -> None:
    for rank, (name, more) in enumerate((one, other)):
        write(tmp_path, rank, [entry(7, line=9), entry(8, name, line=20, done=False, **more)])
    (finding,) = found(tmp_path)
    assert finding.code == "DDP803"
    assert word in finding.message


def test_sizes_that_differ_are_named_also_where_the_file_is_young(tmp_path: Path) -> None:
    for rank in range(2):
        call = entry(8, "all_reduce", 4 + rank, line=20, done=False, age=5.0)
        write(tmp_path, rank, [entry(7, line=9, age=6.0), call])
    (finding,) = found(tmp_path)
    assert finding.code == "DDP803" and "sizes" in finding.message


def test_groups_in_different_order_are_named(tmp_path: Path) -> None:
    groups = {"low": (0, 1), "high": (0, 1)}
    for rank, name in enumerate(groups):
        call = entry(1, line=20 + rank, done=False, group=(name, "undefined"))
        write(tmp_path, rank, [entry(7, line=9), call], groups)
    (finding,) = found(tmp_path)
    assert finding.code == "DDP804"


def test_a_condition_on_the_rank_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def log(rank, x):\n    if rank == 0:\n        dist.barrier()\n    step(x)\n")
    write(tmp_path, 0, [entry(1, "all_reduce", 1, line=3, path=str(script), done=False)])
    write(tmp_path, 1, [entry(1, "all_reduce", 64, line=4, path=str(script), done=False)])
    (finding,) = found(tmp_path)
    assert (finding.code, finding.ranks) == ("DDP401", (0,))
    assert finding.location == Location(str(script), 3)


def test_a_rank_without_a_file_is_not_accused(tmp_path: Path) -> None:
    groups = {"0": (0, 1, 2)}
    for rank in range(2):
        write(tmp_path, rank, [entry(8, line=61, done=False)], groups)
    assert flight_dumps.read([str(tmp_path)]).missing == (2,)
    (finding,) = found(tmp_path)
    assert (finding.code, finding.severity, finding.ranks) == ("DDP802", Severity.WARNING, (2,))
    assert "left no dump" in finding.message


def test_what_the_ring_has_overwritten_is_no_proof(tmp_path: Path) -> None:
    """Rank 1 may have called it long ago; its file begins later, with calls of other groups."""
    groups = {"pair": (0, 1)}
    write(tmp_path, 0, [entry(3, line=61, done=False, group=("pair", "undefined"))], groups)
    write(tmp_path, 1, [entry(900, line=20)], groups)
    (finding,) = found(tmp_path)
    assert finding.severity is Severity.WARNING
    assert "rank 1 left no dump that says whether it called it" in finding.message


def test_clocks_that_differ_do_not_matter(tmp_path: Path) -> None:
    skew = 1800
    write(tmp_path, 0, [entry(7, line=9), entry(8, line=61, done=False)])
    ahead = [entry(7, line=9, age=620 - skew)]
    write(tmp_path, 1, ahead, written=NOW + skew * SECOND)
    (finding,) = found(tmp_path)
    assert finding.ranks == (1,) and "for 610 s" in finding.evidence[0]


def test_a_copy_that_lost_the_times_says_no_more_than_the_timeout(tmp_path: Path) -> None:
    write(tmp_path, 0, [entry(8, line=61, done=False)], written=NOW + 10**6 * SECOND)
    write(tmp_path, 1, [entry(7, line=9)], written=NOW + 10**6 * SECOND)
    (finding,) = found(tmp_path)
    assert "for 660 s" in finding.evidence[0]


def test_files_of_an_earlier_job_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, 0, [entry(7, line=9), entry(8, line=61, done=False)])
    write(tmp_path, 1, [entry(7, line=9)])
    write(tmp_path, 2, [entry(3, line=9, age=90_000)], written=NOW - 90_000 * SECOND)
    (line,) = flight_dumps.read([str(tmp_path)]).trouble
    assert line.endswith("nccl_trace_rank_2 was not read: it is 25 h older than the newest file")
    assert [each.ranks for each in found(tmp_path)] == [(1,)]


def test_nccl_lets_go_of_what_has_timed_out(tmp_path: Path) -> None:
    """Its watchdog retires a collective that does not end, too."""
    write(tmp_path, 0, [entry(7, line=9), entry(8, line=61, done=False, retired=True)])
    write(tmp_path, 1, [entry(7, line=9)])
    assert [each.ranks for each in found(tmp_path)] == [(1,)]


def test_parts_of_a_coalesced_collective_are_never_done(tmp_path: Path) -> None:
    parts = [entry(7, "all_gather", line=9, done=False) for _ in range(3)]
    for rank in range(2):
        write(tmp_path, rank, [*parts, entry(7, "coalesced", line=9)])
    assert found(tmp_path) == []


def test_a_file_that_was_asked_for_in_the_midst_of_work_is_no_hang(tmp_path: Path) -> None:
    write(tmp_path, 0, [entry(7, line=9), entry(8, line=61, done=False, age=45.0)])
    write(tmp_path, 1, [entry(7, line=9)])
    assert found(tmp_path) == []
    assert "a hang is one of 120 s and more" in flight_dumps.read([str(tmp_path)]).remark


def test_ranks_that_are_done_hang_in_nothing(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [entry(7, line=9), entry(8, line=61)])
    assert found(tmp_path) == []
    assert flight_dumps.read([str(tmp_path)]).remark == "no rank waits in a collective"


def test_json_says_the_same_without_lines(tmp_path: Path) -> None:
    write(tmp_path, 0, [entry(7, line=9), entry(8, line=61, done=False)], as_json=True)
    write(tmp_path, 1, [entry(7, line=9)], as_json=True)
    (finding,) = found(tmp_path)
    assert (finding.code, finding.ranks, finding.location) == ("DDP802", (1,), None)


def test_of_two_forms_the_one_with_lines_is_read(tmp_path: Path) -> None:
    for rank, calls in enumerate(([entry(7, line=9), entry(8, line=61, done=False)], [entry(7)])):
        write(tmp_path, rank, calls, as_json=True).rename(tmp_path / f"nccl_trace_rank_{rank}.json")
        write(tmp_path, rank, [dict(each, frames=entry(1, line=61)["frames"]) for each in calls])
    dumps = flight_dumps.read([str(tmp_path)])
    assert dumps.trouble == ("files nccl_trace_rank_*.json were not read: name them",)
    assert found(tmp_path)[0].location == Location("/job/train.py", 61)


def test_what_is_no_dump_is_named(tmp_path: Path) -> None:
    with pytest.raises(DoctorError, match="no such file"):
        flight_dumps.read([str(tmp_path / "nothing")])
    with pytest.raises(DoctorError, match="no Flight Recorder dump"):
        flight_dumps.read([str(tmp_path)])
    (tmp_path / "events_0").write_bytes(pickle.dumps({"version": []}, 2)[:9])
    with pytest.raises(DoctorError, match="events_0 was not read: is damaged or cut short"):
        flight_dumps.read([str(tmp_path)])


# -- the command


def report(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddpdoctor", "report", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_command_reads_a_directory_and_says_what_hangs(tmp_path: Path) -> None:
    write(tmp_path, 0, [entry(7, line=9), entry(8, line=61, done=False)])
    write(tmp_path, 1, [entry(7, line=9)])
    done = report("--flight", tmp_path)
    assert done.returncode == 2
    assert done.stdout.startswith("error DDP802: rank 1 never joined all_reduce #8")
    assert done.stdout.endswith("findings: 1 error in the files of ranks 0 and 1\n")
    (line,) = report("--flight", "--json", tmp_path).stdout.splitlines()
    assert json.loads(line)["code"] == "DDP802"
    assert report("--flight", tmp_path, "--ignore", "DDP802").returncode == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--flight",), "option --flight needs a directory"),
        (("--flight", "--log", "x"), "--log and --flight do not go together"),
        (("--flight", "--html", "x.html", "x"), "--html needs a run directory"),
        (("--flight", "--redact", "x"), "--redact is for logs"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: tuple[str, ...], why: str) -> None:
    done = report(*words)
    assert (done.returncode, done.stderr.splitlines()[0]) == (3, f"ddpdoctor: error: {why}")


# -- torch's own files

JOB = """\
import os, sys, threading, time
import torch, torch.distributed as dist

def dump(seconds):
    time.sleep(seconds)
    with open(f"{folder}/trace_{rank}", "wb") as file:
        file.write(torch._C._distributed_c10d._dump_fr_trace(True, True, False))
    os._exit(0)

folder, kind = sys.argv[1:]
os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=3)
x = torch.ones(4)
for step in range(20):
    if kind == "sick" and step == 12:
        threading.Thread(target=dump, args=(3,)).start()
        if rank == 1:
            time.sleep(600)
    dist.all_reduce(x)
dump(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sick", "healthy"])
def test_files_of_torch_itself_are_read(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch records NCCL's collectives alone")
    script = tmp_path / "job.py"
    script.write_text(JOB)
    ranks = [
        subprocess.Popen([sys.executable, script, tmp_path, kind], env={**os.environ, "RANK": rank})
        for rank in "012"
    ]
    try:
        assert [each.wait(300) for each in ranks] == [0, 0, 0]
    finally:
        for each in ranks:
            each.kill()
    for path in tmp_path.glob("trace_*"):
        # A hang of three minutes, without the wait.
        late = path.stat().st_mtime_ns + 180 * SECOND
        os.utime(path, ns=(late, late))
    said = found(tmp_path)
    if kind == "healthy":
        assert said == []
        return
    (finding,) = said
    assert (finding.code, finding.ranks) == ("DDP802", (1,))
    assert "rank 1 never joined all_reduce #13 (4 floats, default group)" in finding.message
    assert "`dist.all_reduce(x)` job.py" in finding.message


def test_torch_says_of_these_files_what_is_said_here(tmp_path: Path) -> None:
    """Its analyzer agrees on the collective; it names no line."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    config = pytest.importorskip("torch.distributed.flight_recorder.components.config_manager")
    loader = pytest.importorskip("torch.distributed.flight_recorder.components.loader")
    for rank in range(2):
        call = entry(2, "all_reduce", 4 + rank, line=20, done=False)
        write(tmp_path, rank, [entry(1, line=9), call])
    given = config.JobConfig().parse_args([str(tmp_path)])
    details, version = loader.read_dir(given)
    database = builder.build_db(details, given, version)
    assert [each.collective_seq_id for each in database.collectives if not each.pass_check] == [2]
    (finding,) = found(tmp_path)
    assert "all_reduce #2 of the default group with different sizes" in finding.message
