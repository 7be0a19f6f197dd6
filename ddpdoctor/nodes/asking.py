"""Ask the other nodes of a run for stacks, or for the evidence of an examination.

The head's exchange listens on a Unix socket in the run directory. It passes a question on and
writes a line for each node's answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.run.names import short_path
from ddpdoctor.run.records.supervisor import RankStacks
from ddpdoctor.run.snapshot import Run
from ddpdoctor.stacks.capture import CAPTURE_TIMEOUT, capture
from ddpdoctor.stacks.frames import stacks_from_record

SOCKET = "nodes.sock"
MAX_ANSWER = 64 << 20  # Maximum bytes of all answers to one question


class NodeAnswer(NamedTuple):
    """The answer of one node."""

    node: int  # Its number in the run directory
    host: str
    found: Any  # JSON


def ask(
    directory: Path, what: str, arguments: Mapping[str, Any], seconds: float
) -> list[NodeAnswer]:
    """Ask all nodes to ``examine`` or for ``stacks``. Return the answers that arrive in time."""
    path = directory / SOCKET
    if not path.exists() or opening.stranger(directory) is not None:
        return []
    deadline = time.monotonic() + seconds
    data = b""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX) as connection,
        short_path(os.fspath(path)) as name,
    ):
        connection.settimeout(seconds)
        connection.connect(name)
        question = {"what": what, "seconds": seconds, **arguments}
        connection.sendall(json.dumps(question).encode() + b"\n")
        while len(data) < MAX_ANSWER:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            received = connection.recv(1 << 16)
            if not received:
                break
            data += received
    found: list[NodeAnswer] = []
    for line in data.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            answer = opening.loads(line)
            found.append(NodeAnswer(int(answer["node"]), str(answer["host"]), answer["found"]))
    return found


def capture_everywhere(
    run: Run, ranks: Collection[int] | None = None, *, native: bool = False, variables: bool = False
) -> tuple[RankStacks, ...]:
    """Return the stacks of the newest attempt's ranks on all nodes, ascending by rank.

    The arguments are those of :func:`ddpdoctor.stacks.capture.capture`.
    """
    others: dict[int, RankStacks] = {}

    def ask_others() -> None:
        wanted = None if ranks is None else sorted(ranks)
        arguments = {"ranks": wanted, "native": native, "variables": variables}
        for answer in ask(
            run.path, "stacks", arguments, CAPTURE_TIMEOUT * (2 if native else 1) + 1
        ):
            for each in answer.found if isinstance(answer.found, list) else ():
                if isinstance(each, dict):
                    stacks = stacks_from_record(each)
                    others[stacks.rank] = replace(stacks, restart=run.restarts[-1])

    thread = threading.Thread(target=ask_others, name="ddpdoctor-ask", daemon=True)
    thread.start()
    own = {each.rank: each for each in capture(run, ranks, native=native, variables=variables)}
    thread.join()
    elsewhere = {rank.rank for rank in run.last if rank.elsewhere}
    found = own | {
        rank: each for rank, each in others.items() if rank in elsewhere or rank not in own
    }
    return tuple(found[rank] for rank in sorted(found))
