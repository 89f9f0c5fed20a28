"""The logger for Weights & Biases: offline in the folder, unless ``WANDB_MODE`` is set otherwise."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_tools.tracking.points import MetricPoint
    from smp_tools.tracking.run import TrackedRun


class WandbLogger:
    """A logger that writes into a run with an ID from the job's name, so that the ranks of a restart continue the run.

    ``wandb sync`` uploads an offline run to a server. ``WANDB_PROJECT``, ``WANDB_MODE`` and other variables have the same meaning
    as for wandb.
    """

    name = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        settings = wandb.Settings(console="off", quiet=True, x_disable_stats=True)
        same = {"id": hashlib.sha256(run.name.encode()).hexdigest()[:16], "resume": "allow"} if run.name else {}
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.project,
            name=run.name or None,
            dir=str(run.folder),
            mode=os.environ.get("WANDB_MODE") or "offline",
            config=dict(run.settings),
            settings=settings,
            **same,
        )

    def write(self, points: Sequence[MetricPoint]) -> None:
        """See :class:`~smp_tools.tracking.writer.Logger`."""
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def flush(self) -> None:
        """See :class:`~smp_tools.tracking.writer.Logger`; wandb's own process writes the data."""

    def close(self, *, failed: bool) -> None:
        """See :class:`~smp_tools.tracking.writer.Logger`."""
        self._run.finish(exit_code=int(failed))
