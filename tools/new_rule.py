"""Lay out a new rule: ``python -m tools.new_rule DDP999 shouted-loss``.

Writes four files, each a complete example to change: the rule with its page, a sick job that the
rule names, the healthy twin, and the rule's test on a written run. Nothing else has to be edited.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.commands.explain import entries
from ddpdoctor.core.finding import RULES

ROOT = Path(__file__).parent.parent

RULE = '''\
"""FILL IN: what this family of findings is about (CODE)."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.run.records.training import SaveRecord
from ddpdoctor.run.snapshot import Run


@rule("CODE", "SLUG", Severity.WARNING)
def NAME(run: Run) -> Iterator[Finding]:
    """FILL IN: one line, as the list of all rules shows it.

    What it finds
        FILL IN: what is seen of the run, in two or three sentences.

    Why it is bad
        FILL IN: what becomes of the job or of the model.

    How to fix it
        FILL IN: what to change.

    Example
        Wrong:
            FILL_IN = "code"
        Right:
            FILL_IN = "code"

    When it stays silent
        FILL IN: where the evidence would be too thin.
    """
    # The records that ranks write are listed in `ddpdoctor.run.records`.
    for rank in run.last:
        for record in rank.records.of(SaveRecord):
            if "shout" in record.file:
                yield Finding(
                    code="CODE",
                    severity=Severity.WARNING,
                    message=f"{named([rank.rank])} saves a checkpoint with a loud name",
                    ranks=(rank.rank,),
                    location=record.location,
                    evidence=(f"the file is {record.file}",),
                    fix="Give the file another name.",
                )
'''

JOB = '''\
"""FILL IN: what the job does wrong."""

# fix: Give the file another name

import gc
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), f"{folder}/shout.pt")  # expect: CODE rank 0
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
'''

TEST = '''\
"""CODE: FILL IN."""

from __future__ import annotations

from ddpdoctor.run.records.training import SaveRecord
from tests.support.written import Written


def saved(file: str) -> SaveRecord:
    return SaveRecord(time=1, file=file, content="data", path="/job/train.py", line=24)


def test_a_loud_name_is_named_with_its_rank_and_line(written: Written) -> None:
    written.rank(0, [saved("/tmp/shout.pt")])
    written.rank(1, [])
    (finding,) = written.findings()
    assert (finding.code, finding.ranks) == ("CODE", (0,))
    assert str(finding.location) == "/job/train.py:24"


def test_another_name_is_left_alone(written: Written) -> None:
    written.rank(0, [saved("/tmp/last.pt")])
    written.rank(1, [])
    assert written.findings() == []
'''


FAMILIES = {
    "1": "data",
    "2": "launch",
    "3": "gradients",
    "4": "collectives",
    "5": "checkpoints",
    "6": "speed",
    "7": "replicas",
    "8": "hangs",
    "9": "crashes",
}
"""The packages of rules by the first digit of their codes."""


def layout(code: str, slug: str) -> dict[Path, str]:
    """The files of a new rule, by their paths below the repository."""
    name = slug.replace("-", "_")

    def filled(text: str) -> str:
        return text.replace("CODE", code).replace("SLUG", slug).replace("NAME", name)

    stem = f"{code.lower()}_{name}"
    unmarked = re.sub(r"  # expect: .*|# fix: .*\n\n", "", JOB)
    twin = unmarked.replace("shout.pt", "last.pt").replace("wrong", "right")
    return {
        Path("ddpdoctor/diagnose") / FAMILIES[code[3]] / f"rules_{name}.py": filled(RULE),
        Path("tests/jobs/sick") / f"{stem}.py": filled(JOB),
        Path("tests/jobs/sick") / f"{stem}_healed.py": filled(twin),
        Path("tests/diagnose") / f"test_{name}.py": filled(TEST),
    }


def main(words: list[str] | None = None, root: Path = ROOT) -> int:
    """Write the files; 2 if the code or a file is taken."""
    parser = argparse.ArgumentParser(prog="python -m tools.new_rule", description=__doc__)
    parser.add_argument("code", nargs="?", default="", help="DDP and three digits, such as DDP999")
    parser.add_argument(
        "slug", nargs="?", default="", help="its name in words, such as shouted-loss"
    )
    parser.add_argument("--free", action="store_true", help="list the codes that are free, and end")
    asked = parser.parse_args(words)
    if asked.free:
        for digit, family in FAMILIES.items():
            codes = (f"DDP{digit}{number:02}" for number in range(1, 100))
            free = [code for code in codes if code not in entries()]
            print(f"{family}: {', '.join(free[:12])}{', ...' if len(free) > 12 else ''}")
        return 0
    if not re.fullmatch(r"DDP[1-9]\d{2}", asked.code) or not re.fullmatch(
        r"[a-z][a-z0-9-]*", asked.slug
    ):
        parser.error("give a code such as DDP999 and a name such as shouted-loss")
    if asked.code in RULES:
        print(f"{asked.code} is {RULES[asked.code].name}: take another code", file=sys.stderr)
        return 2
    files = layout(asked.code, asked.slug)
    taken = [path for path in files if (root / path).exists()]
    if taken:
        print(f"{taken[0]} is there already", file=sys.stderr)
        return 2
    for path, text in files.items():
        (root / path).write_text(text)
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
