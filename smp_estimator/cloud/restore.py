"""The arguments of an estimator, restored from the description of an existing job."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from smp_config import ConfigError
from smp_config.job import CARRIED
from smp_estimator.cloud.source import USER_PROGRAM
from smp_estimator.local.files.uris import is_file_uri, path_of
from smp_estimator.sdk.version_2 import InstanceGroup
from smp_estimator.settings.translation import from_hyperparameters

logger = logging.getLogger(__name__)

#: Hyperparameters that the SDK itself adds; it writes them anew for every job.
_OF_THE_SDK = (
    "sagemaker_program",
    "sagemaker_submit_directory",
    "sagemaker_container_log_level",
    "sagemaker_job_name",
    "sagemaker_region",
)


#: Hyperparameters that the SDK reads of every job, and their values if a job has none. The SDK requires a program name.
_READ_BY_THE_SDK = {
    "sagemaker_program": '"the_job_names_no_entry_point.py"',
    "sagemaker_submit_directory": "null",
    "sagemaker_container_log_level": str(logging.INFO),
}

#: The channel that brings the code to a job without a network, and the code's folder in the container.
_CODE_CHANNEL = "code"
_CODE_IN_CONTAINER = f"/opt/ml/input/data/{_CODE_CHANNEL}/"

#: A job that exists is not refused: it can be watched and its model used, whatever its settings.
_attaching: ContextVar[bool] = ContextVar("attaching", default=False)


@contextmanager
def attach_inside() -> Iterator[None]:
    """Let estimators made inside the block stand for jobs that exist."""
    token = _attaching.set(True)
    try:
        yield
    finally:
        _attaching.reset(token)


def is_attaching() -> bool:
    """Return whether an estimator made now stands for a job that exists."""
    return _attaching.get()


@contextmanager
def lenient_when_attaching(say: Callable[[str], None]) -> Iterator[None]:
    """Let invalid settings inside the block pass if the job exists already; their error becomes a warning."""
    try:
        yield
    except ConfigError as error:
        if not is_attaching():
            raise
        say(f"the job was made with settings that this version would refuse: {error}")


def complete_description(job_details: dict[str, Any]) -> dict[str, Any]:
    """Add fields to a description that the SDK requires and the service may leave out.

    That is a key, instances beside groups, and hyperparameters of the SDK's own, as JSON. Jobs that boto3 or a state machine
    has started may lack these, and hold any text.
    """
    resources = {"InstanceType": None, "InstanceCount": None, **job_details["ResourceConfig"]}
    output = {"KmsKeyId": None, **job_details["OutputDataConfig"]}
    given = {**_READ_BY_THE_SDK, **(job_details.get("HyperParameters") or {})}
    hyperparameters = {name: value if _is_json(value) else json.dumps(value) for name, value in given.items()}
    return {
        **job_details,
        "ResourceConfig": resources,
        "OutputDataConfig": output,
        "HyperParameters": hyperparameters,
    }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def restore_parameters(params: dict[str, Any], job_details: dict[str, Any]) -> dict[str, Any]:
    """Return ``params`` after adding or moving the values that the SDK loses or misplaces; changes it in place."""
    groups = job_details["ResourceConfig"].get("InstanceGroups")
    if groups:
        params["instance_groups"] = [
            InstanceGroup(group["InstanceGroupName"], group["InstanceType"], group["InstanceCount"]) for group in groups
        ]
        del params["instance_type"], params["instance_count"]
    _restore_distribution(params)
    if job_details.get("Environment"):
        params["environment"] = dict(job_details["Environment"])
    definitions = job_details["AlgorithmSpecification"].get("MetricDefinitions")
    if definitions:
        params["metric_definitions"] = definitions
    checkpoints = job_details.get("CheckpointConfig") or {}
    for key, name in (("S3Uri", "checkpoint_s3_uri"), ("LocalPath", "checkpoint_local_path")):
        if checkpoints.get(key):
            params[name] = checkpoints[key]
    place = params.get("source_dir")
    if is_file_uri(place):
        params["source_dir"] = str(path_of(str(place)))
    elif place and str(place).startswith(_CODE_IN_CONTAINER):
        params["source_dir"] = _address_of_code(job_details) or place
    return params


def _address_of_code(job_details: dict[str, Any]) -> str | None:
    """Return the address of the channel that gives an isolated job its code."""
    for channel in job_details.get("InputDataConfig") or ():
        if channel["ChannelName"] != _CODE_CHANNEL:
            continue
        source = channel.get("DataSource", {})
        address = source.get("S3DataSource", {}).get("S3Uri")
        if address is not None:
            return str(address)
        return None
    return None


def _restore_distribution(params: dict[str, Any]) -> None:
    """Move the settings of our distribution from the hyperparameters to the arguments where the user had them."""
    carried = params.get("hyperparameters") or {}
    try:
        distribution = from_hyperparameters(carried)
    except ConfigError as error:
        # A job of another library or version; it can still be watched, and its model used.
        logger.warning("the distribution of the job cannot be restored: %s", error)
        return
    if distribution is None:
        return
    params["distribution"] = distribution
    program = carried.get(USER_PROGRAM)
    if program is not None:
        params["entry_point"] = program
    params["ship_runtime"] = program is not None
    ours = {*CARRIED, *_OF_THE_SDK, USER_PROGRAM}
    params["hyperparameters"] = {name: value for name, value in carried.items() if name not in ours}
