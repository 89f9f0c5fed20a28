"""What a rehearsal is asked for, and what it has counted: the records that the ranks write and other tools read.

A *kind* of rank is all ranks of one pipeline stage: they differ by replica, tensor parallel rank or place in a sharding group, and
hold equally many bytes. One process stands for each kind. Sizes are bytes, counts are those of one rank, work is FLOPs.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from smp_config.errors import ConfigError

#: Set to the number of ranks that are rehearsed, in the process of each kind: a script may ask for it.
REHEARSAL_VARIABLE = "SMP_REHEARSAL"

#: Raised when older files could be misread.
FORMAT_VERSION = 1

_FROZEN = ConfigDict(extra="ignore", frozen=True)


class RehearsalRequest(BaseModel):
    """What is rehearsed; the runner reads it from a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hosts: int  # that the job would have
    ranks_per_host: int
    kinds: int = 1  # processes that stand for all ranks: one for each pipeline stage
    instance_type: str | None = None
    steps: int = 3  # after which the script is stopped; the last is reported
    performed_bytes: int | None = (
        None  # of an operation that is really computed, at most; None: the runtime's own limit
    )
    folder: str  # where each kind leaves its report, kind-0.json
    on_gpu: bool = True  # collectives take no buffers of their own, as those of NCCL; False: as gloo's

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.hosts * self.ranks_per_host


class Holder(BaseModel):
    """Tensors that were alive at the peak, made at one place."""

    model_config = _FROZEN

    kind: str  # parameter, gradient, optimizer state, buffer (of collectives), activation, or other
    module: str  # path in the model; empty where no module was running
    phase: str  # start, forward, backward, update or outside
    operation: str  # that made them
    count: int  # storages
    bytes: int


class MemoryOverTime(BaseModel):
    """Bytes alive in the last step, from each time on."""

    model_config = _FROZEN

    seconds: list[float]  # since the step began, by the clock of the rehearsal
    owners: dict[str, list[int]]  # by kind as of a holder, a size for each time


class CollectiveCount(BaseModel):
    """Collectives of one sort in one step of one rank."""

    model_config = _FROZEN

    step: int  # from 0; -1 before the first
    phase: str
    kind: str  # all_reduce, broadcast, reduce_scatter, all_gather, all_to_all, or what a script calls itself
    group: str  # world, dp, rdp, tp, …
    ranks: int  # of the group
    hosts: int  # that it reaches over
    calls: int
    payload_bytes: int  # of the whole tensor: the result of an all-gather, the argument of the others
    sent_bytes: int  # by this rank, with an algorithm that sends least
    messages: int  # by this rank, in a ring


class LinkCount(BaseModel):
    """Messages to another pipeline stage in one step."""

    model_config = _FROZEN

    step: int
    stage: int  # that receives
    same_host: bool
    messages: int
    tensor_bytes: int


class ModuleWork(BaseModel):
    """What a module does in one step, without its children."""

    model_config = _FROZEN

    module: str
    phase: str
    dtype: str  # of most of its results' bytes
    calls: int  # operations
    flops: float
    bytes: int  # read and written
    seconds: float  # by the rates that were given


class KindReport(BaseModel):
    """One kind of rank, measured on its representative."""

    model_config = _FROZEN

    stage: int
    rank: int  # the representative's
    stands_for: int  # ranks
    parameters: int  # elements that this rank holds
    trained_parameters: int | None = None  # of them, those that have gradients
    steps: int  # that were rehearsed
    peak_bytes: int  # in the steps after the first, which makes what stays
    peak_phase: str
    peak_module: str
    peak_line: str  # of the script, file:line; empty where none was running
    resident_bytes: int  # after the last step
    first_step_peak_bytes: int  # with the start: parameters before they are shared out lie in host memory
    classes: dict[str, int]  # bytes by kind at the peak
    holders: list[Holder]  # the ten largest
    curve: MemoryOverTime
    collectives: list[CollectiveCount]
    links: list[LinkCount]
    work: list[ModuleWork]  # of the last step
    step_seconds: float  # that the rank computes in the last step, and waits for collectives
    pipeline_seconds: float | None = None  # makespan of the pipeline's planned order; on the stage that plans
    pipeline_idle: dict[int, float] = {}  # by stage, the part of it in which the stage computes nothing
    process_bytes: int = 0  # resident memory of the process that rehearsed it, at most


class Rehearsal(BaseModel):
    """A whole rehearsal; ``--json`` writes it."""

    model_config = _FROZEN

    version: int = FORMAT_VERSION
    request: RehearsalRequest
    mp_parameters: dict[str, object]
    kinds: list[KindReport]
    seconds: float  # that the rehearsal took

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: the pipeline's makespan, and what the slowest stage does before and after it."""
        planned = next((kind for kind in self.kinds if kind.pipeline_seconds), None)
        if planned is None or planned.pipeline_seconds is None:
            return max(kind.step_seconds for kind in self.kinds)
        makespan = planned.pipeline_seconds
        busy = {kind.stage: makespan * (1 - planned.pipeline_idle.get(kind.stage, 0.0)) for kind in self.kinds}
        return makespan + max(0.0, *(kind.step_seconds - busy[kind.stage] for kind in self.kinds))


class Failure(BaseModel):
    """Why a kind could not go on."""

    model_config = _FROZEN

    stage: int
    rank: int
    error: str  # class and words
    line: str = ""  # of the script
    kinds_needed: int | None = None  # the script has set another pipeline parallel degree than was said


def read_request(path: Path) -> RehearsalRequest:
    """The request that a runner was given.

    Raises:
        ConfigError: the file does not hold one.
    """
    try:
        return RehearsalRequest.model_validate_json(path.read_bytes())
    except OSError as error:
        said = str(error.strerror)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        said = f"{first['msg']} at {'.'.join(map(str, first['loc']))}"
    raise ConfigError(f"{path} is no request of a rehearsal: {said}; smp-estimator rehearse writes one")
