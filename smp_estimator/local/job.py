"""A training job on this machine: its states, the thread that watches it, and its description."""

from __future__ import annotations

import enum
import logging
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from smp_config.job import STOP_GRACE_SECONDS
from smp_config.limits import HANG_VARIABLE, LEAST_HANG_SECONDS, hang_seconds
from smp_config.machine.disk_space import full_disk
from smp_estimator.local.bootstrap import Bootstrap, environment_of
from smp_estimator.local.failure_lines import hide_failure, shorten_reason
from smp_estimator.local.files.artifacts import artifact_address, deliver, failure_text, merged_files
from smp_estimator.local.files.tree import written_on_the_machine
from smp_estimator.local.log import JobLog
from smp_estimator.local.stop import kill_job
from smp_launch.watch.states import state_of

if TYPE_CHECKING:
    from smp_estimator.local.files.tree import JobTree
    from smp_records.records import ProgressRecord, UsageRecord

logger = logging.getLogger(__name__)

#: After one host failed the others end by themselves within moments; this long they may take, in seconds.
_FAILURE_DRAIN_SECONDS = 3.0
#: The same after the leader succeeded.
_SUCCESS_DRAIN_SECONDS = 30.0
#: Between SIGTERM and SIGKILL for hosts that did not end by themselves.
_DRAIN_GRACE_SECONDS = 2.0
#: Between two looks at the launchers.
_LOOK_SECONDS = 1.0
#: Most of a line of the log that a reason of failure repeats.
_SHOWN_CHARACTERS = 400
#: After SIGKILL: this long processes that the system does not let die are waited for.
_UNKILLABLE_SECONDS = 5.0

#: The SDK's default for ``max_run``. It counts as no limit: only a limit that the user has set stops a local job.
_DEFAULT_MAX_RUN_SECONDS = 24 * 60 * 60


class JobSession(Protocol):
    """The part of a session that a job uses."""

    launcher: Sequence[str]
    keep: bool
    chosen_region: str | None

    def upload_file(self, path: str, uri: str) -> None:
        """Put one file at an ``s3://`` address."""


class Status(str, enum.Enum):
    """The state of a job, in the service's words."""

    IN_PROGRESS = "InProgress"
    COMPLETED = "Completed"
    FAILED = "Failed"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


class ProcessJob:
    """One job: started once, watched by a thread of its own until it is packed.

    The thread is not a daemon, so an interpreter that reaches its end waits for a running job.

    Attributes:
        status: where the job stands.
        failure_reason: why it failed; None for every other status.
    """

    def __init__(
        self, name: str, tree: JobTree, request: Mapping[str, Any], *, session: JobSession, destination: str
    ) -> None:
        self.name = name
        self.tree = tree
        self.request = dict(request)
        # What happens to the job, seen on any thread. The watching thread handles one event after the other.
        self._events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.log = JobLog(tree.log, failed=lambda: self._events.put(("log", None)))
        # Set last, by the watching thread: status and artifacts are complete then.
        self.done = threading.Event()
        self._session = session
        self._destination = destination
        limit = (request.get("StoppingCondition") or {}).get("MaxRuntimeInSeconds")
        self._max_run_seconds: float | None = limit if limit != _DEFAULT_MAX_RUN_SECONDS else None
        self._token = uuid.uuid4().hex
        self._bootstraps: dict[str, Bootstrap] = {}
        self._exit_codes: dict[str, int] = {}
        self._deadlines: dict[str, float] = {}
        self._stopping = False
        self._interrupted = False
        self._timed_out = False
        self._hung = ""
        self._stopped: dict[str, float] = {}  # launchers, and since when
        given = hang_seconds(request.get("Environment") or {})
        self._patience = LEAST_HANG_SECONDS if given is None else given
        self.failure_reason: str | None = None
        self._created = self._ended = datetime.now().astimezone()
        self.status = Status.IN_PROGRESS
        self._transitions: list[dict[str, Any]] = []
        self._enter("Starting", "Starting the processes")

    # -- calls from the session ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start every host's bootstrap and the thread that watches them."""
        environment = self.request.get("Environment") or {}
        self._enter("Training", "Training in progress")
        try:
            for position, host in enumerate(self.tree.hosts):
                self._bootstraps[host.host] = Bootstrap(
                    host,
                    command=self._session.launcher,
                    environment=environment_of(
                        host,
                        self.tree,
                        job_name=self.name,
                        token=self._token,
                        region=self._session.chosen_region,
                        user=environment,
                    ),
                    cwd=self.tree.root,
                    log=self.log,
                    source=host.host if position else "",
                    ended=lambda name, code: self._events.put(("ended", (name, code))),
                )
        except BaseException:
            # Also after Ctrl-C: hosts that have started must not go on without the thread that watches them.
            kill_job(self._token, self._sessions())
            self.log.close()
            raise
        # No daemon: the job goes on if the notebook's cell ends, and Python waits at its end until the job has been packed.
        threading.Thread(target=self._watch, name=f"job-{self.name}").start()

    def stop(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """Send SIGTERM now and SIGKILL after ``grace_seconds``; return at once. A finished job is not affected."""
        self._events.put(("stop", grace_seconds))

    def interrupt(self, grace_seconds: float) -> None:
        """Stop the job as :meth:`stop` does, for Ctrl-C; its files stay in its folder and are not packed."""
        self._interrupted = True
        self.stop(grace_seconds)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the job now."""
        self._stopping = True
        self._events.put(("kill", None))
        kill_job(self._token, self._sessions())

    @property
    def model_address(self) -> str:
        """Return the model's address; it is known before the model is written."""
        return artifact_address(self._destination, "model", self.name, compressed=self._compressed)

    def describe(self) -> dict[str, Any]:
        """Return the job's description in the format of ``DescribeTrainingJob``."""
        finished = self.done.is_set()
        seconds = int(((self._ended if finished else datetime.now().astimezone()) - self._created).total_seconds())
        resources = {"VolumeSizeInGB": 30, **self.request["ResourceConfig"]}
        answer: dict[str, Any] = {
            "TrainingJobName": self.name,
            "TrainingJobArn": f"arn:aws:sagemaker:local:000000000000:training-job/{self.name}",
            "TrainingJobStatus": self.status.value,
            "SecondaryStatus": self._transitions[-1]["Status"],
            "SecondaryStatusTransitions": [dict(entry) for entry in self._transitions],
            "ModelArtifacts": {"S3ModelArtifacts": self.model_address},
            "HyperParameters": dict(self.request.get("HyperParameters") or {}),
            "AlgorithmSpecification": dict(self.request["AlgorithmSpecification"]),
            "RoleArn": self.request.get("RoleArn", ""),
            "InputDataConfig": list(self.request.get("InputDataConfig") or []),
            "OutputDataConfig": {"KmsKeyId": "", **self.request["OutputDataConfig"]},
            "ResourceConfig": resources,
            "StoppingCondition": dict(self.request.get("StoppingCondition") or {}),
            "Environment": dict(self.request.get("Environment") or {}),
            "CreationTime": self._created,
            "TrainingStartTime": self._created,
            "LastModifiedTime": self._transitions[-1]["StartTime"],
            "TrainingTimeInSeconds": seconds,
            "BillableTimeInSeconds": 0,
            "EnableNetworkIsolation": False,
            "EnableManagedSpotTraining": False,
        }
        if self.request.get("CheckpointConfig"):
            answer["CheckpointConfig"] = dict(self.request["CheckpointConfig"])
        if finished:
            answer["TrainingEndTime"] = self._ended
        if self.failure_reason is not None:
            answer["FailureReason"] = self.failure_reason
        record = self.log.progress
        if record is not None and not finished:
            of = f"/{record.total_steps}" if record.total_steps else ""
            answer["SecondaryStatusTransitions"][-1]["StatusMessage"] = f"Training: step {record.step}{of}"
        return answer

    # -- the watching thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._until_every_host_ended()
            # A rank may have outlived its launcher.
            left = kill_job(self._token, self._sessions())
            if left:
                logger.warning("job %s: processes %s could not be ended", self.name, sorted(left))
            for bootstrap in self._bootstraps.values():
                bootstrap.release(timeout_seconds=2.0)
            self._finish()
        except Exception as error:  # on a thread: without a status, a wait for the job would never end
            logger.exception("job %s", self.name)
            said = full_disk(error, Path(getattr(error, "filename", None) or self.tree.root)) or type(error).__name__
            kept = f"what it had written lies in {self.tree.root}"
            self._conclude(Status.FAILED, f"the job ran, but could not be finished: {said}: {error}; {kept}")
            kill_job(self._token, self._sessions())
        finally:
            # Whatever else goes wrong: a wait for the job must end.
            try:
                self.log.close()
            finally:
                self.done.set()

    def _until_every_host_ended(self) -> None:
        running = set(self._bootstraps)
        if self._max_run_seconds is not None:
            self._due("max_run", self._max_run_seconds)
        self._due("look", _LOOK_SECONDS)
        while running:
            kind, value = self._next_event()
            if kind == "look":
                self._look_after(running)
                self._due("look", _LOOK_SECONDS)
            elif kind == "ended":
                running.discard(value[0])
                self._note_end(*value)
            elif kind == "unkillable":
                return
            else:
                self._end_for(kind, value, running)

    def _look_after(self, running: set[str]) -> None:
        """End a job if its launcher is stopped, as by SIGSTOP: it can no longer report on its ranks."""
        now = time.monotonic()
        stopped = {host for host in running if state_of(self._bootstraps[host].pid).is_stopped}
        self._stopped = {host: self._stopped.get(host, now) for host in stopped}
        for host, since in self._stopped.items():
            if not self._hung and self._patience and now - since >= self._patience:
                pid = self._bootstraps[host].pid
                self._hung = (
                    f"hang: the launcher of {host}, process {pid}, is stopped (SIGSTOP, or a debugger) since {now - since:.0f} s; "
                    f"kill -CONT {pid} would have let the job go on, and {HANG_VARIABLE} sets another number of seconds"
                )
                self._end_for("kill", None, running)

    def _end_for(self, kind: str, value: Any, running: set[str]) -> None:
        """End the running hosts in the way that the reason requires."""
        if kind == "stop":
            self._stopping = True
            self.status = Status.STOPPING
            self._enter("Stopping", "Stopping the job")
            self._terminate(running, value)
        elif kind == "max_run":
            self._stopping = self._timed_out = True
            self.log.write(f"max_run of {self._max_run_seconds:g} seconds is over: stopping the job")
            self._enter("MaxRuntimeExceeded", "Training job runtime exceeded MaxRuntimeInSeconds")
            self._terminate(running, STOP_GRACE_SECONDS)
        elif kind == "log":
            self._enter("Stopping", "Stopping the job: its log cannot be written")
            self._terminate(running, STOP_GRACE_SECONDS)
        elif kind == "drain":
            self._terminate(running, _DRAIN_GRACE_SECONDS)
        elif kind == "kill" and kill_job(self._token, self._sessions()):
            self._due("unkillable", _UNKILLABLE_SECONDS)

    def _note_end(self, host: str, code: int) -> None:
        """Record a host's exit code and set a deadline for the other hosts if needed.

        After a failure, or after the leader's success, they normally end without a signal; the deadline allows time
        for that.
        """
        self._exit_codes[host] = code
        if self._stopping:
            return
        if code:
            self._due("drain", _FAILURE_DRAIN_SECONDS)
        elif host == self.tree.hosts[0].host:
            self._due("drain", _SUCCESS_DRAIN_SECONDS)

    def _next_event(self) -> tuple[str, Any]:
        """Return the next event of the hosts or the user, or the first deadline that expires before it."""
        if not self._deadlines:
            return self._events.get()
        kind = min(self._deadlines, key=self._deadlines.__getitem__)
        try:
            return self._events.get(timeout=max(0.0, self._deadlines[kind] - time.monotonic()))
        except queue.Empty:
            del self._deadlines[kind]
            return kind, None

    def _due(self, kind: str, seconds: float) -> None:
        """Set a deadline; of two deadlines of one kind the earlier one is used."""
        at = time.monotonic() + seconds
        self._deadlines[kind] = min(at, self._deadlines.get(kind, at))

    def _terminate(self, running: set[str], grace_seconds: float) -> None:
        for host in running:
            self._bootstraps[host].terminate()
        self._due("kill", grace_seconds)

    def _finish(self) -> None:
        """Settle the status, pack the artifacts and clean up, after all processes have ended."""
        for folder, variable in written_on_the_machine(self._created.timestamp()).items():
            logger.warning(
                "job %s, or something else meanwhile, wrote to %s of this machine, which is no folder of the job: the next job "
                "would find it there, and a cluster has another; let the script read os.environ[%r]",
                self.name,
                folder,
                variable,
            )
        if not self._stopping and (self._hung or any(self._exit_codes.values()) or self.log.failure):
            reason = self._reason()
            self._pack_what_is_left()
            self._conclude(Status.FAILED, reason)
            return
        if self.log.failure:
            logger.warning("job %s: %s", self.name, self.log.failure)
        if not self._interrupted:
            self._enter("Uploading", "Packing the model")
            self._pack()
        self._conclude(Status.STOPPED if self._stopping else Status.COMPLETED)
        if not self._session.keep and not self._stopping:
            self.tree.remove_workspace()

    def _pack(self) -> None:
        models = [host.model_dir for host in self.tree.hosts]
        if not merged_files(models):
            logger.warning(
                "job %s wrote nothing to its model directory (SM_MODEL_DIR): the archive is empty", self.name
            )
        self._deliver(models, "model")
        self._pack_output()

    def _pack_output(self) -> None:
        outputs = [host.output_data_dir for host in self.tree.hosts]
        if merged_files(outputs):
            self._deliver(outputs, "output")

    def _deliver(self, folders: Sequence[Path], name: str) -> None:
        given: dict[str, Any] = {"job_name": self.name, "session": self._session, "compressed": self._compressed}
        deliver(folders, name, self._destination, **given)

    def _pack_what_is_left(self) -> None:
        """Pack the output data of a failed job, as the service does; an error here must not hide the failure's cause."""
        try:
            self._pack_output()
        except Exception as error:  # of the storage, which may raise anything
            logger.warning("job %s: what it wrote to its output data is not delivered: %s", self.name, error)

    def _reason(self) -> str:
        """Return the reason for the job's failure.

        A hang or an unwritable log comes first. Next is the failure file of the first host that has one. Without one,
        the reason consists of the exit codes and the end of the log.
        """
        if self._hung:
            return self._hung
        if failure := self.log.failure:
            texts = [failure_text(host.failure_file) for host in self.tree.hosts]
            told = list(filter(None, texts))
            others = f"\nA host failed, too: {told[0]}" if told else ""
            tail = "\n".join(line[:_SHOWN_CHARACTERS] for line in self.log.tail(20))
            return (
                f"{failure}; the job was stopped for it, and what it had written lies in {self.tree.root}: make room there, or "
                "have the jobs' folders on a larger disk with ProcessSession(root=…) or ModelTrainer(local_container_root=…)"
                f"{others}\nThe newest lines were:\n{tail}"
            )
        for host in self.tree.hosts:
            if text := failure_text(host.failure_file):
                return text
        codes = ", ".join(f"{host} with {_exit(code)}" for host, code in self._exit_codes.items() if code)
        tail = "\n".join(line[:_SHOWN_CHARACTERS] for line in self.log.tail(20))
        return f"the bootstrap ended without a failure file: {codes}. The log ends with:\n{tail}"

    def _conclude(self, status: Status, reason: str | None = None) -> None:
        self._ended = datetime.now().astimezone()
        self.failure_reason = reason
        if self._timed_out:
            self._enter("MaxRuntimeExceeded", "Training job runtime exceeded MaxRuntimeInSeconds")
        else:
            self._enter(status.value, reason or f"Training job {status.value.lower()}")
        self._transitions[-1]["EndTime"] = self._ended
        self.status = status

    # -- small things --------------------------------------------------------------------------------------

    @property
    def _compressed(self) -> bool:
        return self.request["OutputDataConfig"].get("CompressionType", "GZIP") != "NONE"

    def _sessions(self) -> list[int]:
        return [bootstrap.pid for bootstrap in self._bootstraps.values()]

    def _enter(self, secondary: str, message: str) -> None:
        now = datetime.now().astimezone()
        if self._transitions:
            self._transitions[-1]["EndTime"] = now
        self._transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": message})

    def discard(self) -> None:
        """Remove everything of a job that could not be started."""
        kill_job(self._token, self._sessions())
        self.log.close()
        shutil.rmtree(self.tree.root, ignore_errors=True)


def shown_events(job: ProcessJob, *, wait: bool = True) -> Iterator[str | ProgressRecord | UsageRecord | None]:
    """Yield the events of a job's log that a terminal shows; the message of a failed job repeats the others."""
    return hide_failure(job.log.follow(wait=wait), lambda: job.status is Status.FAILED)


def failure_message(job: ProcessJob) -> str:
    """Return the error message for a failed job: its first cause, the place in the script, and the path of the log."""
    reason = shorten_reason(job.failure_reason or "")
    return f"Error for Training job {job.name}: Failed. Reason: {reason}\nThe whole log is in {job.tree.log}"


def interrupt(job: ProcessJob, grace_seconds: float) -> None:
    """Stop a job for Ctrl-C and wait until none of its processes is left; a second Ctrl-C kills at once.

    Args:
        grace_seconds: between SIGTERM and SIGKILL.
    """
    try:
        print(
            f"Ctrl-C: stopping job {job.name}; its ranks get SIGTERM and have {grace_seconds:g} s to save and exit. "
            "Ctrl-C again kills them at once.",
            flush=True,
        )
        job.interrupt(grace_seconds)
        job.done.wait(grace_seconds + 3.0)
        print(f"The job was stopped. Its log: {job.tree.log}; all that it wrote: {job.tree.root}", flush=True)
    except KeyboardInterrupt:
        job.kill()
        job.done.wait(3.0)
        print(f"The job was killed. Its log: {job.tree.log}; all that it wrote: {job.tree.root}", flush=True)
        raise


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
