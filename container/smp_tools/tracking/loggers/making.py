"""The trackers of a job, created from the names in its environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_records.tracking import FOLDER_VARIABLE, require_packages
from smp_runtime.errors import SMPUserError
from smp_tools.tracking.loggers.mlflow import MLflowLogger
from smp_tools.tracking.loggers.tensorboard import TensorBoardLogger
from smp_tools.tracking.loggers.wandb import WandbLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from smp_tools.tracking.run import TrackedRun
    from smp_tools.tracking.writer import Logger

#: By name, what makes a tracker; its package is imported then.
KINDS: Mapping[str, Callable[[TrackedRun], Logger]] = {
    kind.name: kind for kind in (TensorBoardLogger, MLflowLogger, WandbLogger)
}


def make_loggers(names: Sequence[str], run: TrackedRun) -> list[Logger]:
    """Create the trackers with these names.

    Raises:
        ConfigError: a package is missing.
        SMPUserError: a tracker cannot write to its folder or server.
    """
    require_packages(names)
    made: list[Logger] = []
    for name in names:
        try:
            made.append(KINDS[name](run))
        except Exception as error:  # of the tracker's own package
            raise SMPUserError(
                f"the tracker {name} cannot begin: {type(error).__name__}: {error}; it writes into {run.folder}, or where its own "
                f"variables say: correct these, set {FOLDER_VARIABLE} to a folder that can be written, or leave {name} out",
                code="SMP318",
            ) from error
    return made
