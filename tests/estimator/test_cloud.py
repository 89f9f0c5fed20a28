"""In the cloud the estimator is the SDK's, with our hyperparameters; moto plays the service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import IMAGE, ROLE, Cloud, service
from support.platform.fake_jobs import FAKE_BOOTSTRAP
from support.platform.jobs import model_parallel

from smp_config import ConfigError
from smp_estimator import ProcessSession, SMPEstimator

VADER = "--mca btl_vader_single_copy_mechanism none"
EFA = "-x FI_PROVIDER=efa -x NCCL_PROTO=simple"
RDMA = "-x FI_EFA_USE_DEVICE_RDMA=1"


@pytest.fixture(scope="module")
def whole() -> Iterator[Cloud]:
    with service() as boto:
        yield Cloud(boto)


@pytest.fixture
def cloud(whole: Cloud) -> Cloud:
    whole.requests.clear()
    return whole


def test_request_carries_the_distribution(cloud: Cloud, script: Path) -> None:
    job = cloud.estimator(
        script,
        distribution=model_parallel(8, partitions=4, ddp=True, placement_strategy="PTD"),
        hyperparameters={"steps": 10},
        tags=[{"Key": "team", "Value": "nlp"}],
        keep_alive_period_in_seconds=600,
    )
    job.fit({"train": "s3://bucket/data"}, wait=False)
    sent, carried = cloud.requests[0], cloud.carried()
    assert carried["mp_parameters"] == {
        "partitions": 4,
        "pipeline_parallel_degree": 4,
        "ddp": True,
        "placement_strategy": "PTD",
    }
    assert carried["sagemaker_mpi_enabled"] is True
    assert carried["sagemaker_mpi_num_of_processes_per_host"] == 8
    assert carried["sagemaker_mpi_custom_mpi_options"] == f"{EFA} {RDMA}"
    assert carried["sagemaker_distributed_dataparallel_enabled"] is False
    assert carried["sagemaker_instance_type"] == "ml.p4d.24xlarge"
    assert carried["sagemaker_program"] == "train.py"
    assert carried["steps"] == 10
    assert sent["AlgorithmSpecification"]["TrainingImage"] == IMAGE
    assert sent["RoleArn"] == ROLE
    assert sent["Tags"] == [{"Key": "team", "Value": "nlp"}]
    assert sent["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 600
    assert "DebugHookConfig" not in sent


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        ("ml.p4d.24xlarge", f"{EFA} {RDMA}"),
        ("ml.p3dn.24xlarge", EFA),
        ("ml.p3.16xlarge", ""),
        ("ml.c5.18xlarge", ""),
    ],
)
def test_options_of_the_instance(cloud: Cloud, script: Path, instance: str, expected: str) -> None:
    job = cloud.estimator(script, instance_type=instance, distribution=model_parallel(8, ddp=True))
    assert json.loads(job.hyperparameters()["sagemaker_mpi_custom_mpi_options"]) == expected


def test_the_user_s_options_win(cloud: Cloud, script: Path) -> None:
    distribution = model_parallel(8, ddp=True)
    mine = "-verbose -x NCCL_PROTO=LL --mca btl_vader_single_copy_mechanism none"
    distribution["mpi"]["custom_mpi_options"] = mine
    job = cloud.estimator(script, distribution=distribution, environment={"FI_PROVIDER": "tcp"})
    sent = json.loads(job.hyperparameters()["sagemaker_mpi_custom_mpi_options"])
    assert sent == f"{RDMA} -verbose -x NCCL_PROTO=LL", "each thing is set once; the platform sets the last one itself"


def test_variables_of_the_collectives_go_both_ways(cloud: Cloud, script: Path) -> None:
    distribution = model_parallel(8, ddp=True)
    distribution["mpi"]["custom_mpi_options"] = "-x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=16384 -x OTHER=1"
    environment = {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192", "SMP_NCCL_THROTTLE_LIMIT": "-1", "MINE": "2"}
    job = cloud.estimator(script, distribution=distribution, environment=environment)
    for _ in range(2):  # a second job sends the same
        job.fit(wait=False)
        options = cloud.carried()["sagemaker_mpi_custom_mpi_options"]
        assert "-x SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES=8192 -x SMP_NCCL_THROTTLE_LIMIT=-1" in options
        assert options.count("SMDDP_AG_SORT_BUFFER_SIZE_BYTES") == 1
        assert "MINE" not in options
        sent = {**environment, "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "16384"}
        assert cloud.requests[-1]["Environment"] == sent


def test_a_variable_may_change_between_two_jobs(cloud: Cloud, script: Path) -> None:
    distribution = model_parallel(8, ddp=True)
    environment = {"MINE": "2"}
    job = cloud.estimator(script, distribution=distribution, environment=environment)
    for size in ("16384", "8192"):
        distribution["mpi"]["custom_mpi_options"] = f"-x SMDDP_AG_SORT_BUFFER_SIZE_BYTES={size}"
        job.fit(wait=False)
        assert cloud.requests[-1]["Environment"] == {"MINE": "2", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": size}
    del distribution["mpi"]["custom_mpi_options"]
    job.fit(wait=False)
    assert cloud.requests[-1]["Environment"] == {"MINE": "2"}
    job.environment = {"SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "8192"}  # the user's own, which stays
    job.fit(wait=False)
    assert cloud.requests[-1]["Environment"] == {"SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "8192"}
    distribution["mpi"]["custom_mpi_options"] = "-x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=16384"
    with pytest.raises(ConfigError, match="both reach the ranks"):
        job.fit(wait=False)


def test_one_job_of_an_estimator_may_record_numbers(cloud: Cloud, script: Path) -> None:
    from sagemaker.workflow.pipeline_context import PipelineSession

    distribution = model_parallel(8, ddp=True)
    distribution["mpi"]["custom_mpi_options"] = "-x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=16384"  # goes both ways
    job = cloud.estimator(script, distribution=distribution, environment={"MINE": "2"}, record_numerics={"every": 5})
    usual = {"MINE": "2", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "16384"}
    always = {"SMP_RECORD_NUMERICS": "1", "SMP_RECORD_NUMERICS_EVERY": "5"}
    once = {"SMP_RECORD_NUMERICS": "1", "SMP_NUMERICS_GUARDS": "finite"}
    for given, sent in (
        (None, always),
        ({"guards": "finite"}, once),
        (False, {"SMP_RECORD_NUMERICS": "0"}),
        (None, always),
    ):
        job.fit(wait=False, record_numerics=given)
        assert cloud.requests[-1]["Environment"] == {**usual, **sent}
    with pytest.raises(ConfigError, match="record_numerics is 3"):
        job.fit(wait=False, record_numerics=3)
    assert len(cloud.requests) == 4
    job.sagemaker_session = Cloud(cloud.boto, PipelineSession).session
    with pytest.raises(ConfigError, match=r"give it to SMPEstimator\(record_numerics="):
        job.fit(record_numerics=True)


@pytest.mark.parametrize("options", ["", "-verbose -x A=1", f"{VADER} -x NCCL_PROTO=simple -x B=2"])
def test_attach_restores_the_distribution(cloud: Cloud, script: Path, options: str) -> None:
    distribution = model_parallel(8, pipeline_parallel_degree=2, partitions=2, ddp=True, microbatches=4)
    if options:
        distribution["mpi"]["custom_mpi_options"] = options
    job = cloud.estimator(
        script,
        distribution=distribution,
        hyperparameters={"steps": 10, "name": "a"},
        use_spot_instances=True,
        max_run=3600,
        max_wait=7200,
        checkpoint_s3_uri="s3://bucket/checkpoints",
    )
    job.fit(wait=False)
    attached = SMPEstimator.attach(job.latest_training_job.name, sagemaker_session=cloud.session)
    given = distribution["smdistributed"]["modelparallel"]
    assert attached.distribution["smdistributed"]["modelparallel"] == given
    kept = attached.distribution["mpi"].pop("custom_mpi_options", "")
    assert kept == options.removeprefix(VADER).strip(), "the platform sets that one itself"
    assert attached.distribution["mpi"] == {"enabled": True, "processes_per_host": 8}
    if kept:
        attached.distribution["mpi"]["custom_mpi_options"] = kept
    assert attached._hyperparameters == {"steps": 10, "name": "a"}
    assert attached.checkpoint_s3_uri == "s3://bucket/checkpoints"
    assert attached.image_uri == IMAGE
    first = dict(cloud.requests[-1]["HyperParameters"])
    attached.fit(wait=False)
    second = dict(cloud.requests[-1]["HyperParameters"])
    for name in ("sagemaker_job_name", "sagemaker_mpi_custom_mpi_options"):
        assert set(first.pop(name).split()) == set(second.pop(name).split()) or name == "sagemaker_job_name"
    assert first == second


def test_attach_to_what_this_version_refuses(
    cloud: Cloud, script: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cloud.estimator(script, distribution=model_parallel(8, ddp=True))
    monkeypatch.setattr("smp_estimator.settings.distribution.check_accelerators", lambda *_, **__: None)
    job.distribution["mpi"]["processes_per_host"] = 64
    job.fit(wait=False)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="processes_per_host is 64"):
        cloud.estimator(script, distribution=job.distribution)
    attached = SMPEstimator.attach(job.latest_training_job.name, sagemaker_session=cloud.session)
    assert "would refuse: mpi.processes_per_host is 64" in caplog.text
    assert attached.model_data.endswith("model.tar.gz")


@pytest.mark.parametrize(
    "more", [{}, {"sagemaker_program": "train.py", "sagemaker_submit_directory": "s3://bucket/code.tar.gz"}]
)
def test_attach_to_a_job_that_no_sdk_started(cloud: Cloud, script: Path, more: dict[str, str]) -> None:
    name = f"by-boto3-{len(more)}"
    parameters = {"mp_parameters": '{"pipeline_parallel_degree": 2, "ddp": true}', "lr": "1e-3", "data": "wiki text"}
    mpi = {"sagemaker_mpi_enabled": "True", "sagemaker_mpi_num_of_processes_per_host": "8"}
    cloud.session.sagemaker_client.create_training_job(
        TrainingJobName=name,
        HyperParameters={**parameters, **mpi, **more},
        AlgorithmSpecification={"TrainingImage": IMAGE, "TrainingInputMode": "File"},
        RoleArn=ROLE,
        OutputDataConfig={"S3OutputPath": "s3://bucket/out"},
        ResourceConfig={"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30},
        StoppingCondition={"MaxRuntimeInSeconds": 3600},
    )
    found = SMPEstimator.attach(name, cloud.session)
    assert found.hyperparameters()["data"] == '"wiki text"'
    assert found.distribution["smdistributed"]["modelparallel"]["parameters"]["pipeline_parallel_degree"] == 2
    assert found.distribution["mpi"]["processes_per_host"] == 8
    assert found.entry_point == more.get("sagemaker_program", "the_job_names_no_entry_point.py")


@pytest.mark.parametrize("image", [IMAGE, None])
def test_attach_to_a_job_without_a_network(cloud: Cloud, script: Path, image: str | None) -> None:
    distribution = model_parallel(8, ddp=True)
    job = cloud.estimator(script, distribution=distribution, image_uri=image, enable_network_isolation=True)
    job.fit(wait=False)
    found = SMPEstimator.attach(job.latest_training_job.name, cloud.session)
    assert found.source_dir.startswith("s3://bucket/")
    found.fit(wait=False)  # the code goes along as it is
    first, second = (
        next(c["DataSource"]["S3DataSource"]["S3Uri"] for c in request["InputDataConfig"] if c["ChannelName"] == "code")
        for request in cloud.requests[-2:]
    )
    assert first == second


def test_spot_and_checkpoints(cloud: Cloud, script: Path) -> None:
    job = cloud.estimator(
        script,
        distribution=model_parallel(8, ddp=True),
        use_spot_instances=True,
        max_run=3600,
        max_wait=7200,
        checkpoint_s3_uri="s3://bucket/checkpoints",
        checkpoint_local_path="/opt/ml/checkpoints",
    )
    job.fit(wait=False)
    sent = cloud.requests[0]
    assert sent["EnableManagedSpotTraining"] is True
    assert sent["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200}
    assert sent["CheckpointConfig"] == {"S3Uri": "s3://bucket/checkpoints", "LocalPath": "/opt/ml/checkpoints"}


def test_file_systems(cloud: Cloud, script: Path) -> None:
    from sagemaker.inputs import FileSystemInput, TrainingInput

    lustre = FileSystemInput("fs-12345678", "FSxLustre", "/mount/data")
    job = cloud.estimator(script, distribution=model_parallel(8, ddp=True))
    with pytest.raises(ConfigError, match=r"'train' is a file system.*add subnets"):
        job.fit({"train": lustre})
    with pytest.raises(ConfigError, match=r"'train' is 'file:///data'.*upload_data\('/data'\)"):
        job.fit({"train": "file:///data"})
    with pytest.raises(ConfigError, match=r"'eval' is '/data', which is no s3:// address"):
        job.fit({"eval": "/data"})
    with pytest.raises(ConfigError, match=r"job name 'a_b'"):
        job.fit({"eval": TrainingInput("s3://bucket/eval")}, job_name="a_b")
    inside = cloud.estimator(
        script, distribution=model_parallel(8, ddp=True), subnets=["subnet-1"], security_group_ids=["sg-1"]
    )
    inside.fit({"train": lustre, "eval": TrainingInput("s3://bucket/eval")}, wait=False)
    first, second = cloud.requests[0]["InputDataConfig"]
    assert first["DataSource"]["FileSystemDataSource"]["FileSystemType"] == "FSxLustre"
    assert second["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/eval"


def test_metrics_read_the_progress_lines(cloud: Cloud, script: Path) -> None:
    import re

    from smp_records.records import ProgressRecord, format_progress

    cloud.estimator(script, distribution=model_parallel(8, ddp=True)).fit(wait=False)
    definitions = cloud.requests[0]["AlgorithmSpecification"]["MetricDefinitions"]
    values = {
        "loss": 2.5,
        "eval_loss": 3.25e-05,
        "samples_per_second": 12.0,
        "learning_rate": 1e-4,
        "gradient_norm": 0.75,
    }
    values |= {
        "loss_scale": 1024.0,
        "tokens_per_second": 6144.0,
        "mfu": 0.4,
        "idle_share": 0.1,
        "checkpoint_seconds": 1.5,
    }
    record = ProgressRecord.model_validate({"step": 7, "total_steps": 9, **values})
    line = "[1,mpirank:0,algo-1]<stdout>:" + format_progress(record)
    found = {each["Name"]: float(re.search(each["Regex"], line)[1]) for each in definitions}  # type: ignore[index]
    assert found == {"step": 7.0, **values}
    only = format_progress(ProgressRecord(step=7, eval_loss=1.0))
    assert [each["Name"] for each in definitions if re.search(each["Regex"], only)] == ["eval_loss", "step"]
    mine = [{"Name": "mine", "Regex": "mine=(.*)"}]
    cloud.estimator(script, distribution=model_parallel(8, ddp=True), metric_definitions=mine).fit(wait=False)
    assert cloud.requests[1]["AlgorithmSpecification"]["MetricDefinitions"] == mine


def test_the_debugger_is_off_unless_asked_for(cloud: Cloud, script: Path, caplog: pytest.LogCaptureFixture) -> None:
    from sagemaker.debugger import DebuggerHookConfig

    cloud.estimator(script, distribution=model_parallel(8, ddp=True)).fit(wait=False)
    assert "DebugHookConfig" not in cloud.requests[0]
    assert "debugger_hook_config" not in caplog.text
    hook = DebuggerHookConfig(s3_output_path="s3://bucket/debug")
    cloud.estimator(script, distribution=model_parallel(8, ddp=True), debugger_hook_config=hook).fit(wait=False)
    assert cloud.requests[1]["DebugHookConfig"]["S3OutputPath"] == "s3://bucket/debug"
    assert "debugger_hook_config is on" in caplog.text


def test_instance_groups(cloud: Cloud, script: Path) -> None:
    from sagemaker.instance_group import InstanceGroup

    groups = [InstanceGroup("gpu", "ml.p4d.24xlarge", 2), InstanceGroup("cpu", "ml.c5.18xlarge", 1)]
    arguments = {"instance_type": None, "instance_count": None, "instance_groups": groups}
    with pytest.raises(ConfigError, match="exactly one trains"):
        cloud.estimator(script, **arguments, distribution=model_parallel(8, ddp=True))
    with pytest.raises(ConfigError, match="has 8 GPUs"):
        cloud.estimator(
            script, **arguments, distribution={**model_parallel(9, ddp=True), "instance_groups": groups[:1]}
        )
    job = cloud.estimator(
        script, **arguments, distribution={**model_parallel(8, partitions=2, ddp=True), "instance_groups": groups[:1]}
    )
    job.fit(wait=False)
    carried = cloud.carried()
    assert carried["sagemaker_distribution_instance_groups"] == ["gpu"]
    assert carried["sagemaker_instance_type"] == "ml.p4d.24xlarge"
    assert [group["InstanceGroupName"] for group in cloud.requests[0]["ResourceConfig"]["InstanceGroups"]] == [
        "gpu",
        "cpu",
    ]
    attached = SMPEstimator.attach(job.latest_training_job.name, sagemaker_session=cloud.session)
    assert [group.instance_group_name for group in attached.instance_groups] == ["gpu", "cpu"]
    assert attached.distribution["instance_groups"] == ["gpu"]


def test_model_of_an_image_without_a_version(cloud: Cloud, script: Path, tmp_path: Path) -> None:
    """The SDK asks the version of a custom image, which nobody gave, and raises TypeError."""
    import tarfile

    from sagemaker.pytorch import PyTorch

    (tmp_path / "model.pt").write_text("weights")
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "model.pt", "model.pt")
    job = cloud.estimator(script, distribution=model_parallel(8, ddp=True))
    job.fit(wait=False)
    bucket, key = job.model_data.removeprefix("s3://").split("/", 1)
    cloud.boto.client("s3").upload_file(str(tmp_path / "model.tar.gz"), bucket, key)

    stock = PyTorch(**cloud.arguments(script))
    stock.latest_training_job, stock._current_job_name = job.latest_training_job, "stock"
    stock.uploaded_code = job.uploaded_code
    with pytest.raises(TypeError):
        stock.create_model().prepare_container_def("ml.g4dn.xlarge")

    container = job.create_model().prepare_container_def("ml.g4dn.xlarge")
    assert container["Image"] == IMAGE
    assert container["Environment"]["SAGEMAKER_PROGRAM"] == "train.py"
    endpoints: list[dict[str, Any]] = []
    cloud.watch("CreateEndpoint", endpoints)
    predictor = job.deploy(initial_instance_count=1, instance_type="ml.g4dn.xlarge", wait=False)
    assert endpoints[0]["EndpointName"] == predictor.endpoint_name


def test_tuner(cloud: Cloud, script: Path) -> None:
    from sagemaker.parameter import ContinuousParameter
    from sagemaker.tuner import HyperparameterTuner

    sent: list[dict[str, Any]] = []
    cloud.watch("CreateHyperParameterTuningJob", sent)
    job = cloud.estimator(
        script,
        distribution=model_parallel(8, partitions=2, ddp=True),
        hyperparameters={"steps": 10},
        environment={"SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "16384"},
    )
    tuner = HyperparameterTuner(
        job, "eval_loss", {"lr": ContinuousParameter(0.1, 0.2)}, job.metric_definitions, objective_type="Minimize"
    )
    tuner.fit({"train": "s3://bucket/data"}, wait=False)
    definition = sent[0]["TrainingJobDefinition"]
    static = {
        k: json.loads(v) for k, v in definition["StaticHyperParameters"].items() if k != "_tuning_objective_metric"
    }
    assert static["mp_parameters"]["pipeline_parallel_degree"] == 2
    assert static["sagemaker_mpi_custom_mpi_options"].endswith("-x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=16384")
    assert static["sagemaker_program"] == "train.py"
    assert static["steps"] == 10
    assert static["sagemaker_estimator_class_name"] == "SMPEstimator"
    names = [each["Name"] for each in definition["AlgorithmSpecification"]["MetricDefinitions"]]
    given = """loss eval_loss samples_per_second step learning_rate gradient_norm
        loss_scale tokens_per_second mfu idle_share checkpoint_seconds"""
    assert names == given.split()
    assert definition["Environment"] == {"SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "16384"}
    wrong = cloud.estimator(script, distribution=model_parallel(8, ddp=True), entry_point="trian.py")
    tuner = HyperparameterTuner(wrong, "loss", {"lr": ContinuousParameter(0.1, 0.2)}, wrong.metric_definitions)
    with pytest.raises(ConfigError, match=r"did you mean 'train\.py'"):
        tuner.fit(wait=False)


def test_pipeline(cloud: Cloud, script: Path) -> None:
    from sagemaker.workflow.parameters import ParameterInteger
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep

    session = Cloud(cloud.boto, PipelineSession).session
    steps, processes = ParameterInteger("Steps", 10), ParameterInteger("Processes", 8)
    job = cloud.estimator(
        script,
        sagemaker_session=session,
        distribution=model_parallel(processes, partitions=2, ddp=True),
        hyperparameters={"steps": steps},
    )
    with pytest.warns(UserWarning, match="PipelineSession"):
        step = TrainingStep("Train", step_args=job.fit({"train": "s3://bucket/data"}))
    pipeline = Pipeline("smp", [steps, processes], steps=[step], sagemaker_session=session)
    pipeline.upsert(ROLE)
    definition = json.loads(session.sagemaker_client.describe_pipeline(PipelineName="smp")["PipelineDefinition"])
    request = definition["Steps"][0]["Arguments"]
    sent = request["HyperParameters"]
    assert sent["steps"] == {"Std:Join": {"On": "", "Values": [{"Get": "Parameters.Steps"}]}}
    assert "Parameters.Processes" in json.dumps(sent["sagemaker_mpi_num_of_processes_per_host"])
    assert json.loads(sent["mp_parameters"])["pipeline_parallel_degree"] == 2
    assert request["AlgorithmSpecification"]["TrainingImage"] == IMAGE
    assert not cloud.requests


def test_an_image_keeps_docker(script: Path, cloud: Cloud) -> None:
    from sagemaker.local import LocalSession

    job = cloud.estimator(script, instance_type="local", instance_count=1, sagemaker_session=LocalSession(cloud.boto))
    assert not isinstance(job.sagemaker_session, ProcessSession)
    assert job.training_image_uri() == IMAGE


def test_a_session_of_the_service_is_that_of_a_job_on_this_machine(cloud: Cloud, script: Path) -> None:
    local = {"instance_type": "local", "instance_count": 1, "distribution": model_parallel(2, ddp=True)}
    made = cloud.estimator(script, **local, image_uri=None)
    assert isinstance(made.sagemaker_session, ProcessSession)
    assert made.sagemaker_session.boto_session is cloud.boto
    with pytest.raises(
        ConfigError, match=r"runs in Docker on this machine, but sagemaker_session is one of the service"
    ):
        cloud.estimator(script, **local)


def test_s3_input_and_output_of_a_process_job(cloud: Cloud, script: Path, tmp_path: Path) -> None:
    s3 = cloud.boto.client("s3")
    s3.put_object(Bucket="bucket", Key="data/part/a.txt", Body=b"a")
    session = ProcessSession(root=tmp_path, keep=True, launcher=FAKE_BOOTSTRAP, boto_session=cloud.boto)
    job = SMPEstimator(
        "train.py",
        source_dir=str(script),
        instance_type="local",
        sagemaker_session=session,
        output_path="s3://bucket/models",
    )
    job.fit({"train": "s3://bucket/data"}, logs=False)
    name = job.latest_training_job.name
    assert job.model_data == f"s3://bucket/models/{name}/model.tar.gz"
    assert s3.head_object(Bucket="bucket", Key=f"models/{name}/model.tar.gz")["ContentLength"] > 100
    assert (tmp_path / name / "algo-1/opt/ml/input/data/train/part/a.txt").read_text() == "a"
    s3.put_object(Bucket="bucket", Key="data/part/a.txt", Body=b"b")
    job.fit({"train": "s3://bucket/data"}, logs=False)
    second = session.job(job.latest_training_job.name).tree
    assert (second.hosts[0].base / "input/data/train/part/a.txt").read_text() == "b", "the data had changed"
    second.remove_workspace()
    assert sorted(path.name for path in second.root.iterdir()) == ["job.log"]
