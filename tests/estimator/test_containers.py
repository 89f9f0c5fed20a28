"""The SDK's own local mode, real but for Docker: what its ``fit()`` raises when containers fail.

A program named ``docker`` stands first on PATH. It reads the compose file that the SDK wrote, writes what the
containers of such a job would, and ends with their exit code.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.platform.jobs import model_parallel

Make = Callable[..., Any]

#: ``docker compose version``, and ``docker compose -f FILE up …`` for a play of {host number: text of its failure file}.
DOCKER = """#!{python}
import json, os, pathlib, signal, sys, time, yaml
if sys.argv[1:] == ["compose", "version"]:
    print("Docker Compose version v2.0.0")
    sys.exit(0)
play = json.loads(pathlib.Path({play!r}).read_text())
services = yaml.safe_load(open(sys.argv[3]).read())["services"]
for name, service in services.items():
    for volume in service["volumes"]:
        here, there = volume.split(":")
        text = play["failures"].get(name.split("-")[1])
        if there == "/opt/ml/output" and text is not None:
            pathlib.Path(here, "failure").write_text(text)
        if there == "/opt/ml/model":
            pathlib.Path(here).mkdir(exist_ok=True)
            pathlib.Path(here, "weights").write_text("1")
if play["interrupts"]:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.5)
print("smp-launch: failed, says the container")
sys.exit(play["code"])
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``play(code, {1: "rank 0 …"})``: the containers' exit code, and what the hosts write into their failure files."""
    told = tmp_path / "play.json"
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER.format(python=sys.executable, play=str(told)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    config = tmp_path / "sdk.yaml"
    config.write_text("SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n")
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(config))
    # The SDK checks its configuration against a large schema nine times per estimator, 1.5 s in all.
    monkeypatch.setattr("sagemaker.utils.validate_sagemaker_config", lambda _: None)

    def tell(code: int, failures: dict[int, str] | None = None, *, interrupts: bool = False) -> None:
        told.write_text(json.dumps({"code": code, "failures": failures or {}, "interrupts": interrupts}))

    return tell


@pytest.fixture
def job(script: Path, tmp_path: Path, play: Callable[..., None]) -> Make:
    """``job(hosts, estimator_class)``: a job in containers, not started yet; its folders lie in ``roots``."""

    def build(hosts: int = 1, kind: Any = None, **arguments: Any) -> Any:
        from sagemaker.local import LocalSession

        from smp_estimator import SMPEstimator

        (tmp_path / "roots").mkdir(exist_ok=True)
        boto = boto3.Session("testing", "testing", region_name="us-east-1")
        session = LocalSession(boto, default_bucket="bucket")
        session.config = {"local": {"local_code": True, "container_root": str(tmp_path / "roots")}}
        return (kind or SMPEstimator)(
            entry_point="train.py",
            source_dir=str(script),
            role="arn:aws:iam::123456789012:role/none",
            image_uri="smp:any",
            instance_type="local",
            instance_count=hosts,
            sagemaker_session=session,
            output_path=f"file://{tmp_path / 'out'}",
            distribution=model_parallel(ddp=True),
            **arguments,
        )

    return build


def test_ctrl_c_says_what_it_does(job: Make, play: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    play(130, interrupts=True)
    with pytest.raises(KeyboardInterrupt):
        job().fit()
    said = capsys.readouterr().out
    assert "Ctrl-C: Docker Compose stops the containers" in said
    assert "Ctrl-C again kills them" in said
    assert "/roots/" in said.partition("what they write lies in ")[2]


BOOM = "rank 1 (algo-1-ab1cd): ValueError: boom\n\nTraceback (most recent call last):\n  in train\nValueError: boom\n"


def test_the_failing_rank_is_in_the_exception(job: Make, play: Callable[..., None], tmp_path: Path) -> None:
    from sagemaker.exceptions import UnexpectedStatusException

    play(1, {1: BOOM})
    estimator = job()
    with pytest.raises(UnexpectedStatusException) as caught:
        estimator.fit(job_name="broken-job")
    message = str(caught.value)
    assert message.startswith(
        "Error for Training job broken-job: Failed. Reason: rank 1 (algo-1-ab1cd): ValueError: boom"
    )
    assert "Traceback (most recent call last)" not in message, "it is in the log above"
    assert caught.value.actual_status == "Failed"
    assert message.endswith(f"; what they left is in file://{tmp_path / 'out' / 'output.tar.gz'}")
    with tarfile.open(tmp_path / "out" / "output.tar.gz") as archive:
        assert archive.extractfile("failure").read().decode() == BOOM
    # Who knows the SDK's local mode waits for a RuntimeError; its own, with the command, is the cause.
    assert isinstance(caught.value, RuntimeError)
    assert type(caught.value.__cause__) is RuntimeError
    assert "exited with code: 1" in str(caught.value.__cause__)


def test_the_estimator_of_transformers_says_it_too(job: Make, play: Callable[..., None]) -> None:
    from smp_estimator import SMPHuggingFace

    play(1, {1: BOOM})
    with pytest.raises(RuntimeError, match=r"Reason: rank 1 \(algo-1-ab1cd\): ValueError: boom"):
        job(kind=SMPHuggingFace, py_version="py311").fit()


def test_the_first_host_speaks_and_others_add_what_it_does_not_know(job: Make, play: Callable[..., None]) -> None:
    play(1, {1: BOOM, 2: BOOM.partition("\n")[0], 3: "the job cannot start: no requirements\nmore", 10: "tenth"})
    with pytest.raises(RuntimeError) as caught:
        job(hosts=10).fit()
    message = str(caught.value)
    assert "Reason: rank 1 (algo-1-ab1cd): ValueError: boom" in message
    assert message.count("boom") == 1  # in the headline: the second host has nothing to add
    assert re.search(
        r"\nalgo-3-\w+ failed with: the job cannot start: no requirements\nalgo-10-\w+ failed with: tenth\n", message
    )


def test_without_a_failure_file_the_sdk_keeps_the_word(job: Make, play: Callable[..., None]) -> None:
    play(137, {1: "  \n"})
    with pytest.raises(RuntimeError, match="exited with code: 137") as caught:
        job().fit()
    assert type(caught.value) is RuntimeError


def test_an_error_while_the_artifacts_are_moved_does_not_hide_the_rank(
    job: Make, play: Callable[..., None], tmp_path: Path
) -> None:
    play(1, {1: BOOM})
    estimator = job()
    (tmp_path / "out").write_text("a file where the SDK wants a folder")
    with pytest.raises(RuntimeError, match=r"Reason: rank 1 \(algo-1-ab1cd\): ValueError: boom"):
        estimator.fit()


def test_a_job_that_ends_well_is_left_alone(job: Make, play: Callable[..., None], tmp_path: Path) -> None:
    play(0)
    estimator = job()
    estimator.fit()
    assert estimator.model_data == f"file://{tmp_path / 'out'}/model.tar.gz"
    assert (tmp_path / "out" / "model.tar.gz").exists()


def test_the_stock_estimator_has_only_the_exit_code(job: Make, play: Callable[..., None], capfd: Any) -> None:
    """What the SDK raises is made of its own command and the exit code: nothing of a container can get into it.

    Also beside our estimators: what these do to hear of failures must not change the SDK for anybody else.
    """
    from sagemaker.pytorch import PyTorch

    from smp_estimator.local import container_failures
    from smp_estimator.sdk.version_2 import LocalContainers

    play(1, {1: BOOM})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom"):
            job().fit()
    listening = LocalContainers.retrieve_artifacts
    assert not hasattr(listening.__wrapped__, "__wrapped__"), "one listener, however many jobs"
    assert container_failures._left.get() is None
    with pytest.raises(RuntimeError) as caught:
        job(kind=PyTorch, disable_profiler=True, debugger_hook_config=False).fit()
    assert re.fullmatch(
        r"Failed to run: \['docker', 'compose', '-f', '\S+/docker-compose.yaml', 'up', .*\]\. Process exited with code: 1",
        str(caught.value),
    )
    assert "says the container" in capfd.readouterr().out


def test_jobs_in_two_threads_hear_of_their_own_failures(job: Make, play: Callable[..., None]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    play(1, {1: BOOM})
    estimators = [job(), job()]

    def fit(number: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            estimators[number].fit(job_name=f"job-{number}")
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        for number, message in enumerate(pool.map(fit, range(2))):
            assert message.startswith(f"Error for Training job job-{number}: Failed. Reason: rank 1 (algo-1-ab1cd)")


def test_containers_without_gpus_are_told_to_emulate_them(job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMP_EMULATE_CUDA", raising=False)
    estimator = job(environment={"A": "B"})
    for _ in range(2):  # what the first request added is not the user's in the second
        estimator._prepare_for_training()
        assert estimator.environment == {"A": "B", "SMP_EMULATE_CUDA": "1"}
    estimator.environment = {"SMP_EMULATE_CUDA": "0"}
    estimator._prepare_for_training()
    assert estimator.environment == {"SMP_EMULATE_CUDA": "0"}
