"""A training job of process mode, as the SDK sees it."""

from __future__ import annotations

import logging
from typing import Any

from smp_config import ConfigError
from smp_estimator.sdk import EstimatorBase, TrainingJob

logger = logging.getLogger(__name__)


class ProcessTrainingJob(TrainingJob):
    """A training job on this machine; the SDK's class refuses checkpoints and spot instances in local mode."""

    @classmethod
    def _add_spot_checkpoint_args(cls, local_mode: bool, estimator: EstimatorBase, train_args: dict[str, Any]) -> None:
        if estimator.use_spot_instances:
            logger.warning("use_spot_instances has no effect on this machine")
        if estimator.checkpoint_s3_uri:
            train_args["checkpoint_s3_uri"] = estimator.checkpoint_s3_uri
        if estimator.checkpoint_local_path:
            if not estimator.checkpoint_s3_uri:
                raise ConfigError(
                    f"checkpoint_local_path is {estimator.checkpoint_local_path!r}, but checkpoint_s3_uri is missing; the first "
                    "is where the script writes, the second where the checkpoints stay: add "
                    "checkpoint_s3_uri='file:///a/directory'"
                )
            train_args["checkpoint_local_path"] = estimator.checkpoint_local_path
