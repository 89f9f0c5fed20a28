"""Averages sparse gradients over data parallel ranks and keeps them sparse, for tables with few used rows."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from smp_runtime.comm.flag_all_reduce import FlagAllReduce

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Collectives

#: Reported in place of a gradient's number of entries: there is no gradient, or it is dense.
_NONE, _DENSE = -1, -2


def sparse_tables(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the trained parameters with sparse gradients: embedding tables made with ``sparse=True``."""
    tables: dict[Any, None] = {}  # tied ones once
    for module in modules:
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        weight = module.weight
        if module.sparse and weight.requires_grad:
            tables[weight] = None
    return list(tables)


class SparseReducer:
    """Averages the sparse gradients of tables over a group, at the end of a window.

    Every rank gathers the entries of all others, as many as the rank with most has. Where any rank has a dense gradient of a
    table, which is used outside its module too, all make theirs dense.

    Args:
        parameters: the same, in the same order, on every rank of the group.
        size: number of ranks of the group.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        collectives: Collectives,
        size: int,
    ) -> None:
        self._parameters = list(parameters)
        self._group, self._collectives = group, collectives
        self._size = size
        self._reduces = True
        self.touched = False
        weak = weakref.ref(self)  # the garbage collector cannot follow parameter → hook; a strong reference leaks

        def gradient_added(_: torch.Tensor) -> None:
            if (reducer := weak()) is not None:
                reducer.touched = True

        self._handles = [p.register_post_accumulate_grad_hook(gradient_added) for p in self._parameters]

    @property
    def bucket_order(self) -> list[list[int]]:
        """Return an empty list: there are no buckets."""
        return []

    def use_transport(self, make: Callable[..., Any]) -> None:
        """Do nothing, because communication hooks see dense gradients only."""

    def begin_window(self, *, reduces: bool) -> None:
        """Expect gradients."""
        self._reduces = reduces
        self.touched = False

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def finish_window(self, *, measures: bool = True) -> None:
        """Exchange the gradients; a parameter that no rank used keeps none.

        Args:
            measures: has no effect: there is no order to measure.
        """
        if not self._reduces or not self._parameters:
            return
        gradients = [_coalesced(parameter.grad) for parameter in self._parameters]
        counts_of_all = self._counts(gradients)
        for parameter, counts, gradient in zip(self._parameters, counts_of_all, gradients, strict=True):
            if set(counts) <= {_NONE}:
                parameter.grad = None
            elif _DENSE in counts:
                # All ranks exchange it in one form, so one dense gradient makes all of them dense.
                parameter.grad = self._dense(parameter, gradient)
            else:
                rows = [max(count, 0) for count in counts]
                parameter.grad = self._sparse(parameter, gradient, rows)

    def _counts(self, gradients: Sequence[torch.Tensor | None]) -> list[list[int]]:
        """Return, by parameter, each rank's number of entries, or a code for no gradient or a dense one."""
        mine = [_count(gradient) for gradient in gradients]
        table = torch.zeros(self._size, len(mine), dtype=torch.float64, device="cpu")
        table[self._group.rank()] = torch.tensor(mine, dtype=torch.float64, device="cpu")
        flags = FlagAllReduce(table.view(-1), self._parameters[0].device, self._collectives, self._group, self._size)
        by_parameter = flags.finish().view_as(table).t().tolist()
        return [list(map(int, column)) for column in by_parameter]

    def _dense(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor:
        if gradient is None:
            total = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        else:
            total = gradient.to_dense().contiguous().clone()
        total.div_(self._size)
        self._collectives.all_reduce(total.view(-1), self._group).wait()
        return total

    def _sparse(self, parameter: nn.Parameter, gradient: torch.Tensor | None, counts: Sequence[int]) -> torch.Tensor:
        """Return the average over the group.

        Sums are computed in float32 or a wider type, in the same order on every rank.
        """
        width, most = parameter.shape[1:], max(counts)
        indices = torch.zeros(most, dtype=torch.int64, device=parameter.device)
        values = torch.zeros(most, *width, dtype=parameter.dtype, device=parameter.device)
        if gradient is not None:
            count = gradient.indices().shape[1]
            indices[:count] = gradient.indices()[0]
            values[:count] = gradient.values()
        all_indices = self._gathered(indices, counts)
        all_values = self._gathered(values.view(most, math.prod(width)), counts).view(-1, *width)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        total = torch.sparse_coo_tensor(
            all_indices[None], all_values.to(wide).div_(self._size), parameter.shape, check_invariants=False
        )
        return total.coalesce().to(parameter.dtype).coalesce()

    def _gathered(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the valid rows of all ranks, one rank after the other."""
        whole = rows.new_empty(self._size, *rows.shape)
        self._collectives.all_gather(whole.view(-1), rows.view(-1), self._group).wait()
        return torch.cat([part[:count] for part, count in zip(whole, counts, strict=True)])


def _coalesced(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or not gradient.is_sparse:
        return gradient
    return gradient.coalesce()


def _count(gradient: torch.Tensor | None) -> int:
    """Return the number of a sparse gradient's entries, or a code for no gradient or a dense one."""
    if gradient is None:
        return _NONE
    if not gradient.is_sparse:
        return _DENSE
    return gradient.indices().shape[1]
