"""Which end of a network is at fault where gloo or NCCL is not reached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpdoctor.preflight.nodes.ends import End, end_of, faults, networks
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.protocol.messages import Node, Report
from ddpdoctor.preflight.protocol.pairs import Dialled
from ddpdoctor.preflight.situation import NodePlace
from tests.preflight.test_check_meeting import FACTS


def node(index: int, second: str = "10.88.0.{}", **more: Any) -> Node:
    """A node with eth0 for the rendezvous, and ib0 that NCCL takes."""
    second = second.format(index + 1)
    facts = replace(
        FACTS, host=f"node{index}", rank=index, machine=str(index), others=(), down=(),
        unplugged=(), gloo_address=f"10.77.0.{index + 1}", nccl_address=second,
        interfaces=(("eth0", 1500, (f"10.77.0.{index + 1}",)), ("ib0", 1500, (second,))),
        networks=(("eth0", "10.77.0.0/24"), ("ib0", "10.88.0.0/24")),
    )  # fmt: skip
    return Node(replace(facts, **more), f"10.77.0.{index + 1}")


def meeting(*nodes: Node, bad: list[tuple[int, int]]) -> Meeting:
    """A meeting in which these connections fail where NCCL listens."""
    results = tuple(
        (i, j, "nccl", Dialled("no host", 3.0, address=nodes[j].facts.nccl_address)) for i, j in bad
    )
    report = Report(expected=len(nodes), nodes=nodes, bad=results)
    return Meeting(NodePlace(len(nodes), 0, "node0", 29500, "none"), report=report)


GONE = node(1, nccl_address="10.77.0.2", interfaces=(("eth0", 1500, ("10.77.0.2",)),))


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({"down": ("ib0",)}, "down"),
        ({"networks": (("eth0", "10.77.0.0/24"), ("ibp1", "10.88.0.0/24")), "down": ("ibp1",)},
         "down"),
        ({"networks": (("eth0", "10.77.0.0/24"), ("ib0", ""))}, "bare"),
        ({"networks": (("eth0", "10.77.0.0/24"), ("ib0", "fd00::/64"))}, "bare"),
        ({"networks": (("eth0", "10.77.0.0/24"), ("ib0", "10.89.0.0/24"))}, "apart"),
        ({"networks": (("eth0", "10.77.0.0/24"), ("ib0", "10.88.0.9/32"))}, "up"),
        ({"networks": (("eth0", "10.77.0.0/24"),)}, "none"),
        ({}, "up"),
    ],
)  # fmt: skip
def test_the_end_by_which_an_address_would_be_reached(changed: dict[str, Any], state: str) -> None:
    other = Node(replace(GONE.facts, **changed), GONE.address)
    met = meeting(node(0), other, bad=[(1, 0)])
    assert end_of(met, 1, "10.88.0.1", "ib0").state == state
    (network,) = networks(met)
    (fault,) = faults(met, network)
    # Where its own end is no worse than the other one, the address that is dialled is in question.
    assert fault.node == (0 if state in ("up", "apart") else 1)


def test_of_three_nodes_the_dead_end_is_found() -> None:
    bad = [(0, 1), (1, 0), (1, 2), (2, 1)]
    met = meeting(node(0), node(1), node(2), bad=bad)
    (network,) = networks(met)
    (fault,) = faults(met, network)
    assert (fault.kind, fault.node, fault.blame.kind) == ("link", 1, "both")
    assert fault.end == End("ib0", "up", "10.88.0.0/24")


def test_of_two_nodes_none_is() -> None:
    met = meeting(node(0), node(1), bad=[(0, 1), (1, 0)])
    (network,) = networks(met)
    (fault,) = faults(met, network)
    assert (fault.kind, fault.blame.kind) == ("link", "between")


def test_the_same_address_on_both_is_the_choice_of_each() -> None:
    met = meeting(*(node(index, "172.17.0.1") for index in (0, 1)), bad=[(0, 1), (1, 0)])
    (network,) = networks(met)
    assert [(fault.kind, fault.node) for fault in faults(met, network)] == [
        ("choice", 0),
        ("choice", 1),
    ]
