"""AMD's GPUs, by a made-up ``amdsmi`` that answers as version 7.0.2 does.

No machine of the project has such a GPU: what is tested is what becomes of the library's answers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.preflight.check import Status
from ddpdoctor.preflight.machine import gpus
from ddpdoctor.system import amd
from ddpdoctor.system.amd import AmdReader, torch_uuid
from ddpdoctor.system.gpu_poll import Poller
from ddpdoctor.top import live
from tests.support.made_machine import Machine, messages

LIBRARY = """\
import enum, os

GIB = 1 << 30


class AmdSmiException(Exception):
    pass


class AmdSmiMemoryType(enum.IntEnum):
    VRAM = 0


def amdsmi_init():
    if os.environ.get("AMD_FAULT") == "driver":
        raise AmdSmiException("driver not loaded")


def amdsmi_shut_down():
    pass


def amdsmi_get_processor_handles():
    return ["first", "second"]


def amdsmi_get_gpu_asic_info(handle):
    serial = "0xF330DC4D00DEE22B" if handle == "first" else "N/A"
    return {"market_name": "AMD Instinct MI300X", "asic_serial": serial}


def amdsmi_get_gpu_device_uuid(handle):
    return f"uuid-{handle}"


def amdsmi_get_gpu_device_bdf(handle):
    return "0000:05:00.0"


def amdsmi_get_gpu_memory_total(handle, kind):
    return 192 * GIB


def amdsmi_get_gpu_memory_usage(handle, kind):
    if handle == "second" and os.environ.get("AMD_FAULT") == "second":
        raise AmdSmiException("not supported")
    return 60 * GIB if handle == "first" else GIB


def amdsmi_get_gpu_activity(handle):
    return {"gfx_activity": 97 if handle == "first" else "N/A", "umc_activity": 3}


def amdsmi_get_power_info(handle):
    return {"current_socket_power": "N/A", "average_socket_power": 540}


def amdsmi_get_gpu_process_list(handle):
    if handle == "second":
        raise AmdSmiException("no permission")
    return [{"name": "N/A", "pid": 4194303, "memory_usage": {"vram_mem": 59 * GIB}}]
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "packages" / "amdsmi"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY)
    (package / "libamd_smi.so").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.setattr(amd, "is_here", lambda: True)
    return package


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "machine")
    made.write("sys/class/kfd/kfd/uevent", "")
    return made


def test_what_the_monitor_shows(library: Path) -> None:
    record = Poller().read()
    assert record["nvml"] == ""
    first, second = live.gpus_of(record)
    assert (first.name, first.utilization, first.power) == ("AMD Instinct MI300X", 0.97, 540.0)
    assert (first.memory_used, first.memory_total) == (60 << 30, 192 << 30)
    # What is not known is no 0.
    assert second.utilization is None and first.temperature is None


def test_torch_names_a_gpu_by_its_serial_number(library: Path) -> None:
    first, second = AmdReader().devices()
    assert first.uuid == "66333330-6463-3464-3030-646565323262"
    assert second.uuid == "uuid-second"
    assert torch_uuid("N/A") == ""


def test_a_call_that_fails_costs_its_value_alone(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMD_FAULT", "second")
    reader = AmdReader()
    second = reader.devices()[1]
    found = reader.brief(second)
    assert (found.memory_used, found.memory_total, found.power) == (None, 192 << 30, 540.0)
    assert reader.rest(second).processes == ()
    reader.close()
    assert reader.brief(second).memory_total is None


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("driver", "amdsmi: AmdSmiException driver not loaded"),
        ("library", "libamd_smi.so"),
        ("package", "is not installed"),
    ],
)
def test_without_the_library_the_reason_is_said(
    library: Path, monkeypatch: pytest.MonkeyPatch, fault: str, says: str
) -> None:
    monkeypatch.setenv("AMD_FAULT", fault)
    if fault == "library":
        (library / "libamd_smi.so").unlink()
    if fault == "package":
        monkeypatch.setitem(sys.modules, "amdsmi", None)
    record = Poller().read()
    assert record["gpus"] == [] and says in str(record["nvml"])


def test_check_sees_who_holds_the_memory(library: Path, machine: Machine) -> None:
    found = gpus.gpu_memory(machine.situation())
    assert messages(found) == ["60 GiB of 192 GiB of GPU 0 are in use before the job starts"]
    assert found.findings[0].severity is Severity.WARNING
    assert found.findings[0].paste == "amd-smi process"
    other = gpus.gpu_memory(machine.situation(environ={"HIP_VISIBLE_DEVICES": "1"}))
    assert other.findings == () and "191 GiB free" in other.detail
    # Of other checks nothing is known on such a machine.
    assert gpus.gpu_health(machine.situation()).detail == "no NVIDIA GPU (AMD's are not tested)"


def test_check_says_why_it_sees_nothing(
    library: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMD_FAULT", "driver")
    found = gpus.gpu_memory(machine.situation())
    assert found.status is Status.SKIPPED and "driver not loaded" in found.detail
