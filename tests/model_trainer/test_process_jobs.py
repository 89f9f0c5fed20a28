"""Jobs of a trainer as processes of this machine: folders, results, failures and stops; the bootstrap is a fake one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.platform.fake_jobs import FAKE_BOOTSTRAP, gone_within, marked
from support.platform.sdk3 import require_sdk_3

require_sdk_3()

from sagemaker.core.shapes import DataSource, S3DataSource  # noqa: E402 - only where it is installed
from sagemaker.core.training.configs import (  # noqa: E402
    Channel,
    CheckpointConfig,
    InputData,
    OutputDataConfig,
    StoppingCondition,
)
from sagemaker.core.utils.exceptions import FailedStatusError  # noqa: E402

from smp_config import ConfigError  # noqa: E402

Make = Callable[..., Any]


def report(trainer: Any, host: str = "algo-1") -> dict[str, Any]:
    with tarfile.open(trainer.model_data.removeprefix("file://")) as archive:
        return json.load(archive.extractfile(f"report-{host}.json"))  # type: ignore[arg-type]


def test_two_hosts_from_folders_to_model(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    trainer = make(
        compute={"instance_type": "local", "instance_count": 2},
        parallel={"parameters": {"ddp": True, "microbatches": 2}, "processes_per_host": 2},
        environment={"MINE": "yes"},
        output_data_config=OutputDataConfig(s3_output_path=f"file://{tmp_path / 'out'}"),
        checkpoint_config=CheckpointConfig(s3_uri=str(tmp_path / "kept")),
        input_data_config=[InputData(channel_name="one", data_source=str(tmp_path / "data" / "a.txt"))],
        hyperparameters={"steps": 2, "write_checkpoint": 1},
    )
    trainer.train({"train": str(tmp_path / "data")})
    assert trainer.model_data == f"file://{tmp_path / 'out' / 'model.tar.gz'}"
    job = trainer.latest_training_job
    assert (job.training_job_status, job.secondary_status) == ("Completed", "Completed")
    for host in ("algo-1", "algo-2"):
        seen = report(trainer, host)
        assert seen["environment"]["MINE"] == "yes"
        assert seen["environment"]["TRAINING_JOB_NAME"] == job.training_job_name
        assert seen["resources"]["hosts"] == ["algo-1", "algo-2"]
        assert seen["channels"] == {"train": ["a.txt"], "one": ["a.txt"]}
        assert seen["code"] == ["helper.py", "train.py"]
        sent = seen["hyperparameters"]
        assert sent["mp_parameters"]["microbatches"] == 2
        assert sent["sagemaker_mpi_num_of_processes_per_host"] == 2
        assert sent["sagemaker_program"] == "train.py"
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-algo-1.txt", "step-algo-2.txt"]
    said = capsys.readouterr().out
    assert "hello from algo-1" in said
    assert "step 2/2" in said
    assert f"Model: {trainer.model_data}" in said


def test_settings_of_channels_hold_or_are_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "data" / name).write_text(name)

    def channel(source: dict[str, Any], **given: Any) -> Channel:
        source = {"s3_uri": f"file://{tmp_path / 'data'}", "s3_data_type": "S3Prefix", **source}
        return Channel(channel_name="train", data_source=DataSource(s3_data_source=S3DataSource(**source)), **given)

    trainer = make(compute={"instance_type": "local", "instance_count": 2}, training_input_mode="FastFile")
    trainer.train([channel({"s3_data_distribution_type": "ShardedByS3Key"}, content_type="text/csv")])
    assert [report(trainer, host)["channels"]["train"] for host in ("algo-1", "algo-2")] == [["a.txt"], ["b.txt"]]
    assert report(trainer)["inputs"]["train"]["TrainingInputMode"] == "FastFile"
    for given, said in (
        (channel({}, input_mode="Pipe"), "input mode 'Pipe'"),
        (channel({}, compression_type="Gzip"), "CompressionType 'Gzip'"),
        (channel({"instance_group_names": ["one"]}), "InstanceGroupNames"),
    ):
        with pytest.raises(ConfigError, match=f"channel 'train' .*{said}"):
            make().train([given])
    with pytest.raises(ConfigError, match="input mode 'Pipe'"):
        make(training_input_mode="Pipe").train([channel({})])


def test_without_a_configuration_the_script_runs_once_per_host(make: Make) -> None:
    trainer = make(parallel=None)
    trainer.train(logs=False)
    assert "mp_parameters" not in report(trainer)["hyperparameters"]


def test_what_the_source_code_leaves_out_stays_behind(make: Make, script: Path) -> None:
    (script / "weights.bin").write_text("")
    (script / ".env").write_text("")
    trainer = make(code={"ignore_patterns": ["*.bin", ".env"]})
    trainer.train(logs=False)
    assert report(trainer)["code"] == ["helper.py", "train.py"]


def test_every_job_has_a_folder_of_its_own(make: Make, tmp_path: Path) -> None:
    trainer = make(keep_job_folder=True)
    for _ in range(2):
        trainer.train(logs=False)
    folders = sorted((tmp_path / "jobs").iterdir())
    assert len(folders) == 2
    assert all((folder / "algo-1" / "opt" / "ml").is_dir() for folder in folders)


def test_a_failing_job_says_why(make: Make) -> None:
    trainer = make("fail", compute={"instance_type": "local", "instance_count": 2})
    with pytest.raises(FailedStatusError) as caught:
        trainer.train(logs=False)
    message = str(caught.value)
    assert "Failed. Reason: rank 1 (algo-1): ValueError: boom" in message
    assert message.rstrip().endswith("job.log")
    assert trainer.latest_training_job.training_job_status == "Failed"
    assert "boom" in trainer.latest_training_job.failure_reason


def test_a_job_in_the_background(make: Make) -> None:
    mark = uuid.uuid4().hex
    trainer = make("hang", environment={"TEST_MARK": mark})
    trainer.train(wait=False)
    job = trainer.latest_training_job
    assert job.training_job_status == "InProgress"
    job.wait(timeout=0.2)
    assert job.refresh().training_job_status == "InProgress"
    job.stop()
    job.wait()
    assert job.training_job_status == "Stopped"
    gone_within(mark, 5.0)


def test_a_limit_holds_only_if_it_was_given(make: Make) -> None:
    slow = {"hyperparameters": {"steps": 2, "pause": 1.2}}
    limit = StoppingCondition(max_runtime_in_seconds=1)
    trainer = make(**slow, stopping_condition=limit)
    trainer.train(logs=False)
    assert trainer.latest_training_job.secondary_status == "MaxRuntimeExceeded"
    unlimited = make(**slow)
    assert unlimited.stopping_condition.max_runtime_in_seconds == 3600, "the SDK's own, which holds in the cloud"
    unlimited.train(logs=False, wait=False)
    assert unlimited.latest_training_job.stopping_condition.max_runtime_in_seconds == 24 * 3600
    unlimited.latest_training_job.wait()


def test_addresses_that_are_not_there(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="channel 'train'"):
        make().train({"train": str(tmp_path / "nowhere")})
    mounted = {"file_system_id": "fs-1", "file_system_type": "EFS", "file_system_access_mode": "ro"}
    with pytest.raises(ConfigError, match="channel 'train' is .* mount it yourself"):
        make().train([InputData(channel_name="train", data_source={**mounted, "directory_path": "/data"})])
    make().train({"train": str(tmp_path)}, dry_run=True)
    assert not (tmp_path / "jobs").exists(), "nothing was started"


NOTEBOOK = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from support.platform.sdk3 import here
trainer = here(Path(sys.argv[2]), local_container_root=sys.argv[3], environment={"TEST_MARK": sys.argv[4]},
    hyperparameters={"play": '"hang"', "stubborn": True}, stop_grace_seconds=1.0)
trainer._launcher = tuple(sys.argv[5:])
try:
    trainer.train()
except KeyboardInterrupt:
    print("status", trainer.latest_training_job.refresh().training_job_status, flush=True)
"""


def test_ctrl_c_leaves_no_process(script: Path, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", NOTEBOOK, tests, str(script), str(tmp_path / "jobs"), mark, *FAKE_BOOTSTRAP]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in process.stdout or ():
            if "hello from" in line:
                break
        deadline = time.monotonic() + 20
        while len(marked(mark)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[0]
    finally:
        process.kill()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    assert "Ctrl-C: stopping job" in said
    assert "status Stopped" in said
    gone_within(mark, 5.0)
