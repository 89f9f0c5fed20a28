"""Recording of a rank's computations and their times, cheap enough to stay on during a real run.

Every rank has a :class:`TimelineRecorder` if ``SMP_TIMELINE`` sets the number of steps to keep. In a
pipeline it also has one if ``SMP_PROFILE`` names the steps to profile. An action costs one appended tuple.
Only the newest steps are kept, so memory does not grow in a long job. The file is written to the job's
output data when that many steps are full for the first time. It is written once more, with the newest
steps, when the session ends. So a job that is killed leaves the first steps. ``smp-estimator timeline``
reads the files of all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smp_records.profiling import MOST_STEPS, Profile
from smp_records.profiling import VARIABLE as PROFILE_VARIABLE
from smp_records.timeline import TIMELINE_VARIABLE, Kind, RankTimeline, StepTimeline, StoredAction, steps_to_keep
from smp_runtime.comm.control import RUNTIME_CHANNEL
from smp_runtime.errors import SMPRuntimeError
from smp_runtime.pipeline.schedule.actions import TaskKind
from smp_runtime.tensors import computing_time

if TYPE_CHECKING:
    from smp_runtime.comm.control import ControlPlane
    from smp_runtime.pipeline.execution.task import Task

logger = logging.getLogger("smp")

_JOB_VARIABLE = "TRAINING_JOB_NAME"
_FOLDER_VARIABLE = "SM_OUTPUT_DATA_DIR"

#: Round trips with rank 0; the fastest of them counts.
_ROUND_TRIPS = 8

_Recorded = tuple[str, Kind, int, str, float, float]


# -- one clock for all ranks -------------------------------------------------------------------------------------


class ClockSample(NamedTuple):
    """A round trip: sent and received on the own clock, answered on the other."""

    sent: float
    answered: float
    received: float


@dataclass(frozen=True)
class SharedClock:
    """The clock and the job name that the ranks agree on before they record."""

    job: str  # names this run
    offset: float = 0.0  # seconds to add to the own clock to get rank 0's
    error: float = 0.0  # most seconds that ``offset`` can be wrong by


def estimate_offset(samples: Iterable[ClockSample]) -> tuple[float, float]:
    """Return the seconds to add to the own clock to get the other, and the largest possible error.

    The answer was given at some moment of the round trip. The middle is at most half a round trip away from it.
    So the fastest round trip is the most precise, and the others add nothing. (Cristian 1989, "Probabilistic
    clock synchronization".)

    Raises:
        SMPRuntimeError: no sample, or a clock that ran backwards.
    """
    fastest = min(samples, key=lambda sample: sample.received - sample.sent, default=None)
    if fastest is None or fastest.received < fastest.sent:
        raise SMPRuntimeError(
            f"the clocks of two ranks cannot be compared: the fastest round trip is {fastest}; a clock ran backwards or "
            "nothing was measured: record without them, SMP_TIMELINE=0"
        )
    return fastest.answered - (fastest.sent + fastest.received) / 2, (fastest.received - fastest.sent) / 2


def share_clock(
    control: ControlPlane, *, clock: Callable[[], float] = time.perf_counter, machine: str | None = None
) -> SharedClock:
    """Agree on rank 0's clock; every rank of the job calls it.

    Ranks on one machine read the same clock (``CLOCK_MONOTONIC``, also in containers), so only others measure.

    Args:
        clock: the function that returns this rank's time.
        machine: identity of this rank's machine; ranks on one machine share a clock; default:
            :func:`machine_identity`.
    """
    machine = machine_identity() if machine is None else machine
    if control.rank:
        control.send(machine, 0, RUNTIME_CHANNEL)
        job, same = control.receive(0, RUNTIME_CHANNEL)
        if same:
            return SharedClock(job)
        samples = []
        for _ in range(_ROUND_TRIPS):
            sent = clock()
            control.send(None, 0, RUNTIME_CHANNEL)
            answered = control.receive(0, RUNTIME_CHANNEL)
            samples.append(ClockSample(sent, answered, clock()))
        return SharedClock(job, *estimate_offset(samples))
    job = "-".join(part for part in (os.environ.get(_JOB_VARIABLE, ""), uuid.uuid4().hex[:12]) if part)
    for rank in range(1, control.size):
        same = control.receive(rank, RUNTIME_CHANNEL) == machine != ""
        control.send((job, same), rank, RUNTIME_CHANNEL)
        for _ in range(0 if same else _ROUND_TRIPS):
            control.receive(rank, RUNTIME_CHANNEL)
            control.send(clock(), rank, RUNTIME_CHANNEL)
    return SharedClock(job)


def machine_identity() -> str:
    """Return the same text for processes that read the same monotonic clock; empty if the kernel does not report it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    with contextlib.suppress(OSError):
        # A container may have its own time namespace, with a shifted monotonic clock.
        boot += os.readlink("/proc/self/ns/time")
    return boot


# -- recording ---------------------------------------------------------------------------------------------------


class TimelineRecorder:
    """One rank's recorder. Times are those of ``time.perf_counter``; calls come from one thread at a time.

    A segment of a task that another stage requested is an action of its kind. A segment of the step function
    may be split into several kinds: it is forward until the script begins the backward pass, backward during
    it, and the function's own afterwards.

    Args:
        keep: the number of newest steps to keep.
        folder: where the file is written automatically; with None, only :meth:`write` writes one.
        clock: the clock that the ranks agreed on.
        replica: the same for all ranks of one pipeline, another for each parallel pipeline.
        world_size: ranks of the job that record; 0 if unknown.
        within: returns whether the step that begins is recorded; by default each is. The file is written when
            one is not.
    """

    def __init__(
        self,
        stage: int,
        rank: int,
        *,
        keep: int = 10,
        folder: Path | None = None,
        clock: SharedClock | None = None,
        replica: int = 0,
        host: str = "",
        world_size: int = 0,
        within: Callable[[], bool] | None = None,
    ) -> None:
        self.stage = stage
        self.rank = rank
        self.keep = keep
        self._within = within
        self._folder = folder
        self._clock = clock or SharedClock(os.environ.get(_JOB_VARIABLE, ""))
        self._about: dict[str, Any] = {"replica": replica, "host": host, "world_size": world_size}
        self._steps: deque[tuple[int, float, float, Sequence[_Recorded], bool]] = deque(maxlen=keep)
        self._number: int | None = None
        self._start = 0.0
        #: Target of new actions. Between steps it is a queue of length 0, so that :meth:`add` needs no check.
        self._actions: list[_Recorded] | deque[_Recorded] = deque(maxlen=0)
        self._unwritten = False
        self._first_write_due = True
        #: For the step function's tasks, by microbatch: the current kind of work, and when the running segment was cut.
        self._kinds: dict[int, TaskKind] = {}
        self._cuts: dict[int, float] = {}

    def begin_step(self, number: int) -> None:
        """Begin a step; a step that has not ended, because it failed, is forgotten."""
        self._kinds.clear()
        self._cuts.clear()
        if self._within is not None and not self._within():
            self.close()
            return
        self._number = number
        self._actions = []
        self._start = computing_time.now()

    def add(self, name: str, kind: Kind, microbatch: int, path: str, start: float, stop: float) -> None:
        """Record an action. Between steps nothing is recorded.

        Args:
            name: the text in a picture, such as ``"F2 transformer.h.3"``.
            kind: "F" forward, "B" backward, "W" gradients of weights that backward has left, "S" the step
                function's own code.
            path: the module's.
            start, stop: of ``time.perf_counter()``, in seconds.
        """
        self._actions.append((name, kind, microbatch, path, start, stop))

    def segment_ended(self, task: Task, start: float, stop: float) -> None:
        """Record a task's work from ``start`` to ``stop``, in seconds of ``time.perf_counter()``."""
        if task.kind is not TaskKind.STEP:
            self.block(task.kind, task.microbatch, task.label, start, stop)
            return
        kind = self._kinds.get(task.microbatch, TaskKind.FORWARD)
        self.block(kind, task.microbatch, "", self._cuts.pop(task.microbatch, start), stop)

    def turn(self, task: Task, kind: TaskKind, at_start: bool = False) -> None:
        """Change the kind of the rest of the step function's running segment; called by the task that runs.

        Args:
            at_start: the segment has only just begun, so that no part of it is of the kind before.
        """
        if task.kind is not TaskKind.STEP:
            return
        number = task.microbatch
        before = self._kinds.get(number, TaskKind.FORWARD)
        self._kinds[number] = kind
        if not at_start and before is not kind:
            now = computing_time.now()
            self.block(before, number, "", self._cuts.get(number, task.began), now)
            self._cuts[number] = now

    def block(self, kind: TaskKind, microbatch: int, path: str, start: float, stop: float) -> None:
        """Record a module's work from ``start`` to ``stop``; ``path`` is empty for the step function's own work."""
        label = path or ("step function" if kind is TaskKind.STEP else "(model)")
        self.add(f"{kind}{microbatch} {label}", kind.value, microbatch, path, start, stop)

    def end_step(self, failed: bool = False) -> None:
        """Keep the step that has ended or failed; the oldest step is dropped if there are too many."""
        stop = computing_time.now()
        if self._number is None:
            return
        self._steps.append((self._number, self._start, stop, self._actions, failed))
        self._number = None
        self._actions = deque(maxlen=0)
        self._unwritten = True
        if self._first_write_due and len(self._steps) == self.keep:
            self._first_write_due = False
            self._write_safely()

    def close(self) -> None:
        """Write the data that has not been written, at the end of the session or of the recorded steps."""
        if self._unwritten:
            self._write_safely()

    def timeline(self) -> RankTimeline:
        """Return the recorded steps in the form of the file."""
        names: dict[str, int] = {}
        paths: dict[str, int] = {}
        steps = []
        for number, begun, ended, recorded, failed in self._steps:
            actions: list[StoredAction] = [
                (names.setdefault(name, len(names)), kind, microbatch, paths.setdefault(path, len(paths)), start, stop)
                for name, kind, microbatch, path, start, stop in recorded
            ]
            steps.append(StepTimeline(number=number, start=begun, stop=ended, actions=actions, failed=failed))
        return RankTimeline(
            job=self._clock.job,
            rank=self.rank,
            stage=self.stage,
            offset=self._clock.offset,
            offset_error=self._clock.error,
            names=list(names),
            paths=list(paths),
            steps=steps,
            **self._about,
        )

    def write(self, folder: Path) -> Path:
        """Write ``timeline-rank<N>.json`` atomically, and return its path.

        Raises:
            OSError: the folder cannot be written to.
        """
        made = self.timeline()
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / made.file_name
        partial = folder / f".{made.file_name}.{os.getpid()}"
        try:
            partial.write_text(made.model_dump_json(), encoding="utf-8")
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        self._unwritten = False
        return target

    def _write_safely(self) -> None:
        """Write the file to the folder, if there is one; an error is only logged, so that it does not end the job."""
        if self._folder is None:
            return
        try:
            self.write(self._folder)
        except Exception as error:
            logger.warning("rank %d: the timeline cannot be written to %s: %s", self.rank, self._folder, error)


def recorder_of_job(
    stage: int,
    control: ControlPlane,
    *,
    replica: int = 0,
    environ: Mapping[str, str] | None = None,
    updates: Callable[[], int] | None = None,
) -> TimelineRecorder | None:
    """Return the recorder that the environment asks for; every rank of the job calls it to agree on a clock.

    Args:
        updates: returns how many updates there have been. If it is given and ``SMP_TIMELINE`` is not set, the
            steps that ``SMP_PROFILE`` names are recorded.

    Returns:
        None if neither is set, or if ``SMP_TIMELINE`` is 0. Without ``SM_OUTPUT_DATA_DIR`` the recorder writes
            no file, since
        others may use the working directory.

    Raises:
        ConfigError: ``SMP_TIMELINE`` is not a number of steps, or ``SMP_PROFILE`` names none.
    """
    environ = os.environ if environ is None else environ
    keep, within = steps_to_keep(environ), None
    if updates is not None and not environ.get(TIMELINE_VARIABLE):
        profiled = Profile.of(environ)
        if profiled is not None:
            keep, within = MOST_STEPS, lambda: profiled.first <= updates() + 1 <= profiled.last
    if not keep:
        return None
    folder = environ.get(_FOLDER_VARIABLE)
    if not folder and control.rank == 0:
        logger.warning(
            "%s is %s, but %s is not set: the timelines have no folder to go to and are not kept; set it to one",
            TIMELINE_VARIABLE if within is None else PROFILE_VARIABLE,
            environ[TIMELINE_VARIABLE if within is None else PROFILE_VARIABLE],
            _FOLDER_VARIABLE,
        )
    return TimelineRecorder(
        stage,
        control.rank,
        keep=keep,
        folder=Path(folder) if folder else None,
        clock=share_clock(control),
        replica=replica,
        host=environ.get("SMP_HOST") or environ.get("SM_CURRENT_HOST") or socket.gethostname(),
        world_size=control.size,
        within=within,
    )
