"""Run directories of any number of ranks, written with the real writers, that can go on living."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ddpdoctor.run import rundir
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.names import FORMAT, namespace, rank_stem
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.process import ErrorRecord, OpenRecord
from ddpdoctor.run.records.supervisor import JobRecord, RankExitRecord
from ddpdoctor.run.status import PHASES, Parts, Phase, StatusPage, page_name, page_text
from ddpdoctor.system.gpu_poll import file_name

MS = 1_000_000
SECOND = 1_000 * MS

USUAL = Parts(0, 2 * MS, 10 * MS, 20 * MS, 2 * MS, 1 * MS, 5 * MS, True)


def uuid(rank: int) -> str:
    """The UUID of a rank's GPU, as torch writes it."""
    return f"{rank + 1:08x}-0000-4000-8000-000000000000"


def step_line(parts: Parts, start: int, epoch: int | None = None) -> bytes:
    """A journal's line as the probe writes it."""
    text = f'{{"kind":"step","step":{parts.number},"start":{start}'
    text += "" if epoch is None else f',"epoch":{epoch}'
    for name in (*PHASES, "wait", "total"):
        text += f',"{name}":{getattr(parts, name)}'
    text += f',"split":{"true" if parts.split else "false"}'
    if parts.cpu or parts.waited:
        text += f',"cpu":{parts.cpu},"waited":{parts.waited}'
    return f"{text}}}\n".encode()


@dataclass
class GeneratedRank:
    """One rank's files."""

    page: StatusPage
    journal: Journal
    parts: Parts
    step: int = 0
    clock: int = 0


@dataclass
class Generated:
    """A run directory.

    Ranks share their node by eights. Each one's usual step is ``USUAL``, with a surplus for those
    in ``slow``: phase and milliseconds, which the others wait for.
    """

    path: Path
    ranks: int
    slow: dict[int, tuple[str, int]] = field(default_factory=dict)
    gpus: bool = False
    restart: int = 0
    journal_limit: int = 1 << 22
    every: dict[int, GeneratedRank] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.mkdir(exist_ok=True)
        self.lock: rundir.Lock | None = None
        self.supervisor: Journal | None = None
        if not (self.path / rundir.MANIFEST).exists():
            manifest = {
                "format": FORMAT,
                "id": "generated",
                "started": time.time_ns() - 60 * SECOND,
                "command": ["torchrun", "train.py"],
                "launcher": "torchrun",
                "host": "node-0",
                "versions": {"torch": "2.13.0", "ddpdoctor": ""},
            }
            (self.path / rundir.MANIFEST).write_text(json.dumps(manifest))
            self.supervisor = Journal(str(self.path / "supervisor.jsonl"), 1 << 24)
        longest = max((extra for _, extra in self.slow.values()), default=0)
        for rank in range(self.ranks):
            parts = USUAL
            phase, extra = self.slow.get(rank, ("wait", longest))
            parts = parts._replace(**{phase: getattr(parts, phase) + extra * MS})
            stem = self.path / rank_stem(rank, self.restart)
            page = StatusPage(
                f"{stem}.status",
                rank=rank,
                world_size=self.ranks,
                local_rank=rank % 8,
                restart=self.restart,
                started=time.time_ns(),
            )
            journal = Journal(f"{stem}.jsonl", self.journal_limit)
            journal.write(
                [
                    OpenRecord(
                        format=FORMAT,
                        rank=rank,
                        host=self.node(rank),
                        namespace=namespace(),
                        backend="nccl" if self.gpus else "gloo",
                        versions={"python": "3.11.7"},
                    )
                ]
            )
            if self.gpus:
                page.set_gpu(uuid(rank))
            self.every[rank] = GeneratedRank(
                page, journal, parts, clock=time.time_ns() - 60 * SECOND
            )

    @staticmethod
    def node(rank: int) -> str:
        return f"node-{rank // 8}"

    def start(self) -> None:
        """Let the run live."""
        self.lock = rundir.Lock(self.path)

    def end(self, status: int | None = 0) -> None:
        """Let the run be over."""
        if status is not None:
            self.tell(JobRecord(time=time.time_ns(), status=status))
        if self.lock is not None:
            self.lock.close()

    def tell(self, record: Record | bytes) -> None:
        """A record of the supervisor."""
        assert self.supervisor is not None
        self.supervisor.write([record])

    def steps(self, count: int, ranks: Iterable[int] | None = None, split: bool = True) -> None:
        """So many steps, of all or some ranks, ending now."""
        for rank in self.every if ranks is None else ranks:
            each = self.every[rank]
            lines: list[Record | bytes] = []
            for _ in range(count):
                parts = each.parts._replace(number=each.step, split=split)
                lines.append(step_line(parts, each.clock, each.step // 100))
                each.clock += parts.total
                each.step += 1
            each.journal.write(lines)
            each.page.set_parts(each.parts._replace(number=each.step - 1, split=split))
            each.page.totals(each.step, each.step // 100, each.parts.total, 0)
            self.beat([rank])

    def beat(
        self,
        ranks: Iterable[int] | None = None,
        phase: Phase = Phase.FORWARD,
        ago: float = 0.0,
        collective: str = "",
        beat_ago: float = 0.0,
    ) -> None:
        """What ranks do, since when, and when they were last awake."""
        now = time.time_ns()
        for rank in self.every if ranks is None else ranks:
            each = self.every[rank]
            each.page.show(int(phase), now - int(ago * SECOND), each.step)
            each.page.set_beat(now - int(beat_ago * SECOND))
            each.page.set_memory(1 << 30, (1 << 28, 1 << 29, 3 << 27) if self.gpus else None)
            each.page.set_collective(page_name(collective))
            each.page.set_site(page_text(f"/job/train.py:{30 + int(phase)}"))

    def exit(self, rank: int, status: int | None, oom: str = "") -> None:
        """A rank's process ended."""
        self.tell(
            RankExitRecord(
                time=time.time_ns(),
                rank=rank,
                restart=self.restart,
                pid=os.getpid(),
                status=status,
                oom=oom,
            )
        )

    def error(self, rank: int, exception: str, message: str) -> None:
        """A rank's uncaught exception."""
        self.every[rank].journal.write(
            [
                ErrorRecord(
                    time=time.time_ns(),
                    exception=exception,
                    message=message,
                    path="/job/train.py",
                    line=12,
                )
            ]
        )

    def poll(self, *, mig: Iterable[int] = (), problem: str = "", nvml: str = "") -> None:
        """What the pollers of all nodes would write now."""
        for node in sorted({self.node(rank) for rank in self.every}):
            told = [
                {
                    "index": rank % 8,
                    "uuid": f"GPU-{uuid(rank)}",
                    "name": "NVIDIA H100",
                    "memory_used": 1 << 30,
                    "memory_total": 80 << 30,
                    "power": 500.0 + rank,
                    "temperature": 60,
                    **({"mig": True} if rank in mig else {"utilization": 0.97}),
                    **({"problem": problem} if problem else {}),
                }
                for rank in self.every
                if self.node(rank) == node
            ]
            whole = {"format": FORMAT, "host": node, "nvml": nvml, "gpus": told}
            rundir.put(self.path / file_name(node), json.dumps(whole).encode())

    def close(self) -> None:
        """Close the files; the run is not live any more."""
        for each in self.every.values():
            each.journal.close()
        if self.supervisor is not None:
            self.supervisor.close()
        if self.lock is not None:
            self.lock.close()
