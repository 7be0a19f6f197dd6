"""Why a job failed: the rank, the exception, and what is only a consequence."""

from __future__ import annotations

import os
import subprocess

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.run.status import Phase
from tests.conftest import Doctor, Result
from tests.support.crash_records import HEAD, error, words
from tests.support.written import MS, SECOND, T0, Written


def test_the_first_in_time_is_the_cause_not_whom_torchrun_saw_first(written: Written) -> None:
    stderr = "Root Cause (first observed failure):\n  rank : 0\n  exitcode : 1 (pid: 5)\n"
    written.rank(0, [error("RuntimeError", "Connection closed by peer [10.0.0.1]:1", T0 + SECOND)])
    written.rank(1, [error("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate "
                           "2.00 GiB.", T0)])  # fmt: skip
    written.exit(0, 1, T0 + SECOND)
    written.exit(1, 1, T0 + 3 * SECOND)
    (finding,) = written.findings(status=1, stderr=stderr)
    assert (finding.code, finding.ranks) == ("DDP928", (1,))
    assert "ran out of GPU memory when it wanted 2.00 GiB" in finding.message


def test_what_nccl_printed_tells_more_than_its_exception(written: Written) -> None:
    generic = "NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.21.5\nncclSystemError"
    stderr = (
        "node0:55:99 [0] misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/nccl-x\n"
    )
    written.rank(0, [error("torch.distributed.DistBackendError", generic)])
    written.exit(0, 1, T0 + SECOND)
    (finding,) = written.findings(status=1, stderr=stderr)
    assert finding.code == "DDP005"
    assert finding.location is not None


def test_without_such_a_line_the_exception_says_what_is_missing(written: Written) -> None:
    generic = "NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.21.5\nncclSystemError"
    written.rank(0, [error("torch.distributed.DistBackendError", generic)])
    written.exit(0, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert finding.code == "DDP922"
    assert "NCCL_DEBUG=WARN" in finding.fix


def test_a_native_abort_is_told_by_what_it_printed(written: Written) -> None:
    stderr = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4\n"
    )
    written.rank(0, [], phase=Phase.WAIT)
    written.rank(1, [error("RuntimeError", "Connection reset by peer", T0 + MS)])
    written.exit(0, -6, T0)
    written.exit(1, 1, T0 + SECOND)
    (finding,) = written.findings(status=1, stderr=stderr)
    assert (finding.code, finding.ranks) == ("DDP803", (0,))


def test_words_of_a_failure_that_was_survived_explain_no_later_exit(written: Written) -> None:
    call = {"kind": "exit", "time": T0, "how": "os._exit", "status": 7, "path": "/a.py", "line": 1}
    written.rank(0, [call])
    written.exit(0, 7, T0)
    stderr = "skipping a batch: CUDA out of memory. Tried to allocate 20.00 MiB.\n"
    (finding,) = written.findings(status=1, stderr=stderr)
    assert finding.code == "DDP905"


def test_an_earlier_attempt_is_a_warning(written: Written) -> None:
    """A known failure of a job that succeeded in the end."""
    written.rank(0, [error("RuntimeError", "CUDA out of memory. Tried to allocate 1.00 GiB")])
    written.exit(0, 1, T0)
    (finding,) = written.findings(status=0)
    assert (finding.code, finding.severity) == ("DDP928", Severity.WARNING)


def test_an_absent_rank_of_a_monitored_barrier_is_the_guilty_one(written: Written) -> None:
    words = (
        "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms\n Original exception: \n"
        "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation"
    )
    written.rank(0, [error("RuntimeError", words)])
    written.exit(0, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == ("DDP907", (1,))
    assert finding.message == "rank 1 never came to monitored_barrier, where rank 0 waited"


def test_launchers_own_failure_is_named(written: Written) -> None:
    stderr = (
        f'{HEAD}  File "/opt/venv/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE\n"
    )
    (finding,) = written.findings(status=1, stderr=stderr)
    assert finding.code == "DDP002"
    assert "port 29500" in finding.message


def unseen(written: Written, rank: int, time: int) -> None:
    written.supervisor.append(
        {"kind": "rank_exit", "rank": rank, "restart": 0, "status": None, "time": time}
    )


def test_a_rank_whose_status_the_launcher_took_is_named_while_others_hang(
    written: Written,
) -> None:
    written.rank(0, [], phase=Phase.WAIT)
    written.rank(1, [], phase=Phase.BACKWARD, steps=3)
    unseen(written, 1, T0)
    (finding,) = written.findings()
    assert (finding.code, finding.ranks) == ("DDP902", (1,))
    assert "most likely SIGKILL (its exit status was not seen)" in finding.message


@pytest.mark.parametrize(
    ("how", "code"),
    [("signal SIGSEGV", "DDP904"), ("signal SIGKILL", "DDP902"), ("exit code 3", "DDP905")],
)
def test_a_spawned_rank_whose_status_its_parent_took(written: Written, how: str, code: str) -> None:
    written.rank(0, [])
    written.rank(1, [], phase=Phase.WAIT)
    unseen(written, 1, T0)
    written.exit(0, -15, T0 + MS)
    name = "torch.multiprocessing.spawn.ProcessExitedException"
    stderr = f"{HEAD}{name}: process 1 terminated with {how}\n"
    (finding,) = written.findings(status=1, stderr=stderr)
    assert (finding.code, finding.ranks) == (code, (1,))


@pytest.mark.parametrize("why", ["ended well", "all ended", "stopped by torchrun", "later"])
def test_an_end_that_was_not_seen_is_no_crash(written: Written, why: str) -> None:
    import os

    end = {"kind": "end", "time": T0, "steps": 4, "armed": 0}
    lost = error("RuntimeError", "Connection closed by peer [10.0.0.1]:1", T0 - SECOND)
    written.rank(0, [lost] if why == "later" else [], phase=Phase.FORWARD)
    written.rank(1, [end] if why == "ended well" else [], phase=Phase.WAIT)
    unseen(written, 1, T0)
    if why in ("all ended", "later"):
        unseen(written, 0, T0 - MS)
    stderr = f"Sending process {os.getpid()} closing signal SIGTERM\n"
    assert written.findings(stderr=stderr if why == "stopped by torchrun" else "") == []


def test_an_end_that_was_not_seen_is_dated_by_the_last_sign_of_life(written: Written) -> None:
    """Rank 1's parent noticed it late; rank 0 lost it long before that."""
    written.rank(0, [], phase=Phase.WAIT, since=T0)
    written.rank(1, [], phase=Phase.FORWARD, since=T0 + MS)
    written.exit(0, -11, T0 + SECOND)
    unseen(written, 1, T0 + 5 * SECOND)
    name = "torch.multiprocessing.spawn.ProcessExitedException"
    stderr = f"{HEAD}{name}: process 1 terminated with signal SIGKILL\n"
    (finding,) = written.findings(status=1, stderr=stderr)
    assert (finding.code, finding.ranks) == ("DDP902", (1,))


def test_what_all_ranks_complain_of_is_likely_the_network(written: Written) -> None:
    words = "Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error"
    for rank in (0, 1):
        written.rank(rank, [error("RuntimeError", words, T0 + rank * MS)])
        written.exit(rank, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == ("DDP914", (0,))
    assert "likely" in finding.message


@pytest.mark.parametrize(("failed", "ranks"), [(T0 - MS, [(1,)]), (T0 + MS, [(2,)])])
def test_an_end_that_was_not_seen_follows_from_one_before_it(
    written: Written, failed: int, ranks: list[tuple[int, ...]]
) -> None:
    written.rank(0, [], phase=Phase.WAIT)
    written.rank(1, [error("ValueError", "bad", failed)])
    written.rank(2, [], phase=Phase.BACKWARD)
    written.exit(1, 1, T0 + SECOND)
    unseen(written, 2, T0)
    assert [each.ranks for each in written.findings()] == ranks


def test_one_stopped_rank_excuses_no_other(written: Written) -> None:
    """The closing signal that torchrun announced is another process's."""
    written.rank(0, [], phase=Phase.FORWARD)
    written.rank(1, [], phase=Phase.WAIT)
    unseen(written, 1, T0)
    stderr = "Sending process 1 closing signal SIGTERM\n"
    assert [each.ranks for each in written.findings(stderr=stderr)] == [(1,)]


# -- exceptions that end no process by themselves


LEFT = {"how": "sys.exit", "status": 1, "path": "/job/train.py", "line": 40}


def test_an_exception_that_was_caught_before_the_exit_is_the_cause(written: Written) -> None:
    written.rank(0, [error("RuntimeError", "Connection closed by peer [10.0.0.1]:1", T0 + SECOND)])
    written.rank(1, [error("KeyError", "'dog'", left=LEFT)])
    written.exit(0, 1, T0 + 2 * SECOND)
    written.exit(1, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == ("DDP901", (1,))
    assert finding.message == "rank 1 raised KeyError: 'dog'"
    assert finding.location is not None
    assert finding.location.line == 7
    left = "the script caught it and ended itself by sys.exit(1) at /job/train.py:40"
    assert left in finding.evidence


def test_a_lost_peer_that_was_caught_is_still_a_consequence(written: Written) -> None:
    lost = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:1"
    written.rank(0, [error("RuntimeError", lost, left=LEFT)])
    written.rank(1, [error("ValueError", "bad", T0 + SECOND)])
    written.exit(0, 1, T0 + SECOND)
    written.exit(1, 1, T0 + 2 * SECOND)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == ("DDP901", (1,))


@pytest.mark.parametrize("status", [0, 1])
def test_what_was_printed_last_counts_if_the_status_says_so(written: Written, status: int) -> None:
    shown = {**error("KeyError", "'dog'"), "kind": "shown_error"}
    written.rank(0, [shown])
    written.exit(0, status, T0 + SECOND)
    codes = [finding.code for finding in written.findings(status=status)]
    assert codes == (["DDP901"] if status else [])


@pytest.mark.parametrize(("name", "line"), [("_queue.Empty", 12), ("ValueError", 7)])
def test_a_thread_for_which_the_main_one_waited(written: Written, name: str, line: int) -> None:
    thread = {**error("OSError", "shard 2 is unreadable"), "line": 12}
    thread |= {"kind": "thread_error", "thread": "loader"}
    written.rank(1, [thread, error(name, "", T0 + SECOND)])
    written.exit(1, 1, T0 + 2 * SECOND)
    (finding,) = written.findings(status=1)
    assert finding.code == "DDP901"
    assert finding.location is not None
    assert finding.location.line == line


def test_the_worker_and_the_loop_of_a_wrapped_exception(written: Written) -> None:
    outer = {
        "exception": "KeyError", "path": "/job/train.py", "line": 30,
        "message": "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback ...",
    }  # fmt: skip
    written.rank(1, [error("KeyError", "'label'", outer=outer)])
    written.exit(1, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert finding.message == "rank 1 raised KeyError: 'label'"
    assert finding.evidence == (
        "in DataLoader worker process 0, whose batch was awaited at /job/train.py:30",
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupt_of_one_rank_alone_came_from_outside(written: Written, ranks: int) -> None:
    lost = error("RuntimeError", "[pair.cc:1] Connection closed by peer [10.0.0.1]:1", T0 + SECOND)
    stop = error("KeyboardInterrupt", "")
    for rank in (0, 1):
        written.rank(rank, [stop if rank < ranks else lost])
        written.exit(rank, 1, T0 + 2 * SECOND)
    found = [(each.code, each.ranks) for each in written.findings(status=1)]
    assert ("DDP902", (0,)) in found if ranks == 1 else "DDP902" not in dict(found)


def test_options_that_are_refused_are_said(written: Written) -> None:
    said = "the following arguments are required: --lr"
    call = {"kind": "exit", "time": T0, **LEFT, "status": 2, "refused": said}
    written.rank(0, [call])
    written.exit(0, 2, T0)
    (finding,) = written.findings(status=2)
    assert finding.message == f"rank 0 refused the script's options: {said}"


def test_an_exit_with_2_of_a_rank_that_has_joined_is_not_of_its_options(written: Written) -> None:
    written.rank(0, [{"kind": "exit", "time": T0, **LEFT, "status": 2}])
    written.exit(0, 2, T0)
    (finding,) = written.findings(status=2)
    assert finding.fix.startswith("Raise an exception that says why")


def test_the_text_of_an_exit_is_said(written: Written) -> None:
    call = {"kind": "exit", "time": T0, **LEFT, "said": "no checkpoint\x1b[2J"}
    written.rank(0, [call])
    written.exit(0, 1, T0)
    (finding,) = written.findings(status=1)
    assert finding.message == "rank 0 ended itself: sys.exit('no checkpoint\\x1b[2J')"


def test_a_rank_that_torchrun_stopped_at_its_end_did_not_abort(written: Written) -> None:
    end = {"kind": "end", "time": T0, "steps": 4, "armed": 0}
    written.rank(0, [end])
    written.rank(1, [error("ValueError", "bad")])
    written.exit(0, -15, T0 + SECOND)
    written.exit(1, 1, T0)
    assert [each.code for each in written.findings(status=1)] == ["DDP901"]


def test_words_of_a_database_are_no_lost_peer(written: Written) -> None:
    written.rank(0, [error("RuntimeError", "wandb: Connection reset by peer")])
    written.exit(0, 1, T0)
    (finding,) = written.findings(status=1)
    assert finding.code == "DDP901"


ENDS = {
    "print_exc and sys.exit": (
        "import traceback\ntry:\n    main()\nexcept Exception:\n    traceback.print_exc()\n"
        "    sys.exit(1)\n"
    ),
    "logging and os._exit": (
        "import logging\ntry:\n    main()\nexcept Exception:\n    logging.exception('failed')\n"
        "    os._exit(1)\n"
    ),
    "printed, and left later": (
        "import traceback\ndef guarded():\n    try:\n        main()\n    except Exception:\n"
        "        traceback.print_exc()\n        return 1\nsys.exit(guarded())\n"
    ),
    "raised again": (
        "try:\n    main()\nexcept KeyError as error:\n"
        "    raise RuntimeError('training failed') from error\n"
    ),
}
"""Ways in which scripts deal with an exception of all of the training."""


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_whatever_becomes_of_an_exception_it_is_named(doctor: Doctor, end: str) -> None:
    script = doctor.write(
        "train.py",
        """\
        import os
        import sys
        import torch
        import torch.distributed as dist

        def main():
            dist.init_process_group("gloo")
            if dist.get_rank() == 1:
                {"cat": 0}["dog"]
            dist.all_reduce(torch.ones(1))

        """,
    )
    script.write_text(script.read_text() + ENDS[end])
    result = doctor.run("--nproc-per-node=2", "--", str(script))
    assert result.status == 1
    assert result.codes == ["DDP901"], result.stderr
    assert "rank 1 raised KeyError: 'dog'" in words(result)
    assert "train.py:9" in result.ours


def told_alike(doctor: Doctor, result: Result, live: str, log: str) -> None:
    """The run names the cause, and so does its plain output without ddpdoctor's own lines."""
    assert result.codes == [live], result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith("ddpdoctor")]
    plain = doctor.write("job.log", "\n".join(lines))
    assert f"error {log}: " in doctor.cli("report", "--log", str(plain)).stdout


@pytest.mark.slow
def test_a_full_disk_that_reads_unexpected_pos(doctor: Doctor) -> None:
    disk = doctor.directory / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    script = doctor.write(
        "train.py",
        """\
        import sys
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            torch.save({"weight": torch.randn(3_000_000)}, sys.argv[1])
        dist.barrier()
        """,
    )
    try:
        result = doctor.run("--nproc-per-node=2", "--", str(script), f"{disk}/model.pt")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert "unexpected pos" in result.stderr
    assert "model.pt: the disk is full" in words(result)
    told_alike(doctor, result, "DDP935", "DDP935")


@pytest.mark.slow
def test_a_checkpoint_torn_by_its_writers_that_reads_legacy_tar(doctor: Doctor) -> None:
    script = doctor.write(
        "train.py",
        """\
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for _ in range(200):
            torch.save({"weight": torch.randn(1_000_000)}, "model.pt")
            torch.load("model.pt")
        """,
    )
    result = doctor.run("--nproc-per-node=2", "--", str(script))
    assert result.status == 1
    assert "2 ranks write it at once" in words(result)
    # It depends on what was there at that moment how torch puts it.
    told_alike(doctor, result, "DDP501", "DDP945")


def test_an_exception_comes_with_the_next_step(written: Written) -> None:
    written.rank(1, [error("ModuleNotFoundError", "No module named 'apex.amp'", T0)])
    written.exit(1, 1, T0 + SECOND)
    found = next(each for each in written.findings(status=1) if each.code == "DDP901")
    assert found.fix.startswith("Run `python -m pip show apex`")
    assert found.fix.endswith("Fix this exception.")
