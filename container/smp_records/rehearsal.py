"""The request of a rehearsal and its results: records that the ranks write and other tools read.

A *kind* of rank is all ranks of one pipeline stage. They differ by replica, tensor parallel rank or place in a sharding
group, and hold equally many bytes. One process stands for each kind. Sizes are bytes, counts are those of one rank,
work is FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from smp_config.errors import ConfigError, show_value
from smp_records.rate_card import RateCard  # noqa: TC001 - pydantic needs it
from smp_records.timeline import Kind  # noqa: TC001 - pydantic reads it when the class is made

#: Set to the number of ranks that are rehearsed, in the process of each kind: a script may ask for it.
REHEARSAL_VARIABLE = "SMP_REHEARSAL"

#: Raised when older files could be misread.
FORMAT_VERSION = 1

#: Types that an input may have.
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")

#: Assumed samples of a data set if its files are missing and no number is set.
STAND_IN_SAMPLES = 2**20

#: Of a size of an input.
_MOST_DIGITS = 9

_FROZEN = ConfigDict(extra="ignore", frozen=True)


class InputShape(BaseModel):
    """A tensor of the batches that stand for data which is not on this machine."""

    model_config = _FROZEN

    name: str  # of the tensor in a batch that is a dictionary; or its number in one that is a list
    shape: tuple[int, ...]  # with the batch axis, on which -1 is the loader's batch size
    dtype: str = "float32"


def input_shapes(given: Mapping[str, str]) -> list[InputShape]:
    """Return the shapes of inputs from texts by name: ``{"input_ids": "8,1024:int64"}``.

    Raises:
        ConfigError: a shape or type is impossible, or names and numbers are mixed.
    """
    found = []
    for name, text in given.items():
        sizes, _, dtype = text.partition(":")
        words = [word.strip() for word in sizes.split(",")]
        axes = [int(word) for word in words if word.removeprefix("-").isdecimal() and len(word) <= _MOST_DIGITS]
        if len(axes) != len(words) or any(axis < 1 and axis != -1 for axis in axes):
            raise ConfigError(
                f"the input shape {name!r} is {show_value(text)}; sizes are whole numbers from 1, or -1 for the loader's "
                "batch size, "
                f"and a type may follow: {name}=-1,1024:int64",
                code="SMP120",
            )
        if (dtype or "float32") not in _DTYPES:
            raise ConfigError(
                f"the input shape {name!r} has the type {show_value(dtype)}; it is one of {', '.join(_DTYPES)}: write "
                f"{name}={sizes}:int64",
                code="SMP120",
            )
        found.append(InputShape(name=name, shape=tuple(axes), dtype=dtype or "float32"))
    numbered = [one.name for one in found if one.name.isdecimal()]
    if numbered and len(numbered) < len(found):
        raise ConfigError(
            f"input shapes have names and numbers: {', '.join(given)}; a batch is a dictionary, whose tensors have names, or a "
            "list, whose tensors are numbered from 0: use one of the two",
            code="SMP120",
        )
    return found


class RehearsalRequest(BaseModel):
    """A request for a rehearsal; the runner reads it from a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hosts: int  # that the job would have
    ranks_per_host: int
    kinds: int = 1  # processes that stand for all ranks: one for each pipeline stage
    instance_type: str | None = None
    rates: RateCard | None = None  # None: those of the instance type, if they are known
    steps: int = 3  # after which the script is stopped; the last is reported
    performed_bytes: int | None = (
        None  # of an operation that is really computed, at most; None: the runtime's own limit
    )
    folder: str  # each kind writes its report there, as kind-0.json
    other_ranks: bool = False  # whether the last rank of each stage is rehearsed, too, and its calls are compared
    inputs: list[InputShape] = []  # of batches that stand for data which is not here
    stand_in_samples: int = STAND_IN_SAMPLES  # of a data set with missing files
    on_gpu: bool = True  # collectives take no buffers of their own, as those of NCCL; False: as gloo's

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the whole job."""
        return self.hosts * self.ranks_per_host


class PeakHolder(BaseModel):
    """Tensors that were alive at the peak, made at one place."""

    model_config = _FROZEN

    kind: str  # parameter, gradient, optimizer state, buffer (of collectives), activation, or other
    module: str  # path in the model; empty if no module was running
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
    kind: str  # all_reduce, broadcast, reduce_scatter, all_gather, all_to_all, or one that only the script calls
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
    """The work of a module in one step, without its children."""

    model_config = _FROZEN

    module: str
    phase: str
    dtype: str  # of most of its results' bytes
    calls: int  # operations
    flops: float
    bytes: int  # read and written
    seconds: float  # by the rates that were given


class TimedBlock(BaseModel):
    """Something that a rank computes without a wait; times in seconds since the step, or the pipeline's order, began."""

    model_config = _FROZEN

    kind: Kind
    microbatch: int
    module: str  # its path; empty for the script's own code, and for all modules of a job without a pipeline
    start: float
    stop: float


class KindReport(BaseModel):
    """One kind of rank, measured on its representative."""

    model_config = _FROZEN

    stage: int
    rank: int  # the representative's
    stands_for: int  # ranks
    parameters: int  # elements that this rank holds, of sharded ones its part
    trained_parameters: int | None = None  # of them, those that have gradients
    idle_parameters: int = 0  # of them, elements of modules that no step calls
    modules: list[str] = []  # outermost modules of this stage, at most twelve
    idle_modules: list[str] = []  # of these and those inside, what no step calls
    steps: int  # that were rehearsed
    peak_bytes: int  # in the steps after the first, which makes what stays
    peak_phase: str
    peak_module: str
    peak_line: str  # of the script, file:line; empty if none was running
    resident_bytes: int  # after the last step
    first_step_peak_bytes: int  # with the start: parameters before they are shared out lie in host memory
    classes: dict[str, int]  # bytes by kind at the peak
    holders: list[PeakHolder]  # the ten largest
    curve: MemoryOverTime
    collectives: list[CollectiveCount]
    links: list[LinkCount]
    work: list[ModuleWork]  # of the last step
    step_seconds: float  # that the rank computes in the last step, and waits for collectives
    measured_seconds: float = 0.0  # of these, seconds from durations of a timeline, not from rates
    pipeline_seconds: float | None = None  # makespan of the pipeline's planned order; on the stage that plans
    pipeline_runs: int = 1  # of that order in a step: calls of a step function that trains, as of an accumulation
    pipeline_idle: dict[int, float] = {}  # by stage, the part of it in which the stage computes nothing
    microbatch_bytes: int = 0  # that the forward pass of one microbatch made, alive together, at most
    active_microbatches: int = 1  # that may be in flight
    in_flight: dict[int, int] = {}  # by stage, the most that are in the planned order; on the stage that plans
    host_peak_bytes: int = 0  # offloaded activations that lie in main memory, at most
    reserved_bytes: int = 0  # that PyTorch's allocator would reserve on one stream, at most; 0: not counted
    pipeline_blocks: dict[int, list[TimedBlock]] = {}  # by stage, its part of that order
    blocks: list[TimedBlock] = []  # of the last step, of a job without a pipeline
    epoch_batches: int | None = None  # of the loader that is read; None if there is none, or it has no length
    step_batches: int = 0  # that a step reads of it
    step_samples: int = 0  # that a step of the whole job trains on, if its step functions reveal it
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
    def has_times(self) -> bool:
        """Return whether the report has the times of the ranks' computations."""
        if not self.step_seconds:
            return False
        return any(kind.pipeline_blocks or kind.blocks for kind in self.kinds)

    @property
    def samples_per_second(self) -> float | None:
        """Return the samples per second of the whole job, or None if a step's samples or its time are not known."""
        samples = self.kinds[0].step_samples
        return samples / self.step_seconds if samples and self.step_seconds else None

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step.

        They are the pipeline's makespan, as often as it runs, and the slowest stage's work besides.
        """
        planned = next((kind for kind in self.kinds if kind.pipeline_seconds), None)
        if planned is None or planned.pipeline_seconds is None:
            return max(kind.step_seconds for kind in self.kinds)
        makespan = planned.pipeline_runs * planned.pipeline_seconds
        longest = 0.0  # work of a stage outside the pipeline's runs
        for kind in self.kinds:
            idle = planned.pipeline_idle.get(kind.stage, 0.0)
            busy = makespan * (1 - idle)
            longest = max(longest, kind.step_seconds - busy)
        return makespan + longest

    def most_bytes(self, kind: KindReport) -> int:
        """Return the most bytes that a stage holds if its microbatches run in another order than the planned one.

        The order of a job is planned from what its work takes there. However it comes out, no more microbatches are in
        flight than may be active.
        """
        planned = next((one.in_flight for one in self.kinds if one.in_flight), {})
        more = kind.active_microbatches - planned.get(kind.stage, kind.active_microbatches)
        return kind.peak_bytes + max(0, more) * kind.microbatch_bytes


class Failure(BaseModel):
    """The reason why a kind could not go on."""

    model_config = _FROZEN

    stage: int
    rank: int
    error: str  # class and words
    line: str = ""  # of the script
    is_last: bool = False  # it stood for the last rank of its stage, and the first ones came through
    is_of_all: bool = False  # ranks differ from one another
    kinds_needed: int | None = None  # set if the script has chosen another pipeline parallel degree than requested


def read_request(path: Path) -> RehearsalRequest:
    """Return the request that a runner was given.

    Raises:
        ConfigError: the file has no request.
    """
    try:
        return RehearsalRequest.model_validate_json(path.read_bytes())
    except OSError as error:
        said = str(error.strerror)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        said = f"{first['msg']} at {'.'.join(map(str, first['loc']))}"
    raise ConfigError(f"{path} is no request of a rehearsal: {said}; smp-estimator rehearse writes one", code="SMP120")
