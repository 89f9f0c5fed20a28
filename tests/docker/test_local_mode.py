"""``fit()`` in stock local mode: real containers, real mpirun between them, the same losses as without Docker."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from sagemaker.exceptions import UnexpectedStatusException
from support.platform.docker_client import ACCESS_KEY, BUCKET, SECRET_KEY, docker, logs
from support.platform.jobs import ENTRYPOINTS, TINY, artifact, model_parallel

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def process_losses(text, tmp_path_factory):
    """``process_losses(hosts)``: the same job without Docker, run once."""
    from smp_estimator import SMPEstimator

    known: dict[int, list[float]] = {}

    def losses(hosts: int) -> list[float]:
        if hosts not in known:
            job = SMPEstimator(
                entry_point="train_gpt.py",
                source_dir=str(ENTRYPOINTS),
                instance_type="local",
                instance_count=hosts,
                output_path=f"file://{tmp_path_factory.mktemp('process')}",
                hyperparameters=TINY,
                environment={"OMP_NUM_THREADS": "1"},
                distribution=model_parallel(2, ddp=True, microbatches=2),
            )
            job.fit({"train": f"file://{text}"}, logs=False)
            known[hosts] = artifact(job, "losses.json")
        return known[hosts]

    return losses


def fit(job: Any, train: str) -> float:
    """Run the job; gives the seconds that it took."""
    start = time.monotonic()
    job.fit({"train": train})
    return time.monotonic() - start


def seconds_to_first_step(containers: Any) -> float:
    """From the start of the last container to the first progress line of the leader."""
    containers.collect()
    started = max(_moment(docker("inspect", "-f", "{{.State.StartedAt}}", i)) for i in containers.ids)
    for identity in containers.ids:
        for line in logs(identity, "--timestamps").splitlines():
            when, _, said = line.partition(" ")
            if said.startswith("smp-progress "):
                return _moment(when) - started
    raise AssertionError("no container made a step")


def _moment(text: str) -> float:
    """RFC 3339 with nanoseconds, in UTC."""
    return datetime.fromisoformat(text.rstrip("Z")[:26] + "+00:00").timestamp()


def test_one_host(local_job, text, containers, process_losses):
    job = local_job(hosts=1)
    took = fit(job, f"file://{text}")
    assert artifact(job, "losses.json") == pytest.approx(process_losses(1), abs=1e-6)
    seconds = seconds_to_first_step(containers)
    print(f"one host: first step {seconds:.1f} s after the start, fit() {took:.1f} s")
    assert containers.exit_codes() == [0]


def test_a_pipeline_across_two_hosts(local_job, text, containers, process_losses):
    # Ranks 0 and 1 are on the first host; each pipeline has one stage on each.
    job = local_job(hosts=2, parameters={"partitions": 2, "placement_strategy": "spread"})
    took = fit(job, f"file://{text}")
    assert artifact(job, "losses.json") == pytest.approx(process_losses(2), abs=1e-5)
    containers.collect()
    print(f"a pipeline across two hosts: fit() {took:.1f} s")
    assert containers.exit_codes() == [0, 0]


def test_two_hosts_with_code_data_and_model_in_s3(
    local_job, text, tmp_path, containers, s3_endpoint, process_losses, capfd
):
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(ENTRYPOINTS / "train_gpt.py", source)
    shutil.copy(Path(__file__).with_name("probe.py"), source)
    (source / "requirements.txt").write_text("# nothing is missing\nnumpy\n")
    s3 = boto3.client("s3", "us-east-1", endpoint_url=s3_endpoint, aws_access_key_id="x", aws_secret_access_key="x")
    s3.create_bucket(Bucket=BUCKET)
    s3.upload_file(str(text / "train.txt"), BUCKET, "input/train.txt")

    job = local_job(hosts=2, entry_point="probe.py", source_dir=str(source), endpoint=s3_endpoint)
    took = fit(job, f"s3://{BUCKET}/input")
    log = capfd.readouterr().out
    seconds = seconds_to_first_step(containers)
    print(f"two hosts, S3: first step {seconds:.1f} s after the start, fit() {took:.1f} s")

    assert job.model_data.startswith(f"s3://{BUCKET}/output/")
    model = tmp_path / "model.tar.gz"
    s3.download_file(BUCKET, job.model_data.removeprefix(f"s3://{BUCKET}/"), str(model))
    with tarfile.open(model) as archive:
        losses = json.load(archive.extractfile("losses.json"))
        seen = json.load(archive.extractfile("seen.json"))
    assert losses == pytest.approx(process_losses(2), abs=1e-6)
    assert containers.exit_codes() == [0, 0]

    hosts = json.loads(seen[0]["SM_HOSTS"])
    assert [s["SM_CURRENT_HOST"] for s in seen] == [hosts[0], hosts[0], hosts[1], hosts[1]]
    for rank in seen:
        assert rank["SM_CURRENT_HOST"] == rank["CURRENT_HOST"] == rank["SMP_HOST"] == rank["resources"]
        assert rank["MASTER_ADDR"] == hosts[0]
        assert rank["GLOO_SOCKET_IFNAME"] == rank["NCCL_SOCKET_IFNAME"] == "eth0"
        # Every rank has its host's credentials, and they are in no file, no command line and no log.
        assert rank["AWS_ACCESS_KEY_ID"] == ACCESS_KEY
        assert (rank["secret_in_files"], rank["secret_in_commands"]) == ([], [])
    assert [s["SMP_LOCAL_RANK"] for s in seen] == ["0", "1", "0", "1"]
    assert len({s["container"] for s in seen}) == 2
    assert SECRET_KEY not in log + "".join(logs(i) for i in containers.ids)


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_message_of_a_failing_rank_reaches_fit(local_job, text, tmp_path, containers, capfd, hosts):
    from smp_estimator import SMPEstimator

    last = 2 * hosts - 1
    job = local_job(hosts=hosts, kind=SMPEstimator, entry_point="train.py", source_dir=failing_script(tmp_path, last))
    with pytest.raises(UnexpectedStatusException) as caught:
        job.fit({"train": f"file://{text}"}, job_name="failing-job")
    message = str(caught.value)
    assert re.match(
        rf"Error for Training job failing-job: Failed\. Reason: rank {last} \(algo-{hosts}-\w+\): "
        "RuntimeError: the rank that fails on purpose\n",
        message,
    )
    assert "\n  at train.py:2, in <module>: if os.environ['SMP_RANK'] == " in message
    assert isinstance(caught.value, RuntimeError), "which the SDK's local mode raises"
    assert f"file://{tmp_path / 'out'}/output.tar.gz" in message
    log = capfd.readouterr().out
    assert shown(log, last, hosts)
    assert log.count("Traceback (most recent call last)") == 1
    containers.collect()
    assert set(containers.exit_codes()) == {1}


@pytest.mark.parametrize("kind", ["sleep", "stop"])
def test_a_hang_on_the_second_host_is_found_by_the_first(local_job, text, containers, kind):
    from smp_estimator import SMPEstimator

    script = Path(__file__).parents[1] / "watch" / "hanging_script.py"
    settings = {"entry_point": script.name, "source_dir": str(script.parent), "hang": kind, "rank": 3}
    job = local_job(hosts=2, kind=SMPEstimator, parameters={"partitions": 2}, **settings)
    job.environment["SMP_HANG_SECONDS"] = "8"
    with pytest.raises(UnexpectedStatusException) as caught:
        fit(job, f"file://{text}")
    headline = str(caught.value).partition("Reason: ")[2].splitlines()[0]
    said = "has been at hanging_script.py:" if kind == "sleep" else "is stopped"
    assert re.match(rf"rank 3 \(algo-2-\w+\): hang: {said}", headline), caught.value
    assert "rank 2 waits in" in headline or "rank 0" in headline or "ranks 0" in headline
    containers.collect()
    assert set(containers.exit_codes()) == {1}


def test_the_stock_estimator_shows_the_message_and_keeps_it(local_job, text, tmp_path, containers, capfd):
    """Its exception is made of the command and the exit code; the message is in the log that ``fit()`` shows."""
    job = local_job(entry_point="train.py", source_dir=failing_script(tmp_path, 1))
    with pytest.raises(RuntimeError, match="Process exited with code: 1"):
        job.fit({"train": f"file://{text}"})
    assert shown(capfd.readouterr().out, 1, 1)
    with tarfile.open(tmp_path / "out" / "output.tar.gz") as archive:
        said = archive.extractfile("failure").read().decode()
    assert re.match(r"rank 1 \(algo-1-\w+\): RuntimeError: the rank that fails on purpose\n", said)


def failing_script(folder: Path, rank: int) -> str:
    """A folder with a ``train.py`` in which this rank fails and the others wait."""
    source = folder / "source"
    source.mkdir()
    (source / "train.py").write_text(
        "import os, time\n"
        f"if os.environ['SMP_RANK'] == '{rank}': raise RuntimeError('the rank that fails on purpose')\n"
        "time.sleep(60)\n"
    )
    return str(source)


def shown(log: str, rank: int, host: int) -> bool:
    """Whether a line of the log says which rank failed, where and why."""
    wanted = f"failed: rank {rank} (algo-{host}-"
    return any(wanted in line and "RuntimeError: the rank that fails" in line for line in log.splitlines())
