"""The newest state of a job that its hosts have in shared memory, found and read after its ranks were started again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smp_config.recovery import FOLDER_VARIABLE, restart_count
from smp_records.rank_record import current_record
from smp_runtime.checkpoint.files.atomic_file import UNREADABLE
from smp_runtime.checkpoint.files.manifest import FileRecord, FoundCheckpoint, Manifest, OptimizerRecord
from smp_runtime.checkpoint.files.reader import CheckpointReader
from smp_runtime.checkpoint.memory.host_folder import (
    Data,
    Generation,
    StoredTensor,
    copies_in,
    deserialize,
    head_path,
    of_rank,
    ranks_of_start,
    stand_ins,
    with_tensors,
)
from smp_runtime.checkpoint.saving.save_report import Described, Report, merge
from smp_runtime.comm.control import host_name, timeout_seconds

if TYPE_CHECKING:
    from smp_runtime.comm.control import ControlPlane
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")

#: In the place of a checksum: what lies in memory has none.
_NO_CHECKSUM = "0" * 64

#: Bytes of a message between hosts.
_MESSAGE_BYTES = 2**26


@dataclass(frozen=True)
class _RankCopy:
    """One rank's copy of a generation on one host, without its data.

    Attributes:
        rank: the rank that the copy belongs to.
        host: the number of the host that has it.
        path: of the data; None on other hosts.
    """

    rank: int
    host: int
    path: Path | None
    head: dict[str, Any]
    report: Report
    described: Described | None

    @property
    def slots(self) -> tuple[StoredTensor, ...]:
        return tuple(
            StoredTensor(offset, tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
            for offset, shape, dtype in self.head["slots"]
        )

    @classmethod
    def of(cls, rank: int, host: int, folder: Path | None, raw: tuple[bytes, str]) -> _RankCopy:
        """Return a copy from the content of its two files; ``folder`` is this host's folder if it has the copy."""
        head, told = deserialize(raw[0]), json.loads(raw[1])
        described = told.get("described")
        if described is not None:
            optimizer = described["optimizer"]
            described["optimizer"] = None if optimizer is None else OptimizerRecord(**optimizer)
        report = Report.from_json(told["report"])
        report.files = {name: FileRecord(0, _NO_CHECKSUM) for name in (*head["files"], *head["texts"])}
        path = None if folder is None else folder / head["data"]
        return cls(rank, host, path, head, report, None if described is None else Described(**described))


class MemoryReader(CheckpointReader):
    """Reads tensors where ranks have left them in this host's memory, and such as :meth:`bring` has brought from others.

    Args:
        folder: with the files of the whole job.
        parts: on all hosts.
        hosts: by rank of now, the number of its host.
    """

    def __init__(self, folder: Path, manifest: Manifest, parts: list[_RankCopy], hosts: list[int]) -> None:
        super().__init__(folder, manifest)
        self._hosts = hosts
        self._holders: dict[str, list[_RankCopy]] = {}
        for part in parts:
            for file in part.head["files"]:
                self._holders.setdefault(file, []).append(part)
        self._brought: dict[str, tuple[_RankCopy, list[torch.Tensor]]] = {}

    def check(self, files: Iterable[str]) -> None:
        """See :class:`CheckpointReader`."""
        mine = []
        for file in files:
            # A file that is on another host only is checked there, and no rank here needs it.
            is_elsewhere = file in self._holders and file not in self._brought
            if not is_elsewhere or self._here(file) is not None:
                mine.append(file)
        super().check(mine)

    def bring(self, control: ControlPlane, wanted: Iterable[str] | None) -> int:
        """Fetch the tensors that this rank needs and only other hosts have; every rank calls it.

        Args:
            wanted: the files that this rank reads; None for all.

        Returns:
            The bytes that all ranks together have fetched.
        """
        everyone = list(range(control.size))
        mine = self._holders if wanted is None else [file for file in wanted if file in self._holders]
        asked = control.allgather(sorted(file for file in mine if self._here(file) is None), everyone)
        if not any(asked):
            return 0
        group = dist.new_group(everyone, timeout=timedelta(seconds=timeout_seconds()), backend="gloo")
        moved = 0
        # All in one order: no rank waits for one that waits for it.
        for rank, files in enumerate(asked):
            for file in files:
                parts = self._holders[file]
                part = parts[rank % len(parts)]
                there = [other for other in everyone if self._hosts[other] == part.host]
                moved += self._carry(file, part, there[rank % len(there)], rank, control.rank, group)
        return moved

    def _carry(self, file: str, part: _RankCopy, source: int, target: int, rank: int, group: dist.ProcessGroup) -> int:
        """Send the tensors of a file from one rank to another, and return the number of bytes."""
        numbers = stand_ins(part.head["files"][file])
        if not numbers:
            return 0
        slots = part.slots[min(numbers) : max(numbers) + 1]
        begin, end = slots[0].offset, slots[-1].offset + slots[-1].bytes
        if rank == source and part.path is not None:
            flat = Data(part.path, part.slots, new=False).bytes[begin:end]
            for message in flat.split(_MESSAGE_BYTES):
                dist.send(message, target, group=group)
        elif rank == target:
            flat = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
            for message in flat.split(_MESSAGE_BYTES):
                dist.recv(message, source, group=group)
            tensors = _on_meta(part.slots)
            for number, slot in zip(range(min(numbers), max(numbers) + 1), slots, strict=True):
                place = flat[slot.offset - begin : slot.offset - begin + slot.bytes]
                tensors[number] = place.view(slot.dtype).view(slot.shape)
            self._brought[file] = part, tensors
        return end - begin

    def _here(self, file: str) -> _RankCopy | None:
        """Return this host's copy of a file's tensors; None if it has none."""
        return next((part for part in self._holders[file] if part.path is not None), None)

    def _content(self, file: str) -> Any:
        if file not in self._holders:
            return super()._content(file)
        if file not in self._files:
            part = self._here(file)
            if part is not None and part.path is not None:
                tensors = Data(part.path, part.slots, new=False).tensors
            elif file in self._brought:
                part, tensors = self._brought[file]
            else:  # on another host: everything but the tensors can be read all the same
                part = self._holders[file][0]
                tensors = _on_meta(part.slots)
            self._files[file] = with_tensors(part.head["files"][file], tensors)
        return self._files[file]

    def close(self) -> None:
        """Let the files go, and what was brought."""
        super().close()
        self._brought.clear()


def _on_meta(slots: tuple[StoredTensor, ...]) -> list[torch.Tensor]:
    return [torch.empty(slot.shape, dtype=slot.dtype, device="meta") for slot in slots]


@dataclass(frozen=True)
class MemoryState:
    """A generation that is there of all ranks.

    Attributes:
        checkpoint: the same as one of files, for :class:`~smp_runtime.checkpoint.load_partial.PartialLoad`.
        reader: of its tensors.
        step: that ranks had begun, as their records count.
    """

    generation: Generation
    checkpoint: FoundCheckpoint
    reader: MemoryReader
    step: int

    @property
    def manifest(self) -> Manifest:
        """Return the state's manifest; ``steps`` are the optimizer's."""
        if self.checkpoint.manifest is None:
            raise AssertionError("a state in memory has a manifest")
        return self.checkpoint.manifest


class Recovery:
    """The state that a session finds in memory, once: later copies are its own.

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
        """Return the recovery of a session; always the same object."""
        return session.ranks.keep(cls, cls)

    def newest(self, session: Session) -> MemoryState | None:
        """See :func:`newest_state`."""
        if self._is_over:
            return None
        if self._found is None:
            self._found = (_find(session, os.environ),)
        return self._found[0]

    def is_loaded(self, state: MemoryState) -> None:
        """Record that training continues from this state, and continue its step count."""
        self.number = state.generation.number
        current_record().go_on(state.step)
        self.end()

    def end(self) -> None:
        """Record that training has a starting point, so that the state in memory is not asked for again."""
        self._is_over, self._found = True, None


def newest_state(session: Session) -> MemoryState | None:
    """Return the newest state that is in memory for all ranks of the previous start; every rank calls it.

    Returns:
        None unless the job's ranks were restarted, and the present hosts have a copy of the same moment for every
        former rank. Also None after a checkpoint was loaded in this process.
    """
    return Recovery.of(session).newest(session)


def _find(session: Session, environ: Mapping[str, str]) -> MemoryState | None:
    start = restart_count(environ)
    if start == 0:
        return None
    control, rank = session.ranks.control, session.ranks.rank
    everyone = list(range(control.size))
    text = environ.get(FOLDER_VARIABLE, "")
    folder = Path(text)
    mine: list[tuple[int, int, int, int]] = []
    if text and folder.is_dir():
        worlds = {found.start: ranks_of_start(folder, found.start) for found, _ in copies_in(folder)}
        mine = [(found.start, found.number, of, worlds[found.start]) for found, of in copies_in(folder)]
    views = control.allgather((host_name(), text, mine), everyone)
    places = list(dict.fromkeys((host, where) for host, where, _ in views))
    hosts = [places.index((host, where)) for host, where, _ in views]
    held: dict[Generation, set[int]] = {}
    worlds = {}
    for _, _, copies in views:
        for began, number, of, world in copies:
            held.setdefault(Generation(began, number), set()).add(of)
            worlds[began] = max(world, worlds.get(began, 0))
    whole = [generation for generation, of in held.items() if of >= set(range(worlds[generation.start])) > set()]
    for generation in sorted(whole, reverse=True):
        # One rank of each host reads the host's files.
        raw = control.allgather(_raw(folder, generation) if hosts.index(hosts[rank]) == rank else {}, everyone)
        problem, state = None, None
        try:
            state = _assembled(raw, hosts, folder, generation, start, rank)
        except (*UNREADABLE, json.JSONDecodeError) as error:
            problem = f"{type(error).__name__}: {error}"
        problems = [why for why in control.allgather(problem, everyone) if why]
        if not problems:
            return state
        if rank == 0:
            logger.warning("the state in memory of generation %d cannot be used (%s)", generation.number, problems[0])
    return None


def _raw(folder: Path, generation: Generation) -> dict[int, tuple[bytes, str]]:
    """Return the head and layout of each copy on this host, by rank."""
    if not folder.is_dir():
        return {}
    found = {}
    for other, of in copies_in(folder):
        if other != generation:
            continue
        # A copy that was cut off is as good as none: another host may have it whole.
        with contextlib.suppress(*UNREADABLE):
            head = head_path(folder, generation, of).read_bytes()
            found[of] = head, (folder / str(deserialize(head)["layout"])).read_text()
    return found


def _assembled(
    raw: list[dict[int, tuple[bytes, str]]],
    hosts: list[int],
    folder: Path,
    generation: Generation,
    start: int,
    rank: int,
) -> MemoryState:
    """Assemble one checkpoint from the copies on all hosts.

    Raises:
        ValueError: something is missing.
    """
    parts = [
        _RankCopy.of(of, host, folder if host == hosts[rank] else None, files)
        for host, found in zip(hosts, raw, strict=True)
        for of, files in found.items()
    ]
    # Of a rank's own copy and what its buddy has of it, that with more.
    chosen: dict[int, _RankCopy] = {}
    for part in sorted(parts, key=lambda part: len(part.head["files"])):
        chosen[part.rank] = part
    world = max((part.head["world"] for part in parts), default=0)
    missing = sorted(set(range(world)) - chosen.keys())
    if missing or not parts:
        raise ValueError(f"there is no copy of ranks {missing}")
    described, first = next((part.described for part in parts if part.described is not None), None), chosen[0]
    if described is None:
        raise ValueError("nobody says what it is")
    reports = [chosen[of].report for of in sorted(chosen)]
    manifest = merge(described, reports, f"{generation.start}.{generation.number}")
    manifest.steps, manifest.saved = first.head["steps"], first.head["saved"]
    lost = sorted(manifest.pieces.keys() - {file for part in parts for file in part.head["files"]})
    if lost:
        raise ValueError(f"no host that is left has {', '.join(lost[:4])}")
    small = folder / of_rank(start, rank, 0, "resumed")
    small.mkdir(exist_ok=True)
    for name, content in first.head["texts"].items():
        (small / name).write_bytes(content)
    reader = MemoryReader(small, manifest, parts, hosts)
    found = FoundCheckpoint(f"in memory (generation {generation.number})", small, manifest)
    return MemoryState(generation, found, reader, first.head["step"])
