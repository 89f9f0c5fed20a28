"""A loader that counts what it hands to the script, and not what its workers read ahead."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils.data as torch_data

from smp_config.recovery import readers_at_start
from smp_runtime.data.position import batch_group
from smp_runtime.data.sampler import DistributedSampler
from smp_runtime.data.stream import DistributedStream
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions

logger = logging.getLogger("smp")


class DataLoader(torch_data.DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` for each rank's samples that resumes at the job's position.

    The number of ranks may change. Without a ``sampler`` it makes one, a
    :class:`~smp_runtime.data.sampler.DistributedSampler`; an ``IterableDataset`` is divided by a
    :class:`~smp_runtime.data.stream.DistributedStream`. With ``drop_last`` these also leave out the last samples
    that do not suffice for one per rank.

    Args:
        dataset: with an index, or an ``IterableDataset``.
        batch_size: samples of each batch on this rank, the same on all ranks. It is larger if the job continues
            with fewer ranks after it has lost a host, so that the global batch stays the same.
        shuffle: whether every epoch has a random order of its own.
        sampler: a ``smp.data.DistributedSampler``.
        batch_sampler: a ``BatchSampler`` of PyTorch over such a sampler.
        others: as for PyTorch, in its order; batches are handed out in order.
        seed: of the order, if the loader makes the sampler.
        name: as for the sampler.
        kept: as for the sampler.
        options: as for PyTorch.

    Raises:
        SMPUserError: another kind of sampler, because its order does not show which samples were trained;
            ``in_order=False``; or workers with a data set that divides itself among them.

    Example:
        >>> loader = smp.data.DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True)
        >>> loader.set_epoch(0)
        >>> [len(batch) for (batch,) in loader]  # of 8 samples, alone
        [4, 4]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        *others: Any,
        seed: int = 0,
        name: str | None = None,
        kept: bool = True,
        **options: Any,
    ) -> None:
        drops = bool(options.get("drop_last", others[3] if len(others) > 3 else False))
        is_stream = isinstance(dataset, torch_data.IterableDataset)
        if is_stream and not isinstance(dataset, DistributedStream):
            dataset = DistributedStream(dataset, drop_last=drops, name=name, kept=kept)
        elif not is_stream and sampler is None and batch_sampler is None:
            sampler, shuffle = (
                DistributedSampler(dataset, shuffle=bool(shuffle), seed=seed, drop_last=drops, name=name, kept=kept),
                None,
            )
        source = dataset if is_stream else getattr(batch_sampler, "sampler", None) or sampler
        if not isinstance(source, DistributedSampler | DistributedStream) or (
            batch_sampler is not None and type(batch_sampler) is not torch_data.BatchSampler
        ):
            raise SMPUserError(
                f"smp.data.DataLoader got sampler={sampler!r} and batch_sampler={batch_sampler!r}, but it takes a "
                "smp.data.DistributedSampler, or a BatchSampler of PyTorch over one: of another order nobody could say which "
                "samples were trained; leave both out, or use PyTorch's DataLoader",
                code="SMP310",
            )
        if batch_size is not None and batch_sampler is None and kept:
            batch_size = batch_of_now(batch_size, source.num_replicas)
        super().__init__(dataset, batch_size, shuffle, sampler, batch_sampler, *others, **options)
        self._draws_seeds = self.generator is None
        if self._draws_seeds:
            # PyTorch's default would draw from the script's random numbers, which a resumed job continues.
            self.generator = torch.Generator()
        if not getattr(self, "in_order", True):
            raise SMPUserError(
                "in_order=False hands out batches in any order; leave it out, so that each is read exactly once",
                code="SMP310",
            )
        if isinstance(source, DistributedStream):
            _refuse_if_divided(source.dataset, self.num_workers)
        self.source = source
        source.loaders.add(self)

    @property
    def epoch(self) -> int:
        """Return the epoch of the next pass; after resuming, the epoch to continue."""
        return self.source.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; an epoch before the resumed one has no batches any more."""
        self.source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the script; see :meth:`smp_runtime.data.position.SampleSource.state_dict`."""
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`smp_runtime.data.position.SampleSource.load_state_dict`."""
        self.source.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # more than PyTorch's own kind of iterator
        source, seen = self.source, -1
        try:
            while seen != source.times_regrouped:  # after a regrouping, other ranks continue from the job's position
                seen = source.times_regrouped
                yield from self._pass(seen)
            source.position.complete()
        finally:
            source.position.is_counted_by_loader = False

    def _pass(self, seen: int) -> Iterator[Any]:
        """Yield batches from the job's position, as long as the same ranks read them."""
        source, position, batch = self.source, self.source.position, self.batch_size_here
        position.is_counted_by_loader = True  # as long as this pass lasts: others may draw from the source, too
        if isinstance(source, DistributedStream):
            source.tell_workers(batch, shared=self.num_workers > 0)
        if self._draws_seeds and self.generator is not None:
            # Ranks with the same samples change them in the same way.
            place = (source.seed_of_order, source.epoch, source.position.index, source.rank, source.num_replicas)
            self.generator.manual_seed(random.Random(repr(place)).getrandbits(63))
        for each in super().__iter__():
            position.hand_out(batch * source.num_replicas)
            yield each
            if seen != source.times_regrouped:
                return

    @property
    def batch_size_here(self) -> int:
        """Return the number of samples of a batch on this rank."""
        return getattr(self.batch_sampler, "batch_size", None) or 1

    def divide(self, before: int, after: int) -> None:
        """Change the batch size so that ``after`` ranks share the global batch of ``before`` ranks."""
        if before != after and self.batch_sampler is not None:
            self.batch_sampler.batch_size = self.batch_size_here * before // after  # type: ignore[attr-defined]


def batch_of_now(batch: int, replicas: int) -> int:
    """Return the batch size per rank that keeps the global batch of the job's start, when it had more ranks.

    Args:
        batch: the script's batch size, which does not account for lost ranks.
        replicas: number of ranks among which a loader divides its samples.
    """
    former = readers_at_start(os.environ)
    if former is None or not sessions.is_initialized():
        return batch
    ranks = sessions.current_session().ranks
    now, microbatches = ranks.size(batch_group(ranks)), ranks.cfg.microbatches
    if now == former or replicas != now:
        return batch
    whole, rest = divmod(batch * former, now)
    fits = rest == 0 and (whole % microbatches == 0 or batch % microbatches != 0)
    if ranks.rank == 0:
        if fits:
            logger.info("batches of %d instead of %d samples on %d ranks instead of %d", whole, batch, now, former)
        else:
            logger.warning(
                "the global batch is %d samples instead of %d, since %d ranks cannot divide that into batches of whole samples for "
                "%d microbatches; the learning rate may have to follow",
                batch * now,
                batch * former,
                now,
                microbatches,
            )
    return whole if fits else batch


def _refuse_if_divided(dataset: Any, workers: int) -> None:
    if workers and type(dataset).__module__.partition(".")[0] == "datasets":
        raise SMPUserError(
            f"a {type(dataset).__qualname__} of the library datasets divides itself among the {workers} workers, which then "
            "have other samples than the order says; use num_workers=0, or a data set of your own that iterates over it in one "
            "process",
            code="SMP310",
        )
