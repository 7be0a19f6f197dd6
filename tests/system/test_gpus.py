"""NVML: what is read of a GPU, and what is left out."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.system.nvml import Device, NvmlReader, Process, Reading, same_uuid
from tests.fake_nvml import Machine

A, B = "GPU-aaaa", "GPU-bbbb"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path / "machine.json", monkeypatch)
    machine.has({"uuid": A}, {"uuid": B})
    yield machine
    sys.modules.pop("pynvml", None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def read(reader: NvmlReader, device: Device) -> Reading:
    """What is read of a GPU in one go."""
    brief = reader.brief(device)
    fast = ("memory_total", "memory_used", "utilization", "power")
    return replace(reader.rest(device), **{name: getattr(brief, name) for name in fast})


# -- reading


def test_a_gpu_is_read(machine: Machine) -> None:
    machine.has({"uuid": A, "processes": [[7, 2**30], [8, None]]})
    reader = NvmlReader()
    (device,) = reader.devices()
    assert (device.index, device.uuid, device.name) == (0, A, "NVIDIA H100")
    assert (device.bus_id, device.mig) == ("00000000:00:00.0", False)
    assert read(reader, device) == Reading(
        memory_total=80_000,
        memory_used=1000,
        utilization=97,
        power=412.5,
        power_limit=700.0,
        temperature=61,
        clock=1980,
        throttled=("power cap", "software thermal slowdown"),
        processes=(Process(7, 2**30), Process(8, None)),
        ecc_errors=0,
    )
    assert reader.processes(device) == (Process(7, 2**30), Process(8, None))
    reader.close()
    assert machine.module.opened == 0


def test_what_is_not_available_is_none_and_never_a_number(machine: Machine) -> None:
    sentinel = 2**64 - 1
    machine.has({"uuid": A, "used": sentinel, "power": 2**32 - 1, "processes": [[7, sentinel]]})
    reader = NvmlReader()
    (device,) = reader.devices()
    reading = read(reader, device)
    assert reading.memory_used is None
    assert reading.power is None
    assert reader.processes(device) == (Process(7, None),)


def test_what_is_not_supported_is_asked_once_of_each_gpu(machine: Machine) -> None:
    machine.has({"uuid": A, "errors": {"nvmlDeviceGetPowerUsage": 3}}, {"uuid": B})
    reader = NvmlReader()
    first, second = reader.devices()
    for _ in range(3):
        assert read(reader, first).power is None
        assert read(reader, second).power == 412.5
    assert machine.module.calls["nvmlDeviceGetPowerUsage"] == 4


def test_an_older_driver_tells_memory_in_the_first_version(machine: Machine) -> None:
    machine.has({"uuid": A, "errors": {"nvmlDeviceGetMemoryInfo_v2": 13}})
    reader = NvmlReader()
    (device,) = reader.devices()
    assert read(reader, device).memory_used == 1512
    assert read(reader, device).memory_used == 1512
    assert machine.module.calls["nvmlDeviceGetMemoryInfo_v2"] == 1


def test_a_binding_without_a_query_or_its_newer_form(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = NvmlReader()
    device = reader.devices()[0]
    module = machine.module
    monkeypatch.delattr(module, "nvmlMemory_v2")
    monkeypatch.delattr(module, "nvmlDeviceGetTotalEccErrors")
    monkeypatch.delattr(module, "nvmlDeviceGetCurrentClocksEventReasons")
    module.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x1  # type: ignore[attr-defined]
    reading = read(reader, device)
    assert reading.memory_used == 1512
    assert reading.ecc_errors is None
    assert reading.throttled == ()


def test_a_partitioned_gpu_has_no_utilization_of_its_own(machine: Machine) -> None:
    machine.has({"uuid": A, "mig": 1})
    reader = NvmlReader()
    (device,) = reader.devices()
    assert device.mig
    reading = read(reader, device)
    assert reading.utilization is None
    assert reading.memory_total == 80_000


def test_no_gpus_without_a_driver_and_again_less_and_less_often(machine: Machine) -> None:
    machine.has({"uuid": A}, nvmlInit=9)
    clock = Clock()
    reader = NvmlReader(clock)
    tries: list[int] = []
    for second in range(40):
        clock.now = second
        assert reader.devices() == ()
        if machine.module.calls["nvmlInit"] > len(tries):
            tries.append(second)
    assert tries == [0, 1, 3, 7, 15, 31]
    machine.has({"uuid": A})
    clock.now = 63
    assert len(reader.devices()) == 1


def test_a_library_that_opens_and_then_does_not_answer_has_no_gpus(machine: Machine) -> None:
    machine.has({"uuid": A}, nvmlDeviceGetCount=999)
    reader = NvmlReader()
    assert reader.devices() == ()
    assert machine.module.opened == 0


def test_after_an_error_it_is_reopened_but_not_at_once(machine: Machine) -> None:
    clock = Clock()
    reader = NvmlReader(clock)
    device = reader.devices()[0]
    machine.has({"uuid": A, "errors": {"nvmlDeviceGetUtilizationRates": 999}}, {"uuid": B})
    assert read(reader, device).power is None
    assert reader.devices() == ()
    machine.has({"uuid": A}, {"uuid": B})
    assert reader.devices() == ()
    clock.now = 2
    assert read(reader, reader.devices()[0]).power == 412.5
    assert machine.module.opened == 1


def test_a_gpu_that_is_lost_does_not_take_the_others_along(machine: Machine) -> None:
    machine.has({"uuid": A, "errors": {"nvmlDeviceGetUtilizationRates": 15}}, {"uuid": B})
    reader = NvmlReader()
    first, second = reader.devices()
    assert read(reader, first).power is None
    assert read(reader, second).power == 412.5
    assert machine.module.calls["nvmlInit"] == 1


def test_a_gpu_that_is_not_ours_is_not_there(machine: Machine) -> None:
    machine.has({"uuid": A, "errors": {"nvmlDeviceGetHandleByIndex": 4}}, {"uuid": B})
    assert [each.uuid for each in NvmlReader().devices()] == [B]


def test_a_forked_child_opens_it_for_itself(machine: Machine) -> None:
    reader = NvmlReader()
    assert len(reader.devices()) == 2
    child = os.fork()
    if child == 0:
        good = len(reader.devices()) == 2 and machine.module.calls["nvmlInit"] == 2
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_module_of_that_name_that_is_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    assert NvmlReader().devices() == ()


def test_torch_and_nvml_write_a_uuid_differently() -> None:
    assert same_uuid("GPU-AB12-cd") == same_uuid("ab12-cd") == "ab12-cd"
