"""Process mode: when a job runs as processes of this machine, the arguments it does not need, and its job."""

from __future__ import annotations

import logging
from typing import Any

from smp_config import ConfigError
from smp_config.error_codes import Coded
from smp_config.version import __version__
from smp_estimator.local.session import ProcessSession
from smp_estimator.sdk.version_2 import EstimatorBase, LocalSession, PipelineSession, Session, TrainingJob

logger = logging.getLogger(__name__)

#: Types of instance that mean this machine, with or without Docker.
LOCAL_TYPES = ("local", "local_gpu")

#: Stands for the image that the service expects; job names begin with its last part.
PROCESS_IMAGE = f"local/smp-process:{__version__}"

#: The SDK asks for a role, which processes of this machine do not use.
_NO_ROLE = "arn:aws:iam::000000000000:role/none"


class NoContainers(Coded, RuntimeError):
    """A request that needs a container, made to a job that ran as processes of this machine."""

    code = "SMP115"


def wants_processes(image_uri: Any, sdk: dict[str, Any]) -> bool:
    """Return whether an estimator with these arguments trains as processes of this machine.

    Raises:
        ConfigError: the arguments request Docker on this machine, but with a session of the service.
    """
    session = sdk.get("sagemaker_session")
    is_local = sdk.get("instance_type") in LOCAL_TYPES
    if session is not None and not _is_of_service(session):
        return isinstance(session, ProcessSession)
    is_local_docker = is_local and image_uri
    if is_local_docker and session is not None:
        raise ConfigError(
            f"instance_type is {sdk['instance_type']!r} and image_uri {image_uri!r}, so the job runs in Docker on this machine, "
            "but sagemaker_session is one of the service: leave it out, or give sagemaker.local.LocalSession(boto_session)",
            code="SMP115",
        )
    return is_local and not image_uri


def _is_of_service(session: Any) -> bool:
    """Return whether jobs of a session run in the cloud as soon as they are started."""
    return isinstance(session, Session) and not isinstance(session, LocalSession | PipelineSession)


def fill_in_here(entry_point: Any, image_uri: Any, sdk: dict[str, Any]) -> str:
    """Fill in defaults among ``sdk``, the arguments for the SDK's class; return the name used as the image.

    The values filled in are those that a job on this machine does not need from the user.

    Raises:
        ConfigError: there is no script.
    """
    if sdk.get("training_recipe") is not None:
        raise ConfigError(
            "training_recipe needs the images of the service, but this job runs as processes of this machine; give "
            "entry_point instead of training_recipe, or image_uri to run in Docker",
            code="SMP115",
        )
    if entry_point is None:
        raise ConfigError(
            'entry_point is missing; it is the script that every rank runs: add entry_point="train.py"', code="SMP115"
        )
    if image_uri:
        logger.warning("image_uri=%r is not used: the session runs jobs as processes", image_uri)
    session = sdk.get("sagemaker_session")
    if session is None:
        sdk["sagemaker_session"] = ProcessSession()
    elif not isinstance(session, ProcessSession):  # a session of the service: keep its choice of S3
        sdk["sagemaker_session"] = ProcessSession(
            boto_session=session.boto_session, sagemaker_config=session.sagemaker_config
        )
    if not sdk.get("role"):
        sdk["role"] = _NO_ROLE
    if sdk.get("instance_groups") is None:
        sdk.setdefault("instance_count", 1)
    # They describe the hardware of the service, and their defaults depend on the region.
    sdk.setdefault("debugger_hook_config", False)
    sdk.setdefault("disable_profiler", True)
    return PROCESS_IMAGE


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
                    "checkpoint_s3_uri='file:///a/directory'",
                    code="SMP115",
                )
            train_args["checkpoint_local_path"] = estimator.checkpoint_local_path
