"""What cannot work is refused before anything is sent, in the words of SDK v3; what is right is not."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from support.faults.configurations import WRONG, Probe
from support.faults.right_configurations import RIGHT
from support.platform.sdk3 import here, require_sdk_3, trainer

require_sdk_3()

from sagemaker.core.training.configs import (  # noqa: E402 - only where it is installed
    CheckpointConfig,
    OutputDataConfig,
    StoppingCondition,
)
from sagemaker.train.distributed import Torchrun  # noqa: E402
from sagemaker.train.model_trainer import Mode  # noqa: E402

from smp_config import ConfigError  # noqa: E402

#: Names that only SDK v2 has, and those that this package's estimators have.
OF_VERSION_2 = re.compile(
    r'(?<![\w.])(instance_count|image_uri|entry_point|use_spot_instances|max_wait|max_run)(?![\w])|distribution\["|'
    r'"mpi":|smdistributed|mpi\.processes|estimator|fit\('
)

#: What probes of SDK v2 expect, as SDK v3 says it.
IN_V3 = {
    r"mpi\.processes_per_host": r"processes_per_host",
    r"\"processes_per_host\": 8": r"processes_per_host=8",
    r"instance_count": r"compute\.instance_count",
    r"checkpoint_s3_uri": r"checkpoint_config\.s3_uri",
    r"max_wait": r"stopping_condition\.max_wait_time_in_seconds",
}


def of_v3(probe: Probe) -> dict[str, Any] | None:
    """The arguments of a probe for a trainer; None where SDK v3 has nothing that could be wrong so."""
    given = probe.made()
    distribution = given.pop("distribution", None) or {}
    part = (distribution.get("smdistributed") or {}).get("modelparallel") or {}
    mpi = distribution.get("mpi") or {}
    if (
        part.get("enabled") is not True
        or mpi.get("enabled") is not True
        or set(distribution) - {"smdistributed", "mpi"}
    ):
        return None
    if set(mpi) - {"enabled", "processes_per_host", "custom_mpi_options"} or set(part) - {"enabled", "parameters"}:
        return None
    if (distribution.get("smdistributed") or {}).get("dataparallel"):
        return None
    compute = {name: given.pop(name) for name in ("instance_type", "instance_count") if name in given}
    if "use_spot_instances" in given:
        compute["enable_managed_spot_training"] = given.pop("use_spot_instances")
    if "keep_alive_period_in_seconds" in given:
        compute["keep_alive_period_in_seconds"] = given.pop("keep_alive_period_in_seconds")
    made = {"compute": compute} if compute else {}
    limits = {"max_run": "max_runtime_in_seconds", "max_wait": "max_wait_time_in_seconds"}
    if found := {new: given.pop(old) for old, new in limits.items() if old in given}:
        made["stopping_condition"] = StoppingCondition(**found)
    for name in ("environment", "hyperparameters"):
        if name in given:
            made[name] = given.pop(name)
    parallel = {"parameters": part.get("parameters") or {}, **{k: v for k, v in mpi.items() if k != "enabled"}}
    return None if given else {**made, "parallel": parallel}


#: SDK v3 itself refuses these, or means something else by them.
ELSEWHERE = {
    "processes missing": "one per GPU",
    "options as a list": "in test_model_parallel.py, in other words",
    "processes as text": "in test_model_parallel.py, in other words",
    "half a process": "in test_model_parallel.py, in other words",
    "hosts as text": "Compute reads the text as a number",
    "variable as number": "ModelTrainer refuses it itself",
    "long hyperparameter": "a text is sent without quotation marks, so the limit is two characters further",
    "spot without a limit": "the limit of a run is an hour there",
    "open quote": "a single quotation mark has a sentence of its own",
}


def _variables(probe: Probe) -> bool:
    return callable(probe.arguments)


PROBES = [p for p in WRONG if not _variables(p) and p.name not in ELSEWHERE and of_v3(p) is not None]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_what_estimators_refuse_a_trainer_refuses(probe: Probe, cloud: Any, script: Path) -> None:
    given = of_v3(probe)
    assert given is not None
    with pytest.raises(ConfigError) as caught:
        trainer(script, sagemaker_session=cloud.session, **given)
    message = str(caught.value)
    for part in probe.wrong:
        for old, new in IN_V3.items():
            part = part.replace(old, new)
        assert re.search(part, message), f"{part!r} is not in: {message}"
    assert not OF_VERSION_2.search(message), message
    assert not cloud.requests


def test_the_table_is_long_enough() -> None:
    assert len(PROBES) + len(MORE) >= 60, "beside those of test_model_parallel.py"
    assert not set(ELSEWHERE) - {probe.name for probe in WRONG}


#: Wrong in a way that only SDK v3 knows: arguments of ``trainer``, and what the refusal must name.
MORE: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("misspelt argument", {"compte": 1}, (r"did you mean 'compute'",)),
    ("argument of v2", {"instance_type": "ml.p4d.24xlarge"}, (r"ModelTrainer has no 'instance_type'",)),
    ("no script", {"code": {"entry_script": None}}, (r"no entry_script", r'entry_script="train\.py"')),
    ("script missing", {"code": {"entry_script": "trian.py"}}, (r"did you mean 'train\.py'",)),
    ("folder missing", {"code": {"source_dir": "/nowhere"}}, (r"source_code\.source_dir='/nowhere'",)),
    ("no Python", {"code": {"entry_script": "train.txt"}}, (r"train\.txt",)),
    (
        "arguments of no command",
        {"code": {"args": ["--epochs", 25]}},
        (r"source_code has args \['--epochs', 25\] and no command", r"give hyperparameters"),
    ),
    (
        "a command beside",
        {"code": {"command": "python x.py"}},
        (r"drop distributed without a word: remove the command",),
    ),
    (
        "own hyperparameter",
        {"hyperparameters": {"mp_parameters": {}}},
        (r"'mp_parameters', which ModelParallel writes",),
    ),
    (
        "own hyperparameter of mpi",
        {"hyperparameters": {"sagemaker_mpi_enabled": True}},
        (r"'sagemaker_mpi_enabled', which ModelParallel writes",),
    ),
    ("quotes", {"hyperparameters": {"text": "it's"}}, (r"hyperparameters has a single quotation mark", r"it.*s")),
    ("a set", {"hyperparameters": {"a": {1}}}, (r"hyperparameter 'a' is \{1\}", r"sent as JSON")),
    ("local in the cloud", {"compute": {"instance_type": "local"}}, (r"add training_mode=Mode\.LOCAL_CONTAINER",)),
    ("misspelt machine", {"compute": {"instance_type": "locl"}}, (r"did you mean 'local'", r"compute\.instance_type")),
    (
        "output on this machine",
        {"output_data_config": OutputDataConfig(s3_output_path="file:///tmp/x")},
        (r"output_data_config\.s3_output_path is 'file:///tmp/x', which is no s3:// address",),
    ),
    (
        "checkpoints on this machine",
        {"checkpoint_config": CheckpointConfig(s3_uri="/tmp/x")},
        (r"checkpoint_config\.s3_uri is '/tmp/x', which is no s3:// address",),
    ),
    ("job name", {"base_job_name": "my_job"}, (r"write base_job_name='my-job'",)),
    (
        "an old stock image",
        {"training_image": "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.3.0-gpu-py311"},
        (
            r"training_image is .*, a stock image with PyTorch 2\.3\.0",
            r"needs PyTorch 2\.4",
            r"leave training_image out",
        ),
    ),
    (
        "a stock image without runtime",
        {
            "training_image": "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.8.0-gpu-py312",
            "parallel": {"parameters": {"ddp": True}, "processes_per_host": 8, "ship_runtime": False},
        },
        (r"ship_runtime is False", r"a stock image"),
    ),
    (
        "unequal hosts",
        {"compute": {"instance_type": None, "instance_count": None, "instance_groups": "two"}},
        (r"compute\.instance_groups has 2 groups", r"use compute\.instance_type and"),
    ),
]


@pytest.mark.parametrize(("name", "given", "named"), MORE, ids=[row[0] for row in MORE])
def test_wrong_trainers(name: str, given: dict[str, Any], named: tuple[str, ...], cloud: Any, script: Path) -> None:
    (script / "train.txt").write_text("")
    if name == "unequal hosts":
        from sagemaker.core.shapes import InstanceGroup

        groups = [InstanceGroup(instance_type="ml.c5.xlarge", instance_count=1, instance_group_name=n) for n in "ab"]
        given = {"compute": {**given["compute"], "instance_groups": groups}}
    with pytest.raises(ConfigError) as caught:
        trainer(script, sagemaker_session=cloud.session, **given)
    for part in named:
        assert re.search(part, str(caught.value)), f"{part!r} is not in: {caught.value}"
    assert not cloud.requests


@pytest.mark.parametrize(
    "probe", [p for p in RIGHT if not _variables(p) and of_v3(p) is not None], ids=lambda p: p.name
)
def test_right(probe: Probe, cloud: Any, script: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = of_v3(probe)
    assert given is not None
    with caplog.at_level(logging.WARNING, logger="smp_estimator"):
        made = trainer(script, sagemaker_session=cloud.session, **given)
        made.train(dry_run=True)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("smp_")]
    for part in probe.warned:
        for old, new in IN_V3.items():
            part = part.replace(old, new)
        assert any(re.search(part, sentence) for sentence in said), f"{part!r} is not in: {said}"
    assert len(said) == len(probe.warned), said


def test_a_verdict_needs_no_account(script: Path) -> None:
    """Without an image the SDK is asked for the newest of the region; the settings come first."""
    for image in (None, "i:1"):
        with pytest.raises(ConfigError, match="is 16, but ml.p4d.24xlarge has 8 GPUs"):
            trainer(script, training_image=image, parallel={"parameters": {"ddp": True}, "processes_per_host": 16})


def test_changes_after_the_constructor_are_checked_by_train(cloud: Any, script: Path) -> None:
    def wrong(change: Any) -> str:
        made = trainer(script, sagemaker_session=cloud.session)
        change(made)
        with pytest.raises(ConfigError) as caught:
            made.train(wait=False)
        return str(caught.value)

    assert "is 9, but" in wrong(lambda t: setattr(t.distributed, "processes_per_host", 9))
    assert "unknown parameter" in wrong(lambda t: t.distributed.parameters.update(ddpp=True))
    assert "has 4 GPUs" in wrong(lambda t: setattr(t.compute, "instance_type", "ml.p3.8xlarge"))
    assert "did you mean 'train.py'" in wrong(lambda t: setattr(t.source_code, "entry_script", "trian.py"))
    assert not cloud.requests


def test_processes_of_this_machine_are_asked_for_less(script: Path) -> None:
    here(script, parallel={"parameters": {"ddp": True}})
    here(script, hyperparameters={"text": "it's"})
    with pytest.raises(ConfigError, match="use ModelParallel, or give training_image to run"):
        here(script, parallel=Torchrun())
    (script.parent / "code.tar.gz").write_text("")
    with pytest.raises(ConfigError, match="which only a container unpacks"):
        here(script, code={"source_dir": str(script.parent / "code.tar.gz")})
    with pytest.raises(
        ConfigError,
        match=r"= 3 processes, which is more than the 2 processes = processes_per_host 2 × compute\.instance_count 1",
    ):
        here(script, parallel={"parameters": {"partitions": 3}, "processes_per_host": 2})


def test_containers_of_this_machine(script: Path, tmp_path: Path) -> None:
    given = {"training_mode": Mode.LOCAL_CONTAINER, "training_image": "smp:1", "local_container_root": str(tmp_path)}
    made = here(script, compute={"instance_type": "local_cpu"}, **given)
    assert made.training_image == "smp:1"
    with pytest.raises(ConfigError, match='ddp_dist_backend is "nccl"'):
        here(
            script,
            compute={"instance_type": "local_cpu"},
            parallel={"parameters": {"ddp": True, "ddp_dist_backend": "nccl"}, "processes_per_host": 2},
            **given,
        )


@pytest.mark.parametrize(
    ("kind", "parameters", "said"),
    [
        ("ml.trn2.48xlarge", {"ddp": True}, r"compute\.instance_type is ml\.trn2\.48xlarge, whose .* Neuron devices"),
        ("ml.p2.8xlarge", {"ddp": True}, r"K80 GPUs have compute capability 3\.7"),
        ("ml.c5.18xlarge", {"ddp": True, "ddp_dist_backend": "nccl"}, r"but ml\.c5\.18xlarge has none"),
    ],
)
def test_accelerators_are_refused_wherever_the_job_runs(
    kind: str, parameters: dict[str, Any], said: str, cloud: Any, script: Path, tmp_path: Path
) -> None:
    given = {"compute": {"instance_type": kind}, "parallel": {"parameters": parameters, "processes_per_host": 8}}
    with pytest.raises(ConfigError, match=said):
        trainer(script, sagemaker_session=cloud.session, **given)
    with pytest.raises(ConfigError, match=said):
        trainer(script, training_mode=Mode.LOCAL_CONTAINER, local_container_root=str(tmp_path), **given)
    assert not cloud.requests


def test_bf16_on_v100_is_warned_about(cloud: Any, script: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"compute": {"instance_type": "ml.p3.16xlarge"}, "sagemaker_session": cloud.session}
    trainer(script, parallel={"parameters": {"ddp": True, "bf16": True}, "processes_per_host": 8}, **given)
    assert "V100 GPUs of ml.p3.16xlarge have no units for it" in caplog.text
    caplog.clear()
    trainer(script, parallel={"parameters": {"ddp": True, "fp16": True}, "processes_per_host": 8}, **given)
    assert "units for it" not in caplog.text


def test_plan_and_suggest(cloud: Any, script: Path) -> None:
    made = trainer(script, sagemaker_session=cloud.session, hyperparameters={"batch_size": 8})
    plan = made.plan("gpt2")
    assert plan.verdict
    assert "batch_size" in str(plan)
    assert made.suggest("gpt2")
    made.compute.instance_type = "ml.zz9.xlarge"
    with pytest.raises(ConfigError) as caught:
        made.plan("gpt2", gpu_memory_bytes=0)
    assert not OF_VERSION_2.search(str(caught.value)), caught.value
