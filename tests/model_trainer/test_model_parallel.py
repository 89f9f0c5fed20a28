"""``ModelParallel``: what it takes, what it refuses, and what a job carries of it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.platform.sdk3 import require_sdk_3

require_sdk_3()

from sagemaker.train.container_drivers.common.utils import (  # noqa: E402 - only where it is installed
    hyperparameters_to_cli_args,
    safe_deserialize,
    safe_serialize,
)
from sagemaker.train.distributed import DistributedConfig  # noqa: E402

from smp_config import ConfigError, ModelParallelParameters  # noqa: E402
from smp_config.distributed_config import FIELDS, as_distribution  # noqa: E402
from smp_config.job import decoded_hyperparameter  # noqa: E402
from smp_estimator.model_trainer import ModelParallel  # noqa: E402
from smp_estimator.sdk_v3.driver import smp_driver  # noqa: E402
from smp_launch.sagemaker import model_trainer as launched  # noqa: E402
from smp_launch.sagemaker.environment import words_of  # noqa: E402

#: Wrong arguments, and what the refusal must name.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"paramters": {}}, "did you mean 'parameters'"),
    ({"process_per_host": 8}, "did you mean 'processes_per_host'"),
    ({"custom_mpi_option": "-x A=1"}, "did you mean 'custom_mpi_options'"),
    ({"process_count_per_node": 8}, "did you mean 'processes_per_host'"),
    ({"mpi_additional_options": []}, "did you mean 'custom_mpi_options'"),
    ({"mp_parameters": {}}, "did you mean 'parameters'"),
    ({"smp": None}, "did you mean 'parameters'"),
    ({"tensor_parallel_degree": 2}, "write parameters={'tensor_parallel_degree': 2}"),
    ({"partitions": 2}, "write parameters={'partitions': 2}"),
    ({"zzz": 1}, "known are parameters, processes_per_host, custom_mpi_options, ship_runtime"),
    ({"parameters": 3}, "must be a dictionary"),
    ({"parameters": "/nowhere.json"}, "none at /nowhere.json"),
    ({"parameters": {"pipline_parallel_degree": 2}}, "did you mean 'pipeline_parallel_degree'"),
    ({"parameters": {"partitions": "2"}}, "got '2'"),
    ({"processes_per_host": "8"}, "a whole number of 1 or more"),
    ({"processes_per_host": 2.5}, "a whole number of 1 or more"),
    ({"processes_per_host": True}, "a whole number of 1 or more"),
    ({"processes_per_host": 0}, "set it to 1 or more"),
    ({"processes_per_host": -1}, "set it to 1 or more"),
    ({"custom_mpi_options": ["-x", "A=1"]}, "text such as"),
    ({"custom_mpi_options": None}, "text such as"),
    ({"custom_mpi_options": "-x A=1 -x A=2"}, "keep one"),
    ({"custom_mpi_options": "-np 4"}, "processes_per_host"),
    ({"custom_mpi_options": 'NCCL_DEBUG="'}, "close the quote"),
    ({"custom_mpi_options": "-x A='b c'"}, "single quotation mark"),
    ({"ship_runtime": "yes"}, "True or False"),
    ({"ship_runtime": 1}, "True or False"),
    ({"parameters": {"fp16": True, "bf16": True}}, "keep one"),
    ({"parameters": {"tensor_parallel_degree": 2}}, 'set "ddp": True'),
    ({"parameters": {"partitions": 2, "pipeline_parallel_degree": 4}}, "keep only"),
]


@pytest.mark.parametrize(("given", "named"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelParallel(**{"parameters": {"ddp": True}, "processes_per_host": 8, **given})
    message = str(caught.value)
    assert named in message
    assert "smdistributed" not in message
    assert 'distribution["' not in message


def test_it_is_the_sdk_s_configuration() -> None:
    made = ModelParallel(parameters={"partitions": 2, "ddp": True}, processes_per_host=8)
    assert isinstance(made, DistributedConfig)
    assert set(made.model_dump()) == set(FIELDS), "what travels, and what the container reads"
    assert made.typed_parameters == ModelParallelParameters.from_mp_parameters({"partitions": 2, "ddp": True})
    assert ModelParallel().model_dump() == {**FIELDS, "parameters": ModelParallel().parameters}


def test_parameters_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "parameters.json"
    path.write_text('{"microbatches": 4, "ddp": true}')
    assert ModelParallel(parameters=str(path)).typed_parameters.microbatches == 4


def test_assignments_are_checked_and_leave_nothing_wrong_behind() -> None:
    made = ModelParallel(parameters={"ddp": True}, processes_per_host=8)
    for name, value in (("processes_per_host", 0), ("parameters", {"ddpp": 1}), ("custom_mpi_options", "-np 2")):
        before = made.model_dump()
        with pytest.raises(ConfigError):
            setattr(made, name, value)
        assert made.model_dump() == before
    with pytest.raises(ConfigError, match="did you mean 'processes_per_host'"):
        made.process_per_host = 4
    made.processes_per_host = 4
    assert made.processes_per_host == 4


def test_a_warning_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="smp_estimator"):
        made = ModelParallel(parameters={"ddp": True, "activation_loading_horizon": 2}, processes_per_host=8)
        made.processes_per_host = 4
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(set(said)) == 1, said
    assert not said[0].startswith("distribution:")


def test_from_a_distribution_of_version_2() -> None:
    distribution = {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2, "ddp": True}}},
        "mpi": {"enabled": True, "processes_per_host": 4, "custom_mpi_options": "-x A=1"},
    }
    made = ModelParallel.from_distribution(distribution, ship_runtime=False)
    assert (made.processes_per_host, made.custom_mpi_options, made.ship_runtime) == (4, "-x A=1", False)
    assert made.typed_parameters.pipeline_parallel_degree == 2
    with pytest.raises(ConfigError, match=r"Torchrun\(\) or MPI\(\)"):
        ModelParallel.from_distribution({"torch_distributed": {"enabled": True}})


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """``/opt/ml`` with what the platform writes."""
    config = tmp_path / "ml" / "input" / "config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text('{"steps": "3"}')
    (config / "resourceconfig.json").write_text('{"current_instance_type": "ml.p4d.24xlarge"}')
    return tmp_path / "ml"


def environ(tree: Path, config: Any) -> dict[str, str]:
    text = config if isinstance(config, str) else json.dumps(config)
    return {"SAGEMAKER_BASE_DIR": str(tree), "SM_ENTRY_SCRIPT": "train.py", "SM_DISTRIBUTED_CONFIG": text}


def test_what_is_accepted_is_what_the_launcher_reads(tree: Path) -> None:
    given = {"partitions": 2, "tensor_parallel_degree": 2, "ddp": True, "placement_strategy": "PTD"}
    made = ModelParallel(parameters=given, processes_per_host=8, custom_mpi_options="-x A=1")
    variables = launched.launcher_variables(environ(tree, made.model_dump()))
    assert variables["SMP_LAUNCH_CODE_DIR"] == str(tree / "input" / "data" / "code")
    more = json.loads(variables["SMP_LAUNCH_HYPERPARAMETERS"])
    assert ModelParallelParameters.from_mp_parameters(more.pop("mp_parameters")) == made.typed_parameters
    assert more == {
        "sagemaker_program": "train.py",
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 8,
        "sagemaker_mpi_custom_mpi_options": "-x A=1",
        "sagemaker_instance_type": "ml.p4d.24xlarge",
    }


def test_one_process_per_gpu_where_nobody_has_said_how_many(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "gpu_count", lambda _: 4)
    variables = launched.launcher_variables(environ(tree, ModelParallel(parameters={"ddp": True}).model_dump()))
    assert json.loads(variables["SMP_LAUNCH_HYPERPARAMETERS"])["sagemaker_mpi_num_of_processes_per_host"] == 4


def test_hyperparameters_that_contradict_it_are_refused_in_the_container(tree: Path) -> None:
    """With the SDK's own ModelTrainer nobody sees both before."""
    config = ModelParallel(parameters={"partitions": 2}, processes_per_host=2).model_dump()
    hyperparameters = tree / "input" / "config" / "hyperparameters.json"
    hyperparameters.write_text(json.dumps({"mp_parameters": json.dumps(config["parameters"])}))
    assert launched.launcher_variables(environ(tree, config))
    hyperparameters.write_text('{"mp_parameters": "{\\"partitions\\": 4}"}')
    with pytest.raises(ConfigError, match=r"remove mp_parameters from the hyperparameters"):
        launched.launcher_variables(environ(tree, config))


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_container_without_the_configuration(tree: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="SM_DISTRIBUTED_CONFIG is .* which is no JSON object"):
        launched.launcher_variables(environ(tree, text))


def test_the_folder_of_the_driver() -> None:
    made = ModelParallel(processes_per_host=2)
    folder = Path(made.driver_dir)
    held = {path.name for path in folder.iterdir()}
    assert {"smp_driver.py", "smp_entry.py", "forward_signals.sh", "smp_requirements.txt"} < held
    assert [name for name in held if name.endswith(".whl")]
    wanted = (folder / "smp_requirements.txt").read_text().split()
    assert any(line.startswith("pydantic>=") for line in wanted)
    assert "mpi4py" in wanted, "in any version"
    assert smp_driver.find_missing(wanted) == [], "this environment has all"
    assert made.driver_dir == str(folder), "made once"
    made.ship_runtime = False
    assert not list(Path(made.driver_dir).glob("*.whl"))


def test_requirements_that_an_image_lacks() -> None:
    assert smp_driver.find_missing(["pydantic>=2.0", "pydantic>=99", "no-such-package>=1"]) == [
        "pydantic>=99",
        "no-such-package>=1",
    ]


def test_where_the_sdk_is_another_one_it_is_said() -> None:
    code = (
        "import importlib.metadata as m; known = m.version\n"
        "m.version = lambda name: '2.257.7' if name == 'sagemaker' else known(name)\n"
        "import smp_estimator.model_trainer as t\n"
        "try: t.ModelTrainer\n"
        "except ImportError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "need version 3 of the SageMaker SDK, and the SageMaker SDK 2.257.7 is installed" in said
    assert "pip install 'sagemaker<4," in said
    assert "with the SDK that is there use SMPEstimator" in said


def test_the_estimators_say_that_they_need_version_2() -> None:
    code = "import smp_estimator\ntry: smp_estimator.SMPEstimator\nexcept ImportError as error: print(error)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "need version 2 of the SageMaker SDK, and the SageMaker SDK 3." in said
    assert "ModelTrainer and ModelParallel of smp_estimator.model_trainer" in said


def test_the_public_surface_is_frozen() -> None:
    from smp_estimator import model_trainer

    assert model_trainer.__all__ == ["ModelParallel", "ModelTrainer"]
    with pytest.raises(AttributeError, match="ModelTrainr"):
        _ = model_trainer.ModelTrainr


def test_the_same_in_both_forms() -> None:
    assert as_distribution({"parameters": {"ddp": True}}) == {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"ddp": True}}},
        "mpi": {"enabled": True},
    }


@pytest.mark.parametrize(
    "value",
    [
        1,
        0.5,
        True,
        None,
        "text",
        "",
        "a b",
        "1",
        "null",
        [1, "x", True],
        {"r": 8, "bias": None},
        '{"r": 8, "bias": null}',
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["k", "config"])
def test_a_script_gets_hyperparameters_as_from_the_drivers_of_the_sdk(name: str, value: Any) -> None:
    sent = safe_serialize(value)
    as_theirs = hyperparameters_to_cli_args({name: safe_deserialize(sent)})
    assert words_of({name: decoded_hyperparameter(sent)}, as_json=True) == as_theirs
