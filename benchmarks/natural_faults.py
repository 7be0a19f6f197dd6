"""Random faults planted into natural training scripts of many shapes: right rank, cause and line?

    python benchmarks/natural_faults.py --count 300 --healthy 100

The scripts are in ``natural/``. A comment ``# place: KIND [STEP]`` says what may be planted there,
and by which expression the step is known there. The draws are the same for the same ``--seed``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.marks import read, standing

NATURAL = Path(__file__).parent / "natural"
_PLACE = re.compile(r"^(\s*)(.*?)  # place: (\w+)(?: (\S+))?$")
_IMPORTS = "import os, signal, sys, time"


@dataclass(frozen=True)
class Place:
    """A line at which something may be planted."""

    file: Path
    number: int
    """From 0."""
    indent: str
    code: str
    step: str


@dataclass(frozen=True)
class Fault:
    """A fault: where it is planted, what takes the line's place, and what may be said of it."""

    place: str
    codes: tuple[str, ...]
    lines: Callable[[Place, str, str], list[str]]
    """From the place, the test on the rank, and the test on rank and step; ``!`` marks guilt."""
    anywhere: bool = False
    """No rank is to blame: any ranks, and any marked line, are right."""
    unasked: bool = False
    """The process cannot be asked where it is: any line near it, or none, is right."""


def before(*planted: str) -> Callable[[Place, str, str], list[str]]:
    """Statements in front of the line, on one rank in one step."""

    def lines(place: Place, rank: str, moment: str) -> list[str]:
        return [f"!if {moment}:", *(f"!    {each}" for each in planted), place.code]

    return lines


def always(planted: str) -> Callable[[Place, str, str], list[str]]:
    """A statement in front of the line, on one rank in every step."""
    return lambda place, rank, moment: [f"!if {rank}:", f"!    {planted}", place.code]


def inside(planted: str) -> Callable[[Place, str, str], list[str]]:
    """A statement at the beginning of the loop's body."""
    return lambda place, rank, moment: [
        f"!{place.code}",
        f"!    if {moment}:",
        f"!        {planted}",
    ]


def _optimizer(place: Place, rank: str, moment: str, planted: str) -> list[str]:
    name = place.code.removesuffix(".step()")
    statements = planted.format(name).split("\n")
    return [f"!if {moment}:", *(f"!    {each}" for each in statements), place.code]


def of_optimizer(planted: str) -> Callable[[Place, str, str], list[str]]:
    """Statements about the optimizer whose ``step()`` the line is, in front of it."""
    return lambda place, rank, moment: _optimizer(place, rank, moment, planted)


def without_sampler(place: Place, rank: str, moment: str) -> list[str]:
    """The loader without its sampler."""
    return ["!" + re.sub(r"sampler=(\w+\([^()]*\)|\w+(\.\w+)*)", "shuffle=True", place.code)]


_EACH = 'for parameter in {0}.param_groups[0]["params"]:\n    '
FAULTS: Mapping[str, Fault] = {
    "exception": Fault("step", ("DDP901",), before('raise RuntimeError("a broken sample")')),
    "exit": Fault("step", ("DDP905",), before("os._exit(3)")),
    "leaves": Fault("step", ("DDP801", "DDP403", "DDP905"), before("sys.exit(0)")),
    "kill": Fault(
        "step", ("DDP902",), before("os.kill(os.getpid(), signal.SIGKILL)"), unasked=True
    ),
    "stop": Fault(
        "step", ("DDP805",), before("os.kill(os.getpid(), signal.SIGSTOP)"), unasked=True
    ),
    "sleep": Fault("step", ("DDP802",), before("time.sleep(600)")),
    "endless loop": Fault("step", ("DDP807",), before("while True:", "    pass")),
    "barrier": Fault("step", ("DDP401", "DDP803"), before("dist.barrier()")),
    "slow": Fault("step", ("DDP610",), always("time.sleep(0.15)")),
    "break": Fault("loop", ("DDP403", "DDP801", "DDP109"), inside("break")),
    "continue": Fault("loop", ("DDP403", "DDP109"), inside("continue")),
    "not a number": Fault("loss", ("DDP706",), before('loss = loss * float("nan")')),
    "weights": Fault(
        "update", ("DDP701", "DDP319"), of_optimizer(_EACH + "parameter.data.mul_(1.01)")
    ),
    "gradients": Fault(
        "update", ("DDP701", "DDP709"), of_optimizer(_EACH + "parameter.grad.mul_(0.5)")
    ),
    "learning rate": Fault("update", ("DDP702",), of_optimizer('{0}.param_groups[0]["lr"] *= 2')),
    "missing": Fault(
        "collective",
        ("DDP401", "DDP803", "DDP802", "DDP801"),
        lambda place, rank, moment: [f"!if not ({rank}):", f"!    {place.code}"],
    ),
    "size": Fault(
        "collective",
        ("DDP803", "DDP401"),
        lambda place, rank, moment: [
            f"!if {rank}:",
            "!    dist.all_reduce(torch.zeros(99))",
            "!else:",
            f"!    {place.code}",
        ],
    ),
    "operation": Fault(
        "collective",
        ("DDP803",),
        lambda place, rank, moment: [
            f"!op = dist.ReduceOp.MAX if {rank} else dist.ReduceOp.SUM",
            "!" + re.sub(r"(, op=[\w.]+)?\)$", ", op=op)", place.code),
        ],
    ),
    "no sampler": Fault("sampler", ("DDP101", "DDP102"), without_sampler, anywhere=True),
    "no set_epoch": Fault("epoch", ("DDP103",), lambda *_: ["pass"], anywhere=True),
    "same shard": Fault(
        "shard",
        ("DDP115", "DDP102"),
        lambda place, *_: ["!for number in range(self.documents):"],
        anywhere=True,
    ),
}


@dataclass(frozen=True)
class Case:
    """One run: a script, with or without a fault."""

    script: str
    ranks: int
    fault: str = ""
    rank: int = 0
    step: int = 0

    @property
    def words(self) -> str:
        """What it is, in a line."""
        at = f", {self.fault} on rank {self.rank} in step {self.step}" if self.fault else ""
        return f"{self.script}, {self.ranks} ranks{at}"


def scripts() -> dict[str, list[Path]]:
    """The files of each script; the first is the one to start."""
    single = {path.stem: [path] for path in sorted(NATURAL.glob("*.py"))}
    folders = {
        main.parent.name: [main, *(set(main.parent.glob("*.py")) - {main})]
        for main in NATURAL.glob("*/main.py")
    }
    return {**single, **folders}


def places(files: list[Path], kind: str) -> list[Place]:
    """Where in a script faults of a kind may be planted."""
    return [
        Place(path, number, match[1], match[2], match[4] or "")
        for path in files
        for number, line in enumerate(path.read_text().splitlines())
        if (match := _PLACE.match(line)) and match[3] == kind
    ]


def plant(case: Case, directory: Path) -> tuple[Path, set[tuple[str, int]]]:
    """Write the script with its fault; what to start, and the guilty lines."""
    files = scripts()[case.script]
    texts = {path: path.read_text().splitlines() for path in files}
    guilty: set[tuple[str, int]] = set()
    if case.fault:
        fault = FAULTS[case.fault]
        place = next(iter(places(files, fault.place)))
        rank = f"dist.get_rank() == {case.rank}"
        moment = f"{rank} and {place.step} == {case.step}"
        planted = fault.lines(place, rank, moment)
        text = texts[place.file]
        if case.fault == "no sampler":
            for epoch in places(files, "epoch"):
                texts[epoch.file][epoch.number] = f"{epoch.indent}pass"
        text[place.number : place.number + 1] = [place.indent + e.lstrip("!") for e in planted]
        first = next(
            number for number, line in enumerate(text) if line.startswith(("import", "from"))
        )
        text.insert(first, _IMPORTS)
        name = str(directory / place.file.name)
        guilty = {
            (name, place.number + 2 + index)
            for index, line in enumerate(planted)
            if line.startswith("!")
        }
        if fault.unasked:
            guilty |= {(name, place.number + 2 + index) for index in range(-8, 12)}
    for path, text in texts.items():
        (directory / path.name).write_text("\n".join(text) + "\n")
    if case.fault and FAULTS[case.fault].anywhere:
        guilty |= {
            (str(directory / path.name), number)
            for path, text in texts.items()
            for number, line in enumerate(text, 1)
            if any(word in line for word in ("# place:", "Sampler(", "DataLoader("))
        }
    return directory / files[0].name, guilty


@dataclass(frozen=True)
class Judged:
    """What was said of a case."""

    case: Case
    cause: bool
    line: bool
    errors: int
    """Findings at error level; of a job with a fault, those besides the right one."""
    said: str
    seconds: float


def run(case: Case, keep: Path | None = None) -> Judged:
    """Run a case and judge what is said of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="natural") as name:
        directory = Path(name)
        script, guilty = plant(case, directory)
        report = directory / "findings.json"
        report.touch()
        command = [sys.executable, "-m", "ddpdoctor", "run", "--no-vscode", "--debug-port", "0"]
        command += ["--run-dir", str(directory / "run"), "--json", str(report), "--quiet"]
        command += ["--kill-on-hang", *(["--hang-after", "4"] if case.fault else [])]
        if case.script == "spawn":
            command += ["--", sys.executable, str(script), str(case.ranks)]
        else:
            command += ["--nproc-per-node", str(case.ranks), "--", str(script)]
        with open(directory / "err", "w+") as errors:
            job = subprocess.Popen(
                command,
                cwd=directory,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": name},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            try:
                status: int | str = job.wait(600)
            except subprocess.TimeoutExpired:
                job.terminate()
                job.wait()
                status = "not over after 600 s"
            errors.seek(0)
            text = errors.read()
        found = [each for each in standing(read(report)) if each["severity"] != "info"]
        if keep is not None:
            kept = keep / re.sub(r"\W+", "-", case.words)
            kept.mkdir(parents=True, exist_ok=True)
            for path in (*directory.glob("*.*"), directory / "err"):
                shutil.copy(path, kept)
    return judge(case, guilty, found, f"{status} {text[-400:]}", time.monotonic() - began)


def judge(
    case: Case,
    guilty: set[tuple[str, int]],
    found: list[dict[str, Any]],
    ending: str,
    seconds: float,
) -> Judged:
    words = "; ".join(f"{each['code']} {each['message']}" for each in found)
    errors = [each for each in found if each["severity"] == "error"]
    if not case.fault:
        # A job without a fault that fails is a fault of ours, too.
        failed = not ending.startswith("0 ") and "terminate called without" not in ending
        return Judged(case, not found, True, len(errors) + failed, words or ending[:200], seconds)
    fault = FAULTS[case.fault]
    ranks = [[case.rank]]
    others = [rank for rank in range(case.ranks) if rank != case.rank]
    if case.fault == "missing":
        # Which ranks never call it, or which alone do.
        ranks.append(others)
    if case.ranks == 2 and case.fault in ("operation", "size"):
        # Each takes a branch of one condition, and none is the majority.
        ranks.append([0, 1])
    right = [
        each
        for each in found
        if each["code"] in fault.codes and (fault.anywhere or each["ranks"] in ranks)
    ]
    first = found[0] if found else {}
    at = [each["location"] for each in right if each["location"] is not None]
    line = any((place["path"], place["line"]) in guilty for place in at)
    return Judged(
        case,
        first in right,
        bool(right) and (line or (fault.unasked and not at)),
        sum(each not in right for each in errors),
        words or f"nothing; status {ending}",
        seconds,
    )


def cases(count: int, healthy: int, seed: int, only: str) -> list[Case]:
    """The drawn runs, those with faults first."""
    draw = random.Random(seed)
    names = sorted(scripts())
    pairs = [
        (script, fault)
        for script in names
        for fault in FAULTS
        if places(scripts()[script], FAULTS[fault].place)
    ]
    drawn: list[Case] = []
    while len(drawn) < count:
        draw.shuffle(pairs)
        for script, fault in pairs:
            ranks = draw.choice((2, 2, 3, 4))
            drawn.append(Case(script, ranks, fault, draw.randrange(ranks), draw.randrange(2, 6)))
    drawn = drawn[:count]
    drawn += [Case(names[n % len(names)], 2 + n // len(names) % 3) for n in range(healthy)]
    return [case for case in drawn if only in case.words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=60, help="runs with a fault")
    parser.add_argument("--healthy", type=int, default=20, help="runs without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="runs whose description contains this")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--keep", type=Path, help="a folder for scripts, findings and stderr")
    parser.add_argument("--minutes", type=float, default=240, help="start no run after so long")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    judged: list[Judged] = []

    def one(case: Case) -> Judged | None:
        return run(case, options.keep) if time.monotonic() < deadline else None

    wanted = cases(options.count, options.healthy, options.seed, options.only)
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        for done in concurrent.futures.as_completed([pool.submit(one, each) for each in wanted]):
            result = done.result()
            if result is None:
                continue
            judged.append(result)
            if not (result.cause and result.line) or result.errors:
                kind = "" if result.cause else "cause "
                kind += "" if result.line else "line "
                kind += "errors " if result.errors else ""
                print(f"  {kind}({result.case.words}, {result.seconds:.0f} s): {result.said}")
                sys.stdout.flush()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print("| fault | runs | right rank and cause | right line | other errors |")
    print("| --- | --- | --- | --- | --- |")
    sick = [each for each in judged if each.case.fault]
    for name in [*FAULTS, "all"]:
        rows = [each for each in sick if name in ("all", each.case.fault)]
        if rows:
            counts = Counter(cause=0, line=0, errors=0)
            for each in rows:
                counts.update(
                    cause=each.cause, line=each.line and each.cause, errors=bool(each.errors)
                )
            numbers = f"{counts['cause']} | {counts['line']} | {counts['errors']}"
            print(f"| {name} | {len(rows)} | {numbers} |")
    fine = [each for each in judged if not each.case.fault]
    print(
        f"without a fault: {len(fine)} runs, errors in {sum(bool(e.errors) for e in fine)}, "
        f"anything above info in {sum(not e.cause for e in fine)}"
    )


if __name__ == "__main__":
    main()
