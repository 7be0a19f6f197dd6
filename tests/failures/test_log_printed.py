"""Failures as launchers, libraries and people print them."""

from __future__ import annotations

import pytest

from ddpdoctor.failures.log import read
from ddpdoctor.failures.tracebacks import untangled
from ddpdoctor.failures.verdict import findings
from tests.support.log_lines import BANNER, RAISED, STEPS, one, timeouts

REPORT = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2023-05-19_16:39:58
  host      : node1
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 78971)
{other}
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2023-05-19_16:39:58
  host      : node1
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 78970)
{cause}
============================================================
"""
NO_FILE = "  error_file: <N/A>\n  traceback : To enable traceback see: https://pytorch.org/docs"


def test_what_torchrun_noticed_first_is_named_first() -> None:
    (found,) = findings(read("job.log", [REPORT.format(other=NO_FILE, cause=NO_FILE).encode()]))
    assert found.message.startswith("rank 0 likely failed first")
    assert "rank 1 failed on it, too" in found.evidence


def test_the_traceback_that_torchrun_reports_of_a_rank() -> None:
    with_file = (
        "  error_file: /tmp/error.json\n  traceback : Traceback (most recent call last):\n"
        '    File "/src/pytorch/torch/distributed/elastic/multiprocessing/errors/__init__.py", '
        "line 355, in wrapper\n      return f(*args, **kwargs)\n"
        '    File "/job/train.py", line 162, in main\n      torch.cuda.set_device(device)\n'
        '    File "/src/pytorch/torch/cuda/__init__.py", line 470, in set_device\n'
        "      torch._C._cuda_setDevice(device)\n"
        "  RuntimeError: CUDA error: invalid device ordinal\n"
        "  CUDA kernel errors might be asynchronously reported at some other API call\n"
    )
    (found,) = findings(read("job.log", [REPORT.format(other=NO_FILE, cause=with_file).encode()]))
    assert (found.code, found.ranks) == ("DDP927", (0,))
    assert str(found.location) == "/job/train.py:162"


def test_the_rest_of_a_message_is_no_work_of_the_job() -> None:
    """As people post it: without the traceback, broken where their terminal broke it."""
    found = one(
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting "
        "a new one. This error indicates that your module has parameters that were not used in "
        "producing loss, and by \nmaking sure all `forward` outputs participate. \n"
        "If you already have done the above, then the module wasn't able to locate the outputs.\n"
        "Parameters which did not receive grad for rank 3: a.bias, a.weight\n"
        "Parameter indices which did not receive grad for rank 3: 282 283\n"
    )
    assert (found.code, found.severity.label) == ("DDP305", "error")


def test_a_launcher_that_did_not_start_its_ranks_held_no_lines_back() -> None:
    """Another job goes on in the same file."""
    found = one(
        BANNER
        + "Traceback (most recent call last):\n"
        + '  File "/envs/a/bin/torchrun", line 33, in <module>\n    sys.exit(main())\n'
        + '  File "/envs/a/lib/python3.9/site-packages/torch/distributed/elastic/agent/server/'
        + 'api.py", line 668, in _initialize_workers\n    self._rendezvous(worker_group)\n'
        + "RuntimeError: The server socket has failed to listen on any local network address. "
        + "port: 4321, useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use\n"
        + STEPS
    )
    assert (found.code, found.severity.label) == ("DDP002", "info")
    assert found.location is None


def test_the_numbers_that_srun_aligns() -> None:
    found = one(
        "".join(f" {rank}: node a step 1 loss 0.5\n" for rank in range(8))
        + " 3: Traceback (most recent call last):\n"
        + ' 3:   File "/job/train.py", line 7, in <module>\n 3:     main()\n'
        + "12: node a step 2 loss 0.5\n 3: ValueError: no such class\n"
    )
    assert found.message == "rank 3 raised ValueError: no such class"
    assert str(found.location) == "/job/train.py:7"


def test_an_assertion_on_a_gpu_stands_with_the_line_that_noticed_it() -> None:
    found = one(
        "/pytorch/aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward: block: [0,0,0], thread: "
        "[3,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
        'Traceback (most recent call last):\n  File "/job/train.py", line 7, in <module>\n'
        "    print(loss.item())\nRuntimeError: CUDA error: device-side assert triggered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1.\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n"
    )
    assert found.message.endswith("failed an assertion on its GPU: t >= 0 && t < n_classes")
    assert str(found.location) == "/job/train.py:7"


def test_an_exceptions_module_is_no_host() -> None:
    """Of multiprocessing children that lose their parent the cause is that one's exception."""
    found = one(
        'Traceback (most recent call last):\n  File "/job/train.py", line 7, in <module>\n'
        "    main()\ncv2.error: Caught error in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "/job/data.py", line 46, in read\n'
        "    image = cv2.cvtColor(image, 4)\n"
        "cv2.error: OpenCV(4.10.0) color.cpp:196: error: (-215:Assertion failed) !_src.empty()\n"
        'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
        '  File "/envs/a/lib/python3.10/multiprocessing/spawn.py", line 116, in spawn_main\n'
        "    exitcode = _main(fd, parent_sentinel)\n"
        "_pickle.UnpicklingError: pickle data was truncated\n"
    )
    assert "raised cv2.error: OpenCV(4.10.0)" in found.message
    assert str(found.location) == "/job/data.py:46"


def test_a_signal_that_a_library_caught() -> None:
    found = one(STEPS + "*** SIGTERM received at time=1755448771 on cpu 72 ***\nPC: @ 0x7fb868\n")
    assert found.message.endswith("was asked to stop from outside by SIGTERM")


def test_what_hydra_could_not_build() -> None:
    found = one(
        "Error executing job with overrides: ['mode=train']\n"
        "Error in call to target 'models.encoder.Encoder':\n"
        "AttributeError(\"'NoneType' object has no attribute 'values'\")\nfull_key: encoder\n"
        "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
    )
    assert "could not build models.encoder.Encoder" in found.message
    assert found.severity.label == "error"


def test_writers_of_tensorboard_end_with_their_process() -> None:
    thread = (
        '  File "/a/lib/python3.10/threading.py", line 1016, in _bootstrap_inner\n'
        "    self.run()\n"
        '  File "/a/lib/python3.10/site-packages/tensorboardX/event_file_writer.py", line 202, in '
        "run\n    data = self._queue.get(True, queue_wait_duration)\nOSError: handle is closed\n"
    )
    head = "Traceback (most recent call last):\n"
    two = "Exception in thread Thread-1:\nException in thread Thread-3:\n\nEnd training....\n"
    found = one(STEPS + two + (head + thread) * 2)
    assert found.severity.label == "info"


def test_a_warning_by_itself_ends_no_job() -> None:
    """CUDA is not there then, and the job goes on without it."""
    found = one(
        "/a/lib/python3.12/site-packages/torch/cuda/__init__.py:141: UserWarning: CUDA "
        "initialization: The NVIDIA driver on your system is too old (found version 11040). Please "
        "update your GPU driver.\n  return torch._C._cuda_getDeviceCount() > 0\n"
    )
    assert (found.code, found.severity.label) == ("DDP209", "info")


def test_what_somebody_types_after_the_job_is_none_of_it() -> None:
    assert not findings(read("job.log", [f"{STEPS}-bash: capture: command not found\n".encode()]))


def test_what_a_cluster_prints_after_a_job_is_none_of_its_work() -> None:
    found = one(
        STEPS + "\r 20%|##  | 166/827 [11:07<46:47,  4.25s/it]slurmstepd: error: *** JOB 4711 ON "
        "n3 CANCELLED AT 2025-12-24T20:29:34 DUE TO TIME LIMIT ***\nscontrol show job 4711\n"
        "JobId=4711 JobName=train.sh\nUserId=ann(3122343) GroupId=ann(3122343)\nPriority=146779\n"
    )
    assert "time limit is reached" in found.message and found.severity.label == "error"


def test_time_outs_come_long_after_the_exception_of_another_rank() -> None:
    raised = (
        '[rank6]: Traceback (most recent call last):\n[rank6]:   File "/job/a.py", line 5, in b\n'
        "[rank6]: StopIteration\n"
    )
    found = one(raised + "".join(f"n{n}: note\n" for n in range(250)) + timeouts(r5=(9, "A", 1)))
    assert found.message == "rank 6 raised StopIteration"


def test_an_exception_that_a_hook_hides_is_no_silence() -> None:
    found = one(
        STEPS + 'Error in sys.excepthook:\nTraceback (most recent call last):\n  File "/job/x.py", '
        "line 81, in hook\n    finish()\n"
    )
    assert found.severity.label == "error"


def test_a_file_that_no_process_can_read_is_one_failure() -> None:
    of_rank = '  File "/job/a.py", line 14\n    grouped (4 GPUs)\n             ^^^^^^\n'
    of_rank += "SyntaxError: invalid syntax. Perhaps you forgot a comma?\n"
    woven = "".join(f"{node}: {line}\n" for node in (0, 0, 1) for line in of_rank.splitlines())
    (found,) = findings(read("a.log", [woven.encode()]))
    assert "raised SyntaxError: invalid syntax. Perhaps you forgot a comma?" in found.message
    assert found.location == ("/job/a.py", 14)
    assert not any("earlier run" in each for each in found.evidence)
    assert not any("File" in each for each in found.evidence)


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("SyntaxErrorSyntaxError: : invalid syntaxinvalid syntax", "SyntaxError: invalid syntax"),
        ("KeyError: KeyErrorKeyErrorThe word 'a': : ", "KeyError: The word 'a'"),
        ("ValueErrorValueError", "ValueError"),
        ("ValueError: bad", "ValueError: bad"),
        ("ValueError: ValueErrors are bad bad", "ValueError: ValueErrors are bad bad"),
        ("RuntimeError: abab", "RuntimeError: abab"),
    ],
)
def test_what_several_processes_printed_at_once_is_said_once(printed: str, said: str) -> None:
    assert untangled(printed) == said


def test_a_stack_that_numpy_prints_is_no_exception() -> None:
    warned = (
        "We expect that some modules will need time to support NumPy 2.\n\n"
        'Traceback (most recent call last):  File "/job/a.py", line 3, in <module>\n'
        "    import torch\n"
    )
    bar = "Map:   0%|          | 0/36 [00:00<?, ? examples/s]\rMap:  19Dataset loaded.\n"
    assert findings(read("a.log", [(warned + STEPS + bar).encode()])) == []
    assert one(warned + bar + timeouts(r1=(7, "BROADCAST", 1))).code == "DDP907"
    # Not even as the last that a log holds, with what may stand behind it.
    assert (
        findings(read("a.log", [(warned + "AttributeError: _ARRAY_API not found\n").encode()]))
        == []
    )


def test_any_word_with_a_colon_ends_no_traceback_far_above() -> None:
    cut = 'Traceback (most recent call last):\n  File "/job/a.py", line 3, in load\n    go()\n'
    assert "raised Map" not in one(cut + STEPS * 3 + "Map:  19Dataset loaded.\n").message
    assert "raised Timeout: 3 s" in one(cut + "Timeout: 3 s\n").message


def test_who_could_not_save_a_checkpoint_stands_in_the_exception_of_another_rank() -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/job/a.py", line 3, in <module>',
        "    save()",
        "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:"
        "dict_keys([0, 1])",
        *(
            line
            for rank in (0, 1)
            for line in (
                f"Traceback (most recent call last): (RANK {rank})",
                '  File "/job/b.py", line 9, in write',
                "    write(state)",
                "ValueError: bad state",
            )
        ),
    )
    found = one("".join(f"[rank7]: {line}\n" for line in lines))
    assert (found.ranks, found.message) == ((0, 1), "rank 0 raised ValueError: bad state")
    assert any("rank 7, as a consequence" in each for each in found.evidence)
    # Without them it is known at least that it was another rank's.
    assert "another rank" in one("".join(f"[rank7]: {line}\n" for line in lines[:4])).message


@pytest.mark.parametrize("mark", ["", " 3: [rank3]:"])
def test_a_traceback_that_torch_logs_as_a_warning_ended_nothing(mark: str) -> None:
    lines = (
        "fx graph cache unable to load compiled graph",
        "Traceback (most recent call last):",
        '  File "/lib/python3.12/site-packages/torch/_inductor/codecache.py", line 9, in iterate',
        "    with open(path) as f:",
        "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/fx'",
    )
    head = f"{mark}W0624 15:07:12.862000 1624 torch/_inductor/codecache.py:1052] [1/1] "
    warned = "".join(f"{head}{line}\n" for line in lines)
    assert {each.severity.label for each in findings(read("a.log", [warned.encode()]))} <= {"info"}
    found = one(warned + RAISED.format("ValueError: bad"))
    assert found.message == "a process of the job raised ValueError: bad"
    # An error that the launcher logs is one.
    error = "".join(f"E0624 15:07:12.862000 1624 a.py:1] {line}\n" for line in lines[1:])
    assert "raised FileNotFoundError" in one(error).message


def test_a_traceback_that_was_printed_as_a_list() -> None:
    frames = (
        "Traceback (most recent call last):\n",
        '  File "/job/train.py", line 9, in step\n    model(x)\n    ^^^^^^^^\n',
        '  File "/lib/python3.12/site-packages/torch/nn/modules/module.py", line 8, in _call\n',
        "RuntimeError: seq_idx is only supported for channel last layout\n",
    )
    text = repr(list(frames))
    found = one(f"0: {text}\n")
    assert found.message.startswith("rank 0 raised RuntimeError: seq_idx is only supported")
    assert found.location is not None and found.location.path == "/job/train.py"
    # srun writes long lines in pieces, each with its label.
    cut = text.index("module.py") + 4
    found = one(f"0: {text[:cut]}\n0: {text[cut:]}\n")
    assert found.message.startswith("rank 0 raised RuntimeError: seq_idx is only supported")


def test_a_message_that_srun_cut_off_behind_the_colon() -> None:
    text = RAISED.format("FileNotFoundError") + ": \n[Errno 2] No such file: 'a.txt'\n" + STEPS
    labelled = "".join(f"0: {line}\n" for line in text.splitlines())
    found = one(labelled + "0: Traceback (most recent call last):\n")
    assert "raised FileNotFoundError: [Errno 2] No such file: 'a.txt'" in found.message


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("123.batch    batch                user       8    OUT_OF_ME+    0:125", "DDP903"),
        ("123          train        gpu     user       8     FAILED      1:0", "DDP907"),
        ("kernel: process 77 (python) was killed by the OOM killer", "DDP903"),
        ("exec /usr/bin/python: exec format error", "DDP960"),
        ("/usr/bin/python3: No module named megalib", "DDP960"),
        ("python3: command not found", "DDP960"),
        ("rank 3 exited with signal 11", "DDP904"),
        ("Process 0 exit with status code 137.", "DDP902"),
        ("ERROR:launcher:Rank 2 crashed with exit code -7.", "DDP904"),
        ("Exit status 1", "DDP907"),
        ("train-0   0/1     Error   0   10m", "DDP907"),
        ("Something went wrong", "DDP900"),
        ("  traceback : Signal 11 (SIGSEGV) received by PID 6421", "DDP900"),
        ("*** SIGABRT (@0x9ec) received by PID 2540 from PID 2540; stack trace: ***", "DDP904"),
        ("Exception raised from c10_cuda_check_implementation at CUDAException.cpp:44", "DDP930"),
        ("multiprocess.pool.RemoteTraceback: ", "DDP900"),
    ],
)
def test_how_schedulers_and_shells_say_that_a_job_ended(line: str, code: str) -> None:
    assert one(f"{STEPS}{line}\n").code == code


@pytest.mark.parametrize("indent", ["", "    "])
def test_a_message_on_the_lines_after_its_exception_is_read(indent: str) -> None:
    said = f"RuntimeError: \n{indent}Some tensors share memory.\n{indent}Untie them first.\n"
    found = one(STEPS + RAISED.format(said))
    assert found.message.endswith("raised RuntimeError: Some tensors share memory.")
    assert "safe_serialization=False" in found.fix


def test_a_container_that_is_stopped_later_did_not_end_the_job() -> None:
    first = "mpirun detected that one or more processes exited with non-zero status.\n"
    named = "  Process name: [[5,1],3]\n  Exit code:    1\n"
    assert one(f"{first}{named}container failed (exit code 137)\n").code == "DDP907"
    assert one(f"{first}{named.replace('  1', '  137')}").code == "DDP902"


def test_a_kill_after_another_exit_names_that_exit() -> None:
    kill = "srun: error: n2: task 3: Killed\n"
    found = one(f"{STEPS}srun: error: n1: task 0: Exited with exit code 1\n{kill}")
    assert found.code == "DDP902"
    assert any("launchers kill the rest: job.log:9" in each for each in found.evidence)
    assert not any("launchers kill" in each for each in one(f"{STEPS}{kill}").evidence)


def test_a_rank_that_is_killed_after_an_exception_shows_it() -> None:
    found = one("[0]<stderr>:RuntimeError: bad\n[0]<stderr>:Killed\n[1]<stderr>:Aborted\n")
    assert (found.code, found.ranks) == ("DDP902", (0,))
    assert "before: job.log:1: RuntimeError: bad" in found.evidence


def test_a_bus_error_is_of_shared_memory() -> None:
    assert "df -h /dev/shm" in one(f"{STEPS}Bus error (core dumped)\n").fix
    assert "df -h" not in one(f"{STEPS}Segmentation fault (core dumped)\n").fix


def test_a_store_on_the_own_node_is_rank_0s() -> None:
    said = "TimeoutError: The client socket has timed out after 1800s while trying to connect to {}"
    assert "See rank 0's output" in one(RAISED.format(said.format("(127.0.0.1, 57388)."))).fix
    assert "firewall" in one(RAISED.format(said.format("(10.0.0.4, 57388)."))).fix


def test_preparation_before_a_timeout_comes_first() -> None:
    waited = timeouts(r3=(2, "ALLREDUCE", 1))
    assert one(f"Running tokenizer: 53% of 500\n{waited}").fix.startswith(
        "The line before it shows"
    )
    assert one(f"epoch 2 of 3\n{waited}").fix.startswith("Compare the numbers")
