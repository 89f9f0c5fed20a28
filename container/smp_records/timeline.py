"""The timeline of a pipeline job: the record that each rank writes of its steps, and how the notebook side reads it.

One file per rank. Times are seconds of that rank's own monotonic clock; ``offset`` brings them to the clock of rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from smp_config.errors import ConfigError, show_value

#: Switches recording on: the number of steps that every rank keeps.
TIMELINE_VARIABLE = "SMP_TIMELINE"

#: ``timeline-rank3.json`` in the job's output data.
FILE_PREFIX = "timeline-rank"
FILE_SUFFIX = ".json"

#: Raised when files of an older version could be misread.
FORMAT_VERSION = 1

#: Of a number of steps.
_MOST_DIGITS = 9

Kind = Literal["F", "B", "W", "S"]

#: Index of the name, kind, microbatch, index of the module path, start and stop.
StoredAction = tuple[int, Kind, int, int, float, float]


class StepTimeline(BaseModel):
    """One step of one rank; ``start`` and ``stop`` are those of the call, actions lie between them.

    ``failed``: whether it ended with an error; files of older versions do not have it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    number: int
    start: float
    stop: float
    actions: list[StoredAction]
    failed: bool = False


class RankTimeline(BaseModel):
    """The recording of one rank.

    Attributes:
        job: the same text on every rank of one run, and on no other run's.
        replica: ranks of one pipeline have the same number; pipelines that run side by side differ.
        world_size: ranks of the job that record; 0 if unknown.
        offset: seconds to add to this rank's times to get those of rank 0's clock.
        offset_error: most seconds that ``offset`` can be wrong by.
        names, paths: tables that actions refer to by index.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int = FORMAT_VERSION
    job: str
    rank: int
    stage: int
    replica: int = 0
    host: str = ""
    world_size: int = 0
    offset: float = 0.0
    offset_error: float = 0.0
    names: list[str]
    paths: list[str]
    steps: list[StepTimeline]

    @model_validator(mode="after")
    def _is_whole(self) -> RankTimeline:
        names, paths = range(len(self.names)), range(len(self.paths))
        for step in self.steps:
            for name, _, _, path, start, stop in step.actions:
                if name not in names or path not in paths:
                    raise ValueError(f"step {step.number} refers to a name that the file does not hold")
                # False for NaN too.
                is_span = -math.inf < start <= stop < math.inf
                if not is_span:
                    raise ValueError(f"step {step.number} has an action from {start} to {stop}")
        return self

    @property
    def file_name(self) -> str:
        """Return the name of the rank's file."""
        return f"{FILE_PREFIX}{self.rank}{FILE_SUFFIX}"


def parse_timeline(text: str | bytes, where: str) -> RankTimeline:
    """Read a rank's file; ``where`` is its name, for messages.

    Raises:
        ConfigError: it is broken, or of a version that this one does not know.
    """
    try:
        found = RankTimeline.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{where} is no timeline of a rank: {first['msg']}{f' at {place}' if place else ''}; it has {len(text)} characters "
            "and may have been cut or edited: fetch it again, or take it out of the folder to read the others",
            code="SMP106",
        ) from None
    if found.version > FORMAT_VERSION:
        raise ConfigError(
            f"{where} has format {found.version}, this package reads up to {FORMAT_VERSION}; the job ran a newer version: "
            "read it with that one (pip install --upgrade smp-estimator)",
            code="SMP106",
        )
    return found


def steps_to_keep(environ: Mapping[str, str]) -> int:
    """Return how many steps a rank keeps, by ``SMP_TIMELINE``, or 0 if recording is off.

    Raises:
        ConfigError: the value is no number.
    """
    text = environ.get(TIMELINE_VARIABLE, "").strip()
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > _MOST_DIGITS:
        raise ConfigError(
            f"{TIMELINE_VARIABLE} is {show_value(text)}; it counts the steps of which every rank keeps its timeline: set it "
            "to a whole "
            "number such as 10, or to 0 to record nothing",
            code="SMP106",
        )
    return int(text)
