"""A training job in the cloud, watched: the log of all hosts, and the progress below it."""

from __future__ import annotations

from typing import Any

from smp_estimator.cloud.log import CloudLog
from smp_estimator.local.session import shows_training
from smp_estimator.progress import show
from smp_estimator.sdk import TrainingJob, check_job_status


class CloudTrainingJob(TrainingJob):
    """The SDK's training job, whose ``wait()`` shows hosts and progress."""

    sagemaker_session: Any

    def wait(self, logs: Any = "All") -> None:
        """Wait for the end.

        Args:
            logs: as in ``fit()``.

        Raises:
            UnexpectedStatusException: the job failed; the message has the reason that the job gave.
            KeyboardInterrupt: the job goes on.
        """
        if not shows_training(logs):
            rules = not isinstance(logs, bool) and "Rules" in ([logs] if isinstance(logs, str) else logs or [])
            super().wait(logs="Rules" if rules else "None")
            return
        watch(self.sagemaker_session, self.name)


def watch(session: Any, job_name: str, *, wait: bool = True) -> dict[str, Any]:
    """Show the log of a job and its progress.

    Args:
        wait: until it has ended; False shows what is there.

    Returns:
        The job's description.

    Raises:
        UnexpectedStatusException: waited for a job that failed.
    """
    log = CloudLog(session, job_name)
    try:
        show(log.follow(wait=wait))
    except KeyboardInterrupt:
        print(f"The job goes on; estimator.latest_training_job.stop() ends it, logs() shows it again: {job_name}")
        raise
    if wait:
        check_job_status(job_name, log.description, "TrainingJobStatus")
        _print_bill(log.description)
    return log.description


def _print_bill(description: dict[str, Any]) -> None:
    hosts = _host_count(description["ResourceConfig"])
    trained, billed = description.get("TrainingTimeInSeconds"), description.get("BillableTimeInSeconds")
    if trained is not None:
        print(f"Training seconds: {trained * hosts}")
    if billed is not None:
        print(f"Billable seconds: {billed * hosts}")
        if description.get("EnableManagedSpotTraining") and trained:
            print(f"Managed Spot Training savings: {(1 - billed / trained) * 100:.1f}%")


def _host_count(resources: dict[str, Any]) -> int:
    groups = resources.get("InstanceGroups")
    return sum(group["InstanceCount"] for group in groups) if groups else int(resources.get("InstanceCount", 1))
