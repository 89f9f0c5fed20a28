"""The estimators of this package: the SDK's own, checked on the notebook, and at home on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_estimator.cloud import image_choice, image_table
from smp_estimator.sdk.version_2 import HuggingFace, PyTorch, show_arguments
from smp_estimator.sdk_v2.mixin import TrainsWithSMP
from smp_estimator.settings.distribution import is_model_parallel

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from smp_estimator.cloud.image_choice import ImageChoice
    from smp_estimator.cloud.image_table import TrainingImage
    from smp_estimator.sdk.arguments import SDKArguments


class SMPEstimator(TrainsWithSMP, PyTorch):
    """Estimator that trains a PyTorch script with the model parallel library.

    Takes all arguments of ``sagemaker.pytorch.PyTorch``, with the same meaning in the cloud; any other argument is
    an error. With ``instance_type="local"`` and no ``image_uri`` the job runs as processes of this machine
    (:class:`~smp_estimator.local.ProcessSession`): ``role``, ``framework_version`` and ``py_version`` are then not
    needed, ``instance_count`` is 1 unless given and sets the number of simulated hosts.

    In the cloud a model parallel job without ``image_uri`` runs in a stock PyTorch image. It is the newest that is patched,
    unless ``framework_version`` names one (2.4 or newer), and the runtime travels with the code. The same holds for a job of
    the data parallel library (2.6 or newer).

    Args:
        entry_point: the script that every rank runs, in ``source_dir`` if that is given.
        framework_version: PyTorch's, for a stock image of the cloud.
        py_version: likewise Python's, such as ``"py312"``.
        source_dir: folder, archive or repository with the files that travel with the script.
        hyperparameters: the script's command line: ``{"steps": 300}`` is ``--steps 300``.
        image_uri: an image in place of a stock one.
        distribution: ``ModelParallel(…) | MPI(…)``, or the SDK's dictionary.
        compiler_config: as in the SDK.
        training_recipe: likewise.
        recipe_overrides: likewise.
        ship_runtime: whether the runtime travels with the code. Default: with stock images only; custom images are
            expected to have it.
        memory_checkpoint: whether lost ranks continue from the state in their host's shared memory: True copies it as
            often as that costs at most 3 % of the time, ``{"steps": n}`` each ``n`` steps (``SMP_MEMORY_CHECKPOINT``).
        max_restarts: how often the ranks are started again after a failure, 0 to 10,000 (``SMP_MAX_RESTARTS``).
        record_numerics: whether ranks record the numbers that ``smp-estimator diff`` compares (``SMP_RECORD_NUMERICS``):
            True each ten updates, ``{"every": n}`` each ``n``; ``"guards": "finite"`` in it also stops the job before a bad
            update.
        loggers: trackers that get loss, throughput and the like: some of ``"tensorboard"``, ``"mlflow"`` and ``"wandb"``
            (``SMP_LOGGERS``).
        profile: which steps PyTorch's profiler records on each rank, as ``{"steps": (10, 12), "memory": True}``
            (``SMP_PROFILE``).
        kwargs: the SDK's other arguments, such as ``role``, ``instance_type``, ``instance_count``, ``checkpoint_s3_uri``,
            ``max_run`` (seconds) and ``volume_size`` (GiB).

    Example:
        >>> estimator = SMPEstimator(
        ...     entry_point="train.py",
        ...     source_dir="scripts",
        ...     instance_type="local",
        ...     distribution={
        ...         "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"ddp": True}}},
        ...         "mpi": {"enabled": True, "processes_per_host": 2},
        ...     },
        ... )
        >>> estimator.fit({"train": "file:///data/train"})
        >>> estimator.model_data
        'file:///…/model.tar.gz'

    Raises:
        ConfigError: a setting that cannot work, from the constructor and again from :meth:`fit`; a ``ValueError``.
    """

    def __init__(  # noqa: PLR0913 - the SDK's arguments, by position
        self,
        entry_point: Any = None,
        framework_version: str | None = None,
        py_version: str | None = None,
        source_dir: Any = None,
        hyperparameters: dict[str, Any] | None = None,
        image_uri: Any = None,
        distribution: dict[str, Any] | None = None,
        compiler_config: Any = None,
        training_recipe: str | None = None,
        recipe_overrides: dict[str, Any] | None = None,
        ship_runtime: bool | None = None,
        memory_checkpoint: bool | dict[str, int] | None = None,
        max_restarts: int | None = None,
        record_numerics: bool | dict[str, Any] | None = None,
        loggers: str | list[str] | None = None,
        profile: str | dict[str, Any] | None = None,
        **kwargs: Unpack[SDKArguments],
    ) -> None:
        super().__init__(
            entry_point=entry_point,
            framework_version=framework_version,
            py_version=py_version,
            source_dir=source_dir,
            hyperparameters=hyperparameters,
            image_uri=image_uri,
            distribution=distribution,
            compiler_config=compiler_config,
            training_recipe=training_recipe,
            recipe_overrides=recipe_overrides,
            ship_runtime=ship_runtime,
            memory_checkpoint=memory_checkpoint,
            max_restarts=max_restarts,
            record_numerics=record_numerics,
            loggers=loggers,
            profile=profile,
            **kwargs,
        )

    _VERSIONS = ("framework_version", "py_version")

    @classmethod
    def _sdk_class(cls) -> Any:
        return PyTorch

    def _choose_image(self, sdk: dict[str, Any], floor: tuple[int, int], **wanted: Any) -> ImageChoice:
        choice = image_choice.choose_pytorch(sdk.get("framework_version"), sdk.get("py_version"), floor, **wanted)
        sdk["framework_version"], sdk["py_version"] = choice.framework_version, choice.py_version
        return choice

    def _table_row(self) -> TrainingImage | None:
        return image_table.rows_of(self.framework_version or "").get("gpu")

    def _pytorch_distribution_configuration(self, distribution: dict[str, Any]) -> dict[str, Any]:
        """Return the hyperparameters of the distribution; for strategies of the SDK, those of the SDK."""
        own = self._own_hyperparameters(distribution)
        return dict(super()._pytorch_distribution_configuration(distribution)) if own is None else own


class SMPHuggingFace(TrainsWithSMP, HuggingFace):
    """Trains a script of the Transformers library with the model parallel library.

    Takes everything that ``sagemaker.huggingface.HuggingFace`` takes, by name; in all else as :class:`SMPEstimator`.
    Without ``image_uri`` the newest stock image with PyTorch 2.4 or newer and Transformers below 5 is used.

    Raises:
        ConfigError: a setting that cannot work, from the constructor and again from :meth:`fit`; a ``ValueError``.
    """

    def __init__(  # noqa: PLR0913 - the SDK's arguments, by position
        self,
        py_version: str | None = None,
        entry_point: Any = None,
        transformers_version: str | None = None,
        tensorflow_version: str | None = None,
        pytorch_version: str | None = None,
        source_dir: Any = None,
        hyperparameters: dict[str, Any] | None = None,
        image_uri: Any = None,
        distribution: dict[str, Any] | None = None,
        compiler_config: Any = None,
        ship_runtime: bool | None = None,
        memory_checkpoint: bool | dict[str, int] | None = None,
        max_restarts: int | None = None,
        record_numerics: bool | dict[str, Any] | None = None,
        loggers: str | list[str] | None = None,
        profile: str | dict[str, Any] | None = None,
        **kwargs: Unpack[SDKArguments],
    ) -> None:
        if tensorflow_version is not None and is_model_parallel(distribution):
            raise ConfigError(
                f"tensorflow_version is {tensorflow_version}, but the model parallel library trains PyTorch models; give "
                "pytorch_version instead, or leave both out",
                code="SMP123",
            )
        super().__init__(
            py_version=py_version,
            entry_point=entry_point,
            transformers_version=transformers_version,
            tensorflow_version=tensorflow_version,
            pytorch_version=pytorch_version,
            source_dir=source_dir,
            hyperparameters=hyperparameters,
            image_uri=image_uri,
            distribution=distribution,
            compiler_config=compiler_config,
            ship_runtime=ship_runtime,
            memory_checkpoint=memory_checkpoint,
            max_restarts=max_restarts,
            record_numerics=record_numerics,
            loggers=loggers,
            profile=profile,
            **kwargs,
        )

    _VERSIONS = ("transformers_version", "pytorch_version", "py_version")

    @classmethod
    def _sdk_class(cls) -> Any:
        return HuggingFace

    def _choose_image(self, sdk: dict[str, Any], floor: tuple[int, int], **_: Any) -> None:
        sdk["transformers_version"], sdk["pytorch_version"], sdk["py_version"] = image_choice.choose_huggingface(
            sdk.get("transformers_version"), sdk.get("pytorch_version"), sdk.get("py_version"), floor
        )

    def _table_row(self) -> TrainingImage | None:
        return image_choice.row_of_huggingface(self.framework_version, self.pytorch_version)

    def _huggingface_distribution_configuration(self, distribution: dict[str, Any]) -> dict[str, Any]:
        """Return the hyperparameters of the distribution; for strategies of the SDK, those of the SDK."""
        own = self._own_hyperparameters(distribution)
        return dict(super()._huggingface_distribution_configuration(distribution)) if own is None else own


for _kind in (SMPEstimator, SMPHuggingFace):
    show_arguments(_kind)
