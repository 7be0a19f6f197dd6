"""Whoever is killed, nothing of a job stays: random kills of one or two processes of random jobs.

    python benchmarks/orphans.py --count 200 --parallel 4
    python benchmarks/orphans.py --job torch --count 20

A job has two ranks; each has a worker process, a helper in a session of its own and a daemon (two
forks, an empty environment, deaf to SIGTERM). ``plain`` ranks are bare Pythons below bash,
``torch`` ones have joined a gloo group below torchrun. In each run one or two of its processes get
SIGKILL at a random moment of a phase. A run whose supervisor and command were spared is asked to
stop then.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

LIMIT = 10.0
PHASES = ("start", "step", "checkpoint", "exit")
VICTIMS = ("supervisor", "keeper 1", "keeper 2", "command", "rank", "worker")

DAEMON = "trap '' TERM; while :; do sleep 1; done"
RANK = f"""
import os, signal, sys, time
token, rank, ranks = sys.argv[1], int(os.environ["RANK"]), 2
def note(name):
    with open(f"{{name}}.{{rank}}.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{{name}}.{{rank}}.tmp", f"{{name}}.{{rank}}")
note("start")
time.sleep(0.3)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sh", ["sh", "-c", {DAEMON!r}, token], {{}})
    os._exit(0)
if os.fork() == 0:
    os.setsid()
    os.execv("/bin/sh", ["sh", "-c", "sleep 3600; true", token])
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("worker")
    while os.getppid() != 1:
        time.sleep(0.2)
    time.sleep(3600)
TORCH
note("step")
while not os.path.exists("save"):
    time.sleep(0.05)
note("checkpoint")
with open(f"weights.{{rank}}", "wb") as file:
    for _ in range(400):
        if os.path.exists("go"):
            break
        file.write(bytes(1 << 16))
        time.sleep(0.05)
note("exit")
time.sleep(0.3)
"""
TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    phase: str
    victims: tuple[str, ...]
    left: tuple[str, ...]
    seconds: float
    bystanders: bool
    """Whether those who have nothing to do with it still lived."""


def of_token(token: str) -> dict[int, str]:
    """The processes whose command line or environment has the token: pid and command line."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            # Both are empty for a zombie.
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            if token.encode() in words + Path(f"/proc/{name}/environ").read_bytes():
                found[int(name)] = words.replace(b"\0", b" ").decode()[:80]
    return found


def wait_for(folder: Path, *names: str, job: subprocess.Popen[bytes], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not all((folder / name).exists() for name in names):
        if job.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def members(job: int, folder: Path, which: str) -> dict[str, psutil.Process]:
    """The processes of a job by what they are; without those that have ended."""
    found = {}
    with contextlib.suppress(psutil.Error):
        found["supervisor"] = psutil.Process(job)
        for each in found["supervisor"].children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any("supervise/keeper.py" in word for word in each.cmdline()):
                    found["keeper 2" if "keeper 1" in found else "keeper 1"] = each
    with contextlib.suppress(psutil.Error, KeyError):
        # Its oldest child; later ones are adopted.
        found["command"] = min(found["keeper 2"].children(), key=psutil.Process.create_time)
    for name, file in (("rank", "start"), ("worker", "worker")):
        with contextlib.suppress(psutil.Error, OSError):
            found[name] = psutil.Process(int((folder / f"{file}.{which}").read_text()))
    return found


def one(seed: str, kind: str, phase: str, victims: tuple[str, ...], timeout: float) -> Outcome:
    draw = random.Random(seed)
    token = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="orphans-"))
    torch = kind == "torch"
    (folder / "rank.py").write_text(RANK.replace("TORCH", TORCH if torch else "").lstrip())
    python = sys.executable
    environment = {**os.environ, "TOKEN": token, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    words = [python, "-m", "ddpdoctor", "run", "--quiet", "--no-vscode", "--no-debug"]
    words += ["--grace", "2", "--run-dir", str(folder / "run")]
    if torch:
        words += ["--nproc-per-node", "2", "rank.py", token]
    else:
        ranks = [f"RANK={rank} {python} -I -S rank.py {token} & " for rank in (0, 1)]
        words += ["--", "bash", "-c", "".join(ranks) + "wait"]
    sleep = ["sleep", "3600"]
    other = {**os.environ, "DDPDOCTOR_RUN_ID": "1700000000-of-another-run"}
    bystanders = [
        subprocess.Popen(sleep, cwd=folder),
        subprocess.Popen(sleep, cwd=folder, env=other, start_new_session=True),
    ]
    with (folder / "output").open("wb") as output:
        job = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        reached = PHASES.index(phase)
        seen = ["start.0", "start.1"]
        if reached:
            seen += ["worker.0", "worker.1", "step.0", "step.1"]
        if reached >= 2:
            (folder / "save").touch()
            seen += ["checkpoint.0", "checkpoint.1"]
        if reached == 3:
            (folder / "go").touch()
            seen += ["exit.0"]
        if not wait_for(folder, *seen, job=job, timeout=timeout):
            raise RuntimeError(f"{phase} was not reached: {(folder / 'output').read_text()[-500:]}")
        time.sleep(draw.uniform(0, 0.3))
        found = members(job.pid, folder, draw.choice("01"))
        victims = tuple(name for name in victims if name in found)
        doomed = [found[name] for name in victims]
        together = draw.random() < 0.5
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                if together:
                    process.suspend()
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
            if not together:
                time.sleep(draw.choice([0, 0.01, 0.3]))
        if not {"supervisor", "command"} & set(victims):
            # The job goes on, and is asked to stop.
            time.sleep(draw.uniform(0, 1))
            job.send_signal(signal.SIGTERM)
        since = time.monotonic()
        left = of_token(token)
        while left and time.monotonic() - since < 6 * LIMIT:
            time.sleep(0.1)
            job.poll()
            left = of_token(token)
        seconds = time.monotonic() - since
        fine = all(each.poll() is None for each in bystanders)
        return Outcome(phase, victims, tuple(left.values()), seconds, fine)
    finally:
        for pid in of_token(token):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for each in (*bystanders, job):
            each.kill()
            each.wait()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", choices=["plain", "torch"], default="plain")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600, help="seconds to reach a phase")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    outcomes: list[Outcome] = []
    with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
        runs = []
        for number in range(options.count):
            victims = tuple(sorted(draw.sample(VICTIMS, draw.choice([1, 2, 2])), key=VICTIMS.index))
            seed = f"{options.seed}-{number}"
            phase = draw.choice(PHASES)
            runs.append(pool.submit(one, seed, options.job, phase, victims, options.timeout))
        for run in concurrent.futures.as_completed(runs):
            try:
                outcome = run.result()
            except RuntimeError as error:
                print("not run:", error, flush=True)
                continue
            outcomes.append(outcome)
            late = outcome.seconds > LIMIT
            if late or outcome.left or not outcome.bystanders:
                print("BAD" if outcome.left or not outcome.bystanders else "late", outcome)
            said = f"{len(outcomes)}: {outcome.phase}, {' and '.join(outcome.victims)}"
            print(f"{said}: {outcome.seconds:.1f} s", flush=True)
    table: dict[str, list[Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        table[" and ".join(outcome.victims) or "nobody: it was over"].append(outcome)
    print("\n| killed | runs | left after 10 s | most seconds |\n| --- | --- | --- | --- |")
    for name, some in sorted(table.items()):
        slow = sum(each.seconds > LIMIT for each in some)
        print(f"| {name} | {len(some)} | {slow} | {max(each.seconds for each in some):.1f} |")
    slow = sum(each.seconds > LIMIT for each in outcomes)
    phases = collections.Counter(each.phase for each in outcomes)
    print(
        f"all: {len(outcomes)} runs {dict(phases)}, left after 10 s: {slow}, for good: "
        f"{sum(bool(each.left) for each in outcomes)}, others ended: "
        f"{sum(not each.bystanders for each in outcomes)}, load {os.getloadavg()[1]:.0f}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
