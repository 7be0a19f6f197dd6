"""Ask the machine's scheduler about the job that it started, and why it ends the job."""

from __future__ import annotations

import os
import threading

from ddpdoctor.failures import slurm

TIMEOUT = 3.0  # Seconds for the scheduler to answer


class Scheduler:
    """Asks Slurm or Kubernetes why they end a job, once."""

    def __init__(self) -> None:
        self._job = os.environ.get("SLURM_JOB_ID", "")
        self._pod = (
            os.environ.get("HOSTNAME", "") if "KUBERNETES_SERVICE_HOST" in os.environ else ""
        )
        self._why = ""
        self._thread: threading.Thread | None = None
        self._is_asked = False

    @property
    def restarts(self) -> str:
        """Return a sentence if Slurm has started the job before. Otherwise empty."""
        count = os.environ.get("SLURM_RESTART_COUNT", "0") if self._job else "0"
        if not count.isdigit() or int(count) == 0:
            return ""
        return f"Slurm has started job {self._job} again (restart {int(count)})"

    def ask(self) -> None:
        """Start to query why the job is asked to end, because Slurm may forget it soon."""
        self._is_asked = True
        if self._thread is None and self._job:
            self._thread = threading.Thread(target=self._ask, name="ddpdoctor-slurm", daemon=True)
            self._thread.start()

    def _ask(self) -> None:
        self._why = slurm.why_stopped(self._job, TIMEOUT)

    def why(self) -> str:
        """Return why the job was asked to end, after at most `TIMEOUT`. Empty if unknown."""
        if self._thread is not None:
            self._thread.join(TIMEOUT)
        if self._is_asked and not self._why and self._pod:
            return (
                f"`kubectl describe pod {self._pod}` says whether Kubernetes deleted, evicted or "
                "preempted the pod"
            )
        return self._why
