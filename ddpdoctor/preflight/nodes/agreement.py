"""Whether all nodes agree: options, clocks, software, code and checkpoint folder."""

from __future__ import annotations

import errno
import os
import statistics
from collections.abc import Collection, Iterator
from dataclasses import replace

from ddpdoctor.core import relations
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import count
from ddpdoctor.diagnose.launch.node_differences import (
    CLOCK_FAIL_S,
    CLOCK_WARN_S,
    OF_EACH_NODE,
    minor,
)
from ddpdoctor.preflight.check import (
    Outcome,
    failure,
    finding,
    judged,
    note,
    skipped,
    typed,
    warning,
)
from ddpdoctor.preflight.command_lines import check_line
from ddpdoctor.preflight.nodes.reductions import across_nodes, grouped, of_all, usual_of
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.protocol.messages import Folder

# -- options


@across_nodes("same-job", "DDP051")
def agreement(meeting: Meeting) -> Outcome:
    """The nodes were started with different options.

    What it finds
        Two nodes with the same node rank, or nodes with different `--nnodes` (errors). Nodes with
        different numbers of ranks (a warning: it works, but is rarely intended).

    Why it is bad
        torchrun mistakes the second node with a rank for the first one, or waits for a node that
        never comes. No node prints anything.

    How to fix it
        Use the same command on every node and change only `--node-rank`. Under Slurm, use
        `--node-rank $SLURM_NODEID`.

    Example
        Wrong: `--nnodes 2 --node-rank 0` on both machines.
        Right: `--node-rank 0` on the first, `--node-rank 1` on the second.

    When it stays silent
        If the options agree.
    """
    ranks = sum(node.facts.nproc for node in meeting.nodes)
    return judged(f"{of_all(meeting)}, {ranks} ranks", _option_findings(meeting))


def _option_findings(meeting: Meeting) -> Iterator[Finding]:
    by_rank: dict[int, list[int]] = {}
    for index, node in enumerate(meeting.nodes):
        if node.facts.rank is not None:
            by_rank.setdefault(node.facts.rank, []).append(index)
    free_rank = next(rank for rank in range(len(by_rank) + 1) if rank not in by_rank)
    for rank, indices in by_rank.items():
        if len(indices) > 1:
            # Sorted by name, so that every node reports the same, every time.
            indices.sort(key=lambda index: meeting.host(index))
            hosts = [meeting.host(index) for index in indices]
            yield failure(
                f"{len(indices)} nodes have --node-rank {rank}: {', '.join(hosts[:8])}",
                evidence=tuple(
                    f"{meeting.host(index)} is at {meeting.nodes[index].address}"
                    for index in indices[:8]
                ),
                fix="Give every node its own rank, counted from 0.",
                paste=_line(meeting, indices[-1], rank=free_rank),
                about=f"rank {rank}",
                nodes=tuple(hosts[1:]),
            )
    if by_rank and any(node.facts.rank is None for node in meeting.nodes):
        without = [i for i, node in enumerate(meeting.nodes) if node.facts.rank is None]
        yield failure(
            f"{meeting.hosts(without)} was started without --node-rank, the others with it",
            fix="Give --node-rank on every node, or (with --rdzv-backend c10d) on none. On "
            f"{meeting.host(without[0])}:",
            paste=_line(meeting, without[0], rank=free_rank),
            about="ranks",
            nodes=tuple(map(meeting.host, without)),
        )
    yield from _number_findings(meeting, by_rank)


def _number_findings(meeting: Meeting, by_rank: Collection[int]) -> Iterator[Finding]:
    numbers = {node.facts.nnodes for node in meeting.nodes}
    if len(numbers) > 1:
        wanted = max(len(meeting.nodes), max(by_rank, default=0) + 1)
        yield failure(
            f"the nodes do not agree on --nnodes: {', '.join(map(str, sorted(numbers)))}",
            evidence=_each(meeting, [node.facts.nnodes for node in meeting.nodes], "--nnodes"),
            fix="Give --nnodes the same value on every node. For those that are here:",
            paste=_line(meeting, meeting.own, nnodes=wanted),
            about="nnodes",
            nodes=tuple(each.facts.host for each in meeting.nodes if each.facts.nnodes != wanted),
        )
    counts = {node.facts.nproc for node in meeting.nodes}
    if len(counts) > 1:
        listed = [node.facts.nproc for node in meeting.nodes]
        usual = max(listed, key=listed.count)
        odd = [index for index, count in enumerate(listed) if count != usual]
        yield warning(
            f"the nodes have different numbers of ranks: {', '.join(map(str, sorted(counts)))}",
            evidence=_each(meeting, listed, "--nproc-per-node"),
            fix="Give --nproc-per-node the same value on every node, unless this is intended. On "
            f"{meeting.host(odd[0])}:",
            paste=_line(meeting, odd[0], nproc=usual),
            about="nproc",
            nodes=tuple(map(meeting.host, odd)),
        )


def _line(meeting: Meeting, index: int, *, nproc: int | None = None, **changed: int) -> str:
    """Return the line that starts the check on a node, with these changes."""
    facts = meeting.nodes[index].facts
    own = replace(meeting.place, nnodes=facts.nnodes, rank=facts.rank)
    return check_line(own, nproc or facts.nproc, **changed)


def _each(meeting: Meeting, values: list[int], option: str) -> tuple[str, ...]:
    return tuple(
        f"{option} {value}: "
        + meeting.hosts([index for index, other in enumerate(values) if other == value])
        for value in sorted(set(values))[:8]
    )


# -- clocks


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
    # Seconds by which a node's clock is ahead of the coordinator's.
    ahead = [-node.offset for node in meeting.nodes]
    detail = f"{of_all(meeting)}, at most {max(ahead) - min(ahead):.3f} s apart"
    wrong: list[tuple[float, str, str, tuple[str, ...]]] = []
    if len(ahead) == 2:
        first, second = (0, 1) if ahead[0] > ahead[1] else (1, 0)
        difference = ahead[first] - ahead[second]
        wrong.append(
            (
                difference - sum(node.uncertainty for node in meeting.nodes),
                f"the clock of {meeting.name(second)} is {difference:.1f} s behind that of "
                f"{meeting.name(first)}",
                "clocks",
                (meeting.host(first), meeting.host(second)),
            )
        )
    else:
        median = statistics.median(ahead)
        for index, node in enumerate(meeting.nodes):
            away = ahead[index] - median
            side = "ahead of" if away > 0 else "behind"
            wrong.append(
                (
                    abs(away) - node.uncertainty,
                    f"the clock of {meeting.name(index)} is {abs(away):.1f} s {side} the others",
                    f"clock {index}",
                    (meeting.host(index),),
                )
            )
    return judged(
        detail,
        [
            finding(
                Severity.ERROR if seconds > CLOCK_FAIL_S else Severity.WARNING,
                message,
                evidence=("which of the two is wrong is not visible from here",)
                if len(ahead) == 2
                else (),
                fix="Let a time service run on every node (chrony, systemd-timesyncd).",
                paste="sudo timedatectl set-ntp true || sudo chronyc makestep",
                about=about,
                nodes=nodes,
            )
            for seconds, message, about, nodes in wrong
            if seconds > CLOCK_WARN_S
        ],
        exclude=[
            node.facts.host
            for node, (seconds, *_) in zip(meeting.nodes, wrong, strict=False)
            if len(ahead) > 2 and seconds > CLOCK_FAIL_S
        ],
    )


# -- software, settings and code


DRIVER = "nvidia-smi --query-gpu=driver_version --format=csv"

SAID_VERSIONS = 3  # Maximum number of unusual versions to name; the rest are only counted


@across_nodes(
    "node-versions",
    "DDP057",
    {"DDP014": relations.of_these("torch", "torch"), "DDP057": relations.of_these("torch", "NCCL")},
)
def node_versions(meeting: Meeting) -> Outcome:
    """The nodes have different versions of torch, NCCL, the driver or Python, or NCCL settings.

    What it finds
        Different torch or NCCL versions (errors; a warning if torch differs only in its last
        number), different NVIDIA drivers or Python minor versions (warnings), and NCCL variables
        that are not the same on every node (warning), except those that name devices or files. In a
        run also other CUDA versions and gloo variables. Other models or numbers of GPUs are infos.

    Why it is bad
        Different NCCL versions fail with "unhandled system error" or hang. Different torch versions
        may split gradients into different buckets: wrong sums or a hang. An NCCL algorithm that is
        set on one node only causes a hang.

    How to fix it
        Use the same environment on every node: one container image or one lock file.

    Example
        Wrong: `pip install torch` on each node, a month apart.
        Right: `pip install -r requirements.lock` on each node.

    When it stays silent
        If the versions are equal, and where a node does not have the component (no GPU, no driver).
    """
    torch = next((node.facts.torch for node in meeting.nodes if node.facts.torch), "not installed")
    detail = f"{of_all(meeting)}, torch {torch}"
    return judged(detail, [*_version_findings(meeting), *_setting_findings(meeting)])


def _version_findings(meeting: Meeting) -> Iterator[Finding]:
    torch = grouped(meeting, lambda facts: facts.torch or "none")
    if len(torch) > 1:
        minors = {minor(version) for version in torch}
        severity = Severity.ERROR if len(minors) > 1 else Severity.WARNING
        usual = usual_of(torch)
        wanted = usual if usual != "none" else next(each for each in torch if each != "none")
        # Without the build's label (+cu126), which an index may not have.
        paste = typed("pip install torch=={}", wanted.partition("+")[0])
        yield _differ(meeting, "torch", torch, severity, paste)
    nccl = grouped(meeting, lambda facts: facts.nccl)
    if len(nccl) > 1:
        yield _differ(meeting, "NCCL", nccl, Severity.ERROR, "pip list | grep -i nccl")
    driver = grouped(meeting, lambda facts: facts.driver)
    if len(driver) > 1:
        yield _differ(meeting, "the NVIDIA driver", driver, Severity.WARNING, DRIVER)
    python = grouped(meeting, lambda facts: minor(facts.python))
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
        nodes=_others(meeting, groups),
    )


def _others(meeting: Meeting, groups: dict[str, list[int]]) -> tuple[str, ...]:
    """Return the host names of the nodes that do not have the usual value."""
    usual = usual_of(groups)
    odd = sorted(i for value, indices in groups.items() if value != usual for i in indices)
    return tuple(map(meeting.host, odd))


def _setting_findings(meeting: Meeting) -> Iterator[Finding]:
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
            fix="Set it to the same value on every node, or on none.",
            paste=typed("export {}={}", name, usual)
            if usual != "not set"
            else typed("unset {}", name),
            about=f"variable {name}",
            nodes=_others(meeting, groups),
        )


@across_nodes("same-code", "DDP058", {"DDP058": relations.of_these(("commit", "changes"), "file")})
def same_code(meeting: Meeting) -> Outcome:
    """The nodes do not have the same script, commit or uncommitted changes.

    What it finds
        If a script is given (`ddpdoctor check ... -- train.py`): a script that differs between
        nodes or is missing on one, a different commit of its git repository, or different
        uncommitted changes in tracked files. In a run also Python files next to the script.

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
    return judged(f"{of_all(meeting)}, {first.script}{commit}", _code_findings(meeting))


def _code_findings(meeting: Meeting) -> Iterator[Finding]:
    script = next(node.facts.script for node in meeting.nodes if node.facts.script)
    lacking = [i for i, node in enumerate(meeting.nodes) if not node.facts.script_hash]
    if lacking and len(lacking) < len(meeting.nodes):
        yield failure(
            f"{script} cannot be read on {meeting.hosts(lacking)}",
            fix="Put it there, name the same script on every node, or use a shared folder. There:",
            paste=typed("ls -l {}", script),
            about="lacking",
            nodes=tuple(map(meeting.host, lacking)),
        )
    hashes = grouped(meeting, lambda facts: facts.script_hash)
    if len(hashes) > 1:
        what = f"{script} is not the same file"
        yield _code_differs(meeting, "file", what, hashes, typed("sha256sum {}", script))
    commits = grouped(meeting, lambda facts: facts.commit[:9])
    if len(commits) > 1:
        what, paste = f"the commit of {script} differs", typed("git checkout {}", usual_of(commits))
        yield _code_differs(meeting, "commit", what, commits, paste)
        return
    changes = grouped(meeting, lambda facts: (facts.changes or "none") if facts.commit else "")
    if len(changes) > 1:
        yield warning(
            f"the uncommitted changes are not the same: {_odd(meeting, changes)} from the others",
            evidence=tuple(
                f"{'no changes' if value == 'none' else f'changes {value[:9]}'}: "
                f"{meeting.hosts(indices)}"
                for value, indices in changes.items()
            )[:8],
            fix="Commit them and bring every node to that commit.",
            paste="git diff HEAD --stat",
            about="changes",
            nodes=_others(meeting, changes),
        )


def _code_differs(
    meeting: Meeting, about: str, what: str, groups: dict[str, list[int]], paste: str
) -> Finding:
    nodes = [f"{value}: {meeting.hosts(indices)}" for value, indices in groups.items()]
    return failure(
        f"{what}: {_odd(meeting, groups)} from {meeting.hosts(groups[usual_of(groups)])}",
        evidence=tuple(nodes[:8]),
        fix="Bring every node to the same code.",
        paste=paste,
        about=about,
        nodes=_others(meeting, groups),
    )


def _odd(meeting: Meeting, groups: dict[str, list[int]]) -> str:
    usual = usual_of(groups)
    odd = sorted(i for value, indices in groups.items() if value != usual for i in indices)
    return f"{meeting.hosts(odd)} differ{'s' if len(odd) == 1 else ''}"


# -- the checkpoint directory


@across_nodes("shared-folder", "DDP059")
def shared_folder(meeting: Meeting) -> Outcome:
    """The checkpoint directory is not the same directory on all nodes.

    What it finds
        With `--checkpoint-dir`, one node writes a file there and the others look for it for a few
        seconds. A node that does not see the file has a local directory at that path. If all nodes
        see the file, a sample of names and sizes is compared as well.

    Why it is bad
        Rank 0 writes checkpoints on node 0. After a restart, the other nodes find no checkpoint or
        an old one, and the ranks resume from different states.

    How to fix it
        Mount the same file system at that path on every node, or copy the checkpoints before you
        resume.

    Example
        Wrong: `--checkpoint-dir /tmp/run7` on two machines.
        Right: a directory on NFS, Lustre or another shared file system.

    When it stays silent
        If all nodes see the file, or no directory is given. It is only a warning: a job that never
        resumes, or broadcasts the weights from rank 0, works without it.
    """
    test = meeting.report.folder
    if not test.asked:
        return skipped("no --checkpoint-dir was named")
    writer = test.asked[0]
    folder = meeting.nodes[writer].facts.folder
    if test.error:
        message = f"{folder} cannot be written on {meeting.name(writer)}"
        wrong = failure(
            f"{message}: {test.error}",
            fix="Make the folder, or let this user write there.",
            paste=typed("mkdir -p {}", folder)
            if test.error == os.strerror(errno.ENOENT)
            else typed("ls -ld {0}; df -h {0}", folder),
            about="write",
            nodes=(meeting.host(writer),),
        )
        return judged(message, [wrong])
    return judged(
        f"{len(test.seen) + 1} of {count(len(test.asked), 'node')} see the same {folder}",
        _folder_findings(meeting, test, writer, folder),
    )


def _folder_findings(meeting: Meeting, test: Folder, writer: int, folder: str) -> Iterator[Finding]:
    if blind := [index for index in test.asked if index != writer and index not in test.seen]:
        yield warning(
            f"{folder} is another folder on {meeting.hosts(blind)} than on {meeting.name(writer)}",
            evidence=(f"a file that {meeting.host(writer)} wrote there was not seen",),
            fix="Mount the same file system there on every node, or copy checkpoints before a "
            "resume.",
            paste=typed("findmnt -T {}", folder),
            about="blind",
            nodes=tuple(map(meeting.host, blind)),
        )
    elif len(set(filter(None, test.listings))) > 1:
        yield warning(
            f"the nodes see the same {folder}, but not the same files in it",
            fix="A process writes there now, or a node's view is old: wait, and check again. On "
            "each:",
            paste=typed("ls -la {}", folder),
            about="listing",
        )
    if unasked := [index for index in range(len(meeting.nodes)) if index not in test.asked]:
        yield note(
            f"{meeting.hosts(unasked)} did not look, for lack of --checkpoint-dir", about="unasked"
        )
