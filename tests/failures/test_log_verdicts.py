"""What is said of a log: the nearer cause, the rank that was waited for, and never nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings
from tests.support.log_lines import CANCELLED, STEPS, SUMMARY, one, timeouts

STOPPED = "WARNING:torch.distributed.elastic.api:Sending process 4 closing signal SIGTERM\n"


def test_the_lowest_number_is_who_was_waited_for() -> None:
    found = one(
        timeouts(
            r0=(9, "ALLREDUCE", 64),
            r1=(9, "ALLREDUCE", 64),
            r2=(7, "BROADCAST", 1),
            r3=(9, "ALLREDUCE", 64),
        )
    )
    assert (found.code, found.ranks) == ("DDP907", (2,))
    assert "was in BROADCAST #7 of 1 elements, 2 behind the others" in found.message


def test_what_a_rank_had_enqueued_counts() -> None:
    progress = (
        "[rank2]:[E1122 10:30:22.2 PGNCCL.cpp:9] [PG 0 Rank 2] last enqueued NCCL work: 6,"
        " last completed NCCL work: 6.\n"
    )
    waiting = timeouts(r0=(7, "ALLREDUCE", 64), r1=(7, "ALLREDUCE", 64))
    found = one((waiting + progress).replace("[Rank ", "[PG 0 Rank "))
    assert found.ranks == (2,)
    assert "had not called ALLREDUCE #7 of 64 elements" in found.message
    assert found.message.endswith("the last one that it had called is #6")


_DUMPS = (
    "[rank{0}]:[E1 1:0:0.1 P.cpp:9] [PG ID {1} PG GUID {1}(g) Rank {0}] Received a dump signal "
    "due to a collective timeout from  rank 0 and we will try our best to dump the debug info. "
    "Last enqueued NCCL work: {2}, last completed NCCL work: {2}.\n"
)
_AT = (
    "[rank{0}]:[E1 1:0:0.1 P.cpp:9] [PG ID {1} PG GUID {1}(g) Rank {0}]  failure detected by "
    "watchdog at work sequence id: {2} PG status: last enqueued work: {3}, last completed work: 1\n"
)


def test_a_rank_that_waits_for_nothing_had_not_called_it() -> None:
    """Lines of a timeout name no group; those about the rank's progress do."""
    waited = timeouts(r0=(45, "ALLREDUCE", 64))
    found = one(
        waited + _AT.format(0, 1, 45, 46) + _DUMPS.format(1, 0, 99) + _DUMPS.format(1, 1, 44)
    )
    assert (found.code, found.ranks) == ("DDP907", (1,))
    assert "it had not called ALLREDUCE #45 of 64 elements" in found.message
    # It is one behind in another group only.
    found = one(
        waited + _AT.format(0, 1, 45, 46) + _DUMPS.format(1, 0, 44) + _DUMPS.format(1, 1, 45)
    )
    assert found.ranks == (0,)


def test_lines_that_a_terminal_cut_do_not_differ() -> None:
    whole = timeouts(r1=(4, "BROADCAST", 112), r2=(4, "BROADCAST", 112), r3=(4, "BROADCAST", 112))
    first, second, third = whole.splitlines(keepends=True)
    cut = [first.replace("NumelOut", "Numel\nOut"), second.replace("OpType=B", "OpTy\npe=B"), third]
    found = one("".join(cut))
    assert (found.code, found.ranks) == ("DDP907", (0,))
    assert "BROADCAST #4 of 112 elements" in found.message


@pytest.mark.parametrize(
    ("seq", "before", "after", "said"),
    [
        (1, "", "", "NCCL_P2P_DISABLE=1"),
        (9, "Tokenizing train split: 5000 of 90000 documents\n", "", "timeout=timedelta"),
        (
            9,
            "",
            "[rank0]:[E1 1:0:0.1 P.cpp:9] [Rank 0] preparing to dump debug info.\n",
            "--flight DIR",
        ),
        (9, "", "", "--flight /shared"),
    ],
)
def test_what_to_do_next_after_a_timeout(seq: int, before: str, after: str, said: str) -> None:
    fix = one(before + timeouts(r0=(seq, "ALLREDUCE", 64)) + after).fix
    assert said in fix
    assert ("NCCL_P2P_DISABLE=1" in fix) == (seq == 1)
    assert ("timedelta" in fix) == bool(before)
    assert ("--flight DIR" in fix) == bool(after)


def test_another_size_at_the_same_number_is_a_mismatch() -> None:
    places = {f"r{rank}": (4, "ALLREDUCE", 64) for rank in range(3)}
    found = one(timeouts(**places, r3=(4, "ALLREDUCE", 65)))
    assert (found.code, found.ranks) == ("DDP803", (3,))


def test_the_rank_without_a_line() -> None:
    found = one(timeouts(**{f"r{rank}": (4, "ALLREDUCE", 64) for rank in (0, 1, 3)}))
    assert found.ranks == (2,)
    assert "likely" in found.message


def test_where_all_ranks_timed_out_together_no_rank_is_blamed() -> None:
    doing = "Epoch 3: evaluating on 5000 images\n"
    found = one(doing + timeouts(r0=(4, "ALLREDUCE", 64), r1=(4, "ALLREDUCE", 64)))
    assert (found.code, found.ranks) == ("DDP907", (0, 1))
    assert found.message.endswith("in ALLREDUCE #4, which did not complete")
    assert "before it the log says: Epoch 3: evaluating on 5000 images" in found.evidence
    assert any("timed out in it: none of them was late" in each for each in found.evidence)
    assert "Xid" in found.fix


def test_a_rank_that_the_log_lacks_may_be_late() -> None:
    found = one(timeouts(r1=(4, "ALLREDUCE", 64), r2=(4, "ALLREDUCE", 64)))
    assert not any("none of them was late" in each for each in found.evidence)


@pytest.mark.parametrize(
    ("second", "later"),
    [
        ("2026-11-22 10:30:24", " 3 s later"),
        ("2024-11-22 10:30:24", ""),
        ("2025-03-01 00:00:00", ""),
    ],
)
def test_clocks_that_do_not_fit_together_are_not_compared(second: str, later: str) -> None:
    """Lines of NCCL name no year, and those of a script may be of another zone, or run."""
    traceback = 'Traceback (most recent call last):\n  File "/job/a.py", line 5, in a\n'
    cause = f"2026-11-22 10:30:21,5 INFO step 7\n{traceback}ValueError: bad\n"
    reset = "RuntimeError: Connection closed by peer [10.0.0.4]:6294"
    lost = f"{second},5 INFO step 7\n{traceback}{reset}\n"
    sightings = [
        *read("rank1.log", [cause.encode()], 0),
        *read("rank0.log", [lost.encode()], 1),
    ]
    (found,) = findings(sightings)
    assert found.message.endswith("raised ValueError: bad")
    assert f"rank 0{later}, as a consequence: it lost its connection to a peer" in found.evidence


def test_what_python_ignores_is_no_cause() -> None:
    ignored = (
        "Exception ignored in atexit callback: <function save at 0x7f>\n"
        'Traceback (most recent call last):\n  File "/job/a.py", line 5, in save\nKeyError: 1\n'
    )
    assert one(STEPS + ignored).severity.label == "info"
    assert (
        one(
            ignored
            + STEPS
            + "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2024-05-01T12:00:00 ***\n"
        ).code
        == "DDP908"
    )


def test_words_about_a_cause_are_none_where_the_end_has_its_own() -> None:
    words = "size mismatch for head.weight: copying a param with shape torch.Size([3])\n"
    assert one(words + STEPS + CANCELLED).code == "DDP908"
    words = "node1: first error: CUDA out of memory. Tried to allocate 12.25 GiB. GPU 2\n"
    assert one(words * 3 + SUMMARY.format(4711)).code == "DDP928"


def test_what_a_job_went_on_after_does_not_end_it_later() -> None:
    alarm = "CRITICAL:root:loss is not finite\n"
    assert findings(read("job.log", [(alarm + STEPS * 3 + alarm).encode()])) == []
    assert one(alarm).code == "DDP900"
    assert findings(read("job.log", [b"CRITICAL:root:EVALUATING\n"])) == []


def test_a_progress_bar_is_no_exception() -> None:
    log = 'Traceback (most recent call last):\n  File "/a.py", line 5, in a\n'
    log += "Map:  22%|##  | 8/36 [00:01<00:04]\n"
    assert "Map" not in one(log + SUMMARY.format(4711)).message


def test_srun_numbers_nodes_where_each_task_is_a_torchrun() -> None:
    refused = "{}: torchrun: error: the following arguments are required: training_script\n"
    found = one(refused.format(0) + refused.format(1))
    assert found.ranks == ()
    assert found.message.startswith("a process of task 0 refused its options")
    raised = (
        '3: Traceback (most recent call last):\n3:   File "/a.py", line 5, in a\n3: KeyError: 1\n'
    )
    assert one(raised).ranks == (3,)


def test_an_exception_that_torch_prints_again_is_of_one_process() -> None:
    plain = (
        "Traceback (most recent call last):\n  File \"/job/a.py\", line 5, in a\nKeyError: 'x'\n"
    )
    marked = "".join(f"[rank0]: {line}\n" for line in plain.splitlines())
    found = one(plain + marked)
    assert found.message == "rank 0 raised KeyError: 'x'"
    assert not any("too" in each for each in found.evidence)
    assert one(plain * 2 + marked).message.startswith("a process of the job")


def test_a_spawned_process_is_named_by_its_number() -> None:
    log = (Path(__file__).parents[1] / "logs" / "spawned.log").read_text()
    assert one(log).message.startswith("process 1 of mp.spawn raised ")


def test_braces_in_a_log_stay_as_they_are() -> None:
    found = one(
        "run.sh: line 3: ${NODES*{what}}: bad substitution\n"
        "srun: error: n1: task 0: Exited with exit code 1\n"
    )
    assert found.message.endswith("has an error: ${NODES*{what}}: bad substitution")


def test_what_a_job_says_last_is_looked_for_in_full() -> None:
    """Also where it holds none of the texts that a whole log is searched for."""
    ended = "mpirun noticed that the job aborted\nTERM_MEMLIMIT: job killed\n"
    assert one(STEPS * 900 + ended + "bye\n").code == "DDP903"


@pytest.mark.parametrize(
    "line",
    [
        "torchrun: error: the following arguments are required: training_script",
        "train: error: unrecognized arguments: --epoch 3",
        "Error: Missing option '--data'.",
    ],
)
def test_an_option_that_is_refused_is_the_cause_not_the_status(line: str) -> None:
    text = f"usage: x [-h]\n{line}\nsrun: error: node7: task 0: Exited with exit code 2\n"
    found = one(text)
    assert found.code == "DDP905"
    assert "refused its options: " in found.message


def test_a_cause_on_another_rank_explains_the_time_out() -> None:
    memory = (
        '[rank3]: Traceback (most recent call last):\n[rank3]:   File "/job/a.py", line 5, in a\n'
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    found = one(timeouts(r0=(4, "ALLREDUCE", 64), r1=(4, "ALLREDUCE", 64)) + memory)
    assert (found.code, found.ranks) == ("DDP928", (3,))


INTERRUPTED = (
    'Traceback (most recent call last):\n  File "/job/train.py", line 5, in <module>\n    step()\n'
    "KeyboardInterrupt\n"
)


def test_ctrl_c() -> None:
    found = one(INTERRUPTED)
    assert found.code == "DDP908"
    assert "was interrupted" in found.message
    assert one(timeouts(r0=(4, "ALLREDUCE", 64)) + INTERRUPTED).code == "DDP907"


@pytest.mark.parametrize(
    ("code", "nearer", "further"),
    [
        (
            "DDP005",
            "n1:7:7 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-AbCd to 9 bytes",
            "OSError: [Errno 28] No space left on device: '/data/1.npy'",
        ),
        (
            "DDP912",
            "RuntimeError: The client socket has timed out after 60s while trying to connect to "
            "(node0, 29500).",
            "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        ),
        (
            "DDP915",
            "n1:7:9 [2] NCCL WARN NET/IB : Got completion from peer 10.0.0.7<4> with error 12, "
            "opcode 0, len 0, vendor err 129",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
        ),
        (
            "DDP002",
            "[E socket.cpp:500] [c10d] The server socket has failed to listen on any local network "
            "address.\ntrying without\ngoing on\ngoing on\ngoing on",
            'Traceback (most recent call last):\n  File "/job/train.py", line 5, in <module>\n'
            "ValueError: Default process group has not been initialized, please call it.",
        ),
        (
            "DDP901",
            'Traceback (most recent call last):\n  File "/job/train.py", line 5, in <module>\n'
            "TypeError: no such thing",
            "srun: error: node3: task 5: Exited with exit code 1",
        ),
    ],
)
def test_the_nearer_cause(code: str, nearer: str, further: str) -> None:
    assert one(f"{nearer}\n{further}\n").code == code
    if not further.startswith("srun"):
        assert one(f"{further}\n{nearer}\n").code == code


@pytest.mark.parametrize(
    "text",
    [
        "ERROR: the data service went away\n",
        "FATAL: no\n",
        "something.custom.StrangeError: a thing that no table knows\n" + STOPPED,
        "terminate called after throwing an instance of 'c10::Error'\n  what():  odd\n",
        "Segmentation fault (core dumped)\n",
        "Aborted (core dumped)\n",
        "srun: error: node3: task 5: Exited with exit code 7\n",
        "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.\n",
        "command terminated with exit code 137\n",
        "Killed\n",
        "slurmstepd: error: some trouble of a new kind\n",
        'Traceback (most recent call last):\n  File "/job/train.py", line 5, in <module>\n',
        STOPPED,
    ],
)
def test_a_failed_log_is_never_met_with_silence(text: str) -> None:
    found = one("epoch 1 loss 0.3\nepoch 2 loss 0.2\n" + text)
    assert found.severity.label == "error"
    assert found.evidence
    assert found.fix


def test_an_unknown_exception_stands_before_its_launcher() -> None:
    found = one("something.StrangeError: a thing that no table knows\n" + STOPPED)
    assert "StrangeError: a thing that no table knows" in found.message
    found = one("ERROR: strange things\n" + STOPPED)
    assert found.code == "DDP900"
    assert any("strange things" in line for line in found.evidence)


def test_what_nccl_warned_of_stands_beside_its_error() -> None:
    found = one(
        "n1:7:9 [2] NCCL WARN Some words that only a later NCCL says\n"
        "ncclInternalError: Internal check failed.\n"
    )
    assert found.code == "DDP924"
    assert any("Some words that only a later NCCL says" in line for line in found.evidence)


def test_unused_parameters_that_are_looked_for_already() -> None:
    text = (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting "
        "a new one. {} Parameter indices which did not receive grad for rank 1: 4 7\n"
    )
    on = one(text.format("Since `find_unused_parameters=True` is enabled, this likely  means"))
    off = one(text.format("You can enable unused parameter detection by passing"))
    assert "set find_unused_parameters=True" not in on.fix
    assert "find_unused_parameters=True" in off.fix
    assert "4 7" in on.message and "4 7" in off.message


def test_an_ignored_exception_is_an_info() -> None:
    found = one(
        "Exception ignored in: <function A.__del__ at 0x7f>\nTraceback (most recent call last):\n"
        '  File "/job/data.py", line 5, in __del__\nAttributeError: no such thing\n'
        "epoch 2\nepoch 3\nepoch 4\n"
    )
    assert found.severity.label == "info"


HEALTHY = """\
[W socket.cpp:601] [c10d] The IPv6 network addresses of (node0, 29500) cannot be retrieved
/opt/lib/python3.11/site-packages/x.py:3: FutureWarning: something failed to be new
E0000 00:00:1 4711 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register
Epoch 0:  10%|#         | 1/10 [00:00<00:01, mean_error=0.3, val_error=0.2]
{'train_error': 0.31, 'ERROR': 0.2, 'eval/failed': 0}
epoch 0 error: 0.31 Error 0.3 SIGNAL 3 Killed 0
WARNING: retrying after ConnectionError: reset
epoch 1 step 1
epoch 1 step 2
epoch 1 step 3
"""


@pytest.mark.parametrize("repeat", [1, 50])
def test_a_healthy_log_has_no_finding_above_info(repeat: int) -> None:
    found = findings(read("job.log", [(HEALTHY * repeat).encode()]))
    assert [each for each in found if each.severity.label != "info"] == []


def test_an_exception_of_a_thread_does_not_hide_what_ended_the_process() -> None:
    ended = (
        'Traceback (most recent call last):\n  File "/job/a.py", line 5, in <module>\n'
        "ValueError: bad\n" + STEPS
    )
    thread = (
        "Exception in thread NetStatThr:\nTraceback (most recent call last):\n"
        '  File "/lib/threading.py", line 9, in run\nBrokenPipeError: [Errno 32] Broken pipe\n'
    )
    assert one(ended + thread).message.endswith("raised ValueError: bad")
    assert one(thread).message.endswith("raised BrokenPipeError: [Errno 32] Broken pipe")


def test_a_warning_is_no_cause_of_an_exception_that_does_not_speak_of_it() -> None:
    warning = (
        "/lib/torch/cuda/__init__.py:141: UserWarning: CUDA initialization: The NVIDIA driver on "
        "your system is too old (found version 11040).\n"
    )
    raised = 'Traceback (most recent call last):\n  File "/a.py", line 5, in <module>\n'
    assert one(warning + raised + "TypeError: bad\n").message.endswith("raised TypeError: bad")
    assert one(warning + raised + "AssertionError: no CUDA device\n").code == "DDP209"


def test_a_compiler_is_no_launcher() -> None:
    raised = 'Traceback (most recent call last):\n  File "/a.py", line 5, in <module>\n'
    status = "returned non-zero exit status 1."
    failed = f"CalledProcessError: Command '['/usr/bin/gcc', '/tmp/main.c']' {status}\n"
    assert one(f"{raised}torch._inductor.exc.InductorError: {failed}").code == "DDP901"


def test_who_cancelled_a_job_stands_before_the_exception_of_it() -> None:
    raised = 'Traceback (most recent call last):\n  File "/a.py", line 5, in <module>\n'
    log = raised + "KeyboardInterrupt\n\nTERM_ADMIN: job killed by root or an administrator.\n"
    assert "was cancelled" in one(log).message


def test_pythons_own_files_on_windows_are_not_the_users() -> None:
    found = one(
        'Traceback (most recent call last):\n  File "D:/job/a.py", line 5, in <module>\n'
        r'  File "C:\Shared\Python36_64\lib\xml\etree\ElementTree.py", line 586, in parse'
        "\nFileNotFoundError: 1.xml\n"
    )
    assert found.location is not None and found.location.path == "D:/job/a.py"


def test_ranks_that_wait_in_a_collective_do_not_lack_the_port() -> None:
    """Another start of the job, or a restart of it, found the first one still there."""
    taken = (
        "RuntimeError: The server socket has failed to listen on any local network address. "
        "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE\n"
    )
    raised = 'Traceback (most recent call last):\n  File "/a.py", line 5, in <module>\n' + taken
    assert one(raised + timeouts(r0=(1, "ALLREDUCE", 1), r1=(1, "ALLREDUCE", 1))).code == "DDP907"
    assert one(raised).code == "DDP002"


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ((0, 1, 2, 4, 7), "ranks 3, 5 and 6 did not join: check whether they started"),
        ((1, 2, 4, 7), "3 of ranks 0, 3, 5 and 6 did not join: check whether they started"),
        ((1,), None),
    ],
)
def test_who_did_not_come_to_a_barrier_of_the_store(shown: tuple[int, ...], said: str) -> None:
    found = one(
        "".join(
            f"{rank}: RuntimeError: Timed out initializing process group in store based barrier on "
            f"rank: {rank}, for key: store_based_barrier_key:1 (world_size=8, worker_count=5, "
            "timeout=0:30:00)\n"
            for rank in shown
        )
    )
    assert found.code == "DDP813"
    absent = [each for each in found.evidence if "did not join" in each]
    assert [each[: len(said)] for each in absent] == [said] if said else not absent


def test_hundreds_of_tracebacks_of_one_failure_are_of_one_run() -> None:
    raised = (
        'Traceback (most recent call last):\n  File "/job/a.py", line 9, in <module>\n    go({0})\n'
        "ValueError: bad {0}\n"
    )
    text = "".join(
        f"{rank}: {line}\n" for rank in range(5) for line in raised.format(rank).splitlines()
    )
    frames = "".join(f'9:   File "/job/a.py", line {number}, in go\n' for number in range(1_200))
    found = one(text + frames + text.replace("0: ", "7: ").replace("1: ", "8: "))
    assert not any("earlier run" in each for each in found.evidence)


def test_several_ranks_that_held_the_job_up() -> None:
    behind = {"r0": (3, "ALLGATHER", 1), "r1": (3, "ALLGATHER", 1)}
    ahead = {f"r{rank}": (4, "ALLREDUCE", 64) for rank in range(2, 5)}
    assert "ranks 0 and 1 likely held the job up: they were in ALLGATHER #3" in (
        one(timeouts(**behind, **ahead)).message
    )


def test_the_cause_is_shown_where_it_stands_earlier_in_a_chain() -> None:
    found = one(
        'Traceback (most recent call last):\n  File "/job/a.py", line 5, in save\n    write()\n'
        "RuntimeError: PytorchStreamWriter failed writing file data/19: file write failed\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "/job/a.py", line 9, in <module>\n    main()\n'
        "RuntimeError: could not save\n"
    )
    assert found.code == "DDP935"
    assert "PytorchStreamWriter failed" in found.evidence[0]


_WAIT = (
    "INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process "
    "group for rank: {0}, key: store_based_barrier_key:1 (world_size={1}, worker_count={2}, "
    "timeout=0:30:00)\n"
)
_CAME = (
    "INFO:torch.distributed.distributed_c10d:Rank 0: Completed store-based barrier for key:"
    "store_based_barrier_key:1 with 4 nodes.\n"
)


def test_who_waits_at_the_set_up_of_a_group_until_the_logs_end() -> None:
    found = one(_WAIT.format(0, 4, 2) + _WAIT.format(0, 4, 3))
    assert (found.code, found.severity.label, found.ranks) == ("DDP813", "warning", ())
    assert found.message == (
        "rank 0 waits in the setup of a process group, which 3 of 4 ranks have joined"
    )
    assert "which 8 processes have joined: more" in one(_WAIT.format(3, 4, 8)).message


@pytest.mark.parametrize(
    "text",
    [
        _WAIT.format(0, 4, 3),
        _WAIT.format(0, 4, 3) + _CAME + STEPS,
        _WAIT.format(0, 4, 3) * 3 + _CAME,
        _WAIT.format(0, 4, 3) * 3 + STEPS,
        "".join(_WAIT.format(rank, 4, 3) for rank in range(3)),
    ],
)
def test_a_slow_start_is_no_hang(text: str) -> None:
    assert findings(read("job.log", [text.encode()])) == []


def test_a_failure_is_said_rather_than_the_wait_before_it() -> None:
    raised = 'Traceback (most recent call last):\n  File "/a.py", line 5, in <module>\n    go()\n'
    assert one(_WAIT.format(0, 4, 3) * 3 + raised + "ValueError: no\n").code == "DDP901"


def test_the_earliest_of_several_nodes_first_failures_is_first() -> None:
    block = (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2024-03-05_10:00:{0}\n"
        "  host      : n{1}\n  rank      : {1} (local_rank: 0)\n  exitcode  : 1 (pid: 7{1})\n"
        "  error_file: <N/A>\n"
    )
    assert one(block.format(41, 0) + block.format(12, 8)).message.startswith("rank 8 ")
    assert one(block.format(12, 0) + block.format(41, 8)).message.startswith("rank 0 ")


def test_the_port_that_was_taken_is_shown() -> None:
    found = one(
        "[W socket.cpp:401] [c10d] The server socket has failed to bind to [::]:29777 (errno: 98 - "
        "Address already in use).\n"
        "[E socket.cpp:435] [c10d] The server socket has failed to listen on any local network "
        "address.\n"
    )
    assert found.code == "DDP002"
    assert any("bind to [::]:29777 (errno: 98" in each for each in found.evidence)


def test_a_hosts_name_that_only_git_looks_up() -> None:
    text = "ssh: Could not resolve hostname github.com: Name or service not known\n"
    assert not [
        each for each in findings(read("job.log", [text.encode()])) if each.code == "DDP913"
    ]


def test_what_ended_a_rank_of_horovod_comes_before_its_shutdown() -> None:
    raised = '[1,{0}]<stderr>:Traceback (most recent call last):\n[1,{0}]<stderr>:  File "/a.py", '
    raised += "line 5, in <module>\n[1,{0}]<stderr>:    go()\n[1,{0}]<stderr>:{1}\n"
    shut = (
        "RuntimeError: Horovod has been shut down. This was caused by an exception on one of them."
    )
    found = one(raised.format(1, shut) + raised.format(0, "ValueError: no such class"))
    assert found.message == "rank 0 raised ValueError: no such class"
    assert one(raised.format(1, shut)).code == "DDP907"


def test_a_line_without_the_group_belongs_to_the_only_one() -> None:
    """Torch names the group in some lines of a rank only."""
    waits = timeouts(r0=(9, "ALLREDUCE", 64), r1=(9, "ALLREDUCE", 64), r2=(9, "BROADCAST", 1))
    at = "[rank2]:[E P.cpp:7] [PG 0 Rank 2] Timeout at NCCL work: 9, last enqueued NCCL work: 9, "
    found = one(f"{waits}{at}last completed NCCL work: 8.\n")
    assert (found.code, found.ranks) == ("DDP803", (2,))


def test_numbers_too_far_apart_are_of_different_groups() -> None:
    found = one(timeouts(r0=(96_000, "ALLREDUCE", 1), r1=(64_000, "ALLREDUCE", 1)))
    assert found.message.startswith("rank 0 waited")


def test_ranks_in_different_collectives_are_named() -> None:
    print_ = "is running collective: CollectiveFingerPrint(SequenceNumber"
    found = one(
        f"RuntimeError: Detected mismatch between collectives on ranks. Rank 2 {print_}=7, "
        f"OpType=ALLGATHER, TensorShape=[1]), but Rank 0 {print_}=3OpType=BARRIER)."
    )
    assert found.code == "DDP803"
    assert found.message.endswith(": rank 2 in ALLGATHER #7 of shape 1, rank 0 in BARRIER #3")


def test_horovod_lists_the_ranks_that_others_wait_for() -> None:
    found = one(
        "[1] h.cc:7] Some tensors were to be reduced, gathered or broadcasted by subset of ranks\n"
        "[1] Missing ranks:\n[1] 0: [broadcast.head.bias ...]\n[1] 3: [broadcast.head.bias ...]\n"
    )
    assert found.code == "DDP907"
    assert "ranks 0 and 3 had not submitted them" in found.evidence


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("srun: error: Task launch for StepId=7.0 failed on node n3: Socket timed out", "DDP960"),
        ("srun: error: Unable to create step for job 7: Requested nodes are busy", "DDP960"),
        ("There are not enough slots available in the system for these 8 slots", "DDP960"),
        ("PRTE has lost communication with a remote daemon.", "DDP907"),
        ("An MPI communication peer process has unexpectedly gone.\n  Peer host:  n3", "DDP907"),
        ("botocore: ResourceLimitExceeded: the limit of this account is 0", "DDP960"),
        ('level=warning msg="PodGroup train/pg unschedulable"', "DDP960"),
        ("slurmstepd: error: pyxis: couldn't start container", "DDP960"),
        ("FailedMount 2m kubelet MountVolume failed: rpc error: code = DeadlineExceeded", "DDP960"),
        ("      Exit Code:    139", "DDP904"),
        ("subprocess.CalledProcessError: 'x' returned exit status 3221225477.", "DDP904"),
        ("*** SIGSEGV received at time=17 on cpu 3 ***", "DDP904"),
        ("malloc(): corrupted top size", "DDP904"),
        ("mpirun noticed that process rank 3 with PID 9 on node n1 exited on signal 9", "DDP902"),
        ("THCudaCheck FAIL file=a.cu line=9 error=59 : device-side assert triggered", "DDP929"),
        ("THCudaCheck FAIL file=a.cpp line=9 error=10 : invalid device ordinal", "DDP927"),
        ("RuntimeError: Tensor of /a.h 9\ncuda failed with error 2 out of memory", "DDP928"),
        ("Failed to initialize NVML: Driver/library version mismatch", "DDP209"),
        ("libgomp: Thread creation failed: Resource temporarily unavailable", "DDP006"),
        ("bash: fork: Cannot allocate memory", "DDP934"),
        ("h1.c:9 UCX  ERROR mlx5_0: Local QP operation error", "DDP915"),
        ("OMP: Error #15: Initializing liba.so, but found libb.so", "DDP961"),
        ("a.process.BrokenProcessPool: A process in the pool ended abruptly", "DDP902"),
        ("Loss is inf, stopping training", "DDP953"),
        ('ExitCode 1 ErrorMessage "raise KeyError(name)', "DDP901"),
        ("[rank3]:[Rank 3] Watchdog caught collective", "DDP907"),
        ("frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(long) + 0x2 (0x3)", "DDP907"),
        ("train_2d.py: error: unrecognized arguments: --local-rank=0", "DDP206"),
        ("main.py: error: unrecognized arguments: --local_rank=1 --data x", "DDP206"),
        ("RuntimeError: Failed to import x (look up to see its traceback):\n"
         "/a/flash.so: undefined symbol: _ZN3c10", "DDP961"),
        ("ValueError:The batch is empty", "DDP901"),
        ("nvidia-nvswitch0: NVLink link down on port 3", "DDP933"),
        ("pcieport 0000:3a:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=x", "DDP933"),
        ("GPU 2 (bus 4b) thermal shutdown", "DDP933"),
        ("Job terminated: wall-time limit exceeded", "DDP908"),
        ("h7:3:9 [2] NCCL INFO Call to connect returned Connection refused, retrying", "DDP921"),
        ("a.CalledProcessError: Command 'ssh h2 'python -m torch.distributed.run", "DDP907"),
        ("failed to run torchrun a.py on h2, is localhost: False, exception: No key", "DDP960"),
    ],
)  # fmt: skip
def test_the_words_of_launchers_and_libraries_are_known(text: str, code: str) -> None:
    assert one(f"start\n{text}\n").code == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("ValueError:The decoder's outputs are NAN! Stop", "DDP953"),
        ("FloatingPointError: Loss became infinite or NaN at iteration=7!", "DDP953"),
        ("FloatingPointError: Predicted scores contain Inf/NaN. Training has diverged.", "DDP953"),
        ("Stopping training because the loss is NaN", "DDP953"),
        ("RuntimeError: nan detected in gradients", "DDP953"),
        ("ValueError: cannot convert float NaN to integer", "DDP901"),
        ("NaN or Inf found in input tensor.", ""),
        ("step 9 loss = nan", ""),
        ("loss is nan, the step is skipped; stop after 9", ""),
        ("{'nan': False, 'stop': True}", ""),
    ],
)
def test_a_job_that_stops_itself_for_nan_says_so_in_its_own_words(text: str, code: str) -> None:
    found = findings(read("job.log", [f"{STEPS}{text}\n".encode()]))
    assert [each.code for each in found] == ([code] if code else [])


def test_a_line_alone_with_an_exception_is_not_said_to_be_followed() -> None:
    found = one(STEPS + "ValueError: bad\n")
    assert any("has no traceback" in each for each in found.evidence)
    assert not any("goes on after" in each for each in found.evidence)


def test_a_traceback_cut_at_both_ends_is_reported() -> None:
    frames = (
        '  File "/job/a.py", line 7, in run\n    go()\n  File "/job/b.py", line 9, in go\n    x'
    )
    found = one(f"{frames}\n")
    assert (found.code, found.severity.label) == ("DDP901", "error")
    assert "cut off" in found.message
    assert not findings(read("job.log", [f"{frames}\n{STEPS}".encode()]))
    broken = "".join(f"[rank1]: {line}\n" for line in frames.split("\n")).replace("go()", "g\no()")
    assert one(broken).ranks == (1,)


def test_each_line_of_a_traceback_may_have_the_level_of_a_logger() -> None:
    lines = ['  File "/job/a.py", line 7, in run', "    go()", "RuntimeError: no data"]
    found = one("".join(f"2024-05-01 12:00:00 [ERROR]  {line}\n" for line in lines))
    assert found.message.endswith("raised RuntimeError: no data")
    assert found.location is not None


def test_lines_padded_to_the_width_of_a_terminal_are_separate() -> None:
    pad = " " * 60
    failed = "torch.distributed.elastic: [ERROR] failed (exitcode: -11) local_rank: 2 (pid: 40)"
    frames = pad.join(
        ("Traceback (most recent call last):", 'File "a", line 3', 'File "b", line 4')
    )
    found = one(f"{failed}{pad}{frames}\n")
    assert (found.code, found.ranks) == ("DDP904", (2,))


def test_the_first_failure_of_torchruns_report_comes_first() -> None:
    report = (
        "Failures:\n[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -6 (pid: 41)\n"
        "Root Cause (first observed failure):\n[0]:\n"
        "  rank      : 3 (local_rank: 3)\n  exitcode  : -6 (pid: 43)\n"
    )
    assert one(report).message.startswith("rank 3 likely aborted")


def test_ranks_that_lost_the_same_are_one_line() -> None:
    lost = "RuntimeError: [/pytorch/gloo/pair.cc:553] Connection closed by peer [10.0.0.4]:6294"
    raised = (
        '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "/job/a.py", line 9, in '
        "main\n[rank{0}]:     go()\n[rank{0}]: {1}\n"
    )
    log = "".join(raised.format(rank, lost) for rank in (0, 1, 3))
    found = one(log + raised.format(2, "ValueError: bad"))
    lines = [line for line in found.evidence if "as a consequence" in line]
    assert lines == ["ranks 0, 1 and 3, as a consequence: each lost its connection to a peer"]


UNUSED = (
    "{}Expected to have finished reduction in the prior iteration before starting a new one. This "
    "error indicates that your module has parameters that were not used in producing loss.\n{}"
    "Parameter{} which did not receive grad for rank 3: {}\n"
)


@pytest.mark.parametrize("raised", ["RuntimeError: ", ""])
@pytest.mark.parametrize("between", ["", "pred = model(imgs)  # forward\n"])
@pytest.mark.parametrize(
    ("which", "listed", "said"),
    [("s", "head.bias, head.weight", ": head.bias"), (" indices", "7 8", ": number 7 8")],
)
def test_the_rank_and_the_parameters_of_a_message_are_named(
    raised: str, between: str, which: str, listed: str, said: str
) -> None:
    found = one(STEPS + UNUSED.format(raised, between, which, listed))
    assert (found.code, found.ranks, found.severity.label) == ("DDP305", (3,), "error")
    assert found.message.startswith("rank 3 ")
    assert said in found.message


def test_the_parameter_that_was_ready_twice_stands_on_the_next_line() -> None:
    found = one(
        STEPS + "RuntimeError: Expected to mark a variable ready only once. This error is\n"
        "Parameter at index 7 with name blocks.1.weight has been marked as ready twice.\n"
    )
    assert found.message.endswith("twice in one backward: number 7, blocks.1.weight")


@pytest.mark.parametrize(
    ("name", "who"),
    [("worker-1[0]", "a process of worker-1"), ("[[5,1],2]", "rank 2"), ("2", "rank 2")],
)
def test_the_process_that_a_launcher_names_first_is_the_one_that_failed(
    name: str, who: str
) -> None:
    found = one(
        STEPS + "RuntimeError: Horovod detected that one or more processes exited with non-zero "
        "status, thus causing the job to be terminated. The first process to do so was:\n"
        f"Process name: {name}\nExit code: 137\n"
    )
    assert found.message == f"{who} was killed by SIGKILL"
    assert not any("another process had failed" in each for each in found.evidence)
