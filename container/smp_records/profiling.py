"""The steps of a training that PyTorch's profiler records, and the files that ranks write. Both sides read this alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from smp_config.errors import ConfigError, show_value
from smp_config.limits import MOST_RANKS

#: ``steps=10-12``, and any of ``memory``, ``shapes``, ``stacks`` and ``ranks=0/3``, joined by commas; nothing or 0 for no profile.
VARIABLE = "SMP_PROFILE"

#: ``profile-rank00003.json.gz`` in the job's output data, and the content of the GPU's memory.
FILE_PREFIX, FILE_SUFFIX, MEMORY_SUFFIX = "profile-rank", ".json.gz", ".memory.pickle"
#: Name of the moments in a trace that were also read on the rank's own clock; behind it stands which one it is.
CLOCK_MARK = "smp clock "
#: Key of a trace's description of its rank.
ABOUT = "smp"

#: That are profiled at once.
MOST_STEPS = 1_000
_LAST_STEP = 10**12


@dataclass(frozen=True)
class Profile:
    """A request for profiles.

    Attributes:
        first: first profiled step, as the number of its update, counted from 1.
        last: last profiled step, counted the same way.
        memory: whether allocations are recorded; on a GPU also which lines of code hold its memory.
        shapes: whether shapes of the arguments of operations are recorded.
        stacks: whether the lines of Python that have called the operations are recorded.
        ranks: ranks that are profiled; empty for all.
    """

    first: int
    last: int
    memory: bool = False
    shapes: bool = False
    stacks: bool = False
    ranks: tuple[int, ...] = ()

    def takes(self, rank: int) -> bool:
        """Return whether a rank is profiled."""
        return not self.ranks or rank in self.ranks

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Profile | None:
        """Return the profile that the environment asks for, or None if it asks for none.

        Raises:
            ConfigError: a word is unknown, or a number is out of its range.
        """
        text = environ.get(VARIABLE, "")
        if text in ("", "0"):
            return None
        steps: tuple[int, int] | None = None
        flags: set[str] = set()
        ranks: tuple[int, ...] = ()
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = word.partition("=")
            if (found := re.fullmatch(r"(?:steps=)?(\d{1,12})(?:-(\d{1,12}))?", word)) is not None:
                steps = int(found[1]), int(found[2] or found[1])
            elif word in ("memory", "shapes", "stacks"):
                flags.add(word)
            elif name == "ranks" and re.fullmatch(r"\d{1,6}(/\d{1,6})*", value):
                ranks = tuple(sorted({int(rank) for rank in value.split("/")}))
            else:
                raise _refusal(text, f"{show_value(word)} is unknown")
        if steps is None:
            raise _refusal(text, "the steps are missing")
        first, last = steps
        if not 1 <= first <= last <= _LAST_STEP or last - first >= MOST_STEPS:
            raise _refusal(text, f"steps {first} to {last} are no window of 1 to {MOST_STEPS:,} steps from 1 on")
        if any(rank >= MOST_RANKS for rank in ranks):
            raise _refusal(text, f"no job has rank {max(ranks)}")
        return cls(first, last, "memory" in flags, "shapes" in flags, "stacks" in flags, ranks)


def _refusal(text: str, what: str) -> ConfigError:
    return ConfigError(
        f"{VARIABLE} is {show_value(text)}, and {what}; it says which steps PyTorch's profiler records: write steps=10-12, "
        "and behind "
        "a comma each memory, shapes, stacks or ranks=0/3",
        code="SMP122",
    )


_Finite = Annotated[float, Field(allow_inf_nan=False)]


class About(BaseModel):
    """The rank that a trace belongs to, and its clock."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    job: str = Field(max_length=300)
    rank: int = Field(ge=0, lt=MOST_RANKS)
    stage: int = Field(ge=0, lt=MOST_RANKS)
    host: str = Field(default="", max_length=300)
    first: int = 0
    last: int = 0
    offset: float = Field(default=0.0, allow_inf_nan=False)  # seconds to add to the own clock to get rank 0's
    offset_error: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    #: Of each mark, the own clock before and after its beginning.
    marks: list[tuple[_Finite, _Finite]] = Field(min_length=1, max_length=64)


def file_name(rank: int) -> str:
    """Return the name of the file with a rank's trace."""
    return f"{FILE_PREFIX}{rank:05}{FILE_SUFFIX}"
