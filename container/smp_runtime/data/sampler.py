"""A sampler with an order and a position that belong to the job.

The samples of every step are the same for any number of ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
import torch.utils.data as torch_data
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from smp_runtime.data.position import SampleSource, place_among_readers
from smp_runtime.errors import SMPUserError


class DistributedSampler(TorchSampler[Any], SampleSource):
    """A ``torch.utils.data.DistributedSampler`` that resumes at the job's position, with any number of ranks.

    The order of an epoch depends on ``seed`` and ``epoch`` alone and is that of PyTorch's sampler. Rank r of n
    takes the samples i + r, i + r + n, i + 2n + r, … of it. The position i is 0, or the one at which the job was
    resumed. So n ranks with batches of b take the n · b samples behind the position in each step, a block of the
    order.

    Args:
        dataset: a data set with a length.
        num_replicas: ranks that read different samples; None for those of the job: ``smp.dp_size()``, with
            ``prescaled_batch`` ``smp.rdp_size()``.
        rank: which of them this one is; None for this rank's place.
        shuffle: whether every epoch has a random order of its own, or that of the data set.
        seed: the same on every rank.
        drop_last: leave out the last samples of an epoch that do not make one for each rank. By default, the
            ranks that lack one get the first samples of the order instead.
        name: under which checkpoints keep the position; None for a number, in the order in which sources are
            made.
        kept: whether checkpoints keep it at all; False for evaluation.

    Raises:
        NotInitializedError: before ``smp.init()``, unless ``num_replicas`` and ``rank`` are given.
        SMPUserError: no rank has that number; or a loader that reads ahead draws from it and does not report how
            much of it the script was given (:class:`~smp_runtime.data.loader.DataLoader` does).

    Example:
        >>> sampler = smp.data.DistributedSampler(dataset, shuffle=False)
        >>> list(sampler)  # alone; of two ranks, the first reads 0, 2, 4, 6
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        name: str | None = None,
        kept: bool = True,
    ) -> None:
        num_replicas, rank = place_among_readers(num_replicas, rank)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._begin_source(seed, name, kept=kept)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; an epoch before the resumed one has no samples any more."""
        super().set_epoch(epoch)
        self.position.is_numbered = True

    def __iter__(self) -> Iterator[int]:
        counts = not self.position.is_counted_by_loader
        if counts and self.is_kept:
            self._refuse_loaders_that_read_ahead()
        seen = -1
        while seen != self.times_regrouped:  # after a regrouping, other ranks continue from the job's position
            seen = self.times_regrouped
            position = self.position
            start = position.begin(self.epoch)
            if start is None:
                return
            count, end = self._pass_from(start)
            position.end = end
            order = self._order()
            # Behind the end of the order it begins again: that pads.
            places = (start + self.rank + self.num_replicas * torch.arange(count)) % max(1, len(order))
            for index in cast("list[int]", order[places].tolist()):
                # Before the yield: code behind it runs only if another sample is asked for.
                if counts:
                    position.hand_out(self.num_replicas)
                yield index
                if seen != self.times_regrouped and counts:
                    break
            if not counts:
                return
        self.position.complete()

    def _pass_from(self, start: int) -> tuple[int, int]:
        """Return the samples of each rank in a pass from ``start``, and the index behind the last sample of all ranks."""
        left = max(0, self._samples() - start)
        count = left // self.num_replicas if self.drop_last else math.ceil(left / self.num_replicas)
        return count, start + count * self.num_replicas

    def _order(self) -> torch.Tensor:
        """Return the samples of this epoch in PyTorch's order, before they are divided; the same on every rank."""
        if not self.shuffle:
            return torch.arange(self._samples())
        return torch.randperm(self._samples(), generator=torch.Generator().manual_seed(self.seed + self.epoch))

    def _samples(self) -> int:
        return len(cast("Sized", self.dataset))

    def _ranks_changed(self) -> None:
        share = self._samples() / self.num_replicas
        self.num_samples = math.floor(share) if self.drop_last else math.ceil(share)
        self.total_size = self.num_samples * self.num_replicas

    def _resume_at(self, epoch: int, seed: int | None) -> None:
        self.epoch = epoch
        if seed is not None:
            self.seed = self.seed_of_order = seed

    def _refuse_loaders_that_read_ahead(self) -> None:
        """Check that the script gets the drawn samples next.

        Raises:
            SMPUserError: a loader of PyTorch has workers, or one of another library stands between.
        """
        # The sampler does not know who draws from it; the loader is among the callers.
        frame = inspect.currentframe()
        while frame is not None:
            loader = frame.f_locals.get("self")
            if isinstance(loader, torch_data.DataLoader):
                if loader.num_workers or type(loader).__iter__ is not torch_data.DataLoader.__iter__:
                    raise SMPUserError(
                        f"a {type(loader).__module__}.{type(loader).__qualname__} with {loader.num_workers} workers draws from "
                        "smp.data.DistributedSampler: it reads ahead of the training, so that a checkpoint could not tell which "
                        "samples were trained; use smp.data.DataLoader, which takes the same arguments, or kept=False if no "
                        "checkpoint is to keep the position",
                        code="SMP310",
                    )
                return
            frame = frame.f_back
