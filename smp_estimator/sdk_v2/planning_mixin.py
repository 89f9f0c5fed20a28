"""An estimator's cluster, and its checks before anything starts: ``plan()``, ``suggest()`` and ``rehearse()``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_estimator.settings.variables import is_variable

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from smp_config import JobSettings
    from smp_estimator.planning import Plan, Suggestion
    from smp_estimator.rehearsal import Rehearsed
    from smp_estimator.settings.distribution import Distribution


#: What scripts call the samples that a rank reads at a time.
_BATCH_NAMES = ("batch_size", "train_batch_size", "per_device_train_batch_size")


class PlanningMixin:
    """Answers whether a model fits this estimator's cluster; nothing is started."""

    instance_type: Any
    instance_count: Any
    instance_groups: Any
    entry_point: Any
    source_dir: Any
    environment: Any
    distribution: Any
    _hyperparameters: Any

    def _check_settings(self) -> Distribution | None:
        raise NotImplementedError

    def _settings_of_version_1(self) -> JobSettings | None:
        """Return the settings; None for a job without any.

        Raises:
            ConfigError: settings that cannot work, or those of version 2 of the library.
        """
        distribution = self._check_settings()
        if distribution is None:
            return None
        if distribution.settings.version_2 is not None:
            raise ConfigError(
                "distribution is of version 2 of the library (torch_distributed beside smdistributed.modelparallel), and plan() "
                "and rehearse() are for version 1: run a few steps of the script with instance_type='local' instead",
                code="SMP123",
            )
        return distribution.settings

    def plan(self, model: Any, batch: int | None = None, **workload: Any) -> Plan:
        """Predict whether ``model`` trains with this estimator's distribution on its instances, and its memory use.

        Args:
            model: an ``nn.Module`` (the meta device is enough), a :class:`~smp_estimator.planning.ModelShape`, the name of a
                published shape, a number of parameters, or a configuration of Transformers (the object, its dictionary, or
                the path of ``config.json`` or of its folder).
            batch: samples that a rank reads at a time; default: the hyperparameter ``batch_size``, ``train_batch_size`` or
                ``per_device_train_batch_size``, else one for each microbatch. The plan reports which.
            workload: ``sequence``, ``activation_checkpointing``, ``gpu_memory_bytes`` and the other arguments of
                :func:`smp_estimator.planning.plan`.

        Returns:
            A plan; print it for a table, ask it for ``verdict`` and ``changes``.

        Raises:
            ConfigError: settings that cannot work.

        Example:
            >>> found = estimator.plan("gpt2", gpu_memory_bytes=40e9)
            >>> found.verdict.feasible
            True
        """
        from smp_estimator.planning import plan

        settings = self._settings_of_version_1()
        if settings is not None and settings.mpi is not None and settings.mpi.processes_per_host is not None:
            workload.setdefault("processes_per_host", settings.mpi.processes_per_host)
        found = self._batch_of_script() if batch is None else None
        if found is not None:
            name, batch = found
            workload["batch_source"] = f"the hyperparameter {name}"
        try:
            return plan(
                model,
                *self._cluster(),
                parameters=settings.model_parallel if settings is not None else None,
                batch=batch,
                environment=self.environment,
                **workload,
            )
        except ConfigError as error:
            if "batch_source" not in workload or f"batch of {batch}" not in str(error):
                raise
            reworded = ConfigError(f"{error}; the batch of {batch} is {workload['batch_source']}", code="SMP123")
            raise reworded.of_the_kind_of(error) from None

    def _batch_of_script(self) -> tuple[str, int] | None:
        """Return the name and value of the batch size among the hyperparameters, or None."""
        given = self._hyperparameters or {}
        for name in _BATCH_NAMES:
            value = given.get(name, "")
            if is_variable(value):
                continue
            text = str(value)
            if text.isdecimal() and int(text) > 0:
                return name, int(text)
        return None

    def suggest(self, model: Any, batch: int = 1, **workload: Any) -> Suggestion:
        """Pick degrees for ``model`` on this estimator's instances, in the order of the public best practices.

        If nothing fits there, the suggestion names clusters on which the model does.

        Args:
            model: as for :meth:`plan`.
            batch: samples per GPU and step.
            workload: the other arguments of :func:`smp_estimator.planning.suggest`.

        Returns:
            A suggestion; print it for tables, ask it for ``parameters`` and ``plan``.

        Raises:
            ConfigError: arguments that cannot be used.

        Example:
            >>> estimator.suggest("gpt2", processes_per_host=2, gpu_memory_bytes=40e9).parameters
            {...'ddp': True...}
        """
        from smp_estimator.planning import suggest

        return suggest(model, *self._cluster(), batch=batch, environment=self.environment, **workload)

    def rehearse(
        self,
        arguments: Sequence[str] = (),
        *,
        channels: Mapping[str, str | os.PathLike[str]] | None = None,
        **options: Any,
    ) -> Rehearsed:
        """Run a few steps of the script on this machine as it would run on these instances; nothing is started there.

        Args:
            arguments: words for the script after its hyperparameters.
            channels: folders of this machine by the names of the channels that the script reads.
            options: ``steps``, ``gpu_memory_bytes``, ``verbose`` and the other arguments of
                :func:`smp_estimator.rehearsal.rehearse`.

        Returns:
            The result; print it for tables, ask it for ``verdict`` and ``rehearsal``.

        Raises:
            ConfigError: settings that cannot work, or a script that is not on this machine.
            RehearsalFailed: the script failed, or cannot be rehearsed.

        Example:
            >>> found = estimator.rehearse(gpu_memory_bytes=40e9)  # doctest: +SKIP
            >>> found.verdict  # doctest: +SKIP
        """
        from smp_estimator.rehearsal import rehearse
        from smp_launch.sagemaker.environment import words_of

        settings = self._settings_of_version_1()
        if settings is not None and settings.mpi is not None and settings.mpi.processes_per_host is not None:
            options.setdefault("processes_per_host", settings.mpi.processes_per_host)
        parallel = settings.model_parallel if settings is not None else None
        kind, count = self._cluster()
        return rehearse(
            self._script_here(),
            [*words_of(self._hyperparameters or {}), *arguments],
            instance_type=kind,
            instance_count=count,
            parameters=None if parallel is None else parallel.to_mp_parameters(),
            environment=self.environment,
            channels=channels,
            **options,
        )

    def _script_here(self) -> Path:
        """Return the path of the script on this machine."""
        folder = "" if self.source_dir is None else str(self.source_dir)
        path = Path(folder.removeprefix("file://"), str(self.entry_point))
        if "://" in folder.removeprefix("file://") or not path.is_file():
            raise ConfigError(
                f"the script {path} is not on this machine; a rehearsal runs it here: give entry_point, and source_dir if it has "
                "one, as they lie here, or call smp_estimator.rehearsal.rehearse()",
                code="SMP123",
            )
        return path

    def _carried_instance_type(self) -> str | None:
        if is_variable(self.instance_type):
            return None
        return self.instance_type or self._training_group_value("instance_type")

    def _host_count(self) -> int | None:
        count = self.instance_count or self._training_group_value("instance_count")
        return count if isinstance(count, int) else None

    def _training_group_value(self, name: str) -> Any:
        """Return an attribute of the instance group that trains, in a heterogeneous cluster."""
        chosen = self.distribution.get("instance_groups") or []
        for group in self.instance_groups or ():
            if group.instance_group_name not in chosen:
                continue
            value = getattr(group, name)
            return None if is_variable(value) else value
        return None

    def _cluster(self) -> tuple[str, int]:
        if not isinstance(self.instance_type, str) or not isinstance(self.instance_count, int):
            raise ConfigError(
                f"instance_type is {self.instance_type!r} and instance_count {self.instance_count!r}; planning needs one type "
                "and a number: use smp_estimator.planning.plan() with the group that trains",
                code="SMP123",
            )
        return self.instance_type, self.instance_count
