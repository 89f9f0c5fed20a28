"""The part of the SageMaker API that training on this machine needs, with the service's names and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from botocore.exceptions import ClientError

from smp_config import ConfigError
from smp_estimator.local.starting import STARTED, start_job
from smp_estimator.sdk.version_2 import LocalSagemakerClient, LocalSession

if TYPE_CHECKING:
    from smp_estimator.local.files.code import CodeSource
    from smp_estimator.local.job import ProcessJob


class NotOnThisMachine(AttributeError, ConfigError):
    """A call of the service that training on this machine does not have; also what ``hasattr()`` and ``getattr()`` expect."""

    code = "SMP115"


class ProcessClient(LocalSagemakerClient):
    """``boto3.client("sagemaker")`` for training jobs that are processes of this machine.

    Jobs are known by name in the whole interpreter, whichever session started them. Everything but training is
    inherited from the SDK's local mode and needs Docker.
    """

    sagemaker_session: Any
    _jobs: ClassVar[dict[str, ProcessJob]] = STARTED

    def __init__(self, sagemaker_session: LocalSession) -> None:
        super().__init__(sagemaker_session)
        self._expected_code: dict[str, CodeSource] = {}

    def __getattr__(self, name: str) -> Any:
        """Raise NotOnThisMachine for every other call of the service."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise NotOnThisMachine(
            f"{name} is a call of the SageMaker service, and this estimator's session runs single training jobs as processes "
            "of this machine: tuning, processing and other features of the service are not there; call fit() for each job (a "
            "search over hyperparameters is a loop over it), or give a sagemaker.Session() and a cloud instance_type"
        )

    def expect_code(self, job_name: str, source: CodeSource) -> None:
        """Set the code that the job of this name will run; without it the ``file://`` submit directory is linked."""
        self._expected_code[job_name] = source

    def create_training_job(self, **request: Any) -> dict[str, str]:
        """Check the request, build the job's folders and start its processes; return while they run.

        Raises:
            ConfigError: before any process is started.
        """
        job = start_job(request, self.sagemaker_session, self._expected_code.pop(request["TrainingJobName"], None))
        return {"TrainingJobArn": job.describe()["TrainingJobArn"]}

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:  # noqa: N803 - boto's name
        """Return the job's description, in the service's format."""
        return self.job(TrainingJobName, "DescribeTrainingJob").describe()

    def stop_training_job(self, TrainingJobName: str) -> None:  # noqa: N803 - boto's name
        """Ask the job to stop: SIGTERM, and SIGKILL after the platform's 120 seconds."""
        self.job(TrainingJobName, "StopTrainingJob").stop()

    def list_tags(self, ResourceArn: str, **_: Any) -> dict[str, Any]:  # noqa: N803 - boto's name
        """Return the tags of a job."""
        job = self._jobs.get(ResourceArn.rpartition("/")[2])
        return {"Tags": list((job.request.get("Tags") if job else None) or [])}

    def job(self, name: str, operation: str = "DescribeTrainingJob") -> ProcessJob:
        """Return the job of this name; raise ClientError, as the service does, if there is none."""
        if name not in self._jobs:
            message = f"Requested resource not found: no training job {name!r} was started by this interpreter"
            raise ClientError({"Error": {"Code": "ValidationException", "Message": message}}, operation)
        return self._jobs[name]

    @classmethod
    def knows(cls, name: str) -> bool:
        """Return whether this interpreter started a job of this name."""
        return name in cls._jobs
