"""Records that ranks write of the numbers of a training, one file each, and the variables that order them.

Both sides read this. A file is lines of JSON that are only appended. Each start of the job, and each change of its
degrees, begins with a :class:`Head`. Every other line has a :class:`RecordedMoment` of a step, with the
:class:`RecordedValue` of each tensor as a list in the order of the fields. A line that is being written has no end
yet, and is not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from smp_config.errors import ConfigError, show_value
from smp_config.formats.strict_json import replace_non_finite
from smp_config.formats.values import parse_count, parse_number
from smp_config.limits import MOST_EVERY, MOST_RANKS

#: Folder of the records, or 1 for ``numerics`` in the job's output; nothing or 0 for no records.
VARIABLE = "SMP_RECORD_NUMERICS"
#: Updates from one recorded step to the next.
EVERY_VARIABLE = "SMP_RECORD_NUMERICS_EVERY"
DEFAULT_EVERY = 10
#: Comparisons that stop a job: ``finite``, ``spike=10``, ``replicas=100``, joined by commas.
GUARDS_VARIABLE = "SMP_NUMERICS_GUARDS"
#: Set by ``smp-estimator verify`` for the two runs that it compares; a JSON object, the fields of :class:`Trial`.
TRIAL_VARIABLE = "SMP_NUMERICS_TRIAL"
#: Set by ``smp-estimator diff --bisect`` for the two runs that it repeats; a JSON object, the fields of :class:`Closeup`.
CLOSEUP_VARIABLE = "SMP_NUMERICS_CLOSEUP"
#: ``closeup-rank00003.jsonl`` describes the content of the files ``closeup-rank00003-00017.npy`` beside it.
CLOSEUP_PREFIX = "closeup-rank"

#: ``numerics-rank00003.jsonl`` in the folder.
FILE_PREFIX, FILE_SUFFIX = "numerics-rank", ".jsonl"
#: Raised when files of an older version could be misread.
FORMAT_VERSION = 1

#: Random directions onto which each tensor is projected.
PROJECTIONS = 8
#: Gradients below these parts of their root mean square are counted: an adaptive optimizer turns their rounding into updates.
SMALL = (1e-5, 1e-3, 1e-1)

#: The phases of a step in the order in which one causes the next.
WEIGHT, BUFFER, INPUT, OUTPUT, LOSS = "weight", "buffer", "input", "output", "loss"
OUTPUT_GRADIENT, GRADIENT, LOSS_SCALE, UPDATE = "output gradient", "gradient", "loss scale", "update"
PHASES = (WEIGHT, BUFFER, INPUT, OUTPUT, LOSS, OUTPUT_GRADIENT, LOSS_SCALE, GRADIENT, UPDATE)

#: Axes of the degrees of a job.
_AXES = {"pp", "tp", "rdp", "sharded"}
#: Only of jobs with context parallelism.
_MORE_AXES = {"cp"}
#: Of a tensor, and of steps.
_MOST_ELEMENTS = 2**62

#: A result's tensor has the number of the call times this plus its place in the result.
NUMBERS_OF_CALL = 100

#: Half the distance from 1 to the next number.
ROUNDING = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "complex128": 2.0**-53,
    "complex64": 2.0**-24,
    "complex32": 2.0**-11,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
}


class RecordedValue(NamedTuple):
    """One tensor, or the part of it that a rank has, as numbers that add up over parts, microbatches and replicas."""

    phase: str
    name: str  # of the module, parameter or buffer, as in the script's model
    nth: int  # which call of the module in the microbatch, or which tensor of a result of several (100 × call + tensor)
    microbatch: int | None
    owner: int | None  # reader of its batch, counted among the ranks that read different ones; None without a batch
    part: str  # which elements of the whole tensor these are; two ranks with the same part have copies
    dtype: str
    columns: int  # length of the last axis, of the whole tensor
    elements: int  # in this part
    square: float  # sum of squares
    greatest: float  # absolute value
    bits: int  # of updates: change of the sum of the elements' bits, as whole numbers modulo 2^64; else 0
    projections: tuple[float, ...]  # onto random directions that depend on the place in the whole tensor alone
    small: tuple[int, ...]  # of gradients: elements that are not 0 below the parts ``SMALL`` of the root mean square
    time: float  # seconds since the epoch, of this rank's clock

    @property
    def is_finite(self) -> bool:
        """Return whether all elements are finite."""
        return math.isfinite(self.square) and all(map(math.isfinite, self.projections))


@dataclass(frozen=True)
class Head:
    """The place of a rank in its job, and the settings of its record."""

    numerics: int  # version of the format
    rank: int
    world: int
    degrees: dict[str, int]  # by axis: pp, tp, rdp, sharded, and cp if it is above 1
    place: dict[str, int]  # this rank's coordinates on pp, tp, rdp
    microbatches: int
    owners: int  # ranks that read different batches
    every: int
    rounding: float  # of matrix products on this device, if it is coarser than the type's; else 0
    projections: int = PROJECTIONS
    restart: int = 0  # how often the ranks were started before
    start: dict[str, Any] = field(default_factory=dict)  # how the script was started, the fields of :class:`Start`
    was_pipeline: bool = False  # at these degrees or at some that the job had before :func:`smp.reshape`
    is_plain: bool = False  # of a script without this library


@dataclass(frozen=True)
class RecordedMoment:
    """The values of one call of a step, or of an update."""

    step: int  # updates before it, those of former starts too
    call: int  # calls of a step since the last update
    values: list[RecordedValue]
    random: str = ""  # digest of the states of the generators when the step began


_Made = TypeVar("_Made")


def _from_variable(made: type[_Made], environ: Mapping[str, str], name: str, command: str) -> _Made | None:
    """Return an object from a variable that a command sets, or None if it is not set.

    Raises:
        ConfigError: the value is no such object.
    """
    text = environ.get(name)
    if not text:
        return None
    try:
        return made(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{name} is {show_value(text)} ({error}); {command} sets it for its own runs: unset it", code="SMP119"
        ) from None


@dataclass(frozen=True)
class Trial:
    """The settings of a run of ``smp-estimator verify``, beside recording.

    Attributes:
        steps: updates after which every rank ends the script, with exit code 0.
        seed: seed of all generators when ``smp.init()`` returns.
        save: folder into which the arguments of steps are written; empty for none.
        replay: folder from which they are taken; empty for the script's own.
    """

    steps: int = 3
    seed: int = 0
    save: str = ""
    replay: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Trial | None:
        """Return the trial that the environment sets, or None if it sets none.

        Raises:
            ConfigError: the value is no trial.
        """
        return _from_variable(cls, environ, TRIAL_VARIABLE, "smp-estimator verify")

    def to_text(self) -> str:
        """Return the trial as text for the variable."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Start:
    """The start of the script of a recorded run, so that it can be run again.

    Attributes:
        script: its file; empty if ranks run no file.
        words: its own command line.
        directory: folder in which it was started.
        parameters: parameters of the model parallel library.
        checkpoints: folder of its checkpoints, if the job had one.
        trial: the value of :data:`TRIAL_VARIABLE`.
    """

    script: str = ""
    words: list[str] = field(default_factory=list)
    directory: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    checkpoints: str = ""
    trial: str = ""

    @classmethod
    def of(cls, head: Head) -> Start:
        """Return how the script of a rank was started, from the rank's head.

        Raises:
            ConfigError: the head records something else.
        """
        found = {each.name: head.start[each.name] for each in fields(cls) if each.name in head.start}
        made = cls(**found)
        texts = (made.script, made.directory, made.checkpoints, made.trial)
        is_right = isinstance(made.words, list) and isinstance(made.parameters, dict)
        if not is_right or not all(isinstance(text, str) for text in (*texts, *made.words)):
            raise ConfigError(
                f"the first line of rank {head.rank} says {show_value(head.start)} of how its script was started, which is no "
                "command: "
                "record the run again",
                code="SMP119",
            )
        return made


@dataclass(frozen=True)
class Closeup:
    """The part of a repeated run that is kept whole.

    Attributes:
        step: updates before it; the script ends behind the update that follows.
        module: the module, in the script's names. All of its tensors are kept.
        folder: folder for the files.
    """

    step: int
    module: str
    folder: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Closeup | None:
        """Return the close-up that the environment sets, or None if it sets none.

        Raises:
            ConfigError: the value is no close-up.
        """
        return _from_variable(cls, environ, CLOSEUP_VARIABLE, "smp-estimator diff --bisect")

    def to_text(self) -> str:
        """Return the close-up as text for the variable."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class KeptTensor:
    """A tensor in a file of a close-up, or this rank's part of one.

    Attributes:
        phase: like ``name``, ``nth``, ``microbatch`` and ``owner``, as in a :class:`RecordedValue`.
        call: calls of a step since the last update.
        shape: shape of the whole tensor; for a batch, that of this microbatch.
        axis: axis along which the rank has a part; None if it has all of it.
        cuts: start and stop of that part, or of each of the runs that it joins.
        flat: first and last element (exclusive) of the flattened part that the file has.
        heads: number of attention heads in the module, if the module has that number.
        file: name of the file beside the index.
    """

    phase: str
    name: str
    nth: int
    microbatch: int | None
    owner: int | None
    call: int
    rank: int
    dtype: str
    shape: list[int]
    axis: int | None
    cuts: list[int]
    flat: list[int]
    heads: int
    file: str


@dataclass(frozen=True)
class Guards:
    """The checks of ranks before each update.

    Attributes:
        finite: whether loss and gradients must be finite numbers.
        spike: times the median of the last steps that loss or gradient norm may be; None for no limit.
        replicas: updates from one comparison of replicas to the next; None for none.
    """

    finite: bool = False
    spike: float | None = None
    replicas: int | None = None

    @classmethod
    def of(cls, text: str) -> Guards:
        """Parse the words of the variable.

        Raises:
            ConfigError: a word is unknown, or a number is out of its range.
        """
        finite, spike, replicas = False, None, None
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, _, number = word.partition("=")
            limit = parse_number(number) if name == "spike" else None
            count = parse_count(number, MOST_EVERY) if name == "replicas" else None
            if word == "finite":
                finite = True
            elif limit is not None and limit > 1:
                spike = limit
            elif count is not None:
                replicas = count
            else:
                raise ConfigError(
                    f"{GUARDS_VARIABLE} is {show_value(text)}, of which {show_value(word)} is unknown; it says what is "
                    "checked before each "
                    "update: write finite, spike=10 (times the median, more than 1) and replicas=100 (updates between two "
                    f"comparisons, 1 to {MOST_EVERY:,}), joined by commas",
                    code="SMP119",
                )
        return cls(finite, spike, replicas)


def every_steps(environ: Mapping[str, str]) -> int:
    """Return how many updates lie between two recorded steps.

    Raises:
        ConfigError: the value is no such number.
    """
    text = environ.get(EVERY_VARIABLE, "") or str(DEFAULT_EVERY)
    count = parse_count(text, MOST_EVERY)
    if count is None:
        raise ConfigError(
            f"{EVERY_VARIABLE} is {show_value(text)}; it says how many updates lie between two recorded steps: set a whole "
            "number from "
            f"1 to {MOST_EVERY:,}",
            code="SMP119",
        )
    return count


def head_line(head: Head) -> str:
    """Return the line of a file for a head."""
    return json.dumps(asdict(head)) + "\n"


def moment_line(moment: RecordedMoment) -> str:
    """Return the line of a file for a moment.

    JSON has no numbers that are not finite, so these are texts.
    """
    values = [replace_non_finite(value) for value in moment.values]
    return (
        json.dumps(
            {"step": moment.step, "call": moment.call, "random": moment.random, "values": values}, separators=(",", ":")
        )
        + "\n"
    )


def parse(lines: Iterable[str], name: str) -> tuple[Head, list[RecordedMoment]]:
    """Read a rank's file; of several starts that have recorded the same step, the last one counts.

    Args:
        lines: with their ends; a last one without is being written, and left out.
        name: of the file, for messages.

    Raises:
        ConfigError: it is no such file, or of another version.
    """
    head: Head | None = None
    moments: list[RecordedMoment] = []
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            content = json.loads(line)
            if "numerics" in content:
                head = _head(content, name)
                continue
            moments.append(
                RecordedMoment(
                    _number_of(content["step"]),
                    _number_of(content["call"]),
                    [_value(item) for item in content["values"]],
                    str(content["random"]),
                )
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{name} is no record of numerics: line {number} holds {show_value(line[:60])} ({type(error).__name__}: "
                f"{str(error)[:200]}); name a folder that a job with {VARIABLE} has written",
                code="SMP119",
            ) from None
    if head is None:
        raise ConfigError(
            f"{name} has no first line that says which rank wrote it; name a folder of a job with {VARIABLE}",
            code="SMP119",
        )
    return head, moments


def _number_of(given: Any) -> int:
    if not _is_count(given, _MOST_ELEMENTS):
        raise ValueError(f"number {show_value(given)}")
    return int(given)


def _head(content: Mapping[str, Any], name: str) -> Head:
    head = Head(**{field.name: content[field.name] for field in fields(Head) if field.name in content})
    if head.numerics != FORMAT_VERSION:
        raise ConfigError(
            f"{name} has version {show_value(head.numerics)} of the format, and this release reads {FORMAT_VERSION}; read it "
            "with the "
            "release that has written it",
            code="SMP119",
        )
    numbers = (head.rank, head.world, head.microbatches, head.owners, *head.degrees.values(), *head.place.values())
    if not all(_is_count(number, MOST_RANKS) for number in numbers) or not head.rank < head.world:
        raise ValueError(f"rank {head.rank} of {head.world}")
    has_axes = set(head.degrees) >= _AXES and set(head.degrees) <= _AXES | _MORE_AXES
    if not has_axes or not isinstance(head.rounding, float | int):
        raise ValueError("other degrees than " + ", ".join(sorted(_AXES)))
    return head


def _value(item: list[Any]) -> RecordedValue:
    value = RecordedValue(*item)
    texts = (value.phase, value.name, value.part, value.dtype)
    counts = (value.nth, value.columns, value.elements, *value.small)
    optional = (number for number in (value.microbatch, value.owner) if number is not None)
    if value.phase not in PHASES or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"phase {show_value(value.phase)}")
    if not all(_is_count(number, _MOST_ELEMENTS) for number in (*counts, *optional)):
        raise ValueError(f"counts of {show_value(value.name)}")
    if len(value.projections) != PROJECTIONS or not isinstance(value.bits, int):
        raise ValueError(f"{len(value.projections)} projections of {show_value(value.name)}")
    return value._replace(
        square=float(value.square),
        greatest=float(value.greatest),
        projections=tuple(map(float, value.projections)),
        small=tuple(value.small),
        time=float(value.time),
    )


def _is_count(number: Any, most: int) -> bool:
    if isinstance(number, bool) or not isinstance(number, int):
        return False
    return 0 <= number <= most
