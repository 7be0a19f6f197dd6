"""Nodes that meet: links, speeds, proofs, facts, ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdoctor.preflight.nodes import agreement
from ddpdoctor.preflight.nodes.reductions import Blame, blame
from ddpdoctor.preflight.protocol import pairs, wire
from ddpdoctor.preflight.protocol.coordinator import Coordinator, listen
from ddpdoctor.preflight.protocol.facts import gather_facts
from ddpdoctor.preflight.protocol.joining import (
    CallError,
    Goal,
    Problem,
    call_once,
    join,
    spare_ports,
)
from ddpdoctor.preflight.protocol.meet import Meeting, Worker, meet_or_fail
from ddpdoctor.preflight.protocol.messages import (
    Caller,
    Facts,
    Node,
    Order,
    Report,
    unpack_facts,
)
from ddpdoctor.preflight.protocol.pairs import Listener, Target, dial_all, dial_speed
from ddpdoctor.preflight.protocol.wire import ConnectError, WireError, connect
from ddpdoctor.preflight.selftest.collectives import Ranks
from ddpdoctor.preflight.situation import NodePlace, Options, Situation, node_place
from ddpdoctor.run.records.base import as_json
from tests.conftest import LIMIT


def everybody(nodes: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(nodes) for j in range(nodes) if i != j]


# Whom to blame.


@pytest.mark.parametrize("nodes", [3, 4, 9])
def test_a_bad_column_is_a_node_that_no_node_reaches(nodes: int) -> None:
    bad = [(i, j) for i, j in everybody(nodes) if j == 1]
    assert blame(bad, everybody(nodes)) == [Blame("into", 1, tuple(sorted(bad)))]


@pytest.mark.parametrize("nodes", [3, 4, 9])
def test_a_bad_row_is_a_node_that_reaches_no_node(nodes: int) -> None:
    bad = [(i, j) for i, j in everybody(nodes) if i == 2]
    assert blame(bad, everybody(nodes)) == [Blame("out of", 2, tuple(sorted(bad)))]


def test_a_bad_row_and_column_is_a_node_cut_off() -> None:
    bad = [(i, j) for i, j in everybody(4) if 3 in (i, j)]
    assert blame(bad, everybody(4)) == [Blame("both", 3, tuple(sorted(bad)))]


def test_a_bad_cell_is_a_way_with_its_direction() -> None:
    assert blame([(0, 2)], everybody(4)) == [Blame("way", 2, ((0, 2),))]
    assert blame([(1, 0)], everybody(2)) == [Blame("way", 0, ((1, 0),))]
    both = blame([(2, 0), (0, 2)], everybody(4))
    assert both == [Blame("between", 2, ((0, 2), (2, 0)))]


def test_two_nodes_that_no_node_reaches_leave_the_third_without_blame() -> None:
    bad = [(i, j) for i, j in everybody(3) if j in (1, 2)]
    assert {(each.kind, each.node) for each in blame(bad, everybody(3))} == {
        ("into", 1),
        ("into", 2),
    }


@given(st.integers(2, 7), st.randoms(use_true_random=False))
def test_every_bad_way_is_explained_once(nodes: int, random: Any) -> None:
    ways = everybody(nodes)
    bad = {way for way in ways if random.random() < 0.4}
    told = [way for each in blame(bad, ways) for way in each.ways]
    assert sorted(told) == sorted(bad)
    for each in blame(bad, ways):
        if each.kind == "into":
            assert all((i, each.node) in bad for i in range(nodes) if i != each.node)


# Speeds.


@pytest.mark.parametrize("nodes", [2, 3, 8, 9, 64, 1024])
def test_each_node_measures_one_other_in_a_round(nodes: int) -> None:
    shifts = pairs.ring_shifts(nodes)
    assert all(0 < shift < nodes for shift in shifts)
    assert len(set(shifts)) == len(shifts)
    if nodes > pairs.ALL_PAIRS_UP_TO:
        assert len(shifts) == (nodes - 1).bit_length()
    else:
        assert len(shifts) == nodes - 1


def test_an_outlier_has_half_the_bandwidth_or_twice_the_round_trip() -> None:
    usual = pairs.Speed(rtt=1e-4, bandwidth=1e9)
    measured = dict.fromkeys(everybody(4), usual)
    assert pairs.slow_links(measured) == []
    measured[0, 1] = pairs.Speed(rtt=1e-4, bandwidth=0.4e9)
    measured[2, 1] = pairs.Speed(rtt=2e-3, bandwidth=1e9)
    # Three times as long, and still nothing that DDP would feel.
    measured[3, 1] = pairs.Speed(rtt=3e-4, bandwidth=0.6e9)
    assert pairs.slow_links(measured) == [(0, 1), (2, 1)]


def test_links_that_only_a_core_limits_are_not_compared() -> None:
    usual = pairs.Speed(rtt=1e-4, bandwidth=6e9)
    measured = {(i, j): usual for i in range(4) for j in range(4) if i != j}
    measured[0, 1] = pairs.Speed(rtt=1e-4, bandwidth=2.5e9)
    measured[2, 1] = pairs.Speed(rtt=1e-4, bandwidth=1.1e9)
    assert pairs.slow_links(measured) == [(2, 1)]


# The wire.


def test_the_proof_depends_on_the_id_the_role_and_the_nonce() -> None:
    key, challenge = wire.key_of("job7"), wire.nonce()
    answer = wire.proof(key, "node", challenge)
    assert wire.proves(answer, key, "node", challenge)
    assert not wire.proves(answer, wire.key_of("job8"), "node", challenge)
    assert not wire.proves(answer, key, "coordinator", challenge)
    assert not wire.proves(answer, key, "node", wire.nonce())
    assert not wire.proves(None, key, "node", challenge)


@given(st.binary(max_size=80))
def test_no_other_line_is_taken_for_the_greeting(line: bytes) -> None:
    assert wire.challenge_in(line) is None
    told = wire.greeting("a" * 32)
    assert wire.challenge_in(told) == "a" * 32
    assert len(told) == wire.GREETING_BYTES


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none() | st.lists(st.text())))
def test_damaged_facts_are_refused_and_do_not_break_anything(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="damaged"):
        unpack_facts(told)


FACTS = Facts(
    host="node0", rank=0, nnodes=2, nproc=8, machine="m", gloo_address="10.0.0.1", gloo_why="w",
    nccl_address="", lookup=0.1, master="node0.cluster", others=("10.0.1.1",),
    down=("ib0",), unplugged=("ib0",), networks=(("eth0", "10.0.0.0/24"), ("ib0", "")),
    interfaces=(("eth0", 1500, ("10.0.0.1",)),), pair_port=4000, reduces=True, gpus=8,
    no_nccl="", inside=("18 NVLinks", 4e11), outside=("eth0, 100 Gbit/s", 1.25e10),
    torch="2.13.0", nccl="2.27.3", driver="550.54.15", python="3.11.7", ddpdoctor="0.1.0",
    variables={"NCCL_DEBUG": "INFO"}, script="train.py", script_hash="ab", commit="cd",
    changes="", folder="/data",
)  # fmt: skip


def test_facts_survive_the_wire() -> None:
    assert unpack_facts(json.loads(json.dumps(as_json(FACTS)))) == FACTS


def test_each_version_is_told_with_the_nodes_that_have_it() -> None:
    torches = ("2.13.0", "2.4.1", "2.15.0", "2.13.0", "2.6.0", "2.7.1", "2.8.0")

    def told(count: int) -> str:
        nodes = tuple(
            Node(replace(FACTS, host=f"node{rank}", rank=rank, torch=each), "")
            for rank, each in enumerate(torches[:count])
        )
        report = Report(expected=count, nodes=nodes)
        meeting = Meeting(NodePlace(count, 0, "node0", 29500, "none"), 0, report=report)
        situation = Situation()
        came: Meeting | Exception = meeting
        situation.once.put(meet_or_fail, came)
        (finding,) = agreement.node_versions(situation).findings
        return finding.message

    assert told(3) == (
        "torch is 2.4.1 on node1 (node 1), 2.15.0 on node2 (node 2), and 2.13.0 on node0 (node 0, "
        "this one)"
    )
    assert told(7).endswith(
        "2.6.0 on node4 (node 4), 2 other versions on others, and 2.13.0 on node0 (node 0, this "
        "one), node3 (node 3)"
    )


# Dialling.


async def listening(token: bytes, index: int) -> tuple[Listener, int]:
    listener = Listener()
    port = await listener.open()
    listener.admit(index, token)
    return listener, port


def test_a_node_answers_those_of_its_own_check_alone() -> None:
    async def talk() -> list[str]:
        listener, port = await listening(b"t" * 16, 3)
        right = Target(3, "127.0.0.1", port)
        results = await dial_all([right] * 20, b"t" * 16)
        assert {result.outcome for result in results} == {"ok"}
        found = await dial_speed(right, b"t" * 16)
        assert found is not None and found.bandwidth > 1e6 and 0 < found.rtt < 1
        others = await dial_all([Target(4, "127.0.0.1", port)], b"t" * 16)
        others += await dial_all([right], b"x" * 16)
        await listener.close()
        others += await dial_all([right], b"t" * 16)
        return [result.outcome for result in others]

    assert asyncio.run(talk()) == ["other service", "other service", "refused"]


def test_whoever_dials_can_be_cancelled_at_any_moment() -> None:
    """Node 0 stops looking for itself at the endpoint when all others are done."""

    async def dial(port: int, limit: float) -> None:
        while True:
            with contextlib.suppress(ConnectError):
                await connect("127.0.0.1", port, limit)

    async def run(port: int) -> None:
        for turns in range(120):
            dialling = asyncio.ensure_future(dial(port, 3.0 * (turns % 2)))
            for _ in range(turns):
                await asyncio.sleep(0)
            dialling.cancel()
            await asyncio.wait({dialling}, timeout=10)
            assert dialling.cancelled()

    # Bound, so that it refuses: a port that is free may be another server's, or the dialling one's.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        asyncio.run(run(bound.getsockname()[1]))


# Joining.


def test_a_closed_port_is_known_by_the_side_door_that_is_open() -> None:
    """The coordinator is there, and its port refuses, as behind a firewall that rejects."""

    async def meet() -> tuple[Problem, int, list[Caller]]:
        key = wire.key_of("job7")
        # At another address of this machine than the one that is dialled.
        listening = socket.create_server(("127.0.0.2", 0))
        port = listening.getsockname()[1]
        here = Coordinator(listening, key, 2)
        await here.open()
        goal = Goal("127.0.0.1", port, key, "node1", 1)
        with pytest.raises(CallError) as caught:
            await join(goal, time.monotonic() + 20, print)
        # It told the coordinator, who need not wait any longer.
        await asyncio.sleep(0.1)
        await here.close()
        return caught.value.problem, port, here.blocked

    problem, port, blocked = asyncio.run(meet())
    assert (problem.kind, problem.address) == ("refused", "127.0.0.1")
    assert problem.spare in spare_ports(wire.key_of("job7"), port)
    assert [(each.host, each.rank, each.kind) for each in blocked] == [("node1", 1, "refused")]


def test_an_endpoint_where_nothing_listens_yet_is_waited_for() -> None:
    said: list[str] = []

    async def meet() -> str:
        key = wire.key_of("job8")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        goal = Goal("127.0.0.1", port, key, "node1", 1)
        joining = asyncio.ensure_future(join(goal, time.monotonic() + 20, said.append))
        await asyncio.sleep(0.6)
        here = Coordinator(listen(port), key, 2)
        await here.open()
        call = await joining
        await call.link.close()
        await here.close()
        return call.identity + here.identity

    identities = asyncio.run(meet())
    assert identities[: len(identities) // 2] == identities[len(identities) // 2 :]
    assert said == []


def test_a_node_does_not_wait_for_its_ranks_when_node_0_is_gone() -> None:
    async def meet() -> None:
        key = wire.key_of("job9")
        here = Coordinator(listen(0), key, 1)
        port = here._listening.getsockname()[1]
        await here.open()
        own = Ranks(os.environ)
        own.start()
        (rank,) = psutil.Process().children()
        # It never gets as far as to have torch.
        rank.suspend()
        listener = Listener()
        try:
            call = await call_once("127.0.0.1", port, key, "node1")
            situation = Situation(Options(nproc=1, nnodes=1), environ={})
            facts = gather_facts(
                situation, node_place(situation), await listener.open(), reduces=True
            )
            worker = Worker(call, node_place(situation), facts, listener, own)
            running = asyncio.ensure_future(worker.run(time.monotonic() + 3600))
            await here.gather(time.monotonic() + 30)
            question = Order("settle", needed=True, limit=3600)
            asking = asyncio.ensure_future(here.ask({0: question}, "importing torch", 3600))
            await asyncio.sleep(0.5)
            assert not running.done()
            asking.cancel()
            await here.close()
            with pytest.raises(WireError, match="closed"):
                await asyncio.wait_for(running, LIMIT)
            await call.link.close()
        finally:
            await listener.close()
            own.stop()

    asyncio.run(meet())


def test_side_doors_follow_from_the_id_and_the_port() -> None:
    spares = spare_ports(wire.key_of("job7"), 29500)
    assert spares == spare_ports(wire.key_of("job7"), 29500)
    assert len(spares) == 3 and all(32768 <= spare <= 60999 for spare in spares)
    assert not set(spares) & {
        *spare_ports(wire.key_of("job8"), 29500),
        *spare_ports(wire.key_of("job7"), 29501),
    }


# Places.


def test_slurm_fills_in_what_was_not_typed() -> None:
    slurm = {
        "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURM_NNODES": "4",
        "SLURM_STEP_NODELIST": "gpu[07-10]",
    }  # fmt: skip
    found = node_place(Situation(Options(nnodes=4), environ=slurm))
    assert (found.nnodes, found.rank, found.host, found.rdzv_id) == (4, 3, "gpu07", "9")
    assert found.name(1) == "gpu08 (node rank 1)"
    typed = Options(nnodes=4, node_rank=1, endpoint="head:1234", rdzv_id="x")
    found = node_place(Situation(typed, environ=slurm))
    assert (found.rank, found.host, found.port, found.rdzv_id) == (1, "head", 1234, "x")


@pytest.mark.parametrize(
    ("rank", "world", "local", "size"),
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
         "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ],
)  # fmt: skip
def test_mpi_with_a_process_on_each_node_says_which_node_it_is(
    rank: str, world: str, local: str, size: str
) -> None:
    environ = {rank: "2", world: "3", local: "0", size: "1", "MASTER_ADDR": "head"}
    found = node_place(Situation(Options(nnodes=3), environ=environ))
    assert (found.nnodes, found.rank, found.host) == (3, 2, "head")
    several = {**environ, size: "8", world: "24"}
    assert node_place(Situation(Options(nnodes=3), environ=several)).rank is None
    found = node_place(Situation(Options(), environ=several))
    assert (found.nnodes, found.rank, found.host) == (3, None, "head")
    assert node_place(Situation(Options(), environ={**several, world: "8"})).nnodes == 1
