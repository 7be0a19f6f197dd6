"""The GPUs read again and again: the real binding on a stub of the driver's library."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.system import gpu_poll
from ddpdoctor.system.gpu_poll import GpuPoll, file_name
from ddpdoctor.top import live
from tests.conftest import Doctor
from tests.nvml_stub import Stub, build

NUMBERS = {"utilization", "memory_used", "memory_total", "power", "temperature", "clock"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stub(library: Path, tmp_path: Path) -> Iterator[Stub]:
    stub = Stub(library, tmp_path / "control")
    yield stub
    stub.close()


def gpu(told: Any, index: int) -> Any:
    (found,) = (each for each in told["gpus"] if each["index"] == index)
    return found


def test_eight_gpus_in_base_units(stub: Stub) -> None:
    told = stub.read(0)
    assert told["nvml"] == ""
    assert [each["index"] for each in told["gpus"]] == list(range(8))
    assert gpu(told, 3) == {
        "index": 3,
        "uuid": "GPU-00000004-0000-0000-0000-000000000000",
        "name": "NVIDIA Stub",
        "bus_id": "00000000:03:00.0",
        "utilization": 0.93,
        "memory_used": 1003,
        "memory_total": 80000,
        "power": 400.003,
        "power_limit": 700.0,
        "temperature": 63,
        "clock": 1.5e9,
        "clock_max": 1.98e9,
        "ecc_errors": 3,
        "throttle": ["power cap", "hardware thermal slowdown"],
        "pcie": 1024 * 8001,
    }


def test_links_and_processes(stub: Stub) -> None:
    stub.has("links 3 18", "process 3 4103", "used 3 61")
    told = stub.read(0)
    assert gpu(told, 3)["processes"] == [[4103, 61 << 30]]
    assert "nvlink" not in gpu(told, 3), "a counter is no rate"
    assert "processes" not in gpu(told, 4)
    time.sleep(0.2)
    told = stub.read(6)
    # The counters of the stub are milliseconds, and six seconds have passed by its clock.
    assert 0 < gpu(told, 3)["nvlink"] < 1e9
    assert "nvlink" not in gpu(told, 4)
    held = live.gpus_of(told)[3]
    assert held.processes == ((4103, 61 << 30),) and held.pcie == 1024 * 8001


def test_the_slow_tier_is_asked_every_five_seconds(stub: Stub) -> None:
    stub.read(0)
    stub.has("nvmlDeviceGetTemperature * 3", "nvmlDeviceGetPowerUsage * 3")
    told = gpu(stub.read(4), 0)
    assert told["temperature"] == 60 and "power" not in told
    assert "temperature" not in gpu(stub.read(5), 0)


def test_what_is_not_supported_or_not_permitted_is_absent_and_named(stub: Stub) -> None:
    stub.has(
        "nvmlDeviceGetPowerUsage 0 3",
        "nvmlDeviceGetUtilizationRates 1 4",
        "nvmlDeviceGetTotalEccErrors * 3",
        "nvmlDeviceGetMemoryInfo_v2 2 13",
    )
    told = stub.read(0)
    assert gpu(told, 0)["problem"] == "power: not supported"
    assert gpu(told, 0).keys() >= NUMBERS - {"power"} and "power" not in gpu(told, 0)
    assert gpu(told, 1)["problem"] == "utilization: no permission"
    assert gpu(told, 2)["memory_used"] == 1514, "the first version counts what the driver keeps"
    assert "problem" not in gpu(told, 2) and "ecc_errors" not in gpu(told, 2)


def test_a_partitioned_gpu_has_no_utilization(stub: Stub) -> None:
    stub.has("mig 5 1")
    told = gpu(stub.read(0), 5)
    assert told["mig"] is True and "utilization" not in told
    assert "MIG" in told["problem"]


def test_a_lost_gpu_is_never_asked_again_and_the_others_go_on(stub: Stub) -> None:
    stub.read(0)
    stub.has("nvmlDeviceGetMemoryInfo_v2 2 15", "nvmlDeviceGetMemoryInfo 2 15")
    told = stub.read(1)
    assert "lost" in gpu(told, 2)["problem"]
    assert not NUMBERS & gpu(told, 2).keys()
    assert gpu(told, 2)["name"] == "NVIDIA Stub"
    assert gpu(told, 3).keys() >= NUMBERS
    stub.has()
    assert "lost" in gpu(stub.read(2), 2)["problem"]


def test_after_an_unknown_error_it_is_reopened_with_a_pause(stub: Stub) -> None:
    stub.read(0)
    stub.has("nvmlDeviceGetUtilizationRates * 999", "nvmlInit * 999")
    broken = stub.read(1)
    assert not NUMBERS & gpu(broken, 7).keys()
    pauses = [len([t for t in (2, 3, 4, 5) if stub.read(t)["nvml"]])]
    assert pauses == [4]
    stub.has()
    silent = stub.read(6)
    assert "unknown error" in silent["nvml"], "it still waits"
    assert len(silent["gpus"]) == 8, "the GPUs are not forgotten"
    told = stub.read(40)
    assert told["nvml"] == ""
    # The stub refuses handles of before.
    assert gpu(told, 0).keys() >= NUMBERS


def test_a_gpu_that_breaks_the_library_again_and_again_is_left_alone(stub: Stub) -> None:
    stub.has("nvmlDeviceGetPowerUsage 1 999")
    for now in range(0, 40, 2):
        told = stub.read(now)
    assert gpu(told, 7).keys() >= NUMBERS
    assert "unknown error" in gpu(told, 1)["problem"]
    stub.has()
    for now in range(200, 210, 2):
        told = stub.read(now)
    assert gpu(told, 1).keys() >= NUMBERS


@pytest.mark.parametrize(
    ("code", "words"), [(18, "reboot"), (9, "not loaded"), (4, "no permission"), (999, "unknown")]
)
def test_a_driver_that_does_not_open_is_named(stub: Stub, code: int, words: str) -> None:
    stub.has(f"nvmlInit * {code}")
    told = stub.read(0)
    assert told["gpus"] == [] and words in told["nvml"]
    stub.has()
    assert len(stub.read(5)["gpus"]) == 8


def test_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_poll, "LIBRARY", "libthere-is-none.so.1")
    GpuPoll(tmp_path).start()
    time.sleep(0.2)
    assert list(tmp_path.iterdir()) == []


def test_a_host_name_is_a_file_name() -> None:
    assert file_name("node-1.example.org") == "gpus-node-1.example.org.json"
    assert file_name("a/../b") == "gpus-a_.._b.json"


JOB = """
import glob, json, os, time
pattern = os.path.join(os.environ["DDPDOCTOR_RUN_DIR"], "gpus-*.json")
deadline = time.time() + 300
while time.time() < deadline and not glob.glob(pattern):
    time.sleep(0.1)
first = json.load(open(glob.glob(pattern)[0]))
while time.time() < deadline and json.load(open(glob.glob(pattern)[0]))["time"] == first["time"]:
    time.sleep(0.1)
print(len(first["gpus"]), json.load(open(glob.glob(pattern)[0]))["time"] > first["time"])
"""


def test_the_supervisor_shows_the_gpus_while_the_job_lives(doctor: Doctor, library: Path) -> None:
    job = doctor.write("job.py", JOB)
    env = {"LD_LIBRARY_PATH": str(library)}
    result = doctor.run("--", "python", str(job), env=env)
    assert result.stdout == "8 True\n", result.stderr
    (path,) = result.run_dir.glob("gpus-*.json")
    assert json.loads(path.read_text())["gpus"][0]["power"] == 400.0


def test_a_binding_that_is_something_else_costs_the_numbers_only(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("broken")

    monkeypatch.setattr(gpu_poll, "LIBRARY", str(library / "libnvidia-ml.so.1"))
    monkeypatch.setattr(gpu_poll, "Poller", broken)
    GpuPoll(tmp_path).start()
    time.sleep(0.2)
    assert list(tmp_path.iterdir()) == []
