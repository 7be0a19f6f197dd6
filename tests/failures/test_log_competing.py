"""Where several failures explain the end of a job, and whose they are."""

from __future__ import annotations

import pytest

from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings
from tests.support.log_lines import CANCELLED, RAISED, STEPS, SUMMARY, one, timeouts

LIMIT = CANCELLED.replace(" ***\n", " DUE TO TIME LIMIT ***\n")
PRINTED = (
    'Traceback (most recent call last):\n  File "/job/data.py", line 4, in load\n    open(p)\n{}\n'
)


@pytest.mark.parametrize(
    ("before", "code"),
    [
        (RAISED.format("ValueError: bad"), "DDP901"),
        (timeouts(r0=(4, "ALLREDUCE", 64), r1=(4, "ALLREDUCE", 64)), "DDP907"),
        (PRINTED.format("OSError: x") + STEPS, "DDP908"),
        ("", "DDP908"),
    ],
)
def test_a_time_limit_is_no_cause_where_a_process_had_ended_before(before: str, code: str) -> None:
    found = one(STEPS + before + LIMIT)
    assert found.code == code
    assert any("DUE TO TIME LIMIT" in each for each in found.evidence)


def test_a_time_limit_that_ends_several_jobs_came_before_nothing() -> None:
    assert len(one(STEPS + LIMIT + LIMIT).evidence) == 1


def test_a_shell_goes_on_after_a_command_that_it_did_not_find() -> None:
    missing = "/var/spool/slurm/slurm_script: line 5: conda: command not found\n"
    assert one(missing + "cuda:0\n" + CANCELLED).code == "DDP908"
    assert one(missing).code == "DDP960"


@pytest.mark.parametrize(
    "above",
    [
        "--- Logging error ---\n",
        "Exception ignored in: <function f>\n",
        "Task exception was never retrieved\nfuture: <Task finished name='Task-1'>\n",
        "Exception in callback _f(<Task finished>)\nhandle: <Handle _f>\n",
    ],
)
def test_what_python_prints_and_goes_on_after_ends_nothing(above: str) -> None:
    found = one(above + RAISED.format("TypeError: not all converted") + STEPS[:40] + CANCELLED)
    assert found.code == "DDP908"


def test_another_process_that_ended_before_is_shown() -> None:
    other = RAISED.format("TypeError: no question").replace("/job/a.py", "/job/b.py")
    found = one(other + STEPS + RAISED.format("ValueError: no objects"))
    assert found.message == "a process of the job raised ValueError: no objects"
    assert any("another process ended" in each and "TypeError" in each for each in found.evidence)


@pytest.mark.parametrize("between", [STEPS, "a warning\nanother\nEpoch 0\n"])
def test_a_process_that_appends_to_its_log_is_another_run_each_time(between: str) -> None:
    first, last = RAISED.format("TypeError: no question"), RAISED.format("ValueError: no objects")
    found = one(first + between + last)
    assert found.message == "a process of the job raised ValueError: no objects"
    assert any("in an earlier run" in each and "TypeError" in each for each in found.evidence)


@pytest.mark.parametrize(
    "more",
    [
        # Of several processes the first one is the cause.
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
        "RuntimeError: Connection closed by peer [10.0.0.1]:4242\n",
    ],
)
def test_processes_beside_each_other_are_no_runs(more: str) -> None:
    first, last = RAISED.format("TypeError: no question"), RAISED.format("ValueError: no objects")
    apart = one(first + "a line\nanother\na third\n" + last + more)
    assert not any("in an earlier run" in each for each in apart.evidence)
    for found in one(first + last + more), one(first + last):
        assert found.message == "a process of the job raised TypeError: no question"


def test_each_program_that_refuses_its_options_is_a_run() -> None:
    first = "prune.py: error: unrecognized arguments: --dim 8\n"
    found = one(first + first + "usage: quantize.py [-h]\nquantize.py: error: bad --iters\n")
    assert found.message == "a process of the job refused its options: bad --iters"
    assert any("in an earlier run" in each and "--dim 8" in each for each in found.evidence)


def test_what_an_exception_was_raised_while_handling_is_shown() -> None:
    locked = RAISED.format("OSError: Unable to lock file")
    again = (
        "\nDuring handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "/job/a.py", line 9, in <module>\n    main()\n'
        '  File "h5py/h5f.pyx", line 108, in h5py.h5f.create\nOSError: File exists\n'
    )
    found = one(locked + again)
    assert found.message == "a process of the job raised OSError: File exists"
    assert "it was raised while handling: OSError: Unable to lock file" in found.evidence
    # A module of Cython names a file that is not there.
    assert found.location is not None
    assert (found.location.path, found.location.line) == ("/job/a.py", 9)
    assert not any("while handling" in each for each in one(locked).evidence)


def test_what_a_process_went_on_after_did_not_end_it() -> None:
    caught = PRINTED.format("OSError: cannot read a.jpg")
    found = one(STEPS + caught + "trying another\n" + RAISED.format("TypeError: bad"))
    assert found.message == "a process of the job raised TypeError: bad"
    assert any("goes on after" in each and "OSError" in each for each in found.evidence)
    # If nothing was printed between them, the one may follow from the other.
    found = one(STEPS + caught + RAISED.format("TypeError: bad"))
    assert found.message == "a process of the job raised OSError: cannot read a.jpg"


def test_a_script_that_still_imports_has_held_nothing_back() -> None:
    importing = (
        'Traceback (most recent call last):\n  File "/job/train.py", line 1, in <module>\n'
        '    import model\n  File "<frozen importlib._bootstrap>", line 991, in _find_and_load\n'
        "KeyboardInterrupt\n"
    )
    later = "".join(f"{number}\n0.{number}\n" for number in range(150))
    log = "loading is done\n" * 5 + later
    assert [each.severity for each in findings(read("a.log", [(importing + log).encode()]))] == [1]


def test_what_spawned_a_process_raises_its_exception_again() -> None:
    parent = (
        'Traceback (most recent call last):\n  File "/job/launch.py", line 72, in launch\n'
        "    spawn(main)\n"
        '  File "/lib/site-packages/torch/multiprocessing/spawn.py", line 119, in join\n'
        "    raise Exception(msg)\nException: \n\n"
        "-- Process 1 terminated with the following error:\n"
    )
    found = one(STEPS + parent + RAISED.format("RuntimeError: bad"))
    assert found.message == "process 1 of mp.spawn raised RuntimeError: bad"
    assert found.location is not None and found.location.path == "/job/a.py"


def test_of_exceptions_that_are_alike_the_shown_one_is_whom_torchrun_noticed_first() -> None:
    raised = RAISED.format("ValueError: bad")
    report = SUMMARY.format(77) + SUMMARY.format(78).replace("rank      : 1", "rank      : 0")
    first = one(STEPS + raised + "a line\nand one\nand one more\n" + raised + report)
    assert first.ranks == (1,), "the first of the report"


def test_the_stack_of_an_error_of_mpi_is_no_work() -> None:
    mpi = (
        "Abort(1090831) on node 0 (rank 0 in comm 0): Fatal error in PMPI_Init_thread: Unknown\n"
        "MPIR_Init_thread(196): \nMPID_Init(1612)......: \nMPIR_pmi_init(142)...: returned -1\n"
        "[cli_0]: write_line error; fd=9 buf=:cmd=abort exitcode=1090831\n:\n"
        "system msg for write_line failure : Invalid argument\n"
    )
    found = one(mpi + "failed (exitcode: -11) local_rank: 0 (pid: 7) of binary: /bin/python\n")
    assert found.message.endswith("had MPI fail in MPI_Init_thread, which ends the whole job")


def test_numbers_of_lines_are_no_part_of_a_log() -> None:
    raised = "[rank1]: " + RAISED.format("ValueError: bad").strip().replace("\n", "\n[rank1]: ")
    numbered = "".join(f"{at:4d}  {line}\n" for at, line in enumerate(raised.split("\n"), 98))
    cancelled = f" 130  {CANCELLED.splitlines()[-1]}\n"
    found = one(
        STEPS + numbered + " 129  srun: error: n1: task 1: Exited with exit code 1\n" + cancelled
    )
    assert (found.ranks, found.message) == ((1,), "rank 1 raised ValueError: bad")


def test_versions_that_are_accepted_are_no_failure() -> None:
    accepted = (
        "Installed CUDA version 12.1 does not match the version torch was compiled with 12.4 "
        "but since the APIs are compatible, accepting this combination\n"
    )
    found = one(accepted + STEPS + RAISED.format("TypeError: bad"))
    assert (found.code, found.message) == ("DDP901", "a process of the job raised TypeError: bad")
    assert not any("accepting" in each for each in found.evidence)


def test_the_report_of_torchrun_says_whose_an_exception_is() -> None:
    raised = RAISED.format("ValueError: bad")
    assert one(STEPS + raised + SUMMARY.format(77)).ranks == (1,)
    # Of two that differ it does not.
    other = RAISED.format("TypeError: other")
    assert one(STEPS + raised + other + SUMMARY.format(77)).ranks == ()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("=   KILLED BY SIGNAL: 9 (Killed)", "DDP902"),
        ("zsh: killed     python train.py", "DDP902"),
        ("[1]    4711 segmentation fault (core dumped)  python train.py", "DDP904"),
        ("Terminated", "DDP908"),
        ("Aborted!", "DDP908"),
        ("=>> PBS: job killed: mem 65011712kb exceeded limit 62914560kb", "DDP903"),
        ("/bin/sh: 1: python: not found", "DDP960"),
        ("bash: ./train.sh: Permission denied", "DDP960"),
        ("exit code: 255", "DDP907"),
        ("Loss is nan, stopping training", "DDP953"),
        ("Training job failed.", "DDP900"),
    ],
)
def test_the_last_words_of_a_job_are_heard(line: str, code: str) -> None:
    assert one(STEPS + line + "\n").code == code


def test_a_comments_mark_is_stripped() -> None:
    text = '# [rank2]: Traceback (most recent call last):\n# [rank2]:   File "/job/a.py", line 9\n'
    assert one(text + "# [rank2]: ValueError: bad\n").message == "rank 2 raised ValueError: bad"


def test_a_message_that_srun_cut_in_two() -> None:
    text = RAISED.format("AssertionError") + ": no data\n"
    assert one(text).message == "a process of the job raised AssertionError: no data"


def test_a_worker_of_old_torch_whose_message_is_a_traceback() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/job/a.py", line 9, in <module>\n    go()\n'
        'KeyError: Traceback (most recent call last):\n  File "/job/data.py", line 4, in load\n'
        "    d[1]\nKeyError: 1\n"
    )
    found = one(text)
    assert found.message == "a process of the job raised KeyError: 1"
    assert found.location is not None and found.location.path == "/job/data.py"


def test_a_job_that_went_on_after_its_likely_cause_shows_how_it_ended() -> None:
    found = one(
        "INFO:root:distributed training not available The server socket has failed to listen on "
        "any local network address.\n"
        + STEPS
        + "slurmstepd: error: *** JOB 2567 ON hgx CANCELLED AT 2024-07-09T14:25:08 ***\n"
    )
    assert found.code == "DDP002"
    assert any("in the end: it was cancelled" in each for each in found.evidence)


def test_an_assertion_within_torch_that_the_script_prints_is_shown() -> None:
    line = 'Rank 7, stack.size() INTERNAL ASSERT FAILED at "../torch/profiler.cpp":964, please\n'
    found = one(STEPS + line + SUMMARY.format(77))
    assert any("INTERNAL ASSERT FAILED" in each for each in found.evidence)


def test_a_step_that_slurm_cancelled_explains_the_signal_that_torchrun_got() -> None:
    signal = (
        "1: W0505 13:50:58.465000 773960 torch/distributed/elastic/agent/server/api.py:704] "
        "Received 15 death signal, shutting down workers\n"
    )
    step = "0: slurmstepd-hades: error: *** STEP 1586.0 ON hades CANCELLED AT 2026-05-05T13:50:58\n"
    assert "was asked to stop from outside by signal 15" in one(STEPS + signal).message
    assert "had its step cancelled in Slurm" in one(STEPS + signal + step).message


def test_a_rank_that_failed_without_a_word_comes_before_what_slurm_ended() -> None:
    status = (
        "0: E0630 23:13:49.749000 265144 torch/distributed/elastic/multiprocessing/api.py:984] "
        "failed (exitcode: 1) local_rank: 0 (pid: 265651) of binary: /opt/venv/bin/python3\n"
    )
    ended = "srun: error: nid7: task 0: Exited with exit code 1\nsrun: Terminating StepId=265.0\n"
    found = one(STEPS + status + ended)
    assert found.message.startswith("rank 0 likely failed first, with exit status 1")


def test_what_a_script_prints_of_its_options_is_no_failure() -> None:
    options = (
        " 0:   data_parallel_sharding_strategy ................. no_shard\n"
        " 0:   flight_recorder_dump_on_timeout ................. True\n"
        " 0:   inprocess_hard_timeout .......................... 90\n"
    )
    assert findings(read("a.log", [(options + STEPS).encode()])) == []
    assert (
        one(STEPS + options + " 0: Error: no such path: /job/x\nEND TIME: Wed\n").code == "DDP900"
    )


_BATCH_LOST = (
    'Traceback (most recent call last):\n  File "/job/a.py", line 9, in <module>\n    main()\n'
    '  File "/opt/lib/python3.11/site-packages/torch/multiprocessing/reductions.py", line 297, in '
    "rebuild_storage_fd\n    fd = df.detach()\n"
    '  File "/opt/lib/python3.11/multiprocessing/resource_sharer.py", line 57, in detach\n'
    "    with _resource_sharer.get_connection(self._id) as conn:\n"
    "ConnectionResetError: [Errno 104] Connection reset by peer\n"
)


def test_a_batch_whose_worker_is_gone() -> None:
    found = one(_BATCH_LOST)
    assert found.code == "DDP931"
    assert found.message.endswith("likely lost the DataLoader worker that had made a batch")
    found = one(
        _BATCH_LOST + "Error in atexit._run_exitfuncs:\nTraceback (most recent call last):\n"
        '  File "/opt/lib/python3.11/multiprocessing/popen_fork.py", line 28, in poll\n'
        "    pid, sts = os.waitpid(self.pid, flag)\n"
        "RuntimeError: DataLoader worker (pid 4712) is killed by signal: Killed.\n"
    )
    assert found.message.endswith("lost a DataLoader worker (pid 4712), killed by signal Killed")


def test_each_exception_that_a_job_goes_on_after_is_shown_once() -> None:
    """A program that logs what its trials raise."""
    raised = 'Traceback (most recent call last):\n  File "/job/a.py", line 9, in trial\n    go()\n'
    steps = "".join(f"[INFO] step {step}\n" for step in range(5))
    said = ("ValueError: 1", "OSError: one", "ValueError: 2")
    trials = [raised + each + "\n" + steps for each in said]
    found = findings(read("job.log", ["".join(trials).encode()]))
    assert [each.message.partition(",")[0].rpartition("raised ")[2] for each in found] == [
        "ValueError: 2",
        "OSError: one",
    ]
    assert {each.severity.label for each in found} == {"info"}


def test_what_slurm_says_of_its_cgroups_is_no_failure() -> None:
    assert not findings(
        read(
            "job.log", [b"slurmstepd: error: Unable to move pid 4711 to init root cgroup (null)\n"]
        )
    )


def test_a_server_that_tries_another_port_has_not_failed() -> None:
    text = "[I ServerApp] The port 14924 is already in use, trying another port.\n"
    assert not findings(read("job.log", [text.encode()]))
    assert one("ERROR: port 14924 is already in use\n").code == "DDP002"


def test_a_process_of_multiprocessing_ends_with_its_exception() -> None:
    """What its stdout held back comes out behind it."""
    raised = (
        'Process Process-3:\nTraceback (most recent call last):\n  File "/usr/lib/python3.12/'
        'multiprocessing/process.py", line 314, in _bootstrap\n    self.run()\n'
        '  File "/job/main.py", line 52, in process_main\n    main()\nValueError: bad\n'
    )
    found = one(raised + "".join(f"Checking {step}\n" for step in range(7)))
    assert (found.code, found.severity.label) == ("DDP901", "error")
    assert one(raised + LIMIT).code == "DDP901"


def test_a_node_that_lost_the_store_is_no_cause_where_a_rank_of_another_ended() -> None:
    lost = (
        'Traceback (most recent call last):\n  File "/opt/elastic/multiprocessing/__init__.py"'
        ", line 9, in wrapper\n    return f()\nRuntimeError: Broken pipe\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "/opt/bin/torchrun", line 8, in <module>\n'
        "    main()\ntorch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The "
        "connection to the C10d store has failed. See inner exception for details.\n"
    )
    assert one(lost).message == (
        "a process of the job likely lost the job's store, which ends with rank 0 or its torchrun"
    )
    said = "[node1] Rank 0, stack.size() INTERNAL ASSERT FAILED at profiler_python.cpp\n"
    found = one(said + SUMMARY.format(4711) + lost)
    assert found.code == "DDP900" and found.ranks == (1,)
    assert any("INTERNAL ASSERT FAILED" in each for each in found.evidence)
    refused = lost.replace("Broken pipe", "The client socket has timed out after 60s")
    assert one(refused).code == "DDP912"


def test_what_a_rank_had_logged_before_its_last_exception_is_shown() -> None:
    raised = 'Traceback (most recent call last):\n  File "/job/a.py", line 5, in go\n{}\n'
    work = "".join(f"trial {trial} begins\n" for trial in range(5))
    text = raised.format("ValueError: one") + work + raised.format("OSError: two")
    (found,) = findings(read("rank1.log", [text.encode()]))
    assert found.message == "rank 1 raised OSError: two"
    assert any("ValueError: one" in each for each in found.evidence)


def test_what_ended_a_process_comes_before_how_another_one_crashed_after_it() -> None:
    """The node of the second one prints on after the exception of the first."""
    lost = STEPS
    crashed = (
        "[2026-03-28 00:24:52,547] [ERROR] [launch.py:341:sigkill_handler] ['/usr/bin/python3', "
        "'train.py'] exits with return code = -11\n"
    )
    found = one(RAISED.format("ValueError: bad") + lost + crashed)
    assert found.message == "a process of the job likely raised ValueError: bad"
    assert one(crashed).code == "DDP904"


def test_what_a_program_quotes_of_a_shell_is_its_own_output() -> None:
    quoted = "results[['failed : /bin/bash: line 3: syntax error near unexpected token']]\n"
    assert one(quoted + RAISED.format("ValueError: bad")).code == "DDP901"
    assert one("run.sh: line 3: syntax error near unexpected token `('\n").code == "DDP960"


HANDLED = (
    'Traceback (most recent call last):\n  File "/job/a.py", line 3, in take\n    next(batches)\n'
    "{}\n\n{}:\n\n"
)
HANDLING = "During handling of the above exception, another exception occurred"
CAUSED = "The above exception was the direct cause of the following exception"
CUT = 'Traceback (most recent call last):\n  File "/job/a.py", line 9, in <module>\n    main()\n'


@pytest.mark.parametrize("rest", ["", CUT])
def test_what_was_being_handled_is_no_cause_if_the_last_exception_is_cut_off(rest: str) -> None:
    found = one(STEPS + HANDLED.format("StopIteration", HANDLING) + rest)
    assert "likely raised an exception whose message is cut off" in found.message
    assert "it was raised while handling: StopIteration" in found.evidence
    assert "iterator" not in found.fix
    # Others often tell why, and are named with the rest that is missing.
    absent = one(STEPS + HANDLED.format("FileNotFoundError: 'a.json'", HANDLING) + rest)
    assert "'a.json', and then one that is cut off in the log" in absent.message
    assert "See whether the path exists" in absent.fix
    assert "Get the rest of that rank's output" in absent.fix
    assert str(absent.location) == "/job/a.py:3"
    # A direct cause is one, and so is a known failure, whatever followed from it.
    caused = one(STEPS + HANDLED.format("StopIteration", CAUSED) + rest)
    assert "raised StopIteration" in caused.message
    assert "cut off" not in caused.message
    memory = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert one(STEPS + HANDLED.format(memory, HANDLING) + rest).code == "DDP928"
