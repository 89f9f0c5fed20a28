"""Jobs of version 2 of the library (``torch_distributed`` beside ``modelparallel``), from the dictionary to the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import Cloud, service
from support.platform.stock_images import unpacked

from smp_config import ConfigError, JobSettings
from smp_estimator import SMPEstimator, SMPHuggingFace
from smp_estimator.settings import translation
from smp_estimator.settings.distribution import is_ours, read
from smp_launch.machine.hosts import Layout, ScriptKind
from smp_launch.ranks.rank import rank_variables

Make = Callable[..., Any]


def version_2(processes: int | None = None, **parameters: Any) -> dict[str, Any]:
    torchrun = {"enabled": True} if processes is None else {"enabled": True, "processes_per_host": processes}
    model = {"enabled": True, "parameters": parameters}
    return {"torch_distributed": torchrun, "smdistributed": {"modelparallel": model}}


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with service() as boto:
        yield Cloud(boto)


def test_it_travels_as_the_sdk_sends_it_and_comes_back() -> None:
    given = version_2(hybrid_shard_degree=8, tensor_parallel_degree=2)
    assert is_ours(given)
    found = read(given, instance_type="ml.p4d.24xlarge", hosts=2, process_mode=False)
    sent = translation.hyperparameters(found.settings, {}, found.later)
    assert sent == {
        "mp_parameters": {"hybrid_shard_degree": 8, "tensor_parallel_degree": 2},
        "sagemaker_torch_distributed_enabled": True,
        "sagemaker_distributed_dataparallel_enabled": False,
        "sagemaker_instance_type": "ml.p4d.24xlarge",
    }
    carried = {name: json.dumps(value) for name, value in sent.items()}
    assert JobSettings.from_hyperparameters(carried).version_2 == found.settings.version_2
    assert translation.from_hyperparameters(carried) == given


def test_jobs_of_torchrun_alone_are_not_version_2() -> None:
    assert JobSettings.from_hyperparameters({"sagemaker_torch_distributed_enabled": "true"}).version_2 is None
    assert JobSettings.from_distribution({"torch_distributed": {"enabled": True}}).version_2 is None


def test_the_processes_are_those_of_the_instances() -> None:
    with pytest.raises(ConfigError, match="the job has 16 processes"):
        read(version_2(hybrid_shard_degree=3), instance_type="ml.p4d.24xlarge", hosts=2, process_mode=False)
    with pytest.raises(
        ConfigError, match=r"torch_distributed\.processes_per_host is 9, but ml\.p4d\.24xlarge has 8 GPUs"
    ):
        read(version_2(9), instance_type="ml.p4d.24xlarge", hosts=1, process_mode=False)
    with pytest.raises(ConfigError, match="the job has 2 processes"):
        read(version_2(2, tensor_parallel_degree=4), instance_type="local", hosts=1, process_mode=True)
    said: list[str] = []
    given = {"instance_type": "local", "hosts": 2, "process_mode": True, "say": said.append}
    found = read(version_2(sm_activation_offloading=False, activation_loading_horizon=3), **given)
    assert found.settings.torchrun is not None
    assert found.settings.torchrun.processes_per_host == 1
    assert ["per host" in said[0], "activation_loading_horizon is 3, which has no effect" in said[1], len(said)] == [
        True,
        True,
        2,
    ]


def test_ranks_get_the_variables_of_torchrun() -> None:
    settings = JobSettings.from_distribution(version_2(2, hybrid_shard_degree=4))
    layout = Layout.of(settings, ["algo-1", "algo-2"], "algo-1", 0, False)
    assert (layout.kind, layout.world_size) == (ScriptKind.VERSION_2, 4)
    found = rank_variables(layout, 3, "eth0", 4)
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    assert Layout.of(JobSettings.from_distribution(version_2()), ["algo-1"], "algo-1", 4, False).world_size == 4
    with pytest.raises(ConfigError, match="hybrid_shard_degree is 4, and the job has 2 processes"):
        Layout.of(settings, ["algo-1"], "algo-1", 0, False)


def test_what_only_version_1_has_is_named() -> None:
    said: list[str] = []
    given = {"instance_type": "local", "hosts": 1, "process_mode": True, "say": said.append}
    read(version_2(1), environment={"SMP_MEMORY_CHECKPOINT": "1", "SMP_LOGGERS": "tensorboard"}, **given)
    assert said == [
        "distribution: SMP_MEMORY_CHECKPOINT, SMP_LOGGERS: no effect on version 2 of the library, whose steps and optimizers are "
        "PyTorch's own"
    ]


def test_plans_are_for_version_1(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"plan\(\) and rehearse\(\) are for version 1"):
        make(distribution=version_2(2)).plan("gpt2")


@pytest.mark.parametrize(
    ("imports", "parameters", "launcher", "said"),
    [
        ("torch.sagemaker", None, "torch_distributed", ""),
        ("torch.sagemaker", '{"tensor_parallel_degree": 2}', "torch_distributed", "so the job is one of version 2"),
        ("torch", '{"tensor_parallel_degree": 2, "hybrid_shard_degree": 0}', "torch_distributed", ""),
        ("torch", None, "mpi", ""),
        ("torch", '{"activation_loading_horizon": 2}', "mpi", "so they count as version 1"),
    ],
)
def test_run_takes_the_version_of_parameters_or_script(
    script: Path, monkeypatch: pytest.MonkeyPatch, imports: str, parameters: str | None, launcher: str, said: str
) -> None:
    from click.testing import CliRunner

    from smp_estimator.cli.commands import run as command

    settings: list[dict[str, Any]] = []
    monkeypatch.setattr(command, "_train", lambda given, channels: settings.append(given))
    (script / "train.py").write_text(f"import {imports}\n")
    words = [str(script / "train.py"), *(["--parameters", parameters] if parameters else [])]
    done = CliRunner().invoke(command.run, words)
    assert done.exit_code == 0, done.output
    assert launcher in settings[0]["distribution"]
    assert (said in done.output, "version" in done.output) == (True, bool(said))


def test_a_parameter_of_one_version_and_imports_of_other_files_decide(tmp_path: Path) -> None:
    from smp_config.version2.which_version import choose_version

    script, shared = tmp_path / "train.py", {"tensor_parallel_degree": 2}
    script.write_text("from lib import training\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").touch()
    (tmp_path / "lib" / "training.py").write_text("import torch.sagemaker as tsm\n")
    assert choose_version(shared, script).is_2
    assert not choose_version({**shared, "microbatches": 2}, script).is_2  # version 1 alone has it


def test_validate_says_that_parameters_are_of_both_versions(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from smp_estimator.cli.main import main

    for text, version, said in (
        ('{"activation_loading_horizon": 2}', "valid on", "nothing says which, so they count as version 1"),
        ('{"hybrid_shard_degree": 2}', "version 2", ""),
        ('{"ddp": true}', "valid on", ""),
    ):
        (tmp_path / "parameters.json").write_text(text)
        done = CliRunner().invoke(main, ["validate", str(tmp_path / "parameters.json")])
        words = " ".join(done.output.split())
        assert (done.exit_code, version in words) == (0, True), words
        assert (said in words, "warning" in words) == (True, bool(said)), words


@pytest.mark.parametrize("tool", ["plan", "suggest", "rehearse", "suggest of a script", "verify"])
def test_tools_for_version_1_name_parameters_of_version_2(tool: str, tmp_path: Path) -> None:
    from smp_estimator import planning
    from smp_estimator.numerics.verification import Verification
    from smp_estimator.rehearsal.rehearse import rehearse
    from smp_estimator.rehearsal.search import suggest_for_script

    of_2 = {"hybrid_shard_degree": 2}
    cluster = {"instance_type": "ml.p4d.24xlarge", "instance_count": 1}
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: planning.plan("gpt2", parameters=of_2, **cluster),
        "suggest": lambda: planning.suggest("gpt2", parameters=of_2, **cluster),
        "rehearse": lambda: rehearse(script, parameters=of_2, **cluster),
        "suggest of a script": lambda: suggest_for_script(
            script, arguments=("{batch}",), global_batch=8, parameters=of_2, **cluster
        ),
        "verify": lambda: Verification.plan(script, (), of_2, None, 3, 0, tmp_path),
    }
    with pytest.raises(ConfigError, match=r"are of version 2 of the library .* is for version 1"):
        calls[tool]()
    if tool in (
        "rehearse",
        "suggest of a script",
        "verify",
    ):  # both versions have the parameter, and the script says which
        del of_2["hybrid_shard_degree"]
        of_2["tensor_parallel_degree"] = 2
        (tmp_path / "train.py").write_text("import torch.sagemaker as tsm\n")
        with pytest.raises(ConfigError, match=r"parameters of .*train.py are of version 2 .* is for version 1"):
            calls[tool]()


def test_a_manifest_has_the_parameters_of_version_2() -> None:
    from smp_estimator.cloud.hyperpod import HyperPodJob

    given = {"name": "gpt", "image": "image", "script": "/code/train.py", "processes": 4}
    made = HyperPodJob(**given, parameters={"hybrid_shard_degree": 2})
    assert '{"hybrid_shard_degree": 2}' in json.dumps(made.manifest()).replace('\\"', '"')
    with pytest.raises(ConfigError, match="hybrid_shard_degree is 3"):
        HyperPodJob(**given, parameters={"hybrid_shard_degree": 3})


def test_a_job_of_the_cloud_takes_the_runtime_along(cloud: Cloud, script: Path, tmp_path: Path) -> None:
    (script / "train.py").write_text(
        "import subprocess, sys\n"
        "code = 'import importlib.util as u; print(u.find_spec(\"torch.sagemaker\").origin)'\n"
        "sys.modules['torch'] = type(sys)('torch')\n"
        "sys.modules['torch'].__path__ = []\n"
        "exec(code)\n"
        'torch = \'import sys; sys.modules["torch"] = type(sys)("torch"); sys.modules["torch"].__path__ = []; \'\n'
        "subprocess.run([sys.executable, '-S', '-c', 'import sitecustomize; ' + torch + code], check=True)\n"
    )
    given = {"image_uri": None, "distribution": version_2(hybrid_shard_degree=8), "instance_type": "ml.p4d.24xlarge"}
    job = cloud.estimator(script, **given)
    job.fit(wait=False)
    carried = cloud.carried()
    assert carried["mp_parameters"] == {"hybrid_shard_degree": 8}
    assert (carried["sagemaker_torch_distributed_enabled"], carried["sagemaker_program"]) == (True, "_smp_entry.py")
    assert "sagemaker_mpi_enabled" not in carried
    attached = SMPEstimator.attach(job.latest_training_job.name, sagemaker_session=cloud.session)
    assert attached.distribution == job.distribution
    code = unpacked(cloud.boto, cloud.requests[-1], tmp_path / "code")
    info = tmp_path / "torch-2.8.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0\n")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_smp_program": "train.py"}),
    }
    done = subprocess.run(
        [sys.executable, str(code / "_smp_entry.py")], env=environment, capture_output=True, text=True, timeout=120
    )
    found = done.stdout.split()
    assert len(found) == 2, done.stdout + done.stderr
    assert all("/smp-site-" in line for line in found), "in the script, and in a process that it starts"


def test_a_stock_image_starts_all_gpus(cloud: Cloud, script: Path) -> None:
    given = {"image_uri": None, "distribution": version_2(4), "instance_type": "ml.p4d.24xlarge"}
    with pytest.raises(ConfigError, match="starts one process on each of the 8 GPUs"):
        cloud.estimator(script, **given).fit(wait=False)


def test_the_hugging_face_estimator_checks_it_too(script: Path, session: Any) -> None:
    given = {
        "entry_point": "train.py",
        "source_dir": str(script),
        "instance_type": "local",
        "sagemaker_session": session,
    }
    with pytest.raises(ConfigError, match="context_parallel_degree is 3"):
        SMPHuggingFace(**given, distribution=version_2(2, context_parallel_degree=3))


@pytest.mark.job
@pytest.mark.timeout(180)
def test_two_processes_train_from_end_to_end(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from support.training.version2_script import SCRIPT

    from smp_estimator import ProcessSession

    (script / "train.py").write_text(SCRIPT)
    SMPEstimator(
        entry_point="train.py",
        source_dir=str(script),
        instance_type="local",
        sagemaker_session=ProcessSession(root=tmp_path / "jobs"),
        hyperparameters={"max_steps": 2},
        distribution=version_2(2, hybrid_shard_degree=2, random_seed=7),
    ).fit()
    said = capsys.readouterr().out
    assert "version 2" in said
    assert said.count("step 1 of 2 ranks, sharded over 2, seed 7") == 2
    assert "step 2/2 |" in said  # progress counts the optimizer's updates


@pytest.mark.job
@pytest.mark.timeout(180)
def test_torchrun_of_a_stock_image_starts_ranks(cloud: Cloud, script: Path, tmp_path: Path) -> None:
    from support.training.version2_script import SCRIPT

    (script / "train.py").write_text(SCRIPT)
    given = {"image_uri": None, "distribution": version_2(hybrid_shard_degree=2), "instance_type": "ml.p4d.24xlarge"}
    cloud.estimator(script, **given).fit(wait=False)
    code = unpacked(cloud.boto, cloud.requests[-1], tmp_path / "code")
    environment = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_smp_program": "train.py"}),
        "SM_HP_MP_PARAMETERS": json.dumps(cloud.carried()["mp_parameters"]),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(code / "_smp_entry.py")], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 1 of 2 ranks, sharded over 2") == 2
