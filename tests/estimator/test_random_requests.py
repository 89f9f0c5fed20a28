"""Sixty random argument sets: the estimators send what the SDK's own classes send, field by field.

Only the differences in :data:`DIFFERENCES` pass, and only the refusals in :data:`REFUSALS`. What a defaults file sets comes
through in both.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.matrix import sampled
from support.platform.cloud import IMAGE, Cloud, service
from support.platform.drawn_estimators import COUNT, MISTAKES, OWN_ARGUMENTS, SEED, Case, draw
from support.platform.requests_compared import ABSENT, Difference, defaults_missing, unexplained, write_defaults

from smp_estimator import SMPEstimator, SMPHuggingFace
from smp_estimator.cloud import source

#: Mistakes that ours refuses and the SDK's class takes: the service would refuse the job, or the job would fail.
REFUSALS = {
    "spot without a wait": "the service wants MaxWaitTimeInSeconds",
    "spot with a short wait": "the service wants a wait of at least the run",
    "a file system without a network": "the job cannot reach the file system",
    "a warm pool for a week": "the service keeps one for six hours at most",
    "a name of a job with a blank": "the service takes letters, digits and hyphens",
    "a variable with a hyphen": "the service takes letters, digits and underscores",
    "a long hyperparameter": "the service takes 2,500 characters",
}


# -- the differences ------------------------------------------------------------------------------------------


def _parameters_hold(case: Case, ours: Any, theirs: Any) -> bool:
    """Return whether ``mp_parameters`` is what was given, and has the number of stages under both names."""
    given = case.arguments["distribution"]["smdistributed"]["modelparallel"]["parameters"]
    stages = given.get("partitions", given.get("pipeline_parallel_degree", 1))
    both = {"partitions": stages, "pipeline_parallel_degree": stages}
    return json.loads(ours) == {**given, **both} and (theirs == ABSENT or json.loads(theirs) == given)


#: Of the options that are added, as name or prefix.
_ADDED = ("FI_PROVIDER=efa", "NCCL_PROTO=simple", "FI_EFA_USE_DEVICE_RDMA=1", "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES=8192")


def _options_hold(case: Case, ours: Any, theirs: Any) -> bool:
    """Return whether the options are the given ones, after those of the platform and without what every launcher sets."""
    given = case.arguments["distribution"].get("mpi", {}).get("custom_mpi_options", "")
    words = shlex.split(json.loads(ours))
    kept = shlex.split(given.replace("--mca btl_vader_single_copy_mechanism none", ""))
    added = words[: len(words) - len(kept)]
    pairs = list(zip(added[::2], added[1::2], strict=True))
    return (
        words[len(added) :] == kept
        and all(option == "-x" and value in _ADDED for option, value in pairs)
        and theirs in (ABSENT, json.dumps(given))
    )


def _only_ours(case: Case, ours: Any, theirs: Any) -> bool:
    return case.ships and theirs == ABSENT and ours != ABSENT


def _sent_for(**expected: Any) -> Callable[[Case, Any, Any], bool]:
    """Return a check for hyperparameters that the SDK's class does not send, since it refuses the distribution for the image."""
    (value,) = expected.values()
    return lambda case, ours, theirs: _only_ours(case, ours, theirs) and json.loads(ours) == value


DIFFERENCES = [
    Difference(
        r"HyperParameters\.mp_parameters",
        "client libraries look for either name of the number of stages; the SDK's class refuses the library in stock images",
        lambda case, ours, theirs: case.ours and _parameters_hold(case, ours, theirs),
    ),
    Difference(
        r"HyperParameters\.sagemaker_mpi_custom_mpi_options",
        "options that the instance's network needs, and those that mpirun may get only once",
        lambda case, ours, theirs: (case.ours or case.ships) and _options_hold(case, ours, theirs),
    ),
    Difference(
        r"HyperParameters\.sagemaker_mpi_enabled",
        "mpirun starts the ranks in stock images; the SDK's class refuses the library there",
        _sent_for(value=True),
    ),
    Difference(
        r"HyperParameters\.sagemaker_mpi_num_of_processes_per_host",
        "as above",
        _sent_for(value=8),
    ),
    Difference(
        r"HyperParameters\.sagemaker_distributed_dataparallel_enabled",
        "as above",
        lambda case, ours, theirs: _only_ours(case, ours, theirs) and json.loads(ours) is not case.ours,
    ),
    Difference(
        r"HyperParameters\.sagemaker_distributed_dataparallel_custom_mpi_options",
        "as above",
        _sent_for(value=""),
    ),
    Difference(
        r"HyperParameters\.sagemaker_instance_type",
        "as above; with instance groups the SDK's class sends null, and ours the type of the group that trains",
        lambda case, ours, theirs: (
            (_only_ours(case, ours, theirs) or (case.groups and theirs == "null"))
            and json.loads(ours) == (_kind_of_group(case) if case.groups else case.arguments["instance_type"])
        ),
    ),
    Difference(
        r"HyperParameters\.sagemaker_distribution_instance_groups",
        "as above",
        lambda case, ours, theirs: _only_ours(case, ours, theirs) and json.loads(ours) == case.groups[:1],
    ),
    Difference(
        r"HyperParameters\.sagemaker_program",
        "the runtime's program starts the script in a stock image",
        lambda case, ours, theirs: case.ships and (ours, theirs) == (f'"{source.PROGRAM}"', '"train.py"'),
    ),
    Difference(
        rf"HyperParameters\.{source.USER_PROGRAM}",
        "the script that this program starts",
        _sent_for(value="train.py"),
    ),
    Difference(
        r"AlgorithmSpecification\.MetricDefinitions(\..*)?",
        "loss, throughput and the like, if no definitions are given",
        lambda case, ours, theirs: case.ours and theirs == ABSENT and case.arguments.get("metric_definitions") is None,
    ),
    Difference(
        r"AlgorithmSpecification\.EnableSageMakerMetricsTimeSeries",
        "on, as the SDK has it for its own images; that it gets the address here and no version is this test's doing",
        lambda case, ours, theirs: case.image == "chosen" and (ours, theirs) == (True, ABSENT),
    ),
    Difference(
        r"DebugHookConfig(\..*)?",
        "the debugger's hooks do not know distributed models: off, if neither an argument nor a defaults file turns it on",
        lambda case, ours, theirs: (
            case.ours
            and ours == ABSENT
            and case.arguments.get("debugger_hook_config") is None
            and case.debug_hook is None
        ),
    ),
    Difference(
        r"Environment\.SMDDP_AG_SORT_BUFFER_SIZE_BYTES",
        "variables of the collectives reach the ranks of every launcher",
        lambda case, ours, theirs: case.ours and (ours, theirs) == ("16384", ABSENT),
    ),
    Difference(
        r"Environment",
        "the SDK's class sends an empty environment, to which ours adds variables",
        lambda case, ours, theirs: (ours, theirs) == (ABSENT, {}),
    ),
    *[
        Difference(
            rf"Environment\.{variable}",
            f"what the argument {name} becomes",
            lambda case, ours, theirs, name=name, value=value: name in case.own and (ours, theirs) == (value, ABSENT),
        )
        for name, (_, variables) in OWN_ARGUMENTS.items()
        for variable, value in variables.items()
    ],
]


def _kind_of_group(case: Case) -> str:
    return str(case.arguments["instance_groups"][0].instance_type)


# -- the tests ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with service() as boto, pytest.MonkeyPatch.context() as patch:
        # Each estimator makes a client for it, and no request names it.
        patch.setattr("sagemaker.estimator.TensorBoardApp", lambda region: None)
        yield Cloud(boto)


@pytest.fixture
def session(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Case], Any]:
    """``session(case)``: a session that reads the case's defaults file; clients, which take long to make, are shared."""
    from sagemaker.session import Session

    clients = {
        f"{name}_client": getattr(cloud.session, f"{name}_client")
        for name in ("sagemaker", "sagemaker_runtime", "sagemaker_featurestore_runtime", "sagemaker_metrics")
    }

    def make(case: Case) -> Any:
        modules = {} if case.debug_hook is None else {"Estimator": {"DebugHookConfig": case.debug_hook}}
        write_defaults(monkeypatch, tmp_path / "sdk.yaml", case.training_job, modules)
        return Session(cloud.boto, default_bucket="bucket", **clients)

    # Small stand-ins: other tests look into the wheel.
    monkeypatch.setattr(source, "build_wheel", lambda folder: (folder / source.wheel_name()).write_bytes(b""))
    return make


def _submitted(cloud: Cloud, kind: Any, case: Case, name: str, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """Return the estimator and its request."""
    cloud.requests.clear()
    made = kind(**case.arguments, **arguments)
    job_name = f"{case.job_name}-{name}" if case.job_name else None
    made.fit(case.inputs, wait=False, job_name=job_name, experiment_config=case.experiment)
    (sent,) = cloud.requests
    return made, sent


_PYTORCH = ("framework_version", "py_version")
_HUGGINGFACE = ("transformers_version", "pytorch_version", "py_version")


def _versions(case: Case) -> dict[str, Any]:
    if case.image == "own":
        return {"image_uri": IMAGE}
    if case.image == "chosen":
        return {}
    new = case.ships or case.strategy == "none"
    if case.kind == "pytorch":
        return dict(zip(_PYTORCH, ("2.8.0", "py312") if new else ("2.0.1", "py310"), strict=True))
    return dict(zip(_HUGGINGFACE, ("4.56.2", "2.8.0", "py312") if new else ("4.28.1", "2.0.0", "py310"), strict=True))


def _replaced(case: Case) -> set[str]:
    """Return the sections of the defaults file that the case's arguments replace."""
    sections = {
        "environment": "Environment",
        "enable_network_isolation": "EnableNetworkIsolation",
        "encrypt_inter_container_traffic": "EnableInterContainerTrafficEncryption",
        "subnets": "VpcConfig",
        "output_kms_key": "OutputDataConfig",
        "volume_kms_key": "ResourceConfig",
    }
    replaced = {section for name, section in sections.items() if case.arguments.get(name) is not None}
    groups = case.arguments.get("instance_groups") or ()
    kinds = {case.arguments.get("instance_type"), *(group.instance_type for group in groups)}
    # Other instances have disks of their own, which take no key.
    return replaced if kinds & {"ml.p3.16xlarge", "ml.m5.xlarge", "ml.c5.18xlarge"} else replaced | {"ResourceConfig"}


#: Of the cases that have run: fields of differences, mistakes that only ours refuses, and cases with two requests.
_seen: set[str] = set()
_refused: set[str] = set()
_compared: set[int] = set()


#: Every second case, and every mistake.
SAMPLE = [*range(0, COUNT, 2), *range(COUNT, COUNT + len(MISTAKES))]


@pytest.mark.parametrize(
    "number", sampled(range(COUNT + len(MISTAKES)), SAMPLE), ids=lambda number: f"seed{SEED}-{number}"
)
def test_what_both_send(number: int, cloud: Cloud, session: Callable[[Case], Any], script: Path) -> None:
    from sagemaker.huggingface import HuggingFace
    from sagemaker.pytorch import PyTorch

    case = draw(number)
    own, stock = (SMPEstimator, PyTorch) if case.kind == "pytorch" else (SMPHuggingFace, HuggingFace)
    shared = {"source_dir": str(script), "sagemaker_session": session(case)}
    versions = _versions(case)
    address = IMAGE
    ours: Any = None
    refusal: Exception | None = None
    try:
        made, ours = _submitted(cloud, own, case, "ours", **shared, **versions, **case.own)
        address = made.training_image_uri()
    except Exception as error:
        refusal = error
    case = draw(number)
    if case.kind == "huggingface":
        versions = {"py_version": None, **versions}  # the SDK's class wants the argument
    if case.ships:
        case.arguments["distribution"] = None
        versions = {"image_uri": address, **versions} if case.image == "chosen" else versions
    try:
        _, theirs = _submitted(cloud, stock, case, "stock", **shared, **versions)
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
    lines += defaults_missing(case.training_job, ours, _replaced(case))
    assert not lines, "\n".join([*lines, str(case)])


@pytest.mark.full  # of all cases
def test_the_lists_have_nothing_that_does_not_happen() -> None:
    """A difference or refusal that no case shows is removed, or a case is drawn that shows it."""
    if missing := set(range(COUNT)) - _compared:
        pytest.skip(f"no two requests of the cases {sorted(missing)}: not run, or an older SDK lacks their images")
    assert {each.field for each in DIFFERENCES} == _seen
    assert set(REFUSALS) == _refused
