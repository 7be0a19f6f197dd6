"""``ddpdoctor profile`` on real jobs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.debug import attach_points
from tests.conftest import Doctor, Live, Result

JOB = """
import os
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
own = torch.profiler.profile() if "OWN" in os.environ else None
if own is not None:
    own.start()

def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20

step, forked = 0, "FORK" not in os.environ
while not os.path.exists("stop"):
    optimizer.zero_grad()
    model(torch.randn(4, 64)).mean().backward()
    done = torch.full((1,), float(os.path.exists("stop")))
    dist.all_reduce(done)
    if not forked and torch.autograd._profiler_enabled():
        forked = True
        if (child := os.fork()) == 0:
            value, before = torch.zeros(1), resident()
            for _ in range(100_000):
                value.add_(1)
            print("grown by", resident() - before, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    optimizer.step()
    step += 1
    while "HOLD" in os.environ and step == 3 and not os.path.exists("stop"):
        time.sleep(0.1)
    if done.item():
        break
    time.sleep(0.05)
dist.destroy_process_group()
print("ended", torch.autograd._profiler_enabled())
if own is not None:
    own.stop()
"""


def start(doctor: Doctor, **environment: str) -> Live:
    job = str(doctor.write("train.py", JOB))
    live = doctor.start("--nproc-per-node", "2", "--", job, env=environment)
    live.wait_for_steps(2)
    # The supervisor may be slower than the ranks to note their ports.
    live.wait_for(lambda run: len(attach_points.live_ranks(run)) == 2)
    return live


def end(doctor: Doctor, live: Live) -> Result:
    (doctor.directory / "stop").touch()
    return live.finish()


def of(events: list[Any], category: str) -> list[Any]:
    return [each for each in events if each.get("cat") == category]


@pytest.mark.slow
def test_the_same_steps_of_all_ranks_are_in_one_trace(doctor: Doctor) -> None:
    live = start(doctor)
    done = doctor.cli("profile", "--steps", "4", "--out", "trace.json.gz", str(live.run_dir))
    assert done.status == 0, done.stderr
    assert done.stdout.startswith("wrote trace.json.gz, ")
    assert ": ranks 0 and 1, steps " in done.stdout
    trace = json.loads(gzip.decompress((doctor.directory / "trace.json.gz").read_bytes()))
    operators = [each for each in of(trace["traceEvents"], "cpu_op") if "addmm" in each["name"]]
    assert len({each["pid"] for each in operators}) == 2
    assert len(operators) == 2 * 4, "a forward of each step of each rank"
    # Both are on the clock of the steps that ddpdoctor recorded.
    first = int(done.stdout.rpartition("steps ")[2].split(" ")[0])
    steps = [each for each in of(trace["traceEvents"], "step") if each["name"] == f"step {first}"]
    begins = min(each["ts"] for each in operators)
    assert steps[0]["ts"] - 2e4 <= begins <= steps[0]["ts"] + steps[0]["dur"] + 2e4

    # The profiler is off again, and can be started again.
    one = doctor.cli("profile", "--ranks", "1", "--out", "one.json", str(live.run_dir))
    assert ": rank 1, steps " in one.stdout
    ended = end(doctor, live)
    ended.check_success()
    assert ended.stdout.count("ended False") == 2


@pytest.mark.slow
def test_what_cannot_be_profiled_is_said_in_words(doctor: Doctor) -> None:
    live = start(doctor, HOLD="1")
    run = str(live.run_dir)
    done = doctor.cli("profile", "--within", "2", run)
    assert done.status == 1
    assert "rank 0: did not end " in done.stderr
    memory = doctor.cli("profile", "--memory", "--within", "2", run)
    assert memory.status == 1
    assert "no such" not in memory.stderr
    assert doctor.cli("profile", "--ranks", "5", run).status == 2
    assert doctor.cli("profile", "--memory", "--out", "x.json", run).status == 2
    assert not list(Path(doctor.directory).glob("profile-*"))
    end(doctor, live).check_success()
    over = doctor.cli("profile", run)
    assert over.status in (1, 2)
    assert "Traceback" not in over.stderr


@pytest.mark.slow
def test_a_job_that_profiles_itself_goes_on(doctor: Doctor) -> None:
    live = start(doctor, OWN="1")
    done = doctor.cli("profile", "--out", "trace.json", str(live.run_dir))
    assert done.status == 1
    assert "rank 0: the job profiles itself now\n" in done.stderr
    ended = end(doctor, live)
    ended.check_success()
    assert ended.stdout.count("ended True") == 2, "its own profiler is still on"


@pytest.mark.slow
def test_a_profile_that_takes_too_long_stops_with_a_step(doctor: Doctor) -> None:
    live = start(doctor)
    long = doctor.cli("profile", "--steps", "1000", "--within", "2", str(live.run_dir))
    assert long.status == 1
    assert "rank 1: did not end 1000 steps within 2 s\n" in long.stderr
    again = doctor.cli("profile", "--steps", "2", "--out", "trace.json", str(live.run_dir))
    assert again.status == 0, again.stderr
    end(doctor, live).check_success()


@pytest.mark.slow
def test_a_child_of_a_profiled_rank_records_nothing(doctor: Doctor) -> None:
    live = start(doctor, FORK="1")
    done = doctor.cli("profile", "--out", "trace.json", str(live.run_dir))
    assert done.status == 0, done.stderr
    ended = end(doctor, live)
    ended.check_success()
    growths = [int(line.split()[-1]) for line in ended.stdout.splitlines() if "grown" in line]
    assert len(growths) == 2
    assert max(growths) < 20, "in MiB; a profiler would keep 1 KiB per operator"
