"""What the checks of the other machines found, and which nodes a job has to do without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, judged, note
from ddpdoctor.preflight.nodes.judging import across_nodes
from ddpdoctor.preflight.protocol.meet import Meeting, meeting_of
from ddpdoctor.preflight.protocol.report import (
    Verdict,
)
from ddpdoctor.preflight.situation import Situation
from ddpdoctor.preflight.words import counted

ERROR = Severity.ERROR.label


@across_nodes("verdicts", "DDP062")
def verdicts(meeting: Meeting) -> Outcome:
    """What the checks of the other machines found, shown on every node.

    What it finds
        Nothing itself: each node sends the warnings and errors of the checks of its machine
        (DDP001 to DDP026) to node 0, which sends them to all. Each is shown here as information,
        with its node.

    Why it is bad
        A full disk on node 37 ends the job of all nodes, and is printed on node 37 alone.

    How to fix it
        Follow the finding: its line to paste is on the node that has it. Or leave the node out: the
        last line names the nodes that a job has to do without, as `--exclude` of Slurm takes them.

    Example
        Wrong: to read 64 outputs for the one that says FAIL.
        Right: to read the output of node 0.

    When it stays silent
        If the other machines are healthy. What was found changes the exit status only on the node
        that has the fault.
    """
    faulty = [
        index
        for index, verdict in enumerate(meeting.report.verdicts)
        if any(said.severity == ERROR for said in verdict.findings)
    ]
    well = sum(not each.findings for each in meeting.report.verdicts)
    detail = f"{counted(well, 'node')} of {meeting.expected} without a fault in their own checks"
    late = [i for i, each in enumerate(meeting.report.verdicts) if each.untested]
    if late:
        detail += f"; not all was tested on {meeting.hosts(late)}"
    return judged(detail, _findings(meeting), exclude=[meeting.host(index) for index in faulty])


def _findings(meeting: Meeting) -> Iterator[Finding]:
    for index, verdict in enumerate(meeting.report.verdicts):
        if index == meeting.own:
            continue
        for said in verdict.findings:
            yield note(
                f"{meeting.name(index)}: {said.message}",
                evidence=(f"its check {said.check} ({said.code}): {said.severity}",),
                about=f"{index} {said.code} {said.message}",
            )


def excluded(outcomes: Iterable[Outcome]) -> list[str]:
    """The nodes that a job has to do without, by host name, each once."""
    return list(dict.fromkeys(name for outcome in outcomes for name in outcome.exclude))


def records(situation: Situation, outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Every node that came, with the verdict on it, in the words of JSON; empty if none met."""
    if not any(outcome.check == "verdicts" for outcome in outcomes):
        return []
    meeting = meeting_of(situation)
    without = set(excluded(outcomes))
    none = Verdict()
    found = []
    for index, node in enumerate(meeting.nodes):
        known = meeting.report.verdicts
        verdict = known[index] if index < len(known) else none
        host = node.facts.host
        found.append(
            {
                "host": host,
                "node_rank": node.facts.rank,
                "address": node.address,
                "exclude": host in without,
                "lost": node.lost or None,
                "untested": list(verdict.untested),
                "findings": [
                    {
                        "check": said.check,
                        "code": said.code,
                        "severity": said.severity,
                        "message": said.message,
                    }
                    for said in verdict.findings
                ],
            }
        )
    return found
