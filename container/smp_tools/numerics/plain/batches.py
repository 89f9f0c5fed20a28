"""Batches of a script's ``DataLoader``: kept on each rank, and joined for the one process.

A loader is known by the order in which the script has made it, which is the same in both runs.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from smp_records.plain_job import LoaderFacts
from smp_runtime.errors import SMPRuntimeError
from smp_tools.numerics.sketch import plain_numbers

#: The script may not write checkpoints in these runs, so its own name for this is replaced.
_save = torch.save


class LoaderBook:
    """The loaders that the script has made so far, in order."""

    def __init__(self) -> None:
        self._loaders: list[DataLoader[Any]] = []
        self.facts: list[LoaderFacts] = []

    def number(self, loader: DataLoader[Any]) -> int:
        """Return a loader's number, a new one for a new loader."""
        for number, known in enumerate(self._loaders):
            if known is loader:
                return number
        self._loaders.append(loader)
        self.facts.append(_facts(loader))
        return len(self._loaders) - 1

    def begin_epoch(self, loader: DataLoader[Any]) -> tuple[int, int]:
        """Begin an epoch of a loader; returns the loader's number and the epoch's."""
        number = self.number(loader)
        self.facts[number].epochs.append([])
        return number, len(self.facts[number].epochs) - 1


def _facts(loader: DataLoader[Any]) -> LoaderFacts:
    sampler = getattr(loader, "sampler", None)
    nested = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if not isinstance(sampler, DistributedSampler) and nested is not None:
        sampler = nested
    knows_epochs = hasattr(sampler, "set_epoch")
    shuffles = bool(getattr(sampler, "shuffle", False)) if knows_epochs else isinstance(sampler, RandomSampler)
    is_distributed = knows_epochs or hasattr(sampler, "num_replicas")
    return LoaderFacts(type(sampler).__name__, is_distributed, shuffles)


class RankBatches:
    """Writes every batch of a rank's loaders.

    Args:
        updates: returns the number of updates so far.
        steps: updates that are recorded. Then the running epoch ends, so that the next one shows its order.
        seen_enough: is called when the next epoch has shown its order.
    """

    def __init__(
        self, folder: Path, rank: int, updates: Callable[[], int], steps: int, seen_enough: Callable[[], None]
    ) -> None:
        self.book = LoaderBook()
        self._folder, self._rank = folder, rank
        self._updates, self._steps, self._seen_enough = updates, steps, seen_enough
        #: Loaders of batches that were followed by updates: those of an evaluation are not cut.
        self._training: set[int] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def length(self, loader: DataLoader[Any], own: int) -> int:
        """Return the length of a loader, and keep it for the one process."""
        number = self.book.number(loader)  # on all ranks, so that they count alike
        if self._rank == 0:
            _length_file(self._folder, number).write_text(str(own))
        return own

    @property
    def _is_over(self) -> bool:
        return self._updates() >= self._steps

    def iterate(self, loader: DataLoader[Any], own: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        if self._is_over and self.book.number(loader) not in self._training:
            yield from own
            return
        number, epoch = self.book.begin_epoch(loader)
        epochs = self.book.facts[number].epochs
        most = len(epochs[epoch - 1]) if self._is_over and epoch > 0 else 0
        for batch in self._until_over(own, most, epochs[epoch]):
            if not self._is_over:
                _save(batch, self._folder / _batch_file(number, epoch, len(epochs[epoch]), f"{self._rank:05}"))
            epochs[epoch].append(_digest(batch))
            before = self._updates()
            yield batch
            if self._updates() > before:
                self._training.add(number)

    def _until_over(self, own: Iterator[Any], most: int, seen: list[str]) -> Iterator[Any]:
        """Yield batches until all updates are recorded; in the epoch behind them, ``most`` batches."""
        while not self._is_over or len(seen) < most:
            try:
                batch = next(own)
            except StopIteration:
                return
            yield batch
        if most:
            self._seen_enough()


class JoinedBatches:
    """Yields the ranks' batches, joined to global ones.

    Args:
        folder: the ranks have written it.
    """

    def __init__(self, folder: Path) -> None:
        self.book = LoaderBook()
        self._folder = folder

    def length(self, loader: DataLoader[Any], own: int) -> int:
        """Return the length that the loader had on rank 0."""
        file = _length_file(self._folder, self.book.number(loader))
        return int(file.read_text()) if file.exists() else own

    def iterate(self, loader: DataLoader[Any], own: Iterator[Any] | None = None) -> Iterator[Any]:
        """Yield the batches of an epoch; the loader's own data is not read."""
        number, epoch = self.book.begin_epoch(loader)
        digests = self.book.facts[number].epochs[epoch]
        while True:
            files = sorted(self._folder.glob(_batch_file(number, epoch, len(digests), "*")))
            # Written by the ranks of this command, with the script's own types.
            parts = [torch.load(file, weights_only=False) for file in files]
            if not parts:
                return
            batch = join(parts)
            digests.append(_digest(batch))
            yield batch


def _batch_file(loader: int, epoch: int, batch: int, rank: str) -> str:
    return f"loader{loader:03}-epoch{epoch:05}-batch{batch:06}-rank{rank}.pt"


def _length_file(folder: Path, loader: int) -> Path:
    return folder / f"loader{loader:03}-length"


def _digest(batch: Any) -> str:
    """Return a digest of the tensors and numbers of a batch; empty if it has none that are known."""
    digest, has_content = hashlib.blake2b(digest_size=16), False
    for leaf in _leaves(batch):
        has_content = True
        if isinstance(leaf, torch.Tensor):
            digest.update(plain_numbers(leaf).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest() if has_content else ""


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor | str | int | float | bytes):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = vars(value).values()
    for part in parts:
        yield from _leaves(part)


def join(parts: Sequence[Any]) -> Any:
    """Return the batches of several ranks as one: tensors along their first axis, lists of samples one after the other.

    Raises:
        SMPRuntimeError: the parts cannot be joined.
    """
    first = parts[0]
    if len(parts) == 1 or first is None:
        return first
    if isinstance(first, torch.Tensor) and first.dim():
        return _joined_tensors(parts)
    if isinstance(first, Mapping):
        # Of the same class: a script may use methods of its batches.
        made: Any = copy.copy(first)
        for key in first:
            made[key] = join([part[key] for part in parts])
        return made
    if isinstance(first, list | tuple):
        return _joined_sequences(parts)
    is_record = dataclasses.is_dataclass(first) and not isinstance(first, type)
    if is_record:
        fields = join([vars(part) for part in parts])
        return dataclasses.replace(first, **fields)
    is_value = isinstance(first, torch.Tensor | str | int | float | bytes)
    if is_value and all(bool(part == first) for part in parts):
        return first
    raise SMPRuntimeError(
        f"the ranks' batches have {type(first).__name__} entries ({first!r:.60} on rank 0), of which it is not known how to join "
        "them to one batch: let the loader yield tensors with one row for each sample, in a dict, list or tuple"
    )


def _joined_sequences(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, list):
        entries = list(itertools.chain.from_iterable(parts))
        # A list of tensors is a tuple of columns; a list of anything else has one entry for each sample.
        is_columns = all(isinstance(entry, torch.Tensor | Mapping | list | tuple) for entry in entries)
        if not is_columns:
            return entries
    joined = [join(same) for same in zip(*parts, strict=True)]
    is_named = hasattr(first, "_fields")
    return type(first)(*joined) if is_named else type(first)(joined)


def _joined_tensors(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len({tuple(part.shape[1:]) for part in parts}) > 1:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise SMPRuntimeError(
            f"the ranks' batches have tensors of the shapes {shapes}, which cannot be joined to one batch: let the loader pad all "
            "batches to one length while the script is verified"
        )
    return torch.cat(list(parts))
