"""The reduction over all nodes: its stages, its faults, its limits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.preflight.protocol.coordinator import nccl_report
from ddpdoctor.preflight.protocol.messages import RankResult
from ddpdoctor.preflight.selftest import collectives
from ddpdoctor.preflight.selftest.collectives import PROGRAM
from ddpdoctor.preflight.selftest.ranks import _with_others
from ddpdoctor.preflight.situation import Deadline
from ddpdoctor.run.records.typed_json import decoder
from tests.conftest import TOKEN

# The ranks of the collective test.


BROKEN = f"""
import sys
sys.path.insert(0, {str(PROGRAM.parent)!r})
import ranks

stage = ranks._stage

def broken(name, nodes, *rest):
    if 1 in nodes and len(nodes) == 2 and (name != ranks.AGAIN or {{again}}):
        return {{{{"name": name, "nodes": nodes, "error": "no such device", "bus": 0.0}}}}
    return stage(name, nodes, *rest)

ranks._stage = broken
ranks.main()
"""
"""A rank of node 1 that cannot reduce with a single other node, at first or again, too."""


def reduced(
    orders: list[dict[str, Any]], token: str, broken: dict[int, bool] | None = None
) -> list[dict[str, Any]]:
    """What ranks answer; those that are broken, by rank, in the second try as well or not."""
    programs = {rank: ["-c", BROKEN.format(again=again)] for rank, again in (broken or {}).items()}
    processes = [
        subprocess.Popen(
            [sys.executable, *programs.get(order["first"], [str(PROGRAM)]), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, TOKEN: token, "OMP_NUM_THREADS": "1"},
        )
        for order in orders
    ]
    answers: list[dict[str, Any]] = []
    try:
        for process in processes:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"ready": True}
        for process, order in zip(processes, orders, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            answers.append({})
            while not {"done", "ended"} & answers[-1].keys():
                answers[-1].update(json.loads(process.stdout.readline()))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return answers


def order(rank: int, node_of: list[int], port: int, **more: Any) -> dict[str, Any]:
    return {
        "backend": "gloo", "tests": ["all_reduce", "broadcast"], "measure": True, "soak": 0.0,
        "host": "127.0.0.1", "port": port, "first": rank, "ranks": 1, "world": len(node_of),
        "limit": 20, "stage_limit": more.get("limit", 20), "patience": 60,
        "stages": "", "node_of": node_of, **more,
    }  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.slow
def test_the_stages_go_from_nodes_over_pairs_to_all(token: str) -> None:
    """By gloo on the CPU: the order of the groups is the same with NCCL, which needs GPUs."""
    node_of, port = [0, 0, 1, 2], free_port()
    answers = reduced([order(r, node_of, port, stages="gloo") for r in range(4)], token)
    assert all(answer["ok"] for answer in answers), answers
    assert all(answer["stages"]["ok"] for answer in answers), answers
    names = [
        [(stage["name"], stage["nodes"]) for stage in answer["stages"]["stages"]]
        for answer in answers
    ]
    inside, one, two, everyone = (
        "inside the node", "between nodes 1 apart", "between nodes 2 apart", "of all nodes",
    )  # fmt: skip
    assert names[0] == [(inside, [0]), (one, [0, 1]), (two, [0, 2]), (everyone, [0, 1, 2])]
    assert names[2] == [(inside, [1]), (one, [0, 1]), (everyone, [0, 1, 2])]
    assert answers[0]["stages"]["stages"][-1]["bus"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
def test_the_nodes_of_a_pair_that_fails_are_tried_with_others(again: bool, token: str) -> None:
    node_of, port = [0, 1, 2, 3], free_port()
    orders = [order(r, node_of, port, stages="gloo", limit=5) for r in range(4)]
    answers = reduced(orders, token, broken={1: again})
    assert all(answer["ok"] for answer in answers), answers
    assert not any(answer["stages"]["ok"] for answer in answers), answers
    read = decoder(RankResult)
    report = nccl_report([read({"node": rank, **answer}) for rank, answer in enumerate(answers)])
    assert report.correct == 0
    assert [stage.name for stage in report.stages] == ["inside the node", "between nodes 1 apart"]
    errors = report.stages[-1].errors
    assert {nodes for _, nodes, _ in errors} == {(0, 1)}
    assert "no such device" in {words for _, _, words in errors}
    assert report.again == ((0, 2, True), (1, 3, not again))


@pytest.mark.parametrize(
    ("failed", "nodes", "rounds"),
    [
        ([[0, 1]], 2, []),
        ([[0, 1]], 3, [[[0, 2]], [[1, 2]]]),
        ([[0, 1]], 8, [[[0, 2], [1, 3]]]),
        ([[2, 3], [4, 5]], 8, [[[2, 0], [3, 1], [4, 6], [5, 7]]]),
        ([[0, 1], [2, 3]], 5, [[[0, 4]], [[1, 4]]]),
        ([[3]], 4, []),
        ([[0, 1, 2]], 3, []),
    ],
)
def test_a_node_is_tried_with_one_that_did_not_fail(
    failed: list[list[int]], nodes: int, rounds: list[list[list[int]]]
) -> None:
    assert _with_others(failed, nodes) == rounds


LOST = f"""
import os, sys, time
sys.path.insert(0, {str(PROGRAM.parent)!r})
import ranks

stage = ranks._stage

def lost(name, nodes, these, group, order, limit):
    if order["rank"] == 1 and name != "inside the node":
        {{}}
    return stage(name, nodes, these, group, order, limit)

ranks._stage = lost
ranks.main()
"""
"""Rank 1 is lost at the second stage, in NCCL say."""


@pytest.mark.parametrize(
    ("how", "patience", "said"),
    [
        ("os.abort()", 30, "the rank was ended by SIGABRT"),
        pytest.param(
            "time.sleep(60)", 30, "no end within 2 s: the ranks did not connect",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ranks.GRACE_S = 60; ranks.threading.Thread.join = lambda *_: time.sleep(60)",
            9, "no result within 9 s", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_what_a_rank_knew_before_it_was_lost_counts(
    how: str,
    patience: float,
    said: str,
    token: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That gloo works, and so does NCCL inside the node: neither is blamed for what came then."""
    program = tmp_path / "lost.py"
    program.write_text(LOST.format(how))
    monkeypatch.setattr(collectives, "PROGRAM", program)
    port = free_port()
    more = {"stages": "gloo", "stage_limit": 2, "patience": patience}

    async def answers() -> list[RankResult]:
        await here.ready(Deadline(60))
        return await here.reduce({**order(0, [0, 1], port, **more), "ranks": 2}, Deadline(patience))

    here = collectives.Ranks({**os.environ, TOKEN: token})
    try:
        here.start()
        told = asyncio.run(answers())
    finally:
        here.stop()
    assert all(each.ok for each in told), told
    assert told[1].stages is not None
    inside, between = told[1].stages.stages
    assert (inside.name, between.name) == ("inside the node", "between nodes 1 apart")
    assert between.error == said
    found = nccl_report([replace(each, node=rank) for rank, each in enumerate(told)])
    assert found.correct == 0
    assert found.stages[0].errors == ()
    assert (1, (0, 1), said) in found.stages[1].errors


def test_no_stage_begins_without_time_for_it(token: str) -> None:
    (answer,) = reduced([order(0, [0], free_port(), stages="gloo", patience=1)], token)
    assert answer["ok"]
    assert answer["stages"] == {"stages": [], "ok": False, "untested": "inside the node"}


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_says_so_at_its_limit(token: str) -> None:
    answers = reduced([order(0, [0, 1], free_port(), limit=3)], token)
    assert "ok" not in answers[0]
    assert answers[0]["error"] and answers[0]["late"]
