"""GPUs that are slower than those of the other ranks (DDP610), as the driver reports them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.supervisor import GpusRecord, GpuState, ProfileRequestRecord
from ddpdoctor.run.snapshot import Records
from ddpdoctor.supervise.slow_ranks import GpuWatch
from tests.diagnose.test_stragglers_on_gpus import steps
from tests.fake_nvml import Machine
from tests.probe.test_foreign_gpus import A, B, a_run, looked, rank
from tests.support.straggling import rank as journal
from tests.support.written import T0, Written

# -- the supervisor's look


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(tmp_path / "machine.json", monkeypatch)
    sys.modules.pop("pynvml", None)


def states(machine: Machine, first: dict[str, object], second: dict[str, object]) -> list[GpuState]:
    machine.has(
        {"uuid": A, "processes": [[101, 5], [900, 6]], **first},
        {"uuid": B, "processes": [[102, 5]], **second},
    )
    run = a_run(rank(0, 101, "aaaa"), rank(1, 102, "bbbb"))
    asked = ProfileRequestRecord(time=T0, restart=0, asked=1, rank=0)
    watch = GpuWatch(first=0, again=1000, pause=0)
    (told,) = looked(watch, replace(run, supervisor=Records([asked])))
    assert isinstance(told, GpusRecord)
    return list(told.states)


def test_the_gpus_of_ranks_are_read_once_one_seems_slow(machine: Machine) -> None:
    mine, theirs = states(machine, {"clock": 1200, "reasons": 0x40, "width": 4}, {"reasons": 0})
    assert (mine.rank, mine.gpu, mine.clock, mine.width, mine.others) == (0, 0, 1.2e9, 4, 1)
    assert mine.throttled == ("hardware thermal slowdown",)
    assert (theirs.clock, theirs.width, theirs.others, theirs.throttled) == (1.98e9, 16, 0, ())


def test_a_process_that_only_holds_memory_uses_no_gpu(machine: Machine) -> None:
    mine, _ = states(machine, {"computing": [[101, 60], [900, 0]]}, {})
    assert mine.others == 0
    mine, _ = states(machine, {"computing": [[101, 60], [900, 30]]}, {})
    assert mine.others == 1


def test_without_a_slow_rank_nothing_more_is_read(machine: Machine) -> None:
    machine.has({"uuid": A, "processes": [[101, 5]]})
    (told,) = looked(GpuWatch(first=0, again=0), a_run(rank(0, 101, "aaaa")))
    assert isinstance(told, GpusRecord) and told.states == ()
    assert "nvmlDeviceGetClockInfo" not in machine.module.calls


# -- what is said


def state(number: int, gpu: int | None = None, **facts: object) -> JsonObject:
    at = number if gpu is None else gpu
    usual = {"clock": 1.98e9, "power_limit": 700.0, "width": 16, "links": 18, "links_up": 18}
    device = {"rank": number, "restart": 0, "device_uuid": f"GPU-{at}", "gpu": at}
    return {**device, **usual, **facts}


def judged(
    written: Written, *looked_at: JsonObject, slow: float = 60.0, phase: str = "forward"
) -> list[Finding]:
    """Two ranks of which one takes longer in a phase, and the other waits for it."""
    written.supervisor.append({"kind": "gpus", "time": T0, "held": [], "states": [*looked_at]})
    for number, own in ((0, 40.0), (1, slow)):
        uuid = next((str(each["device_uuid"]) for each in looked_at if each["rank"] == number), "")
        ddp = {"kind": "ddp", "device": "cuda:0", "group_ranks": [0, 1], "device_uuid": uuid}
        records = steps(own, 10 + slow - own, cpu=1_000_000)
        renamed = [
            {phase if key == "other" else key: v for key, v in each.items()} for each in records
        ]
        journal(written, number, [ddp, *renamed])
    return [each for each in written.findings(status=0) if each.code == "DDP610"]


def test_a_throttled_gpu_is_the_reason(written: Written) -> None:
    held = ["hardware thermal slowdown"]
    (finding,) = judged(written, state(0), state(1, clock=1.3e9, throttled=held, power_limit=400.0))
    assert finding.ranks == (1,)
    assert finding.message.endswith(
        "in its forward pass: its GPU runs at 1.30 GHz, those of the others at 1.98 GHz "
        "(hardware thermal slowdown)"
    )
    assert "GPU 1 is limited to 400 W; those of the others to 700 W" in finding.evidence
    assert "nvidia-smi" in finding.fix


@pytest.mark.parametrize(
    "facts",
    [
        # As fast; too little slower for the surplus; slower, but so is the other's.
        {"throttled": ["power cap"]},
        {"clock": 1.7e9},
    ],
)
def test_a_clock_that_explains_too_little_is_no_reason(
    written: Written, facts: dict[str, Any]
) -> None:
    (finding,) = judged(written, state(0), state(1, **facts))
    assert "GHz" not in finding.message


def test_a_slow_loader_has_nothing_to_do_with_the_clock(written: Written) -> None:
    (finding,) = judged(written, state(0), state(1, clock=1.0e9), phase="data")
    assert "GHz" not in finding.message


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"width": 4}, "GPU 1 has 4 PCIe lanes; those of the others 16"),
        ({"links_up": 15}, "3 of 18 NVLinks of GPU 1 are down"),
        ({"remapping": True}, "GPU 1 has a faulty row of memory (nvidia-smi -q -d ROW_REMAPPER)"),
        ({"uncorrected": 2}, "GPU 1 had 2 memory errors that ECC could not correct"),
        (
            {"throttled": ["power cap"]},
            "GPU 1 is throttled: power cap; those of the others are not",
        ),
    ],
)
def test_in_what_a_gpu_differs_stands_beside_the_straggler(
    written: Written, facts: dict[str, Any], said: str
) -> None:
    (finding,) = judged(written, state(0), state(1, **facts))
    assert said in finding.evidence


def test_a_gpu_that_others_use(written: Written) -> None:
    (finding,) = judged(written, state(0), state(1, others=2))
    assert finding.message.endswith("because 2 other processes use its GPU")
    assert "GPU 1 is used by 2 other processes; the others' by 0" in finding.evidence


@pytest.mark.parametrize(
    ("looked_at", "slow", "found"),
    [
        # All GPUs are shared with other jobs, or the ranks share one.
        ((state(0, others=1), state(1, others=1)), 60.0, 0),
        ((state(0, 0), state(1, 0)), 60.0, 0),
        # So much longer no turn-taking makes it; of the other's GPU nothing is known to be shared.
        ((state(0, 0), state(1, 0)), 90.0, 1),
        ((state(0), state(1)), 60.0, 1),
        ((), 60.0, 1),
    ],
)
def test_where_all_gpus_are_shared_a_surplus_may_be_a_turn(
    written: Written, looked_at: tuple[JsonObject, ...], slow: float, found: int
) -> None:
    assert len(judged(written, *looked_at, slow=slow)) == found
