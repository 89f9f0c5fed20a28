"""A cloud for tests: moto plays the service, and every CreateTrainingJob request is kept."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.hooks import EventAliaser
from jsonschema.validators import Draft202012Validator
from moto import mock_aws

from smp_estimator.cloud import source
from smp_estimator.sdk.installed import installed_major

ROLE = "arn:aws:iam::123456789012:role/service-role/me"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/smp:1"
ACCOUNT = "123456789012"
REGION = "us-east-1"

_numbers = itertools.count(1)


def _remember() -> None:
    """Let sessions share what the SDK and botocore find out anew for each: it is half of the time of an estimator's tests."""
    load = botocore.session.create_loader
    botocore.session.create_loader = functools.cache(load)  # descriptions of services, on file
    names: dict[str, str] = {}
    begin = EventAliaser.__init__

    def begin_with_names(self: EventAliaser, *given: Any) -> None:
        begin(self, *given)
        if len(given) == 1:  # the aliases are those of all
            self._alias_name_cache = names

    EventAliaser.__init__ = begin_with_names
    # The SDK's schema of its configuration: whether that is a schema takes longer than whether a configuration follows it.
    check = Draft202012Validator.check_schema
    checked: dict[int, Any] = {}

    def check_once(schema: Any, *given: Any, **named: Any) -> None:
        if id(schema) not in checked:
            check(schema, *given, **named)
            checked[id(schema)] = schema  # kept, so that no other gets its number

    Draft202012Validator.check_schema = staticmethod(check_once)


_remember()


class Cloud:
    """The service, the SDK's session with it, and what was sent.

    Attributes:
        session: the SDK's ``Session``.
        requests: every CreateTrainingJob request, as botocore got it.
    """

    def __init__(self, boto: Any, session_class: Any = None, **session: Any) -> None:
        if installed_major() == 3:
            from sagemaker.core.helper.session_helper import Session
        else:
            from sagemaker.session import Session

        config = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
        self.boto = boto
        self.requests: list[dict[str, Any]] = []
        # Of the whole boto session: version 3 of the SDK makes clients of its own.
        boto.events.register(
            "provide-client-params.sagemaker.CreateTrainingJob", lambda params, **_: self.requests.append(dict(params))
        )
        self.session: Any = (session_class or Session)(
            boto_session=boto, default_bucket="bucket", sagemaker_config=config, **session
        )

    def watch(self, operation: str, seen: list[dict[str, Any]]) -> None:
        """Keep every request of an operation in ``seen``."""
        events = self.session.sagemaker_client.meta.events
        events.register(f"provide-client-params.sagemaker.{operation}", lambda params, **_: seen.append(dict(params)))

    def arguments(self, script: Path, **given: Any) -> dict[str, Any]:
        """Arguments of an estimator that are in order; ``None`` takes one out."""
        merged = {
            "entry_point": "train.py",
            "source_dir": str(script),
            "role": ROLE,
            "image_uri": IMAGE,
            "instance_type": "ml.p4d.24xlarge",
            "instance_count": 2,
            "sagemaker_session": self.session,
            **given,
        }
        return {name: value for name, value in merged.items() if value is not None}

    def estimator(self, script: Path, **given: Any) -> Any:
        from smp_estimator import SMPEstimator

        return SMPEstimator(**self.arguments(script, **given))

    def carried(self, number: int = -1) -> dict[str, Any]:
        """The hyperparameters of a request, decoded."""
        return {name: json.loads(value) for name, value in self.requests[number]["HyperParameters"].items()}

    @property
    def logs(self) -> Any:
        return self.boto.client("logs")

    def write(self, stream: str, *messages: str) -> None:
        """Append messages to a log stream ``<job>/algo-N-…``, as a container does."""
        from botocore.exceptions import ClientError
        from moto.core.utils import unix_time_millis

        group = "/aws/sagemaker/TrainingJobs"
        for make in (
            lambda: self.logs.create_log_group(logGroupName=group),
            lambda: self.logs.create_log_stream(logGroupName=group, logStreamName=stream),
        ):
            try:
                make()
            except ClientError as error:
                if error.response["Error"]["Code"] != "ResourceAlreadyExistsException":
                    raise
        now = int(unix_time_millis())
        events = [{"timestamp": now + next(_numbers), "message": message} for message in messages]
        self.logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)

    @staticmethod
    def set_status(job_name: str, status: str, secondary: str = "", reason: str = "") -> None:
        """Move a job of the in-process service to another state."""
        from moto.sagemaker.models import sagemaker_backends

        set_status(sagemaker_backends, job_name, status, secondary, reason)


def set_status(backends: Any, job_name: str, status: str, secondary: str = "", reason: str = "") -> None:
    """Moto's jobs are born complete; this is how one walks through the states of a real one."""
    job = backends[ACCOUNT][REGION].training_jobs[job_name]
    job.training_job_status = status
    job.secondary_status = secondary or status
    job.failure_reason = reason or None
    step = {"Status": job.secondary_status, "StartTime": job.creation_time, "StatusMessage": secondary or status}
    if job.secondary_status_transitions[-1].get("Status") != step["Status"]:
        job.secondary_status_transitions = [*job.secondary_status_transitions, step]


def boto_session() -> Any:
    """Credentials of nobody, whatever the environment says."""
    return boto3.Session(aws_access_key_id="testing", aws_secret_access_key="testing", region_name=REGION)


_build_wheel = source.build_wheel


@functools.cache
def _wheel() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return _build_wheel(Path(folder)).read_bytes()


def _copy_wheel(folder: Path) -> Path:
    """Write the wheel into ``folder``, as :func:`source.build_wheel` does."""
    path = folder / source.wheel_name()
    path.write_bytes(_wheel())
    return path


@contextmanager
def service() -> Iterator[Any]:
    """Moto in this process, with the bucket that the tests use; yields a boto session."""
    patch = pytest.MonkeyPatch()
    # The SDK checks defaults against a large schema many times, and that schema against JSON Schema's own, a second each time.
    patch.setattr(Draft202012Validator, "check_schema", lambda *_, **__: None)
    if installed_major() == 3:
        patch.setenv("SAGEMAKER_VALIDATE_ROLE", "false")  # the stand-in's roles may do nothing
    else:
        import sagemaker.utils

        # It reads botocore's 300 kB of endpoints, at each look for an image.
        patch.setattr("sagemaker.utils._botocore_resolver", functools.cache(sagemaker.utils._botocore_resolver))
        patch.setattr("sagemaker.session.time.sleep", lambda _: None)  # its polls of a job that is done
        # The SDK checks its configuration against a large schema nine times per estimator, 1.5 s in all.
        patch.setattr("sagemaker.utils.validate_sagemaker_config", lambda _: None)
    # Jobs in stock images take the runtime along; it is packed once in a process.
    patch.setattr(source, "build_wheel", _copy_wheel)
    with mock_aws():
        boto = boto_session()
        boto.client("s3").create_bucket(Bucket="bucket")
        yield boto
    patch.undo()
