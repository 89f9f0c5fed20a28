"""Streams, which have an order and no index: each rank takes its share, and begins where the job was."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from smp_runtime.data.position import SampleSource, place_among_readers
from smp_runtime.errors import SMPUserError

#: Values for workers: the epoch, the first index of the pass, and samples in a rank's batch.
_EPOCH, _START, _BATCH = range(3)
_NOTHING = -1


class DistributedStream(IterableDataset[Any], SampleSource):
    """This rank's share of an iterable data set, from the job's position.

    Of each n consecutive samples, rank r of n takes the r-th, as with
    :class:`~smp_runtime.data.sampler.DistributedSampler`. Workers of a loader take whole batches by turns, so
    that their number does not change the order.

    Every rank and worker iterates over all samples and keeps its own. It also iterates over the samples before
    the position, unless the data set has a method ``iter_from(index)``, which returns an iterator that begins
    with that sample.

    Args:
        dataset: returns the same samples in the same order whenever it is iterated, on every rank and in every
            worker: it must not divide itself. Its ``set_epoch(epoch)`` is called if it has one.
        num_replicas: ranks that read different samples, as for the sampler.
        rank: as for the sampler.
        drop_last: leave out the last samples that do not make one for each rank. By default, the ranks that lack
            one get one of these samples again.
        name: as for the sampler.
        kept: as for the sampler.

    Raises:
        NotInitializedError: before ``smp.init()``, unless ``num_replicas`` and ``rank`` are given.
        SMPUserError: no rank has that number; or it is read by workers of a loader that is no
            ``smp.data.DataLoader``.

    Example:
        >>> class Lines(torch.utils.data.IterableDataset):
        ...     def __iter__(self):
        ...         return iter(["to be", "or not", "to be"])
        >>> list(smp.data.DistributedStream(Lines()))  # alone
        ['to be', 'or not', 'to be']
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
        *,
        name: str | None = None,
        kept: bool = True,
    ) -> None:
        self.num_replicas, self.rank = place_among_readers(num_replicas, rank)
        self.dataset = dataset
        self.drop_last = drop_last
        self.epoch = 0
        self._told = torch.tensor([0, _NOTHING, 0])
        self._begin_source(None, name, kept=kept)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; an epoch before the resumed one has no samples any more."""
        self.epoch = epoch
        self.position.is_numbered = True

    def __len__(self) -> int:
        samples = len(cast("Sized", self.dataset))
        return samples // self.num_replicas if self.drop_last else math.ceil(samples / self.num_replicas)

    def tell_workers(self, batch_size: int, *, shared: bool) -> None:
        """Begin a pass with samples that a loader counts.

        Args:
            batch_size: samples in a rank's batch.
            shared: whether workers that live longer than a pass must receive the new values.
        """
        # Persistent workers have copies of this object, made when they began.
        if shared:
            self._told.share_memory_()
        start = self.position.begin(self.epoch)
        self._told[_EPOCH], self._told[_BATCH] = self.epoch, batch_size
        self._told[_START] = _NOTHING if start is None else start

    def __iter__(self) -> Iterator[Any]:
        info, position = get_worker_info(), self.position
        if position.is_counted_by_loader:
            epoch, start, batch = (int(each) for each in self._told)
            if start == _NOTHING:
                return
            worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
            # Whole batches by turns: the loader takes a batch from each worker in the same order.
            for number, sample in enumerate(self._share(epoch, start)):
                if (number // batch) % workers == worker:
                    yield sample
            return
        if info is not None:
            raise SMPUserError(
                f"a loader with {info.num_workers} workers reads smp.data.DistributedStream ahead of the training, so that a "
                "checkpoint could not tell which samples were trained; use smp.data.DataLoader, which takes the same arguments",
                code="SMP310",
            )
        seen = -1
        while seen != self.times_regrouped:  # after a regrouping, other ranks continue from the job's position
            seen, position = self.times_regrouped, self.position
            begin = position.begin(self.epoch)
            if begin is None:
                return
            for sample in self._share(self.epoch, begin):
                # Before the yield: code behind it runs only if another sample is asked for.
                position.hand_out(self.num_replicas)
                yield sample
                if seen != self.times_regrouped:
                    break
        self.position.complete()

    def _share(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield this rank's samples of an epoch from an index on."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if hasattr(self.dataset, "iter_from"):
            stream = iter(self.dataset.iter_from(start))
        else:
            stream = itertools.islice(self.dataset, start, None)
        while block := tuple(itertools.islice(stream, self.num_replicas)):
            # A last block that is too short begins again, so that all ranks have as many samples.
            if len(block) == self.num_replicas or not self.drop_last:
                yield block[self.rank % len(block)]

    def _samples(self) -> int | None:
        return None

    def _resume_at(self, epoch: int, seed: int | None) -> None:
        self.epoch = epoch
