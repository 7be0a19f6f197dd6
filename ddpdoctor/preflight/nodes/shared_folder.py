"""Whether the checkpoint folder is one folder on all nodes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, failure, judged, note, skipped, typed, warning
from ddpdoctor.preflight.nodes.judging import across_nodes
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.protocol.report import (
    Folder,
)


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
        )
        return judged(message, [wrong])
    return judged(
        f"{len(test.seen) + 1} of {meeting.expected} nodes see the same {folder}",
        _findings(meeting, test, writer, folder),
    )


def _findings(meeting: Meeting, test: Folder, writer: int, folder: str) -> Iterator[Finding]:
    blind = [index for index in test.asked if index != writer and index not in test.seen]
    if blind:
        yield warning(
            f"{folder} is another folder on {meeting.hosts(blind)} than on {meeting.name(writer)}",
            evidence=(f"a file that {meeting.host(writer)} wrote there was not seen",),
            fix="Mount the same file system there on every node, or copy checkpoints before a "
            "resume.",
            paste=typed("findmnt -T {}", folder),
            about="blind",
        )
    elif len(set(filter(None, test.listings))) > 1:
        yield warning(
            f"the nodes see the same {folder}, but not the same files in it",
            fix="A process writes there now, or a node's view is old: wait, and check again. On "
            "each:",
            paste=typed("ls -la {}", folder),
            about="listing",
        )
    unasked = [index for index in range(len(meeting.nodes)) if index not in test.asked]
    if unasked:
        yield note(
            f"{meeting.hosts(unasked)} came without --checkpoint-dir, and did not look",
            about="unasked",
        )
