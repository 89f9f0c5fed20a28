"""The last batch that a script has loaded or cut, to check that context parallel ranks split the same one."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from smp_runtime.tensors.nested import tensors_in

if TYPE_CHECKING:
    from smp_runtime.context.layout import SequenceLayout
    from smp_runtime.job.ranks import Ranks

#: Methods of tensors by which scripts cut batches zig-zag. Functions of PyTorch stay: TorchScript knows them by identity.
_CUTTING = ("chunk", "split", "index_select")

#: A script cuts batches in the same way throughout, so this many calls of the model show it.
_CALLS_WITH_CUTS = 16


class LoadedBatches:
    """A record of the batches that the loaders of this process return.

    Attributes:
        last: tensors of the last batch.
        count: how many batches were loaded.
    """

    def __init__(self) -> None:
        self.last: list[torch.Tensor] = []
        self.count = 0

    @classmethod
    def of(cls, ranks: Ranks) -> LoadedBatches:
        """Return the job's record, made at the first call."""
        return ranks.keep(cls, cls)

    def watch(self) -> Callable[[], None]:
        """Begin to note batches; return the function that ends it."""
        original = DataLoader.__iter__

        @functools.wraps(original)
        def iterate(loader: DataLoader[Any]) -> Any:
            return _NotedIterator(original(loader), self)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]

        def end() -> None:
            DataLoader.__iter__ = original  # type: ignore[method-assign]
            self.last = []

        return end

    def note(self, batch: Any) -> None:
        """Keep the tensors of a batch until the next one."""
        self.last = list(tensors_in(batch))
        self.count += 1

    def with_tokens(self, length: int) -> list[torch.Tensor]:
        """Return the tensors of the last batch that have whole sequences; none if a loader has cut them already.

        Some data sets have one token more, from which scripts make labels.
        """
        return [tensor for tensor in self.last if tensor.dim() > 1 and tensor.shape[1] in (length, length + 1)]


class CutBatches:
    """A record of tensors of whole numbers that are cut before the first calls of the model, by the methods in :data:`_CUTTING`.

    Batches that no loader of PyTorch made are seen here. What was cut is a batch only if this rank's slices are its own. The inputs
    of the model could not tell: slices of two batches look like those of one. Compiled code is not watched.
    """

    def __init__(self) -> None:
        self._cut: deque[torch.Tensor] = deque(maxlen=16)
        self._calls = 0
        self._originals: dict[str, Any] = {}

    @classmethod
    def of(cls, ranks: Ranks) -> CutBatches:
        """Return those of the job."""
        return ranks.keep(cls, cls)

    def watch(self) -> Callable[[], None]:
        """Begin to note; return the function that ends it, if calls of the model have not."""
        for name in _CUTTING:
            self._originals[name] = getattr(torch.Tensor, name)
            setattr(torch.Tensor, name, self._noting(self._originals[name]))
        return self._end

    def take(self, slices: list[torch.Tensor], layout: SequenceLayout, rank: int) -> list[list[torch.Tensor]]:
        """Return for each slice of a call the batches that were seen and that it may have been cut from; keep none.

        Several may be, such as tokens and labels, whose slices are equal on some ranks.
        """
        cut, self._cut = list(self._cut), deque(maxlen=self._cut.maxlen)
        self._calls += 1
        if self._calls >= _CALLS_WITH_CUTS:
            self._end()
        return [_wholes_of(part, cut, layout, rank) for part in slices]

    def _noting(self, original: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and args and _is_tokens(args[0]):
                self._cut.append(args[0])
            return original(*args, **kwargs)

        return run

    def _end(self) -> None:
        for name, original in self._originals.items():
            setattr(torch.Tensor, name, original)
        self._originals = {}
        self._cut.clear()


def _is_tokens(value: Any) -> bool:
    return type(value) is torch.Tensor and value.dim() > 1 and value.dtype in (torch.int64, torch.int32)


def _wholes_of(part: torch.Tensor, cut: list[torch.Tensor], layout: SequenceLayout, rank: int) -> list[torch.Tensor]:
    """Return the tensors that were cut whose slice is ``part``."""
    if not _is_tokens(part) or part.dim() > 2:
        return []
    shape, places = (part.shape[0], layout.length), layout.positions[rank]
    found = [
        whole.reshape(shape) for whole in cut if whole.shape[0] == shape[0] and whole.numel() == shape[0] * shape[1]
    ]
    return [rows for rows in found if torch.equal(rows[:, places.to(rows.device)].to(part.device), part)]


class _NotedIterator:
    """An iterator over a loader that records each batch."""

    def __init__(self, iterator: Iterator[Any], batches: LoadedBatches) -> None:
        self._iterator, self._batches = iterator, batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._batches.note(batch)
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
