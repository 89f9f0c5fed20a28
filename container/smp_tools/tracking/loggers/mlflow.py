"""MLflow: the store that ``MLFLOW_TRACKING_URI`` names, else a database in the folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smp_tools.tracking.points import MetricPoint
    from smp_tools.tracking.run import TrackedRun

#: Of one request, as MLflow takes it.
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100
#: Of a parameter's value, in any version of MLflow.
_MOST_CHARACTERS = 500


class MLflowLogger:
    """Writes metrics into a run of its own; the ranks of a restart, and a job that goes on in the same folder, go on in it.

    ``MLFLOW_RUN_ID`` and ``MLFLOW_EXPERIMENT_NAME`` mean what they mean for MLflow.
    """

    name = "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # it asks git for nothing here
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        folder = run.folder / self.name
        folder.mkdir(parents=True, exist_ok=True)
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        self._metric, self._client = Metric, MlflowClient(tracking_uri=address)
        kept = folder / "run_id"
        known = os.environ.get("MLFLOW_RUN_ID") or (kept.read_text(encoding="ascii") if kept.exists() else "")
        if known:
            self._run_id = known
            self._client.update_run(known, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        found = self._client.get_experiment_by_name(experiment)
        place = None if os.environ.get("MLFLOW_TRACKING_URI") else (folder / "artifacts").absolute().as_uri()
        number = found.experiment_id if found else self._client.create_experiment(experiment, artifact_location=place)
        self._run_id = self._client.create_run(number, run_name=run.name or None).info.run_id
        kept.write_text(self._run_id, encoding="ascii")
        told = [Param(name, value[:_MOST_CHARACTERS]) for name, value in run.settings.items()]
        tags = [RunTag("smp.job", run.name)] if run.name else []
        self._client.log_batch(self._run_id, params=told[:_MOST_PARAMETERS], tags=tags)

    def write(self, points: Sequence[MetricPoint]) -> None:
        """See :class:`~smp_tools.tracking.writer.Logger`."""
        metrics = self._metrics(points)
        while some := list(islice(metrics, _MOST_METRICS)):
            self._client.log_batch(self._run_id, metrics=some)

    def _metrics(self, points: Sequence[MetricPoint]) -> Iterator[Any]:
        for point in points:
            for name, value in point.values.items():
                yield self._metric(name, value, int(point.when * 1000), point.step)

    def flush(self) -> None:
        """See :class:`~smp_tools.tracking.writer.Logger`; each request is written when it has returned."""

    def close(self, *, failed: bool) -> None:
        """See :class:`~smp_tools.tracking.writer.Logger`."""
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
