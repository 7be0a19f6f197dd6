"""Run directories written by hand, with the real writers."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.finding import RULES, Detect, Finding, Severity, examine
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.names import FORMAT, rank_stem
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import JsonObject, Record, json_line
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.records.supervisor import JobRecord
from ddpdoctor.run.records.typed_json import SUPERVISOR_RECORDS, decode
from ddpdoctor.run.snapshot import Records, Run
from ddpdoctor.run.status import Phase, StatusPage, page_name, page_text

T0 = 1_700_000_000_000_000_000
MS = 1_000_000
SECOND = 1_000 * MS

OTHERWISE: dict[str, tuple[Severity, ...]] = {
    "DDP052": (Severity.ERROR,),
    "DDP057": (Severity.ERROR, Severity.INFO),
    "DDP106": (Severity.INFO,),
    "DDP215": (Severity.ERROR,),
    "DDP305": (Severity.WARNING, Severity.INFO),
    "DDP102": (Severity.WARNING,),
    "DDP308": (Severity.WARNING,),
    "DDP329": (Severity.INFO,),
    "DDP501": (Severity.ERROR,),
    "DDP502": (Severity.WARNING, Severity.ERROR),
    "DDP503": (Severity.ERROR,),
    "DDP509": (Severity.WARNING,),
    "DDP601": (Severity.INFO,),
    "DDP704": (Severity.INFO,),
    "DDP802": (Severity.WARNING,),
    "DDP808": (Severity.INFO,),
    "DDP809": (Severity.WARNING,),
    "DDP814": (Severity.ERROR,),
    "DDP815": (Severity.WARNING,),
    "DDP928": (Severity.WARNING,),
}
"""Severities of a code's findings besides the declared one: by what is seen, and when."""


def as_declared(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, each of which has the severity that its page says, or a known other."""
    found = list(findings)
    for each in found:
        known = RULES[each.code].severity, *OTHERWISE.get(each.code, ())
        assert each.severity in known, each
    return found


def examined(run: Run) -> list[Finding]:
    """What all rules say of a run; each finds what its own page describes."""

    @functools.cache
    def checked(detect: Detect) -> Detect:
        def detected(run: Run) -> Iterator[Finding]:
            for each in as_declared(detect(run)):
                assert detect in (RULES[each.code].detect, RULES[each.code].beside)
                yield each

        return detected

    rules = (
        replace(
            rule,
            detect=checked(rule.detect),
            beside=checked(rule.beside) if rule.beside is not None else None,
        )
        for rule in RULES.values()
    )
    return examine(run, rules)


def rank_records(*lines: JsonObject) -> Records:
    """Records of a rank, as they are read back from lines with these keys."""
    return Records(each for line in lines if (each := decode(line)) is not None)


def supervisor_records(*lines: JsonObject) -> Records:
    """The same of the supervisor."""
    read = (decode(line, SUPERVISOR_RECORDS) for line in lines)
    return Records(each for each in read if each is not None)


def writable(record: Record | JsonObject | bytes) -> Record | bytes:
    """What a journal takes: lines that no writer of today makes are written as they are."""
    return json_line(record) if isinstance(record, dict) else record


@dataclass
class Written:
    """A run directory in the making."""

    path: Path
    supervisor: list[JsonObject] = field(default_factory=list)
    world_size: int = 0
    """What ranks say of it; 0: nothing."""

    def rank(
        self,
        number: int,
        records: Iterable[Record | JsonObject | bytes],
        *,
        phase: Phase = Phase.ENDED,
        since: int = T0,
        armed: int = 0,
        steps: int = 0,
        reduced: int = 0,
        collective: str = "",
        site: str = "",
        gpu: str = "",
        opened: Mapping[str, Any] = {},
    ) -> None:
        stem = self.path / rank_stem(number, 0)
        page = StatusPage(
            f"{stem}.status",
            rank=number,
            world_size=self.world_size or 2,
            local_rank=number,
            restart=0,
            started=T0,
        )
        page.show(phase, since, armed)
        page.totals(steps, -1, 0, 0)
        page.reduced(reduced)
        page.set_collective(page_name(collective))
        page.set_site(page_text(site))
        page.set_gpu(gpu)
        journal = Journal(f"{stem}.jsonl", 1 << 20)
        known: dict[str, Any] = {"world_size": self.world_size, "backend": "nccl", **opened}
        open_record = OpenRecord(format=FORMAT, rank=number, **known)
        group = tuple(range(self.world_size or 2))
        ddp = DdpRecord(device=f"cuda:{number}", group_ranks=group)
        journal.write([open_record, ddp, *map(writable, records)])
        journal.close()

    def findings(self, *, status: int | None = None, stderr: str = "") -> list[Finding]:
        manifest = {"format": FORMAT, "launcher": "torchrun"}
        (self.path / "run.json").write_text(json.dumps(manifest))
        (self.path / "stderr.log").write_text(stderr)
        journal = Journal(str(self.path / "supervisor.jsonl"), 1 << 20)
        journal.write(map(writable, self.supervisor))
        if status is not None:
            journal.write([JobRecord(time=T0, status=status)])
        journal.close()
        return examined(RunReader(self.path).snapshot())

    def exit(self, rank: int, status: int, time: int) -> None:
        self.supervisor.append(
            {"kind": "rank_exit", "rank": rank, "restart": 0, "status": status, "time": time}
        )
