"""Run directories with many steps, as the probe writes them, for what is drawn over time."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddpdoctor.run.journal import segment_line
from ddpdoctor.run.names import FORMAT, rank_stem
from ddpdoctor.run.records.base import Record, encode
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.records.supervisor import GpuVitals, JobRecord, RankMemory, VitalsRecord
from ddpdoctor.run.status import Phase, StatusPage

T0 = 1_700_000_000_000_000_000
MS = 1_000_000
GIB = 1 << 30
USUAL = {"data": 6, "forward": 52, "backward": 104, "optimizer": 11, "other": 3}
"""Milliseconds a step."""
REST = 41 + 14
"""The same, of what a rank that is not slow waits."""


def step_line(number: int, start: int, parts: dict[str, int], wait: int, loss: float) -> bytes:
    """A step's line with the keys in the order in which the probe writes them."""
    total = sum(parts.values()) + wait
    found: dict[str, Any] = {
        "kind": "step", "step": number, "start": start, "epoch": 0, **parts, "wait": wait,
        "total": total, "split": True, "cpu": total // 2, "waited": 0, "samples": 32,
        "loss": loss, "norm": 1 + loss,
    }  # fmt: skip
    return json.dumps(found, separators=(",", ":")).encode() + b"\n"


def steps(rank: int, count: int, slow: int, ahead: int = 0) -> Iterable[bytes]:
    """The steps of a rank; rank ``slow`` takes 41 ms longer for its data, the others wait."""
    rng = random.Random(rank)
    start = T0 + ahead
    longest = (sum(USUAL.values()) + REST) * MS
    for number in range(count):
        parts = {name: int(ms * MS * rng.uniform(0.97, 1.03)) for name, ms in USUAL.items()}
        parts["data"] += 41 * MS if rank == slow else 0
        yield step_line(number, start, parts, longest - sum(parts.values()), 2.0 / (number + 1))
        start += longest


def write_run(
    path: Path,
    ranks: int = 4,
    count: int = 60,
    *,
    slow: int = 1,
    supervisor: Iterable[Record] = (),
    records: Mapping[int, Iterable[Record]] | None = None,
    status: int | None = 0,
    manifest: dict[str, Any] | None = None,
    ahead: dict[str, int] | None = None,
    distinct: int | None = None,
) -> Path:
    """A finished run.

    Args:
        path: Its directory, which is made.
        ranks: How many.
        count: Steps of each.
        slow: The rank that is slow.
        supervisor: Records of the supervisor's journal.
        records: Records of ranks behind their steps.
        status: The job's exit status, None for one that is not known.
        manifest: Values of run.json.
        ahead: Nanoseconds by which the clocks of nodes are ahead: then two ranks are on a node.
        distinct: So many journals are written; further ranks have links to them.
    """
    path.mkdir(parents=True)
    command = ["python", "-m", "torch.distributed.run", "train.py", "--lr", "0.1"]
    told = {"format": FORMAT, "id": path.name, "started": T0, "host": "node-a", "cwd": "/job"}
    told |= {"command": command, "versions": {"torch": "2.13.0", "python": "3.11.7"}}
    (path / "run.json").write_text(json.dumps({**told, **(manifest or {})}))
    nodes = list(ahead or {"node-a": 0})
    for rank in range(ranks):
        stem = path / rank_stem(rank, 0)
        node = nodes[rank // 2 % len(nodes)]
        page = StatusPage(
            f"{stem}.status", rank=rank, world_size=ranks, local_rank=rank, restart=0, started=T0
        )
        page.show(Phase.ENDED, T0, count)
        page.totals(count, 0, 231 * MS, 0)
        page.set_memory(9 * GIB, (31 * GIB, 58 * GIB, 55 * GIB))
        if distinct is not None and rank >= distinct:
            os.link(path / f"{rank_stem(rank % distinct, 0)}.jsonl", f"{stem}.jsonl")
            continue
        opened = OpenRecord(
            format=FORMAT, rank=rank, world_size=ranks, host=node, pid=4100 + rank, backend="gloo"
        )
        with open(f"{stem}.jsonl", "wb") as file:
            file.write(segment_line(0) + encode(opened))
            file.writelines(steps(rank, count, slow, (ahead or {}).get(node, 0)))
            file.writelines(encode(each) for each in (records or {}).get(rank, ()))
    with (path / "vitals.jsonl").open("wb") as file:
        for second in range(20):
            memory = tuple(
                RankMemory(rank, 8 * GIB, (30 + second) * GIB, 58 * GIB) for rank in range(ranks)
            )
            gpu = GpuVitals("node-a", 0, 0.9, 61 * GIB, 80 * GIB, 480.0, 61.0)
            moment = T0 + second * 1000 * MS
            file.write(encode(VitalsRecord(time=moment, restart=0, ranks=memory, gpus=(gpu,))))
    ended = () if status is None else (JobRecord(time=T0 + count * 231 * MS, status=status),)
    journal = b"".join(encode(each) for each in (*supervisor, *ended))
    (path / "supervisor.jsonl").write_bytes(segment_line(0) + journal)
    return path
