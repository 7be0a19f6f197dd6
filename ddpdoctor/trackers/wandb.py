"""Weights & Biases: a separate run, next to one that the job may log itself."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import wandb

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.trackers.base import text_of

_LEVELS = {Severity.INFO: "INFO", Severity.WARNING: "WARN", Severity.ERROR: "ERROR"}


class Client:
    """Logs to a run. W&B's variables apply, such as ``WANDB_MODE`` and ``WANDB_API_KEY``.

    Args:
        place: The project [default: ``WANDB_PROJECT``, or ddpdoctor].
        run: The run.
    """

    has_past = True

    def __init__(self, place: str, run: Snapshot) -> None:
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, x_disable_stats=True
        )
        project = place or wandb.setup().settings.project or "ddpdoctor"
        self._run = wandb.init(
            project=project,
            name=f"ddpdoctor {run.run}",
            job_type="ddpdoctor",
            config={"command": run.command, "world_size": run.world_size},
            # The job may have set WANDB_RUN_ID for its own run.
            id=secrets.token_hex(4),
            settings=settings,
        )
        self._texts: list[tuple[str, str]] = []
        folder = Path(self._run.dir).parent
        self.place = f"wandb sync {folder}" if self._run.offline else str(self._run.url)

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Log numbers. Steps that a restarted job repeats would be refused."""
        self._run.log({**values, "ddpdoctor/step": step, "_timestamp": time})

    def finding(self, finding: Finding, step: int, time: float) -> None:
        """Send an alert, and keep the text in the run's summary."""
        text = text_of(finding)
        self._run.summary[f"ddpdoctor/{finding.code}"] = text
        if finding.severity > Severity.INFO:
            level = wandb.AlertLevel[_LEVELS[finding.severity]]
            self._run.alert(f"{finding.severity.label} {finding.code}", text, level)

    def close(self, how: str, succeeded: bool) -> None:
        """Finish the run."""
        self._run.summary["ddpdoctor/end"] = how
        self._run.finish(exit_code=0 if succeeded else 1)
