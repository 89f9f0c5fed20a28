"""The meaning of a CreateTrainingJob request, in the same words for versions 2 and 3 of the SDK."""

from __future__ import annotations

import json
from typing import Any

#: What a request has if nothing else is given; facts leave it out.
_DEFAULTS = {"count": 1, "volume": 30, "max_run": 86400, "spot": False, "checkpoint": None, "strategy": "none"}

#: Facts that are compared only where a cell names them, since the versions fill them in otherwise.
OPTIONAL = {"image", "name", "output", "role", "environment", "compression", "metrics"}

#: Strategies of version 2 that become another one in version 3.
TRANSLATED = {"dataparallel": "torchrun", "pytorchddp": "torchrun"}


def facts(request: dict[str, Any], distributed: dict[str, Any] | None) -> dict[str, Any]:
    """Read a request.

    Args:
        distributed: of version 3, the configuration that travels with the job.
    """
    resources = request["ResourceConfig"]
    network = request.get("VpcConfig", {})
    given = {name: _decoded(value) for name, value in request.get("HyperParameters", {}).items()}
    image = request["AlgorithmSpecification"]["TrainingImage"].rpartition("/")[2]
    found = {
        "type": resources["InstanceType"],
        "count": resources["InstanceCount"],
        "volume": resources["VolumeSizeInGB"],
        "keep_alive": resources.get("KeepAlivePeriodInSeconds"),
        "max_run": request["StoppingCondition"]["MaxRuntimeInSeconds"],
        "max_wait": request["StoppingCondition"].get("MaxWaitTimeInSeconds"),
        "spot": request.get("EnableManagedSpotTraining", False),
        "checkpoint": request.get("CheckpointConfig", {}).get("S3Uri"),
        "output": request["OutputDataConfig"]["S3OutputPath"],
        "compression": request["OutputDataConfig"].get("CompressionType"),
        "role": request["RoleArn"],
        "name": request["TrainingJobName"],
        "image": image,
        "environment": request.get("Environment", {}),
        "tags": {row["Key"]: row["Value"] for row in request.get("Tags", [])},
        "subnets": network.get("Subnets", []),
        "groups": network.get("SecurityGroupIds", []),
        "metrics": [row["Name"] for row in request["AlgorithmSpecification"].get("MetricDefinitions", [])],
        "channels": {
            row["ChannelName"]: _channel(row)
            for row in request.get("InputDataConfig", [])
            if row["ChannelName"] not in ("code", "sm_drivers")
        },
        "hyperparameters": {
            name: value
            for name, value in given.items()
            if name != "mp_parameters" and not name.startswith("sagemaker_")
        },
        "strategy": _strategy_of_2(given) if distributed is None else _strategy_of_3(given, distributed),
    }
    return {
        name: value for name, value in found.items() if value != _DEFAULTS.get(name) and value not in (None, {}, [])
    }


def agree(expected: dict[str, Any], found: dict[str, Any]) -> bool:
    """Return whether a request has these facts, and no other but optional ones."""
    for name in expected.keys() | (found.keys() - OPTIONAL):
        wanted, is_there = expected.get(name), found.get(name)
        if name == "environment":
            is_equal = wanted.items() <= is_there.items()
        elif name in ("image", "name"):
            is_equal = str(is_there).startswith(str(wanted))
        else:
            is_equal = wanted == is_there
        if not is_equal:
            return False
    return True


def _channel(row: dict[str, Any]) -> str:
    files = row["DataSource"].get("FileSystemDataSource")
    if files:
        words = [files["FileSystemId"], files["FileSystemType"], files["DirectoryPath"], files["FileSystemAccessMode"]]
        return " ".join(words)
    s3 = row["DataSource"]["S3DataSource"]
    words = [s3["S3Uri"], s3["S3DataType"], s3.get("S3DataDistributionType", ""), row.get("InputMode", "")]
    return " ".join(word for word in words if word not in ("", "S3Prefix", "FullyReplicated", "File"))


def _decoded(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:  # version 3 sends texts without quotation marks
        return value


def _strategy_of_2(given: dict[str, Any]) -> str:
    parameters = given.get("mp_parameters")
    if given.get("sagemaker_torch_distributed_enabled") or given.get("sagemaker_pytorch_xla_multi_worker_enabled"):
        return _version_2(parameters) if parameters else "torchrun"
    if given.get("sagemaker_distributed_dataparallel_enabled"):
        return "dataparallel"
    if given.get("sagemaker_pytorch_ddp_enabled"):
        return "pytorchddp"
    processes = given.get("sagemaker_mpi_num_of_processes_per_host")
    if parameters:
        return f"modelparallel partitions={parameters['partitions']} on {processes}"
    if given.get("sagemaker_mpi_enabled"):
        return f"mpi {processes} {given.get('sagemaker_mpi_custom_mpi_options', '')}".strip()
    return "none"


def _strategy_of_3(given: dict[str, Any], distributed: dict[str, Any]) -> str:
    parameters = given.get("mp_parameters")
    if "smp" in distributed:
        return _version_2(parameters) if parameters else "torchrun"
    if parameters:
        processes = given["sagemaker_mpi_num_of_processes_per_host"]
        return f"modelparallel partitions={parameters['partitions']} on {processes}"
    if "mpi_additional_options" in distributed:
        options = " ".join(distributed["mpi_additional_options"] or [])
        return f"mpi {distributed['process_count_per_node']} {options}".strip()
    return "none"


def _version_2(parameters: dict[str, Any]) -> str:
    return " ".join(["modelparallel 2", *(f"{name}={value}" for name, value in sorted(parameters.items()))])
