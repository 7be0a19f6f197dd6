"""Findings about jobs without progress that the sick jobs (`test_sick_jobs.py`) do not reach."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.finding import RULES, Severity, examine
from ddpdoctor.diagnose.hangs.diagnosis import guilty
from ddpdoctor.diagnose.hangs.hang_snapshot import parse_ranks
from ddpdoctor.probe.observers import collective_calls
from ddpdoctor.probe.observers.collective_calls import callers_of, reported_calls
from ddpdoctor.probe.runtime.phases import Backward
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.ring import Collective
from ddpdoctor.run.snapshot import Records, Run
from ddpdoctor.system.network import dead_links
from tests.support.hanging_ranks import (
    IN_TORCH,
    NOW,
    TRAIN,
    call,
    findings,
    hung,
    rank,
    stacks,
    state,
    waiting,
)
from tests.support.written import SECOND, T0, Written, supervisor_records


def test_ranks_of_a_group() -> None:
    assert parse_ranks("0-2,5") == {0, 1, 2, 5}
    assert parse_ranks("") == set()


# -- the verdict


SWITCHES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def test_the_absent_rank_is_named(tmp_path: Path) -> None:
    absent = rank(
        1,
        "other",
        flight=[call(8, True)],
        stacks=stacks(1, ("/job/train.py", 70, "main"), ("/job/train.py", 88, "save_checkpoint")),
        activity={"seconds": 1.0, "letters": "SS", "cpu": 0.05, "characters": 120_000_000},
    )
    (found,) = findings(tmp_path, waiting(0), absent, waiting(2), waiting(3))
    assert (found.code, found.ranks, found.severity) == ("DDP802", (1,), Severity.WARNING)
    assert str(found.location) == "/job/train.py:88"
    assert found.message == (
        "rank 1 never joined DDP's all_reduce #9 (64 floats, default group), where ranks 0, 2 and "
        "3 wait in train.py:61; rank 1 is in `save_checkpoint` train.py:88, reading or writing "
        "120.0 MB/s for 41 s"
    )


def test_an_idle_rank_is_an_error(tmp_path: Path) -> None:
    absent = rank(
        1, "other", flight=[call(8, True)], stacks=stacks(1, ("/job/train.py", 88, "get"))
    )
    (found,) = findings(tmp_path, waiting(0), absent)
    assert (found.code, found.severity) == ("DDP802", Severity.ERROR)
    # Others waited long for a rank that gives signs: that may be work.
    (found,) = findings(tmp_path, waiting(0), absent, everybody=False)
    assert (found.code, found.severity) == ("DDP802", Severity.WARNING)


def test_a_rank_that_waits_in_another_collective(tmp_path: Path) -> None:
    other = waiting(1)
    other["flight"][-1] = call(9, False, "broadcast")
    third = waiting(2)
    (found,) = findings(tmp_path, waiting(0), other, third)
    assert (found.code, found.ranks) == ("DDP803", (1,))
    assert "rank 1 called broadcast" in found.message


def test_a_recorder_without_lines_leaves_them_to_the_ring(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def sync():\n    barrier()\nif rank == 0:\n    sync()\nloss.backward()\n")
    bare = {"lines": [], "name": "barrier", "shapes": [], "dtypes": []}
    ring = {
        "order": 1, "began": NOW, "ended": 0, "sequence": 1, "name": "barrier", "group": "0|0-1",
        "dtype": "", "reduce": "", "numel": -1, "root": -1, "asynchronous": False,
        "point_to_point": False, "site": f"{path}:2", "callers": [f"{path}:4"],
    }  # fmt: skip
    first = rank(0, "wait", flight=[{**call(9, False), **bare}], collectives=[ring], waited=1)
    other = waiting(1)
    other["flight"] = [{**call(9, False), "lines": []}]
    other["stacks"] = stacks(1, (str(path), 5, "<module>"), IN_TORCH)
    (found,) = findings(tmp_path, first, other)
    assert (found.code, found.ranks, found.location and found.location.line) == ("DDP401", (0,), 4)
    assert "by `sync()` train.py:4, under `if rank == 0:` (line 3)" in found.message


def test_each_backend_of_a_group_counts_for_itself(tmp_path: Path) -> None:
    other = waiting(1)
    # Far ahead in gloo's numbers, of which rank 0 has seen nothing.
    other["flight"] = [{**call(number, number < 30), "backend": "gloo"} for number in (29, 30)]
    first = waiting(0)
    first["flight"] = [{**each, "backend": "nccl"} for each in first["flight"]]
    (found,) = findings(tmp_path, first, other)
    assert (found.code, found.ranks) == ("DDP803", (0, 1))
    assert found.message.startswith("ranks wait for each other in different collectives")


def test_the_recorders_of_all_backends_are_one_history() -> None:
    def entry(created: int, backend: str, sequence: int) -> dict[str, Any]:
        return {
            "record_id": sequence,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": sequence,
            "profiling_name": f"{backend}:all_reduce",
            "time_created_ns": created,
        }

    gloo = [entry(10 * number, "gloo", number) for number in range(1, 31)]
    nccl = [entry(255, "nccl2", 1), entry(291, "nccl2", 2)]
    told = reported_calls([*gloo, *nccl], lambda created: (f"train.py:{created}",))
    told.sort(key=lambda each: int(each["id"]))
    assert [each["created"] for each in told] == sorted(
        each["time_created_ns"] for each in (*gloo, *nccl)
    )
    assert [each["sequence"] for each in told if each["backend"] == "nccl2"] == [1, 2]
    assert all(each["lines"] == [f"train.py:{each['created']}"] for each in told)


def test_who_called_what_a_recorder_recorded() -> None:
    def called(began: int, ended: int, line: int, asynchronous: bool = False) -> Collective:
        site = f"/job/train.py:{line}"
        facts = ("all_reduce", "0|0-1", "float32", "SUM", (4,), 4, -1)
        callers = ("/job/main.py:5",)
        return Collective(began, began, ended, 1, *facts, asynchronous, False, site, callers)

    def passed(began: int, ended: int) -> Backward:
        return began, ended, Site("/job/train.py", 90)

    place = callers_of(
        [called(10, 20, 1), called(30, 50, 2, True), called(100, 130, 3), called(200, 0, 4)],
        [passed(35, 48), passed(60, 70), passed(190, 0)],
    )
    # One of several, one that goes on, and DDP's own beside it; the last of each is under way.
    asked = (12, 15, 31, 40, 65, 101, 201)
    lines = [place(each) for each in asked]
    assert [each[0] for each in lines] == [
        f"/job/train.py:{line}" for line in (1, 1, 2, 90, 90, 3, 4)
    ]
    assert [each[1:] for each in lines[2:4]] == [("/job/main.py:5",), ()]
    # Before everything that is known, between, and without a time.
    assert [place(each) for each in (5, 25, 150, None)] == [()] * 4


@pytest.mark.parametrize(
    ("version", "generic", "own", "wanted"),
    [
        ("2.4.1", False, {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ("2.9.1+cu128", True, {}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
        ("2.11.0a0+git0123", True, {}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
        ("2.12.0", True, {}, {}),
        ("2.15.0.dev20261101", True, {}, {}),
        *[("2.9.1", True, {name: "0"}, {name: "0"}) for name in SWITCHES],
        ("2.4.1", False, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, {SWITCHES[1]: "9"}),
    ],
)
def test_the_flight_recorder_is_turned_on_by_the_name_that_torch_does_not_warn_of(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    generic: bool,
    own: dict[str, str],
    wanted: dict[str, str],
) -> None:
    c10d = SimpleNamespace(**({"_dump_fr_trace": print} if generic else {}))
    native = SimpleNamespace(_distributed_c10d=c10d)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version, _C=native))
    # What is set here must be gone afterwards: the jobs of other tests inherit it.
    monkeypatch.setattr(os, "environ", {**own})
    collective_calls.install_flight_recorder(ModuleType("torch.distributed.distributed_c10d"))
    assert {name: os.environ[name] for name in SWITCHES if name in os.environ} == wanted
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


def test_a_call_of_no_known_line_waits_where_its_rank_stands(tmp_path: Path) -> None:
    other = waiting(1)
    other["flight"][-1] = {**call(9, False, "broadcast"), "lines": []}
    other["stacks"] = stacks(1, ("/job/train.py", 70, "main"), IN_TORCH)
    (found,) = findings(tmp_path, waiting(0), other, waiting(2))
    assert (found.code, str(found.location)) == ("DDP803", "/job/train.py:70")


def test_everybody_is_there(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, *(waiting(number) for number in range(4)))
    assert (found.code, found.severity) == ("DDP814", Severity.WARNING)
    # Two of the four ranks are on another node.
    (found,) = findings(tmp_path, waiting(0), waiting(1))
    assert (found.code, found.ranks) == ("DDP802", (2, 3))
    assert "ranks 2 and 3 of other nodes" in found.message


def test_a_collective_of_several_nodes_that_does_not_end_suggests_the_check(tmp_path: Path) -> None:
    command = ["--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--rdzv-endpoint=node0:29500"]
    line = "ddpdoctor check --nnodes 2 --node-rank 1 --nproc-per-node 2 --rdzv-endpoint node0:29500"
    for ranks, code in ((range(4), "DDP814"), (range(2, 4), "DDP802")):
        run = hung(tmp_path, *map(waiting, ranks))
        (found,) = examine(replace(run, manifest={"command": command}), RULES.values())
        assert (found.code, found.paste) == (code, line)
    assert "; ranks 0 and 1 (node rank 0) did not join it, or cannot be reached" in found.message


def in_group(number: int, group: str, step: int = 3) -> dict[str, Any]:
    """A rank that waits in a collective of a group of which nothing else is known."""
    found = waiting(number)
    found["flight"] = [{**call(9, False), "group": group}]
    return {**found, "step": step}


def test_groups_that_are_complete_and_do_not_go_on_are_reported_as_they_are(tmp_path: Path) -> None:
    ranks = [in_group(number, "1" if number < 2 else "2") for number in range(4)]
    (found,) = findings(tmp_path, *ranks)
    assert (found.code, found.ranks, found.severity) == ("DDP814", (0, 1, 2, 3), Severity.WARNING)
    assert found.message.startswith("the job has made no progress for 41 s: rank 0 waits in ")
    assert found.message.count(" at train.py:61") == 3
    assert len(found.evidence) == 1
    assert found.evidence[0].startswith("rank 3 waits in DDP's all_reduce #9")
    assert findings(tmp_path, *ranks, everybody=False) == []
    # Their threads have no core.
    starved = {"activity": {"letters": "SR", "cpu": 0.0, "busy": 0.9}}
    assert findings(tmp_path, *ranks[:3], {**ranks[3], **starved}) == []


def test_of_ranks_that_were_not_all_looked_at_others_may_be_on_their_way(tmp_path: Path) -> None:
    assert findings(tmp_path, *map(waiting, range(4)), everybody=False) == []


def test_the_guilty_are_those_of_errors(tmp_path: Path) -> None:
    """Ranks that only may be to blame are not: the job is left alone for them."""
    idle = rank(1, "other", flight=[call(8, True)], stacks=stacks(1, ("/job/a.py", 88, "get")))
    assert guilty(hung(tmp_path, waiting(0), idle)) == {1}
    assert guilty(hung(tmp_path, waiting(0), idle, everybody=False)) == set()


def test_a_call_of_no_known_line_is_at_the_line_of_the_main_thread() -> None:
    unknown = waiting(1)
    unknown["flight"][-1]["lines"] = []
    found = state(unknown).blocked
    assert found is not None and (found.sequence, str(found.site)) == (9, "/job/train.py:61")
    known = state(waiting(1)).blocked
    assert known is not None and (known.sequence, str(known.site)) == (9, "/job/train.py:61")


def test_a_rank_whose_collectives_are_all_done_waits_for_none_of_them() -> None:
    done = rank(1, "wait", flight=[call(9, True)], stacks=stacks(1, TRAIN, IN_TORCH))
    assert state(done).blocked is None


def test_a_rank_whose_evidence_cannot_be_had(tmp_path: Path) -> None:
    hidden = rank(1, "other", flight=None, activity={})
    hidden["stacks"] = stacks(1, trouble="on another host or in another container: n2")
    hidden["stacks"]["threads"] = []
    (found,) = findings(tmp_path, waiting(0), hidden, waiting(2), waiting(3))
    assert (found.code, found.ranks) == ("DDP802", (1,))
    assert "no stack of rank 1: on another host or in another container: n2" in found.evidence


def test_without_a_flight_recorder_the_idle_one_waits(tmp_path: Path) -> None:
    waits = {**waiting(0), "flight": None}
    idle = rank(1, "other", flight=None, stacks=stacks(1, ("/job/train.py", 88, "get")))
    (found,) = findings(tmp_path, waits, idle)
    assert (found.code, found.ranks, found.severity) == ("DDP802", (1,), Severity.ERROR)
    assert found.message == (
        "rank 1 never joined backward's all-reduce, where rank 0 waits in train.py:61; rank 1 is "
        "in `get` train.py:88, idle for 41 s"
    )
    # Also in a backward, but one that computes: it is not there yet.
    busy = {**waits, "rank": 1, "activity": {"letters": "RR", "cpu": 0.98}}
    (found,) = findings(tmp_path, waits, {**busy, "stacks": stacks(1, TRAIN, IN_TORCH)})
    assert (found.code, found.ranks, found.severity) == ("DDP802", (1,), Severity.WARNING)
    assert "computing (98 % of a core)" in found.message
    # In torch, but in nothing that waits for ranks.
    loads = ("/lib/python3.11/site-packages/torch/serialization.py", 8, "load")
    for phase in ("other", "forward", "backward"):
        there = {**idle, "phase": phase, "stacks": stacks(0, TRAIN, loads), "rank": 0}
        (found,) = findings(tmp_path, there, idle)
        assert (found.code, found.severity) == ("DDP814", Severity.WARNING)


def test_a_backward_that_compiles_waits_for_no_rank(tmp_path: Path) -> None:
    inductor = "/lib/python3.11/site-packages/torch/_inductor/codecache.py"
    compiler = (inductor, 8, "load"), ("/lib/python3.11/subprocess.py", 9, "communicate")
    lock = (inductor, 8, "load"), ("/lib/python3.11/site-packages/filelock/_api.py", 9, "acquire")
    ranks = [
        {
            **waiting(number),
            "flight": None,
            "world_size": 2,
            "stacks": stacks(number, TRAIN, IN_TORCH, *inside),
        }
        for number, inside in enumerate((compiler, lock))
    ]
    assert all("all-reduce" not in each.message for each in findings(tmp_path, *ranks))


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([("distributed.py", "__init__"), ("distributed.py", "_x")], "DDP's constructor"),
        ([("distributed.py", "forward"), ("distributed.py", "_pre_forward")], "DDP's forward"),
    ],
)
def test_without_a_flight_recorder_waits_of_ddp_itself(
    tmp_path: Path, frames: list[tuple[str, str]], words: str
) -> None:
    parallel = "/lib/python3.11/site-packages/torch/nn/parallel/"
    inside = [(parallel + file, 8, function) for file, function in frames]
    waits = rank(0, "other", flight=None, stacks=stacks(0, TRAIN, *inside))
    idle = rank(1, "other", flight=None, stacks=stacks(1, ("/job/train.py", 88, "get")))
    (found,) = findings(tmp_path, waits, idle)
    assert (found.code, found.ranks, found.severity) == ("DDP802", (1,), Severity.ERROR)
    assert f"rank 1 never joined {words}, where rank 0 waits in train.py:61" in found.message


def test_a_job_that_goes_on_has_no_finding(tmp_path: Path) -> None:
    record = {"kind": "hang", "time": NOW, "number": 1, "restart": 0, "file": "hang-0001.json"}
    over = {"kind": "hang_over", "time": NOW, "number": 1}
    (tmp_path / "hang-0001.json").write_text(json.dumps({**record, "ranks": [waiting(0)]}))
    assert Run(tmp_path, {}, (), supervisor=supervisor_records(record)).hang is not None
    assert Run(tmp_path, {}, (), supervisor=supervisor_records(record, over)).hang is None
    for damaged in ("", "{", "[]"):
        (tmp_path / "hang-0001.json").write_text(damaged)
        assert (
            examine(Run(tmp_path, {}, (), supervisor=supervisor_records(record)), RULES.values())
            == []
        )


def test_a_node_that_never_came(tmp_path: Path) -> None:
    told: dict[str, Any] = {"kind": "hang", "time": NOW, "number": 1, "restart": 0, "seconds": 41.0}
    told["links"] = ["interface eth0 (10.0.0.1) has no carrier"]
    command = ["python", "-m", "torch.distributed.run", "--nnodes=2", "--node-rank", "0"]
    command += ["--nproc_per_node=4", "--master-addr", "a b", "--rdzv_id", "7"]
    manifest = {"launcher": "torchrun", "command": command, "host": "node0"}
    run = Run(tmp_path, manifest, (), supervisor=supervisor_records(told))
    (found,) = examine(run, RULES.values())
    assert found.code == "DDP813" and "of 2 nodes" in found.message
    assert found.evidence[1] == "on node0, interface eth0 (10.0.0.1) has no carrier"
    assert found.paste == (
        "ddpdoctor check --nnodes 2 --node-rank 0 --nproc-per-node 4 --rdzv-endpoint 'a b:29500' "
        "--rdzv-id 7"
    )


@pytest.mark.parametrize(
    ("command", "nodes", "words"),
    [
        # Nothing but the options says where the others are.
        (["--nnodes", "2", "--nproc-per-node", "2"], [], "ranks 2 and 3 (node rank 1), not seen"),
        (
            ["--nnodes", "3", "--nproc-per-node", "2"],
            [],
            "4 and 5 (node rank 1, node rank 2)",
        ),
        (["--nnodes", "2"], [], "ranks 2 and 3 of other nodes, not seen"),
        # A node that was lost is the only other one.
        (["--nnodes", "2", "--nproc-per-node", "2"], ["lost"], "ranks 2 and 3 (node1), not seen"),
        (["--nnodes", "3"], ["lost"], "ranks 2, 3, 4 and 5 of other nodes"),
        # One node.
        (["--nnodes", "1", "--nproc-per-node", "4"], [], "for ranks that never came"),
    ],
)
def test_ranks_of_other_nodes_are_named_with_their_hosts(
    tmp_path: Path, command: list[str], nodes: list[str], words: str
) -> None:
    world = 6 if "3" in command else 4
    run = hung(tmp_path, joining(0, world), joining(1, world))
    more = [
        {"kind": "node", "time": NOW, "number": number, "host": f"node{number}", "state": each}
        for number, each in enumerate(nodes, 1)
    ]
    records = Records([*run.supervisor, *supervisor_records(*more)])
    manifest = {"launcher": "torchrun", "command": command, "host": "node0"}
    (found,) = examine(replace(run, manifest=manifest, supervisor=records), RULES.values())
    assert found.code == "DDP813" and words in found.message
    assert bool(found.paste) == (command[1] != "1")


def test_links_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {
        "lo": ["127.0.0.1", "::1"],
        "eth0": ["00:00:5e:00:53:01", "10.0.0.1", "fe80::1%eth0"],
        "eth1": ["fe80::2%eth1"],
        "docker0": ["172.17.0.1"],
        "ib0": ["10.1.0.1"],
    }
    facts = {
        "eth0": ("1", "up"),
        "eth1": ("0", "down"),
        "docker0": ("0", "down"),
        "ib0": ("", "down"),
    }
    for name, (carrier, operstate) in facts.items():
        (tmp_path / name).mkdir()
        if carrier:
            (tmp_path / name / "carrier").write_text(f"{carrier}\n")
        (tmp_path / name / "operstate").write_text(f"{operstate}\n")
    (tmp_path / "docker0" / "bridge").mkdir()
    known = {
        name: [SimpleNamespace(address=one) for one in all_] for name, all_ in addresses.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    assert dead_links(tmp_path) == ("interface ib0 (10.1.0.1) is down",)
    (tmp_path / "eth0" / "carrier").write_text("0\n")
    assert dead_links(tmp_path)[0] == (
        "interface eth0 (10.0.0.1) has no carrier: its cable, or the other end"
    )
    known = {"lo": known["lo"], "eth1": known["eth1"]}
    assert dead_links(tmp_path) == ("no interface but the loopback has an address",)


@pytest.mark.parametrize(
    ("command", "launcher", "words"),
    [
        (["--nnodes=2", "--node-rank", "0"], "torchrun", "--nnodes 2 --node-rank 0"),
        (["--nnodes", "1:4", "--nproc_per_node=8"], "torchrun",
         "--nnodes 1:4 --nproc-per-node 8"),
        (["--nnodes", "1"], "torchrun", None),
        (["--nproc-per-node=2"], "torchrun", None),
        (["--nnodes=2"], "srun", None),
        (["--nnodes"], "torchrun", None),
    ],
)  # fmt: skip
def test_torchrun_that_started_no_rank_waits_for_nodes(
    tmp_path: Path, command: list[str], launcher: str, words: str | None
) -> None:
    record = {"kind": "hang", "time": NOW, "number": 1, "restart": 0, "seconds": 41.0}
    manifest = {"launcher": launcher, "command": ["python", *command]}
    run = Run(tmp_path, manifest, (), supervisor=supervisor_records(record))
    found = examine(run, RULES.values())
    assert [each.evidence for each in found] == ([(f"started with {words}",)] if words else [])


INIT = ("/srv/lib/python3.11/site-packages/torch/distributed/c.py", 9, "init_process_group")


def joining(number: int, world: int = 0, **activity: Any) -> dict[str, Any]:
    """A process that waits in `init_process_group`."""
    seen = {"letters": "SS", **activity}
    stack = stacks(number, TRAIN, INIT, world_size=world)
    return {"rank": number, "pid": 1 + number, "stacks": stack, "activity": seen}


def test_a_rank_that_asks_its_own_store_for_others_waits(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, joining(0, 2, wrote=2470, characters=11362, switches=700))
    assert (found.code, found.ranks) == ("DDP813", (0,))


def test_ranks_that_have_all_come_and_do_not_begin(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, joining(0, 2), joining(1, 2))
    assert (found.code, found.ranks) == ("DDP814", (0, 1))
    assert found.message.startswith("all ranks have been in init_process_group for 41 s")
    for world, one in ((3, 2), (0, 2)):
        (found,) = findings(tmp_path, joining(0, world), joining(1, one))
        assert (found.code, found.ranks) == ("DDP813", (0, 1))
        assert "ranks 0 and 1 wait in init_process_group at train.py:61" in found.message
    (found,) = findings(tmp_path, joining(0, 2))
    assert found.message.startswith("rank 0 waits in init_process_group at train.py:61 for ranks")


def test_who_still_works_may_be_about_to_begin(tmp_path: Path) -> None:
    assert findings(tmp_path, joining(0), joining(1, cpu=0.9)) == []
    assert findings(tmp_path, joining(0), joining(1), launcher_works=True) == []
    hidden = {"rank": 1, "pid": 2, "stacks": {**stacks(1), "threads": []}}
    assert findings(tmp_path, joining(0), {**hidden, "activity": {"letters": "SS"}}) == []


@pytest.mark.parametrize(
    ("ran", "needed", "late"), [(46.0, 30.0, True), (44.0, 30.0, False), (46.0, 31.0, False)]
)
def test_a_rank_without_a_core_is_late_once_it_had_the_time_of_the_others(
    tmp_path: Path, ran: float, needed: float, late: bool
) -> None:
    slow = {"rank": 1, "pid": 2, "stacks": stacks(1, ("/job/train.py", 9, "download"))}
    starved = {"letters": "SR", "cpu": 0.1, "busy": 0.9, "ran": ran}
    found = findings(tmp_path, joining(0, ran=needed), {**slow, "activity": starved}, limit=30.0)
    assert [each.ranks for each in found] == ([(1,)] if late else [])


def in_pair(number: int, group: str, members: str) -> dict[str, Any]:
    """A rank that waits in its own call of a group."""
    ring = {
        "order": 1, "began": NOW, "ended": 0, "sequence": 1, "name": "all_reduce",
        "group": f"{group}|{members}", "dtype": "float32", "reduce": "SUM", "numel": 4, "root": -1,
        "asynchronous": False, "point_to_point": False, "site": f"/job/train.py:{group}",
        "callers": [],
    }  # fmt: skip
    stack = stacks(number, ("/job/train.py", int(group), "main"), IN_TORCH)
    return rank(number, "wait", flight=None, collectives=[ring], waited=1, stacks=stack)


def test_groups_that_are_used_in_different_order(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, in_pair(0, "10", "0-1"), in_pair(1, "20", "0-1"))
    assert (found.code, found.ranks, found.severity) == ("DDP804", (0, 1), Severity.ERROR)
    assert found.message == (
        "ranks wait for each other in collectives of different groups: rank 0 in all_reduce #1 "
        "(4 floats, group of ranks 0-1 named 10) at train.py:10; rank 1 in all_reduce #1 (4 "
        "floats, group of ranks 0-1 named 20) at train.py:20"
    )
    assert found.evidence == (
        "rank 0 waits in all_reduce #1 (4 floats, group of ranks 0-1) at train.py:10 for 41 s",
        "rank 1 waits in all_reduce #1 (4 floats, group of ranks 0-1) at train.py:20 for 41 s",
    )
    assert found.fix == "Call the collectives of all groups in one order on every rank."


def test_a_rank_that_is_late_before_anybody_joined(tmp_path: Path) -> None:
    init = ("/srv/lib/python3.11/site-packages/torch/distributed/c.py", 9, "init_process_group")
    waits = {"rank": 0, "pid": 1, "stacks": stacks(0, TRAIN, init), "activity": {"letters": "SS"}}
    late = {"rank": 1, "pid": 2, "stacks": stacks(1, ("/job/train.py", 9, "download"))}
    network = {"letters": "SS", "network": True, "switches": 0}
    (found,) = findings(tmp_path, waits, {**late, "activity": network})
    assert (found.code, found.ranks, found.severity) == ("DDP811", (1,), Severity.WARNING)
    assert found.message == (
        "rank 1 is still starting up: in `download` train.py:9, waiting for the network, from "
        "which nothing comes; rank 0 waits for it in init_process_group for 41 s, at train.py:61"
    )
    (found,) = findings(tmp_path, waits, {**late, "activity": {**network, "switches": 50}})
    assert "in `download` train.py:9, sending or receiving over the network;" in found.message
    (found,) = findings(tmp_path, waits, {**late, "activity": {"letters": "SS"}})
    assert (found.code, found.severity) == ("DDP802", Severity.WARNING)
    # Both have come, so that others are missing.
    (found,) = findings(tmp_path, waits, {**waits, "rank": 1})
    assert (found.code, found.ranks) == ("DDP813", (0, 1))


def test_a_question_at_the_start_is_only_told(tmp_path: Path) -> None:
    asks = {"letters": "SS", "input": True, "terminal": True}
    absent = rank(1, "other", step=0, flight=[], stacks=stacks(1, TRAIN), activity=asks)
    (found,) = findings(tmp_path, {**waiting(0), "step": 0}, absent)
    assert (found.code, found.severity) == ("DDP808", Severity.INFO)
    for change in ({"step": 3}, {"activity": {**asks, "terminal": False}}):
        (found,) = findings(tmp_path, {**waiting(0), "step": 0}, {**absent, **change})
        assert (found.code, found.severity) == ("DDP808", Severity.ERROR)


def test_workers_that_wait_for_the_network_are_not_deadlocked(tmp_path: Path) -> None:
    loader = "/srv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
    worker = {"pid": 9, "letter": "S", "cpu_seconds": 0.0, "command": "python train.py"}
    told = stacks(1, TRAIN, (loader, 9, "_try_get_data"), state={"children": [worker]})
    waits = {"letters": "SS", "children_network": True}
    absent = rank(1, "data", flight=[], stacks=told, activity=waits)
    (found,) = findings(tmp_path, waiting(0), absent)
    assert (found.code, found.severity) == ("DDP809", Severity.WARNING)
    words = "the worker of its DataLoader at train.py:61 for 41 s, which waits for the network"
    assert words in found.message
    (found,) = findings(tmp_path, waiting(0), {**absent, "activity": {"letters": "SS"}})
    assert (found.code, found.severity) == ("DDP809", Severity.ERROR)
    assert "which sleeps, too: deadlocked" in found.message


@pytest.mark.parametrize(
    ("gave_up", "number"),
    [(None, 2), (15, 1), (5, 2)],
    ids=["nobody", "in between", "before both"],
)
def test_what_is_seen_while_ranks_give_up_tells_less(
    written: Written, gave_up: int | None, number: int
) -> None:
    records = [] if gave_up is None else [{"kind": "error", "time": T0 + gave_up * SECOND}]
    written.rank(0, records)
    for count in (1, 2):
        written.supervisor.append(
            {"kind": "hang", "time": T0 + 10 * count * SECOND, "number": count, "restart": 0}
        )
    written.findings(status=1)
    hang = RunReader(written.path).snapshot().hang
    assert hang is not None and hang.number == number
