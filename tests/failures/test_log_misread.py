"""Words of a known failure that mean something else: in healthy jobs, and in other libraries."""

from __future__ import annotations

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures import TABLE, Failure
from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings
from tests.support.log_lines import RAISED, STEPS, one, timeouts


@pytest.mark.parametrize(
    "line",
    [
        "WARNING scheduler.py:9] Sequence group 3 is preempted by PreemptionMode.SWAP mode",
        "Spot interruption handler started",
        "Use Keyboard interrupt to stop",
        "Killed 3 idle workers",
        "The node 'gpu1' has 8 GPUs",
        "allocator retries after CUDA_ERROR_OUT_OF_MEMORY",
        "apex 0.1 requires torch==2.0.1, but you have torch 2.1.0",
        "dlerror: libnvinfer.so.7: cannot open shared object file",
        "n1:7:7 [0] NCCL INFO NET/Plugin: libnccl-net.so: cannot open shared object file",
    ],
)
def test_a_line_of_a_working_job_is_no_failure(line: str) -> None:
    assert not findings(read("job.log", [f"start\n{line}\n{STEPS}".encode()]))


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("google.api_core.exceptions.DeadlineExceeded: 504 Deadline Exceeded", "DDP901"),
        ("_pickle.UnpicklingError: pickle data was truncated", "DDP901"),
        ("pycurl.error: (28, 'connect() timed out!')", "DDP901"),
        ("RuntimeError: PytorchStreamReader failed locating file constants.pkl: none", "DDP901"),
        ("ConnectionError: HTTPConnectionPool(host='10.0.0.5', port=80): Max retries exceeded "
         "with url: /v1 (Caused by ConnectTimeoutError(timed out))", "DDP901"),
        ("ConnectionError: HTTPSConnectionPool(host='hub.org', port=443): Max retries exceeded "
         "with url: /v1 (Caused by ConnectTimeoutError(timed out))", "DDP936"),
        ("ImportError: libGL.so.1: cannot open shared object file: No such file", "DDP961"),
        ("RuntimeError: unable to open shared memory object </torch_7_1_2> in read-write mode: "
         "Too many open files (24)", "DDP006"),
        ("RuntimeError: unable to open shared memory object </torch_7_1_2> in read-write mode: "
         "No such file or directory (2)", "DDP931"),
        ("RuntimeError: unable to write to file </torch_7_1_2>: No space left on device (28)",
         "DDP005"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_7'", "DDP005"),
        ("OSError: [Errno 28] No space left on device: '/data/last.pt'", "DDP935"),
        ("_pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error: Unsupported "
         "operand 149", "DDP944"),
        ("_pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error: Unsupported "
         "operand 105", "DDP945"),
    ],
)  # fmt: skip
def test_what_follows_the_words_decides(message: str, code: str) -> None:
    assert one(RAISED.format(message)).code == code


@pytest.mark.parametrize(
    ("xid", "code"), [("79", "DDP933"), ("94", "DDP933"), ("31", "DDP930"), ("13", "DDP930")]
)
def test_an_xid_of_a_kernel_is_no_fault_of_the_gpu(xid: str, code: str) -> None:
    assert one(f"{STEPS}NVRM: Xid (PCI:0000:8b:00): {xid}, pid=7, name=python\n").code == code


def test_gpus_without_p2p_do_not_explain_a_timeout() -> None:
    note = "n1:7:7 [0] NCCL INFO P2P is disabled between connected GPUs 1 and 0.\n"
    assert one(note + timeouts(r2=(900, "ALLREDUCE", 64))).code == "DDP907"


def test_ray_killed_workers_long_before_the_timeout() -> None:
    killed = (
        "(raylet) node_manager.cc:3: 1 Workers (tasks / actors) killed due to memory pressure\n"
    )
    waited = timeouts(r2=(900, "ALLREDUCE", 64))
    assert one(killed + STEPS + waited).code == "DDP903"
    assert one(waited).code == "DDP907"


@pytest.mark.parametrize("failure", TABLE, ids=lambda failure: failure.known.name)
def test_a_job_that_was_done_had_no_failure(failure: Failure) -> None:
    """Except a traceback, since Python prints buffered lines behind it."""
    for example in failure.examples:
        text = f"start\n{STEPS}{example}\n{STEPS}Training finished\n"
        found = findings(read("job.log", [text.encode()]))
        alarms = [each for each in found if each.severity > Severity.INFO]
        assert not alarms or "Traceback" in example


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        ("which is output 0 of ReluBackward0, is at version 1", "the result of Relu"),
        ("which is output 0 of AsStridedBackward0, is at version 3", "likely changed a weight"),
        ("is at version 7", "changed a tensor in place"),
    ],
)
def test_what_was_changed_in_place_decides_on_the_advice(behind: str, said: str) -> None:
    changed = "RuntimeError: one of the variables has been modified by an inplace operation: "
    found = one(RAISED.format(f"{changed}[torch.FloatTensor [256]], {behind}; expected version 0"))
    assert found.code == "DDP938"
    assert said in found.message


def test_a_warning_of_python_is_not_nearer_than_what_ended_the_job() -> None:
    warned = "io.py:13: UserWarning: no images: libtorch_cu.so: cannot open shared object file\n"
    waited = "Timed out initializing process group in store based barrier on rank: 0, for key: k:1 "
    found = one(f"{warned}{waited}(world_size=2, worker_count=4, timeout=0:02:00)\n")
    assert found.code == "DDP813"
    assert one(warned + timeouts(r2=(900, "ALLREDUCE", 64))).code == "DDP907"


def test_what_nccl_only_informs_of_is_not_nearer_than_its_warning() -> None:
    informed = "n1:7:7 [1] NCCL INFO Could not enable P2P between dev 1(=1e000) and dev 0(=1d000)\n"
    warned = "n1:7:7 [0] ibvwrap.cc:284 NCCL WARN Call to ibv_modify_qp failed with error No device"
    assert one(f"{informed}{warned}\n").code == "DDP915"


def test_a_log_that_ends_with_the_mention_of_a_cause_is_likely_of_it() -> None:
    mention = "DDP expects same model across all ranks, but Rank 0 has 9 params, while rank 1 has "
    found = one(f"{mention}inconsistent 7 params.\n")
    assert (found.code, found.severity) == ("DDP707", Severity.WARNING)
    assert "likely" in found.message
    assert not findings(read("job.log", [f"{mention}\n{STEPS}".encode()]))


def test_the_bar_on_the_line_of_a_timeout_shows_what_a_rank_did_meanwhile() -> None:
    bar = "Running tokenizer:  53%|█████▎    | 267000/507205 [29:55<50:01, 80.02 examples/s]"
    found = one(bar + timeouts(r2=(2, "ALLREDUCE", 1)))
    assert found.message.startswith("rank 2 waited")
    assert any("Running tokenizer" in line for line in found.evidence)
    assert "init_process_group(timeout=" in found.fix


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: python Traceback (most recent "
         "call last): File /a/torchrun, line 8, in <module>", "DDP902"),
        ("   | [rank0]: Traceback (most recent call last):\n   | [rank0]:   File \"/job/a\", line"
         " 5, in a\n   | [rank0]: ValueError: bad", "DDP901"),
        ("subprocess.CalledProcessError: Command 'python' died with <Signals.SIGSEGV: 11>.\n***\n"
         "Setting OMP_NUM_THREADS environment variable for each process to be 1", "DDP904"),
        ("THCudaCheck FAIL file=a.cpp line=9 error=101 : invalid device ordinal\nTraceback (most "
         "recent call last):\n  File \"/job/a.py\", line 5, in a\nutils.i", "DDP927"),
        (RAISED.format("ValueError: host not found: Name or service not known")
         .replace("/job", "/lib/torch/distributed"), "DDP913"),
        (RAISED.format("RuntimeError: open(/store): Permission denied"), "DDP912"),
        ("terminate called after throwing\n  what():  open(/store): Permission denied\nTraceback "
         "(most recent call last):\n  File \"/job/a.py\", line 5, in <module>\n    mp.spawn(f)\n  "
         "File \"/lib/torch/multiprocessing/spawn.py\", line 9, in spawn", "DDP912"),
        (RAISED.format("AssertionError: the heads must be divisible by world size"), "DDP955"),
        ("(Env pid=5) frame #11: gloo::transport::tcp::Context::connect() + 0xa1", "DDP900"),
    ],
)  # fmt: skip
def test_posts_that_lost_a_part_of_their_form_are_understood(text: str, code: str) -> None:
    assert one(f"{text}\n").code == code


def test_an_assertion_within_torch_is_no_launcher() -> None:
    found = one(RAISED.format("RuntimeError: !grad_accumulator.expired() INTERNAL ASSERT FAILED"))
    assert found.code == "DDP901"
    assert "after the wrap in DDP" in found.fix
