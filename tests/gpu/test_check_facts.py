"""What ``ddpdoctor check`` goes by agrees with what nvidia-smi and CUDA tell."""

from __future__ import annotations

import os
import re

import pytest

from ddpdoctor.system.nvml import GpuFacts, choice, read_health
from tests.gpu.machine import cuda_count, needs_gpu, plain_smi, smi

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def facts() -> GpuFacts:
    found = read_health()
    assert found.trouble == "" and found.absent == ()
    return found


def number(text: str) -> int | None:
    """A whole number, or None where nvidia-smi has words such as ``[N/A]``."""
    return int(text) if text.isdigit() else None


def test_what_a_gpu_is(facts: GpuFacts) -> None:
    rows = smi("index", "uuid", "name", "pci.bus_id", "driver_version")
    assert [str(gpu.device.index) for gpu in facts.gpus] == [row["index"] for row in rows]
    for gpu, row in zip(facts.gpus, rows, strict=True):
        assert gpu.device.uuid == row["uuid"]
        assert gpu.device.name == row["name"]
        assert gpu.device.bus_id.lower() == row["pci.bus_id"].lower()
        assert facts.driver == row["driver_version"]
        assert gpu.problem == "" or gpu.device.mig


def test_memory_and_errors(facts: GpuFacts) -> None:
    rows = smi(
        "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total", "temperature.gpu"
    )
    for gpu, row in zip(facts.gpus, rows, strict=True):
        total, used = number(row["memory.total"]), number(row["memory.used"])
        if total is not None and gpu.memory_total is not None:
            assert abs(gpu.memory_total / 2**20 - total) <= 1
        if used is not None and gpu.memory_used is not None:
            assert abs(gpu.memory_used / 2**20 - used) < 1024
        assert gpu.uncorrected == number(row["ecc.errors.uncorrected.volatile.total"])
        degrees = number(row["temperature.gpu"])
        if degrees is not None:
            assert gpu.temperature is not None and abs(gpu.temperature - degrees) < 15


def test_links_and_settings(facts: GpuFacts) -> None:
    rows = smi(
        "pcie.link.width.current", "pcie.link.width.max", "pcie.link.gen.max",
        "persistence_mode", "compute_mode", "mig.mode.current",
    )  # fmt: skip
    modes = {"Default": 0, "Exclusive_Thread": 1, "Prohibited": 2, "Exclusive_Process": 3}
    for gpu, row in zip(facts.gpus, rows, strict=True):
        assert gpu.width == number(row["pcie.link.width.current"])
        assert gpu.width_most == number(row["pcie.link.width.max"])
        assert gpu.generation_most == number(row["pcie.link.gen.max"])
        persistent = {"Enabled": True, "Disabled": False}.get(row["persistence_mode"])
        assert gpu.persistent is persistent
        assert gpu.compute_mode == modes.get(row["compute_mode"])
        assert gpu.device.mig is (row["mig.mode.current"] == "Enabled")


def test_nvlinks_that_are_up(facts: GpuFacts) -> None:
    for gpu in facts.gpus:
        status = plain_smi("nvlink", "--status", "-i", str(gpu.device.index))
        up = len(re.findall(r"Link \d+: [\d.]+ GB/s", status))
        assert sum(gpu.links) == up


def test_pairs_with_peer_to_peer_access(facts: GpuFacts) -> None:
    if len(facts.gpus) < 2:
        pytest.skip("a single GPU")
    matrix = {}
    for line in plain_smi("topo", "-p2p", "r").splitlines():
        # Its heading is underlined by escapes, and a row is "GPU0 X OK CNS".
        words = re.sub(r"\x1b\[[\d;]*m", "", line).split()
        if len(words) == len(facts.gpus) + 1 and "X" in words:
            matrix[words[0]] = words[1:]
    if len(matrix) != len(facts.gpus):
        pytest.skip("this nvidia-smi writes its matrix in another way")
    places = {gpu.device.index: place for place, gpu in enumerate(facts.gpus)}
    for one, other, works in facts.peers:
        assert works is (matrix[f"GPU{one}"][places[other]] == "OK"), (one, other)


def test_the_fabric_is_set_up_where_there_is_one(facts: GpuFacts) -> None:
    for gpu in facts.gpus:
        told = plain_smi("-q", "-i", str(gpu.device.index))
        state = re.search(r"^\s+Fabric\n\s+State\s+: (.*)$", told, re.MULTILINE)
        if state and gpu.fabric_ready is not None:
            assert gpu.fabric_ready is (state[1].strip() == "Completed")


def test_cuda_counts_as_we_do(facts: GpuFacts) -> None:
    first = facts.gpus[0].device.uuid
    last = len(facts.gpus) - 1
    gpus = [(gpu.device, gpu.instances) for gpu in facts.gpus]
    plain = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    wrong = {}
    for chosen in (
        None, "", "-1", "0", "0,0", f"0,{last + 1}", str(last + 1), f"{last},-1", f"{last},0",
        "none", "NoDevFiles", "0gpu", first, first[:12], f"{first},{first}", "GPU-0123456",
        f"{first},{last}", f"{last},{first}",
    ):  # fmt: skip
        environ = plain if chosen is None else {**plain, "CUDA_VISIBLE_DEVICES": chosen}
        ours, cudas = choice(environ, gpus).count, cuda_count(environ)
        if ours != cudas:
            wrong[chosen] = f"{ours}, CUDA counts {cudas}"
    assert wrong == {}
