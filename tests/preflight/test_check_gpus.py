"""``ddpdoctor check`` on GPUs: the real binding on the stub of the driver's library."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.preflight.machine import software
from ddpdoctor.preflight.machine.software import Versions, judge
from tests.conftest import Doctor
from tests.nvml_stub import build
from tests.support.gpu_stub import HEALTHY, Gpus


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def gpus(doctor: Doctor, library: Path) -> Gpus:
    return Gpus(doctor, library)


def messages(told: dict[str, Any], check: str) -> list[str]:
    return [finding["message"] for finding in told[check]["findings"]]


def test_eight_healthy_gpus_are_silent(gpus: Gpus) -> None:
    told = gpus.check()
    assert {each["status"] for each in told.values()} == {"pass"}
    assert {name: each["detail"] for name, each in told.items()} | {"gpu-health": ""} == {
        "gpu-driver": "8 of 8 GPUs answer, driver 570.86.15",
        "gpu-count": "8 of 8 GPUs visible, for 8 ranks",
        "gpu-memory": "8 GPUs: 80 GiB free, or more",
        "gpu-health": "",
        "gpu-links": "8 GPUs: PCIe x16, 144 NVLinks up",
        "gpu-peers": "28 of 28 pairs of GPUs have peer-to-peer access",
    }
    assert all(not each["findings"] for each in told.values())


def test_faults_of_different_gpus_are_each_told_once(gpus: Gpus) -> None:
    told = gpus.check(
        "ecc 3 2", "rows 2 1", "rows 4 2", "throttle 6 64", "width 5 4", "generation 7 3",
        "links 1 17", "peers 0 0", "mode 5 2", "persistence 0 0",
        "used 1 30", f"process 1 {os.getpid()}", "fabric 3 2", "fabric 4 3",
    )  # fmt: skip
    assert messages(told, "gpu-health") == [
        "GPU 3: 2 memory errors that ECC could not correct since the driver was loaded",
        "GPU 4 has no spare memory rows left for a faulty one",
        "GPU 2 has a faulty memory row that waits for a reset to be replaced",
        "GPU 6 is throttled at 66 degrees Celsius: hardware thermal slowdown",
    ]
    assert messages(told, "gpu-links") == [
        "GPU 1 has 17 of 18 NVLinks up, fewer than its peers",
        'the NVSwitch fabric of GPU 3 is not set up: CUDA may fail with "system not yet '
        'initialized"',
        "GPU 5 has 4 of 16 PCIe lanes: the slowest link sets the pace of all ranks",
        "GPU 7 runs PCIe generation 3 of 5 though it is busy: the slowest link sets the pace of "
        "all ranks",
    ]
    assert messages(told, "gpu-count") == [
        "GPU 5 is in compute mode Prohibited: no process may use it"
    ]
    assert messages(told, "gpu-memory") == [
        "30 GiB of 80 GiB of GPU 1 are in use before the job starts"
    ]
    (evidence,) = told["gpu-memory"]["findings"][0]["evidence"]
    assert evidence.endswith(" holds 30 GiB") and f"pid {os.getpid()}" in evidence
    assert told["gpu-peers"]["status"] == "pass"
    assert messages(told, "gpu-peers")[0].startswith(
        "7 of 28 pairs of GPUs have no peer-to-peer access: 0-1, 0-2"
    )
    assert messages(told, "gpu-driver") == [
        "persistence mode is off on GPU 0: after a pause the driver takes seconds to come back"
    ]
    for each in told.values():
        assert all(finding["paste"] for finding in each["findings"])


def test_what_cuda_visible_devices_leaves_out_is_not_blamed(gpus: Gpus) -> None:
    faults = ("ecc 3 2", "used 1 30", "width 5 4")
    told = gpus.check(*faults, CUDA_VISIBLE_DEVICES="6,7")
    assert {each["status"] for each in told.values()} == {"pass"}
    assert told["gpu-count"]["detail"] == "2 of 8 GPUs visible, for 2 ranks"


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("0,9,1", "there is no GPU 9, so that CUDA sees 1 of 8 GPUs"),
        ("0,1,1", "1 is listed twice, so that CUDA sees 0 of 8 GPUs"),
        ("GPU-99", "this machine has no GPU-99, so that CUDA sees 0 of 8 GPUs"),
        ("0,one", "'one' is not a number or UUID"),
    ],
)
def test_a_wrong_choice_of_gpus(gpus: Gpus, chosen: str, said: str) -> None:
    told = gpus.check(CUDA_VISIBLE_DEVICES=chosen)["gpu-count"]
    assert told["status"] == "fail"
    (finding,) = told["findings"]
    assert said in finding["message"]
    assert finding["paste"] == "export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7"


def test_more_ranks_than_gpus(gpus: Gpus) -> None:
    told = gpus.check("gpus 4", words=("--nproc-per-node", "8"))["gpu-count"]
    assert told["status"] == "warn"
    assert told["findings"][0]["paste"] == "ddpdoctor run --nproc-per-node 4 -- train.py"


def test_no_gpu_is_asked_for(gpus: Gpus) -> None:
    told = gpus.check(CUDA_VISIBLE_DEVICES="")["gpu-count"]
    assert told["status"] == "skipped"
    assert told["detail"] == "CUDA_VISIBLE_DEVICES hides all 8 GPUs"
    others = gpus.check(CUDA_VISIBLE_DEVICES="NoDevFiles")
    assert {each["status"] for name, each in others.items() if name != "gpu-driver"} == {"skipped"}


def test_numbers_are_those_of_the_gpus_that_may_be_used(gpus: Gpus) -> None:
    """A batch system gave the last two of four, which CUDA counts from 0."""
    forbidden = [f"nvmlDeviceGetHandleByIndex {index} 4" for index in (0, 1)]
    told = gpus.check("gpus 4", *forbidden, "used 3 30", CUDA_VISIBLE_DEVICES="0,1")
    assert told["gpu-count"]["detail"] == "2 of 2 GPUs visible, for 2 ranks"
    assert told["gpu-count"]["status"] == "pass"
    assert messages(told, "gpu-memory") == [
        "30 GiB of 80 GiB of GPU 3 are in use before the job starts"
    ]
    assert told["gpu-links"]["detail"].startswith("2 GPUs: ")


def test_compute_modes(gpus: Gpus) -> None:
    assert gpus.check("mode * 3")["gpu-count"]["status"] == "pass"
    taken = gpus.check("mode 5 3", "process 5 1")
    assert messages(taken, "gpu-count") == [
        "GPU 5 is in compute mode Exclusive, and another process has it"
    ]


def test_partitioned_gpus(gpus: Gpus) -> None:
    one = gpus.check("mig * 1", "instances * 2")["gpu-count"]
    assert (one["status"], one["detail"]) == (
        "pass", "one MIG instance visible, all that CUDA shows a process, for 1 rank",
    )  # fmt: skip
    told = gpus.check("mig * 1", "instances * 2", words=("--nproc-per-node", "8"))
    assert told["gpu-memory"]["status"] == "skipped"
    assert told["gpu-count"]["status"] == "warn"
    assert "a process sees one instance" in messages(told, "gpu-count")[0]
    empty = gpus.check("mig 0 1", words=("--nproc-per-node", "1"))
    assert "GPU 0 is partitioned (MIG) and has no instances" in messages(empty, "gpu-count")[0]
    instance = "MIG-00000001-0000-0000-0000-000000000001"
    one = gpus.check(
        "mig 0 1", "instances 0 2", words=("--nproc-per-node", "1"), CUDA_VISIBLE_DEVICES=instance
    )
    assert one["gpu-count"]["status"] == "pass"


@pytest.mark.parametrize(
    ("fault", "said", "paste"),
    [
        ("nvmlInit * 18", "its library and kernel module differ", "sudo reboot"),
        ("nvmlInit * 4", "no permission", "ls -l /dev/nvidia*; id"),
        ("nvmlDeviceGetCount * 999", "unknown error", "sudo dmesg | grep -i nvrm"),
    ],
)
def test_a_driver_that_does_not_answer(gpus: Gpus, fault: str, said: str, paste: str) -> None:
    told = gpus.check(fault)
    torch = software.installed_torch()
    assert told["gpu-driver"]["status"] == ("fail" if torch and torch.cuda else "warn")
    (finding,) = told["gpu-driver"]["findings"]
    assert said in finding["message"]
    assert finding["paste"] == paste
    others = [each for name, each in told.items() if name != "gpu-driver"]
    assert {each["status"] for each in others} == {"skipped"}
    assert all(said in each["detail"] for each in others)


def test_a_torch_without_cuda_has_no_nccl_to_test(doctor: Doctor, library: Path) -> None:
    torch = software.installed_torch()
    if torch is None or torch.cuda or torch.hip:
        pytest.skip("this torch has CUDA")
    (doctor.directory / "control").write_text("\n".join(HEALTHY))
    env = {"LD_LIBRARY_PATH": str(library), "NVML_STUB": str(doctor.directory / "control")}
    words = ("--nproc-per-node", "2", "--only", "collectives,versions", "--json")
    result = doctor.cli("check", *words, env=env)
    fit, collectives = json.loads(result.stdout)["checks"]
    assert "is built without CUDA, and 8 GPUs stay unused" in fit["findings"][0]["message"]
    assert collectives["detail"] == (
        "2 of 2 ranks reduced correctly with gloo; NCCL skipped: torch without CUDA"
    )
    assert result.status == 1


WITH_CUDA = """
import sys
from pathlib import Path
if "check" in sys.orig_argv:
    from ddpdoctor.preflight.machine import software
    known = software.installed_torch()
    software.installed_torch = lambda: software.Torch(known.folder, known.version, "12.8")
"""
"""The check takes this torch for one that has CUDA; its ranks find out."""


@pytest.mark.slow
def test_nccl_that_cannot_be_opened_is_not_told_as_gloos_failure(
    doctor: Doctor, library: Path
) -> None:
    """Two nodes on this machine, with a GPU each that only NVML knows."""
    (doctor.directory / "control").write_text("\n".join(("gpus 1", *HEALTHY)))
    (doctor.directory / "fault").mkdir()
    (doctor.directory / "fault" / "sitecustomize.py").write_text(WITH_CUDA)
    env = {
        "LD_LIBRARY_PATH": str(library),
        "NVML_STUB": str(doctor.directory / "control"),
        "PYTHONPATH": str(doctor.directory / "fault"),
    }
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    words = ("--nnodes", "2", "--only", "nodes,gloo-nodes,nccl-nodes", "--json")
    command = (sys.executable, "-m", "ddpdoctor", "check", *words, "--rdzv-endpoint", endpoint)
    running = [
        doctor.start(*command, "--node-rank", str(rank), env=env, watch=False) for rank in (0, 1)
    ]
    for each in running:
        result = each.finish(90)
        told = {check["check"]: check for check in json.loads(result.stdout)["checks"]}
        assert told["gloo-nodes"]["status"] == "pass", told
        assert "2 of 2 ranks reduced correctly" in told["gloo-nodes"]["detail"]
        assert result.status == 2
        (finding,) = told["nccl-nodes"]["findings"]
        assert finding["message"].startswith("NCCL's all_reduce inside the node fails: ")
        assert "NCCL" in finding["evidence"][0]


@pytest.mark.slow
def test_a_driver_that_hangs_holds_nothing_up(gpus: Gpus) -> None:
    told = gpus.check("nvmlDeviceGetCount * -60")
    said = "the NVIDIA driver does not answer within 6 s"
    assert messages(told, "gpu-driver") == [f"no GPU can be used: {said}"]
    others = {each["detail"] for name, each in told.items() if name != "gpu-driver"}
    assert others == {f"the GPUs cannot be read: {said}"}


@pytest.mark.slow
def test_gpus_that_wake_up_one_after_the_other_are_waited_for(gpus: Gpus) -> None:
    """Without persistence mode, eight of them take half a minute."""
    told = gpus.check("gpus 6", "nvmlDeviceGetHandleByIndex * -2")
    assert {each["status"] for each in told.values()} == {"pass"}
    assert told["gpu-driver"]["detail"] == "6 of 6 GPUs answer, driver 570.86.15"


def test_lost_gpus_are_named_and_the_others_are_tested(gpus: Gpus) -> None:
    told = gpus.check("nvmlDeviceGetHandleByIndex 2 15", "nvmlDeviceGetMemoryInfo_v2 5 15")
    assert told["gpu-driver"]["detail"] == "6 of 8 GPUs answer, driver 570.86.15"
    assert messages(told, "gpu-driver") == [
        "GPUs 2,5 do not answer: the GPU is lost: it fell off the bus",
    ]
    assert told["gpu-links"]["status"] == "pass"
    forbidden = gpus.check("nvmlDeviceGetHandleByIndex 2 4")
    assert forbidden["gpu-driver"]["detail"] == "7 of 7 GPUs answer, driver 570.86.15"
    assert {each["status"] for each in forbidden.values()} == {"pass"}


@pytest.mark.parametrize("code", [3, 4, 13])
def test_what_a_gpu_does_not_tell_is_no_fault(gpus: Gpus, code: int) -> None:
    """Not supported, no permission, a driver that is too old: for all that may be asked."""
    asked = (
        "TotalEccErrors", "RemappedRows", "RetiredPagesPendingStatus", "CurrPcieLinkWidth",
        "MaxPcieLinkWidth", "CurrPcieLinkGeneration", "MaxPcieLinkGeneration", "NvLinkState",
        "PersistenceMode", "ComputeMode", "PerformanceState", "P2PStatus", "MemoryInfo_v2",
        "MemoryInfo", "ComputeRunningProcesses", "CurrentClocksEventReasons", "Temperature",
    )  # fmt: skip
    told = gpus.check(*(f"nvmlDeviceGet{each} * {code}" for each in asked))
    assert {each["status"] for each in told.values()} <= {"pass", "skipped"}
    assert all(not each["findings"] for each in told.values())
    assert told["gpu-memory"]["detail"] == "the driver does not report how much memory is in use"
    assert told["gpu-peers"]["detail"] == "the driver does not report it"


@pytest.mark.parametrize(
    ("cuda", "driver", "gpus", "codes"),
    [
        ("12.8", "12.4", 8, []),
        ("13.0", "12.4", 8, ["driver"]),
        ("13.0", "12.4", 0, []),
        ("11.8", "12.4", 8, []),
        ("", "12.4", 8, ["no CUDA"]),
        ("", "", 0, []),
    ],
)
def test_torch_and_the_driver(cuda: str, driver: str, gpus: int, codes: list[str]) -> None:
    found = Versions("3.11.7", "2.13.0", cuda, "", "550.54", driver, "")
    assert [finding.about for finding in judge(found, gpus)] == codes


@pytest.mark.parametrize(("version", "codes"), [("11.5.3", ["pynvml"]), ("13.0.1", []), ("", [])])
def test_the_deprecated_binding(version: str, codes: list[str]) -> None:
    found = Versions("3.11.7", "2.13.0", "12.8", "", "", "", version)
    assert [finding.about for finding in judge(found, 8)] == codes


def test_no_torch(tmp_path: Path) -> None:
    (finding,) = judge(Versions("3.11.7", "", "", "", "", "", ""), 0)
    assert finding.paste == "pip install torch"
