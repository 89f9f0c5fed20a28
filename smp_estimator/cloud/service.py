"""Defaults of a model parallel job, and rules of the training service that otherwise fail silently.

Limits are read from the service's own model in botocore where a client is at hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from botocore.model import ServiceModel

from smp_config import ConfigError
from smp_config.job import HYPERPARAMETER_CHARACTERS
from smp_estimator.local.files.uris import is_file_uri, is_s3_uri
from smp_estimator.settings.variables import is_variable
from smp_records.records import PROGRESS_PREFIX

_BASE_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-]*")
_VARIABLE_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


#: Fields of a progress record that the service records as metrics of the same name.
METRICS = (
    "loss",
    "eval_loss",
    "samples_per_second",
    "step",
    "learning_rate",
    "gradient_norm",
    "loss_scale",
    "tokens_per_second",
    "mfu",
    "idle_share",
    "checkpoint_seconds",
)

_NUMBER = r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)"


def metric_definitions() -> list[dict[str, str]]:
    """Return the default of ``metric_definitions``; a tuner needs it too, to optimize one of the metrics."""
    # The quote before the name keeps "loss" from matching "eval_loss".
    return [{"Name": name, "Regex": rf'{PROGRESS_PREFIX}\{{.*"{name}": ?{_NUMBER}'} for name in METRICS]


def fill_in_cloud(sdk: dict[str, Any]) -> None:
    """Fill in defaults among ``sdk``, the arguments for the SDK's class."""
    if sdk.get("metric_definitions") is None:
        sdk["metric_definitions"] = metric_definitions()


def settle_debugger(estimator: Any, say: Callable[[str], None]) -> None:
    """Turn the debugger's hooks off by default, or warn if an argument or a defaults file turns them on.

    This comes after the SDK's constructor, which reads the defaults file only if the argument is left out.
    """
    if estimator.debugger_hook_config is None:
        estimator.debugger_hook_config = False
    elif estimator.debugger_hook_config is not False:  # the SDK writes True as {}
        say(
            "debugger_hook_config is on, but the debugger's hooks do not know distributed models and may fail the job; "
            "debugger_hook_config=False is the default for model parallel jobs"
        )


def warn_of_isolation(is_isolated: Any, say: Callable[[str], None]) -> None:
    """Warn if the job has no network but a stock image must install the runtime's requirements."""
    if is_isolated is True:
        say(
            "enable_network_isolation is True, and the stock image must install the runtime's requirements from a package "
            "index; give image_uri, an image that has the runtime, unless the stock image has pydantic and safetensors"
        )


def check_request(estimator: Any, hyperparameters: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Check the request for errors that the service would report only after the upload.

    Settings that are allowed but unwise cause a warning.

    Raises:
        ConfigError: names the setting and a value that works.
    """
    model = _model(estimator.sagemaker_session)
    _check_hyperparameters(hyperparameters, model)
    _check_environment(estimator.environment, model)
    if not estimator.sagemaker_session.local_mode:
        _check_places(estimator)
    _check_spot(estimator, say)
    _check_keep_alive(estimator, model, say)


def check_channels(inputs: Any, *, has_network: bool) -> None:
    """Check the channels given to ``fit()``.

    Args:
        has_network: the estimator has subnets and security groups.

    Raises:
        ConfigError: a local address, or a file system without a network to reach it.
    """
    for name, value in channels(inputs):
        address = _address(value)
        if isinstance(address, str) and is_file_uri(address):
            raise ConfigError(
                f"channel {name!r} is {address!r}, but the job runs in the cloud, where this machine's files are not; upload "
                f"them: fit({{{name!r}: estimator.sagemaker_session.upload_data({address.removeprefix('file://')!r})}})",
                code="SMP113",
            )
        if isinstance(address, str) and not is_s3_uri(address):
            raise ConfigError(
                f"channel {name!r} is {address!r}, which is no s3:// address; the job reads its data from S3 or a file system: "
                "write 's3://bucket/prefix', or give a FileSystemInput",
                code="SMP113",
            )
        if _is_of_sdk(value, "FileSystemInput") and not has_network:
            raise ConfigError(
                f"channel {name!r} is a file system, but the estimator has no subnets and security_group_ids; the job reaches a "
                "file system only from inside its VPC: add subnets=['subnet-…'] and security_group_ids=['sg-…']",
                code="SMP113",
            )


def channels(inputs: Any) -> Iterator[tuple[str, Any]]:
    """Yield the channels of ``fit(inputs)`` that are known now, as (name, value)."""
    if inputs is None:
        return
    # The SDK calls a single channel so.
    named = inputs if isinstance(inputs, Mapping) else {"training": inputs}
    # What a pipeline's steps make is known when it runs.
    for name, value in named.items():
        if not is_variable(value):
            yield str(name), value


def s3_places(inputs: Any, **others: Any) -> dict[str, str]:
    """Return the ``s3://`` addresses among the channels and ``others``, keyed by a description of each."""
    places = {f"channel {name!r}": _address(value) for name, value in channels(inputs)}
    return {what: address for what, address in (places | others).items() if is_s3_uri(address)}


def _address(value: Any) -> Any:
    """Return a channel's address: a plain string, or that of a TrainingInput; None if it has no address."""
    if isinstance(value, str):
        return value
    if not _is_of_sdk(value, "TrainingInput"):
        return None
    return value.config.get("DataSource", {}).get("S3DataSource", {}).get("S3Uri")


def _is_of_sdk(value: Any, name: str) -> bool:
    """Return whether a channel is an object of this class of ``sagemaker.inputs``; only SDK v2 has that module."""
    # Not imported: without the module there is no object of its classes.
    inputs = sys.modules.get("sagemaker.inputs")
    return inputs is not None and isinstance(value, getattr(inputs, name))


def _check_hyperparameters(hyperparameters: Mapping[str, Any], model: ServiceModel | None) -> None:
    most = _limit(model, 100, "CreateTrainingJobRequest", "HyperParameters")
    if len(hyperparameters) > most:
        raise ConfigError(
            f"there are {len(hyperparameters)} hyperparameters, and the service takes {most} (some of them for the SDK's own); "
            "put the settings of the script into one file in source_dir, or into one hyperparameter as JSON",
            code="SMP113",
        )
    for name, value in hyperparameters.items():
        if is_variable(value):
            continue
        length = len(json.dumps(value))
        if length > HYPERPARAMETER_CHARACTERS:
            raise ConfigError(
                f"hyperparameter {name!r} takes {length} characters as JSON, but the service accepts "
                f"{HYPERPARAMETER_CHARACTERS}; put it into a file in source_dir and give the file's name",
                code="SMP113",
            )


def _check_environment(environment: Mapping[str, Any] | None, model: ServiceModel | None) -> None:
    most = _limit(model, 100, "CreateTrainingJobRequest", "Environment")
    if len(environment or {}) > most:
        raise ConfigError(
            f"environment has {len(environment or {})} variables, and the service takes {most}; set the others in the script",
            code="SMP113",
        )
    for name, value in (environment or {}).items():
        if not _VARIABLE_NAME.fullmatch(name):
            raise ConfigError(
                f"environment has the name {name!r}; names are letters, digits and '_', not beginning with a digit: write "
                f"{re.sub(r'[^A-Za-z0-9_]', '_', name) or 'NAME'!r}",
                code="SMP113",
            )
        if isinstance(value, str) and len(value) > 512:
            raise ConfigError(
                f"environment variable {name!r} has {len(value)} characters, and the service takes 512; put it into a file in "
                "source_dir",
                code="SMP113",
            )


def _check_places(estimator: Any) -> None:
    """Check names and addresses that only the service reads."""
    for name in ("output_path", "checkpoint_s3_uri", "code_location"):
        value = getattr(estimator, name, None)
        if value and not is_variable(value) and not is_s3_uri(value):
            raise ConfigError(
                f"{name} is {str(value)!r}, which is no s3:// address; the job runs in the cloud, where this machine's folders are "
                f"not: write {name}='s3://bucket/prefix'",
                code="SMP113",
            )
    base = estimator.base_job_name
    if isinstance(base, str) and not is_variable(base) and not _BASE_NAME.fullmatch(base):
        fitting = re.sub(r"[^a-zA-Z0-9]+", "-", base).strip("-") or "training"
        raise ConfigError(
            f"base_job_name is {base!r}; job names begin with it, and the service takes letters, digits and hyphens only, a "
            f"letter or digit first: write base_job_name={fitting!r}",
            code="SMP113",
        )


def _check_spot(estimator: Any, say: Callable[[str], None]) -> None:
    wait, run = estimator.max_wait, estimator.max_run
    if estimator.use_spot_instances is not True:
        return
    if wait is None:
        raise ConfigError(
            f"use_spot_instances is True, but max_wait is missing; it limits waiting and running together and is at least "
            f"max_run ({run} seconds): set max_wait={run}, or more",
            code="SMP113",
        )
    if isinstance(wait, int) and isinstance(run, int) and wait < run:
        raise ConfigError(
            f"max_wait is {wait} seconds, less than max_run, which is {run}; it limits waiting for spot instances and running "
            f"together: set max_wait to {run} or more, or max_run to at most {wait}",
            code="SMP113",
        )
    if not estimator.checkpoint_s3_uri:
        say(
            "use_spot_instances is True without checkpoint_s3_uri: an interrupted job starts from nothing; give "
            "checkpoint_s3_uri='s3://…' and let the script save to and resume from /opt/ml/checkpoints"
        )


def _check_keep_alive(estimator: Any, model: ServiceModel | None, say: Callable[[str], None]) -> None:
    period = estimator.keep_alive_period_in_seconds
    if not isinstance(period, int):
        return
    most = _limit(model, 21600, "ResourceConfig", "KeepAlivePeriodInSeconds")
    if not 0 <= period <= most:
        raise ConfigError(
            f"keep_alive_period_in_seconds is {period}; a warm pool is kept for 0 to {most} seconds after a job: use for example "
            f"{min(most, 3600)}",
            code="SMP113",
        )
    if period and estimator.use_spot_instances is True:
        say(
            "keep_alive_period_in_seconds is set with use_spot_instances: warm pools are made of on-demand instances only"
        )


def _model(session: Any) -> ServiceModel | None:
    model = getattr(getattr(getattr(session, "sagemaker_client", None), "meta", None), "service_model", None)
    return model if isinstance(model, ServiceModel) else None


def _limit(model: ServiceModel | None, default: int, shape: str, member: str) -> int:
    if model is None:
        return default
    found: Any = model.shape_for(shape)
    return int(found.members[member].metadata.get("max", default))
