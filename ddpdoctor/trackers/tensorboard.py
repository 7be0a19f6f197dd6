"""TensorBoard: event files, written by torch's own writer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import tensorboard  # noqa: F401 (torch's own message about a missing package is longer)
from torch.utils.tensorboard import SummaryWriter

from ddpdoctor.core.finding import Finding
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.trackers.base import file_name, text_of


class Client:
    """Writes event files.

    Args:
        place: A directory. Each run has its own directory in it [default: ``runs``].
        run: The run.
    """

    has_past = True

    def __init__(self, place: str, run: Snapshot) -> None:
        folder = Path(place or "runs").absolute() / f"ddpdoctor-{file_name(run.run)}"
        self.place = f"tensorboard --logdir {folder.parent}"
        # torch flushes only every two minutes by default.
        self._writer = SummaryWriter(os.fspath(folder), flush_secs=10)
        self._writer.add_text("ddpdoctor/command", run.command, 0, run.started)

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, time)

    def finding(self, finding: Finding, step: int, time: float) -> None:
        """Write a text."""
        # Markdown would join the lines.
        text = "\n".join(f"    {line}" for line in text_of(finding).split("\n"))
        self._writer.add_text(f"ddpdoctor/{finding.code}", text, step, time)

    def close(self, how: str, succeeded: bool) -> None:
        """Write how the run ended, and flush the file."""
        self._writer.add_text("ddpdoctor/end", how)
        self._writer.close()
