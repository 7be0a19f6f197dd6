"""A process that answers as the RAS thread of NCCL does, by the formats of its sources.

``src/ras/client_support.cc`` of NCCL 2.24.3 (text, one count of all operations), 2.27.3 (text,
counts by operation), 2.28.9 (JSON, without a comma where a rank is missing) and 2.29.2 (JSON).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
TEXT, BY_OPERATION, JSON, NEWEST = "2.24.3", "2.27.3", "2.28.9", "2.29.2"
ROOT = Path(__file__).parents[2]


@dataclass
class Communicator:
    """What the ranks that answer have launched, by operation, and those that do not answer."""

    launched: dict[int, dict[str, int]]
    missing: tuple[int, ...] = ()
    dead: bool = False
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.launched) + len(self.missing)

    def counts(self, operation: str) -> dict[int, int]:
        return {rank: found.get(operation, 0) for rank, found in self.launched.items()}


def gpu(rank: int) -> str:
    return f"GPU {rank} managed by process {100 + rank} on node 10.0.0.{1 + rank // 2}"


def text(version: str, communicators: list[Communicator]) -> str:
    """The answer to ``VERBOSE STATUS``."""
    lines = [
        f"NCCL version {version}+cuda12.9 compiled with CUDA 12.9",
        "CUDA runtime version 12090, driver version 12090", "",
        "Job summary", "===========", "",
        "  Nodes  Processes         GPUs  Processes     GPUs",
        "(total)   per node  per process    (total)  (total)",
        f"{2:7}  {2:9}  {1:11}  {4:9}  {4:7}", "",
        "Communicators... (0.00s)", "=============", "",
    ]  # fmt: skip
    lines += [
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors",
        "    #  in group  per comm  per node  per comm  in group",
    ]
    for number, each in enumerate(communicators):
        wrong = [word for word, is_so in (
            ("INCOMPLETE", each.missing), ("ERROR", each.errors), ("MISMATCH", _differing(each)),
        ) if is_so]  # fmt: skip
        lines.append(
            f"{number:5}  {1:8}  {2:8}  {'1-2':>8}  {each.size:8}  {each.size:8}  "
            f"{'RUNNING':>8}  {','.join(wrong) or 'OK':>6}"
        )
    lines += ["", "Errors", "======", ""]
    missing = sorted({rank for each in communicators for rank in each.missing})
    if missing:
        dead = any(each.dead for each in communicators)
        es = "es" if len(missing) > 1 else ""
        processes = [
            f"  Process {100 + rank} on node 10.0.0.{1 + rank // 2} managing GPU {rank}"
            for rank in missing
        ]
        if dead:
            verb = "es are" if len(missing) > 1 else " is"
            lines += ["DEAD", f"  {len(missing)} job process{verb} considered dead (unreachable "
                      "via the RAS network)", *processes, ""]  # fmt: skip
        else:
            lines += ["INCOMPLETE", f"  Missing communicator data from {len(missing)} job "
                      f"process{es}", *processes, ""]  # fmt: skip
    for number, each in enumerate(communicators):
        head = f"#{number}-0 (cf264af53edbe986)"
        if each.missing:
            s = "s" if len(each.missing) > 1 else ""
            lines += [f"{head} INCOMPLETE",
                      f"  Missing communicator data from {len(each.missing)} rank{s}"]  # fmt: skip
            if version == TEXT:
                lines += [f"  The missing rank{s}: {','.join(map(str, each.missing))}", ""]
            else:
                lines += [*(f"  Rank {rank} -- {gpu(rank)}" for rank in each.missing), ""]
        if each.errors:
            lines += [f"{head} ERROR", f"  Asynchronous error on {len(each.errors)} rank"]
            lines += [f"  Rank {rank} reported {what} -- {gpu(rank)}"
                      for rank, what in each.errors.items()] + [""]  # fmt: skip
    lines += ["Warnings", "========", ""]
    for number, each in enumerate(communicators):
        if _differing(each):
            lines += [f"#{number}-0 (cf264af53edbe986) MISMATCH", *_mismatch(version, each)]
    return "\n".join(lines) + "\n"


def _differing(each: Communicator) -> list[str]:
    return [what for what in OPERATIONS if len(set(each.counts(what).values())) > 1]


def _mismatch(version: str, each: Communicator) -> Iterator[str]:
    kinds: list[tuple[str, dict[int, int]]] = [(w, each.counts(w)) for w in _differing(each)]
    if version == TEXT:
        kinds = [("collective", {r: sum(found.values()) for r, found in each.launched.items()})]
    for what, counts in kinds:
        operation = "collective operation" if what == "collective" else f"{what} operation"
        yield f"  Communicator ranks have different {operation} counts"
        for value, many in Counter(counts.values()).most_common():
            said = f"launched up to operation {value}" if value else "not launched any operations"
            ranks = [rank for rank, count in counts.items() if count == value]
            if many == 1:
                yield f"  Rank {ranks[0]} has {said} -- {gpu(ranks[0])}"
                continue
            yield f"  {many} ranks have {said}"
            # An outlier, of which each one is listed.
            if many < each.size * 0.5:
                yield from (f"  Rank {rank} -- {gpu(rank)}" for rank in ranks)
        yield ""


def structured(version: str, communicators: list[Communicator]) -> str:
    """The same in JSON."""

    def place(rank: int) -> dict[str, object]:
        host = f"10.0.0.{1 + rank // 2}"
        return {
            "rank": rank, "host": host, "pid": 100 + rank, "cuda_dev": rank, "nvml_dev": rank,
        }  # fmt: skip

    found = {
        "nccl_version": f"{version}+cuda13.0",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-11-27 13:06:53",
        "communicators_count": len(communicators),
        "communicators": [
            {
                "hash": "0xae94423cfbb2ef4a",
                "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
                "size": each.size,
                "ranks_count": len(each.launched),
                "missing_ranks_count": len(each.missing),
                "ranks": [
                    {
                        **place(rank),
                        "status": {
                            "init_state": 0,
                            "async_error": 6 if rank in each.errors else 0,
                            "finalize_called": False,
                            "destroy_flag": False,
                            "abort_flag": False,
                        },
                        "collective_counts": {what: launched.get(what, 0) for what in OPERATIONS},
                    }
                    for rank, launched in each.launched.items()
                ],
                "missing_ranks": [
                    {
                        **place(rank),
                        "status": {"unresponsive": True, "considered_dead": each.dead},
                    }
                    for rank in each.missing
                ],
            }
            for each in communicators
        ],
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
    }
    said = json.dumps(found, indent=2) + "\n"
    if version == JSON:
        head, mark, tail = said.partition('"missing_ranks": [')
        # As the sources have it: "nvml_dev": %d\n without a comma.
        broken = "\n".join(
            line.rstrip(",") if '"nvml_dev"' in line else line for line in tail.split("\n")
        )
        said = head + mark + broken if '"unresponsive"' in tail else said
    return said


def serve(listening: socket.socket, version: str, communicators: list[Communicator]) -> None:
    """Answer for ever, one client after the other, as `rasClientEventLoop` does."""
    while True:
        connection, _ = listening.accept()
        with connection:
            is_json = False
            for raw in connection.makefile("rb"):
                line = raw.decode().rstrip("\r\n").lower()
                if line.startswith("client protocol "):
                    connection.sendall(b"SERVER PROTOCOL 2\n")
                elif line.startswith("timeout "):
                    connection.sendall(b"OK\n")
                elif line == "set format json" and version in (JSON, NEWEST):
                    is_json = True
                    connection.sendall(b"OK\n")
                elif line in ("status", "verbose status"):
                    form = structured if is_json else text
                    connection.sendall(form(version, communicators).encode())
                    break
                else:
                    connection.sendall(f"ERROR: Unknown command {line}\n".encode())


# -- servers that mean no good


def _flood(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"  Rank 1 -- GPU 1 managed by process 1 on node 10.0.0.1\n" * 1000)


def _dribble(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"N")
        time.sleep(0.2)


def hostile(listening: socket.socket, kind: str) -> None:
    """Accept the protocol, and answer ``STATUS`` with what no RAS says."""
    after: dict[str, Callable[[socket.socket], None]] = {
        "endless": _flood,
        "slow": _dribble,
        "silent": lambda _: time.sleep(3600),
        "garbage": lambda each: each.sendall(os.urandom(4096)),
        "control": lambda each: each.sendall(
            b"NCCL version 2.27.3\x1b[2J compiled\n"
            b"    0         1         2         1         2         2   RUNNING  MISMATCH\n"
            b"#0-0 (cf264af53edbe986) ERROR\n  Rank 1 reported \x1b]0;owned\x07 -- GPU 1\n"
        ),
        "closes": lambda each: None,
    }
    while True:
        connection, _ = listening.accept()
        with connection:
            if kind == "stranger":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                continue
            for raw in connection.makefile("rb"):
                if raw.startswith(b"CLIENT"):
                    connection.sendall(b"SERVER PROTOCOL 2\n")
                elif raw.startswith(b"VERBOSE"):
                    with suppress(OSError):
                        after[kind](connection)
                    break
                else:
                    connection.sendall(b"ERROR: Unknown command\n")


@contextmanager
def running(kind: str, *communicators: Communicator) -> Iterator[tuple[int, int]]:
    """A process that answers as one of a version or kind: its pid and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        given = json.dumps([vars(each) for each in communicators])
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.ras_server",
                str(listening.fileno()),
                kind,
                given,
            ],
            cwd=ROOT,
            env={**os.environ, "NCCL_RAS_ADDR": f"127.0.0.1:{port}"},
            pass_fds=[listening.fileno()],
            stdout=subprocess.PIPE,
        )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid, port
    finally:
        process.kill()
        process.communicate()


def main(words: list[str]) -> None:
    """Serve on a socket that is open already."""
    listening, kind = socket.socket(fileno=int(words[0])), words[1]
    print("ready", flush=True)
    if kind not in (TEXT, BY_OPERATION, JSON, NEWEST):
        hostile(listening, kind)
    found = []
    for each in json.loads(words[2]):
        ranks = {int(rank): launched for rank, launched in each["launched"].items()}
        errors = {int(rank): what for rank, what in each["errors"].items()}
        found.append(Communicator(ranks, tuple(each["missing"]), each["dead"], errors))
    serve(listening, kind, found)


if __name__ == "__main__":
    main(sys.argv[1:])
