"""What the head of a run on many nodes takes: CPU, memory, bytes on the wire.

The nodes are synthetic: one process writes the status pages and journals of their ranks, as the
probe does, and sends them with one `Member` each. The head is a real ``ddpdoctor run`` whose job
writes the files of the first node's ranks.

    python benchmarks/many_nodes.py --ranks 8 64 256 1024 --seconds 40
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from ddpdoctor.nodes import store
from ddpdoctor.nodes.debug_relay import DebugRelay
from ddpdoctor.nodes.head import Invitation
from ddpdoctor.nodes.member import Member
from ddpdoctor.nodes.messages import Began
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.names import FORMAT, namespace, rank_stem
from ddpdoctor.run.records.process import OpenRecord, StoreRecord
from ddpdoctor.run.records.typed_json import decoder
from ddpdoctor.run.ring import RingWriter
from ddpdoctor.run.status import Phase, StatusPage

EACH = int(os.environ.get("BENCHMARK_EACH", "8"))  # Ranks of a node
LINES = 2  # Lines of a journal per second, as after the first 256 steps of a job
STEP_MS = 20.0
JOB = "BENCHMARK_WORLD_SIZE"


class SyntheticRank:
    """Writes the files of a rank that trains."""

    def __init__(self, directory: Path, rank: int, world_size: int, host: str) -> None:
        stem = str(directory / rank_stem(rank, 0))
        now = time.time_ns()
        self._page = StatusPage(
            f"{stem}.status", rank=rank, world_size=world_size, local_rank=rank % EACH, restart=0,
            started=now,
        )  # fmt: skip
        self._journal = Journal(f"{stem}.jsonl", 1 << 22)
        self._ring = RingWriter(f"{stem}.collectives")
        self._step = 0
        opened = OpenRecord(
            format=FORMAT, time=now, rank=rank, world_size=world_size, local_rank=rank % EACH,
            pid=os.getpid(), host=host, namespace=namespace(), backend="gloo",
            versions={"torch": "2.13.0", "python": "3.11.7", "cuda": ""},
        )  # fmt: skip
        place = StoreRecord(file=str(directory.parent / "store"), local_world_size=EACH)
        self._journal.write([opened, place])

    def show(self) -> None:
        """Write what a rank writes in a quarter of a second."""
        now = time.time_ns()
        self._page.show(int(Phase.BACKWARD), now, self._step)
        self._page.totals(self._step, 0, int(STEP_MS * 1e6), 0)
        self._page.set_beat(now)
        self._page.set_memory(1 << 30, None)

    def close_steps(self, count: int) -> None:
        """Write the line of some steps."""
        self._step += count
        total = int(STEP_MS * 1e6)
        line = {
            "kind": "step", "step": self._step, "start": time.time_ns() - total, "epoch": 0,
            "data": total // 10, "forward": total // 4, "backward": total // 3,
            "optimizer": total // 10, "other": total // 20, "wait": total // 6, "total": total,
            "split": True, "cpu": total // 2, "waited": 1000, "samples": 32,
            "loss": 1.5 + 1 / (self._step + 1), "steps": count,
        }  # fmt: skip
        self._journal.write([json.dumps(line, separators=(",", ":")).encode() + b"\n"])


def write_ranks(ranks: list[SyntheticRank], turn: int) -> None:
    """Write what all ranks write in one of four turns a second."""
    for number, each in enumerate(ranks):
        each.show()
        if (turn + number) % (4 // LINES) == 0:
            each.close_steps(int(1000 / STEP_MS / LINES))


def job() -> None:
    """Be the job of the head: the ranks of the first node, until stopped."""
    directory = Path(os.environ["DDPDOCTOR_RUN_DIR"])
    world_size = int(os.environ[JOB])
    ranks = [SyntheticRank(directory, rank, world_size, "node0") for rank in range(EACH)]
    for turn in range(10_000_000):
        write_ranks(ranks, turn)
        time.sleep(0.25)


def nodes(base: Path, count: int, world_size: int) -> None:
    """Be all nodes but the first, until stopped."""
    members, ranks = [], []
    place = StoreRecord(file=str(base / "store"))
    while (found := store.read(place, "")) is None:
        time.sleep(0.1)
    invitation = decoder(Invitation)(json.loads(found))
    for node in range(1, count):
        directory = base / f"node{node}"
        directory.mkdir()
        for rank in range(node * EACH, (node + 1) * EACH):
            ranks.append(SyntheticRank(directory, rank, world_size, f"node{node}"))
        member = CountingMember(
            directory, os.urandom(16), lambda *_: None, DebugRelay(directory, admits=True)
        )
        member.invite(invitation)
        member.began(Began(restart=0, world_size=world_size, time=time.time_ns()))
        members.append(member)
    due, turn = time.monotonic(), 0
    while True:
        for member in members:
            member.receive()
            member.tick()
        if time.monotonic() >= due:
            due += 0.25
            write_ranks(ranks, turn)
            turn += 1
            (base / "sent").write_text(str(CountingMember.sent))
        time.sleep(0.02)


class CountingMember(Member):
    """Counts the bytes that a node sends."""

    sent = 0

    def _send_frames(self, frames: list[bytes]) -> bool:
        CountingMember.sent += sum(map(len, frames))
        return super()._send_frames(frames)


def measure(world_size: int, seconds: float) -> dict[str, Any]:
    """Run the head with so many ranks."""
    with tempfile.TemporaryDirectory(prefix="many-nodes-") as name:
        base = Path(name)
        directory = base / "node0"
        environment = {**os.environ, JOB: str(world_size)}
        head = subprocess.Popen(
            [sys.executable, "-m", "ddpdoctor", "run", "--no-debug", "--no-vscode", "--run-dir",
             str(directory), "--", sys.executable, __file__, "--be-the-job"],
            env=environment, stderr=subprocess.PIPE,
        )  # fmt: skip
        others = subprocess.Popen(
            [sys.executable, __file__, "--be-the-nodes", str(base), str(world_size)]
        )
        try:
            return follow(head, directory, world_size, seconds)
        finally:
            others.kill()
            others.wait()
            head.terminate()
            _, text = head.communicate(timeout=60)
            for line in text.decode().splitlines():
                if "error" in line or "warning" in line:
                    print(line)


def follow(
    head: subprocess.Popen[bytes], directory: Path, world_size: int, seconds: float
) -> dict[str, Any]:
    """Measure the head once all ranks are there."""
    until = time.monotonic() + 120
    while len(list(directory.glob("rank-*.jsonl"))) < world_size:
        if time.monotonic() > until:
            raise SystemExit(f"only {len(list(directory.glob('rank-*.jsonl')))} ranks came")
        time.sleep(0.5)
    time.sleep(5)
    supervisor = psutil.Process(head.pid)
    exchange = next(
        each for each in supervisor.children(True) if "nodes.exchange" in " ".join(each.cmdline())
    )
    parts = {"supervisor": supervisor, "exchange": exchange}
    before = {name: sum(each.cpu_times()[:2]) for name, each in parts.items()}
    sent = directory.parent / "sent"
    began, sent_before = time.monotonic(), int(sent.read_text() or 0)
    time.sleep(seconds)
    passed = time.monotonic() - began
    result: dict[str, Any] = {"ranks": world_size}
    for name, each in parts.items():
        result[f"{name}_cores"] = round((sum(each.cpu_times()[:2]) - before[name]) / passed, 3)
        result[f"{name}_mb"] = each.memory_info().rss >> 20
    result["bytes_per_rank_s"] = round(
        (int(sent.read_text() or 0) - sent_before) / passed / max(1, world_size - EACH)
    )
    return result


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--be-the-job", action="store_true")
    parser.add_argument("--be-the-nodes", nargs=2)
    options = parser.parse_args()
    if options.be_the_job:
        job()
    elif options.be_the_nodes:
        world_size = int(options.be_the_nodes[1])
        nodes(Path(options.be_the_nodes[0]), world_size // EACH, world_size)
    else:
        for world_size in options.ranks:
            # A process of its own, which finds so many ranks on each node.
            each = "8" if world_size > 8 else "2"
            if os.environ.get("BENCHMARK_EACH") == each:
                print(measure(world_size, options.seconds), flush=True)
            else:
                words = ["--ranks", str(world_size), "--seconds", str(options.seconds)]
                subprocess.run(
                    [sys.executable, __file__, *words],
                    env={**os.environ, "BENCHMARK_EACH": each},
                    check=True,
                )


if __name__ == "__main__":
    main()
