"""Version 2 of the library through SDK v3: ``Torchrun(smp=SMP(…))``, checked like settings of version 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.documents.doc_runs import matching
from support.platform.sdk3 import ROLE, require_sdk_3
from support.training.version2_notebooks import NOTEBOOKS, NotebookJob
from support.training.version2_script import SCRIPT

require_sdk_3()

from sagemaker.train.configs import Compute, InputData, SourceCode  # noqa: E402 - only where it is installed
from sagemaker.train.distributed import SMP, Torchrun  # noqa: E402

from smp_config import ConfigError  # noqa: E402
from smp_config.version2.parameters import Version2Parameters  # noqa: E402
from smp_estimator.model_trainer import ModelParallel, ModelTrainer  # noqa: E402
from smp_estimator.sdk_v3.model_parallel import as_model_parallel  # noqa: E402
from smp_launch.sagemaker.environment import MORE_VARIABLE  # noqa: E402
from smp_launch.sagemaker.model_trainer import launcher_variables  # noqa: E402


def here(script: Path, distributed: Any, **given: Any) -> Any:
    return ModelTrainer(
        source_code=SourceCode(source_dir=str(script), entry_script="train.py"),
        compute=Compute(instance_type="local", instance_count=1),
        distributed=distributed,
        **given,
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"hybrid_shard_degree": 3}, "hybrid_shard_degree is 3, and the job has 2 processes"),
        ({"tensor_parallel_degree": 4}, "tensor_parallel_degree is 4"),
        ({"context_parallel_degree": 3}, "context_parallel_degree is 3"),
        ({"expert_parallel_degree": 3}, "expert_parallel_degree is 3"),
        ({"random_seed": -1}, "random_seed is -1"),
    ],
)
def test_what_cannot_work_is_refused(script: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        here(script, Torchrun(process_count_per_node=2, smp=SMP(**given)))
    assert "instance_count" not in str(caught.value).replace("compute.instance_count", "")


def test_it_becomes_settings_of_version_2(script: Path) -> None:
    trainer = here(script, Torchrun(process_count_per_node=2, smp=SMP(hybrid_shard_degree=2)))
    assert isinstance(trainer.distributed, ModelParallel)
    assert trainer.distributed.typed_parameters == Version2Parameters.from_parameters({"hybrid_shard_degree": 2})
    assert (trainer.distributed.version, trainer.distributed.processes_per_host) == (2, 2)
    trainer.distributed = Torchrun(process_count_per_node=2, smp=SMP(tensor_parallel_degree=3))
    with pytest.raises(ConfigError, match="tensor_parallel_degree is 3"):
        trainer.train()


def test_the_page_s_settings_are_these() -> None:
    (block,) = matching(("version-2.md", "Torchrun("), "python")
    names: dict[str, Any] = {}
    exec(compile(block.code, "version-2.md", "exec"), names)
    wanted = ModelParallel(version=2, parameters={"hybrid_shard_degree": 2}, processes_per_host=2)
    assert as_model_parallel(names["distributed"]).model_dump() == wanted.model_dump()


def test_a_named_image_trains_with_its_own_library(script: Path, cloud: Any) -> None:
    given = {
        "source_code": SourceCode(source_dir=str(script), entry_script="train.py"),
        "compute": Compute(instance_type="ml.p4d.24xlarge", instance_count=1),
        "role": ROLE,
        "sagemaker_session": cloud.session,
    }
    torchrun = Torchrun(smp=SMP(hybrid_shard_degree=8, context_parallel_degree=2, expert_parallel_degree=2))
    original = "658645717510.dkr.ecr.us-east-1.amazonaws.com/smdistributed-modelparallel:2.5.1-gpu-py311-cu124"
    assert ModelTrainer(**given, training_image=original, distributed=torchrun).distributed is torchrun
    with pytest.raises(ConfigError, match="context_parallel_degree is 2 and expert_parallel_degree is 2"):
        ModelTrainer(**given, distributed=torchrun)
    trainer = ModelTrainer(**given, distributed=Torchrun(smp=SMP(hybrid_shard_degree=8)))
    trainer.train(wait=False)
    (sent,) = cloud.requests
    assert "pytorch" in sent["AlgorithmSpecification"]["TrainingImage"]
    assert json.loads(sent["HyperParameters"]["mp_parameters"]) == {"hybrid_shard_degree": 8}
    assert sent["HyperParameters"]["sagemaker_torch_distributed_enabled"] == "true"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_the_jobs_of_the_public_notebooks_are_accepted(notebook: NotebookJob, script: Path, cloud: Any) -> None:
    trainer = ModelTrainer(
        source_code=SourceCode(source_dir=f"{script}/../{script.name}", entry_script="train.py"),
        compute=Compute(instance_type=notebook.gpus, instance_count=notebook.hosts, volume_size_in_gb=400),
        role=ROLE,
        sagemaker_session=cloud.session,
        distributed=Torchrun(smp=SMP(**notebook.parameters)),
        hyperparameters=notebook.hyperparameters,
    )
    channels = [InputData(channel_name=name, data_source=f"s3://bucket/{name}") for name in ("train", "test")]
    trainer.train(input_data_config=channels, wait=False)
    (sent,) = cloud.requests
    assert "/pytorch" in sent["AlgorithmSpecification"]["TrainingImage"]
    assert sent["ResourceConfig"]["InstanceType"] == notebook.gpus
    assert sent["ResourceConfig"]["InstanceCount"] == notebook.hosts
    carried = sent["HyperParameters"]
    assert json.loads(carried["mp_parameters"]) == notebook.parameters
    assert {name: carried[name] for name in notebook.hyperparameters} == {
        name: str(value) for name, value in notebook.hyperparameters.items()
    }
    assert {"train", "test"} < {row["ChannelName"] for row in sent["InputDataConfig"]}


def test_names_of_the_other_version_are_refused() -> None:
    with pytest.raises(ConfigError, match="'ddp': it belongs to version 1"):
        ModelParallel(version=2, parameters={"ddp": True})
    with pytest.raises(ConfigError, match="'hybrid_shard_degree': it belongs to version 2 .* version=2"):
        ModelParallel(parameters={"hybrid_shard_degree": 2})
    with pytest.raises(ConfigError, match="custom_mpi_options is '-x A=1' and version is 2"):
        ModelParallel(version=2, custom_mpi_options="-x A=1")
    with pytest.raises(ConfigError, match="version is 3"):
        ModelParallel(version=3)


def test_the_container_starts_the_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "ml" / "input" / "config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text("{}")
    (config / "resourceconfig.json").write_text('{"current_host": "algo-1", "hosts": ["algo-1"]}')
    sent = ModelParallel(version=2, parameters={"hybrid_shard_degree": 4}, processes_per_host=4).model_dump()
    environ = {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml"), "SM_DISTRIBUTED_CONFIG": json.dumps(sent)}
    assert json.loads(launcher_variables(environ)[MORE_VARIABLE]) == {
        "mp_parameters": {"hybrid_shard_degree": 4},
        "sagemaker_torch_distributed_enabled": True,
        "sagemaker_torch_distributed_processes_per_host": 4,
    }


@pytest.mark.job
@pytest.mark.timeout(180)
def test_two_processes_train_from_end_to_end(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script / "train.py").write_text(SCRIPT)
    torchrun = Torchrun(process_count_per_node=2, smp=SMP(hybrid_shard_degree=2, random_seed=7))
    here(script, torchrun, local_container_root=str(tmp_path / "jobs")).train()
    assert capsys.readouterr().out.count("step 1 of 2 ranks, sharded over 2, seed 7") == 2
