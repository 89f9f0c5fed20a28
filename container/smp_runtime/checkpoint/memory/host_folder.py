"""A job's folder in a host's shared memory: the copies of each rank, complete or absent.

A rank's copy is two files. The data file has its tensors one after the other. The head has everything else,
and the offset of each tensor in the data. Copies are numbered by their generation.

A rank keeps two copies: while it overwrites the older one, the newer one stays. A head exists exactly as long
as its data are complete. No rank overwrites its older copy before all ranks of the host have the newer one.
So whenever ranks are killed, there is a generation that all of them have.

Copies that a rank of another host has sent here (``peer_replication.py``) look the same, and have the number
of that rank.
"""

from __future__ import annotations

import io
import mmap
import os
import re
import shutil
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smp_runtime.tensors.host_memory.pinned_memory import view_memory
from smp_runtime.tensors.host_memory.staging import StagingMemory, lay_out
from smp_runtime.tensors.torch_private import tree_flatten, tree_unflatten

#: Of a head: start, generation, rank; of all else: start, rank, a number.
_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(head|data|layout|resumed)")
_COUNT = struct.Struct("<Q")
#: In place of a generation: this rank copies nothing any more.
_OFF = 2**64 - 1
#: No name or word of a training begins like this.
_STANDS_IN = "\0tensor "
_LEAST_BYTES = 64
#: Seconds between two looks at the other ranks' generations, because ranks send no notification.
_LOOK_SECONDS = 0.0005


@dataclass(frozen=True, order=True)
class Generation:
    """Which copy it is: of the job's ``start``, its ``number``; later ones are greater."""

    start: int
    number: int


@dataclass(frozen=True)
class StoredTensor:
    """Where in the data a tensor is, and what it is.

    Attributes:
        offset: bytes.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Return the length of the tensor in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def slots_of(tensors: Iterable[torch.Tensor]) -> tuple[StoredTensor, ...]:
    """Return the places of tensors in the data, in their order."""
    tensors = list(tensors)
    offsets, _ = lay_out(tensors)
    return tuple(
        StoredTensor(offset, tuple(tensor.shape), tensor.dtype) for tensor, offset in zip(tensors, offsets, strict=True)
    )


class Data:
    """The tensors of one copy, mapped into memory.

    Args:
        path: of the file.
        slots: what it has.
        new: makes the file, in which every byte has its memory from now on; otherwise it is there, and is only read.

    Attributes:
        tensors: views of the file, one for each slot.
        bytes: a view of all of it, flat.

    Raises:
        OSError: there is no such file, or no memory for a new one.
    """

    def __init__(self, path: Path, slots: tuple[StoredTensor, ...], *, new: bool) -> None:
        self.path = path
        self.slots = slots
        size = max(_LEAST_BYTES, slots[-1].offset + slots[-1].bytes if slots else 0)
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if new:
                os.posix_fallocate(descriptor, 0, size)  # else a full folder would kill the rank at its first write
            elif os.fstat(descriptor).st_size < size:
                raise OSError(f"{path} has fewer than {size:,} bytes")
            # What reads it must not change it.
            mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_DEFAULT if new else mmap.ACCESS_COPY)
        except BaseException:
            if new:
                path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.tensors = [view_memory(mapped, slot.offset, slot.shape, slot.dtype) for slot in slots]
        self.bytes = view_memory(mapped, 0, (size,), torch.uint8)
        self._staging: StagingMemory | None = None

    def copy(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Copy the state into the slots. It is complete when this returns.

        The memory is pinned after the first copy, and stays so, since the next copies come soon.
        """
        if self._staging is None:
            self._staging = StagingMemory(self.bytes, device)
        self._staging.copy(tensors, [slot.offset for slot in self.slots])
        # Copies from a GPU are only queued, but other processes read this memory when it is announced.
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self._staging.pin_later()

    @property
    def pinned_bytes(self) -> int:
        """Return the number of pinned bytes."""
        return 0 if self._staging is None else self._staging.pinned_bytes

    def close(self) -> None:
        """Unpin the memory."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None


class CopyProgress:
    """How far the ranks of a host are with their copies, in a file that all of them have mapped."""

    def __init__(self, folder: Path, start: int, size: int) -> None:
        descriptor = os.open(_progress_path(folder, start), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size * _COUNT.size)  # whoever comes first makes it; all make it as long
            self._map = mmap.mmap(descriptor, size * _COUNT.size)
        finally:
            os.close(descriptor)

    def note(self, rank: int, number: int) -> None:
        """Record that a rank has a complete copy of a generation."""
        _COUNT.pack_into(self._map, rank * _COUNT.size, number)

    def turn_off(self, rank: int) -> None:
        """Record that a rank makes no more copies."""
        self.note(rank, _OFF)

    def least(self, ranks: Iterable[int]) -> int | None:
        """Return the newest generation that all of these ranks have reached; None if one of them makes no more copies."""
        found = [_COUNT.unpack_from(self._map, rank * _COUNT.size)[0] for rank in ranks]
        return None if _OFF in found else min(found)

    def wait(self, ranks: Iterable[int], number: int, seconds: float) -> bool:
        """Wait at most ``seconds`` until all of these ranks have a generation, and return whether they do."""
        deadline, ranks = time.monotonic() + seconds, list(ranks)
        while (least := self.least(ranks)) is not None and least < number:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return least is not None


def head_path(folder: Path, generation: Generation, rank: int) -> Path:
    """Return the path of the head of a rank's copy."""
    return folder / f"{generation.start}.{generation.number}.{rank}.head"


def write_head(path: Path, content: Any) -> None:
    """Write a complete head, or nothing."""
    write_whole(path, serialize(content))


def write_whole(path: Path, content: bytes) -> None:
    """Write a complete file, or nothing."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.rename(path)


def serialize(content: Any) -> bytes:
    """Serialize plain objects and tensors to bytes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def deserialize(content: bytes) -> Any:
    """Deserialize the bytes of :func:`serialize`; raise the errors of ``torch.load``."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def stand_in(number: int) -> str:
    """Return the placeholder in a head for a tensor, by its number in the data."""
    return f"{_STANDS_IN}{number}"


def stand_ins(content: Any) -> list[int]:
    """Return the tensor numbers of the placeholders in a part of a head, in its order."""
    leaves, _ = tree_flatten(content)
    found = [leaf for leaf in leaves if isinstance(leaf, str) and leaf.startswith(_STANDS_IN)]
    return [int(leaf.removeprefix(_STANDS_IN)) for leaf in found]


def with_tensors(content: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Replace the placeholders in a head's content by the tensors."""
    leaves, structure = tree_flatten(content)
    found = [
        tensors[int(leaf.removeprefix(_STANDS_IN))] if isinstance(leaf, str) and leaf.startswith(_STANDS_IN) else leaf
        for leaf in leaves
    ]
    return tree_unflatten(found, structure)


def generations_of(folder: Path, rank: int) -> list[Generation]:
    """Return the generations of a rank's complete copies, oldest first."""
    return sorted(generation for generation, of in copies_in(folder) if of == rank)


def copies_in(folder: Path) -> list[tuple[Generation, int]]:
    """Return all complete copies, each with its rank."""
    matches = filter(None, map(_NAME.fullmatch, os.listdir(folder)))
    return [(Generation(int(m[1]), int(m[2])), int(m[3])) for m in matches if m[4] == "head"]


def ranks_of_start(folder: Path, start: int) -> int:
    """Return the job's number of ranks in a start; 0 if none of them has recorded anything here."""
    try:
        return _progress_path(folder, start).stat().st_size // _COUNT.size
    except OSError:
        return 0


def _progress_path(folder: Path, start: int) -> Path:
    return folder / f"{start}.progress"


def of_rank(start: int, rank: int, number: int, kind: str) -> str:
    """Return the name of a rank's file other than a head."""
    return f"{start}.{rank}.{number}.{kind}"


def remove_older(folder: Path, start: int) -> None:
    """Remove the files of earlier starts of the job.

    Heads go first, because a head means that its data exist.
    """
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and int(match[1]) < start:
            found.append(path)
    found.sort(key=lambda path: path.suffix != ".head")
    for path in found:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
