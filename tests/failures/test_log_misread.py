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
