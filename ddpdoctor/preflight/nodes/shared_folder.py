"""Whether the checkpoint folder is one folder on all nodes."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, failure, judged, note, skipped, warning
from ddpdoctor.preflight.nodes.judging import across_nodes
from ddpdoctor.preflight.protocol.meet import Meeting


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
    told = meeting.blob["folder"]
    asked = told["asked"]
    if not asked:
        return skipped("no --checkpoint-dir was named")
    folder = meeting.nodes[asked[0]].facts.folder
    quoted = shlex.quote(folder)
    if told["error"]:
        return judged(
            f"{folder} cannot be written on {meeting.name(told['writer'])}",
            [
                failure(
                    f"{folder} cannot be written on {meeting.name(told['writer'])}: "
                    f"{told['error']}",
                    fix="Make the folder, or let this user write there.",
                    paste=f"mkdir -p {quoted}"
                    if told["error"] == os.strerror(errno.ENOENT)
                    else f"ls -ld {quoted}; df -h {quoted}",
                    about="write",
                )
            ],
        )
    seen = len(told["seen"]) + 1
    return judged(
        f"{seen} of {meeting.expected} nodes see the same {folder}", _findings(meeting, folder)
    )


def _findings(meeting: Meeting, folder: str) -> Iterator[Finding]:
    told = meeting.blob["folder"]
    asked, writer = told["asked"], told["writer"]
    blind = [index for index in asked if index != writer and index not in told["seen"]]
    if blind:
        yield warning(
            f"{folder} is another folder on {meeting.hosts(blind)} than on {meeting.name(writer)}",
            evidence=(f"a file that {meeting.nodes[writer].facts.host} wrote there was not seen",),
            fix="Mount the same file system there on every node, or copy checkpoints before a "
            "resume.",
            paste=f"findmnt -T {shlex.quote(folder)}",
            about="blind",
        )
    else:
        listings = {listing for index, listing in told["listings"] if listing}
        if len(listings) > 1:
            yield warning(
                f"the nodes see the same {folder}, but not the same files in it",
                fix="Something writes there now, or a node's view is old: wait, and check again. "
                "On each:",
                paste=f"ls -la {shlex.quote(folder)}",
                about="listing",
            )
    unasked = [index for index in range(len(meeting.nodes)) if index not in asked]
    if unasked:
        yield note(
            f"{meeting.hosts(unasked)} came without --checkpoint-dir, and did not look",
            about="unasked",
        )
