"""Whether the nodes' clocks agree."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, finding, judged
from ddpdoctor.preflight.nodes.judging import across_nodes, of_all
from ddpdoctor.preflight.protocol.meet import Meeting

WARN_S = 1.0
FAIL_S = 10.0


@across_nodes("clocks", "DDP052")
def clocks(meeting: Meeting) -> Outcome:
    """The clocks of the nodes differ.

    What it finds
        A node whose wall clock differs from the others' by more than 1 s (warning) or more than 10
        s (error), after subtracting the error of the measurement, which is half a round trip.

    Why it is bad
        torchrun's rendezvous uses the clock to decide which nodes are alive. A node that is 20 s
        behind is considered dead: the others continue without it, and a job of two nodes trains on
        one, with exit status 0. Logs of the nodes cannot be compared either.

    How to fix it
        Run a time service on every node: `sudo timedatectl set-ntp true`, or
        `sudo chronyc makestep` where chrony runs.

    Example
        Wrong: a machine that was suspended, without NTP.
        Right: chrony or systemd-timesyncd on every node.

    When it stays silent
        If all clocks are within 1 s.
    """
    # How far a node's clock is ahead of the coordinator's.
    ahead = [-node.offset for node in meeting.nodes]
    spread = max(ahead) - min(ahead)
    detail = f"{of_all(meeting)}, at most {spread:.3f} s apart"
    findings = list(_findings(meeting, ahead))
    median = statistics.median(ahead)
    far = [
        node.facts.host
        for node, own in zip(meeting.nodes, ahead, strict=True)
        if len(ahead) > 2 and _severity(abs(own - median) - node.uncertainty) is Severity.ERROR
    ]
    return judged(detail, findings, exclude=far)


def _findings(meeting: Meeting, ahead: list[float]) -> Iterator[Finding]:
    fix = "Let a time service run on every node (chrony, systemd-timesyncd)."
    paste = "sudo timedatectl set-ntp true"
    if len(ahead) == 2:
        difference = abs(ahead[0] - ahead[1])
        unsure = sum(node.uncertainty for node in meeting.nodes)
        first, second = (0, 1) if ahead[0] > ahead[1] else (1, 0)
        severity = _severity(difference - unsure)
        if severity is not None:
            yield finding(
                severity,
                f"the clock of {meeting.name(second)} is {difference:.1f} s behind that of "
                f"{meeting.name(first)}",
                evidence=("which of the two is wrong is not visible from here",),
                fix=fix,
                paste=paste,
                about="clocks",
            )
        return
    median = statistics.median(ahead)
    for index, node in enumerate(meeting.nodes):
        away = ahead[index] - median
        severity = _severity(abs(away) - node.uncertainty)
        if severity is not None:
            side = "ahead of" if away > 0 else "behind"
            yield finding(
                severity,
                f"the clock of {meeting.name(index)} is {abs(away):.1f} s {side} the others",
                fix=fix,
                paste=paste,
                about=f"clock {index}",
            )


def _severity(seconds: float) -> Severity | None:
    if seconds > FAIL_S:
        return Severity.ERROR
    return Severity.WARNING if seconds > WARN_S else None
