"""The tensor parallel group of a rank, and the plain collectives over it, along any dimension."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from smp_config import ConfigError, Group, limits
from smp_runtime.comm.collectives import NOTHING, Collectives, Work
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.registry import TensorSlice


class Throttle:
    """A limit on the number of collectives by which the CPU may run ahead of the GPU.

    Each queued collective keeps its buffers, so a CPU far ahead of the GPU raises the peak of memory.

    Args:
        limit: collectives in flight; -1 means any number. On the CPU there is no queue, and no effect.
    """

    def __init__(self, limit: int = limits.DEFAULT_THROTTLE) -> None:
        self._limit = limit
        self._events: deque[torch.cuda.Event] = deque()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Throttle:
        """Read the limit.

        Raises:
            SMPUserError: it is neither a positive number nor -1.
        """
        try:
            return cls(limits.throttle_limit(os.environ if environ is None else environ))
        except ConfigError as error:
            raise SMPUserError(str(error)).of_the_kind_of(error) from None

    def launched(self, work: Work, tensor: torch.Tensor) -> Work:
        """Return the collective ``work`` on ``tensor``; it is counted once it is waited for."""
        is_counted = self._limit >= 0 and tensor.device.type == "cuda"
        return _CountedWork(work, self) if is_counted else work

    def passed(self) -> None:
        """Count a collective that the stream waits for, and block on the oldest if there are too many."""
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        if len(self._events) > self._limit:
            # The host must not run so far ahead that memory of many collectives waits to be freed.
            self._events.popleft().synchronize()


class _CountedWork:
    def __init__(self, work: Work, throttle: Throttle) -> None:
        self._work = work
        self._throttle = throttle

    def wait(self) -> None:
        self._work.wait()  # on the GPU: the stream waits, the CPU does not
        self._throttle.passed()


class TensorGroup:
    """The ranks that share each distributed layer with this one.

    Without autograd; :mod:`smp_runtime.tensor_parallel.collectives` has the differentiable forms. With one rank all
    operations return their input. In the tracing step, which one rank runs alone, they return tensors of the right
    shape without the other ranks.

    Attributes:
        prescaled: whether all of them get the same batch; else each has its own.
        spreads_experts: whether each of them has whole experts of a mixture.
        slices_activations: whether activations between layers are sliced (``optimize="memory"``).
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._group: dist.ProcessGroup = ranks.groups.group(Group.TP)
        self._throttle = Throttle.from_environment()
        self.size = ranks.size(Group.TP)
        self.rank = ranks.rank_in(Group.TP)
        self.prescaled = ranks.cfg.prescaled_batch
        self.slices_activations = ranks.cfg.optimize == "memory"
        self.spreads_experts = ranks.cfg.expert_parallel_degree > 1
        self.device = ranks.device

    @classmethod
    def of(cls, ranks: Ranks) -> TensorGroup:
        """Return the group of a job, always the same object."""
        return ranks.keep(cls, lambda: cls(ranks))

    def __deepcopy__(self, memo: Any) -> TensorGroup:
        return self  # a copied module is split over the same ranks

    def alone(self) -> TensorGroup:
        """Return a group of only this rank, for a module that is not split."""
        made = object.__new__(type(self))
        made.__dict__ |= self.__dict__ | {"size": 1, "rank": 0, "prescaled": False}
        return made

    @contextlib.contextmanager
    def one_batch(self) -> Iterator[None]:
        """Run the block with the same batch on all ranks of the group, whatever is configured.

        All ranks enter it together.
        """
        before, self.prescaled = self.prescaled, True
        try:
            yield
        finally:
            self.prescaled = before

    @property
    def is_tracing(self) -> bool:
        """Return whether this rank runs the tracing step, alone."""
        return self.ranks.step.is_tracing

    @property
    def _collectives(self) -> Collectives:
        return self.ranks.collectives

    def agree(self, value: Any) -> Any:
        """Return the object of the group's first rank on every rank; all ranks call it."""
        ranks = self.ranks
        return ranks.control.broadcast(value, ranks.members(Group.TP)) if self.size > 1 else value

    def start_all_reduce(self, tensor: torch.Tensor) -> Work:
        """Begin to sum ``tensor`` over the group, in place."""
        if self.is_tracing:
            return NOTHING
        return self._throttle.launched(self._collectives.all_reduce(tensor, self._group), tensor)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous ``tensor`` over the group, in place; returns it."""
        if self.size > 1:
            self.start_all_reduce(tensor).wait()
        return tensor

    def start_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Begin to gather; the first result is ``[size, *tensor.shape]`` once the second is waited for."""
        if self.is_tracing:
            return tensor.expand(self.size, *tensor.shape).clone(), NOTHING
        full = tensor.new_empty((self.size, *tensor.shape))
        work = self._collectives.all_gather(full.view(-1), tensor.contiguous().view(-1), self._group)
        return full, self._throttle.launched(work, full)

    def gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return every rank's tensor, joined along ``dim`` in group order."""
        if self.size == 1:
            return tensor
        full, work = self.start_gather(tensor)
        work.wait()
        return join(full, dim)

    def start_scatter_sum(self, tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, Work]:
        """Begin to sum over the group, each rank keeping its part along ``dim``, which the size divides."""
        parts = split_dim(tensor, self.size, dim).contiguous()
        if self.is_tracing:
            return parts[self.rank].clone(), NOTHING
        mine = torch.empty_like(parts[0])
        work = self._collectives.reduce_scatter(mine.view(-1), parts.view(-1), self._group)
        return mine, self._throttle.launched(work, parts)

    def scatter_sum(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum over the group; each rank keeps its part along ``dim``."""
        if self.size == 1:
            return tensor
        mine, work = self.start_scatter_sum(tensor, dim)
        work.wait()
        return mine

    def slice(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part along ``dim``."""
        if self.size == 1:
            return tensor
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * length, length)

    def exchange(self, tensor: torch.Tensor, split: int, joined: int) -> torch.Tensor:
        """Give every rank its part along dim ``split``; join what comes in along dim ``joined``."""
        if self.size == 1:
            return tensor
        sent = split_dim(tensor, self.size, split).contiguous()
        if self.is_tracing:
            return join(sent, joined)
        received = torch.empty_like(sent)
        work = self._collectives.all_to_all(received.view(-1), sent.view(-1), self._group)
        self._throttle.launched(work, sent).wait()
        return join(received, joined)


def join(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    """Turn ``[n, *shape]`` into ``shape`` with its ``dim`` n times as long; without a copy for dim 0."""
    shape = list(stacked.shape[1:])
    dim %= len(shape)
    shape[dim] *= stacked.shape[0]
    return stacked.movedim(0, dim).reshape(shape)


def split_dim(tensor: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """Turn ``shape`` into ``[count, *shape with dim divided]``; return a view."""
    dim %= tensor.dim()
    return tensor.unflatten(dim, (count, tensor.shape[dim] // count)).movedim(dim, 0)


def gather_whole(mine: torch.Tensor, where: TensorSlice, group: TensorGroup) -> torch.Tensor:
    """Build a whole tensor from every rank's part of it."""
    missing = where.size - mine.shape[where.dim]
    padding = [0, 0] * (mine.dim() - 1 - where.dim) + [0, missing]
    on_device = F.pad(mine.detach(), padding).to(group.device)
    full, work = group.start_gather(on_device)
    work.wait()
    if len(where.bounds) > 2:  # several pieces, each divided over the ranks
        runs = (join(run, where.dim) for run in full.split(where.lengths, where.dim + 1))
        return torch.cat(list(runs), where.dim).to(mine.device)
    if where.size == where.shape[where.dim]:  # one rank has all of it
        return full.sum(0, dtype=full.dtype).to(mine.device)
    # The padding of the ranks' parts comes last, behind the whole.
    return join(full, where.dim).narrow(where.dim, 0, where.shape[where.dim]).contiguous().to(mine.device)
