"""The log of a job in the cloud: the lines of all its hosts as they arrive, and its stages among them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from botocore.config import Config
from botocore.exceptions import ClientError

from smp_estimator.sdk.functions import secondary_training_status_changed, secondary_training_status_message
from smp_records.records import parse_pace, parse_progress, parse_usage

if TYPE_CHECKING:
    from smp_estimator.progress import Event

#: Where the platform writes the output of training jobs.
LOG_GROUP = "/aws/sagemaker/TrainingJobs"

#: Seconds between two questions for new lines and for the job's status.
POLL_SECONDS = 5.0

#: Longest time without an item, so that a clock can be redrawn.
_TICK_SECONDS = 0.25

#: Lines may reach the log after the job's end; it is read once more after this long.
_LATE_SECONDS = 2.0

#: States in which a job does not change any more.
ENDED = ("Completed", "Failed", "Stopped")

#: In the name of a log stream, the host and its number.
_HOST = re.compile(r"/(algo-(\d+))(?:-|$)")


def print_bill(description: dict[str, Any]) -> None:
    """Print the training and billable seconds of a finished job, from its DescribeTrainingJob answer."""
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


class CloudLog:
    """A reader of the streams ``<job>/algo-N-…`` of a job; each line has its host, the first host (rank 0) comes first.

    Attributes:
        description: the newest answer of DescribeTrainingJob.
    """

    def __init__(self, session: Any, job_name: str) -> None:
        """Create a reader; no request is sent yet."""
        self._session = session
        self._name = job_name
        self._client: Any = None
        self._tokens: dict[str, str | None] = {}
        self.description: dict[str, Any] = {}

    def follow(self) -> Iterator[Event]:
        """Yield every log line and every change of the job's status, until the job has ended."""
        before: dict[str, Any] | None = None
        while True:
            self.description = self._session.sagemaker_client.describe_training_job(TrainingJobName=self._name)
            if secondary_training_status_changed(self.description, before):
                yield from secondary_training_status_message(self.description, before).splitlines()
            before = self.description
            yield from self.new_lines()
            if self.description["TrainingJobStatus"] in ENDED:
                yield from self._pause(min(POLL_SECONDS, _LATE_SECONDS))
                yield from self.new_lines()
                return
            yield from self._pause(POLL_SECONDS)

    def new_lines(self) -> Iterator[str]:
        """Yield the lines written since the last call, host by host."""
        for stream in self._streams():
            found = _HOST.search(stream)
            host = found[1] if found else stream.rpartition("/")[2]
            for message in self._messages(stream):
                # A record moves the display and is not shown: it needs no host.
                if _is_record(message):
                    yield message
                else:
                    yield f"[{host}] {message}"

    def _streams(self) -> list[str]:
        """Return the names of the streams that exist now, ordered by host number."""
        pages = self._logs().get_paginator("describe_log_streams")
        names: list[str] = []
        try:
            for page in pages.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{self._name}/"):
                names += [stream["logStreamName"] for stream in page["logStreams"]]
        except ClientError as error:
            # The group is made when the first job of an account writes its first line.
            if error.response.get("Error", {}).get("Code") != "ResourceNotFoundException":
                raise
        return sorted(names, key=_place)

    def _messages(self, stream: str) -> Iterator[str]:
        while True:
            token = self._tokens.get(stream)
            more = {"nextToken": token} if token else {}
            answer = self._logs().get_log_events(
                logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **more
            )
            for event in answer["events"]:
                yield event["message"].rstrip("\n")
            following = answer["nextForwardToken"]
            self._tokens[stream] = following
            if following == token:  # an empty page alone does not mean the end
                return

    def _logs(self) -> Any:
        if self._client is None:
            # A wait of hours must survive a refused request now and then.
            config = Config(retries={"max_attempts": 15})
            self._client = self._session.boto_session.client("logs", config=config)
        return self._client

    @staticmethod
    def _pause(seconds: float) -> Iterator[None]:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _TICK_SECONDS))
            yield None


def _is_record(message: str) -> bool:
    return any(parse(message) is not None for parse in (parse_progress, parse_usage, parse_pace))


def _place(stream: str) -> tuple[int, str]:
    found = _HOST.search(stream)
    return (int(found[2]) if found else 1 << 30, stream)
