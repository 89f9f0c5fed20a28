"""Limits and names that the training platform sets; nothing here is ours to choose."""

from __future__ import annotations

#: Most characters that the service accepts in one hyperparameter value (CreateTrainingJob).
HYPERPARAMETER_CHARACTERS = 2500

#: First characters of ``/opt/ml/output/failure`` that become the job's ``FailureReason``.
FAILURE_CHARACTERS = 1024

#: Seconds between the platform's SIGTERM and its SIGKILL.
STOP_GRACE_SECONDS = 120

#: Hyperparameters of this name prefix belong to the platform, not to the user's script.
PLATFORM_PREFIX = "sagemaker_"
