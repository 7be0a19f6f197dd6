"""``ddpdoctor run`` on several hosts: the verdict of one host, on the host of rank 0 alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.reader import RunReader
from tests.conftest import LIMIT
from tests.lab import faults
from tests.lab.checking import Checks, Make
from tests.lab.network import Host, LabError
from tests.lab.running import JobOnHosts
from tests.support.marks import head, marks, said, sick

pytestmark = pytest.mark.slow

FAST = ("--hang-after", "6")

TRAINS = """
import os, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
{before}
dist.init_process_group("gloo"{how})
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(torch.nn.Linear({width}, {width}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    {inside}
    optimizer.zero_grad()
    model(torch.randn(4, {width})).sum().backward()
    optimizer.step()
    time.sleep(0.05)
dist.destroy_process_group()
"""


def job(
    checks: Checks,
    inside: str = "pass",
    steps: int = 100,
    before: str = "",
    how: str = "",
    width: int = 8,
) -> Path:
    """A job of small steps with a line of its own."""
    path = checks.directory / "job.py"
    text = TRAINS.format(inside=inside, steps=steps, before=before, how=how, width=width)
    path.write_text(text)
    return path


def line_of(path: Path, text: str) -> int:
    """The number of the line with a text."""
    lines = path.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def until_steps(running: JobOnHosts, rank: int) -> None:
    """Wait until steps of a rank are in the first host's run directory."""
    until = time.monotonic() + LIMIT
    while True:
        with contextlib.suppress(DoctorError):
            if any(each.rank == rank and each.steps for each in running.run().last):
                return
        assert time.monotonic() < until, running.told(0)
        time.sleep(0.2)


def pids_of(host: Host, word: str, run_dir: Path) -> list[int]:
    """Processes of a host whose command line holds a word and a run directory."""
    # What entered the host's network from outside is not in its namespace of pids.
    place = os.readlink(f"/proc/{host.namespace.pid}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            if os.readlink(entry / "ns/pid") == place and str(run_dir) in words:
                found += [int(entry.name)] if any(word in each for each in words) else []
    return sorted(found)


LASTING = ["ddp401_barrier_on_rank_0", "ddp802_no_answer", "ddp102_same_seed"]
"""Jobs that last until their ranks have found each other, however they are started."""

VERDICTS = [
    *((name, "tasks") for name in LASTING),
    *(
        (name, how)
        for name in (
            *LASTING,
            "ddp803_other_size",
            "ddp319_weights_loaded_on_one_rank",
            "ddp610_pictures_on_rank_0",
            "ddp403_break_on_local_loss",
        )
        for how in ("static", "c10d")
    ),
]


@pytest.mark.parametrize(("name", "how"), VERDICTS)
def test_the_verdict_is_that_of_one_host(nodes: Make, name: str, how: str) -> None:
    path = sick(name)
    expected = marks(path)
    checks = nodes(head(path, "ranks", 2))
    options = FAST if "--hang-after" in path.read_text() else ()
    running = JobOnHosts(checks, path, how=how, options=options)
    # A slow rank may be reported before its line is known.
    running.until(
        expected[0][0].code, lambda found: any(said(found).fits(mark) for mark in expected[0])
    )
    running.stop()
    for number in range(1, len(running.processes)):
        assert running.found(number) == [], running.told(number)


@pytest.mark.parametrize("how", ["static", "c10d", "kubeflow"])
def test_a_rank_that_does_not_join(nodes: Make, how: str) -> None:
    checks = nodes(2)
    path = job(checks, before="os.environ['RANK'] == '3' and time.sleep(1000)")
    running = JobOnHosts(checks, path, how=how, nproc=2, options=FAST)
    found = running.until("DDP802")
    line = line_of(path, "time.sleep(1000)")
    assert found["ranks"] == [3] and found["location"]["line"] == line, found
    assert "rank 3 has not come to init_process_group" in found["message"]
    assert "ranks 0, 1 and 2 wait for it" in found["message"]
    running.stop()
    assert running.found(1) == []


@pytest.mark.parametrize("how", ["static", "c10d"])
def test_the_node_of_rank_0_sends_the_run_to_trackers(nodes: Make, how: str) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    checks = nodes(2)
    running = JobOnHosts(checks, job(checks), how=how, options=("--log-to", "tensorboard"))
    assert running.wait() == [0, 0]
    sent = [running.told(number).count("sent to tensorboard") for number in (0, 1)]
    assert sent == [1, 0], running.told(0) + running.told(1)


def test_without_a_link_each_node_sends_its_ranks(nodes: Make) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    checks = nodes(2)
    options = ("--log-to", "tensorboard", "--no-nodes")
    running = JobOnHosts(checks, job(checks), options=options)
    assert running.wait() == [0, 0]
    assert [running.told(number).count("sent to tensorboard") for number in (0, 1)] == [1, 1]


def test_a_long_start_on_another_host_is_no_hang(nodes: Make) -> None:
    checks = nodes(2)
    work = "until = time.time() + 12\nwhile os.environ['RANK'] == '1' and time.time() < until: pass"
    running = JobOnHosts(checks, job(checks, before=work), options=("--hang-after", "3"))
    assert running.wait() == [0, 0]
    assert running.found() == [] and "no progress" not in running.told(0)


def test_a_failure_before_any_rank_has_joined(nodes: Make) -> None:
    checks = nodes(2)
    fail = "time.sleep(3)\nassert os.environ['RANK'] != '1', 'no data here'"
    path = job(checks, before=fail)
    running = JobOnHosts(checks, path)
    found = running.until("DDP901")
    assert found["ranks"] == [1] and found["location"]["line"] == line_of(path, "no data here")
    running.stop()
    assert running.found(1) == []


@pytest.mark.parametrize("seconds", [-20, 20])
def test_the_first_failure_is_found_whatever_the_clocks_say(nodes: Make, seconds: int) -> None:
    checks = nodes(2)
    faults.clock_shifted(checks.lab.hosts[1], seconds, checks.directory)
    path = job(checks, "assert rank < world - 1 or step < 60, 'a wrong label'")
    running = JobOnHosts(checks, path, nproc=2)
    running.wait()
    codes = {each["code"]: each for each in running.found()}
    assert set(codes) == {"DDP052", "DDP901"}, running.told(0)
    assert codes["DDP901"]["ranks"] == [3]
    assert f"20.0 s {'behind' if seconds < 0 else 'ahead'}" in codes["DDP052"]["message"]
    assert running.found(1) == []


def test_a_rank_that_is_killed_on_another_host(nodes: Make) -> None:
    checks = nodes(2)
    path = job(checks, "rank == 1 and step == 60 and os.kill(os.getpid(), 9)")
    running = JobOnHosts(checks, path)
    running.wait()
    assert [(each["code"], each["ranks"]) for each in running.found()] == [("DDP902", [1])]


def test_variables_and_code_that_differ_are_said_at_once(nodes: Make) -> None:
    checks = nodes(2)
    running = JobOnHosts(checks, job(checks, steps=400), env={1: {"NCCL_ALGO": "Ring"}})
    found = running.until("DDP057")
    assert "NCCL_ALGO" in found["message"] and any("node1" in each for each in found["evidence"])
    running.stop()


def test_a_hang_is_ended_on_all_hosts(nodes: Make) -> None:
    checks = nodes(2)
    path = job(checks, "rank == 1 and step == 60 and time.sleep(1000)")
    running = JobOnHosts(checks, path, options=(*FAST, "--kill-on-hang"))
    assert running.wait() == [4, 4]
    assert [(each["code"], each["ranks"]) for each in running.found()] == [("DDP802", [1])]
    assert "the job hangs, says node0: ending it" in running.told(1)


@pytest.mark.parametrize("how", ["c10d", "kubeflow"])
def test_a_healthy_job_hears_nothing(nodes: Make, how: str) -> None:
    checks = nodes(3)
    running = JobOnHosts(checks, job(checks, steps=200), nproc=2, how=how)
    assert running.wait() == [0, 0, 0]
    assert running.found() == []
    assert "6 ranks, 200 steps; the job succeeded" in running.told(0)
    run = running.run()
    assert [rank.rank for rank in run.last] == list(range(6))
    assert [len(rank.steps) > 50 for rank in run.last] == [True] * 6
    for number in (1, 2):
        assert "findings: see node0" in running.told(number)


def test_the_head_shows_the_ranks_of_all_hosts(nodes: Make) -> None:
    checks = nodes(2)
    running = JobOnHosts(checks, job(checks, steps=2400), nproc=2, how="c10d")
    until_steps(running, 3)

    def show(*words: str) -> str:
        run_dir = str(running.run_dir(0))
        return checks.lab.hosts[0].run(sys.executable, "-m", "ddpdoctor", *words, run_dir)

    ranks = {each["rank"]: each for each in json.loads(show("top", "--json"))["ranks"]}
    assert sorted(ranks) == [0, 1, 2, 3] and all(each["step"] for each in ranks.values())
    assert "4 ranks" in show("stacks")
    running.stop()
    assert "4 ranks" in show("report")
    html = checks.directory / "report.html"
    show("report", "--html", str(html))
    assert all(f"rank {rank}" in html.read_text() for rank in range(4))


def test_without_nodes_each_host_is_judged_alone(nodes: Make) -> None:
    checks = nodes(2)
    running = JobOnHosts(checks, job(checks), options=("--no-nodes",))
    assert running.wait() == [0, 0]
    assert "1 of 2 ranks" in running.told(0) and "node0 judges" not in running.told(1)
    assert not (running.run_dir(0) / "nodes.jsonl").exists()


def test_a_file_store(nodes: Make) -> None:
    checks = nodes(2)
    how = f", init_method='file://{checks.directory}/store', rank=int(os.environ['RANK']), "
    how += "world_size=int(os.environ['WORLD_SIZE'])"
    running = JobOnHosts(checks, job(checks, how=how), how="tasks")
    assert running.wait() == [0, 0]
    assert "2 ranks, 100 steps" in running.told(0)
    assert not list(checks.directory.glob("store.ddpdoctor*"))


OWN_STORE = """
class Own(dist.Store):
    pass
for name in ("set", "get", "add", "wait", "check", "delete_key", "compare_set", "set_timeout"):
    setattr(Own, name, lambda self, *given, name=name: getattr(inner, name)(*given))
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
inner = dist.PrefixStore("own", dist.TCPStore(*place, world, rank == 0))
store = Own()
"""


def test_one_run_directory_for_all_nodes(nodes: Make) -> None:
    checks = nodes(2)
    shared = checks.directory / "shared"
    # No other process can use this store, so the nodes meet in the directory.
    path = job(
        checks,
        "rank == 1 and step == 60 and time.sleep(1000)",
        before=OWN_STORE,
        how=", store=store, rank=rank, world_size=world",
    )
    options = ("--run-dir", str(shared), *FAST)
    running = JobOnHosts(checks, path, how="tasks", options=options)
    found = running.until("DDP802")
    assert found["ranks"] == [1] and found["location"]["line"] == line_of(path, "time.sleep(1000)")
    running.until_told(
        1, f"node0 judges this node's ranks together with all others; its records are in {shared}"
    )
    (one,) = (each for each in shared.glob("node?-*"))
    ranks = [rank for path in (shared, one) for rank in RunReader(path).snapshot().ranks]
    assert {rank.rank for rank in ranks} == {0, 1}
    running.stop()
    assert not list(shared.rglob("nodes.ddpdoctor"))


# -- nodes that do not come together


def test_a_node_without_a_cable_is_told_so_and_how_to_check_all(nodes: Make) -> None:
    checks = nodes(2)
    faults.cable_pulled(checks.lab, checks.lab.hosts[1])
    running = JobOnHosts(checks, job(checks), options=FAST)
    for number in (0, 1):
        running.until_told(number, "error DDP813: torchrun has waited in rendezvous")
        running.until_told(number, f"ddpdoctor check --nnodes 2 --node-rank {number} ")
    running.until_told(1, "evidence: on node1, interface eth0 (10.77.0.2) ")
    assert "evidence: on node0" not in running.told(0)
    running.stop()


def test_ranks_that_do_not_see_the_other_node_name_it(nodes: Make) -> None:
    checks = nodes(2)
    faults.firewall(checks.lab, checks.lab.hosts[0], ports=faults.EPHEMERAL)
    running = JobOnHosts(checks, job(checks), nproc=2, options=FAST)
    found = running.until("DDP813", lambda found: "init_process_group" in found["message"])
    assert "for ranks 2 and 3 (node rank 1), not seen from this node" in found["message"]
    assert found["paste"].startswith("ddpdoctor check --nnodes 2 --node-rank 0 --nproc-per-node 2 ")
    running.stop()


# -- what is lost


def test_a_cut_cable_and_its_repair(nodes: Make) -> None:
    checks = nodes(3)
    running = JobOnHosts(checks, job(checks, steps=2400))
    running.until_told(2, "node0 judges")
    until_steps(running, 2)
    faults.cable_pulled(checks.lab, checks.lab.hosts[2])
    found = running.until("DDP215")
    assert "node2 does not respond" in found["message"] and found["ranks"] == [2]
    running.until_told(2, "lost the link to node0: this node's ranks are judged alone")
    checks.lab.at_switch("ip", "link", "set", checks.lab.hosts[2].port, "up")
    until = time.monotonic() + LIMIT
    while any(each.state == "lost" for each in running.run().nodes):
        assert time.monotonic() < until, running.run().nodes
        time.sleep(0.5)
    # A hang that was never there is not reported.
    assert not [each for each in running.found() if each["code"].startswith("DDP8")]
    running.stop()


@pytest.mark.parametrize("what", ["machine", "processes"])
def test_a_host_that_vanishes_is_the_cause(nodes: Make, what: str) -> None:
    checks = nodes(2)
    running = JobOnHosts(checks, job(checks, steps=4000))
    running.until_told(1, "node0 judges")
    until_steps(running, 1)
    if what == "machine":
        checks.lab.hosts[1].namespace.close()
    else:
        # As where a container of which one process had too much memory is ended as a whole.
        with contextlib.suppress(LabError):
            checks.lab.hosts[1].run("kill", "-9", "-1")
    running.processes[0].wait(LIMIT)
    found = [(each["code"], each["severity"], each["ranks"]) for each in running.found()]
    assert found == [("DDP215", "error", [1])], running.told(0)
    assert "node1 does not respond" in running.told(0)
    assert "ddpdoctor check --nnodes 2 --node-rank 0 --nproc-per-node 1 " in running.told(0)


def test_a_supervisor_that_is_killed_on_the_first_host(nodes: Make) -> None:
    checks = nodes(2)
    running = JobOnHosts(checks, job(checks, steps=4000))
    until_steps(running, 1)
    os.kill(pids_of(checks.lab.hosts[0], "--run-dir", running.run_dir(0))[0], signal.SIGKILL)
    # Its keepers end its ranks; the other host's ranks fail, and that host says so itself.
    running.wait()
    assert "lost the link to node0: this node's ranks are judged alone" in running.told(1)
    assert [(each["code"], each["ranks"]) for each in running.found(1)] == [("DDP907", [1])]
    assert "findings: 1 error" in running.told(1)


def test_a_supervisor_that_is_killed_on_another_host(nodes: Make) -> None:
    checks = nodes(2)
    running = JobOnHosts(checks, job(checks, steps=4000))
    until_steps(running, 1)
    os.kill(pids_of(checks.lab.hosts[1], "--run-dir", running.run_dir(1))[0], signal.SIGKILL)
    # Its keepers end its ranks, and nothing is left to say so.
    running.wait()
    found = [(each["code"], each["severity"], each["ranks"]) for each in running.found()]
    assert found == [("DDP215", "error", [1])], running.told(0)


@pytest.mark.parametrize("host", [0, 1])
def test_an_exchange_that_is_killed(nodes: Make, host: int) -> None:
    checks = nodes(2)
    running = JobOnHosts(checks, job(checks, steps=300))
    running.until_told(1, "node0 judges")
    (exchange,) = pids_of(checks.lab.hosts[host], "nodes.exchange", running.run_dir(host))
    os.kill(exchange, signal.SIGKILL)
    assert running.wait() == [0, 0]
    assert [each["code"] for each in running.found()] in ([], ["DDP215"])


def test_restarts_are_attempts_of_all_nodes(nodes: Make) -> None:
    checks = nodes(2)
    # Each torchrun counts what failed on its own node. If one rank fails alone, bare torchrun may
    # restart the other for a changed membership, and in 1 of 5 jobs they do not meet again.
    fail = "assert os.environ['TORCHELASTIC_RESTART_COUNT'] != '0' or step < 30, 'once'"
    running = JobOnHosts(checks, job(checks, fail), how="c10d", options=("--max-restarts", "2"))
    assert running.wait() == [0, 0]
    run = running.run()
    assert run.restarts == (0, 1)
    assert [(rank.rank, rank.restart) for rank in run.ranks] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert "attempt 1: 2 ranks" in running.told(0) and "AssertionError: once" in running.told(0)


def test_a_job_that_shrinks_goes_on_as_another_attempt(nodes: Make) -> None:
    # A job that grows fails in bare torchrun 2.13: its agents wait for each other until a timeout.
    checks = nodes(3)
    options = ("--max-restarts", "3")
    path = job(checks, steps=400)
    running = JobOnHosts(checks, path, how="c10d", options=options, nnodes="1:3")
    running.until_told(2, "node0 judges")
    until_steps(running, 2)
    checks.lab.hosts[2].namespace.close()
    running.until_told(0, "attempt 2: 2 ranks")
    assert "attempt 1: 3 ranks" in running.told(0)
    ranks = [(rank.restart, rank.rank) for rank in running.run().ranks]
    assert ranks == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
