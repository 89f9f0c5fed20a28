"""A SageMaker session that runs training containers as processes of this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import boto3

from smp_config import ConfigError
from smp_config.errors import suggest
from smp_estimator.local.bootstrap import DEFAULT_LAUNCHER
from smp_estimator.local.client import ProcessClient
from smp_estimator.local.files.s3 import FALLBACK_REGION, S3Access
from smp_estimator.local.job import ProcessJob, Status, failure_message, interrupt, shown_events
from smp_estimator.progress import show
from smp_estimator.sdk.version_2 import (
    LocalSagemakerRuntimeClient,
    LocalSession,
    UnexpectedStatusException,
    load_local_mode_config,
    load_sagemaker_config,
    validate_sagemaker_config,
)

logger = logging.getLogger(__name__)

#: The words of the SDK's ``logs=`` argument.
_LOG_TYPES = ("All", "None", "Training", "Rules")

#: Names that the SDK makes for jobs on this machine, from the image that stands for it.
_JOBS_BEGIN_WITH = "smp-process-"


class ProcessSession(S3Access, LocalSession):
    """A session that runs training jobs as processes of this machine: no Docker, no AWS account, no network.

    Each job gets ``JOB_ROOT`` with one ``/opt/ml`` per simulated host. Each host gets one bootstrap process, the
    same that the training image runs. AWS is used only if a job names an ``s3://`` address.

    ``max_run`` ends a job only if it was changed from the SDK's default of a day. ``output_path`` (``file://`` or
    ``s3://``) receives ``model.tar.gz``; without it the model stays in ``JOB_ROOT/output``. A
    ``checkpoint_s3_uri`` of the form ``file:///directory`` makes every host's ``/opt/ml/checkpoints`` a link to
    that directory, so that checkpoints outlive the job.

    Example:
        >>> session = ProcessSession(root="jobs", keep=True)
        >>> estimator = SMPEstimator(..., instance_type="local", sagemaker_session=session)
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        keep: bool = False,
        stop_grace_seconds: float = 4.0,
        launcher: Sequence[str] | None = None,
        boto_session: Any = None,
        default_bucket: str | None = None,
        s3_endpoint_url: str | None = None,
        sagemaker_config: dict[str, Any] | None = None,
        default_bucket_prefix: str | None = None,
    ) -> None:
        """Create a session; no request is sent.

        Args:
            root: folder in which each job gets its own; default: a temporary folder per job.
            keep: keep the hosts' trees of jobs that succeed. Those of failed and stopped jobs, the log and the
                artifacts are always kept.
            stop_grace_seconds: after Ctrl-C in ``fit()``, seconds between SIGTERM and SIGKILL.
            launcher: command of a host's bootstrap; default: ``python -m smp_launch train``.
            boto_session: used for ``s3://`` addresses only; default: the usual AWS configuration chain.

        Raises:
            ConfigError: ``root`` is a file, or the grace is negative.
        """
        self.root = None if root is None else Path(root).expanduser().absolute()
        if self.root is not None and self.root.exists() and not self.root.is_dir():
            raise ConfigError(
                f"ProcessSession(root={str(root)!r}) names a file; every job gets a folder inside root: give a directory",
                code="SMP115",
            )
        if stop_grace_seconds < 0:
            raise ConfigError(
                f"ProcessSession(stop_grace_seconds={stop_grace_seconds}) is negative; it is the time in seconds between "
                "SIGTERM and SIGKILL: use 0 or more, for example 4",
                code="SMP115",
            )
        self.keep = keep
        self.stop_grace_seconds = stop_grace_seconds
        self.launcher = tuple(launcher or DEFAULT_LAUNCHER)
        self._s3 = {}
        super().__init__(
            boto_session=boto_session,
            default_bucket=default_bucket,
            s3_endpoint_url=s3_endpoint_url,
            sagemaker_config=sagemaker_config,  # type: ignore[arg-type]
            default_bucket_prefix=default_bucket_prefix,
        )

    def _initialize(  # type: ignore[override]
        self, boto_session: Any, sagemaker_client: Any, sagemaker_runtime_client: Any, **kwargs: Any
    ) -> None:
        """Do the same as LocalSession, but without an S3 client: that would search the network for credentials."""
        self.boto_session = boto_session or boto3.Session()
        self.chosen_region = self.boto_session.region_name
        if self.chosen_region is None and boto_session is None:
            self.boto_session = boto3.Session(region_name=FALLBACK_REGION)
        self._region_name = self.chosen_region or FALLBACK_REGION
        self.local_mode = True
        self.sagemaker_client = ProcessClient(self)
        self.sagemaker_runtime_client = LocalSagemakerRuntimeClient()
        given = kwargs.get("sagemaker_config")
        if given:
            validate_sagemaker_config(given)
        self.sagemaker_config = given or load_sagemaker_config()
        # The SDK passes file:// code on, instead of uploading it, only if its local mode has local_code set.
        self.config = _merged(load_local_mode_config() or {}, {"local": {"local_code": True}})

    # -- what would ask AWS ----------------------------------------------------------------------------------

    def expand_role(self, role: str) -> str:
        """Return the role unchanged, without asking IAM; a role has no meaning on this machine."""
        return role

    def account_id(self) -> str:
        """Return an account id of zeros; no account is involved."""
        return "000000000000"

    def _intercept_create_request(
        self, request: dict[str, Any], create: Callable[[dict[str, Any]], Any], func_name: str | None = None
    ) -> Any:
        """Send a request without adding the SDK's pointer to the service's guide to errors of training requests."""
        if func_name == "train":
            logger.info("Creating training-job with name: %s", request["TrainingJobName"])
            return self.sagemaker_client.create_training_job(**request)
        return create(request)

    # -- watching a job --------------------------------------------------------------------------------------

    def job(self, job_name: str) -> ProcessJob:
        """Return the running or finished job of this name."""
        return self.sagemaker_client.job(job_name)

    def wait_for_job(self, job: str, poll: float = 5) -> dict[str, Any]:
        """Wait for the job without showing its log, and return its description.

        Raises:
            UnexpectedStatusException: the job failed; the message contains the reason.
        """
        process_job = self.job(job)
        process_job.done.wait()
        _require_success(process_job)
        return process_job.describe()

    def logs_for_job(
        self,
        job_name: str,
        wait: bool = False,
        poll: float = 10,
        log_type: str | Iterable[str] = "All",
        timeout: float | None = None,
    ) -> None:
        """Show the log from its first line, with the progress while the job runs.

        Args:
            wait: stay until the job ends; False shows only the lines written so far.
            log_type: "All" or "Training" shows the log, "Rules" and "None" nothing; or a list of these.
            timeout: most seconds to stay.

        Raises:
            UnexpectedStatusException: waited for a job that failed; the message contains the reason.
        """
        job = self.job(job_name)
        if shows_training(log_type):
            show(shown_events(job, wait=wait), timeout_seconds=timeout)
        if not wait:
            return
        if job.done.wait(timeout):
            _require_success(job)
            if shows_training(log_type) and job.status is Status.COMPLETED:
                print(f"Training seconds: {job.describe()['TrainingTimeInSeconds']}\nModel: {job.model_address}")

    def interrupt_training_job(self, job_name: str) -> None:
        """Stop a job for Ctrl-C and wait until none of its processes is left; a second Ctrl-C kills at once."""
        interrupt(self.job(job_name), self.stop_grace_seconds)


def session_of(job_name: str) -> ProcessSession | None:
    """Return a session for a job known by its name alone; None if the service has to look for the job.

    Raises:
        ConfigError: the job ran on this machine but was not started by this interpreter, or no AWS region is
            configured in which to look for it.
    """
    if ProcessClient.knows(job_name):
        return ProcessSession()
    here = job_name.startswith(_JOBS_BEGIN_WITH)
    if not here and boto3.Session().region_name is not None:
        return None
    raise ConfigError(
        f"no training job {job_name!r} was started by this interpreter, which knows its own jobs on this machine only"
        + ("; " if here else ", and no AWS region is configured in which to look for it; ")
        + "log and model of an earlier job lie in its folder: read them there, or fit() again with the same checkpoint_s3_uri; "
        "for a job in the cloud give sagemaker_session=sagemaker.Session()",
        code="SMP115",
    )


def shows_training(log_type: str | bool | Iterable[str]) -> bool:
    """Return whether the SDK's ``logs=`` argument requests the training log; raise ConfigError for an unknown word."""
    if isinstance(log_type, bool):
        return log_type
    wanted = {log_type} if isinstance(log_type, str) else set(log_type or ["None"])
    for word in wanted:
        if word not in _LOG_TYPES:
            raise ConfigError(
                f"logs is {log_type!r}, and {word!r} is not a kind of log{suggest(str(word), _LOG_TYPES)}; the SDK has "
                f"{', '.join(_LOG_TYPES)}: use one of these, a list of them, or True or False",
                code="SMP115",
            )
    return bool(wanted & {"All", "Training"})


def _require_success(job: ProcessJob) -> None:
    if job.status is Status.FAILED:
        raise UnexpectedStatusException(
            message=failure_message(job),
            allowed_statuses=["Completed", "Stopped"],
            actual_status="Failed",
        )
    if job.status is Status.STOPPED:
        logger.warning("job %s was stopped before its end; its folder is %s", job.name, job.tree.root)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            merged[key] = _merged(inner, value)
        else:
            merged[key] = value
    return merged
