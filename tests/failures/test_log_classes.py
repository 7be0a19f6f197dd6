"""Classes of failures whose logs show their cause in an unusual place, or only in part."""

from __future__ import annotations

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings
from tests.support.log_lines import RAISED, STEPS, one

FRAME = '  File "{}", line 7, in {}\n    {}\n'
HEAD = "Traceback (most recent call last):\n"
LIB = "/opt/lib/python3.11"
DIFFER = (
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=5, OpType=ALLREDUCE, TensorShape=[8], TensorDtypes=Float"
    "), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=5, OpType=ALLREDUCE"
    ", TensorShape=[9], TensorDtypes=Float)"
)
DATA = "x: tensor([1, 2])\ny: tensor([3, 4])\nmask: None\n"


def stack(*frames: tuple[str, str, str]) -> str:
    return "".join(FRAME.format(*each) for each in frames)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (f"1 :loss of the critic: {DIFFER}\n", "DDP803"),
        ("eval: DDP expects same model across all ranks, but Rank 0 has 4 params, while rank 1 has "
         "inconsistent 6 params.\n", "DDP707"),
        (HEAD + FRAME.format("/job/a.py", "fit", "step()") + "ValueError: bad sample\n", "DDP901"),
        ("caught in fit(): RuntimeError: bad sample\n", "DDP900"),
        ("IndexError: bad sample\n", "DDP901"),
        ("socket.timeout: timed out\n", "DDP900"),
        ("fit: Error(s) in loading state_dict for Net:\n", "DDP900"),
    ],
)  # fmt: skip
def test_a_caught_failure_without_progress_after_it_is_reported(said: str, code: str) -> None:
    assert one(STEPS + said + DATA).code == code
    assert one(STEPS + said + DATA + said + DATA).code == code
    after = findings(read("job.log", [(STEPS + said + DATA + STEPS).encode()]))
    assert all(each.severity == Severity.INFO for each in after)


@pytest.mark.parametrize(
    "line", ["cache: OSError: busy, retrying", "wandb: ConnectionError: offline, continuing"]
)
def test_what_a_job_says_to_handle_is_no_failure(line: str) -> None:
    assert not findings(read("job.log", [f"{line}\n{DATA}".encode()]))


def test_ranks_in_one_collective_are_told_apart_by_its_shapes() -> None:
    assert one(DIFFER).message.endswith(
        "ALLREDUCE #5 of shape 8, rank 1 in ALLREDUCE #5 of shape 9"
    )


@pytest.mark.parametrize(
    ("prefix", "whose"),
    [
        ("(pid=41) ", "process 41"),
        ("(pid=41, ip=10.0.0.3) ", "process 41, ip=10.0.0.3"),
        ("(Fit pid=41) ", "a process of Fit pid=41"),
        ("(worker1, rank=1, pid=41, ip=10.0.0.3) ", "a process of worker1"),
        ("(Worker 3) ", "a process of Worker 3"),
    ],
)
def test_an_exception_behind_a_workers_prefix(prefix: str, whose: str) -> None:
    text = HEAD + stack(("/job/a.py", "fit", "step()")) + "IndexError: 9\n"
    found = one("".join(f"{prefix}{line}\n" for line in text.splitlines()))
    assert found.location is not None
    assert found.message.startswith(whose)
    assert found.message.endswith("IndexError: 9")


def test_a_ray_task_is_reported_with_its_line_though_its_exception_is_cut() -> None:
    task = "ray.exceptions.RayTaskError(OSError): ray::Fit.run() (pid=4, ip=10.0.0.3)\n"
    text = task + stack(("/job/a.py", "run", "fit()"), (f"{LIB}/torch/nn/a.py", "f", "g()"))
    found = one("".join(f"(pid=7) {line}\n" for line in text.splitlines()))
    assert (found.code, str(found.location)) == ("DDP902", "/job/a.py:7")


@pytest.mark.parametrize("more", ["", '    "message": "none",\n', '    "extraInfo": {\n'])
def test_the_message_in_torchs_report_in_json_counts(more: str) -> None:
    report = "ERROR:torch.distributed.elastic.multiprocessing.errors.error_handler:{\n"
    said = '  "message": {\n    "message": "ValueError: lr is \\"high\\"",\n'
    assert one(report + said + more).message.endswith('ValueError: lr is "high"')


@pytest.mark.parametrize(
    "text",
    [
        'ERROR:a.handler:{\n  "message": {\n    "message": "RuntimeError: Permission denied",\n',
        "[W socket.cpp:426] [c10d] The server socket has failed to bind to 0.0.0.0:443 "
        "(errno: 13 - Permission denied).\n" + RAISED.format("RuntimeError: Permission denied"),
        RAISED.format(
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any "
            "local network address. port: 80, useIpv6: false, code: -13, name: EACCES, message: "
            "permission denied"
        ),
    ],
)
def test_a_port_that_only_root_may_use(text: str) -> None:
    found = one(text)
    assert (found.code, "allowed to listen" in found.message) == ("DDP002", True)


def test_a_file_that_is_refused_is_no_port() -> None:
    found = one(RAISED.format("PermissionError: [Errno 13] Permission denied: '/data/a.pt'"))
    assert found.code == "DDP901"


@pytest.mark.parametrize("errno", ["13] Permission denied", "38] Function not implemented"])
def test_a_semaphore_that_is_not_allowed(errno: str) -> None:
    made = (f"{LIB}/multiprocessing/synchronize.py", "__init__", "SemLock()")
    text = HEAD + stack(("/job/a.py", "<module>", "main()"), made)
    assert one(f"{text}OSError: [Errno {errno}\n").code == "DDP005"


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ((f"{LIB}/multiprocessing/synchronize.py", "__init__", "SemLock()"), "DDP005"),
        ((f"{LIB}/site-packages/pandarallel/core.py", "closure", "pickle.dump()"), "DDP005"),
        ((f"{LIB}/site-packages/joblib/_memmapping_reducer.py", "f", "dump()"), "DDP005"),
        ((f"{LIB}/site-packages/joblib/externals/loky/a.py", "f", "SemLock()"), "DDP005"),
        ((f"{LIB}/site-packages/joblib/memory.py", "f", "dump()"), "DDP935"),
    ],
)
def test_shared_memory_is_no_disk(frames: tuple[str, str, str], code: str) -> None:
    text = HEAD + stack(("/job/a.py", "<module>", "main()"), frames)
    assert one(text + "OSError: [Errno 28] No space left on device\n").code == code


def test_a_semaphore_that_was_refused_explains_a_traceback_without_its_end() -> None:
    warned = "a.py:4: UserWarning: [Errno 28] No space left on device.  joblib will operate in "
    warned += "serial mode\n"
    spawn = (f"{LIB}/torch/multiprocessing/spawn.py", "start_processes", "mp.SimpleQueue()")
    lock = (f"{LIB}/multiprocessing/queues.py", "__init__", "self._rlock = ctx.Lock()")
    cut = HEAD + stack(("/job/a.py", "<module>", "main()"), spawn, lock)
    assert one(warned + cut).code == "DDP005"
    assert one(cut).code == "DDP901"  # Not the failure of a rank
    assert one(warned + STEPS).severity == Severity.INFO


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("train.py: error: unrecognized arguments: --local_rank=3", "--local_rank"),
        ("train.py: error: unrecognized arguments: --local-rank=3", "--local-rank"),
        ("Error: No such option: --local-rank", "--local-rank"),
        ("FATAL Flags parsing error:\n  Unknown command line flag 'local_rank'", "--local_rank"),
        ("ValueError: Some specified arguments are not used by the HfArgumentParser: "
         "['--local-rank=0']", "--local-rank"),
    ],
)  # fmt: skip
def test_the_option_is_spelled_as_the_launcher_passed_it(line: str, option: str) -> None:
    usage = "usage: train.py [-h] [--local-rank LOCAL_RANK]\n                [--local_rank N]\n"
    found = one(usage + line + "\n")
    assert (found.code, f"the option {option} that" in found.message) == ("DDP206", True)


def test_warnings_about_a_port_that_end_a_log_are_its_cause() -> None:
    warned = (
        "[W socket.cpp:426] [c10d] The server socket has failed to {} [::]:4711 (errno: 98 - "
        "Address already in use).\n"
    )
    found = one(warned.format("listen on") + warned.format("bind to"))
    assert (found.code, "port 4711" in found.message) == ("DDP002", True)
    assert "on [::]:4711" in found.evidence[0]
    assert not findings(read("job.log", [(warned.format("bind to") + STEPS).encode()]))


def test_a_store_that_refuses_until_a_log_ends_is_its_cause() -> None:
    refused = "[W socket.cpp:601] [c10d] The client socket has failed to connect to [n1]:4711 "
    refused += "(errno: 111 - Connection refused).\n"
    found = one(3 * refused)
    assert (found.code, found.severity) == ("DDP912", Severity.WARNING)
    assert "at n1 port 4711" in found.message
    assert not findings(read("job.log", [(refused + STEPS).encode()]))


def test_the_exit_status_of_a_usage_error_is_explained() -> None:
    for line in ("exitcode  : 2 (pid: 7)", "[INFO] a.py exits with return code = 2"):
        assert (one(line).code, "argparse" in one(line).fix) == ("DDP905", True)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("n1:7:7 [0] a.h:3 NCCL WARN Call to bind failed : Address already in use", "DDP921"),
        ("n1:7:7 [0] a.cc:9 NCCL WARN Call to listen failed : Address already in use",
         "DDP921"),
        ("n1:7:7 [0] a.cc:9 NCCL WARN Call to accept failed : Too many open files", "DDP006"),
        ("  what():  thread: Resource temporarily unavailable", "DDP006"),
    ],
)  # fmt: skip
def test_a_known_line_above_a_traceback_without_its_end_is_the_cause(line: str, code: str) -> None:
    cut = HEAD + stack(("/job/a.py", "<module>", "main()"), ("/job/a.py", "main", "reduce()"))
    assert one(f"{line}\n{cut}").code == code


def test_what_a_spawned_process_was_doing_comes_before_what_its_parent_waited_for() -> None:
    spawn = f"{LIB}/torch/multiprocessing/spawn.py"
    parent = HEAD + stack(("/job/a.py", "<module>", "mp.spawn(fit)"), (spawn, "join", "raise E"))
    child = HEAD + stack((spawn, "_wrap", "fn()"), ("/job/a.py", "fit", "opt.step()"))
    for name in ("Exception: ", "torch.multiprocessing.spawn.ProcessRaisedException: "):
        said = "\n-- Process 3 terminated with the following error:\n"
        found = one(f"{parent}{name}\n{said}{child.replace('line 7, in fit', 'line 99, in fit')}")
        assert str(found.location) == "/job/a.py:99"
        assert found.message.startswith("process 3")


def test_a_program_that_started_a_launcher_says_only_that_it_failed() -> None:
    failed = "subprocess.CalledProcessError: Command 'python' returned non-zero exit status 1.\n"
    wrapper = HEAD + stack(
        ("/opt/bin/tune", "<module>", "main()"), ("/opt/tune/cli.py", "main", "c()")
    )
    found = one(HEAD + stack(("/opt/launch.py", "<module>", "run()")) + failed + wrapper)
    assert (found.code, "its command ended with status 1" in found.message) == ("DDP907", True)


def test_what_a_launcher_could_not_do_itself_is_no_failure_of_a_rank() -> None:
    launcher = (f"{LIB}/torch/distributed/launcher/api.py", "launch_agent", "agent.run()")
    store = (f"{LIB}/torch/distributed/elastic/agent/api.py", "_rendezvous", "next()")
    assert one(HEAD + stack(launcher)).code == "DDP907"
    assert one(HEAD + stack(launcher, store)).code == "DDP901"


def test_an_error_while_a_process_group_is_destroyed_follows_from_another() -> None:
    raised = "terminate called after throwing an instance of 'c10::Error'\n"
    raised += "  what():  NCCL error in: NCCLUtils.hpp:181, unhandled cuda error\n"
    ended = "Process Group destroyed on rank 3\nException raised from ncclCommAbort at a.hpp:1\n"
    found = one(raised + ended)
    assert (found.code, found.ranks) == ("DDP907", (3,))
    assert one(RAISED.format("RuntimeError: bad") + raised + ended).message.endswith("bad")


def test_the_watchdog_that_raised_an_exception_is_nearer_than_the_abort() -> None:
    found = one("Exception raised from ncclCommWatchdog at a.cpp:1186\nAborted (core dumped)\n")
    assert "a collective had failed" in found.message


def test_the_state_of_an_optimizer_of_another_model() -> None:
    step = (f"{LIB}/site-packages/torch/optim/adamw.py", "step", "exp_avg.mul_(beta1)")
    text = HEAD + stack(("/job/a.py", "<module>", "opt.step()"), step)
    said = "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at 1\n"
    found = one(text + said)
    assert (found.code, "optimizer" in found.message) == ("DDP959", True)
    assert "drop_last" in one(RAISED.format(said.strip())).fix
