"""Jobs without progress: when they are looked at."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from typing import Any

import pytest
import torch

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.run.records.supervisor import FindingRecord, FoundLocation
from ddpdoctor.run.status import Phase
from ddpdoctor.supervise.hang_watch import (
    FIRST_STEP_FACTOR,
    SILENT_STEPS,
    WAIT_FACTOR,
    SignsOfLife,
    StartWatch,
)
from ddpdoctor.system import process_activity
from tests.conftest import LIMIT, Doctor, Live
from tests.support.hanging_ranks import job, status
from tests.support.marks import sick

# -- when


def test_a_job_that_moves_is_left_alone() -> None:
    signs = SignsOfLife(5.0)
    for second in range(60):
        moving = job(status(0, Phase.WAIT, since=1), status(1, Phase.DATA, since=second))
        found = signs.look(moving, float(second))
        if second < WAIT_FACTOR * 5:
            assert found is None
    # One rank moves, and the other has waited for it for very long.
    assert found is not None
    assert (found.everybody, found.ranks) == (False, (0,))


def test_nobody_moves() -> None:
    signs = SignsOfLife(5.0)
    still = job(status(0, Phase.WAIT), status(1, Phase.OTHER))
    assert [signs.look(still, second) for second in (0.0, 2.5, 4.9)] == [None] * 3
    found = signs.look(still, 5.5)
    assert found is not None
    assert (found.seconds, found.everybody, found.ranks, found.fresh) == (5.5, True, (0, 1), False)


def test_long_steps_get_more_time() -> None:
    signs = SignsOfLife(None)
    line = b'{"kind":"step","step":1,"start":1,"total":10000000000}'
    still = job(status(0, Phase.BACKWARD), line=line)
    signs.look(still, 0.0)
    assert signs.look(still, SILENT_STEPS * 10 - 1.0) is None
    assert signs.look(still, SILENT_STEPS * 10 + 1.0) is not None


def test_the_first_step_has_its_own_words() -> None:
    signs = SignsOfLife(5.0)
    still = job(status(0, Phase.WAIT, step=0))
    signs.look(still, 0.0)
    found = signs.look(still, 6.0)
    assert found is not None and found.fresh and FIRST_STEP_FACTOR > 1


def test_a_rendezvous_is_not_long_for_a_launcher_that_has_just_come_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A busy machine: torchrun computed for 12 s before it came to the rendezvous.
    monkeypatch.setattr(process_activity, "cpu_times_of_tree", lambda _: {})
    start = StartWatch(6.0)
    start.begin(1)
    seen = []
    for second in range(22):
        cores = 0.5 if second <= 12 else 0.01
        monkeypatch.setattr(process_activity, "cores_of_tree", lambda *_, cores=cores: cores)
        seen.append(start.silence(job(), start.began + second))
    assert seen[:18] == [None] * 18
    assert [each and each.seconds for each in seen[18:]] == [6.0, 7.0, 8.0, 9.0]


# -- a real one


@pytest.mark.slow
def test_a_stall_is_said_and_so_is_that_it_is_over(doctor: Doctor) -> None:
    script = doctor.write(
        "train.py",
        """\
        import time
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel


        def save_checkpoint():
            time.sleep(9)  # guilty


        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        for step in range(14):
            time.sleep(0.4 if step > 4 else 0)
            if step == 4 and dist.get_rank() == 1:
                save_checkpoint()
            ddp(torch.randn(2, 4)).sum().backward()
        del ddp
        dist.destroy_process_group()
        """,
    )
    result = doctor.run("--hang-after", "3", "--nproc-per-node", "2", "--", str(script))
    result.check_success()
    assert result.codes == ["DDP802"], result.stderr
    assert "the job is running again after no progress for" in result.ours
    assert "findings: none" in result.ours
    (found,) = result.run.supervisor.of(FindingRecord)
    assert found.ranks == (1,)
    assert found.location == FoundLocation(path=str(script), line=9)
    told = json.loads((result.run_dir / "hang-0001.json").read_text())
    assert [each["rank"] for each in told["ranks"]] == [0, 1]
    assert all(each["stacks"]["threads"] for each in told["ranks"])
    # Before torch 2.8 gloo's collectives are in no recorder.
    recorded = hasattr(torch._C._distributed_c10d, "_dump_fr_trace")
    assert all(bool(each["flight"]) == recorded for each in told["ranks"])
    assert all(bool(each.get("flight_trouble")) != recorded for each in told["ranks"])


@pytest.mark.slow
def test_a_rank_that_computes_alone_is_never_ended(doctor: Doctor) -> None:
    """However long it takes: one line of a model's evaluation looks like the next."""
    script = doctor.write(
        "train.py",
        """\
        import time
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel


        def evaluate(model):
            while time.process_time() < end:
                with torch.no_grad():
                    model(torch.randn(512, 256))


        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        ddp = DistributedDataParallel(nn.Linear(256, 256))
        for step in range(6):
            ddp(torch.randn(2, 256)).sum().backward()
            if step == 4:
                end = time.process_time() + 20
                if dist.get_rank() == 0:
                    evaluate(ddp.module)
                dist.barrier()
        del ddp
        dist.destroy_process_group()
        """,
    )
    words = ("--hang-after", "3", "--kill-on-hang", "--nproc-per-node", "2", "--", str(script))
    result = doctor.run(*words)
    result.check_success()
    found = result.run.supervisor.of(FindingRecord)
    assert {each.severity for each in found if each.code == "DDP802"} <= {"warning"}


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_native_frames_of_the_rank_that_is_to_blame(doctor: Doctor, ends: bool) -> None:
    job = sick("ddp810_native_wait")
    options = ["--kill-on-hang"] if ends else ["--grace", "1"]
    live = doctor.start("--hang-after", "3", *options, "--nproc-per-node", "2", "--", str(job))

    def of_rank_1(number: int) -> dict[str, Any]:
        file = live.run_dir / f"hang-{number:04}.json"
        found = json.loads(file.read_text())["ranks"][1]["stacks"] if file.exists() else {}
        return found if found.get("native") or found.get("note") else {}

    if not ends:
        deadline = time.monotonic() + LIMIT
        while not of_rank_1(2) and time.monotonic() < deadline:
            time.sleep(0.2)
        live.process.send_signal(signal.SIGINT)
    result = live.finish(90)
    assert (result.status == 4) == ends
    guilty = of_rank_1(1)
    if not ends:
        parts = ("native", "note")
        assert [guilty.get(each) for each in parts] == [of_rank_1(2).get(each) for each in parts]
    evidence = result.ours
    if guilty.get("native"):
        assert "evidence: native frames of rank 1: " in evidence
        assert any("mutex_lock" in frame for frame in guilty["native"])
    else:
        assert guilty["note"].startswith("no native frames: ")
        assert "ddpdoctor stacks --native --rank 1" in " ".join(evidence.split())


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [True, False])
def test_a_node_that_comes_late_is_waited_for(doctor: Doctor, torchrun: bool) -> None:
    """The first one says that it is alone, and goes on when the other comes."""
    script = doctor.write(
        "train.py",
        """\
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()
        """,
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    words = ["--hang-after=3", "--kill-on-hang"]
    if torchrun:
        words += ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
        words += [f"--master-port={port}"]

    def start(rank: int) -> Live:
        if torchrun:
            return doctor.start(*words, f"--node-rank={rank}", "--", str(script))
        env = {**place, "RANK": str(rank)}
        return doctor.start(*words, "--", sys.executable, str(script), env=env)

    first = start(0)
    deadline = time.monotonic() + LIMIT
    while "DDP813" not in (said := first.err.read_text()):
        assert time.monotonic() < deadline and first.process.poll() is None, said
        time.sleep(0.2)
    awaited = "of 2 nodes, not all have come" if torchrun else "for ranks that never came"
    assert awaited in " ".join(said.split())
    second = start(1)
    for live in (first, second):
        live.finish().check_success()
    assert "findings: none" in first.err.read_text()
