"""``SMPEstimator``: the SDK's PyTorch estimator, checked on the notebook, and at home on this machine."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from smp_config import ConfigError, JobSettings
from smp_config.job import CARRIED
from smp_config.version import __version__
from smp_estimator import checks
from smp_estimator import distribution as strategies
from smp_estimator.local.client import ProcessClient
from smp_estimator.local.code import CodeSource
from smp_estimator.local.session import ProcessSession, shows_training
from smp_estimator.local.uris import is_file_uri, path_of
from smp_estimator.sdk import (
    EstimatorBase,
    Framework,
    PyTorch,
    TrainingJob,
    UploadedCode,
    credentials_when_used,
    git_utils,
    is_pipeline_variable,
)

logger = logging.getLogger(__name__)

#: Stands where the service expects an image; job names begin with its last part.
PROCESS_IMAGE = f"local/smp-process:{__version__}"

_NO_ROLE = "arn:aws:iam::000000000000:role/none"
_LOCAL_TYPES = ("local", "local_gpu")


class SMPEstimator(PyTorch):
    """Trains a PyTorch script with the model parallel library.

    Takes everything that ``sagemaker.pytorch.PyTorch`` takes, with the same meaning in the cloud. With
    ``instance_type="local"`` and no ``image_uri`` the job runs as processes of this machine
    (:class:`~smp_estimator.local.ProcessSession`): ``role``, ``framework_version`` and ``py_version`` are then not
    needed, ``instance_count`` is 1 unless given and makes that many simulated hosts.

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

    latest_training_job: Any
    debugger_rule_configs: Any
    profiler_rule_configs: Any
    collection_configs: Any
    sagemaker_session: Any
    instance_type: Any
    entry_point: Any
    source_dir: Any
    _current_job_name: Any

    def __init__(
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
        **kwargs: Any,
    ) -> None:
        entry_point = checks.require_text(entry_point, "entry_point", "train.py")
        source_dir = checks.require_text(source_dir, "source_dir", "scripts")
        checks.require_text(kwargs.get("instance_type"), "instance_type", "local")
        checks.require_count(kwargs.get("instance_count"), "instance_count")
        checks.require_mapping(hyperparameters, "hyperparameters")
        checks.require_mapping(kwargs.get("environment"), "environment")
        self._said: set[str] = set()
        self._recipe = training_recipe is not None
        self._process_mode = _wants_processes(image_uri, kwargs)
        if self._process_mode:
            image_uri = self._prepare_process_mode(entry_point, image_uri, kwargs)

        # What the SDK's validation would wrongly refuse, or let through, is read by this package instead.
        strategies.refuse_unknown_strategies(distribution, process_mode=self._process_mode)
        ours = not self._recipe and strategies.is_ours(distribution, process_mode=self._process_mode)
        # The SDK makes a client for its TensorBoard app; on this machine it must not look for credentials now.
        with credentials_when_used() if self._process_mode else contextlib.nullcontext():
            super().__init__(
                entry_point=entry_point,
                framework_version=framework_version,
                py_version=py_version,
                source_dir=source_dir,
                # A copy: the SDK writes its own entries into the dictionary it is given.
                hyperparameters=dict(hyperparameters or {}),
                image_uri=image_uri,
                distribution=None if ours else distribution,
                compiler_config=compiler_config,
                training_recipe=training_recipe,
                recipe_overrides=recipe_overrides,
                **kwargs,
            )
        if self._process_mode:
            self.image_uri = None
        if ours and distribution is not None:
            self.distribution = strategies.group_names(distribution, self.instance_groups)
        self._check_settings()

    # -- checks --------------------------------------------------------------------------------------------

    def _prepare_process_mode(self, entry_point: Any, image_uri: Any, kwargs: dict[str, Any]) -> str:
        """Fill in what a job on this machine does not need; returns what stands for the image."""
        if self._recipe:
            raise ConfigError(
                "training_recipe needs the images of the service, but this job runs as processes of this machine; give "
                "entry_point instead of training_recipe, or image_uri to run in Docker"
            )
        if entry_point is None:
            raise ConfigError(
                'entry_point is missing; it is the script that every rank runs: add entry_point="train.py"'
            )
        if image_uri:
            logger.warning("image_uri=%r is not used: the session runs jobs as processes", image_uri)
        if kwargs.get("sagemaker_session") is None:
            kwargs["sagemaker_session"] = ProcessSession()
        if not kwargs.get("role"):
            kwargs["role"] = _NO_ROLE
        if kwargs.get("instance_groups") is None:
            kwargs.setdefault("instance_count", 1)
        # They describe the hardware of the service, and their defaults depend on the region.
        kwargs.setdefault("debugger_hook_config", False)
        kwargs.setdefault("disable_profiler", True)
        return PROCESS_IMAGE

    def _check_settings(self) -> JobSettings | None:
        """Read the attributes as they are now; they may have been changed since the constructor."""
        if self._recipe:
            return None
        strategies.refuse_unknown_strategies(self.distribution, process_mode=self._process_mode)
        checks.require_count(self.instance_count, "instance_count")
        checks.check_hyperparameters(self._hyperparameters)
        checks.check_environment(self.environment)
        if self._process_mode:
            checks.check_output_path(self.output_path)
        if not self.distribution or not strategies.is_ours(self.distribution, process_mode=self._process_mode):
            return None
        return strategies.read(
            self.distribution,
            instance_type=self._carried_instance_type(),
            hosts=self._host_count(),
            process_mode=self._process_mode,
            environment=self.environment,
            say=self._say_once,
        )

    def _say_once(self, sentence: str) -> None:
        """Settings are read several times on the way to a job; what is to be said of them is said once."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning("%s", sentence)

    def _carried_instance_type(self) -> str | None:
        if is_pipeline_variable(self.instance_type):
            return None
        return self.instance_type or self._training_group_value("instance_type")

    def _host_count(self) -> int | None:
        count = self.instance_count or self._training_group_value("instance_count")
        return count if isinstance(count, int) else None

    def _training_group_value(self, name: str) -> Any:
        """An attribute of the instance group that trains, in a heterogeneous cluster."""
        chosen = self.distribution.get("instance_groups") or []
        for group in self.instance_groups or ():
            if group.instance_group_name in chosen:
                return getattr(group, name)
        return None

    # -- what is sent --------------------------------------------------------------------------------------

    def _pytorch_distribution_configuration(self, distribution: dict[str, Any]) -> dict[str, Any]:
        """The hyperparameters of the distribution; the SDK's own for strategies that are not ours."""
        settings = self._check_settings() if distribution is self.distribution else None
        if settings is None:
            return dict(super()._pytorch_distribution_configuration(distribution))
        sent = strategies.hyperparameters(settings)
        if is_pipeline_variable(self.instance_type):
            sent[strategies.INSTANCE_TYPE] = self.instance_type
        return sent

    def training_image_uri(self, region: str | None = None) -> Any:
        """The image of the job; in process mode a name that stands for it."""
        return PROCESS_IMAGE if self._process_mode else super().training_image_uri(region)

    # -- training ------------------------------------------------------------------------------------------

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: Any = "All",
        job_name: str | None = None,
        experiment_config: dict[str, str] | None = None,
    ) -> Any:
        """Train.

        Args:
            inputs: as in the SDK; in process mode ``file://`` addresses (``s3://`` ones are downloaded).
            wait: False returns while the job runs; ``estimator.logs()``, ``latest_training_job.wait()``,
                ``.describe()`` and ``.stop()`` then work on it, and the interpreter waits for it at its end.
            logs: "All", "Training", "Rules", "None", a list of these, or a boolean. In process mode the log is shown
                together with the live progress.
            job_name: default: made from the image's name and the time.
            experiment_config: as in the SDK; without effect in process mode.

        Raises:
            ConfigError: a setting that cannot work; nothing has been started.
            sagemaker.exceptions.UnexpectedStatusException: the job failed; the message holds the first failing rank,
                its exception, and where the log is.
            KeyboardInterrupt: in process mode after every process of the job has ended.
        """
        self._check_settings()
        if not self.git_config and not self._recipe:
            checks.check_code(self.entry_point, self.source_dir, self.dependencies)
        checks.check_inputs(inputs, process_mode=self._process_mode)
        shows_training(logs)
        if not self._process_mode:
            return super().fit(inputs, wait, logs, job_name, experiment_config)

        # The SDK's fit() is not used: it reports telemetry, and its wrapper swallows Ctrl-C.
        self._prepare_for_training(job_name=job_name)
        session: ProcessSession = self.sagemaker_session
        try:
            self.latest_training_job = _ProcessTrainingJob.start_new(self, inputs, experiment_config)
            self.jobs.append(self.latest_training_job)
            if wait:
                self.latest_training_job.wait(logs=logs)
        except KeyboardInterrupt:
            if ProcessClient.knows(self._current_job_name):
                session.interrupt_training_job(self._current_job_name)
            raise
        return None

    def _prepare_for_training(self, job_name: str | None = None) -> None:
        """In process mode: name the job and say what it runs, leaving the estimator's attributes as the user set them."""
        if not self._process_mode:
            super()._prepare_for_training(job_name=job_name)
            return
        self._current_job_name = self._get_or_create_name(job_name)
        entry_point, source_dir, dependencies = self.entry_point, self.source_dir, self.dependencies
        if self.git_config:
            cloned = git_utils.git_clone_repo(self.git_config, entry_point, source_dir, dependencies)
            entry_point, source_dir, dependencies = (
                cloned[name] for name in ("entry_point", "source_dir", "dependencies")
            )
            checks.check_code(entry_point, source_dir, dependencies)
        code = CodeSource(entry_point, source_dir or None, tuple(map(str, dependencies or ())))
        self.sagemaker_session.sagemaker_client.expect_code(self._current_job_name, code)
        self.uploaded_code = UploadedCode(s3_prefix=code.uri, script_name=code.program)
        self._script_mode_hyperparam_update(code.uri, code.program)
        self._prepare_rules()
        self.debugger_rule_configs, self.profiler_rule_configs = [], []
        self.collection_configs = set()

    def deploy(self, *args: Any, **kwargs: Any) -> Any:
        """Deploy the model, as in the SDK; not available for jobs that ran as processes of this machine."""
        if self._process_mode:
            raise RuntimeError(
                "deploy() starts a serving container, and this estimator's session runs processes without Docker; the "
                f"model is {self.model_data if self.latest_training_job else 'made by fit()'}: load it in Python, or make "
                "a sagemaker.pytorch.PyTorchModel of it with a Docker or cloud session"
            )
        return super().deploy(*args, **kwargs)

    # -- attach --------------------------------------------------------------------------------------------

    @classmethod
    def attach(
        cls, training_job_name: str, sagemaker_session: Any = None, model_channel_name: str = "model"
    ) -> SMPEstimator:
        """Make an estimator for a job that exists; one that runs on this machine is found by its name alone."""
        if sagemaker_session is None and ProcessClient.knows(training_job_name):
            sagemaker_session = ProcessSession()
        estimator: SMPEstimator = super().attach(training_job_name, sagemaker_session, model_channel_name)
        if estimator._process_mode:
            estimator.latest_training_job = _ProcessTrainingJob(sagemaker_session, training_job_name)
        return estimator

    @classmethod
    def _prepare_init_params_from_job_description(
        cls, job_details: dict[str, Any], model_channel_name: str | None = None
    ) -> dict[str, Any]:
        """As in the SDK, and the distribution is restored instead of staying among the user's hyperparameters."""
        on_this_machine = job_details["AlgorithmSpecification"].get("TrainingImage") == PROCESS_IMAGE
        parent = Framework if on_this_machine else PyTorch
        # Named explicitly so that the SDK's PyTorch class, which parses the image's name, can be left out.
        prepare = parent._prepare_init_params_from_job_description.__func__  # type: ignore[attr-defined]
        params: dict[str, Any] = prepare(cls, job_details, model_channel_name)
        if on_this_machine:
            params.pop("image_uri")
        carried = params.get("hyperparameters") or {}
        try:
            distribution = strategies.from_hyperparameters(carried)
        except ConfigError as error:
            # A job of another library or version; it can still be watched, and its model used.
            logger.warning("the distribution of the job cannot be restored: %s", error)
            distribution = None
        if distribution is not None:
            params["distribution"] = distribution
            params["hyperparameters"] = {k: v for k, v in carried.items() if k not in CARRIED}
        if is_file_uri(params.get("source_dir")):
            params["source_dir"] = str(path_of(params["source_dir"]))
        return params


class _ProcessTrainingJob(TrainingJob):
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
                    "checkpoint_s3_uri='file:///a/directory'"
                )
            train_args["checkpoint_local_path"] = estimator.checkpoint_local_path


def _wants_processes(image_uri: Any, kwargs: dict[str, Any]) -> bool:
    session = kwargs.get("sagemaker_session")
    if session is not None:
        return isinstance(session, ProcessSession)
    return kwargs.get("instance_type") in _LOCAL_TYPES and not image_uri


__all__ = ["PROCESS_IMAGE", "SMPEstimator"]
