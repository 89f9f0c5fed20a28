"""The one door to the SageMaker SDK v2: everything of it that this package uses is imported here.

Importing the SDK makes a session for its model hub at once, and with it clients that look for credentials; on a
machine without any that is a request to the metadata address, which can hang for seconds. Here that look-up is put
off until such a client is used. The session also says which files of defaults there are not, on the standard output;
unless the user has set up the SDK's logging, that is left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import botocore.credentials
from botocore.exceptions import NoCredentialsError

# The warning announces SDK v3 on every import; this package is made for v2 on purpose.
os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")

_NEVER = datetime(9999, 1, 1, tzinfo=timezone.utc)


@contextmanager
def credentials_when_used() -> Iterator[None]:
    """Clients that are made meanwhile look for their credentials at their first request."""
    resolver = botocore.credentials.CredentialResolver
    look_up = resolver.load_credentials

    def later(self: Any) -> Any:
        return botocore.credentials.DeferredRefreshableCredentials(
            refresh_using=lambda: _found(look_up(self)), method="when-used"
        )

    resolver.load_credentials = later
    try:
        yield
    finally:
        resolver.load_credentials = look_up


def _found(credentials: Any) -> dict[str, str]:
    """Credentials in the form that a refresh returns; they are asked for again when they expire."""
    if credentials is None:
        raise NoCredentialsError
    frozen = credentials.get_frozen_credentials()
    expires = getattr(credentials, "_expiry_time", None) or _NEVER
    return {
        "access_key": frozen.access_key,
        "secret_key": frozen.secret_key,
        "token": frozen.token,
        "expiry_time": expires.isoformat(),
    }


@contextmanager
def without_absent_defaults() -> Iterator[None]:
    """The SDK does not say meanwhile where it has found no file of defaults; it says each such thing once."""
    logger = logging.getLogger("sagemaker.config")
    if logger.level or logger.handlers or logging.getLogger("sagemaker").handlers:  # somebody wants to read it
        yield
        return
    logger.addFilter(_tells_something)
    try:
        yield
    finally:
        logger.removeFilter(_tells_something)


def _tells_something(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Not applying SDK defaults")


with credentials_when_used(), without_absent_defaults():
    from sagemaker import git_utils
    from sagemaker.config import load_local_mode_config, load_sagemaker_config, validate_sagemaker_config
    from sagemaker.estimator import EstimatorBase, Framework
    from sagemaker.estimator import _TrainingJob as TrainingJob
    from sagemaker.exceptions import UnexpectedStatusException
    from sagemaker.fw_utils import SM_DATAPARALLEL_SUPPORTED_FRAMEWORK_VERSIONS as DATA_PARALLEL_VERSIONS
    from sagemaker.fw_utils import UploadedCode
    from sagemaker.huggingface import HuggingFace
    from sagemaker.image_uris import config_for_framework
    from sagemaker.inputs import FileSystemInput, TrainingInput
    from sagemaker.instance_group import InstanceGroup
    from sagemaker.local import LocalSession
    from sagemaker.local.image import _SageMakerContainer as LocalContainers
    from sagemaker.local.local_session import LocalSagemakerClient, LocalSagemakerRuntimeClient
    from sagemaker.pytorch import PyTorch
    from sagemaker.session import _check_job_status as check_job_status
    from sagemaker.utils import (
        custom_extractall_tarfile,
        download_folder,
        secondary_training_status_changed,
        secondary_training_status_message,
    )
    from sagemaker.workflow import is_pipeline_variable
    from sagemaker.workflow.pipeline_context import PipelineSession

__all__ = [
    "DATA_PARALLEL_VERSIONS",
    "EstimatorBase",
    "FileSystemInput",
    "Framework",
    "HuggingFace",
    "InstanceGroup",
    "LocalContainers",
    "LocalSagemakerClient",
    "LocalSagemakerRuntimeClient",
    "LocalSession",
    "PipelineSession",
    "PyTorch",
    "TrainingInput",
    "TrainingJob",
    "UnexpectedStatusException",
    "UploadedCode",
    "check_job_status",
    "config_for_framework",
    "credentials_when_used",
    "custom_extractall_tarfile",
    "download_folder",
    "git_utils",
    "is_pipeline_variable",
    "load_local_mode_config",
    "load_sagemaker_config",
    "secondary_training_status_changed",
    "secondary_training_status_message",
    "validate_sagemaker_config",
]
