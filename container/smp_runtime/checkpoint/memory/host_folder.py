"""A job's folder in the shared memory of a host: what each rank has copied there, complete or absent.

A rank's copy is two files: the data, which are its tensors one after the other, and the head, which has all the rest and says
where in the data each tensor is. Copies are numbered by their generation. A rank has room for two: while it writes one over the
older one, the newer one stays. A head is there exactly as long as its data are complete, and no rank writes over its older copy
before all ranks of the host have the newer one: so whenever ranks are killed there is a generation that all of them have.

What a rank of another host has sent here (``peer_replication.py``) looks the same, and has the number of that rank.
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

from smp_runtime.tensors.torch_private import tree_flatten, tree_unflatten

#: Of a head: start, generation, rank; of all else: start, rank, a number.
_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(head|data|layout|resumed)")
_COUNT = struct.Struct("<Q")
#: In place of a generation: this rank copies nothing any more.
_OFF = 2**64 - 1
#: No name or word of a training begins like this.
_STANDS_IN = "\0tensor "
#: Every tensor begins at a multiple of it, as allocators of memory have it.
_ALIGNED = 64
#: Seconds between two looks at what other ranks have; they tell nobody.
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
        """Its length."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def slots_of(tensors: Iterable[torch.Tensor]) -> tuple[StoredTensor, ...]:
    """Places for tensors in their order."""
    found, offset = [], 0
    for tensor in tensors:
        slot = StoredTensor(offset, tuple(tensor.shape), tensor.dtype)
        found.append(slot)
        offset += -(-slot.bytes // _ALIGNED) * _ALIGNED
    return tuple(found)


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
        size = max(_ALIGNED, slots[-1].offset + slots[-1].bytes if slots else 0)
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
        self.tensors = [_view(mapped, slot) for slot in slots]
        self.bytes = _view(mapped, StoredTensor(0, (size,), torch.uint8))


def _view(mapped: mmap.mmap, slot: StoredTensor) -> torch.Tensor:
    count = torch.Size(slot.shape).numel()
    if count == 0:
        return torch.empty(slot.shape, dtype=slot.dtype, device="cpu")
    return torch.frombuffer(mapped, dtype=slot.dtype, count=count, offset=slot.offset).view(slot.shape)


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
        """A rank has a generation, whole."""
        _COUNT.pack_into(self._map, rank * _COUNT.size, number)

    def turn_off(self, rank: int) -> None:
        """A rank will copy nothing any more."""
        self.note(rank, _OFF)

    def least(self, ranks: Iterable[int]) -> int | None:
        """The generation that all of these ranks have, or a later one; None if one of them copies nothing any more."""
        found = [_COUNT.unpack_from(self._map, rank * _COUNT.size)[0] for rank in ranks]
        return None if _OFF in found else min(found)

    def wait(self, ranks: Iterable[int], number: int, seconds: float) -> bool:
        """Wait until all of these ranks have a generation; whether they do after at most ``seconds``."""
        deadline, ranks = time.monotonic() + seconds, list(ranks)
        while (least := self.least(ranks)) is not None and least < number:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return least is not None


def head_path(folder: Path, generation: Generation, rank: int) -> Path:
    """The head of a rank's copy."""
    return folder / f"{generation.start}.{generation.number}.{rank}.head"


def write_head(path: Path, content: Any) -> None:
    """Write a head whole, or not at all."""
    write_whole(path, packed(content))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole, or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.rename(path)


def packed(content: Any) -> bytes:
    """Plain objects and tensors as bytes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """The opposite of :func:`packed`; raises what ``torch.load`` does."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def stand_in(number: int) -> str:
    """What stands in a head for a tensor of the data, by its number among them."""
    return f"{_STANDS_IN}{number}"


def stand_ins(content: Any) -> list[int]:
    """The numbers of the tensors that are meant in a part of a head, in its order."""
    leaves, _ = tree_flatten(content)
    found = [leaf for leaf in leaves if isinstance(leaf, str) and leaf.startswith(_STANDS_IN)]
    return [int(leaf.removeprefix(_STANDS_IN)) for leaf in found]


def with_tensors(content: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The content of a head with the tensors themselves."""
    leaves, structure = tree_flatten(content)
    found = [
        tensors[int(leaf.removeprefix(_STANDS_IN))] if isinstance(leaf, str) and leaf.startswith(_STANDS_IN) else leaf
        for leaf in leaves
    ]
    return tree_unflatten(found, structure)


def generations_of(folder: Path, rank: int) -> list[Generation]:
    """The copies of a rank that are complete, oldest first."""
    return sorted(generation for generation, of in copies_in(folder) if of == rank)


def copies_in(folder: Path) -> list[tuple[Generation, int]]:
    """All copies that are complete, with the rank that each is of."""
    matches = filter(None, map(_NAME.fullmatch, os.listdir(folder)))
    return [(Generation(int(m[1]), int(m[2])), int(m[3])) for m in matches if m[4] == "head"]


def ranks_of_start(folder: Path, start: int) -> int:
    """How many ranks the job had in a start; 0 where nobody of them has noted anything here."""
    try:
        return _progress_path(folder, start).stat().st_size // _COUNT.size
    except OSError:
        return 0


def _progress_path(folder: Path, start: int) -> Path:
    return folder / f"{start}.progress"


def of_rank(start: int, rank: int, number: int, kind: str) -> str:
    """The name of a file of a rank that is no head."""
    return f"{start}.{rank}.{number}.{kind}"


def remove_older(folder: Path, start: int) -> None:
    """Remove what ranks have here from earlier starts of the job; heads first, since they say that the rest is there."""
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and int(match[1]) < start:
            found.append(path)
    for path in sorted(found, key=lambda path: path.suffix != ".head"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
