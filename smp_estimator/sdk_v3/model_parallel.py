"""``distributed=ModelParallel(…)``: the model parallel library for ``ModelTrainer``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import (
    Field,
    PrivateAttr,
    StrictBool,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from smp_config import ConfigError, JobSettings, ModelParallelParameters
from smp_config.distributed_config import FIELDS, as_distribution
from smp_config.errors import kind_of, suggest
from smp_config.parameters import KEYS, Whole
from smp_config.version2.parameters import Version2Parameters
from smp_estimator.sdk_v3 import driver_folder
from smp_estimator.sdk_v3.sdk import DistributedConfig, Torchrun
from smp_estimator.sdk_v3.words import in_words_of_v3, said_in_v3
from smp_estimator.settings.distribution import SettingsReader, read
from smp_estimator.settings.variables import is_variable

#: What the SDK's own configurations call the same.
_OTHER_NAMES = {
    "process_count_per_node": "processes_per_host",
    "processes_per_node": "processes_per_host",
    "nproc_per_node": "processes_per_host",
    "mpi_additional_options": "custom_mpi_options",
    "mp_parameters": "parameters",
    "smp": "parameters",
}

#: The module of the SDK whose jobs never run the driver.
_TUNER = "sagemaker.train.tuner"

_SHAPES = {
    "version": "1 (import smdistributed.modelparallel.torch) or 2 (import torch.sagemaker)",
    "parameters": 'a dictionary such as {"pipeline_parallel_degree": 2}, or the path of a JSON file',
    "processes_per_host": "a whole number of 1 or more, such as 8",
    "custom_mpi_options": 'text such as "-x NCCL_DEBUG=INFO"',
    "ship_runtime": "True or False",
}


class ModelParallel(DistributedConfig):
    """Settings for training the script of a ``ModelTrainer`` with the model parallel library.

    With :class:`smp_estimator.model_trainer.ModelTrainer` the settings are checked against the cluster before
    anything starts, jobs can run as processes of this machine, and hosts, progress and failing ranks are shown. With the
    SDK's own ``ModelTrainer`` it works too. Settings that do not depend on the cluster are checked here, the others by
    the driver before it starts the ranks.

    Args:
        version: of the library whose names the script uses: 1 (``smdistributed.modelparallel.torch``) or 2
            (``torch.sagemaker``). The SDK's ``Torchrun(smp=SMP(…))`` is the same as 2.
        parameters: of the library, as ``mp_parameters`` has them; a dictionary, or the path of a JSON file with one.
        processes_per_host: ranks of each host. None: one per GPU; on this machine one.
        custom_mpi_options: options for ``mpirun`` as one line, such as ``"-x NCCL_DEBUG=INFO"``.
        ship_runtime: whether the runtime travels with the driver. False needs an image that has it.

    Example:
        >>> ModelParallel(parameters={"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True}, processes_per_host=8)

    Raises:
        ConfigError: an unknown name (with the nearest one), a value out of its bounds, parameters that exclude each
            other, options that contradict each other; a ``ValueError``.
    """

    version: Literal[1, 2] = 1  # before the parameters, which it decides on
    parameters: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    processes_per_host: Whole | None = None
    custom_mpi_options: StrictStr = ""
    ship_runtime: StrictBool = True

    _reader: SettingsReader = PrivateAttr(default_factory=lambda: DistributionReader())
    _folder: driver_folder.DriverFolder | None = PrivateAttr(default=None)

    def __init__(self, **given: Any) -> None:
        _refuse_unknown(given)
        with _own_errors(), said_in_v3():
            super().__init__(**given)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            _refuse_unknown({name: value})
        before = self.__dict__.get(name)
        try:
            with _own_errors(), said_in_v3():
                super().__setattr__(name, value)
        except ConfigError:
            if name in self.__dict__:  # checks of the whole come after the assignment
                self.__dict__[name] = before
            raise
        if name == "ship_runtime":
            self._folder = None

    @classmethod
    def from_distribution(cls, distribution: Mapping[str, Any], **given: Any) -> ModelParallel:
        """Create the same settings from the ``distribution`` dictionary of SDK v2.

        Args:
            given: other fields, such as ``ship_runtime``.

        Raises:
            ConfigError: the dictionary does not enable ``smdistributed.modelparallel``, or is invalid.
        """
        settings = JobSettings.from_distribution(distribution)
        if settings.model_parallel is None and settings.version_2 is None:
            raise ConfigError(
                f"distribution enables {sorted(distribution) or 'nothing'}, but not smdistributed.modelparallel, which "
                'ModelParallel stands for: use Torchrun() or MPI() of sagemaker.train.distributed, or give {"smdistributed": '
                '{"modelparallel": {"enabled": True, "parameters": {...}}}, "mpi": {"enabled": True, "processes_per_host": 8}}',
                code="SMP118",
            )
        if settings.instance_groups:
            raise ConfigError(
                f"distribution names the instance groups {list(settings.instance_groups)}, but ModelParallel starts ranks on all "
                "hosts of a job, which must be alike: use one instance_type and instance_count",
                code="SMP118",
            )
        mpi = distribution.get("torch_distributed" if settings.version_2 is not None else "mpi") or {}
        return cls(
            version=1 if settings.version_2 is None else 2,
            parameters=distribution["smdistributed"]["modelparallel"].get("parameters") or {},
            processes_per_host=mpi.get("processes_per_host"),
            custom_mpi_options=mpi.get("custom_mpi_options") or "",
            **given,
        )

    @field_validator("parameters", mode="before")
    @classmethod
    def _read_parameters(cls, value: Any, info: ValidationInfo) -> dict[str, Any]:
        given = value if value is not None else {}
        settings = JobSettings.from_distribution(
            as_distribution({"version": info.data.get("version", 1), "parameters": given})
        )
        parameters = settings.model_parallel or settings.version_2
        return parameters.to_mp_parameters() if parameters is not None else {}

    @model_validator(mode="after")
    def _check(self) -> ModelParallel:
        """Check all settings that do not depend on the cluster."""
        if self.version == 2 and self.custom_mpi_options:
            raise ConfigError(
                f"custom_mpi_options is {self.custom_mpi_options!r} and version is 2, whose scripts are started as by torchrun: "
                "remove custom_mpi_options, and set variables in environment",
                code="SMP118",
            )
        reader = self._reader if self.__pydantic_private__ is not None else DistributionReader()
        # A number is filled in where there is none: which one, the cluster decides.
        config = {**self.model_dump(), "processes_per_host": self._checked_processes() or 1}
        read(as_distribution(config), instance_type=None, hosts=None, process_mode=False, say=reader.say)
        refuse_quotes(self.model_dump(), "ModelParallel")
        return self

    def _checked_processes(self) -> int | None:
        count = self.processes_per_host
        if count is not None and count < 1:
            raise ConfigError(
                f"processes_per_host is {count}; it is the number of ranks that each host starts: set it to 1 or more, or leave it "
                "out for one per GPU",
                code="SMP118",
            )
        return count

    @property
    def typed_parameters(self) -> ModelParallelParameters | Version2Parameters:
        """Return the parameters as a typed object."""
        if self.version == 2:
            return Version2Parameters.from_parameters(self.parameters)
        return ModelParallelParameters.from_mp_parameters(self.parameters)

    @property
    def driver_dir(self) -> str:
        """Return the folder that is copied into the job; it is created at the first access.

        Raises:
            ConfigError: a ``HyperparameterTuner`` reads it.
        """
        _refuse_tuner()
        if self._folder is None:
            self._folder = driver_folder.DriverFolder(ship_runtime=self.ship_runtime)
        return str(self._folder.path)

    @property
    def driver_script(self) -> str:
        """Return the command that ``sm_train.sh`` runs in that folder: the driver, and lines that forward signals to it."""
        return driver_folder.COMMAND


def as_model_parallel(config: Any) -> Any:
    """Return the SDK's ``Torchrun(smp=SMP(…))`` as settings of version 2 of the library, and anything else unchanged.

    Raises:
        ConfigError: parameters that cannot work.
    """
    smp = config.smp if isinstance(config, Torchrun) else None
    if smp is None:
        return config
    parameters = smp.model_dump(exclude_none=True)
    return ModelParallel(version=2, parameters=parameters, processes_per_host=config.process_count_per_node)


class DistributionReader(SettingsReader):
    """Reader that logs and raises with the names of SDK v3."""

    def say(self, sentence: str) -> None:
        """Warn, but only once about each finding."""
        super().say(in_words_of_v3(sentence))


def refuse_quotes(value: Any, name: str) -> None:
    """Raise ConfigError if a value would break the file by which ``ModelTrainer`` hands it to the container.

    SDK 3.27 writes ``export NAME='…'`` without escaping the text between the quotation marks.
    """
    text = json.dumps(value, default=lambda other: "" if is_variable(other) else str(other))
    if "'" in text:
        at = text.index("'")
        raise ConfigError(
            f"{name} has a single quotation mark, in {text[max(0, at - 20) : at + 20]!r}; the SDK writes values between such marks "
            "into a shell file of the container, which would then not be read: write it without, or with double ones",
            code="SMP118",
        )


def _refuse_tuner() -> None:
    """Raise ConfigError if the SDK's tuner prepares a job: it would run without the driver, and so without the library."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == _TUNER:
            raise ConfigError(
                "a HyperparameterTuner of SDK v3 starts the script by the image's own program, so its jobs would train without "
                "ModelParallel: call ModelTrainer.train() once for each choice of hyperparameters, or tune an SMPEstimator with "
                "SDK v2",
                code="SMP118",
            )
        frame = frame.f_back


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for name in given:
        if name in FIELDS:
            continue
        if name in _OTHER_NAMES:
            hint = f", did you mean '{_OTHER_NAMES[name]}'?"
        elif name in KEYS:
            hint = f"; it is one of the library's parameters: write parameters={{{name!r}: {given[name]!r}}};"
        else:
            hint = suggest(name, [*FIELDS, *KEYS])
        raise ConfigError(
            f"ModelParallel has no {name!r} (given {given[name]!r}){hint or ';'} known are {', '.join(FIELDS)}",
            code="SMP118",
        )


@contextmanager
def _own_errors() -> Iterator[None]:
    """Run the block, and turn pydantic's errors into this package's errors."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        own = (first.get("ctx") or {}).get("error")
        if isinstance(own, ConfigError):
            raise ConfigError(in_words_of_v3(str(own))).of_the_kind_of(own) from None
        name = str(first["loc"][0]) if first["loc"] else "ModelParallel"
        value = first["input"]
        raise ConfigError(
            f"ModelParallel: {name} is {value!r}, {kind_of(value)}; it must be {_SHAPES.get(name, 'another value')}",
            code="SMP118",
        ) from None
