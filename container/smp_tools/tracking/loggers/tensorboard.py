"""TensorBoard: event files in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_tools.tracking.points import MetricPoint
    from smp_tools.tracking.run import TrackedRun


class TensorBoardLogger:
    """Writes event files of PyTorch's own ``SummaryWriter``.

    A job that goes on from a checkpoint writes another file beside the former; TensorBoard then leaves out what the former has of
    steps that are repeated.
    """

    name = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401 - a missing package must raise now

        self._folder: Path = run.folder / self.name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = None

    def write(self, points: Sequence[MetricPoint]) -> None:
        """See :class:`~smp_tools.tracking.writer.Logger`."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            went_before = any(self._folder.glob("events.out.tfevents.*"))
            self._writer = SummaryWriter(str(self._folder), purge_step=points[0].step if went_before else None)
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, walltime=point.when)

    def flush(self) -> None:
        """See :class:`~smp_tools.tracking.writer.Logger`."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """See :class:`~smp_tools.tracking.writer.Logger`."""
        if self._writer is not None:
            self._writer.close()
