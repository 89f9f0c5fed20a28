"""Settings that a training job carries from the notebook to its ranks, as the platform's hyperparameters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictBool, ValidationError

from smp_config.errors import ConfigError, kind_of, show_value, suggest
from smp_config.formats import strict_json
from smp_config.formats.numbers_given import Whole  # noqa: TC001 - pydantic reads the types
from smp_config.parameters import ModelParallelParameters
from smp_config.version2.parameters import Version2Parameters

#: Silences a warning of Open MPI inside containers; harmless when given twice.
DEFAULT_MPI_OPTIONS = "--mca btl_vader_single_copy_mechanism none"

#: Most characters that the service accepts in one hyperparameter value (CreateTrainingJob).
HYPERPARAMETER_CHARACTERS = 2500

#: Hyperparameters of this name prefix belong to the platform, not to the user's script.
PLATFORM_PREFIX = "sagemaker_"

#: Seconds between the platform's SIGTERM and its SIGKILL.
STOP_GRACE_SECONDS = 120

#: Environment variable with a JSON list: words of the script's command line, behind its hyperparameters.
SCRIPT_ARGUMENTS_VARIABLE = "SMP_SCRIPT_ARGUMENTS"

#: Environment variable that is ``1`` in jobs of SDK v3's ``ModelTrainer``. Their scripts get hyperparameters as its
#: drivers write them: ``--name`` for names of one letter too, and JSON for anything but text.
JSON_ARGUMENTS_VARIABLE = "SMP_JSON_ARGUMENTS"

#: Endings of entry points that the launcher starts: with Python, with bash.
SCRIPT_SUFFIXES = (".py", ".sh")

#: Names that hyperparameters of the SDK have.
MP_PARAMETERS = "mp_parameters"
MPI_ENABLED = "sagemaker_mpi_enabled"
MPI_PROCESSES = "sagemaker_mpi_num_of_processes_per_host"
MPI_OPTIONS = "sagemaker_mpi_custom_mpi_options"
DATA_PARALLEL_ENABLED = "sagemaker_distributed_dataparallel_enabled"
DATA_PARALLEL_OPTIONS = "sagemaker_distributed_dataparallel_custom_mpi_options"
#: With ``mp_parameters`` beside it, a job of version 2 of the library; the platform starts torchrun for it.
TORCHRUN_ENABLED = "sagemaker_torch_distributed_enabled"
TORCHRUN_PROCESSES = "sagemaker_torch_distributed_processes_per_host"
INSTANCE_TYPE = "sagemaker_instance_type"
INSTANCE_GROUPS = "sagemaker_distribution_instance_groups"

#: Every hyperparameter that this module writes; what ``attach()`` takes out of the user's hyperparameters.
CARRIED = (
    MP_PARAMETERS,
    MPI_ENABLED,
    MPI_PROCESSES,
    MPI_OPTIONS,
    DATA_PARALLEL_ENABLED,
    DATA_PARALLEL_OPTIONS,
    TORCHRUN_ENABLED,
    TORCHRUN_PROCESSES,
    INSTANCE_TYPE,
    INSTANCE_GROUPS,
)


#: Options for mpirun. None means none: the SDK sends a None that the user gave.
Options = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class MpiSettings(BaseModel):
    """``distribution["mpi"]``: how many processes a host starts, and the user's own mpirun options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: StrictBool = False
    processes_per_host: Whole | None = None
    custom_mpi_options: Options = ""


class DataParallelSettings(BaseModel):
    """``distribution["smdistributed"]["dataparallel"]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: StrictBool = False
    custom_mpi_options: Options = ""


class TorchrunSettings(BaseModel):
    """``distribution["torch_distributed"]`` beside version 2 of the library; None starts one process on each GPU."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: StrictBool = False
    processes_per_host: Whole | None = None


class JobSettings(BaseModel):
    """The distribution of a job, typed; the same object on the client and in the container.

    Attributes:
        model_parallel: parameters of version 1 of the library.
        version_2: those of version 2; a job has at most one of the two.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_parallel: ModelParallelParameters | None = None
    version_2: Version2Parameters | None = None
    torchrun: TorchrunSettings | None = None
    mpi: MpiSettings | None = None
    data_parallel: DataParallelSettings | None = None
    instance_type: str | None = None
    instance_groups: tuple[str, ...] = ()

    @property
    def uses_mpi(self) -> bool:
        """Return whether mpirun starts the ranks; otherwise each host runs the script once.

        The launcher of this project starts the ranks of version 2 in this way too, with torchrun's variables.
        """
        mpi, data_parallel = self.mpi, self.data_parallel
        has_mpi = mpi is not None and mpi.enabled
        has_data_parallel = data_parallel is not None and data_parallel.enabled
        return has_mpi or has_data_parallel or self.version_2 is not None

    @classmethod
    def from_distribution(cls, distribution: Mapping[str, Any] | None, instance_type: str | None = None) -> JobSettings:
        """Read the notebook's ``distribution`` dictionary.

        Only ``smdistributed`` and ``mpi`` are read, and ``torch_distributed`` beside ``smdistributed.modelparallel``: together
        they are version 2 of the library. Other strategies of the SDK belong to other libraries. A part is dropped if its
        ``enabled`` is false.

        Raises:
            ConfigError: unknown keys, ``enabled`` missing or not a boolean, two strategies at once, bad parameters.
        """
        distribution = distribution or {}
        smdistributed = _dictionary(distribution.get("smdistributed"), "smdistributed")
        _refuse_unknown(smdistributed, ("modelparallel", "dataparallel"), "smdistributed")
        model = _part(smdistributed, "modelparallel", ("enabled", "parameters"), "smdistributed.modelparallel")
        data = _part(smdistributed, "dataparallel", ("enabled", "custom_mpi_options"), "smdistributed.dataparallel")
        mpi = _part(distribution, "mpi", ("enabled", "processes_per_host", "custom_mpi_options"), "mpi")
        if model and data:
            raise ConfigError(
                "smdistributed enables both modelparallel and dataparallel; one job runs one of the two libraries: "
                'remove one (modelparallel does data parallelism too, with "ddp": True)',
                code="SMP103",
            )
        groups = _group_names(distribution.get("instance_groups"), 'distribution["instance_groups"]')
        torchrun = _torchrun(distribution) if model else {}
        if torchrun:
            return cls._of_version_2(model.get("parameters"), torchrun, mpi, instance_type, groups)
        return cls(
            model_parallel=ModelParallelParameters.from_mp_parameters(_parameters(model.get("parameters")))
            if model
            else None,
            mpi=_settings(MpiSettings, mpi, "mpi") if mpi else None,
            data_parallel=_settings(DataParallelSettings, data, "smdistributed.dataparallel") if data else None,
            instance_type=instance_type,
            instance_groups=groups,
        )

    @classmethod
    def _of_version_2(
        cls,
        parameters: Any,
        torchrun: Mapping[str, Any],
        mpi: Mapping[str, Any],
        instance_type: str | None,
        groups: tuple[str, ...],
    ) -> JobSettings:
        """Return the settings of a job with ``modelparallel`` and ``torch_distributed``."""
        given = Version2Parameters.from_given(_parameters(parameters))
        if mpi:
            raise ConfigError(
                "distribution enables torch_distributed and mpi beside smdistributed.modelparallel; torch_distributed starts "
                "scripts of version 2 of the library (import torch.sagemaker), mpi those of version 1 "
                "(import smdistributed.modelparallel.torch): remove the one that the script does not use",
                code="SMP103",
            )
        settings = _settings(TorchrunSettings, torchrun, "torch_distributed")
        if settings.processes_per_host is not None and settings.processes_per_host < 1:
            raise ConfigError(
                f"torch_distributed.processes_per_host is {settings.processes_per_host}; it is the number of processes that each "
                "host starts: set it to 1 or more, or leave it out for one on each GPU",
                code="SMP103",
            )
        return cls(version_2=given, torchrun=settings, instance_type=instance_type, instance_groups=groups)

    def to_hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters as Python values; the SDK encodes each as JSON."""
        sent: dict[str, Any] = {}
        if self.model_parallel is not None:
            sent[MP_PARAMETERS] = self.model_parallel.to_mp_parameters()
        if self.version_2 is not None:
            sent[MP_PARAMETERS] = self.version_2.to_mp_parameters()
            sent[TORCHRUN_ENABLED] = True
            if self.torchrun is not None and self.torchrun.processes_per_host is not None:
                sent[TORCHRUN_PROCESSES] = self.torchrun.processes_per_host
        if self.mpi is not None:
            sent[MPI_ENABLED] = self.mpi.enabled
            if self.mpi.processes_per_host is not None:
                sent[MPI_PROCESSES] = self.mpi.processes_per_host
            sent[MPI_OPTIONS] = self.mpi.custom_mpi_options or (
                DEFAULT_MPI_OPTIONS if self.model_parallel is not None else ""
            )
        if self.data_parallel is not None:
            sent[DATA_PARALLEL_ENABLED] = self.data_parallel.enabled
            sent[DATA_PARALLEL_OPTIONS] = self.data_parallel.custom_mpi_options
        if self.instance_type is not None:
            sent[INSTANCE_TYPE] = self.instance_type
        if self.instance_groups:
            sent[INSTANCE_GROUPS] = list(self.instance_groups)
        return sent

    @classmethod
    def from_hyperparameters(cls, hyperparameters: Mapping[str, Any], *, are_decoded: bool = False) -> JobSettings:
        """Read a job's hyperparameters.

        Args:
            hyperparameters: Python values or their JSON text.
            are_decoded: all are Python values, and a text is one.

        Raises:
            ConfigError: one that cannot be read.
        """
        read = (lambda value: value) if are_decoded else decoded_hyperparameter
        carried = {name: read(hyperparameters[name]) for name in CARRIED if name in hyperparameters}
        mpi = None
        if MPI_ENABLED in carried:
            given = {
                "enabled": _flag(carried[MPI_ENABLED]),
                "processes_per_host": carried.get(MPI_PROCESSES),
                "custom_mpi_options": carried.get(MPI_OPTIONS),
            }
            mpi = _settings(MpiSettings, given, "mpi")
        data = None
        enabled = _flag(carried.get(DATA_PARALLEL_ENABLED))
        if enabled is not None and enabled is not False:
            given = {"enabled": enabled, "custom_mpi_options": carried.get(DATA_PARALLEL_OPTIONS)}
            data = _settings(DataParallelSettings, given, "smdistributed.dataparallel")
        instance_type = carried.get(INSTANCE_TYPE)
        if instance_type is not None and not isinstance(instance_type, str):
            raise ConfigError(
                f"the hyperparameter {INSTANCE_TYPE} is {show_value(instance_type)}, {kind_of(instance_type)}; it names the "
                "type "
                'of the hosts: write text such as "ml.p4d.24xlarge", or leave it out',
                code="SMP103",
            )
        model = carried.get(MP_PARAMETERS)
        if model is not None and _flag(carried.get(TORCHRUN_ENABLED)) is True:
            groups = _group_names(carried.get(INSTANCE_GROUPS), f"the hyperparameter {INSTANCE_GROUPS}")
            torchrun = {"enabled": True, "processes_per_host": carried.get(TORCHRUN_PROCESSES)}
            return cls._of_version_2(model, torchrun, {}, instance_type, groups)
        return cls(
            model_parallel=None if model is None else ModelParallelParameters.from_mp_parameters(model),
            mpi=mpi,
            data_parallel=data,
            instance_type=instance_type,
            instance_groups=_group_names(carried.get(INSTANCE_GROUPS), f"the hyperparameter {INSTANCE_GROUPS}"),
        )


def _flag(value: Any) -> Any:
    """Take Python's word for JSON's ``true``, as the training toolkit does; its ``"False"`` turns things on, so that is refused."""
    return True if value == "True" else value


def _group_names(value: Any, what: str) -> tuple[str, ...]:
    """Return the names of instance groups, given as names or as the SDK's group objects."""
    if value is None:
        return ()
    names = (
        [getattr(group, "instance_group_name", group) for group in value] if isinstance(value, list | tuple) else [None]
    )
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{what} is {show_value(value)}, {kind_of(value)}; it lists the groups of instances that train: write a list of "
            'their names such as ["workers"]',
            code="SMP103",
        )
    return tuple(map(str, names))


def _dictionary(value: Any, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'distribution["{path}"] is {show_value(value)}, {kind_of(value)}; it must be a dictionary such as '
            '{"enabled": True}',
            code="SMP103",
        )
    return dict(value)


def _refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(
                f"unknown key {show_value(key)} in distribution[{path!r}]{suggest(str(key), known)}; known are {', '.join(known)}",
                code="SMP103",
            )


def _part(parent: Mapping[str, Any], name: str, known: tuple[str, ...], path: str) -> dict[str, Any]:
    """Return one strategy's dictionary, or an empty one if it is absent or disabled."""
    if name not in parent:
        return {}
    part = _dictionary(parent[name], path)
    _refuse_unknown(part, known, path)
    if "enabled" not in part:
        raise ConfigError(
            f'distribution {path} has no "enabled"; it was given {sorted(part) or "nothing"}, and without it the '
            'strategy would be dropped silently: add "enabled": True',
            code="SMP103",
        )
    if not isinstance(part["enabled"], bool):
        raise ConfigError(
            f'distribution {path} has "enabled": {show_value(part["enabled"])}, {kind_of(part["enabled"])}; '
            "only a boolean turns the strategy on: write True or False without quotes",
            code="SMP103",
        )
    return part if part["enabled"] else {}


def _torchrun(distribution: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``torch_distributed`` of a job of the model parallel library, or an empty dictionary if it is off."""
    return _part(distribution, "torch_distributed", ("enabled", "processes_per_host"), "torch_distributed")


def _parameters(value: Any) -> Any:
    """Return ``parameters``, read from a JSON file if it is a path."""
    if not isinstance(value, str):
        return value
    path = Path(value)
    if not os.path.isfile(value):
        raise ConfigError(
            f"smdistributed.modelparallel.parameters is {value!r}; a string means the path of a JSON file, and there "
            f"is none at {path.absolute()}: give a dictionary or an existing file",
            code="SMP103",
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"smdistributed.modelparallel.parameters is {value!r}, a file that cannot be read: {error}; write the dictionary there "
            "as JSON in UTF-8",
            code="SMP103",
        ) from None


def _settings(kind: Any, given: Mapping[str, Any], path: str) -> Any:
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        problems = []
        for item in error.errors():
            name = ".".join(map(str, item["loc"]))
            why = str(item["msg"]).removeprefix("Value error, ").replace("Input", "it")
            problems.append(f"{name} is {show_value(item['input'])}: {why}")
        raise ConfigError(f"distribution {path}: {'; '.join(problems)}", code="SMP103") from None


def decoded_hyperparameter(value: Any) -> Any:
    """Decode a hyperparameter, which arrives as text.

    Valid JSON becomes its value. A text that would lose something by that stays text.
    """
    if not isinstance(value, str):
        return value
    try:
        return strict_json.parse(value)
    except ValueError:
        return value  # text that the user has written without quotes
