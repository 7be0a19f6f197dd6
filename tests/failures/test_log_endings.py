"""What is written behind the end of a job, and behind an error that it went on after."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings
from tests.support.log_lines import FAILED, STEPS, one, timeouts

OUT_OF_MEMORY = (
    'Traceback (most recent call last):\n  File "/job/train.py", line 9, in <module>\n'
    '    main()\n  File "/job/model.py", line 5, in main\n    x = x.cuda()\n'
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.90 GiB.\n"
)
UPLOADED = "wandb: \\ 0.009 MB of 0.087 MB uploaded\r"


@pytest.mark.parametrize(
    "closing",
    [
        f"{UPLOADED * 40}\nwandb: 🚀 View run at: somewhere\nwandb: Find logs at: x\n",
        "\x1b[1;34mwandb\x1b[0m: Run summary:\n" * 20,
    ],
)
def test_what_wandb_writes_at_the_end_is_no_work(closing: str) -> None:
    inside = OUT_OF_MEMORY.replace("<module>", "train")
    found = one(f"  2%|2| 7/99 [00:05<01:05]{inside}{closing}")
    assert (found.code, found.severity.label) == ("DDP928", "error")
    assert "7.90 GiB" in found.message


def test_a_command_that_a_shell_does_not_find_is_no_cause_of_what_comes_later() -> None:
    missing = "/var/spool/slurm/d/job1/slurm_script: line 9: SBATCH: command not found\n"
    assert one(missing + OUT_OF_MEMORY).code == "DDP928"
    assert one(missing).code == "DDP960"


def test_an_exception_of_a_spawned_process_ends_the_run() -> None:
    log = (Path(__file__).parents[1] / "logs" / "spawned.log").read_text()
    steps = "".join(f"Train | Epoch {each} | loss 0.1\n" for each in range(700))
    (found,) = findings(read("job.log", [f"{log}{steps}{OUT_OF_MEMORY}".encode()]))
    assert found.code == "DDP928"
    assert "in an earlier run" in found.evidence[-1]


LEAKED = (
    "/usr/lib/python3.10/multiprocessing/resource_tracker.py:224: UserWarning: resource_tracker: "
    "There appear to be 6 leaked semaphore objects to clean up at shutdown\n"
    "  warnings.warn('resource_tracker: There appear to be %d '\n"
)


def test_what_a_killed_process_left_behind_is_worth_a_word() -> None:
    found = one(STEPS + LEAKED)
    assert (found.code, found.severity) == ("DDP902", Severity.INFO)


def test_what_an_earlier_process_left_behind_is_not() -> None:
    assert findings(read("job.log", [(STEPS + LEAKED + STEPS).encode()])) == []


def test_what_was_left_behind_by_an_exception_is_explained() -> None:
    found = one(STEPS + FAILED.format("no data") + LEAKED)
    assert "ValueError: no data" in found.message


CANCELLED = "slurmstepd: error: *** JOB 4711 ON node3 CANCELLED AT 2024-05-01T12:00:00 ***\n"
STEP = "slurmstepd: error: *** STEP 4711.0 ON node3 CANCELLED AT 2024-05-01T12:00:00 ***\n"
TASK = "srun: error: node3: task 5: Killed\n"


def test_an_error_of_mpi_comes_before_the_signal_that_follows() -> None:
    found = one(
        STEPS + "[node3:4711] *** An error occurred in MPI_Allreduce\n"
        "[node3:4711] *** reported by process [123,1]\n"
        "[node3:4711] *** on communicator MPI_COMM_WORLD\n"
        "[node3:4711] *** MPI_ERR_OTHER: known error not in list\n"
        "[node3:4711] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,\n"
        "[node3:4711] ***    and potentially your MPI job)\n"
        "srun: error: node3: task 5: Killed\n"
    )
    assert "MPI_Allreduce" in found.message


def test_what_detectron2_raises_again_ended_each_of_two_tries() -> None:
    tried = (
        "".join(f"[01/12 10:22:33 d2.utils.events]: iter: {step}  loss: 0.5\n" for step in range(9))
        + "[01/12 10:22:40 d2.engine.train_loop]: Exception during training:\n"
        "Traceback (most recent call last):\n"
        '  File "/job/train_loop.py", line 149, in train\n    self.run_step()\n'
        "KeyError: 'masks'\n"
        "[01/12 10:22:40 d2.engine.hooks]: Overall training speed: 20 iterations in 0:00:10\n"
        "[01/12 10:22:40 d2.engine.hooks]: Total training time: 0:00:10 (0:00:00 on hooks)\n"
    )
    settings = "".join(f"  SETTING_{n}: {'abcdefgh'[n % 8] * 9}\n" for n in range(600))
    found = findings(read("job.log", [(settings + tried + settings + tried).encode()]))
    assert found[0].severity == Severity.ERROR and "KeyError" in found[0].message


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ((CANCELLED, TASK), "DDP908"),
        # Somebody cancelled what hung because of it.
        ((TASK, STEPS, CANCELLED), "DDP902"),
        (("srun: forcing job termination\n", STEP, TASK), "DDP908"),
        # Slurm ends a step of which a task was killed.
        ((TASK, STEP), "DDP902"),
        ((STEP, TASK), "DDP902"),
    ],
)
def test_tasks_that_slurm_kills_of_a_cancelled_job(lines: tuple[str, ...], code: str) -> None:
    assert one(STEPS + "".join(lines)).code == code


FRAMES = 'Traceback (most recent call last):\n  File "{}", line 5, in {}\n    call()\n'
INTERRUPTED = (
    FRAMES.format("/opt/site-packages/wandb/sdk/wandb_init.py", "init")
    + "KeyboardInterrupt\n\n"
    + "During handling of the above exception, another exception occurred:\n\n"
    + FRAMES.format("/job/train.py", "<module>")
    + "AssertionError\n"
)


def test_the_process_that_wandb_starts_is_not_the_job() -> None:
    service = (
        FRAMES.format("<frozen runpy>", "_run_module_as_main")
        + '  File "/opt/site-packages/wandb/__main__.py", line 3, in <module>\n'
        + "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/port-4711.txt'\n"
    )
    found = one(INTERRUPTED + service)
    assert (found.code, found.severity.label) == ("DDP908", "error")


def test_what_wandbs_threads_and_multiprocessing_print_at_the_end_is_no_failure() -> None:
    router = FRAMES.format("/opt/site-packages/wandb/sdk/interface/router.py", "message_loop")
    tidied = FRAMES.format("/usr/lib/python3.8/multiprocessing/util.py", "_run_finalizers")
    thread = "Exception in thread Thread-3:\n" + FRAMES.format(
        "/x/threading.py", "_bootstrap_inner"
    )
    loop = thread + '  File "/x/site-packages/wandb/sdk/interface/interface.py", line 1, in loop\n'
    for text in (
        STEPS + loop + "    raise EOFError",
        STEPS + router + "wandb.sdk.interface.router.MessageRouterClosedError\n",
        STEPS + tidied + "OSError: [Errno 16] Device or resource busy: '.nfs00000001470f'\n",
    ):
        assert one(text).severity.label == "info"


def test_cards_that_are_not_there_are_no_cause_of_a_time_out() -> None:
    """libibverbs tries the drivers of all network cards that there are."""
    tried = "libibverbs: Warning: couldn't load driver 'libmlx4-rdmav34.so': libmlx4-rdmav34.so: "
    missing = "cannot open shared object file: No such file or directory\n"
    found = one((tried + missing) * 9 + timeouts(r1=(668, "ALLREDUCE", 52)))
    assert found.code == "DDP907"


def test_what_an_agent_of_older_torch_warns_of_when_it_leaves_is_no_failure() -> None:
    module = "torch.distributed.elastic.rendezvous.dynamic_rendezvous:"
    leaves = (
        "The node 'n_5389_0' has failed to shutdown the rendezvous '13' due to an error of type "
    )
    for start in (f"WARNING:{module}", f"[2024-11-14 15:07:13,109] {module} [WARNING] "):
        assert one(STEPS + start + leaves + "RendezvousConnectionError.\n").severity.label == "info"


def test_a_lost_peer_is_nearer_to_the_cause_than_how_nccl_ends_the_process() -> None:
    lost = (
        "[rank12]:[E ProcessGroupNCCL.cpp:537] Some NCCL operations have failed or timed out. Due "
        "to the asynchronous nature of CUDA kernels, operations might run on corrupted data.\n"
        "[rank12]:[E ProcessGroupNCCL.cpp:1182] [Rank 12] NCCL watchdog thread terminated with "
        "exception: NCCL error: remote process exited or there was a network error\n"
    )
    assert one(lost).message == "rank 12 likely lost its peers in NCCL"


def test_pbs_ends_a_job_that_needs_more_memory() -> None:
    """A line of the end of a log: it needs no text of its own that is looked for in all of it."""
    over = "Job 4711 has exceeded memory allocation on node gpu-0109\n"
    killed = "mpirun noticed that process rank 0 on node gpu-0109 exited on signal 9 (Killed).\n"
    assert one(STEPS * 2_000 + over + killed).code == "DDP903"


CUT = (
    "Traceback (most recent call last):\n"
    '  File "{file}", line 8, in <module>\n'
    "    sys.exit(main())\n"
)


@pytest.mark.parametrize(
    "file",
    ["/opt/conda/bin/torchrun", "/opt/bin/accelerate", "/lib/deepspeed/launcher/launch.py"],
)
def test_a_traceback_of_a_launcher_without_its_end_is_no_cause(file: str) -> None:
    status = (
        "E0302 10:00:02.000000 3 torch/distributed/elastic/multiprocessing/api.py:874] failed "
        "(exitcode: {}) local_rank: 3 (pid: 9) of binary: /bin/python\n"
    )
    found = one(status.format(1) + CUT.format(file=file))
    assert (found.code, found.ranks) == ("DDP907", (3,))
    assert one(status.format(-11) + CUT.format(file=file)).code == "DDP904"
    alone = one(CUT.format(file=file))
    assert (alone.code, "as its launcher reported" in alone.message) == ("DDP907", True)


def test_what_was_printed_before_a_traceback_without_its_end_is_shown() -> None:
    found = one("ERROR: something of a library is missing\n" + CUT.format(file="/job/train.py"))
    assert any("something of a library is missing" in each for each in found.evidence)
