"""MLflow: a run in an experiment."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from ddpdoctor.core.finding import Finding
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.trackers.base import file_name, text_of

EXPERIMENT = "ddpdoctor"
_MAX_TAG = 5000  # Characters of a tag's value


class Client:
    """Logs to a run. MLflow's variables apply, such as ``MLFLOW_TRACKING_URI``.

    Args:
        place: The tracking server's URL or a directory [default: as MLflow chooses].
        run: The run.
    """

    has_past = True

    def __init__(self, place: str, run: Snapshot) -> None:
        self._client = MlflowClient(place or None)
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        number = (
            experiment.experiment_id if experiment else self._client.create_experiment(EXPERIMENT)
        )
        tags = {"ddpdoctor.command": run.command[:_MAX_TAG], "ddpdoctor.run": run.run}
        made = self._client.create_run(number, tags=tags, run_name=f"ddpdoctor {run.run}")
        self._run = made.info.run_id
        self.place = f"experiment {EXPERIMENT}, run {self._run}"

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Log metrics, in one request."""
        metrics = [Metric(name, each, int(time * 1000), step) for name, each in values.items()]
        self._client.log_batch(self._run, metrics)

    def finding(self, finding: Finding, step: int, time: float) -> None:
        """Set a tag, which the list of runs shows, and write the text as an artifact."""
        text = text_of(finding)
        self._client.set_tag(self._run, f"ddpdoctor.{finding.code}", text[:_MAX_TAG])
        name = file_name(f"{finding.code}-{finding.id}")
        try:
            self._client.log_text(self._run, text, f"ddpdoctor/{name}.txt")
        except (MlflowException, OSError):
            # This machine may have no access to the artifact store. The tag is set.
            return

    def close(self, how: str, succeeded: bool) -> None:
        """End the run."""
        self._client.set_tag(self._run, "ddpdoctor.end", how[:_MAX_TAG])
        self._client.set_terminated(self._run, "FINISHED" if succeeded else "FAILED")
