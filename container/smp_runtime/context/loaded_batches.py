"""Records of loaded batches, to check that the ranks of a context parallel group split the same one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from smp_runtime.tensors.nested import tensors_in

if TYPE_CHECKING:
    import torch

    from smp_runtime.job.ranks import Ranks


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
