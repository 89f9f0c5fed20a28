"""``ModelTrainer`` of SDK v3 with verdicts before launch, the log of all hosts, and jobs as processes of this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, PrivateAttr, ValidationError

from smp_config import ConfigError
from smp_config.errors import suggest
from smp_config.machine.instances import instance
from smp_estimator.cloud import images, service
from smp_estimator.cloud.image_choice import choose_pytorch
from smp_estimator.cloud.log import CloudLog, print_bill
from smp_estimator.local import container_failures
from smp_estimator.local.bootstrap import with_emulation
from smp_estimator.local.files.uris import is_file_uri, path_of
from smp_estimator.progress import show
from smp_estimator.sdk_v3 import defaults
from smp_estimator.sdk_v3.model_parallel import ModelParallel, as_model_parallel
from smp_estimator.sdk_v3.process_job import PROCESS_IMAGE, ProcessTrainer
from smp_estimator.sdk_v3.sdk import (
    DEFAULT_CONTAINER_ARGUMENTS,
    Channel,
    FailedStatusError,
    InputData,
    LocalContainers,
    MetricDefinition,
    Mode,
    PipelineSession,
    Session,
    StockModelTrainer,
    transform,
)
from smp_estimator.sdk_v3.settings import LOCAL_TYPES, JobLocation, advise, given_value, planner_of, read_settings
from smp_estimator.sdk_v3.words import said_in_v3
from smp_estimator.settings import translation

if TYPE_CHECKING:
    from smp_estimator.planning import Plan, Suggestion
    from smp_estimator.rehearsal import Rehearsed
    from smp_estimator.settings.distribution import Distribution


class ContainerJobFailed(FailedStatusError, RuntimeError):
    """A job in containers of this machine failed.

    The same exception as of every other failed job, and also a ``RuntimeError``, which the SDK's local mode raises.
    """


class ModelTrainer(StockModelTrainer):
    """Trains a script with the model parallel library; takes everything that the SDK's ``ModelTrainer`` takes.

    With ``compute=Compute(instance_type="local")`` and no ``training_image`` the job runs as processes of this machine:
    no Docker, no AWS account; ``instance_count`` makes that many simulated hosts, and channels are paths. With
    ``training_mode=Mode.LOCAL_CONTAINER`` and a ``training_image`` it runs in Docker. In the cloud a job with
    ``ModelParallel`` and no ``training_image`` runs in the newest stock PyTorch image that the SDK knows and that is patched.

    Args:
        keep_job_folder: of jobs as processes of this machine: keep the hosts' folders of jobs that succeed, too.
        stop_grace_seconds: the same: after Ctrl-C, seconds between SIGTERM and SIGKILL.

    Example:
        >>> trainer = ModelTrainer(
        ...     source_code=SourceCode(source_dir="scripts", entry_script="train.py"),
        ...     compute=Compute(instance_type="local", instance_count=1),
        ...     distributed=ModelParallel(parameters={"ddp": True}, processes_per_host=2),
        ... )
        >>> trainer.train({"train": "data/train"})
        >>> trainer.model_data
        'file:///…/model.tar.gz'

    Raises:
        ConfigError: a setting that cannot work, from the constructor and again from :meth:`train`; a ``ValueError``.
    """

    model_config = ConfigDict(protected_namespaces=())

    if TYPE_CHECKING:  # of the SDK's class
        distributed: Any
        environment: Any
        _metric_definitions: Any

    keep_job_folder: bool = False
    stop_grace_seconds: float = 4.0

    #: Command of a host's bootstrap; None for the package's own.
    _launcher: tuple[str, ...] | None = PrivateAttr(default=None)
    _process_mode: bool = PrivateAttr(default=False)
    #: Runs end after the SDK's hour, or after the limit that was given; here only a limit that was given ends one.
    _has_limit: bool = PrivateAttr(default=False)
    _here: ProcessTrainer | None = PrivateAttr(default=None)
    #: Of the newest job, and where it left its model if that was a job in containers.
    _job_name: str = PrivateAttr(default="")
    _archive: str | None = PrivateAttr(default=None)

    def __init__(self, **arguments: Any) -> None:
        known = type(self).model_fields
        for name in arguments:
            if name not in known:
                raise ConfigError(
                    f"ModelTrainer has no {name!r} (given {arguments[name]!r}){suggest(name, known) or ';'} help(ModelTrainer) "
                    "lists all arguments",
                    code="SMP118",
                )
        here = _wants_processes(arguments)
        if not arguments.get("algorithm_name"):
            given = arguments.get("distributed"), arguments.get("training_image")
            arguments["distributed"] = _with_this_library(*given)
        if here:
            arguments |= {"training_image": PROCESS_IMAGE, "training_mode": Mode.LOCAL_CONTAINER}
        elif not arguments.get("training_image") and not arguments.get("algorithm_name"):
            self._take_stock_image(arguments)
        try:
            super().__init__(**arguments)
        except ValidationError as error:
            own = (error.errors()[0].get("ctx") or {}).get("error")
            if isinstance(own, ConfigError):
                raise own from None
            raise
        self._has_limit = arguments.get("stopping_condition") is not None

    def model_post_init(self, context: Any) -> None:
        """Check the settings before the SDK sends any request to the account."""
        self._process_mode = self.training_image == PROCESS_IMAGE
        self._read()
        super().model_post_init(context)

    # -- checks --------------------------------------------------------------------------------------------

    def _where(self) -> JobLocation:
        containers = self.training_mode is Mode.LOCAL_CONTAINER and not self._process_mode
        with said_in_v3():
            where = JobLocation.of(self.compute, process_mode=self._process_mode, containers=containers)
            if where.in_cloud and where.instance_type in LOCAL_TYPES and isinstance(self.distributed, ModelParallel):
                raise ConfigError(
                    f"instance_type is {where.instance_type!r} and training_image {self.training_image!r}, but training_mode says "
                    "that the service runs the job: add training_mode=Mode.LOCAL_CONTAINER to run it in Docker, or leave "
                    "training_image out to run it as processes of this machine",
                    code="SMP118",
                )
        return where

    def _read(self) -> Distribution | None:
        """Check the settings as they are now, which may have been changed since the constructor."""
        settled = _with_this_library(self.distributed, self.training_image)
        if settled is not self.distributed:
            self.distributed = settled
        if not isinstance(self.distributed, ModelParallel) and not self._process_mode:
            return None
        return read_settings(self, self._where())

    @classmethod
    def _take_stock_image(cls, arguments: dict[str, Any]) -> None:
        """Fill in the newest stock image that is patched, for a job with ModelParallel in the cloud."""
        compute = arguments.get("compute")
        if not isinstance(arguments.get("distributed"), ModelParallel):
            return  # the SDK says what is missing
        with said_in_v3():
            where = JobLocation.of(compute, process_mode=False, containers=False)
        kinds = [each.instance_type for each in where.all if each.instance_type is not None]
        if len(kinds) < len(where.all):
            return
        # Mistakes come before what the SDK wants of an account.
        read_settings(SimpleNamespace(**{name: arguments.get(name) for name in cls.model_fields}), where)
        arguments["sagemaker_session"] = session = arguments.get("sagemaker_session") or Session()
        known, region = [instance(kind) for kind in kinds], session.boto_region_name
        gpus = {each.gpu for each in known if each is not None}
        arguments["training_image"] = choose_pytorch(None, None, gpus=gpus, region=region).address(region, kinds[0])

    # -- planning ------------------------------------------------------------------------------------------

    def plan(self, model: Any, batch: int | None = None, **workload: Any) -> Plan:
        """Predict whether ``model`` trains with these settings on these instances, and its memory use.

        Args:
            model, batch, workload: as for ``SMPEstimator.plan``.

        Raises:
            ConfigError: settings that cannot work.
        """
        with said_in_v3():
            return planner_of(self, self._where(), self._read()).plan(model, batch, **workload)

    def suggest(self, model: Any, batch: int = 1, **workload: Any) -> Suggestion:
        """Pick degrees for ``model`` on these instances.

        Args:
            model, batch, workload: as for ``SMPEstimator.suggest``.
        """
        with said_in_v3():
            return planner_of(self, self._where(), self._read()).suggest(model, batch, **workload)

    def rehearse(self, arguments: Sequence[str] = (), **options: Any) -> Rehearsed:
        """Run a few steps of the script on this machine as it would run on these instances.

        Args:
            arguments, options: as for ``SMPEstimator.rehearse``.

        Raises:
            ConfigError: settings that cannot work, or a script that is not on this machine.
            RehearsalFailed: the script failed, or cannot be rehearsed.
        """
        with said_in_v3():
            return planner_of(self, self._where(), self._read()).rehearse(arguments, **options)

    # -- training ------------------------------------------------------------------------------------------

    def train(self, input_data_config: Any = None, wait: bool = True, logs: bool = True, dry_run: bool = False) -> Any:
        """Train.

        Args:
            input_data_config: as in the SDK; also a dictionary of channels, ``{"train": "s3://bucket/train"}``, or one
                address for the channel ``training``. Addresses may begin with ``file://``.
            wait: False returns while the job runs.
            logs: show the log of all hosts, with the live progress.
            dry_run: check everything, and start nothing.

        Raises:
            ConfigError: a setting that cannot work; nothing has been started.
            sagemaker.core.utils.exceptions.FailedStatusError: the job failed; the message holds the first failing rank
                and its exception.
            KeyboardInterrupt: in process mode after every process of the job has ended; in the cloud the job goes on.
        """
        read = self._read()
        channels = _channels(input_data_config)
        if read is None and not self._process_mode:
            return super().train(channels, wait, logs, dry_run)
        where = self._where()
        if self._process_mode:
            if not dry_run:
                advise(self, where, read, channels)
            self._here = self._here or ProcessTrainer(self)
            return self._here.train(read, where, channels, wait=wait, logs=logs, dry_run=dry_run)
        if not dry_run:
            advise(self, where, read, channels)
        if where.containers:
            with container_failures.failing_rank_told(LocalContainers, lambda: self._job_name, _failed):
                made = super().train(channels, wait, logs, dry_run)
            self._archive = None if dry_run else f"file://{self.local_container_root}/compressed_artifacts/model.tar.gz"
            return made
        made = super().train(channels, False, False, dry_run)
        if not dry_run and not isinstance(self.sagemaker_session, PipelineSession) and wait:
            self._watch(logs)
        return made

    def _watch(self, logs: bool) -> None:
        """Wait for the newest job in the cloud, with its hosts and its progress."""
        job = self._latest_training_job
        if not logs:
            job.wait(logs=False)
            return
        log = CloudLog(self.sagemaker_session, job.training_job_name)
        try:
            show(log.follow())
        except KeyboardInterrupt:
            print(f"The job goes on; trainer.latest_training_job.stop() ends it: {job.training_job_name}")
            raise
        job.refresh()
        if job.training_job_status == "Failed":
            raise FailedStatusError("TrainingJob", "Failed", job.failure_reason)
        print_bill(log.description)

    @property
    def latest_training_job(self) -> Any:
        """Return the newest job, as the SDK's ``TrainingJob``, or None before the first."""
        return self._latest_training_job

    @property
    def model_data(self) -> str | None:
        """Return the address of the newest job's ``model.tar.gz``, or None before the first job has ended."""
        if self._archive is not None:
            return self._archive
        artifacts = given_value(self._latest_training_job, "model_artifacts")
        return given_value(artifacts, "s3_model_artifacts")

    # -- what is sent --------------------------------------------------------------------------------------

    def _create_training_job_args(self, input_data_config: Any = None, boto3: bool = False) -> dict[str, Any]:
        """Return the SDK's request, with the settings that its scripts need for a job with ModelParallel."""
        self._populate_intelligent_defaults()  # before something is given, where they are no longer taken
        read = self._read()
        if read is None:
            return dict(super()._create_training_job_args(input_data_config, boto3))
        where = self._where()
        defaults.fill_in_dropped(self, where)
        if self._metric_definitions is None:
            self._metric_definitions = [
                MetricDefinition(name=row["Name"], regex=row["Regex"]) for row in service.metric_definitions()
            ]
        before = self.environment
        self.environment = self._sent_environment(read, where)
        try:
            request: dict[str, Any] = super()._create_training_job_args(input_data_config, boto3)
        finally:
            self.environment = before
        own = translation.hyperparameters(read.settings, before, read.later)
        carried = {name: json.dumps(value) for name, value in own.items()}
        if "hyper_parameters" in request:
            request["hyper_parameters"] = {**request["hyper_parameters"], **carried}
            self._job_name = request["training_job_name"]
            specification = request["algorithm_specification"]
            specification.container_arguments = _replacing_the_shell(specification.container_arguments)
        else:
            request["HyperParameters"] = {**request.get("HyperParameters", {}), **carried}
            specification = request["AlgorithmSpecification"]
            specification["ContainerArguments"] = _replacing_the_shell(specification["ContainerArguments"])
        return request

    def _sent_environment(self, read: Distribution, where: JobLocation) -> dict[str, Any]:
        sent = translation.mirrored_environment(read.settings, self.environment)
        return with_emulation(sent, where.instance_type) if where.containers else sent


def _replacing_the_shell(arguments: list[str]) -> list[str]:
    """Return the container's command, changed so that ``sm_train.sh`` replaces the shell.

    It is then the container's first process, which receives the signal of a stop.
    """
    if arguments != DEFAULT_CONTAINER_ARGUMENTS:
        return arguments
    return [word.replace("&& ", "&& exec ") for word in arguments]


def _with_this_library(distributed: Any, image: Any) -> Any:
    """Return the SDK's settings of version 2 as this library's, unless an image is named that may have the original's.

    Raises:
        ConfigError: parameters that cannot work.
    """
    if image and image != PROCESS_IMAGE and not images.is_stock(image):
        return distributed
    with said_in_v3():
        return as_model_parallel(distributed)


def _wants_processes(arguments: Mapping[str, Any]) -> bool:
    """Return whether a trainer with these arguments trains as processes of this machine."""
    if arguments.get("training_image") or arguments.get("algorithm_name"):
        return False
    mode = arguments.get("training_mode")
    # The SDK takes the value of the enumeration too.
    if mode in (Mode.LOCAL_CONTAINER, Mode.LOCAL_CONTAINER.value):
        return True
    kind = given_value(arguments.get("compute"), "instance_type")
    return isinstance(kind, str) and kind in LOCAL_TYPES


def _channels(inputs: Any) -> list[Any] | None:
    """Return ``input_data_config`` in the form that the SDK accepts."""
    if inputs is None:
        return None
    if isinstance(inputs, Mapping):
        inputs = [_named(name, source) for name, source in inputs.items()]
    elif isinstance(inputs, str | Path):
        inputs = [InputData(channel_name="training", data_source=str(inputs))]
    elif isinstance(inputs, InputData | Channel):
        inputs = [inputs]
    return [_with_path(channel) for channel in inputs]


def _named(name: str, source: Any) -> Any:
    """Return a channel from an entry of a dictionary.

    A TrainingInput or FileSystemInput holds it in the form of ``CreateTrainingJob``.
    """
    if isinstance(config := getattr(source, "config", None), Mapping):
        return Channel(**transform({"ChannelName": name, **config}, "Channel"))
    return InputData(channel_name=name, data_source=str(source) if isinstance(source, Path) else source)


def _with_path(channel: Any) -> Any:
    """Replace a channel's ``file://`` address, as in SDK v2, by the path that SDK v3 expects."""
    source = getattr(channel, "data_source", None)
    if isinstance(channel, InputData) and is_file_uri(source):
        return channel.model_copy(update={"data_source": str(path_of(str(source)))})
    return channel


def _failed(message: str) -> ContainerJobFailed:
    return ContainerJobFailed("TrainingJob", "Failed", message)
