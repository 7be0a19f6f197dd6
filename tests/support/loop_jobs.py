"""Written runs of a training loop."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.core.finding import Finding
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.status import Phase
from tests.support.written import SECOND, T0, Written

JOB = """\
def train(loader, epochs):
    for epoch in range(epochs):
        for number, batch in enumerate(loader):
            if broken(batch):
                continue
            loss = model(batch)
            loss.backward()
            if loss.item() < 0.1:
                break
        if evaluate() > best:
            break
"""
HEADER, SKIP, FORWARD, BACKWARD, BREAK, STOP = 3, 5, 6, 7, 9, 11


AHEAD = """\
def train(pairs, persistent):
    for number, batch in enumerate(pairs):
        loss = model(batch)
        if loss.isnan():
            break
        loss.backward()
        dist.all_reduce(number)
    dist.all_reduce(loss)
"""


ABORTED = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  "
    "[enforce fail at pair.cc:452] op.preamble.length <= op.nbytes. 68 vs 4. \n"
)


class Job:
    """Two ranks of a run, and the script that they ran."""

    def __init__(self, written: Written, text: str = JOB, at: int = HEADER) -> None:
        self.written = written
        self.path = str(written.path / "train.py")
        self.at = at
        Path(self.path).write_text(text)

    def loop(self, number: int = 0, before: int = 0, **facts: object) -> JsonObject:
        """A loop that begins to train."""
        return {
            "kind": "loop", "loop": number, "time": T0, "state": "trains", "step": before,
            "frames": [[self.path, self.at]], "before": before, "joins": False, "idle": [], **facts,
        }  # fmt: skip

    def over(
        self, state: str, fetched: int, after: int, *, number: int = 0, left_at: int = 0,
        **facts: object,
    ) -> JsonObject:  # fmt: skip
        """The end of a loop."""
        where = {"left_at": [[self.path, left_at]]} if left_at else {}
        return {
            "kind": "loop", "loop": number, "time": T0, "state": state, "step": after,
            "fetched": fetched, "after": after, **where, **facts,
        }  # fmt: skip

    def sites(self) -> list[JsonObject]:
        lines = (("forward", FORWARD), ("backward", BACKWARD))
        return [
            {"kind": "site", "phase": name, "path": self.path, "line": line} for name, line in lines
        ]

    def waits(self, rank: int, records: list[JsonObject], reduced: int, seconds: int = 60) -> None:
        """A rank in a backward since that long when it is killed."""
        self.written.rank(
            rank, records, phase=Phase.BACKWARD, armed=reduced, steps=reduced - 1, reduced=reduced
        )
        self.written.exit(rank, -9, T0 + seconds * SECOND)
        self.written.supervisor[-1]["status"] = -15

    def ends(self, rank: int, records: list[JsonObject], reduced: int) -> None:
        """A rank that comes to its regular end."""
        end = {"kind": "end", "time": T0, "steps": reduced, "armed": reduced}
        self.written.rank(rank, [*records, end], armed=reduced, steps=reduced, reduced=reduced)
        self.written.exit(rank, 0, T0)

    def findings(self) -> list[Finding]:
        return self.written.findings(status=1)

    def codes(self) -> list[str]:
        return [each.code for each in self.findings()]

    def decided(self) -> tuple[tuple[int, ...], int]:
        """The ranks and the line of the only finding."""
        (finding,) = self.findings()
        assert finding.code == "DDP403"
        assert finding.location is not None
        assert finding.location.path == self.path
        return finding.ranks, finding.location.line
