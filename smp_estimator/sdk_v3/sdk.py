"""The one door to the SageMaker SDK v3: everything of it that this package uses is imported here."""

from __future__ import annotations

from smp_estimator.sdk.installed import require

require(3)

import warnings  # noqa: E402 - first of all it is said which SDK is there

with warnings.catch_warnings():
    # Its own modules import one another by names that it has moved.
    warnings.simplefilter("ignore", DeprecationWarning)
    from sagemaker.core.common_utils import instance_supports_kms
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.resources import TrainingJob
    from sagemaker.core.training.configs import (
        Channel,
        CheckpointConfig,
        Compute,
        InputData,
        MetricDefinition,
        Networking,
        OutputDataConfig,
        SourceCode,
        Tag,
    )
    from sagemaker.core.utils.code_injection.codec import transform
    from sagemaker.core.utils.exceptions import FailedStatusError
    from sagemaker.core.utils.utils import Unassigned
    from sagemaker.core.workflow.pipeline_context import PipelineSession
    from sagemaker.train.constants import DEFAULT_CONTAINER_ARGUMENTS
    from sagemaker.train.distributed import DistributedConfig, Torchrun
    from sagemaker.train.local.local_container import _LocalContainer as LocalContainers
    from sagemaker.train.model_trainer import Mode
    from sagemaker.train.model_trainer import ModelTrainer as StockModelTrainer
    from sagemaker.train.utils import safe_serialize

__all__ = [
    "DEFAULT_CONTAINER_ARGUMENTS",
    "Channel",
    "CheckpointConfig",
    "Compute",
    "DistributedConfig",
    "FailedStatusError",
    "InputData",
    "LocalContainers",
    "MetricDefinition",
    "Mode",
    "Networking",
    "OutputDataConfig",
    "PipelineSession",
    "Session",
    "SourceCode",
    "StockModelTrainer",
    "Tag",
    "Torchrun",
    "TrainingJob",
    "Unassigned",
    "instance_supports_kms",
    "safe_serialize",
    "transform",
]
