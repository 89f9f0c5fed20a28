"""The mixin that lets an estimator of the SDK train with the model parallel library, for all its frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_config.errors import show_value
from smp_config.job import INSTANCE_TYPE
from smp_estimator.cloud import restore, service, source
from smp_estimator.cloud.job import CloudTrainingJob
from smp_estimator.local.bootstrap import with_emulation
from smp_estimator.local.client import ProcessClient
from smp_estimator.local.containers import failing_rank_told
from smp_estimator.local.files.code import CodeSource
from smp_estimator.local.files.uris import is_s3_uri
from smp_estimator.local.process_mode import (
    LOCAL_TYPES,
    PROCESS_IMAGE,
    ProcessTrainingJob,
    fill_in_here,
    wants_processes,
)
from smp_estimator.local.session import ProcessSession, session_of, shows_training
from smp_estimator.local.starting import check_job_name
from smp_estimator.sdk.version_2 import (
    FORMER_ARGUMENTS,
    Framework,
    PipelineSession,
    UploadedCode,
    arguments_of,
    credentials_when_used,
    git_utils,
    is_pipeline_variable,
    naming_missing_region,
)
from smp_estimator.sdk_v2.planning_mixin import PlanningMixin
from smp_estimator.sdk_v2.serving_mixin import ServingMixin
from smp_estimator.sdk_v2.stock_image import InStockImage
from smp_estimator.settings import advice, checks, plain_values, translation
from smp_estimator.settings import distribution as strategies
from smp_estimator.settings.distribution import SettingsReader
from smp_estimator.settings.numerics import with_numerics, with_other_numerics
from smp_estimator.settings.recovery import with_recovery
from smp_estimator.settings.tracking import with_tracking

if TYPE_CHECKING:
    _SDK = Framework
else:
    _SDK = object


class TrainsWithSMP(PlanningMixin, InStockImage, ServingMixin, _SDK):
    """Mixin before an estimator class of the SDK that adds the model parallel library to it.

    A class that uses it defines how its image is chosen (:class:`InStockImage`), and which part of the SDK reads the job
    description (:meth:`_sdk_class`). Its hook for the distribution's hyperparameters must call
    :meth:`_own_hyperparameters`.
    """

    latest_training_job: Any
    debugger_rule_configs: Any
    profiler_rule_configs: Any
    collection_configs: Any
    sagemaker_session: Any
    entry_point: Any
    source_dir: Any
    _current_job_name: Any

    def __init__(  # noqa: PLR0913 - each is an argument of the estimators
        self,
        *,
        entry_point: Any = None,
        source_dir: Any = None,
        hyperparameters: dict[str, Any] | None = None,
        image_uri: Any = None,
        distribution: dict[str, Any] | None = None,
        ship_runtime: bool | None = None,
        memory_checkpoint: bool | dict[str, int] | None = None,
        max_restarts: int | None = None,
        record_numerics: bool | dict[str, Any] | None = None,
        loggers: str | list[str] | None = None,
        profile: str | dict[str, Any] | None = None,
        **sdk: Any,
    ) -> None:
        self._reader = SettingsReader()
        given = sdk.pop("environment", None)

        def with_arguments(environment: Any) -> Any:
            environment = with_recovery(environment, memory_checkpoint, max_restarts)
            return with_tracking(with_numerics(environment, record_numerics), loggers, profile)

        sdk["environment"] = with_arguments(given)
        image_uri = self._read_arguments(image_uri, sdk)
        entry_point = checks.require_text(entry_point, "entry_point", "train.py")
        checks.refuse_remote_script(entry_point)
        source_dir = checks.require_text(source_dir, "source_dir", "scripts")
        checks.require_mapping(hyperparameters, "hyperparameters")
        self._recipe = sdk.get("training_recipe") is not None
        self._process_mode = wants_processes(image_uri, sdk)
        self._ship_runtime = False
        #: The environment of the last request with the variables of custom_mpi_options, and these alone.
        self._mirrored: tuple[Any, dict[str, str]] = (None, {})
        #: An S3 address that holds the runtime already, from the job that was attached to.
        self._shipped_source: str | None = None

        # What the SDK's validation would wrongly refuse, or let through, is read by this package instead.
        strategies.refuse_unknown_strategies(distribution, process_mode=self._process_mode)
        ours = not self._recipe and strategies.is_ours(distribution, process_mode=self._process_mode)
        if ours and distribution is not None and not restore.is_attaching():
            self._check_before_session(distribution, sdk)
        if self._process_mode:
            image_uri = fill_in_here(entry_point, image_uri, sdk)
        elif ours and strategies.is_model_parallel(distribution):
            self._prepare_cloud(image_uri, ship_runtime, distribution, sdk)
        elif ours and strategies.is_data_parallel(distribution) and ship_runtime is not False:
            self._prepare_data_parallel(image_uri, ship_runtime, sdk)
        elif not image_uri:
            self._require_versions(sdk)
        sdk["environment"] = given  # without one the SDK takes that of its defaults file
        # The SDK makes a client for its TensorBoard app; on this machine it must not look for credentials now.
        with credentials_when_used() if self._process_mode else naming_missing_region(sdk.get("instance_type")):
            super().__init__(
                entry_point=entry_point,
                source_dir=source_dir,
                # A copy: the SDK writes its own entries into the dictionary it is given.
                hyperparameters=dict(hyperparameters or {}),
                image_uri=image_uri,
                distribution=None if ours and not self._sdk_checks(distribution, image_uri, sdk) else distribution,
                **sdk,
            )
        self.environment = with_arguments(self.environment)
        if self._process_mode:
            self.image_uri = None
        elif ours and strategies.is_model_parallel(distribution):
            service.settle_debugger(self, self._reader.say)
        with restore.lenient_when_attaching(self._reader.say):
            if ours and distribution is not None:
                self.distribution = distribution
                self.distribution = strategies.group_names(distribution, self.instance_groups)
            self._check_settings()
        self._warn_of_code()

    def _read_arguments(self, image_uri: Any, sdk: dict[str, Any]) -> Any:
        """Check names and types among ``sdk``, the arguments for the SDK's class, and rename older names; return the image."""
        known = {*arguments_of(self._sdk_class()), *arguments_of(type(self))}
        sdk["image_uri"] = image_uri
        for sentence in checks.check_arguments(sdk, known, FORMER_ARGUMENTS, type(self).__name__):
            self._reader.say(sentence)
        if sdk.get("instance_type") is not None:
            sdk["instance_type"] = checks.require_text(sdk["instance_type"], "instance_type", "local")
        if sdk.get("base_job_name") is not None:
            sdk["base_job_name"] = checks.require_text(sdk["base_job_name"], "base_job_name", "training")
        checks.require_paths(sdk.get("dependencies"), "dependencies")
        checks.require_count(sdk.get("instance_count"), "instance_count")
        checks.require_mapping(sdk.get("environment"), "environment")
        has_groups = sdk.get("instance_groups") is not None
        if isinstance(sdk.get("sagemaker_session"), ProcessSession) and not has_groups:
            sdk["instance_type"] = sdk.get("instance_type") or "local"
        if not restore.is_attaching():
            checks.check_environment(sdk.get("environment"))
            checks.require_instance_type(sdk.get("instance_type"), has_groups)
        return sdk.pop("image_uri")

    def _check_before_session(self, distribution: dict[str, Any], sdk: dict[str, Any]) -> None:
        """Report mistakes before the SDK needs an account, and before an image is chosen for these settings."""
        instance_type, hosts = (
            None if is_pipeline_variable(sdk.get(name)) else sdk.get(name)
            for name in ("instance_type", "instance_count")
        )
        where = {"instance_type": instance_type, "hosts": hosts, "process_mode": self._process_mode}
        self._reader.read(distribution, stock_image=False, environment=sdk.get("environment"), **where)

    def _warn_of_code(self) -> None:
        """Log problems of the script and of the files shipped with it; they may still be written before ``fit()``."""
        if self._ship_runtime:
            service.warn_of_isolation(self.enable_network_isolation(), self._reader.say)
        if not restore.is_attaching():
            try:
                self._check_code()
            except ConfigError as error:
                self._reader.say(f"{error} (fit() refuses this)")

    # -- what the classes differ in ----------------------------------------------------------------------------

    @classmethod
    def _sdk_class(cls) -> Any:
        """Return the SDK's class behind this one."""
        raise NotImplementedError

    def _sdk_checks(self, distribution: Any, image_uri: Any, sdk: dict[str, Any]) -> bool:
        """Return whether the SDK must check the job: it knows which images and instances support the data parallel library."""
        if self._ship_runtime:
            return False
        stock = not self._process_mode and not image_uri and sdk.get("instance_type") not in LOCAL_TYPES
        return stock and strategies.is_data_parallel(distribution) and not restore.is_attaching()

    # -- checks --------------------------------------------------------------------------------------------

    def _check_settings(self) -> strategies.Distribution | None:
        """Check the attributes as they are now, which may have been changed since the constructor."""
        if self._recipe:
            return None
        self.distribution = self.distribution or {}  # as the SDK's constructor does
        strategies.refuse_unknown_strategies(self.distribution, process_mode=self._process_mode)
        checks.require_count(self.instance_count, "instance_count")
        plain_values.check_hyperparameters(self._hyperparameters)
        checks.check_environment(self.environment)
        if self._process_mode:
            checks.check_trackers(self.environment)
            checks.check_output_path(self.output_path)
        else:
            service.check_request(self, self._hyperparameters, self._reader.say)
        if not self.distribution or not strategies.is_ours(self.distribution, process_mode=self._process_mode):
            return None
        plain_values.refuse_carried(self._hyperparameters)
        if not self._process_mode:
            self._warn_of_image()
        return self._reader.read(
            self.distribution,
            stock_image=self._ships(),
            instance_type=self._carried_instance_type(),
            hosts=self._host_count(),
            process_mode=self._process_mode,
            environment=self._own_environment(),
        )

    def _check_code(self) -> None:
        """Check that the script and its shipped files exist, and that the runtime can be put beside them."""
        if self.git_config or self._recipe:
            return
        ours = self._process_mode or self._ships() or strategies.is_model_parallel(self.distribution)
        checks.check_code(self.entry_point, self.source_dir, self.dependencies, own_launcher=ours)
        if not self._process_mode:
            checks.check_upload(self.source_dir)
        read = self._check_settings() if self._process_mode else None
        if read is not None and read.settings.model_parallel is not None:
            parameters = read.settings.model_parallel
            checks.check_partition_file(parameters, self.entry_point, self.source_dir, self.checkpoint_s3_uri)
        remote = is_s3_uri(self.source_dir) or is_pipeline_variable(self.source_dir)
        if self._ships() and remote and not self._has_runtime(self.source_dir):
            raise ConfigError(
                f"source_dir is {self.source_dir!s}, and a stock image gets the runtime with the uploaded code, which a directory "
                "in S3 cannot be given; use a local source_dir, or image_uri with an image that has the runtime (then also "
                "ship_runtime=False)",
                code="SMP123",
            )

    def _ships(self) -> bool:
        """Return whether the runtime travels with the code of the next job."""
        has_library = strategies.is_model_parallel(self.distribution) or strategies.is_data_parallel(self.distribution)
        if not self._ship_runtime or not has_library:
            return False
        session = self.sagemaker_session
        is_mounted = session.local_mode and (session.config or {}).get("local", {}).get("local_code")
        return not is_mounted

    def _has_runtime(self, source_dir: Any) -> bool:
        """Return whether the code is in S3 already, with the runtime beside it."""
        return self._shipped_source is not None and source_dir == self._shipped_source

    def _advise(self, distribution: strategies.Distribution | None, inputs: Any) -> None:
        if distribution is None or distribution.settings.model_parallel is None:
            return
        for sentence in advice.advise(
            distribution.settings,
            hosts=self._host_count(),
            hyperparameters=self._hyperparameters,
            entry_point=self.entry_point,
            source_dir=self.source_dir,
        ):
            self._reader.say(sentence)
        if self._process_mode or isinstance(self.sagemaker_session, PipelineSession):
            return
        places = service.s3_places(inputs, checkpoint_s3_uri=self.checkpoint_s3_uri, output_path=self.output_path)
        for sentence in advice.other_regions(places, self.sagemaker_session):
            self._reader.say(sentence)

    # -- what is sent --------------------------------------------------------------------------------------

    def _own_hyperparameters(self, distribution: dict[str, Any]) -> dict[str, Any] | None:
        """Return the hyperparameters of a distribution that this package handles, or None to leave them to the SDK."""
        read = self._check_settings() if distribution is self.distribution else None
        if read is None:
            return None
        sent = translation.hyperparameters(read.settings, self.environment, read.later)
        if is_pipeline_variable(self.instance_type):
            sent[INSTANCE_TYPE] = self.instance_type
        return sent

    def _stage_user_code_in_s3(self) -> Any:
        """Upload the code; for a stock image, with the runtime in it."""
        if not self._ships() or self._has_runtime(self.source_dir):
            return super()._stage_user_code_in_s3()
        given = self.entry_point, self.source_dir
        with source.with_runtime(*given, self._image_row()) as folder:
            self.entry_point, self.source_dir = source.PROGRAM, str(folder)
            try:
                uploaded = super()._stage_user_code_in_s3()
            finally:
                self.entry_point, self.source_dir = given
        return UploadedCode(s3_prefix=uploaded.s3_prefix, script_name=CodeSource(*given).program)

    def _script_mode_hyperparam_update(self, code_dir: str, script: str) -> None:
        if self._ships():
            self._hyperparameters[source.USER_PROGRAM] = script
            script = source.PROGRAM
        super()._script_mode_hyperparam_update(code_dir, script)

    # -- training ------------------------------------------------------------------------------------------

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: Any = "All",
        job_name: str | None = None,
        experiment_config: dict[str, str] | None = None,
        record_numerics: bool | dict[str, Any] | None = None,
    ) -> Any:
        """Train.

        Args:
            inputs: as in the SDK; in process mode ``file://`` addresses (``s3://`` ones are downloaded).
            wait: False returns while the job runs; ``estimator.logs()``, ``latest_training_job.wait()``,
                ``.describe()`` and ``.stop()`` then work on it, and the interpreter waits for it at its end.
            logs: "All", "Training", "Rules", "None", a list of these, or a boolean. The log of all hosts is shown
                together with the live progress.
            job_name: default: made from the image's name and the time.
            experiment_config: as in the SDK; without effect in process mode.
            record_numerics: of this job, in place of the constructor's.

        Returns:
            None; in a pipeline session, the arguments of a pipeline step.

        Raises:
            ConfigError: a setting that cannot work; nothing has been started.
            sagemaker.exceptions.UnexpectedStatusException: the job failed; the message has the first failing rank,
                its exception, and the place of the log.
            KeyboardInterrupt: in process mode after every process of the job has ended; in the cloud the job continues.

        Example:
            >>> estimator.fit({"train": "file:///data/train"})
            >>> estimator.model_data
            'file:///…/model.tar.gz'
        """
        if record_numerics is not None:
            if isinstance(self.sagemaker_session, PipelineSession):
                raise ConfigError(
                    f"fit() got record_numerics={show_value(record_numerics)}, and a step of a pipeline is made of the "
                    f"estimator later: give it to {type(self).__name__}(record_numerics=…)",
                    code="SMP123",
                )
            given = self._own_environment()
            self.environment = with_other_numerics(given, record_numerics)
            try:
                return self.fit(inputs, wait, logs, job_name, experiment_config)
            finally:
                self.environment = given
        distribution = self._check_settings()
        self._check_code()
        shows_training(logs)  # refuses words that the SDK does not know
        if self._process_mode:
            checks.check_inputs(inputs)
            self._advise(distribution, inputs)
            return self._fit_here(inputs, wait, logs, job_name, experiment_config)
        if job_name is not None and not is_pipeline_variable(job_name):
            check_job_name(job_name)
        if not self.sagemaker_session.local_mode:
            service.check_channels(inputs, has_network=bool(self.subnets and self.security_group_ids))
        self._advise(distribution, inputs)
        if not self._watches():
            with failing_rank_told(lambda: self._current_job_name):
                return super().fit(inputs, wait, logs, job_name, experiment_config)
        super().fit(inputs, False, logs, job_name, experiment_config)
        self._watched()
        if wait:
            self.latest_training_job.wait(logs)
        return None

    def _fit_here(self, inputs: Any, wait: bool, logs: Any, job_name: str | None, experiment_config: Any) -> None:
        # The SDK's fit() is not used: it reports telemetry, and its wrapper swallows Ctrl-C.
        self._prepare_for_training(job_name=job_name)
        session: ProcessSession = self.sagemaker_session
        try:
            self.latest_training_job = ProcessTrainingJob.start_new(self, inputs, experiment_config)
            self.jobs.append(self.latest_training_job)
            if wait:
                self.latest_training_job.wait(logs=logs)
        except KeyboardInterrupt:
            if ProcessClient.knows(self._current_job_name):
                session.interrupt_training_job(self._current_job_name)
            raise

    def _watches(self) -> bool:
        """Return whether a job's log comes from the cloud: not for a pipeline, and not in the SDK's local mode."""
        return not isinstance(self.sagemaker_session, PipelineSession) and not self.sagemaker_session.local_mode

    def _watched(self) -> None:
        """Let the newest job show its hosts and its progress when it is waited for."""
        job = CloudTrainingJob(self.sagemaker_session, self.latest_training_job.name)
        self.jobs[:] = [job if known is self.latest_training_job else known for known in self.jobs]
        self.latest_training_job = job

    def logs(self) -> None:
        """Show the log of the newest job from its first line, with its progress, until it ends.

        Example:
            >>> estimator.fit(wait=False)
            >>> estimator.logs()
        """
        if isinstance(self.latest_training_job, CloudTrainingJob):
            self.latest_training_job.wait()
        else:
            super().logs()

    def _prepare_for_training(self, job_name: str | None = None) -> None:
        """Prepare the request; in process mode, name the job and set its code, and keep the user's attributes."""
        if not self._process_mode:
            distribution = self._check_settings()
            self._check_code()
            given = self.environment = self._own_environment()
            merged = translation.mirrored_environment(distribution.settings, given) if distribution is not None else {}
            if self.sagemaker_session.local_mode:
                merged = with_emulation(merged or given, self.instance_type)
            if merged:
                self.environment = merged
                self._mirrored = merged, {name: merged[name] for name in merged if name not in (given or {})}
            super()._prepare_for_training(job_name=job_name)
            return
        self._current_job_name = self._get_or_create_name(job_name)
        entry_point, source_dir, dependencies = self.entry_point, self.source_dir, self.dependencies
        if self.git_config:
            cloned = git_utils.git_clone_repo(self.git_config, entry_point, source_dir, dependencies)
            entry_point, source_dir, dependencies = (
                cloned[name] for name in ("entry_point", "source_dir", "dependencies")
            )
            checks.check_code(entry_point, source_dir, dependencies, own_launcher=True)
        code = CodeSource(entry_point, source_dir or None, tuple(map(str, dependencies or ())))
        self.sagemaker_session.sagemaker_client.expect_code(self._current_job_name, code)
        self.uploaded_code = UploadedCode(s3_prefix=code.uri, script_name=code.program)
        self._script_mode_hyperparam_update(code.uri, code.program)
        self._prepare_rules()
        self.debugger_rule_configs, self.profiler_rule_configs = [], []
        self.collection_configs = set()

    def _own_environment(self) -> Any:
        """Return ``environment`` as the user set it, without the variables that the last request added.

        The user may have changed custom_mpi_options since that request.
        """
        sent, added = self._mirrored
        if self.environment is not sent or not added:
            return self.environment
        return {name: value for name, value in sent.items() if (name, value) not in added.items()}

    # -- attach --------------------------------------------------------------------------------------------

    @classmethod
    def attach(cls, training_job_name: str, sagemaker_session: Any = None, model_channel_name: str = "model") -> Any:
        """Create an estimator for an existing job; a job on this machine needs only its name.

        Args:
            training_job_name: of the job.
            sagemaker_session: where to look; default: this process, for a job that it has started here, else the cloud.
            model_channel_name: as in the SDK.

        Returns:
            An estimator with the job's settings; its ``logs()`` follow the job.

        Example:
            >>> estimator = SMPEstimator.attach("gpt-2024-05-01-12-00-00-000-8f3a")  # doctest: +SKIP
            >>> estimator.logs()  # doctest: +SKIP
        """
        if sagemaker_session is None:
            sagemaker_session = session_of(training_job_name)
        with restore.attach_inside():
            estimator: TrainsWithSMP = super().attach(training_job_name, sagemaker_session, model_channel_name)
        if estimator._process_mode:
            estimator.latest_training_job = ProcessTrainingJob(estimator.sagemaker_session, training_job_name)
        elif estimator._watches():
            estimator._watched()
        if estimator._ship_runtime and is_s3_uri(estimator.source_dir):
            estimator._shipped_source = estimator.source_dir
        return estimator

    @classmethod
    def _prepare_init_params_from_job_description(
        cls, job_details: dict[str, Any], model_channel_name: str | None = None
    ) -> dict[str, Any]:
        """Return the SDK's arguments with the distribution restored, instead of leaving it among the hyperparameters."""
        on_this_machine = job_details["AlgorithmSpecification"].get("TrainingImage") == PROCESS_IMAGE
        completed = restore.complete_description(job_details)
        if on_this_machine:  # past the SDK's class, which would parse the image's name
            sdk: Any = cls._sdk_class()
            params = super(sdk, cls)._prepare_init_params_from_job_description(completed, model_channel_name)
            params.pop("image_uri")
        else:
            params = super()._prepare_init_params_from_job_description(completed, model_channel_name)
        return restore.restore_parameters(params, job_details)
