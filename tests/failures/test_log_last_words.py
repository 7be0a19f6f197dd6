"""Logs that show a failure in words that nobody listed, and lines that prove less than they say."""

from __future__ import annotations

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings
from ddpdoctor.failures.work import is_newest_first
from tests.support.log_lines import RAISED, STEPS, one, timeouts

DONE = "Training of 3 epochs finished in 80 s\n"


@pytest.mark.parametrize(
    "line",
    [
        "[accel-3] device 3 went away: operation aborted\n",
        "quota of the bucket is exhausted, giving up\n",
        "[node7:0]: An error occurred: 'layer.9'\n",
        "usage: train [-h] [--lr LR]\n             [--epochs N] [--seed S]\n",
    ],
)
def test_the_words_that_a_log_ends_with_are_shown(line: str) -> None:
    found = one(STEPS + line)
    assert (found.code, found.severity) == ("DDP900", Severity.WARNING)
    assert line.partition("\n")[0].rpartition("]: ")[2][:20] in found.evidence[0]
    assert not findings(read("job.log", [(STEPS + line + DONE + STEPS).encode()]))


@pytest.mark.parametrize(
    "line",
    [
        "validation error: 0.031\n",
        "0 errors in 900 files\n",
        "data/failed_samples.txt is empty\n",
        DONE + "handler: could not flush, already closed\n",
        "n0:1:2 [0] NCCL INFO comm 0x1 - Abort COMPLETE\n",
        "UserWarning: cannot pin memory, which is deprecated\n",
    ],
)
def test_what_a_healthy_job_prints_last_is_no_failure(line: str) -> None:
    assert not findings(read("job.log", [(STEPS + line).encode()]))


def test_a_known_failure_is_nearer_than_last_words() -> None:
    found = one(STEPS + RAISED.format("ValueError: bad") + "the run was aborted\n")
    assert found.code == "DDP901"


def test_frames_without_head_and_message_end_a_log_before_an_empty_line() -> None:
    frame = '[rank6]:   File "/job/{0}.py", line 9, in {0}\n[rank6]:     step()\n'
    found = one(STEPS + frame.format("fit") + frame.format("loss") + "[rank6]:\n")
    assert (found.code, found.ranks) == ("DDP901", (6,))


def member(*numbers: int) -> str:
    return "".join(
        f"Initializing distributed: GLOBAL_RANK: {each - 1}, MEMBER: {each}/4\n" for each in numbers
    )


def test_a_trainer_that_waits_for_other_processes_is_seen() -> None:
    found = one(member(2, 1))
    assert (found.code, found.severity.label) == ("DDP813", "info")
    assert "the log ends with 2 of 4" in found.message
    assert not findings(read("job.log", [member(3, 1, 4, 2).encode()]))
    assert not findings(read("node0.log", [(member(1, 2) + STEPS).encode()]))


STATUS = (
    "  time      : 2026-02-03_04:05:{1:02}\n  host      : n1\n  rank      : {0} (local_rank: {0})\n"
    "  exitcode  : {2} (pid: 7{0})\n  error_file: <N/A>\n  traceback : none\n"
)


def test_what_torchrun_kills_after_the_first_failure_is_no_cause() -> None:
    report = STATUS.format(3, 6, 1) + STATUS.format(0, 36, -9) + STATUS.format(2, 36, -15)
    root = "Root Cause (first observed failure):\n[0]:\n"
    assert one(report + root + STATUS.format(1, 6, 1)).ranks[0] == 1
    # The log is cut before the status of the first failure.
    cut = one(report + root + "  rank      : 1 (local_rank: 1)\n")
    assert (cut.code, cut.ranks) == ("DDP907", (1,))
    assert one(STATUS.format(3, 6, -9) + STATUS.format(0, 7, 1)).code == "DDP902"


def test_a_list_of_timeouts_that_is_cut_off_shows_no_absent_rank() -> None:
    places = {f"r{rank}": (9, "ALLREDUCE", 64) for rank in (1, 2, 4, 5, 6, 7)}
    whole = timeouts(**places)
    assert one(whole).ranks == (0, 3)
    found = one(whole[: whole.rindex("DUCE")])
    assert found.ranks == (1, 2, 4, 5, 6, 7)
    assert "ALLREDUCE #9" in found.message


def test_a_script_that_ran_did_start() -> None:
    refused = "/etc/prolog.d/usage.sh: line 4: /run/usage/0: Permission denied\n"
    assert one(refused + RAISED.format("ValueError: bad")).code == "DDP901"
    assert one(refused).code == "DDP960"


def test_a_worker_of_ray_that_nccl_ended_did_not_die_by_itself() -> None:
    died = "(raylet) A worker died or was killed while executing a task by an unexpected error\n"
    actor = "(Trainer pid=7, ip=gpu-node-3) "
    waited = actor + timeouts(r15=(3, "BROADCAST", 1))
    found = one(waited + died)
    assert (found.code, found.ranks) == ("DDP907", (15,))
    assert one(died).code == "DDP902"


def test_a_name_that_cleaning_up_misses_follows_from_an_earlier_line() -> None:
    failed = RAISED.format("ValueError: bad")
    assert "line 9" in failed
    later = failed.replace("line 9", "line 80").replace("ValueError: bad", "NameError: name 't'")
    assert "ValueError" in one(later + failed).message
    earlier = later.replace("line 80", "line 4")
    assert "NameError" in one(earlier + failed).message


def upside_down(text: str) -> str:
    return "\n".join(reversed(text.splitlines())) + "\n"


def test_a_log_whose_newest_line_comes_first_is_turned() -> None:
    log = STEPS + RAISED.format("ValueError: bad")
    found = one(upside_down(log))
    assert (found.code, found.severity.label) == ("DDP901", "error")
    assert found.evidence[0].startswith("job.log:1: ValueError")
    assert not is_newest_first(log.encode())
    times = "".join(f"2026-02-03 04:05:0{each} step {each}\n" for each in range(8))
    assert is_newest_first(upside_down(times).encode())
    assert not is_newest_first(times.encode())


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("RuntimeError: HCCL error in: P.cpp:64\n[ERROR] 2026-01-01 (PID:7) ERR02200 call failed\n"
         "EJ0001: 2026-01-01-10:00:00.1.2 The device is held by another\n", "DDP924", "is held by"),
        ("EI0002: Notify register times out: nothing from remote rank\n", "DDP907", "HCCL"),
        ("RuntimeError: oneCCL: fd.cpp:2 open: EXCEPTION: no device\n", "DDP924", "fd.cpp:2"),
        ("ncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote"
         " peer n1<50260>\n", "DDP907", "a peer"),
        ("RuntimeError: DataLoader worker exited unexpectedly with exit code 1. Details are lost\n",
         "DDP931", "with exit code 1"),
        ("Memory access fault by GPU **node-2** on address 0x4.\n*** Aborted at 15 (unix time)\n",
         "DDP930", "memory"),
        ("LAUNCH ERROR 2026-01-01 10:00:00,067 Container failed\nContainer rank 3 status failed cmd"
         " ['python'] code -6\n", "DDP900", "rank 3"),
    ],
)  # fmt: skip
def test_other_libraries_and_launchers_are_understood(text: str, code: str, said: str) -> None:
    found = one(text)
    assert found.code == code
    assert said in found.message


def test_what_stands_above_an_abort_is_shown_with_it() -> None:
    aborted = "run.sh: line 3:    14 Aborted                 (core dumped) python3 train.py\n"
    known = "2026-01-01 10:00:00.87: F ./core/launch.h:17] Check failed: err == success (98)\n"
    for above in (known, "the device refused the kernel\n"):
        found = one(STEPS + above + aborted)
        assert found.code == "DDP904"
        assert any(above[-20:].strip() in line for line in found.evidence), found.evidence


def test_words_at_the_end_make_no_failure_of_a_warning() -> None:
    warned = (
        "[rank1]:[W901 2:1:0.2 P.cpp:1783] [PG ID 0 PG GUID 0(default_pg) Rank 1] Failed to check "
        'the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early)\n'
    )
    raised = "Exception raised from sendBytes at Utils.hpp:653\nframe #0: failed\n"
    (found,) = findings(read("job.log", [(STEPS + warned + raised).encode()]))
    assert found.severity == Severity.INFO


def test_a_launcher_whose_ssh_is_refused_names_host_and_port() -> None:
    message = one("ssh: connect to host gpu7 port 2222: Connection refused\n").message
    assert "on gpu7" in message
    assert "port 2222: Connection refused" in message


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("^C", "DDP900"),
        ("Failures:", "DDP900"),
        ("    Last State:     Terminated", "DDP900"),
        ("#0  0x00007f1c2a3b4c5d in ?? () from /lib/libcuda.so.1", "DDP900"),
        ("#4  Grid::resize (this=0x0, n=3) at grid.cpp:31", "DDP900"),
        ("rc=3", "DDP907"),
        ("train.py finished, rc=137", "DDP902"),
        ("rc=0", ""),
        ("cutoff rc=5", ""),
        ("Failures: 0", ""),
        ("    Last State:     Terminated\n      Reason:       Completed", ""),
        ("#3 train.py (2 of 4)", ""),
    ],
)
def test_an_end_of_a_single_word_is_heard(line: str, code: str) -> None:
    found = findings(read("job.log", [f"{STEPS}{line}\n".encode()]))
    assert [each.code for each in found] == ([code] if code else [])


def test_a_ctrl_c_alone_is_shown_and_no_cause() -> None:
    found = one(STEPS + "^C\n")
    assert found.severity == Severity.WARNING
    assert found.fix.startswith("Somebody pressed Ctrl-C.")
