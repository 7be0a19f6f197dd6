"""Whether all nodes have the same software, the same settings of NCCL and the same code."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, failure, finding, judged, skipped, typed, warning
from ddpdoctor.preflight.nodes.judging import across_nodes, grouped, of_all, usual_of
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.protocol.report import (
    Facts,
)

DRIVER = "nvidia-smi --query-gpu=driver_version --format=csv"

SAID_VERSIONS = 3
"""Of more than these, besides the usual one, only the number is shown."""

OF_EACH_NODE = (
    "_IFNAME",
    "_IB_HCA",
    "_DEBUG",
    "_DEBUG_FILE",
    "_TOPO_FILE",
    "_HOSTID",
    "_IB_GID_INDEX",
)
"""Endings of variables that rightly differ between nodes: names of devices and files."""


@across_nodes("node-versions", "DDP057")
def versions(meeting: Meeting) -> Outcome:
    """The nodes have different versions of torch, NCCL, the driver or Python, or NCCL settings.

    What it finds
        Different torch or NCCL versions (errors; a warning if torch differs only in its last
        number), different NVIDIA drivers or Python minor versions (warnings), and NCCL variables
        that are not the same on every node (warning), except those that name devices or files.

    Why it is bad
        Different NCCL versions fail with "unhandled system error" or hang. Different torch versions
        may split gradients into different buckets: wrong sums or a hang. An NCCL algorithm that is
        set on one node only is a hang.

    How to fix it
        Use the same environment on every node: one container image or one lock file.

    Example
        Wrong: `pip install torch` on each node, a month apart.
        Right: `pip install -r requirements.lock` on each node.

    When it stays silent
        If the versions are equal, and where a node does not have the component (no GPU, no driver).
    """
    detail = f"{of_all(meeting)}, torch {_first(meeting, lambda facts: facts.torch)}"
    return judged(detail, [*_software(meeting), *_settings(meeting)])


def _first(meeting: Meeting, of: Callable[[Facts], str]) -> str:
    return next(filter(None, (of(node.facts) for node in meeting.nodes)), "not installed")


def _software(meeting: Meeting) -> Iterator[Finding]:
    torch = grouped(meeting, lambda facts: facts.torch or "none")
    if len(torch) > 1:
        minor = {_minor(version) for version in torch}
        severity = Severity.ERROR if len(minor) > 1 else Severity.WARNING
        usual = usual_of(torch)
        wanted = usual if usual != "none" else next(each for each in torch if each != "none")
        # Without the label of its build (+cu126), which an index need not have.
        paste = typed("pip install torch=={}", wanted.partition("+")[0])
        yield _differ(meeting, "torch", torch, severity, paste)
    nccl = grouped(meeting, lambda facts: facts.nccl)
    if len(nccl) > 1:
        yield _differ(meeting, "NCCL", nccl, Severity.ERROR, "pip list | grep -i nccl")
    driver = grouped(meeting, lambda facts: facts.driver)
    if len(driver) > 1:
        yield _differ(meeting, "the NVIDIA driver", driver, Severity.WARNING, DRIVER)
    python = grouped(meeting, lambda facts: _minor(facts.python))
    if len(python) > 1:
        paste = typed("python{} -m venv venv", usual_of(python))
        yield _differ(meeting, "Python", python, Severity.WARNING, paste)
    own = grouped(meeting, lambda facts: facts.ddpdoctor)
    if len(own) > 1:
        paste = typed("pip install ddpdoctor=={}", usual_of(own))
        yield _differ(meeting, "ddpdoctor", own, Severity.WARNING, paste)


def _differ(
    meeting: Meeting, what: str, groups: dict[str, list[int]], severity: Severity, paste: str
) -> Finding:
    usual = usual_of(groups)
    odd = [version for version in groups if version != usual]
    each = [f"{version} on {meeting.hosts(groups[version])}" for version in odd[:SAID_VERSIONS]]
    if len(odd) > SAID_VERSIONS:
        each.append(f"{len(odd) - SAID_VERSIONS} other versions on others")
    return finding(
        severity,
        f"{what} is {', '.join(each)}, and {usual} on {meeting.hosts(groups[usual])}",
        fix="Use the same environment on every node.",
        paste=paste,
        about=what,
    )


def _settings(meeting: Meeting) -> Iterator[Finding]:
    names = sorted(
        {
            name
            for node in meeting.nodes
            for name in node.facts.variables
            if name.startswith("NCCL_") and not name.endswith(OF_EACH_NODE)
        }
    )
    for name in names:
        groups = grouped(meeting, lambda facts, name=name: facts.variables.get(name, "not set"))  # type: ignore[misc]
        if len(groups) < 2:
            continue
        usual = usual_of(groups)
        yield warning(
            f"{name} is not the same on all nodes",
            evidence=tuple(
                f"{value}: {meeting.hosts(indices)}" for value, indices in sorted(groups.items())
            )[:8],
            fix="Set it alike on every node, or on none.",
            paste=typed("export {}={}", name, usual)
            if usual != "not set"
            else typed("unset {}", name),
            about=name,
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@across_nodes("same-code", "DDP058")
def same_code(meeting: Meeting) -> Outcome:
    """The nodes do not have the same script, commit or uncommitted changes.

    What it finds
        If a script is given (`ddpdoctor check ... -- train.py`): a script that differs between
        nodes or is missing on one, a different commit of its git repository, or different
        uncommitted changes in tracked files.

    Why it is bad
        Ranks that run different code call different collectives. The job hangs, or it trains and
        gives a wrong model.

    How to fix it
        Check out the same commit on every node, or put the code in a directory that all nodes
        share.

    Example
        Wrong: `git pull` on node 0 only.
        Right: `git checkout 3f2a91c` on every node.

    When it stays silent
        If everything is equal, or no script is given. Packages other than torch and NCCL are not
        compared.
    """
    if not any(node.facts.script for node in meeting.nodes):
        return skipped("no script was named: ddpdoctor check ... -- train.py")
    first = next(node.facts for node in meeting.nodes if node.facts.script)
    commit = f", commit {first.commit[:9]}" if first.commit else ", no git repository"
    return judged(f"{of_all(meeting)}, {first.script}{commit}", _code(meeting))


def _code(meeting: Meeting) -> Iterator[Finding]:
    script = next(node.facts.script for node in meeting.nodes if node.facts.script)
    lacking = [i for i, node in enumerate(meeting.nodes) if not node.facts.script_hash]
    if lacking and len(lacking) < len(meeting.nodes):
        yield failure(
            f"{script} cannot be read on {meeting.hosts(lacking)}",
            fix="Put it there, name the same script on every node, or use a shared folder. There:",
            paste=typed("ls -l {}", script),
            about="lacking",
        )
    hashes = grouped(meeting, lambda facts: facts.script_hash)
    if len(hashes) > 1:
        yield _code_differs(
            meeting, f"{script} is not the same file", hashes, typed("sha256sum {}", script)
        )
    commits = grouped(meeting, lambda facts: facts.commit[:9])
    if len(commits) > 1:
        usual = usual_of(commits)
        yield _code_differs(
            meeting, f"the commit of {script} differs", commits, typed("git checkout {}", usual)
        )
        return
    changes = grouped(meeting, lambda facts: (facts.changes or "none") if facts.commit else "")
    if len(changes) > 1:
        yield warning(
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


def _code_differs(meeting: Meeting, what: str, groups: dict[str, list[int]], paste: str) -> Finding:
    return failure(
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
