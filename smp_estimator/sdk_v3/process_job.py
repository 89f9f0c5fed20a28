"""Jobs of ``ModelTrainer`` as processes of this machine: the request, the session that starts it, the job that it becomes."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3

from smp_config import ConfigError
from smp_config.job import JSON_ARGUMENTS_VARIABLE
from smp_config.version import __version__
from smp_estimator.local.bootstrap import DEFAULT_LAUNCHER
from smp_estimator.local.files.channels import require_existing
from smp_estimator.local.files.code import CodeSource
from smp_estimator.local.files.s3 import FALLBACK_REGION, S3Access
from smp_estimator.local.files.uris import address_of, is_file_uri, is_s3_uri
from smp_estimator.local.job import ProcessJob, Status, failure_message, interrupt, shown_events
from smp_estimator.local.starting import STARTED, start_job
from smp_estimator.progress import show
from smp_estimator.sdk_v3.sdk import FailedStatusError, InputData, TrainingJob, safe_serialize, transform
from smp_estimator.sdk_v3.settings import JobLocation, Trainer, given_value
from smp_estimator.settings import translation

if TYPE_CHECKING:
    from smp_estimator.settings.distribution import Distribution

logger = logging.getLogger(__name__)

#: Stands where the SDK expects an image; job names begin with its last part.
PROCESS_IMAGE = f"local/smp-process:{__version__}"

#: The limit of a job that was given none; on this machine such a job has no limit.
_NO_LIMIT_SECONDS = 24 * 60 * 60

#: Characters of a job's name, as in the service.
_LONGEST_NAME = 63

#: Fields of a channel, and of its location.
_CHANNEL_FIELDS = "content_type", "compression_type", "record_wrapper_type", "input_mode", "shuffle_config"
_SOURCE_FIELDS = (
    *("s3_data_type", "s3_data_distribution_type", "attribute_names", "instance_group_names"),
    *("model_access_config", "hub_access_config"),
)


class Machine(S3Access):
    """Requirements of a job on this machine besides its request; AWS is used only for ``s3://`` addresses."""

    def __init__(self, root: Path | None, *, keep: bool, launcher: Sequence[str], session: Any = None) -> None:
        """Store the settings without any network request.

        Args:
            root: folder in which each job gets its own; None for a temporary one.
            keep: keep the hosts' folders of jobs that succeed.
            launcher: command of a host's bootstrap.
            session: the SDK's; its credentials are used for S3.
        """
        self.root = root
        self.keep = keep
        self.launcher: Sequence[str] = tuple(launcher)
        self.boto_session = getattr(session, "boto_session", None) or boto3.Session()
        self.chosen_region = self.boto_session.region_name
        if self.chosen_region is None:
            self.boto_session = boto3.Session(region_name=FALLBACK_REGION)
        self.s3_endpoint_url = None
        self._s3 = {}

    @staticmethod
    def _get_account_id_if_default_bucket(bucket: str) -> None:
        """Return None: the SDK's functions ask a session for the owner of a bucket, but no account is used here."""


class TrainerProcessJob(TrainingJob):
    """The SDK's training job, for one that is processes of this machine."""

    @classmethod
    def of(cls, job: ProcessJob) -> TrainerProcessJob:
        """Create the SDK's record from the job's current description."""
        return cls(**transform(job.describe(), "DescribeTrainingJobResponse"))

    @property
    def _job(self) -> ProcessJob:
        return STARTED[self.training_job_name]

    def refresh(self) -> TrainerProcessJob:
        """Read anew where the job stands."""
        for name, value in transform(self._job.describe(), "DescribeTrainingJobResponse", self).items():
            setattr(self, name, value)
        return self

    def stop(self) -> None:
        """Ask the job to stop: SIGTERM, and SIGKILL after the platform's 120 seconds."""
        self._job.stop()

    def wait(self, poll: int = 5, timeout: float | None = None, logs: bool = False) -> None:
        """Wait for the job's end; ``poll`` has no effect, since the end is signaled.

        Args:
            timeout: most seconds to wait; None waits without a limit.
            logs: show the log from its first line.

        Raises:
            FailedStatusError: the job failed; the message has the reason.
        """
        if logs:
            show(shown_events(self._job), timeout_seconds=timeout)
        if self._job.done.wait(timeout):
            self.refresh()
            require_success(self._job)


class ProcessTrainer:
    """Runs the jobs of one trainer as processes of this machine."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def train(
        self, read: Distribution | None, where: JobLocation, channels: Any, *, wait: bool, logs: bool, dry_run: bool
    ) -> None:
        """Start a job, and wait for it where that is asked for.

        Raises:
            ConfigError: nothing was started.
            FailedStatusError: the job failed.
        """
        trainer = self._trainer
        request = self._request(read, where, [*(trainer.input_data_config or ()), *(channels or ())])
        code = CodeSource(
            trainer.source_code.entry_script,
            trainer.source_code.source_dir,
            ignore_patterns=tuple(trainer.source_code.ignore_patterns or ()),
        )
        if dry_run:
            return
        chosen = "local_container_root" in getattr(trainer, "model_fields_set", ())
        machine = Machine(
            Path(trainer.local_container_root).expanduser().absolute() if chosen else None,
            keep=trainer.keep_job_folder,
            launcher=trainer._launcher or DEFAULT_LAUNCHER,  # noqa: SLF001 - a trainer and its jobs are one thing
            session=trainer.sagemaker_session,
        )
        job = start_job(request, machine, code)
        trainer._latest_training_job = TrainerProcessJob.of(job)  # noqa: SLF001 - where the SDK keeps it
        if wait:
            self._wait(job, logs)

    def _wait(self, job: ProcessJob, logs: bool) -> None:
        try:
            if logs:
                show(shown_events(job))
            job.done.wait()
        except KeyboardInterrupt:
            interrupt(job, self._trainer.stop_grace_seconds)
            raise
        self._trainer._latest_training_job.refresh()  # noqa: SLF001 - as above
        require_success(job)
        if logs and job.status is Status.COMPLETED:
            print(f"Training seconds: {job.describe()['TrainingTimeInSeconds']}\nModel: {job.model_address}")

    def _request(self, read: Distribution | None, where: JobLocation, channels: list[Any]) -> dict[str, Any]:
        """Return the request of ``CreateTrainingJob``."""
        trainer = self._trainer
        own: dict[str, Any] = {"sagemaker_instance_type": where.instance_type}
        if read is not None:
            own = translation.hyperparameters(read.settings, trainer.environment, read.later)
        own["sagemaker_program"] = trainer.source_code.entry_script
        sent = {name: safe_serialize(value) for name, value in (trainer.hyperparameters or {}).items()}
        sent |= {name: json.dumps(value) for name, value in own.items()}
        environment = dict(trainer.environment or {})
        if read is not None:
            environment = translation.mirrored_environment(read.settings, environment)
        environment[JSON_ARGUMENTS_VARIABLE] = "1"
        limit = given_value(trainer.stopping_condition, "max_runtime_in_seconds")
        request: dict[str, Any] = {
            "TrainingJobName": _job_name(trainer.base_job_name),
            "AlgorithmSpecification": {
                "TrainingImage": PROCESS_IMAGE,
                "TrainingInputMode": trainer.training_input_mode or "File",
            },
            "HyperParameters": sent,
            "InputDataConfig": [_channel(channel) for channel in {c.channel_name: c for c in channels}.values()],
            "OutputDataConfig": {"S3OutputPath": _output(trainer.output_data_config)},
            "ResourceConfig": {"InstanceType": where.instance_type or "local", "InstanceCount": where.hosts or 1},
            "StoppingCondition": {
                "MaxRuntimeInSeconds": limit if limit and trainer._has_limit else _NO_LIMIT_SECONDS  # noqa: SLF001 - as above
            },
            "Environment": environment,
            "RoleArn": "",
        }
        if (kind := given_value(trainer.output_data_config, "compression_type")) is not None:
            request["OutputDataConfig"]["CompressionType"] = kind
        if (uri := given_value(trainer.checkpoint_config, "s3_uri")) is not None:
            request["CheckpointConfig"] = {
                "S3Uri": _address(uri),
                "LocalPath": given_value(trainer.checkpoint_config, "local_path"),
            }
        if trainer.source_code.requirements:
            logger.warning(
                "source_code.requirements is %r, and is not installed: the job uses the packages of this environment",
                trainer.source_code.requirements,
            )
        return request


def require_success(job: ProcessJob) -> None:
    """Raise FailedStatusError with the first cause if a job failed; log a warning if it was stopped."""
    if job.status is Status.FAILED:
        raise FailedStatusError("TrainingJob", "Failed", failure_message(job))
    if job.status is Status.STOPPED:
        logger.warning("job %s was stopped before its end; its folder is %s", job.name, job.tree.root)


def _job_name(base: str | None) -> str:
    """Return a unique name, also for jobs in quick succession."""
    end = f"-{datetime.now():%Y%m%d%H%M%S}-{uuid.uuid4().hex[:6]}"
    start = (base or "smp-process").replace("_", "-").removesuffix("-job")
    return start[: _LONGEST_NAME - len(end)].rstrip("-") + end


def _channel(channel: Any) -> dict[str, Any]:
    """Return a channel in the form of ``CreateTrainingJob``.

    Raises:
        ConfigError: a job on this machine cannot read the source.
    """
    name, record = channel.channel_name, channel.data_source
    if not isinstance(channel, InputData):
        record = given_value(record, "s3_data_source")
    source = record if isinstance(record, str) else given_value(record, "s3_uri")
    if not isinstance(source, str) or not source:
        raise ConfigError(
            f"channel {name!r} is {channel.data_source!r}; a job on this machine reads directories, files and S3, and mounts no "
            "file system: mount it yourself and give the path, or give an s3:// address",
            code="SMP118",
        )
    uri = _address(source)
    if is_file_uri(uri):
        require_existing(Path(source.removeprefix("file://")).expanduser().absolute(), f"channel {name!r}")
    kind = {"S3DataType": "S3Prefix", "S3DataDistributionType": "FullyReplicated", **_fields(record, _SOURCE_FIELDS)}
    return {
        "ChannelName": name,
        "DataSource": {"S3DataSource": {**kind, "S3Uri": uri}},
        **_fields(channel, _CHANNEL_FIELDS),
    }


def _fields(record: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that are set in a record of the SDK, under the names of the service."""
    found = {}
    for name in names:
        value = given_value(record, name)
        if value:
            of_service = "".join(word.title() for word in name.split("_"))
            found[of_service] = value
    return found


def _output(config: Any) -> str:
    path = given_value(config, "s3_output_path")
    return _address(path) if path else ""


def _address(place: str) -> str:
    """Return an S3 address unchanged, and a path as a ``file://`` address."""
    if is_s3_uri(place) or is_file_uri(place):
        return place
    return address_of(place)
