"""A training job in the cloud, watched: the log of all hosts as it arrives, and the progress below it."""

from __future__ import annotations

from typing import Any

from smp_estimator.cloud.log import CloudLog, print_bill
from smp_estimator.local.session import shows_training
from smp_estimator.progress import show
from smp_estimator.sdk.version_2 import TrainingJob, check_job_status


class CloudTrainingJob(TrainingJob):
    """The SDK's training job with a ``wait()`` that shows hosts and progress."""

    sagemaker_session: Any

    def wait(self, logs: Any = "All") -> None:
        """Wait for the end; ``logs`` as in ``fit()``.

        Raises:
            UnexpectedStatusException: the job failed; the message has the reason that the job gave.
            KeyboardInterrupt: the job goes on.
        """
        if not shows_training(logs):
            rules = not isinstance(logs, bool) and "Rules" in ([logs] if isinstance(logs, str) else logs or [])
            super().wait(logs="Rules" if rules else "None")
            return
        log = CloudLog(self.sagemaker_session, self.name)
        try:
            show(log.follow())
        except KeyboardInterrupt:
            print(f"The job goes on; estimator.latest_training_job.stop() ends it, logs() shows it again: {self.name}")
            raise
        check_job_status(self.name, log.description, "TrainingJobStatus")
        print_bill(log.description)
