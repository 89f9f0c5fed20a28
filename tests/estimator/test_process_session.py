"""Jobs as processes: the trees they see, what they leave, and what they answer."""

from __future__ import annotations

import json
import os
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.platform.fake_jobs import FAKE_BOOTSTRAP
from support.platform.jobs import model_parallel

from smp_config import ConfigError

Make = Callable[..., Any]


def unpacked(estimator: Any) -> dict[str, bytes]:
    with tarfile.open(estimator.model_data.removeprefix("file://")) as archive:
        return {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}  # type: ignore[union-attr]


def report(estimator: Any, host: str = "algo-1") -> dict[str, Any]:
    return json.loads(unpacked(estimator)[f"report-{host}.json"])


def test_two_hosts_from_folders_to_model(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("a")
    estimator = make(
        instance_count=2,
        distribution=model_parallel(2, ddp=True, microbatches=2),
        environment={"MINE": "yes"},
        output_path=f"file://{tmp_path / 'out'}",
        hyperparameters={"steps": 2, "name": "tiny", "flag": True},
    )
    estimator.fit({"train": f"file://{data}", "one": f"file://{data / 'a.txt'}"})

    assert estimator.model_data == f"file://{tmp_path / 'out' / 'model.tar.gz'}"
    assert {"weights-algo-1.txt", "weights-algo-2.txt", "shared.txt"} <= set(unpacked(estimator))
    for number, host in enumerate(("algo-1", "algo-2")):
        seen = report(estimator, host)
        environment = seen["environment"]
        assert environment["SAGEMAKER_BASE_DIR"].endswith(f"/{host}/opt/ml")
        assert environment["CURRENT_HOST"] == host
        assert environment["SMP_LAUNCH_HOSTS_ON_ONE_MACHINE"] == environment["SMP_LAUNCH_LIFELINE"] == "1"
        assert environment["MINE"] == "yes"
        assert environment["TRAINING_JOB_NAME"] == estimator.latest_training_job.name
        assert seen["resources"]["current_host"] == host
        assert seen["resources"]["hosts"] == ["algo-1", "algo-2"]
        assert seen["channels"] == {"train": ["a.txt"], "one": ["a.txt"]}, number
        assert seen["inputs"]["train"]["TrainingInputMode"] == "File"
        assert seen["code"] == ["helper.py", "train.py"]
        hyperparameters = seen["hyperparameters"]
        assert (hyperparameters["steps"], hyperparameters["name"], hyperparameters["flag"]) == (2, "tiny", True)
        assert hyperparameters["sagemaker_program"] == "train.py"
        assert hyperparameters["sagemaker_submit_directory"] == f"{environment['SAGEMAKER_BASE_DIR']}/code"
        assert hyperparameters["mp_parameters"]["partitions"] == 1

    shown = capsys.readouterr().out
    assert "hello from algo-1" in shown
    assert "[algo-2] hello from algo-2" in shown
    assert "smp-progress" not in shown
    assert "step 2/2 | loss 1.5000" in shown


def test_hosts_share_out_a_sharded_channel(make: Make, tmp_path: Path) -> None:
    from sagemaker.inputs import TrainingInput

    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "more/c.txt"):
        (data / name).write_text(name)
    estimator = make(instance_count=2, input_mode="FastFile")
    sharded = TrainingInput(f"file://{data}", distribution="ShardedByS3Key", content_type="text/csv")
    estimator.fit({"train": sharded, "one": TrainingInput(f"file://{data / 'a.txt'}", distribution="ShardedByS3Key")})
    first, second = (report(estimator, host) for host in ("algo-1", "algo-2"))
    assert first["channels"] == {"train": ["a.txt", "more"], "one": ["a.txt"]}
    assert second["channels"] == {"train": ["b.txt"], "one": []}
    assert first["inputs"]["train"] == {
        "TrainingInputMode": "FastFile",
        "S3DistributionType": "ShardedByS3Key",
        "RecordWrapperType": "None",
        "ContentType": "text/csv",
    }


def test_a_distribution_may_be_taken_away(make: Make) -> None:
    estimator = make(distribution=model_parallel(2, ddp=True))
    estimator.distribution = None
    estimator.fit()
    assert "mp_parameters" not in report(estimator, "algo-1")["hyperparameters"]


@pytest.mark.parametrize("name", ["mp_parameters", "sagemaker_mpi_custom_mpi_options", "sagemaker_instance_type"])
def test_hyperparameters_that_would_be_overwritten_are_refused(make: Make, name: str) -> None:
    with pytest.raises(ConfigError, match=f"hyperparameters has '{name}'.* give in distribution"):
        make(distribution=model_parallel(2, ddp=True), hyperparameters={name: "x"})
    make(hyperparameters={"sagemaker_program": "x"})


def test_the_default_session_needs_nothing(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from smp_estimator import ProcessSession, SMPEstimator

    estimator = SMPEstimator(entry_point="train.py", source_dir=str(script), instance_type="local")
    assert isinstance(estimator.sagemaker_session, ProcessSession)
    assert estimator.instance_count == 1
    assert estimator.image_uri is None
    assert estimator.role


def test_a_finished_job_leaves_log_and_artifacts_only(make: Make) -> None:
    estimator = make()
    estimator.fit(logs=False)
    root = Path(estimator.model_data.removeprefix("file://")).parent.parent
    assert sorted(p.name for p in root.iterdir()) == ["job.log", "output"]
    assert "log line 3" in (root / "job.log").read_text()
    assert "smp-progress" not in (root / "job.log").read_text()


def test_keep_and_output_data(make: Make, tmp_path: Path) -> None:
    from smp_estimator import ProcessSession

    session = ProcessSession(root=tmp_path / "kept", keep=True, launcher=FAKE_BOOTSTRAP)
    estimator = make(sagemaker_session=session, hyperparameters={"write_output": True})
    estimator.fit(logs="None")
    root = tmp_path / "kept" / estimator.latest_training_job.name
    assert (root / "algo-1/opt/ml/model/shared.txt").exists()
    with tarfile.open(root / "output" / "output.tar.gz") as archive:
        assert archive.getnames() == ["curve.csv"]


def test_code_is_what_the_cloud_would_get(make: Make, script: Path, tmp_path: Path) -> None:
    library = tmp_path / "mylib"
    (library / "sub").mkdir(parents=True)
    (library / "sub" / "m.py").write_text("")
    estimator = make(source_dir=None, entry_point=str(script / "train.py"), dependencies=[str(library)])
    estimator.fit(logs=False)
    assert report(estimator)["code"] == ["mylib/sub/m.py", "train.py"]
    assert estimator.entry_point == str(script / "train.py")
    estimator.fit(logs=False)
    assert len(estimator.jobs) == 2


def test_source_dir_that_contains_the_jobs(make: Make, script: Path) -> None:
    import shutil

    from smp_estimator import ProcessSession

    for root in (script / "jobs", script):
        shutil.rmtree(script / "jobs", ignore_errors=True)
        estimator = make(sagemaker_session=ProcessSession(root=root, launcher=FAKE_BOOTSTRAP))
        estimator.fit(logs=False)
        assert "train.py" in report(estimator)["code"]
        assert not any("job.log" in name for name in report(estimator)["code"])


def test_checkpoints_stay_in_the_given_directory(make: Make, tmp_path: Path) -> None:
    estimator = make(
        instance_count=2,
        checkpoint_s3_uri=f"file://{tmp_path / 'checkpoints'}",
        checkpoint_local_path="/opt/ml/checkpoints",
        hyperparameters={"write_checkpoint": True},
    )
    estimator.fit(logs=False)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-algo-1.txt", "step-algo-2.txt"]


def test_a_script_that_writes_to_this_machine_s_own_folders_is_told(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from smp_estimator.local import job
    from smp_estimator.local.files import tree

    old, new = tmp_path / "ml" / "model", tmp_path / "ml" / "checkpoints"
    for folder, seconds in ((old, -60), (new, 60)):  # long before the job, and while it runs
        folder.mkdir(parents=True)
        (folder / "file").touch()
        for path in (folder / "file", folder):
            os.utime(path, (time.time() + seconds,) * 2)
    monkeypatch.setattr(
        job, "written_on_the_machine", lambda since: tree.written_on_the_machine(since, tmp_path / "ml")
    )
    make().fit()
    said = [record.getMessage() for record in caplog.records if "of this machine" in record.getMessage()]
    assert len(said) == 1
    assert f"wrote to {new} of this machine" in said[0]
    assert "os.environ['SMP_CHECKPOINT_DIR']" in said[0]


def test_background_job(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    estimator = make(hyperparameters={"steps": 5, "pause": 0.2})
    estimator.fit(wait=False)
    description = estimator.latest_training_job.describe()
    assert description["TrainingJobStatus"] == "InProgress"
    assert "TrainingEndTime" not in description
    assert capsys.readouterr().out == ""
    estimator.logs()
    assert "log line 5" in capsys.readouterr().out
    estimator.latest_training_job.wait(logs=False)
    description = estimator.latest_training_job.describe()
    assert description["TrainingJobStatus"] == description["SecondaryStatus"] == "Completed"
    assert [t["Status"] for t in description["SecondaryStatusTransitions"]] == [
        "Starting",
        "Training",
        "Uploading",
        "Completed",
    ]
    assert description["TrainingEndTime"] >= description["TrainingStartTime"]
    assert Path(estimator.model_data.removeprefix("file://")).exists()


def test_two_jobs_at_once(make: Make) -> None:
    estimators = [make(hyperparameters={"steps": 3, "pause": 0.1, "who": n}) for n in range(2)]
    for estimator in estimators:
        estimator.fit(wait=False)
    for n, estimator in enumerate(estimators):
        estimator.latest_training_job.wait(logs=False)
        assert report(estimator)["hyperparameters"]["who"] == n


@pytest.mark.parametrize(
    ("logs", "shown"),
    [("All", True), (["Training"], True), (True, True), ("None", False), (False, False), ("Rules", False)],
)
def test_logs_argument(make: Make, capsys: pytest.CaptureFixture[str], logs: Any, shown: bool) -> None:
    make(hyperparameters={"steps": 1}).fit(logs=logs)
    assert ("log line 1" in capsys.readouterr().out) is shown


def test_attach(make: Make) -> None:
    from smp_estimator import SMPEstimator

    estimator = make(distribution=model_parallel(2, ddp=True), hyperparameters={"steps": 1})
    estimator.fit(logs=False)
    attached = SMPEstimator.attach(estimator.latest_training_job.name)
    assert attached.model_data == estimator.model_data
    assert attached.distribution["mpi"] == {"enabled": True, "processes_per_host": 2}
    assert "mp_parameters" not in attached._hyperparameters
    with pytest.raises(ClientError, match="not found"):
        estimator.sagemaker_session.describe_training_job("no-such-job")


def test_attach_to_a_job_of_an_earlier_interpreter() -> None:
    from smp_estimator import SMPEstimator

    with pytest.raises(
        ConfigError, match=r"no training job 'smp-process-2020' was .* its own jobs on this machine only"
    ):
        SMPEstimator.attach("smp-process-2020")
    with pytest.raises(ConfigError, match=r"'mine' .* no AWS region is configured .* give sagemaker_session"):
        SMPEstimator.attach("mine")


def test_what_the_service_alone_can_do(make: Make) -> None:
    from sagemaker.parameter import IntegerParameter
    from sagemaker.tuner import HyperparameterTuner

    metric = [{"Name": "loss", "Regex": "x"}]
    tuner = HyperparameterTuner(make(), "loss", {"x": IntegerParameter(1, 2)}, metric_definitions=metric)
    with pytest.raises(ConfigError, match=r"create_hyper_parameter_tuning_job is a call of the SageMaker service"):
        tuner.fit()
    client = make().sagemaker_session.sagemaker_client
    assert not hasattr(client, "meta")
    assert not hasattr(client, "_private")
    with pytest.raises(ConfigError, match="create_auto_ml_job is a call of"):
        client.create_auto_ml_job()


def test_uncompressed_model(make: Make, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    target.mkdir(parents=True)
    (target / "mine.txt").write_text("keep me")
    estimator = make(output_path=f"file://{tmp_path / 'out'}", disable_output_compression=True)
    estimator.fit(logs=False)
    assert (target / "shared.txt").exists()
    assert (target / "mine.txt").exists()
    assert estimator.model_data["S3DataSource"]["S3Uri"] == f"file://{target}/"


def test_the_user_s_dictionaries_stay_as_they_are(script: Path, session: Any) -> None:
    from smp_estimator import SMPEstimator

    hyperparameters, distribution = {"steps": 1}, model_parallel(1)
    SMPEstimator(
        entry_point="train.py",
        source_dir=str(script),
        instance_type="local",
        sagemaker_session=session,
        hyperparameters=hyperparameters,
        distribution=distribution,
    ).fit(logs=False)
    assert hyperparameters == {"steps": 1}
    assert distribution == model_parallel(1)


def test_what_is_said_of_a_distribution_is_said_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(distribution=model_parallel(2), hyperparameters={"steps": 1}).fit(logs=False)
    assert caplog.text.count("ddp is false") == 1


def test_stock_estimator_with_a_process_session(script: Path, session: Any) -> None:
    from sagemaker.pytorch import PyTorch

    estimator = PyTorch(
        entry_point="train.py",
        source_dir=str(script),
        role="anything",
        image_uri="unused",
        instance_count=1,
        instance_type="local",
        sagemaker_session=session,
        hyperparameters={"steps": 1},
    )
    estimator.fit()
    assert "train.py" in report(estimator)["code"]


def test_max_run_that_was_set_is_kept(make: Make) -> None:
    # Enough for a busy machine to start Python: the script must have its handler by then.
    estimator = make("obey", max_run=4)
    estimator.fit(logs=False)
    description = estimator.latest_training_job.describe()
    assert (description["TrainingJobStatus"], description["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert unpacked(estimator) == {"saved.txt": b"saved on SIGTERM"}


def test_fit_works_in_a_thread(make: Make) -> None:
    estimator = make(hyperparameters={"steps": 1})
    thread = threading.Thread(target=estimator.fit)
    thread.start()
    thread.join(20)
    assert estimator.latest_training_job.describe()["TrainingJobStatus"] == "Completed"


def test_what_an_enclosing_job_left_is_not_inherited(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SM_HOSTS", "PMIX_RANK"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    estimator = make(hyperparameters={"steps": 1})
    estimator.fit(logs=False)
    environment = report(estimator)["environment"]
    assert not {"RANK", "OMPI_COMM_WORLD_RANK", "SM_HOSTS", "PMIX_RANK"} & set(environment)
    assert environment["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
