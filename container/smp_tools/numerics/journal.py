"""A rank's file of numbers: sketches wait on their device, and are brought and written together, once per step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from smp_records.numerics import (
    FILE_PREFIX,
    FILE_SUFFIX,
    PROJECTIONS,
    Head,
    RecordedMoment,
    RecordedValue,
    head_line,
    moment_line,
)
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
    from smp_tools.numerics.sketch import Sketch


class ValueOwner(NamedTuple):
    """The owner of a tensor's numbers; the fields are those of :class:`~smp_records.numerics.RecordedValue`."""

    phase: str
    name: str
    nth: int = 0
    microbatch: int | None = None
    owner: int | None = None
    part: str = ""


class _PendingValue(NamedTuple):
    place: ValueOwner
    sketch: Sketch
    factor: float
    time: float


class Journal:
    """Appends to a rank's file; a reader sees whole lines at any time.

    Args:
        folder: is made where it does not exist.

    Raises:
        SMPUserError: nothing can be written there.
    """

    def __init__(self, folder: Path, head: Head) -> None:
        self.path = folder / f"{FILE_PREFIX}{head.rank:05}{FILE_SUFFIX}"
        self._waiting: list[_PendingValue] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_cut = self.path.exists() and not _ends_a_line(self.path)
            self._file = self.path.open("a", encoding="utf-8")
            # A start that was killed may have left an incomplete line. A reader must not take it for a whole one.
            if is_cut:
                os.truncate(self.path, _whole_lines(self.path))
            self._write(head_line(head))
        except OSError as error:
            raise SMPUserError(
                f"rank {head.rank} cannot record numbers in {folder} ({error.strerror or error}); it was given by "
                "SMP_RECORD_NUMERICS or smp.record_numerics: give a folder that all ranks can write into",
                code="SMP317",
            ) from error

    def begin(self, head: Head) -> None:
        """Write a new head line, because the rank has a new place from now on."""
        self._write(head_line(head))

    def add(self, place: ValueOwner, sketch: Sketch, factor: float = 1.0) -> None:
        """Note a tensor's numbers; ``factor`` is what the tensor must be multiplied with to compare it with other jobs."""
        self._waiting.append(_PendingValue(place, sketch, factor, time.time()))

    @property
    def is_empty(self) -> bool:
        """Return whether no numbers are waiting."""
        return not self._waiting

    def drop(self) -> None:
        """Forget what waits."""
        self._waiting = []

    def flush(self, step: int, call: int, random: str = "") -> list[RecordedValue]:
        """Write the waiting numbers as one line, and return them; waits for the device once."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return []
        values = list(_values(waiting))
        self._write(moment_line(RecordedMoment(step, call, values, random)))
        return values

    def close(self) -> None:
        """Write nothing more."""
        self._file.close()

    def _write(self, line: str) -> None:
        self._file.write(line)
        # At once: a rank may be killed at any moment, and its last numbers are those of interest.
        self._file.flush()


def _values(waiting: Iterable[_PendingValue]) -> Iterable[RecordedValue]:
    waiting = list(waiting)
    # One copy from each device, since every copy waits for the device.
    by_device: dict[torch.device, list[_PendingValue]] = {}
    for one in waiting:
        by_device.setdefault(one.sketch.numbers.device, []).append(one)
    found: dict[int, tuple[list[float], int]] = {}
    for group in by_device.values():
        lengths = [one.sketch.numbers.numel() for one in group]
        numbers = torch.cat([one.sketch.numbers for one in group]).cpu().split(lengths)
        bits = torch.cat([one.sketch.bits for one in group]).tolist()
        found.update({id(one): (part.tolist(), bit) for one, part, bit in zip(group, numbers, bits, strict=True)})
    for one in waiting:
        numbers_of, bit = found[id(one)]
        projections = numbers_of[2 : 2 + PROJECTIONS]
        yield RecordedValue(
            *one.place,
            dtype=one.sketch.dtype,
            columns=one.sketch.columns,
            elements=one.sketch.elements,
            square=numbers_of[0] * one.factor**2,
            greatest=numbers_of[1] * one.factor,
            bits=bit % 2**64,
            projections=tuple(number * one.factor for number in projections),
            small=tuple(map(int, numbers_of[2 + PROJECTIONS :])),
            time=round(one.time, 6),
        )


def part_name(region: TensorRegion) -> str:
    """Return text that names a region's elements in the whole tensor; the text is empty for all elements."""
    if region.axis is None and region.is_slice:
        return ""
    cuts = "" if region.axis is None else f"axis {region.axis}: {','.join(map(str, region.cuts))}"
    return cuts if region.is_slice else f"{cuts}[{region.first}:{region.last}]"


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        if not file.tell():
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _whole_lines(path: Path) -> int:
    """Return the number of bytes up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1
