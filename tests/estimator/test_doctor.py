"""``smp-estimator doctor``: what is missing for a job on this machine or in the cloud, and how to get it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError, EndpointConnectionError
from support.platform.command_line import call, flat

from smp_estimator.cli.commands import doctor

if TYPE_CHECKING:
    import pytest


def test_doctor_in_process_mode() -> None:
    found = {finding.what: finding for finding in doctor.process_findings()}
    assert set(found) == {"mpirun", "torch", "mpi4py", "sagemaker", "free ports"}
    assert found["free ports"].ok
    assert (
        "free ports" in call("doctor", "--mode", "process", code=0 if all(f.ok for f in found.values()) else 1).output
    )


def test_doctor_says_which_sdk_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def detail(version: str) -> str:
        monkeypatch.setattr("smp_estimator.sdk.installed.installed_version", lambda: version)
        return next(finding.detail for finding in doctor.process_findings() if finding.what == "sagemaker")

    assert detail("2.257.7") == "2.257.7, for SMPEstimator, SMPHuggingFace and ProcessSession"
    assert detail("3.27.0") == "3.27.0, for ModelTrainer and ModelParallel of smp_estimator.model_trainer"
    assert detail("4.0.0") == "4.0.0, which this package does not know"


def test_doctor_without_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    found = {finding.what: finding.ok for finding in doctor.process_findings() + doctor.docker_findings()}
    assert found == {
        "mpirun": False,
        "torch": False,
        "mpi4py": False,
        "sagemaker": False,
        "free ports": True,
        "docker": False,
        "daemon": False,
        "compose": False,
    }
    (lacking,) = doctor.cloud_findings()
    assert lacking.what == "boto3"
    call("doctor", "--mode", "docker", code=1)


def test_a_command_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "TIMEOUT", 0.3)
    began = time.monotonic()
    found = {finding.what: finding for finding in doctor.docker_findings()}
    assert time.monotonic() - began < 30
    assert found["docker"].ok
    assert found["daemon"].ok is False
    assert "no answer" in found["daemon"].detail


class Account:
    """A boto3 session without a network: answers as told, and keeps the settings of its clients."""

    region_name = "eu-west-1"

    def __init__(self, arn: str = "", allowed: Any = (), refused: Exception | None = None) -> None:
        self.arn, self.allowed, self.refused = arn, allowed, refused
        self.settings: list[Any] = []
        self.asked = ""

    def get_credentials(self) -> object:
        return object()

    def client(self, name: str, **settings: Any) -> Account:
        self.settings.append(settings)
        return self

    def get_caller_identity(self) -> dict[str, str]:
        if not self.arn:
            raise EndpointConnectionError(endpoint_url="https://sts.invalid")
        return {"Arn": self.arn}

    def simulate_principal_policy(self, *, PolicySourceArn: str, ActionNames: list[str], MaxItems: int) -> Any:
        self.asked = PolicySourceArn
        if self.refused:
            raise self.refused
        decisions = {True: "allowed", False: "implicitDeny"}
        return {
            "EvaluationResults": [
                {"EvalActionName": name, "EvalDecision": decisions[name in self.allowed]} for name in ActionNames
            ]
        }


ROLE = "arn:aws:sts::123456789012:assumed-role/Trainer/me"


def test_doctor_asks_the_account_for_permissions() -> None:
    actions = {action for group in doctor.PERMISSIONS.values() for action in group} - {"s3:PutObject"}
    account = Account(ROLE, actions)
    found = {finding.what: finding for finding in doctor.cloud_findings(session=account)}
    assert account.asked == "arn:aws:iam::123456789012:role/Trainer"
    assert found["region"].detail == "eu-west-1"
    assert found["AmazonSageMakerFullAccess"].ok
    assert found["AmazonS3FullAccess"].ok is False
    assert "may not s3:PutObject" in found["AmazonS3FullAccess"].detail
    for settings in account.settings:
        assert settings["config"].connect_timeout <= 10
        assert settings["config"].read_timeout <= 10
        assert settings["config"].retries["max_attempts"] == 1
    doctor.cloud_findings("arn:aws:iam::123456789012:role/Other", account)
    assert account.asked.endswith("role/Other")


def test_doctor_says_when_the_account_does_not_answer() -> None:
    denied = ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "SimulatePrincipalPolicy")
    found = {finding.what: finding for finding in doctor.cloud_findings(session=Account(ROLE, refused=denied))}
    assert all(found[policy].ok is None for policy in doctor.PERMISSIONS)
    assert "AccessDenied" in found["AmazonS3FullAccess"].detail
    silent = {finding.what: finding for finding in doctor.cloud_findings(session=Account())}
    assert silent["credentials"].ok is False
    assert not set(doctor.PERMISSIONS) & set(silent)


def test_doctor_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    said = flat(call("doctor", "--mode", "cloud", code=1))
    assert "none found" in said


# -- enough of it ----------------------------------------------------------------------------------------------


def _machine() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.machine_findings()}


def test_doctor_says_what_the_machine_has_too_little_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert list(_machine())[-3:] == ["shared memory", "open files", "room for jobs"]
    monkeypatch.setattr(doctor, "SHARED", tmp_path)
    monkeypatch.setattr(doctor, "LEAST_SHARED", 1 << 60)
    monkeypatch.setattr(doctor, "LEAST_ROOM", 1 << 60)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 4096))
    found = _machine()
    assert [found[what].ok for what in ("shared memory", "open files", "room for jobs")] == [False] * 3
    assert "--shm-size 4g" in found["shared memory"].remedy
    assert found["open files"].detail == "256 of at most 4096 for a process"
    assert "ulimit -n 1024" in flat(call("doctor", "--mode", "process", code=1))


def test_doctor_knows_which_torch_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(version: str) -> bool | None:
        monkeypatch.setattr(doctor.importlib.metadata, "version", lambda _: version)
        return _machine()["torch 2.4 or newer"].ok

    assert [verdict(each) for each in ("2.3.1", "2.4.0", "2.13.0+cpu", "3.0.0")] == [False, True, True, True]


def test_doctor_without_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "SHARED", tmp_path / "not there")
    assert _machine()["shared memory"].ok is None
