"""What ``ddpdoctor check`` prints: the verdict, one block for each cause, and what passed."""

from __future__ import annotations

import pytest

import ddpdoctor.preflight  # noqa: F401 (registers the checks)
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.relations import UNREDUCED
from ddpdoctor.preflight.check import CHECKS, Outcome, Status, causes_only, judged, passed, skipped
from ddpdoctor.render.check_screen import View, screen

LOSS = frozenset({"lost packets 0 1"})


def found(
    check: str, about: str, *nodes: str, severity: Severity = Severity.ERROR, **more: object
) -> Outcome:
    """The outcome of a check with one finding."""
    code = CHECKS[check].code
    finding = Finding(
        code, severity, f"{check}: {about}", about=about, nodes=nodes, fix="Repair it.",
        paste="true", **more,  # type: ignore[arg-type]
    )  # fmt: skip
    return named(check, judged("0 of 2", [finding]))


def named(check: str, outcome: Outcome) -> Outcome:
    return Outcome(outcome.status, outcome.detail, outcome.findings, check)


WELL = [named("versions", passed("torch 2.13.0")), named("gpu-count", skipped("no GPU"))]

HOLE = found("packet-size", "way (0, 1)", "node1", subjects=LOSS)
BACK = found("links", "way (1, 0)", "node0", subjects=LOSS)
FIREWALL = found("links", "way (1, 0)", "node0")
RANKS = found("gloo-nodes", "reduction", subjects=frozenset({UNREDUCED}))
WRONG_SUM = found("gloo-nodes", "reduction", "node1")
LOSSY = found("link-speed", "lossy", "node1", severity=Severity.WARNING, subjects=LOSS)
SLOW = found(
    "link-speed", "slow", "node1", severity=Severity.WARNING,
    subjects=frozenset({"slow lost packets 0 1"}),
)  # fmt: skip
TORCH = found("node-versions", "torch", "node1")
NCCL = found("node-versions", "NCCL", "node1")
NO_IMPORT = found("gloo-nodes", "import", "node1")
NNODES = found("same-job", "nnodes", "node1")
SURPLUS = found("nodes", "surplus 10.0.0.3", "node2")
CHANGES = found("same-code", "changes", "node1", severity=Severity.WARNING)
FILE = found("same-code", "file", "node1")


@pytest.mark.parametrize(
    ("cause", "effects"),
    [
        (HOLE, [BACK, RANKS]),
        (FIREWALL, [RANKS]),
        (LOSSY, [SLOW, RANKS]),
        (NNODES, [SURPLUS]),
        (TORCH, [NO_IMPORT]),
        (found("versions", "torch"), [TORCH, NO_IMPORT]),
        (TORCH, [NCCL, RANKS]),
        (CHANGES, [FILE]),
    ],
)
def test_one_cause_is_one_finding_which_names_its_consequences(
    cause: Outcome, effects: list[Outcome]
) -> None:
    outcomes = causes_only([*effects, cause])
    (left,) = [finding for outcome in outcomes for finding in outcome.findings]
    (first,) = cause.findings
    assert (left.code, left.message) == (first.code, first.message)
    assert left.evidence == tuple(
        f"also seen as {each.findings[0].code}: {each.findings[0].message}" for each in effects
    )
    worst = max(each.findings[0].severity for each in (cause, *effects))
    assert left.severity == worst
    assert [each.status for each in outcomes[:-1]] == [each.status for each in effects]
    assert outcomes[-1].status is (Status.FAIL if worst is Severity.ERROR else Status.WARN)


@pytest.mark.parametrize(
    "both",
    [
        (HOLE, FIREWALL),  # A closed port loses small packets, too.
        (HOLE, WRONG_SUM),
        (HOLE, found("links", "way (2, 1)", "node1", subjects=frozenset({"lost packets 1 2"}))),
        (SLOW, RANKS),
        (found("clocks", "clocks", "node1"), RANKS),
        (CHANGES, found("same-code", "lacking", "node2")),
        (FIREWALL, NO_IMPORT),
        (TORCH, WRONG_SUM),
    ],
)
def test_two_faults_stay_two(both: tuple[Outcome, Outcome]) -> None:
    assert causes_only(both) == list(both)


def test_the_first_node_shows_the_cluster_and_others_what_they_have_to_do() -> None:
    outcomes = [*WELL, HOLE, found("clocks", "clock 2", "node2"), FIREWALL]
    everything = screen(outcomes, View("node0", 1, 3, 0, met=True))
    assert everything.startswith("not ready: 3 nodes, seen from node0: 3 errors (0.0 s)\n")
    assert everything.count("\nerror DDP05") == 3
    assert "\nlinks     fail    packet-size: 0 of 2\n" in everything
    there = screen(outcomes, View("node2", 1, 3, 2, met=True, first="node0"))
    assert there.splitlines() == [
        "not ready: node2 (node 2 of 3): 3 errors, 1 to fix here; see node0 (0.0 s)",
        "",
        "error DDP052: clocks: clock 2",
        "  fix:      Repair it.",
        "  paste:    true",
    ]
    nothing = screen(outcomes, View("node3", 1, 4, 3, met=True, first="node0"))
    assert nothing == (
        "not ready: node3 (node 3 of 4): 3 errors, none to fix here; see node0 (0.0 s)\n"
    )


def test_a_node_that_met_nobody_says_all_it_knows() -> None:
    outcomes = [*WELL, found("nodes", "own")]
    text = screen(outcomes, View("node1", 1, 2, 1))
    assert text.startswith("not ready: node1 (node 1 of 2): 1 error (0.0 s)\n\nerror DDP050: ")


def test_many_nodes_with_several_problems_are_a_table() -> None:
    said = {"code": "DDP006", "severity": "warning"}
    nodes = [{"host": f"node{each}", "findings": [said]} for each in (4, 5, 6, 7, 9)]
    outcomes = [*WELL, HOLE, found("clocks", "clock 9", "node9")]
    view = View("node0", 1, 16, 0, met=True, nodes=nodes)
    table = screen(outcomes, view).split("\n\n")[1]
    assert table.splitlines() == [
        "                         DDP006   DDP052   DDP054",
        "node1                                      error",
        "node9                    warning  error",
        "node4, node5 and 2 more  warning",
    ]
    few = screen(outcomes, View("node0", 1, 16, 0, met=True))
    assert few.split("\n\n")[1].startswith("error DDP052")


@pytest.mark.parametrize("rank", [None, 12345])
def test_eighty_columns(rank: int | None) -> None:
    long = found("links", "a " * 100, "node0")
    late = named("memory", Outcome(Status.COULD_NOT_RUN, "no answer " * 30))
    outcomes = [named("versions", passed("x " * 100)), late, long]
    host = "a-host-with-a-rather-long-name"
    nodes = [
        {"host": f"{host}-{each}", "findings": [{"code": f"DDP0{each}", "severity": "error"}]}
        for each in range(10, 20)
    ]
    view = View(host, 8, 20000, rank, met=True, nodes=nodes, width=80)
    for text in (
        screen(outcomes, view),
        screen(outcomes, View(host, 8, 20000, rank, met=True, first=host, width=80)),
    ):
        assert max(map(len, text.splitlines())) <= 80
        assert "no answer no answer" in text


def test_what_did_not_reduce_is_not_called_ready() -> None:
    assert screen(WELL, View("vm", 2)).startswith("no fault found: vm, 2 ranks (0.0 s)\n")
    reduced = [*WELL, named("collectives", passed("2 of 2 ranks"))]
    assert screen(reduced, View("vm", 2)).startswith("ready: vm, 2 ranks (0.0 s)\n")
    late = [*reduced, named("memory", Outcome(Status.COULD_NOT_RUN, "no answer"))]
    text = screen(late, View("vm", 2))
    assert text.startswith("not all tested: vm, 2 ranks (0.0 s)\n")
    assert "\nmemory             unknown no answer\n" in text
    away = [*WELL, named("links", Outcome(Status.COULD_NOT_RUN, "no answer"))]
    text = screen(away, View("node1", 2, 2, 1, met=True, first="node0"))
    assert text == "not all tested: node1 (node 1 of 2): see node0 (0.0 s)\n"
    sick = Outcome(Status.PASS, "node1 found faults", (), "verdicts", exclude=("node1",))
    assert screen([*reduced, sick], View("vm", 2, 2, 0, met=True)).startswith("not ready: 2 nodes")
