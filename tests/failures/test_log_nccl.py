"""What NCCL prints of its failures, with NCCL_DEBUG=INFO as we recommend, and as its last error."""

from __future__ import annotations

import pytest

from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings
from tests.support.log_lines import STEPS, one, timeouts

_HOW = "".join(f"h7:31:90 [2] NCCL INFO {at} -> 2\n" for at in ("a.cc:1", "b.cc:22", "init.cc:333"))
_RAISED = (
    "Traceback (most recent call last):\n"
    '  File "/job/train.py", line 7, in <module>\n'
    "    dist.barrier()\n"
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:9, {kind}, NCCL version 2\n"
    "{name}: Something failed.\n"
    "Last error:\n"
    "{last}\n"
)


@pytest.mark.parametrize(
    ("code", "warned"),
    [
        ("DDP921", "misc/socket.cc:1 NCCL WARN socketStartConnect: Connect to h8<77> failed : No"),
        (
            "DDP005",
            "misc/shmutils.cc:1 NCCL WARN Error: failed to extend /dev/shm/nccl-x to 9 bytes",
        ),
        ("DDP203", "init.cc:1 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on 1a000"),
        ("DDP928", "include/alloc.h:1 NCCL WARN Cuda failure 2 'out of memory'"),
        (
            "DDP915",
            "net_ib.cc:1 NCCL WARN NET/IB : Got completion from peer h8<1> with error 12, op",
        ),
        (
            "DDP920",
            "b.cc:1 NCCL WARN Mismatched NCCL version detected : rank 3 version 21805 rank 0",
        ),
        ("DDP001", "b.cc:1 NCCL WARN Bootstrap Root : rank 2 of 4 ranks has already checked in"),
    ],
)
def test_lines_on_how_an_error_returned_do_not_hide_the_warning(code: str, warned: str) -> None:
    found = one(f"start\nh7:31:90 [2] {warned}\n{_HOW}{_HOW}")
    assert (found.code, found.severity.label) == (code, "error")


def test_a_job_that_works_after_a_warning_has_not_failed() -> None:
    warned = f"h7:31:90 [2] x.cc:1 NCCL WARN Cuda failure 1 'invalid argument'\n{_HOW}"
    assert not [
        each
        for each in findings(read("job.log", [(warned + STEPS).encode()]))
        if each.severity.label != "info"
    ]


def test_a_warning_that_no_entry_knows_is_quoted() -> None:
    warned = f"start\nh7:31:90 [2] x.cc:1 NCCL WARN Words of a later version\n{_HOW}"
    found = one(warned)
    assert (found.code, found.severity.label) == ("DDP900", "warning")
    assert "warned: Words of a later version" in found.message
    failed = one(f"{warned}srun: error: h7: task 2: Exited with exit code 1\n")
    assert failed.severity.label == "error"
    assert any("Words of a later version" in each for each in failed.evidence)


@pytest.mark.parametrize(
    ("code", "kind", "name", "last", "said"),
    [
        (
            "DDP923",
            "unhandled cuda error",
            "ncclUnhandledCudaError",
            "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 64 : CUDA error 401 'no'",
            "NVLS",
        ),
        (
            "DDP209",
            "unhandled cuda error",
            "ncclUnhandledCudaError",
            "Cuda failure 802 'system not yet initialized'",
            "NVSwitch fabric",
        ),
        (
            "DDP907",
            "unhandled system error",
            "ncclSystemError",
            "socketProgress: Connection closed by remote peer h8<1>",
            "connection to a peer",
        ),
        (
            "DDP924",
            "internal error",
            "ncclInternalError",
            "Words of a later version",
            "Words of a later version",
        ),
        (
            "DDP924",
            "invalid argument",
            "ncclInvalidArgument",
            "Broadcast : invalid root 9",
            "argument that NCCL refuses: Broadcast : invalid root 9",
        ),
    ],
)
def test_the_last_error_decides(code: str, kind: str, name: str, last: str, said: str) -> None:
    found = one(_RAISED.format(kind=kind, name=name, last=last))
    assert found.code == code
    assert said in found.message


def test_shared_memory_that_cannot_be_opened_is_not_full() -> None:
    warned = (
        "h7:31:90 [0] a.cc:1 NCCL WARN Call to shm_open failed : Permission denied\n"
        "h7:31:90 [0] a.cc:2 NCCL WARN Error while creating shared memory segment nccl-shm-r\n"
    )
    found = one(warned + _HOW)
    assert found.code == "DDP005"
    assert "Permission denied" in found.message and "full" not in found.message


@pytest.mark.parametrize(("has", "code"), [(0, "DDP921"), (10, "DDP707")])
def test_no_parameters_on_a_peer_means_a_broken_exchange(has: int, code: str) -> None:
    found = one(
        "RuntimeError: DDP expects same model across all ranks, but Rank 2 has 9 params, "
        f"while rank 0 has inconsistent {has} params.\n"
    )
    assert found.code == code
    assert ("NCCL_P2P_DISABLE" in found.fix) == (has == 0)


def test_how_an_error_returned_is_told_if_nothing_else_is() -> None:
    said = "h7:31:90 [2] NCCL INFO misc/socket.cc:77 -> 2 (No route to host)\n"
    found = one(f"start\n{said}{_HOW}")
    assert (found.code, found.severity.label) == ("DDP922", "error")
    assert found.message.endswith("(in socket): No route to host")
    assert not findings(read("job.log", [(said + _HOW + STEPS).encode()]))


@pytest.mark.parametrize(
    ("error", "words"), [("status=4", "refuse a transfer"), ("error 5", "consequence of another")]
)
def test_infiniband_refuses_a_transfer_or_drops_it(error: str, words: str) -> None:
    found = one(f"h7:31:90 [2] n.cc:1 NCCL WARN NET/IB : Got completion from peer h8 with {error},")
    assert found.code == "DDP915"
    assert words in found.message


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("invalid device ordinal", "DDP927"),
        ("system not yet initialized", "DDP209"),
        ("the provided PTX was compiled with an unsupported toolchain.", "DDP948"),
        ("invalid argument", "DDP923"),
    ],
)
def test_an_error_of_cuda_within_nccl_is_what_it_is_in_torch(said: str, code: str) -> None:
    line = f"n1:7:9 [0] include/alloc.h:43 NCCL WARN Cuda failure '{said}'\n"
    assert one(line + "n1:7:9 [0] NCCL INFO init.cc:100 -> 1\n").code == code


@pytest.mark.parametrize(
    ("warned", "step"),
    [
        ("misc/argcheck.cc:39 NCCL WARN AllReduce : sendbuff allocated on device 0", "set_device"),
        ("misc/argcheck.cc:30 NCCL WARN AllReduce : sendbuff is not a valid pointer", ".cuda()"),
        ("proxy.cc:1495 NCCL WARN [Service thread] Could not receive type", "P2P_DISABLE"),
        ("misc/shmutils.cc:49 NCCL WARN Call to open failed : Permission denied", "/dev/shm"),
    ],
)
def test_a_warning_of_nccl_comes_with_the_next_step(warned: str, step: str) -> None:
    mismatch = " mismatchs with NCCL device 1" if "allocated" in warned else ""
    assert step in one(f"n1:7:9 [0] {warned}{mismatch}\n").fix


@pytest.mark.parametrize("width", [60, 75, 88, 92, 97, 104, 110])
def test_a_timeout_that_a_terminal_broke_is_read_as_one_line(width: int) -> None:
    line = timeouts(r1=(778, "BROADCAST", 1)).replace("[rank1]:", "").rstrip()
    pieces = [line[at : at + width].ljust(width) for at in range(0, len(line), width)]
    found = one("epoch 1 step 1\n" + "\n".join(pieces) + "\n")
    assert found.message == "rank 1 waited 600021 ms in BROADCAST #778, which did not complete"


def test_the_line_of_another_rank_is_not_the_rest_of_a_timeout() -> None:
    first = timeouts(r1=(9, "ALLREDUCE", 64)).partition(", NumelIn")[0] + "\n"
    found = one(first + timeouts(r0=(9, "ALLREDUCE", 64), r2=(7, "ALLREDUCE", 64)))
    assert found.ranks == (2,)
