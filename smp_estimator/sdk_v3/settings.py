"""The settings of one ``ModelTrainer``, read by the checks that the estimators of SDK v2 have too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from smp_config import ConfigError, ModelParallelParameters
from smp_config.distributed_config import as_distribution
from smp_config.job import MP_PARAMETERS
from smp_config.machine.instances import instance
from smp_estimator.cloud import image_table, images, requirements, service
from smp_estimator.local.files.uris import is_s3_uri
from smp_estimator.sdk_v2.planning_mixin import PlanningMixin
from smp_estimator.sdk_v3.model_parallel import ModelParallel, refuse_quotes
from smp_estimator.sdk_v3.words import said_in_v3
from smp_estimator.settings import advice, checks, plain_values, translation
from smp_estimator.settings.variables import is_variable

if TYPE_CHECKING:
    from smp_estimator.settings.distribution import Distribution, SettingsReader

#: Types of instance that mean this machine, and what the checks call each.
LOCAL_TYPES = {"local": "local", "local_cpu": "local", "local_gpu": "local_gpu"}


class Trainer(Protocol):
    """The settings of a ``ModelTrainer``, as the SDK's records, and its remembered state."""

    distributed: Any
    source_code: Any
    compute: Any
    hyperparameters: Any
    environment: Any
    training_image: Any
    sagemaker_session: Any
    stopping_condition: Any
    output_data_config: Any
    input_data_config: Any
    checkpoint_config: Any
    networking: Any
    training_input_mode: Any
    base_job_name: Any
    local_container_root: Any
    keep_job_folder: bool
    stop_grace_seconds: float
    _launcher: tuple[str, ...] | None
    _has_limit: bool
    _latest_training_job: Any


@dataclass(frozen=True)
class JobLocation:
    """The place that a job runs in.

    Attributes:
        instance_type: None if it is not known yet (a pipeline variable, or a list of preferences).
        hosts: None if it is not known yet.
        process_mode: as processes of this machine.
        containers: in Docker on this machine.
        candidates: of a list of preferences; the service takes one of them.
    """

    instance_type: str | None
    hosts: int | None
    process_mode: bool = False
    containers: bool = False
    candidates: tuple[JobLocation, ...] = ()

    @property
    def in_cloud(self) -> bool:
        """Return whether the service runs the job."""
        return not (self.process_mode or self.containers)

    @classmethod
    def of(cls, compute: Any, *, process_mode: bool, containers: bool) -> JobLocation:
        """Read ``ModelTrainer``'s compute.

        Raises:
            ConfigError: several groups of instances, or a type that neither this machine nor the cloud has.
        """
        if groups := getattr(compute, "instance_groups", None):
            raise ConfigError(
                f"instance_groups has {len(groups)} group{'s' if len(groups) > 1 else ''}, but ModelParallel starts ranks on all "
                "hosts of a job, which must be alike: use instance_type and instance_count",
                code="SMP118",
            )
        if preferences := given_value(compute, "instance_preferences"):
            return cls._of_preferences(compute, preferences, process_mode=process_mode, containers=containers)
        kind, hosts = getattr(compute, "instance_type", None), getattr(compute, "instance_count", None)
        if isinstance(kind, str):
            kind = LOCAL_TYPES.get(kind, kind)
            checks.require_instance_type(kind, has_groups=False)
        if not is_variable(hosts):
            checks.require_count(hosts, "instance_count")
        if not isinstance(kind, str):
            kind = "local" if process_mode or containers else None
        if not isinstance(hosts, int):
            hosts = None if is_variable(hosts) else 1
        return cls(instance_type=kind, hosts=hosts, process_mode=process_mode, containers=containers)

    @classmethod
    def _of_preferences(cls, compute: Any, preferences: Sequence[Any], **where: bool) -> JobLocation:
        count = given_value(compute, "instance_count")
        candidates = []
        for number, each in enumerate(preferences):
            alone = SimpleNamespace(
                instance_type=each.instance_type, instance_count=given_value(each, "instance_count") or count
            )
            with _naming(number, each.instance_type):
                candidates.append(cls.of(alone, **where))
        return cls(None, None, candidates=tuple(candidates), **where)

    @property
    def first(self) -> JobLocation:
        """Return the location that the service tries first."""
        return self.candidates[0] if self.candidates else self

    @property
    def all(self) -> tuple[JobLocation, ...]:
        """Return the locations that the service may choose."""
        return self.candidates or (self,)


@contextmanager
def _naming(number: int, kind: Any) -> Iterator[None]:
    """Run the block, and add the number and type of the instance preference to its errors."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"instance_preferences[{number}] ({kind}): {error}").of_the_kind_of(error) from None


def distribution_of(config: ModelParallel, where: JobLocation) -> dict[str, Any]:
    """Return the ``distribution`` dictionary of SDK v2.

    The default number of processes is the number of GPUs.
    """
    given = config.model_dump()
    known = instance(where.instance_type or "")
    is_open = given["processes_per_host"] is None
    if is_open and known is not None:
        given["processes_per_host"] = known.gpus
    return as_distribution(given)


def read_settings(trainer: Trainer, where: JobLocation) -> Distribution | None:
    """Check the trainer's current settings; return None for a job without ModelParallel.

    Raises:
        ConfigError: settings that would fail, or be dropped silently, after the job has started.
    """
    config = trainer.distributed
    if not isinstance(config, ModelParallel) and not where.process_mode:
        return None
    with said_in_v3():
        _check_code(trainer, where)
        hyperparameters = _hyperparameters(trainer)
        plain_values.check_hyperparameters(hyperparameters)
        checks.check_environment(trainer.environment)
        if where.process_mode:
            checks.check_trackers(trainer.environment)
        if not isinstance(config, ModelParallel):
            if config is not None:
                raise ConfigError(
                    f"distributed is {type(config).__name__}, but this job runs as processes of this machine, which are started "
                    "with mpirun: use ModelParallel, or give image_uri to run the job in Docker",
                    code="SMP118",
                )
            return None
        _refuse_own_names(hyperparameters)
        reader: SettingsReader = config._reader  # noqa: SLF001 - what it has said once is not said again
        read = _read_everywhere(trainer, config, where)
        if not where.process_mode:
            refuse_quotes(hyperparameters, "hyperparameters")
            refuse_quotes(config.model_dump(), "ModelParallel")
            service.check_request(_as_estimator(trainer, where), hyperparameters, reader.say)
        if where.in_cloud:
            _check_image(trainer, config, where)
        # The launcher of ModelTrainer's jobs is this package's own, and sets what mpirun needs itself.
        return replace(read)


def _read_everywhere(trainer: Trainer, config: ModelParallel, where: JobLocation) -> Distribution:
    """Read the distribution for the instances of the job, and for each that the service may take instead."""
    reader: SettingsReader = config._reader  # noqa: SLF001 - as above
    more = {"stock_image": False, "process_mode": where.process_mode, "environment": trainer.environment}
    processes = set()
    for number, each in enumerate(where.candidates):
        distribution = distribution_of(config, each)
        with _naming(number, each.instance_type):
            reader.read(distribution, instance_type=each.instance_type, hosts=each.hosts, **more)
        processes.add(distribution.get("mpi", {}).get("processes_per_host"))
    if len(processes) > 1:
        kinds = ", ".join(f"{each.hosts} × {each.instance_type}" for each in where.candidates)
        raise ConfigError(
            f"processes_per_host is left out, and instance_preferences have different numbers of GPUs ({kinds}), so the ranks "
            "would be as many as the service happens to take: give processes_per_host, and as many ranks in each preference",
            code="SMP118",
        )
    distribution = distribution_of(config, where.first)
    read = reader.read(distribution, instance_type=where.instance_type, hosts=where.hosts, **more)
    if not where.candidates:
        return read
    types = [each.instance_type for each in where.candidates]
    settings, missing = translation.with_options_of_all(read.settings, types, trainer.environment)
    if missing:
        reader.say(
            f"instance_preferences differ in what their networks need, and {', '.join(missing)} is set for none of them: set it in "
            "environment, if all of them have it, or prefer instances of one kind"
        )
    return replace(read, settings=settings)


def _check_image(trainer: Trainer, config: ModelParallel, where: JobLocation) -> None:
    """Log a warning about features that the image lacks, or raise ConfigError if the job cannot run in it."""
    reader: SettingsReader = config._reader  # noqa: SLF001 - as above
    for each in where.all:
        _warn_of_image(trainer.training_image, each, reader)
    if config.ship_runtime:
        images.check_stock_version(trainer.training_image, images.TORCH_FLOOR)
        if images.is_stock(trainer.training_image):
            _check_requirements(trainer)
            service.warn_of_isolation(given_value(trainer.networking, "enable_network_isolation"), reader.say)
    elif images.is_stock(trainer.training_image):
        raise ConfigError(
            f"ship_runtime is False, and image_uri is {trainer.training_image}, a stock image, which has no runtime; leave "
            "ship_runtime out, or give an image that has it",
            code="SMP118",
        )


def _check_requirements(trainer: Trainer) -> None:
    """Refuse requirements that do not fit the stock image."""
    code = trainer.source_code
    name, folder = given_value(code, "requirements"), given_value(code, "source_dir")
    if isinstance(name, str) and isinstance(folder, str) and not is_s3_uri(folder):
        requirements.check_image(Path(folder) / name, image_table.row_of(trainer.training_image))


def _warn_of_image(image: Any, where: JobLocation, reader: SettingsReader) -> None:
    """Log a warning if the image does not support the job's instances, or is no longer patched."""
    known = instance(where.instance_type or "")
    gpu = known.gpu if known is not None else None
    if gpu is not None:
        lack = images.lacks_code_for(image, gpu)
        if lack is not None:
            reader.say(lack)
    row = image_table.row_of(image)
    if row is not None:
        ended = images.patches_ended(row, images.today(), "image_uri", gpu)
        if ended is not None:
            reader.say(ended)


def advise(trainer: Trainer, where: JobLocation, read: Distribution | None, channels: Iterable[Any] | None) -> None:
    """Log advice from experience for a job that is about to start.

    Args:
        channels: given to ``train()``, as the SDK's records.
    """
    config = trainer.distributed
    if read is None or not isinstance(config, ModelParallel):
        return
    code = trainer.source_code
    for sentence in advice.advise(
        read.settings,
        hosts=where.first.hosts,
        hyperparameters=_hyperparameters(trainer),
        entry_point=getattr(code, "entry_script", None),
        source_dir=getattr(code, "source_dir", None),
    ):
        config._reader.say(sentence)  # noqa: SLF001 - as above
    if not where.in_cloud or not hasattr(trainer.sagemaker_session, "boto_session"):
        return
    places = {f"channel {channel.channel_name!r}": _s3_uri(channel.data_source) for channel in channels or ()}
    places["checkpoint_config.s3_uri"] = given_value(trainer.checkpoint_config, "s3_uri")
    places["output_data_config.s3_output_path"] = given_value(trainer.output_data_config, "s3_output_path")
    known = {what: str(address) for what, address in places.items() if is_s3_uri(address)}
    for sentence in advice.other_regions(known, trainer.sagemaker_session):
        config._reader.say(sentence)  # noqa: SLF001 - as above


def _s3_uri(source: Any) -> Any:
    """Return a channel's address, also from the SDK's records around it."""
    if isinstance(source, str):
        return source
    record = given_value(source, "s3_data_source") or source
    return given_value(record, "s3_uri")


def planner_of(trainer: Trainer, where: JobLocation, read: Distribution | None) -> PlanningMixin:
    """Return a planner with the trainer's settings."""
    return _PlannedTrainer(trainer, where, read)


class _PlannedTrainer(PlanningMixin):
    def __init__(self, trainer: Trainer, where: JobLocation, read: Distribution | None) -> None:
        where = where.first
        self.instance_type, self.instance_count, self.instance_groups = where.instance_type, where.hosts, None
        self.environment = trainer.environment
        code = trainer.source_code
        self.entry_point, self.source_dir = getattr(code, "entry_script", None), getattr(code, "source_dir", None)
        self._hyperparameters = _hyperparameters(trainer)
        self._read = read
        config = trainer.distributed
        self.distribution = distribution_of(config, where) if isinstance(config, ModelParallel) else {}

    def _check_settings(self) -> Distribution | None:
        return self._read


def _hyperparameters(trainer: Trainer) -> dict[str, Any]:
    given = trainer.hyperparameters
    return dict(given) if isinstance(given, Mapping) else {}


def _refuse_own_names(hyperparameters: Mapping[str, Any]) -> None:
    """Raise ConfigError for hyperparameters that ModelParallel writes itself."""
    for name in hyperparameters:
        if name == MP_PARAMETERS or name.startswith("sagemaker_mpi_"):
            raise ConfigError(
                f"hyperparameters has {name!r}, which ModelParallel writes itself from its own fields: give it there, and remove "
                "it from hyperparameters",
                code="SMP118",
            )


def _check_code(trainer: Trainer, where: JobLocation) -> None:
    code = trainer.source_code
    if code is None or not code.entry_script:
        raise ConfigError(
            "source_code has no entry_script; it is the script that every rank runs: write source_code=SourceCode("
            'source_dir="scripts", entry_script="train.py")',
            code="SMP118",
        )
    if code.args and not code.command:
        raise ConfigError(
            f"source_code has args {code.args!r} and no command, for which they are, so the SDK drops them without a word: give "
            "hyperparameters, which the script gets on its command line",
            code="SMP118",
        )
    if code.command:
        raise ConfigError(
            f"source_code has the command {code.command!r} and the entry_script {code.entry_script!r}; the SDK would run the "
            "command once on each host and drop distributed without a word: remove the command",
            code="SMP118",
        )
    archive = isinstance(code.source_dir, str) and code.source_dir.endswith(".tar.gz")
    if archive and where.process_mode:
        raise ConfigError(
            f"source_dir is {code.source_dir!r}, an archive, which only a container unpacks; give the directory that it holds",
            code="SMP118",
        )
    if not archive:
        checks.check_code(code.entry_script, code.source_dir, (), own_launcher=True)
        if not where.process_mode:
            checks.check_upload(code.source_dir)
    config = trainer.distributed
    if isinstance(config, ModelParallel) and isinstance(config.typed_parameters, ModelParallelParameters):
        places = trainer.checkpoint_config.s3_uri if trainer.checkpoint_config is not None else None
        checks.check_partition_file(config.typed_parameters, code.entry_script, code.source_dir, places)


def _as_estimator(trainer: Trainer, where: JobLocation) -> Any:
    """Return the trainer's settings under the names that the checks of a request use."""
    compute, limits = trainer.compute, trainer.stopping_condition
    output, checkpoints = trainer.output_data_config, trainer.checkpoint_config
    client = getattr(trainer.sagemaker_session, "sagemaker_client", None)
    return SimpleNamespace(
        sagemaker_session=SimpleNamespace(local_mode=not where.in_cloud, sagemaker_client=client),
        environment=trainer.environment,
        output_path=given_value(output, "s3_output_path"),
        checkpoint_s3_uri=given_value(checkpoints, "s3_uri"),
        code_location=None,
        base_job_name=trainer.base_job_name,
        use_spot_instances=given_value(compute, "enable_managed_spot_training"),
        max_wait=given_value(limits, "max_wait_time_in_seconds"),
        max_run=given_value(limits, "max_runtime_in_seconds"),
        keep_alive_period_in_seconds=given_value(compute, "keep_alive_period_in_seconds"),
    )


def given_value(record: Any, name: str) -> Any:
    """Return a field of one of the SDK's records, or None if the field or the record was left out."""
    value = getattr(record, name, None)
    return None if type(value).__name__ == "Unassigned" else value
