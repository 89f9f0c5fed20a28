"""A job on this machine contacts nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import NoCredentialsError
from support.platform.fake_jobs import FAKE_BOOTSTRAP

NOTEBOOK = """
import os, socket, sys, traceback

def refuse(self, address, *more):
    traceback.print_stack()
    os._exit(9)  # not an exception: the SDK swallows some

for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse)
socket.getaddrinfo = lambda *a, **k: refuse(None, a)

import botocore.credentials

def asked(self):
    traceback.print_stack()
    os._exit(8)

botocore.credentials.CredentialResolver.load_credentials = asked

from smp_estimator import SMPEstimator, ProcessSession
estimator = SMPEstimator(
    entry_point="train.py", source_dir=sys.argv[1], instance_type="local", hyperparameters={"steps": 1},
    sagemaker_session=ProcessSession(launcher=sys.argv[2:]),
    distribution={"smdistributed": {"modelparallel": {"enabled": True, "parameters": {"ddp": True}}},
                  "mpi": {"enabled": True, "processes_per_host": 2}},
)
estimator.fit()
SMPEstimator.attach(estimator.latest_training_job.name)
print("done", estimator.model_data)
"""


def test_no_network_no_credentials_no_home(script: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": ""}
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(script), *FAKE_BOOTSTRAP],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done file://" in done.stdout
    assert "deprecation" not in done.stdout + done.stderr


def test_clients_of_the_sdk_s_import_still_find_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    from smp_estimator.sdk.version_2 import credentials_when_used

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with credentials_when_used():
        session = boto3.Session(region_name="us-east-1")
        session.client("s3")
    with pytest.raises(NoCredentialsError):
        session.get_credentials().get_frozen_credentials()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "found")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "later")
    assert session.get_credentials().get_frozen_credentials().access_key == "found"
