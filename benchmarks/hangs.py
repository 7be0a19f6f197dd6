"""How soon a hang is said, and what an examination of very many ranks costs.

python benchmarks/hangs.py stall
python benchmarks/hangs.py many
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
JOB = HERE / "jobs" / "stalling.py"
HANG_AFTER = 5.0


def stall(ranks: int, directory: Path) -> None:
    """From the stall of one rank to the line on the terminal."""
    command = [sys.executable, "-m", "ddpdoctor", "run", "--no-vscode", "--debug-port", "0"]
    command += ["--run-dir", str(directory / "run"), "--hang-after", str(HANG_AFTER)]
    command += ["--kill-on-hang", "--nproc-per-node", str(ranks), "--", str(JOB)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        said = 0.0
        for line in process.stderr:
            if line.startswith("ddpdoctor: error") and not said:
                said = time.time()
                print(line.rstrip())
        began = re.search(r"stall ([\d.]+)", process.stdout.read())
    assert began is not None and said
    print(
        f"{ranks} ranks: said {said - float(began[1]):.1f} s after the stall, with --hang-after "
        f"{HANG_AFTER:.0f}"
    )


def many(ranks: int, directory: Path) -> None:
    """Examine a generated run of many ranks, of which one is absent, in a process of its own."""
    code = f"from benchmarks.hangs import examine_many; examine_many({ranks}, {str(directory)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=HERE.parent, check=True)


def examine_many(ranks: int, where: str) -> None:
    """Generate the run, examine it, judge it; prints time and memory."""
    import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
    from ddpdoctor.core.finding import RULES, examine
    from ddpdoctor.nodes import hang_examination
    from ddpdoctor.run import rundir
    from ddpdoctor.run.reader import RunReader
    from ddpdoctor.run.records.base import as_json, json_line
    from ddpdoctor.run.records.supervisor import (
        MAIN,
        Frame,
        HangRecord,
        ProcessActivity,
        RankStacks,
        Thread,
    )

    path = Path(where)
    generate(path, ranks)
    torch = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
    depth = tuple(Frame(f"/job/part{number}.py", 10 * number, "call") for number in range(20))
    ends = (Frame("/job/train.py", 61, "main"), Frame(torch, 3000, "all_reduce"))
    frames = {True: (*depth, *ends), False: (*depth, Frame("/job/train.py", 88, "save"))}
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader = RunReader(path)
    began, cpu = time.perf_counter(), time.process_time()
    run = reader.snapshot()
    records = hang_examination.examine(run, 1, range(ranks), {}, {})
    idle = ProcessActivity(seconds=1.0, letters="SS")
    examined = []
    for each in records:
        thread = Thread(1, MAIN, True, frames[each.rank != 5])
        stacks = RankStacks(each.rank, 0, each.pid, "node", (thread,))
        examined.append(replace(each, stacks=stacks, activity=idle))
    told = HangRecord(time=time.time_ns(), number=1, restart=0, seconds=31.0, file="hang-0001.json")
    text = json_line(as_json(replace(told, ranks=tuple(examined))))
    rundir.put(path / told.file, text)
    with open(path / "supervisor.jsonl", "ab") as file:
        file.write(json_line(as_json(told)))
    found = examine(reader.snapshot(), RULES.values())
    seconds = time.perf_counter() - began - hang_examination.COMPARED_SECONDS
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for finding in found[:3]:
        print(finding.severity.label, finding.code, finding.message)
    used = time.process_time() - cpu
    print(
        f"{ranks} ranks: examined in {seconds:.2f} s ({used:.2f} s of CPU), besides the "
        f"{hang_examination.COMPARED_SECONDS:.0f} s over which processes are watched; "
        f"{most / 1024:.0f} MiB at most, {base / 1024:.0f} MiB before; {len(text) / 1e6:.1f} MB "
        "written"
    )


def generate(path: Path, ranks: int) -> None:
    """A run directory of ranks that are in an all-reduce, all but one."""
    from ddpdoctor.run.journal import Journal
    from ddpdoctor.run.names import FORMAT, rank_stem
    from ddpdoctor.run.records.process import OpenRecord
    from ddpdoctor.run.ring import RingWriter
    from ddpdoctor.run.status import Phase, StatusPage, page_name, page_text

    manifest = {"format": FORMAT, "id": "many", "command": ["torchrun", "train.py"]}
    (path / "run.json").write_text(json.dumps(manifest))
    (path / "supervisor.jsonl").touch()
    now = time.time_ns() - 31_000_000_000
    for rank in range(ranks):
        stem = str(path / rank_stem(rank, 0))
        page = StatusPage(
            stem + ".status", rank=rank, world_size=ranks, local_rank=rank % 8, restart=0, started=1
        )
        absent = rank == 5
        page.totals(100, 0, 200_000_000, 0)
        page.show(int(Phase.OTHER if absent else Phase.WAIT), now, 100)
        page.set_site(page_text("/job/train.py:61"))
        page.set_collective(page_name("" if absent else "all_reduce"))
        journal = Journal(stem + ".jsonl", 1 << 20)
        opened = OpenRecord(
            format=FORMAT,
            rank=rank,
            namespace=f"node{rank // 8}",
            world_size=ranks,
            backend="nccl",
            host="node",
        )
        journal.write([opened])
        journal.close()
        ring = RingWriter(stem + ".collectives")
        name, group = ring.text("all_reduce"), ring.text(f"0|0-{ranks - 1}")
        texts = (name, group, ring.text("float32"), ring.text("SUM"), ring.text("/job/train.py:61"))
        for number in range(1, 100 if absent else 101):
            order = ring.begin(now + number, number, texts, (64,), 64, -1, 0)
            if number < 100:
                ring.end(order, now + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", nargs="*", default=["stall", "many"])
    parser.add_argument("--ranks", type=int, default=8, help="of the job that stalls")
    parser.add_argument("--many", type=int, default=1024)
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    if "stall" in options.what:
        with tempfile.TemporaryDirectory() as directory:
            stall(options.ranks, Path(directory))
    if "many" in options.what:
        with tempfile.TemporaryDirectory() as directory:
            many(options.many, Path(directory))


if __name__ == "__main__":
    main()
