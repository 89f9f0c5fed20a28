"""Two CreateTrainingJob requests, field by field, with a list of the differences that are meant to be there."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import pytest

#: Value of a field that a request does not have.
ABSENT = "<absent>"

OPT_OUT = {"TelemetryOptOut": True}


@dataclass(frozen=True)
class Difference:
    """One kind of difference that passes.

    Attributes:
        field: regular expression of the field's whole path, such as ``Environment\\.SMP_.*``.
        reason: why the two classes send different values.
        holds: whether the values of ours and of the SDK's class are the ones that are meant, for a case.
    """

    field: str
    reason: str
    holds: Callable[[Any, Any, Any], bool]


def fields(request: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a request by their paths; empty containers are leaves."""
    if isinstance(request, Mapping) and request:
        items: Iterable[tuple[Any, Any]] = request.items()
    elif isinstance(request, list) and request:
        items = enumerate(request)
    else:
        return {path: request}
    found: dict[str, Any] = {}
    for name, value in items:
        found |= fields(value, f"{path}.{name}" if path else str(name))
    return found


def without_job_name(value: Any, job_name: str) -> Any:
    """Return a copy of a request in which every text has JOB in the place of the job's name."""
    if isinstance(value, Mapping):
        return {name: without_job_name(inner, job_name) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_job_name(inner, job_name) for inner in value]
    return value.replace(job_name, "JOB") if isinstance(value, str) else value


def unexplained(
    case: Any, ours: Mapping[str, Any], theirs: Mapping[str, Any], known: Iterable[Difference]
) -> tuple[list[str], set[str]]:
    """Compare two requests.

    Returns:
        One line for each field that differs in a way that is not in the list, and the fields of the list that were seen.
    """
    mine, sdk = (
        fields(without_job_name(request, request["TrainingJobName"]) if "TrainingJobName" in request else request)
        for request in (ours, theirs)
    )
    lines, seen = [], set()
    for path in sorted(mine.keys() | sdk.keys()):
        one, other = mine.get(path, ABSENT), sdk.get(path, ABSENT)
        if type(one) is type(other) and one == other:
            continue
        fitting = [each for each in known if re.fullmatch(each.field, path) and each.holds(case, one, other)]
        if fitting:
            seen.add(fitting[0].field)
        else:
            lines.append(f"{path}: ours {one!r}, the SDK's {other!r}")
    return lines, seen


def training_job_defaults(source: random.Random) -> dict[str, Any]:
    """Draw the section of a defaults file that training jobs read."""
    ids = source.randrange(100)
    sections: dict[str, Any] = {
        "EnableInterContainerTrafficEncryption": source.choice([True, True, False]),
        "EnableNetworkIsolation": source.choice([True, True, False]),
        "Environment": {"HTTPS_PROXY": "http://proxy:3128", "FROM_FILE": str(ids)},
        "OutputDataConfig": {"KmsKeyId": f"output-key-{ids}"},
        "ResourceConfig": {"VolumeKmsKeyId": f"volume-key-{ids}"},
        "ProfilerConfig": {"DisableProfiler": source.choice([True, False])},
        "RoleArn": f"arn:aws:iam::123456789012:role/from-file-{ids}",
        "Tags": [{"Key": "from-file", "Value": str(ids)}, {"Key": "team", "Value": "file"}],
        "VpcConfig": {"Subnets": [f"subnet-file{ids}"], "SecurityGroupIds": [f"sg-file{ids}"]},
    }
    return {name: value for name, value in sections.items() if source.random() < 0.45}


def write_defaults(
    patch: pytest.MonkeyPatch, path: Path, training_job: Mapping[str, Any], modules: Mapping[str, Any]
) -> None:
    """Write a defaults file, which the SDK then reads at the next session."""
    sections = {"TrainingJob": dict(training_job), "PythonSDK": {"Modules": {**OPT_OUT, **modules}}}
    path.write_text(yaml.safe_dump({"SchemaVersion": "1.0", "SageMaker": sections}))
    patch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(path))


def defaults_missing(
    training_job: Mapping[str, Any], request: Mapping[str, Any], replaced: Collection[str]
) -> list[str]:
    """Return a line for each section of a defaults file that does not come through in a request.

    Args:
        replaced: sections that an argument replaces.
    """
    lines = []
    for name, value in training_job.items():
        sent = request.get(name)
        if name in replaced or name == "ProfilerConfig":
            continue
        if isinstance(value, bool):
            is_there = bool(sent) is value
        elif name == "Tags":
            is_there = {tag["Key"] for tag in value} <= {tag["Key"] for tag in sent or ()}
        elif name in ("RoleArn", "VpcConfig"):
            is_there = sent == value
        else:
            is_there = value.items() <= (sent or {}).items()
        if not is_there:
            lines.append(f"{name} of the defaults file: {value!r}, sent {sent!r}")
    return lines
