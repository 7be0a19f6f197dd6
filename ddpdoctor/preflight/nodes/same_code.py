"""Whether all nodes would train with the same code."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged, skipped
from ddpdoctor.preflight.nodes.judging import LIMIT, grouped, judge, of_all, usual_of
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.situation import Situation

CODE = "DDP058"


@check("same-code", CODE, scope="nodes", limit=LIMIT)
def same_code(situation: Situation) -> Outcome:
    """The nodes do not have the same script, commit or changes.

    What it finds
        Where a script is named (`ddpdoctor check ... -- train.py`): a script that is not the same
        file on all nodes, or missing on one; another commit of its git repository; other
        uncommitted changes in tracked files.

    Why it is bad
        Ranks with other code call other collectives: a hang at best, a model that learned something
        else at worst.

    How to fix it
        Bring every node to the same commit, or put the code into a folder that all nodes share.

    Example
        Wrong: `git pull` on node 0 alone.
        Right: `git checkout 3f2a91c` on every node.

    When it stays silent
        When all of it is equal, or no script was named. Installed packages beside torch and NCCL
        are not compared.

    Since
        0.1.0
    """
    return judge(situation, _judge)


def _judge(meeting: Meeting) -> Outcome:
    if not any(node.facts.script for node in meeting.nodes):
        return skipped("no script was named: ddpdoctor check ... -- train.py")
    first = next(node.facts for node in meeting.nodes if node.facts.script)
    commit = f", commit {first.commit[:9]}" if first.commit else ", no git repository"
    return judged(f"{of_all(meeting)}, {first.script}{commit}", _findings(meeting))


def _findings(meeting: Meeting) -> Iterator[Finding]:
    script = next(node.facts.script for node in meeting.nodes if node.facts.script)
    lacking = [i for i, node in enumerate(meeting.nodes) if not node.facts.script_hash]
    if lacking and len(lacking) < len(meeting.nodes):
        yield Finding(
            CODE,
            Severity.ERROR,
            f"{script} cannot be read on {meeting.hosts(lacking)}",
            fix="Put it there, name the same script on every node, or use a shared folder. There:",
            paste=f"ls -l {shlex.quote(script)}",
            about="lacking",
        )
    hashes = grouped(meeting, lambda facts: facts.script_hash)
    if len(hashes) > 1:
        yield _differ(
            meeting, f"{script} is not the same file", hashes, f"sha256sum {shlex.quote(script)}"
        )
    commits = grouped(meeting, lambda facts: facts.commit[:9])
    if len(commits) > 1:
        usual = usual_of(commits)
        yield _differ(meeting, f"the commit of {script} differs", commits, f"git checkout {usual}")
        return
    changes = grouped(meeting, lambda facts: (facts.changes or "none") if facts.commit else "")
    if len(changes) > 1:
        yield Finding(
            CODE,
            Severity.WARNING,
            f"the uncommitted changes are not the same: {meeting.hosts(_odd(changes))} differ"
            f"{'s' if len(_odd(changes)) == 1 else ''} from the others",
            evidence=tuple(
                f"{'no changes' if value == 'none' else f'changes {value[:9]}'}: "
                f"{meeting.hosts(indices)}"
                for value, indices in changes.items()
            )[:8],
            fix="Commit them and bring every node to that commit.",
            paste="git diff HEAD --stat",
            about="changes",
        )


def _differ(meeting: Meeting, what: str, groups: dict[str, list[int]], paste: str) -> Finding:
    return Finding(
        CODE,
        Severity.ERROR,
        f"{what}: {meeting.hosts(_odd(groups))} differ"
        f"{'s' if len(_odd(groups)) == 1 else ''} from {meeting.hosts(groups[usual_of(groups)])}",
        evidence=tuple(f"{value}: {meeting.hosts(indices)}" for value, indices in groups.items())[
            :8
        ],
        fix="Bring every node to the same code.",
        paste=paste,
        about=what,
    )


def _odd(groups: dict[str, list[int]]) -> list[int]:
    usual = usual_of(groups)
    return sorted(i for value, indices in groups.items() if value != usual for i in indices)
