"""The newest state that all ranks of a job have in shared memory, found and read after a restart in place."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smp_config.recovery import FOLDER_VARIABLE, restart_count
from smp_config.whereabouts import here
from smp_runtime.checkpoint.files.manifest import FileRecord, FoundCheckpoint, Manifest, OptimizerRecord
from smp_runtime.checkpoint.files.reader import CheckpointReader
from smp_runtime.checkpoint.files.whole_file import UNREADABLE
from smp_runtime.checkpoint.memory.host_folder import (
    Data,
    Generation,
    Slot,
    generations_of,
    head_path,
    of_rank,
    unpacked,
    with_tensors,
)
from smp_runtime.checkpoint.save_partial import Described, Report, merge

if TYPE_CHECKING:
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")

#: In the place of a checksum: what lies in memory has none.
_NO_CHECKSUM = "0" * 64


@dataclass(frozen=True)
class _Part:
    """What one rank has of a generation, but its data."""

    head: dict[str, Any]
    report: Report
    described: Described | None

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(
            Slot(offset, tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
            for offset, shape, dtype in self.head["slots"]
        )

    @classmethod
    def of(cls, raw: tuple[bytes, str]) -> _Part:
        """From the content of its two files."""
        head, told = unpacked(raw[0]), json.loads(raw[1])
        described = told.get("described")
        if described is not None:
            optimizer = described["optimizer"]
            described["optimizer"] = None if optimizer is None else OptimizerRecord(**optimizer)
        report = Report.from_json(told["report"])
        report.files = {name: FileRecord(0, _NO_CHECKSUM) for name in (*head["files"], *head["texts"])}
        return cls(head, report, None if described is None else Described(**described))


class MemoryReader(CheckpointReader):
    """Reads tensors where ranks have left them in this host's memory.

    Args:
        folder: with the files of the whole job.
        parts: of all ranks.
        data: by rank, the file with its tensors; only those on this host are there.
    """

    def __init__(self, folder: Path, manifest: Manifest, parts: list[_Part], data: list[Path]) -> None:
        super().__init__(folder, manifest)
        self._holders: dict[str, tuple[_Part, Path]] = {}
        for part, path in zip(parts, data, strict=True):
            for file in part.head["files"]:
                former = self._holders.get(file)
                if former is None or not former[1].exists():  # of copies, the one that is here
                    self._holders[file] = part, path

    def check(self, files: Iterable[str]) -> None:
        """See :class:`CheckpointReader`; what is on another host is checked there, and no rank here needs it."""
        super().check(file for file in files if file not in self._holders or self._holders[file][1].exists())

    def _content(self, file: str) -> Any:
        if file not in self._holders:
            return super()._content(file)
        if file not in self._files:
            part, path = self._holders[file]
            try:
                tensors = Data(path, part.slots, new=False).tensors
            except OSError:  # on another host: what is no tensor can be read all the same
                tensors = [torch.empty(slot.shape, dtype=slot.dtype, device="meta") for slot in part.slots]
            self._files[file] = with_tensors(part.head["files"][file], tensors)
        return self._files[file]


@dataclass(frozen=True)
class MemoryState:
    """A generation that all ranks have.

    Attributes:
        checkpoint: the same as one of files, for :class:`~smp_runtime.checkpoint.load_partial.Loading`.
        reader: of its tensors.
        step: that ranks had begun, as their records count.
    """

    generation: Generation
    checkpoint: FoundCheckpoint
    reader: CheckpointReader
    step: int

    @property
    def manifest(self) -> Manifest:
        """What there is; ``steps`` are the optimizer's."""
        if self.checkpoint.manifest is None:
            raise AssertionError("a state in memory has a manifest")
        return self.checkpoint.manifest


class Recovery:
    """What a session finds in memory, once: what comes later is its own.

    Attributes:
        number: of the generation that was loaded; 0 for none.
    """

    outlives_regrouping = True

    def __init__(self) -> None:
        self.number = 0
        self._is_over = False
        self._found: tuple[MemoryState | None] | None = None

    @classmethod
    def of(cls, session: Session) -> Recovery:
        """That of a session; always the same object."""
        return session.ranks.keep(cls, cls)

    def newest(self, session: Session) -> MemoryState | None:
        """See :func:`newest_state`."""
        if self._is_over:
            return None
        if self._found is None:
            self._found = (_find(session, os.environ),)
        return self._found[0]

    def is_loaded(self, state: MemoryState) -> None:
        """The training goes on from this state: its steps are counted on."""
        self.number = state.generation.number
        here().go_on(state.step)
        self.end()

    def end(self) -> None:
        """The training goes on from somewhere: what is in memory is not asked for again."""
        self._is_over, self._found = True, None


def newest_state(session: Session) -> MemoryState | None:
    """The newest state that all ranks have in memory; every rank calls it.

    Returns:
        None unless the job's ranks were started again in place, and all of them have left a copy of the same moment; nor after a
        checkpoint was loaded in this process.
    """
    return Recovery.of(session).newest(session)


def _find(session: Session, environ: Mapping[str, str]) -> MemoryState | None:
    start = restart_count(environ)
    if start == 0:
        return None
    control, rank = session.ranks.control, session.ranks.rank
    everyone = list(range(control.size))
    folder = Path(environ.get(FOLDER_VARIABLE, ""))
    mine = generations_of(folder, rank) if environ.get(FOLDER_VARIABLE) and folder.is_dir() else []
    views = control.allgather([(found.start, found.number) for found in mine], everyone)
    for generation in sorted((Generation(*found) for found in set(views[0]).intersection(*views[1:])), reverse=True):
        raw = control.allgather(_raw(folder, generation, rank), everyone)
        problem, state = None, None
        try:
            state = _assembled(raw, folder, generation, start, rank)
        except (*UNREADABLE, json.JSONDecodeError) as error:
            problem = f"{type(error).__name__}: {error}"
        problems = [why for why in control.allgather(problem, everyone) if why]
        if not problems:
            return state
        if rank == 0:
            logger.warning("the state in memory of generation %d cannot be used (%s)", generation.number, problems[0])
    return None


def _raw(folder: Path, generation: Generation, rank: int) -> tuple[bytes, str] | None:
    """The two files of a rank but its data."""
    try:
        head = head_path(folder, generation, rank).read_bytes()
        return head, (folder / str(unpacked(head)["layout"])).read_text()
    except UNREADABLE:
        return None


def _assembled(
    raw: list[tuple[bytes, str] | None], folder: Path, generation: Generation, start: int, rank: int
) -> MemoryState:
    """One checkpoint out of what the ranks have.

    Raises:
        ValueError: something is missing, or of a job of another size.
    """
    missing = [number for number, found in enumerate(raw) if found is None]
    if missing:
        raise ValueError(f"ranks {missing} have none")
    parts = [_Part.of(found) for found in raw if found is not None]
    described = parts[0].described
    if described is None or any(part.head["world"] != len(parts) for part in parts):
        raise ValueError(f"it is of {parts[0].head['world']} ranks, and these are {len(parts)}")
    manifest = merge(described, [part.report for part in parts], f"{generation.start}.{generation.number}")
    manifest.steps, manifest.saved = parts[0].head["steps"], parts[0].head["saved"]
    small = folder / of_rank(start, rank, 0, "resumed")
    small.mkdir(exist_ok=True)
    for name, content in parts[0].head["texts"].items():
        (small / name).write_bytes(content)
    data = [folder / part.head["data"] for part in parts]
    reader = MemoryReader(small, manifest, parts, data)
    found = FoundCheckpoint(f"in memory (generation {generation.number})", small, manifest)
    return MemoryState(generation, found, reader, parts[rank].head["step"])
