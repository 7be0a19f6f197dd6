"""The lines to type of the checks across nodes, with facts of a peer that means no good.

Such facts are refused where they are unpacked; here they are put in behind that, and each line is
read by `shlex` and run by a shell, in a folder of its own, that finds no program but `touch`.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import CHECKS
from ddpdoctor.preflight.machine.own_address import ArpAnswer, arp_answers
from ddpdoctor.preflight.nodes.attendance import own_problem, verdict_records
from ddpdoctor.preflight.protocol.joining import Problem
from ddpdoctor.preflight.protocol.meet import Meeting, meet_or_fail
from ddpdoctor.preflight.protocol.messages import (
    Caller,
    Facts,
    Folder,
    Node,
    RankResult,
    Reduction,
    Report,
    Said,
    Speeds,
    Verdict,
)
from ddpdoctor.preflight.protocol.pairs import Dialled
from ddpdoctor.preflight.situation import NodePlace, Options, Situation
from ddpdoctor.render.check_screen import View, screen
from tests.conftest import LIMIT
from tests.preflight.test_check_meeting import FACTS

HOSTILE = (
    "eth0; touch pwned #",
    "$(touch pwned)",
    "`touch pwned`",
    "' ; touch pwned; '",
    '" ; touch pwned; "',
    "a\ntouch pwned\n",
    "x && touch pwned",
    "| touch pwned",
    "\x1b]0;owned\x07\x9b2J",
)


def facts(rank: int, text: str) -> Facts:
    """A node's facts in which every text is hostile."""
    return replace(
        FACTS, rank=rank, nproc=8 + rank, host=text, gloo_address=text, gloo_why=text, master=text,
        torch=text, nccl=text, driver=text, python=text, ddpdoctor=text, script=text,
        variables={f"NCCL_{text}": text}, script_hash=text, commit=text, changes=text, folder=text,
        interfaces=((text, 1400, (text, f"10.0.0.{rank + 1}")),), networks=((text, text),),
    )  # fmt: skip


BAD = ("dropped", "refused", "silent", "forth", "back", "lossy")


def hostile_meeting(text: str, outcome: str) -> Meeting:
    nodes = (
        Node(replace(FACTS, rank=0), "10.0.0.1"),
        Node(facts(1, text), "10.0.0.2", offset=99.0),
        Node(facts(2, text), text, lost=text, why=text),
    )
    ways = [(i, j) for i in range(3) for j in range(3) if i != j]
    report = Report(
        expected=4,
        nodes=nodes,
        rejected=(Caller(text, text),),
        surplus=(Caller(text, text),),
        blocked=(Caller(text, text, 3, "dropped"),),
        bad=tuple((i, j, kind, Dialled(outcome, 1.0, text)) for i, j in ways[:3]
                  for kind in ("route", "gloo")),
        speed=Speeds(6, 1e-4, 1e9, 1e6, ((0, 1, 1.0, 1e6),), ((2, 0, 100, 9),), tuple(ways)),
        folder=Folder((0, 1), "", (), ("a", "b")) if outcome == "silent" else Folder((1,), text),
        reduction=Reduction(world=3, wrong=(RankResult(1, 1, False, text),)),
        verdicts=(Verdict(), Verdict((Said("limits", "DDP006", "error", text),)), Verdict()),
    )  # fmt: skip
    return Meeting(NodePlace(4, 0, text, 29500, text), 0, report=report)


def found(meeting: Meeting, asked: tuple[ArpAnswer, ...]) -> Iterator[Finding]:
    """What all checks across nodes say of a meeting, and what a node says that did not come.

    Args:
        meeting: The meeting.
        asked: What came of asking for this machine's addresses.
    """
    for problem in (None, *(Problem(kind, "10.0.0.9", "x") for kind in (
        "unresolved", "refused", "dropped", "no host", "no route", "prohibited", "unreachable",
        "silent", "other service", "other id", "late", "full", "gone",
    ))):  # fmt: skip
        situation = Situation(Options(nproc=1, nnodes=4, node_rank=0), environ={})
        situation.once.put(arp_answers, asked)
        if problem is not None:
            yield own_problem(meeting, problem, situation)
            continue
        came: Meeting | Exception = meeting
        situation.once.put(meet_or_fail, came)
        for check in CHECKS.values():
            if check.scope == "nodes":
                outcome = check.run(situation)
                yield from outcome.findings
                records = verdict_records(situation, [replace(outcome, check="verdicts")])
                rows = screen([outcome], View(meeting.host(0), 1, 4, met=True, verbose=True))
                rows += screen([outcome], View(meeting.host(0), 1, 4, nodes=records, width=80))
                assert "\x1b" not in rows and "\x07" not in rows and "\x9b" not in rows


@pytest.mark.parametrize("outcome", BAD)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_line_to_type_does_what_a_peer_wants(tmp_path: Path, text: str, outcome: str) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    touch = shutil.which("touch")
    assert touch is not None
    (tools / "touch").symlink_to(touch)
    work = tmp_path / "work"
    work.mkdir()
    asked = (ArpAnswer(text, text, text),) if outcome == "dropped" else ()
    findings = list(found(hostile_meeting(text, outcome), asked))
    lines = [each.paste for each in findings if each.paste]
    assert len(lines) > 15
    assert all(each.paste or each.severity is Severity.INFO for each in findings)
    for line in lines:
        shlex.split(line)
    # All of them in one shell: none of the programs that they name is there.
    subprocess.run(
        ["/bin/bash", "-c", "\n".join(lines)],
        cwd=work,
        env={"PATH": str(tools)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT,
    )
    assert list(work.iterdir()) == [], lines


def test_the_sandbox_notices_a_line_that_is_not_quoted(tmp_path: Path) -> None:
    subprocess.run(["/bin/bash", "-c", f"ethtool {HOSTILE[0]}"], cwd=tmp_path, capture_output=True)
    assert [each.name for each in tmp_path.iterdir()] == ["pwned"]
