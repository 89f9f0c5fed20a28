"""Sixty random argument sets: ``ModelTrainer`` sends what the SDK's own class sends, field by field.

Only the differences in :data:`DIFFERENCES` pass, and only the refusals in :data:`REFUSALS`. What a defaults file sets comes
through in jobs of the library.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import IMAGE, Cloud
from support.platform.requests_compared import ABSENT, Difference, defaults_missing, unexplained, write_defaults
from support.platform.sdk3 import require_sdk_3

require_sdk_3()

from sagemaker.core.helper.session_helper import Session  # noqa: E402 - only where it is installed
from sagemaker.core.training import configs  # noqa: E402
from sagemaker.train.model_trainer import ModelTrainer as StockModelTrainer  # noqa: E402
from support.platform.drawn_trainers import COUNT, MISTAKES, SEED, Case, draw  # noqa: E402

from smp_estimator.cloud import source as code  # noqa: E402
from smp_estimator.model_trainer import ModelParallel, ModelTrainer  # noqa: E402

#: Mistakes that ours refuses and the SDK's class takes: the service would refuse the job, or the job would fail.
REFUSALS = {
    "an instance group": "ranks start on all hosts of a job, which must be alike",
    "spot without a wait": "the service wants MaxWaitTimeInSeconds",
    "spot with a short wait": "the service wants a wait of at least the run",
    "a local output": "the service wants an address of S3",
    "a warm pool for a week": "the service keeps one for six hours at most",
    "a name of a job with a blank": "the service takes letters, digits and hyphens",
    "a variable with a hyphen": "the service takes letters, digits and underscores",
    "a quotation mark": "the SDK writes values between such marks into a shell file, without escaping them",
    "a long hyperparameter": "the service takes 2,500 characters",
}


# -- the differences ------------------------------------------------------------------------------------------


def _parameters_hold(case: Case, ours: Any, theirs: Any) -> bool:
    """Return whether ``mp_parameters`` is what was given, and has the number of stages under both names."""
    given = (case.parallel or {})["parameters"]
    stages = given.get("partitions", given.get("pipeline_parallel_degree", 1))
    return theirs == ABSENT and json.loads(ours) == {**given, "partitions": stages, "pipeline_parallel_degree": stages}


def _options_hold(case: Case, ours: Any, theirs: Any) -> bool:
    """Return whether the options are the given ones after those of the platform."""
    added = "-x (FI_PROVIDER=efa|NCCL_PROTO=simple|FI_EFA_USE_DEVICE_RDMA=1|SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES=8192)"
    given = re.escape((case.parallel or {})["custom_mpi_options"])
    return theirs == ABSENT and re.fullmatch(rf"({added} ?)*{given}", json.loads(ours)) is not None


def _is(value: Any) -> Callable[[Case, Any, Any], bool]:
    return lambda case, ours, theirs: case.ours and theirs == ABSENT and json.loads(ours) == value


DIFFERENCES = [
    Difference(
        r"HyperParameters\.mp_parameters",
        "the ranks read the library's parameters there; the SDK's class knows nothing of them",
        lambda case, ours, theirs: case.ours and _parameters_hold(case, ours, theirs),
    ),
    Difference(
        r"HyperParameters\.sagemaker_mpi_custom_mpi_options",
        "options of the user, and those that the instance's network needs",
        lambda case, ours, theirs: case.ours and _options_hold(case, ours, theirs),
    ),
    Difference(r"HyperParameters\.sagemaker_mpi_enabled", "mpirun starts the ranks", _is(True)),
    Difference(r"HyperParameters\.sagemaker_mpi_num_of_processes_per_host", "so many of them", _is(8)),
    Difference(
        r"HyperParameters\.sagemaker_distributed_dataparallel_enabled", "the platform's launcher reads it", _is(False)
    ),
    Difference(
        r"HyperParameters\.sagemaker_instance_type",
        "likewise; not if the service chooses it among preferences",
        lambda case, ours, theirs: _is(case.arguments["compute"].instance_type)(case, ours, theirs),
    ),
    Difference(
        r"HyperParameters",
        "the SDK's class sends no hyperparameters, or an empty record, to which ours adds",
        lambda case, ours, theirs: case.ours and (ours, theirs) == (ABSENT, {}),
    ),
    Difference(
        r"AlgorithmSpecification\.MetricDefinitions(\..*)?",
        "loss, throughput and the like, if no definitions are given",
        lambda case, ours, theirs: case.ours and theirs == ABSENT and "with_metric_definitions" not in case.private,
    ),
    Difference(
        r"AlgorithmSpecification\.ContainerArguments\.1",
        "the script replaces the shell, so that the signal of a stop reaches it",
        lambda case, ours, theirs: case.ours and ours == theirs.replace("&& ", "&& exec "),
    ),
    Difference(
        r"Environment\.SMDDP_AG_SORT_BUFFER_SIZE_BYTES",
        "variables of the collectives reach the ranks of every launcher",
        lambda case, ours, theirs: case.ours and (ours, theirs) == ("16384", ABSENT),
    ),
    *[
        Difference(
            field,
            "SDK 3.27 reads this section of a defaults file and drops it",
            lambda case, ours, theirs, section=section: case.ours and section in case.training_job and theirs == ABSENT,
        )
        for field, section in {
            r"VpcConfig\..*": "VpcConfig",
            r"Tags\..*": "Tags",
            r"EnableInterContainerTrafficEncryption": "EnableInterContainerTrafficEncryption",
            r"OutputDataConfig\.KmsKeyId": "OutputDataConfig",
            r"ResourceConfig\.VolumeKmsKeyId": "ResourceConfig",
        }.items()
    ],
]


# -- the tests ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clients(whole_cloud: Cloud) -> Iterator[dict[str, Any]]:
    """Clients that all sessions share, since they take long to make."""
    names = ("sagemaker", "sagemaker_runtime", "sagemaker_featurestore_runtime", "sagemaker_metrics")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_cloud.boto, "client", functools.cache(whole_cloud.boto.client))
        # The request has the addresses; a thread for each of ten files would take most of the time.
        patch.setattr(Session, "upload_data", lambda _, path, bucket, key_prefix, **__: f"s3://{bucket}/{key_prefix}")
        # Small stand-ins: other tests look into the wheel.
        patch.setattr(code, "build_wheel", lambda folder: (folder / code.wheel_name()).write_bytes(b""))
        yield {f"{name}_client": getattr(whole_cloud.session, f"{name}_client") for name in names}


def _submitted(cloud: Cloud, kind: Any, case: Case, inputs: Any, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """Return the trainer and its request."""
    cloud.requests.clear()
    made = kind(**case.arguments, **arguments)
    for method, value in case.private.items():
        getattr(made, method)(*([] if value is None else [value]))
    made.train(inputs, wait=False)
    (sent,) = cloud.requests
    return made, sent


def _replaced(case: Case) -> set[str]:
    """Return the sections of the defaults file that the case's arguments replace."""
    given = case.arguments
    networking, output, compute = given.get("networking"), given.get("output_data_config"), given["compute"]
    replaced = {"Environment"} if given.get("environment") else set()
    replaced |= {"Tags"} if given.get("tags") else set()
    replaced |= {"OutputDataConfig"} if output is not None and isinstance(output.kms_key_id, str) else set()
    # Other instances have disks of their own, which take no key.
    takes_key = compute.instance_type == "ml.p3.16xlarge" and compute.volume_kms_key_id is None
    replaced |= set() if takes_key else {"ResourceConfig"}
    fields = {
        "VpcConfig": "subnets",
        "EnableNetworkIsolation": "enable_network_isolation",
        "EnableInterContainerTrafficEncryption": "enable_inter_container_traffic_encryption",
    }
    return replaced | {section for section, name in fields.items() if getattr(networking, name, None) is not None}


#: Of the cases that have run: fields of differences, mistakes that only ours refuses, and cases with two requests.
_seen: set[str] = set()
_refused: set[str] = set()
_compared: set[int] = set()


@pytest.mark.parametrize("number", range(COUNT + len(MISTAKES)), ids=lambda number: f"seed{SEED}-{number}")
def test_what_both_send(
    number: int,
    cloud: Cloud,
    clients: dict[str, Any],
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = draw(number)
    write_defaults(monkeypatch, tmp_path / "sdk.yaml", case.training_job, {})
    session = Session(cloud.boto, default_bucket="bucket", **clients)
    shared = {
        "source_code": configs.SourceCode(source_dir=str(script), entry_script="train.py"),
        "sagemaker_session": session,
    }
    distributed = ModelParallel(**case.parallel) if case.parallel else case.distributed
    image = {} if case.image == "chosen" else {"training_image": IMAGE}
    ours: Any = None
    refusal: Exception | None = None
    address = IMAGE
    try:
        made, ours = _submitted(cloud, ModelTrainer, case, case.inputs[0], **shared, **image, distributed=distributed)
        address = made.training_image
    except Exception as error:
        refusal = error
    case = draw(number)
    try:
        _, theirs = _submitted(
            cloud,
            StockModelTrainer,
            case,
            case.inputs[1],
            **shared,
            training_image=address,
            distributed=distributed,
        )
    except Exception:
        assert refusal is not None, "the SDK's class refuses this"
        return
    case = draw(number)
    if refusal is not None:
        assert case.mistake in REFUSALS, f"refused: {refusal}\n{case}"
        _refused.add(case.mistake)
        return
    lines, seen = unexplained(case, ours, theirs, DIFFERENCES)
    _seen.update(seen)
    _compared.add(number)
    if case.ours:
        lines += defaults_missing(case.training_job, ours, _replaced(case))
    assert not lines, "\n".join([*lines, str(case)])


def test_the_lists_have_nothing_that_does_not_happen() -> None:
    """A difference or refusal that no case shows is removed, or a case is drawn that shows it."""
    if missing := set(range(COUNT)) - _compared:
        pytest.skip(f"no two requests of the cases {sorted(missing)}: not run, or an older SDK lacks their images")
    assert {each.field for each in DIFFERENCES} == _seen
    assert set(REFUSALS) == _refused
