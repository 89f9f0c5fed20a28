"""Tokens go to the ranks of their experts, and the results come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from smp_config import Group
from smp_version2.state import state

#: Runs this rank's experts: rows ``[m, h]``, the experts' numbers among this rank's, ``[m]``, and the rows of each expert.
LocalExperts = Callable[[torch.Tensor, torch.Tensor, "list[int]"], torch.Tensor]


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks that share experts out with this one."""

    size: int
    rank: int
    process_group: dist.ProcessGroup | None

    @classmethod
    def of_job(cls) -> ExpertGroup:
        """Return the job's group."""
        ranks = state.joined
        if ranks.size(Group.EP) == 1:
            return cls(1, 0, None)
        return cls(ranks.size(Group.EP), ranks.rank_in(Group.EP), ranks.process_group(Group.EP))

    def __deepcopy__(self, memo: Any) -> ExpertGroup:
        return self


class _ExchangeRows(torch.autograd.Function):
    """Forward rows to other ranks; backward their gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _send(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _send(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class _ScaleGradient(torch.autograd.Function):
    """Forward nothing; backward the gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


def _send(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    made = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(made, rows.contiguous(), received, sent, group=group)
    return made


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: ExpertGroup) -> torch.Tensor:
    """Send rows to the group's ranks, in their order, and return those that come in; all ranks call it."""
    if group.process_group is None:
        return rows
    made: torch.Tensor = _ExchangeRows.apply(rows, sent, received, group.process_group)
    return made


def exchange_counts(counts: torch.Tensor, group: ExpertGroup) -> torch.Tensor:
    """Send one row of counts to each rank of the group, and return one from each."""
    if group.process_group is None:
        return counts
    made = torch.empty_like(counts)
    dist.all_to_all_single(made, counts.contiguous(), group=group.process_group)
    return made


def run_experts(
    rows: torch.Tensor, numbers: torch.Tensor, experts: int, group: ExpertGroup, run: LocalExperts
) -> torch.Tensor:
    """Return the results of experts on any of the group's ranks; all ranks call it.

    Args:
        rows: inputs, ``[r, h]``.
        numbers: the expert of each row, ``[r]``.
        experts: how many there are on all ranks; each rank has as many, in the order of the ranks.
        run: runs this rank's experts.
    """
    here = experts // group.size
    order = torch.argsort(numbers, stable=True)
    counts = torch.bincount(numbers, minlength=experts).view(group.size, here)
    coming = exchange_counts(counts, group)
    # Both in one copy to the host, which waits for the device.
    sent, received = torch.stack([counts, coming]).tolist()
    to_ranks, from_ranks = [sum(each) for each in sent], [sum(each) for each in received]
    arrived = exchange(rows[order], to_ranks, from_ranks, group)
    own = torch.arange(here, device=rows.device).repeat(group.size).repeat_interleave(coming.flatten())
    sizes = [sum(column) for column in zip(*received, strict=True)]
    results = _run_here(arrived, own, sizes, group.size, run)
    back = exchange(results, from_ranks, to_ranks, group)
    return back[_invert(order)]


def _run_here(rows: torch.Tensor, own: torch.Tensor, sizes: list[int], ranks: int, run: LocalExperts) -> torch.Tensor:
    """Run this rank's experts on the tokens of all ranks.

    FSDP averages over the ranks that have these experts. Their gradients are sums over the losses of ``ranks`` times as many, so
    they are divided here; what goes back to the tokens is not.
    """
    if ranks == 1:
        return run(rows, own, sizes)
    if rows.requires_grad:
        rows = _ScaleGradient.apply(rows, float(ranks))
    results = run(rows, own, sizes)
    if results.requires_grad:
        results = _ScaleGradient.apply(results, 1.0 / ranks)
    return results


def _invert(order: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(order)
    made[order] = torch.arange(order.numel(), device=order.device)
    return made


def combine(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of each token's results: ``[T * k, h]`` and ``[T, k]`` to ``[T, h]``, in the type of the results."""
    tokens, k = weights.shape
    return (results.view(tokens, k, -1) * weights[..., None]).sum(1).to(results.dtype)


def repeat_rows(rows: torch.Tensor, times: int) -> torch.Tensor:
    """Return every row so many times, one after the other: ``[T, h]`` to ``[T * times, h]``."""
    return rows[:, None].expand(-1, times, -1).reshape(rows.shape[0] * times, rows.shape[1])


def shuffle(
    rows: torch.Tensor, seed: int, group: ExpertGroup
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Mix the rows of the group's ranks; return this rank's new ones, and the function that takes results back.

    Args:
        seed: of this rank's order.
    """
    order = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(seed)).to(rows.device)
    sent = _even_parts(rows.shape[0], group.size)
    received = exchange_counts(torch.tensor(sent, device=rows.device)[:, None], group).flatten().tolist()
    mixed = exchange(rows[order], sent, received, group)

    def take_back(results: torch.Tensor) -> torch.Tensor:
        return exchange(results, received, sent, group)[_invert(order)]

    return mixed, take_back


def _even_parts(length: int, parts: int) -> list[int]:
    return [length // parts + (at < length % parts) for at in range(parts)]
