"""Which samples every step of a job consumes, in the order of the job: of ranks that one process plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.utils.data as torch_data


class Numbers(torch_data.IterableDataset):
    """A stream of the numbers below ``count``, in an order that every epoch has of its own.

    Args:
        turned: whether epochs differ.
    """

    def __init__(self, count: int, turned: bool = True) -> None:
        self.count, self.turned, self.epoch = count, turned, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        first = 5 * self.epoch % self.count if self.turned else 0
        return iter([*range(first, self.count), *range(first)])


def interleaved(batches: list[list[int]]) -> list[int]:
    """The samples of a step as the order of the job has them, from the batches of all ranks."""
    return [sample for place in zip(*batches, strict=True) for sample in place]


def step_blocks(
    make: Callable[[int, int], Any],
    ranks: int,
    batch: int,
    *,
    epochs: int = 2,
    state: Mapping[str, Any] | None = None,
    steps: int | None = None,
    **options: Any,
) -> tuple[list[list[int]], dict[str, Any]]:
    """What the steps of a job consume, and the state that a checkpoint would keep after them.

    Args:
        make: the sampler or the stream of a rank: of how many ranks, and of which.
        state: from which the job goes on; its script goes over all epochs, and says nothing of it.
        steps: after which it is stopped; None for none.
        options: of the loaders.
    """
    import smdistributed.modelparallel.torch as smp

    loaders = []
    for rank in range(ranks):
        source = make(ranks, rank)
        if isinstance(source, torch_data.Sampler):
            loaders.append(smp.data.DataLoader(source.dataset, batch, sampler=source, collate_fn=list, **options))
        else:
            loaders.append(smp.data.DataLoader(source, batch, collate_fn=list, **options))
        if state is not None:
            loaders[-1].load_state_dict(state)
    done: list[list[int]] = []
    for epoch in range(epochs):
        for loader in loaders:
            loader.set_epoch(epoch)
        for batches in zip(*loaders, strict=True):
            done.append(interleaved(list(batches)))
            if len(done) == steps:
                return done, loaders[0].state_dict()
    return done, loaders[0].state_dict()
