"""The only module that imports the SageMaker SDK v2: all names from it that this package uses are imported here.

Importing the SDK creates a session for its model hub, with clients that look for credentials. Without credentials,
that is a request to the metadata address, which can block for seconds. This module delays the lookup until such a
client is used. The session also prints the missing files of defaults on the standard output. This module suppresses
that, unless the user has configured the SDK's logging.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from smp_config import ConfigError
from smp_estimator.sdk.installed import require

require(2)

import boto3  # noqa: E402 - first of all it is said which SDK is there
import botocore.credentials  # noqa: E402 - first of all it is said which SDK is there
from botocore.exceptions import NoCredentialsError  # noqa: E402

# The warning announces SDK v3 on every import; this package is made for v2 on purpose.
os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")

#: Stands for the end of credentials that do not expire.
_NEVER = datetime(9999, 1, 1, tzinfo=timezone.utc)


@contextmanager
def credentials_when_used() -> Iterator[None]:
    """Let clients that are created inside the block look for credentials at their first request."""
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
    """Return credentials in the form that a refresh returns; they are requested again when they expire."""
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
    """Suppress the SDK's messages on missing files of defaults inside the block.

    They are kept if the user has configured the SDK's logging.
    """
    logger = logging.getLogger("sagemaker.config")
    if logger.level or logger.handlers or logging.getLogger("sagemaker").handlers:  # the user asked for it
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
    from sagemaker.inputs import FileSystemInput, TrainingInput
    from sagemaker.instance_group import InstanceGroup
    from sagemaker.local import LocalSession
    from sagemaker.local.image import _SageMakerContainer as LocalContainers
    from sagemaker.local.local_session import LocalSagemakerClient, LocalSagemakerRuntimeClient
    from sagemaker.pytorch import PyTorch
    from sagemaker.session import Session
    from sagemaker.session import _check_job_status as check_job_status
    from sagemaker.workflow import is_pipeline_variable
    from sagemaker.workflow.entities import PipelineVariable
    from sagemaker.workflow.pipeline_context import PipelineSession

#: Arguments of estimators in SDK v1, which v2 still takes.
FORMER_ARGUMENTS = {
    **{
        f"train_{name}": name
        for name in "instance_count instance_type max_run max_wait use_spot_instances volume_size volume_kms_key".split()
    },
    "image_name": "image_uri",
}


def arguments_of(kind: type) -> dict[str, inspect.Parameter]:
    """Return every named argument of the constructors of an estimator's class and its bases, in order."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        has_constructor = "__init__" in vars(base) and base is not object
        if not has_constructor:
            continue
        for name, parameter in inspect.signature(base).parameters.items():
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if is_named:
                found.setdefault(name, parameter)
    return found


def region_of(session: Any) -> str | None:
    """Return the region of a session, or of the one that the SDK creates for None.

    Return None if no region is configured.
    """
    found = boto3.Session().region_name if session is None else getattr(session, "boto_region_name", None)
    return found if isinstance(found, str) else None


@contextmanager
def naming_missing_region(instance_type: Any) -> Iterator[None]:
    """Run the block, and report in one sentence if the SDK finds no AWS region.

    Raises:
        ConfigError: no region is configured.
    """
    try:
        yield
    except ValueError as error:
        if "local AWS configuration" not in str(error):
            raise
        raise ConfigError(
            f"no region of AWS is configured, and instance_type {instance_type!r} is of the cloud: set AWS_DEFAULT_REGION, or give "
            "a sagemaker_session; instance_type='local' runs on this machine, and smp-estimator plan and suggest need neither",
            code="SMP123",
        ) from None


def show_arguments(kind: type) -> None:
    """Add the arguments that the constructor forwards to its signature, for ``help()`` and completion in notebooks."""
    own = inspect.signature(vars(kind)["__init__"])
    listed = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    handed_on = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in arguments_of(kind).items()
        if name not in own.parameters
    ]
    vars(kind)["__init__"].__signature__ = own.replace(parameters=[*listed, *handed_on])


__all__ = [
    "DATA_PARALLEL_VERSIONS",
    "FORMER_ARGUMENTS",
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
    "PipelineVariable",
    "PyTorch",
    "Session",
    "TrainingInput",
    "TrainingJob",
    "UnexpectedStatusException",
    "UploadedCode",
    "arguments_of",
    "check_job_status",
    "credentials_when_used",
    "git_utils",
    "is_pipeline_variable",
    "load_local_mode_config",
    "load_sagemaker_config",
    "naming_missing_region",
    "region_of",
    "show_arguments",
    "validate_sagemaker_config",
]
