"""Answer the head's questions about the ranks of this node."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from ddpdoctor.nodes import hang_examination
from ddpdoctor.nodes.alignment import parsed
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import as_json, document, json_line
from ddpdoctor.run.records.supervisor import NoCoreRecord, RankEvidence
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks.capture import capture


class Answers:
    """Answers questions about the ranks of a run. ``launcher`` is the process id of its command."""

    def __init__(self, directory: Path, launcher: int) -> None:
        self._directory = directory
        self._launcher = launcher
        self._lock = threading.Lock()
        self._reader: RunReader | None = None
        self._evidence: dict[int, RankEvidence] = {}
        self._seen: dict[int, hang_examination.Seen] = {}

    def answer(self, what: str, arguments: Any) -> Any:
        """Return the answer as JSON. None if the question is unknown."""
        with self._lock:
            if self._reader is None:
                self._reader = RunReader(self._directory, own=True)
            run = self._reader.snapshot()
            if what == "examine":
                return self._examine(run, int(arguments["number"]))
            if what == "stacks":
                return self._stacks(run, arguments)
        return None

    def _examine(self, run: Run, number: int) -> Any:
        waiting = [
            rank.rank
            for rank in run.last
            if rank.status is not None and rank.status.phase in (Phase.WAIT, Phase.BACKWARD)
        ]
        since = {rank.rank: rank.status.since for rank in run.last if rank.status is not None}
        lost = {
            each.rank: each.lost / 1e9
            for each in run.supervisor.of(NoCoreRecord)
            if since.get(each.rank) == each.since
        }
        found = hang_examination.examine(
            run, number, waiting, self._evidence, self._seen, self._launcher, lost
        )
        self._evidence = {each.rank: each for each in found}
        return [parsed(json_line(as_json(each))) for each in found]

    def _stacks(self, run: Run, arguments: Any) -> Any:
        patience = min(30.0, float(arguments.get("patience", 2.0)))
        wanted = {name: arguments.get(name) is True for name in ("native", "variables")}
        found = capture(run, arguments.get("ranks"), patience, **wanted)
        return [document(each) for each in found]
