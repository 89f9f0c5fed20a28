"""Attention of a member's rows over the blocks of keys of all members: as a ring, or with all blocks gathered at once.

A *member* is a rank, or several neighboring ranks that have exchanged heads. Blocks travel straight from their owner to whom
needs them. While one is computed with, the next is under way.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.context.attention import fused, unfused
from smp_runtime.context.attention.merging import PartialAttention, computing_dtype
from smp_runtime.context.attention.plan import CallKind
from smp_runtime.context.attention.traffic import RowExchange, counters_of, start_exchange

if TYPE_CHECKING:
    from smp_runtime.context.attention.plan import AttentionCall, BlockwisePlan, KeyBlock
    from smp_runtime.context.attention.positions import RowIndex
    from smp_runtime.context.attention.scores import BlockScoring
    from smp_runtime.context.attention.traffic import AttentionGroup

_Blocks = dict[int, list[torch.Tensor]]


@dataclass(frozen=True)
class MemberRing:
    """The members, and this rank among them.

    Args:
        ranks: for each member, the rank of the group that holds the same heads as this one.
        wants_logsumexp: whether the log-sum-exp of the scores is used.
    """

    group: AttentionGroup
    ranks: list[int]
    plan: BlockwisePlan
    wants_logsumexp: bool = False

    def rank_before(self, distance: int) -> int:
        """Return the rank of the member so far before this one."""
        return self.ranks[(self.plan.member - distance) % self.plan.members]

    def rank_behind(self, distance: int) -> int:
        """Return the rank of the member so far behind this one."""
        return self.ranks[(self.plan.member + distance) % self.plan.members]

    def start_fetch(self, distances: list[int], tensors: list[torch.Tensor]) -> RowExchange:
        """Begin to send this member's rows to those that need them, and to receive the rows that this one needs."""
        plan = self.plan
        leaving = {
            self.rank_behind(each): [_chosen(tensor, plan.leaving[each]) for tensor in tensors]
            for each in distances
            if each in plan.leaving
        }
        arriving = {
            self.rank_before(each): [_shape(tensor, len(plan.arriving[each].positions)) for tensor in tensors]
            for each in distances
            if each in plan.arriving
        }
        return start_exchange(self.group, leaving, arriving, tensors[0])

    def start_return(self, distances: list[int], gradients: _Blocks, tensors: list[torch.Tensor]) -> RowExchange:
        """Begin to return gradients of rows to their owners, and to receive those of this member's own rows."""
        plan = self.plan
        leaving = {self.rank_before(each): gradients[each] for each in distances if each in plan.arriving}
        arriving = {}
        for each in distances:
            if each in plan.leaving:
                places = plan.leaving[each]
                shapes = [_shape(tensor, tensor.shape[2] if places is None else len(places)) for tensor in tensors]
                arriving[self.rank_behind(each)] = shapes
        return start_exchange(self.group, leaving, arriving, tensors[0])

    def add_returned(self, returned: RowExchange, distances: list[int], sums: list[torch.Tensor]) -> None:
        """Add gradients that others have returned."""
        found = returned.finish()
        for each in distances:
            if each not in self.plan.leaving:
                continue
            rows, parts = self.plan.leaving[each], found[self.rank_behind(each)]
            for total, part in zip(sums, parts, strict=True):
                _add_rows(total, rows, part)


def attend_blockwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    ring: MemberRing,
    scoring: BlockScoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of this member's rows over the keys of all members; every rank of the group calls it.

    The second result is the log-sum-exp of the scores, ``[batch, heads, rows]``; -inf for rows that attend to nothing. It is
    empty if it is not wanted.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(q, k, v, mask, sinks, ring, scoring)
    return found


class _Attention(torch.autograd.Function):
    """Attention of this member's rows; backward returns the gradients of keys and values to their owners."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        ring: MemberRing,
        scoring: BlockScoring,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ring = ring
        ctx.set_materialize_grads(False)  # without a gradient of the log-sum-exp, fused operators do the backward pass
        ctx.scoring = dataclasses.replace(scoring, mask=None)  # saved below, so that hooks of saved tensors see it
        ctx.wants_mask = mask is not None and ctx.needs_input_grad[3]
        plan = ring.plan
        counters_of(ring.group).scores += plan.scores()
        with _plain_types(q):
            result = PartialAttention.empty(q, v.shape[-1])
            pending = [ring.start_fetch(plan.rounds[0], [k, v])] if plan.rounds else []
            _add_block(result, q, k, v, plan.own, scoring, own=True, learned=ctx.wants_mask)
            for number, distances in enumerate(plan.rounds):
                blocks = pending.pop().finish()
                if number + 1 < len(plan.rounds):  # under way during the computation below
                    pending.append(ring.start_fetch(plan.rounds[number + 1], [k, v]))
                for each in distances:
                    if each in plan.arriving:
                        keys, values = blocks[ring.rank_before(each)]
                        _add_block(
                            result, q, keys, values, plan.arriving[each], scoring, own=False, learned=ctx.wants_mask
                        )
            if sinks is not None:
                result.add_sinks(sinks)
            out = result.out.to(q.dtype)
            logsumexp = result.top.new_empty(0)
            if ring.wants_logsumexp:
                logsumexp = (result.top + result.total.log())[..., 0]
        ctx.save_for_backward(q, k, v, mask, sinks, out, result.top, result.total)
        return out, logsumexp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_out: torch.Tensor | None, of_logsumexp: torch.Tensor | None) -> Any:
        q, k, v, mask, sinks, out, top, total = ctx.saved_tensors
        gradient = torch.zeros_like(out) if of_out is None else of_out
        scoring = dataclasses.replace(ctx.scoring, mask=mask)
        with _plain_types(q):
            whole = PartialAttention(out, top, total)
            work = _Backward(ctx, gradient.contiguous(), of_logsumexp, q, k, v, whole, scoring)
            work.run()
        wanted = ctx.needs_input_grad
        found = (work.of_q, work.of_k, work.of_v)
        of_inputs = [each.to(q.dtype) if wanted[place] else None for place, each in enumerate(found)]
        of_mask = work.of_mask.to(mask.dtype) if work.of_mask is not None else None
        of_sinks = work.of_sinks(sinks).to(sinks.dtype) if sinks is not None and wanted[4] else None
        return *of_inputs, of_mask, of_sinks, None, None


class _Backward:
    """The backward pass of a member.

    Attributes:
        of_q, of_k, of_v: gradients.
        of_mask: gradient of what was added to the scores; None if it is not asked for.
    """

    def __init__(
        self,
        ctx: Any,
        gradient: torch.Tensor,
        of_logsumexp: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        whole: PartialAttention,
        scoring: BlockScoring,
    ) -> None:
        self._ring: MemberRing = ctx.ring
        self._of_logsumexp = of_logsumexp
        self._gradient, self._q, self._k, self._v = gradient, q, k, v
        self._whole, self._scoring = whole, scoring
        self._logsumexp = whole.logsumexp()
        # Gradients of keys and values that others hold are returned if either is asked for: all ranks decide alike.
        self._returns = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dtype = computing_dtype(q.dtype)
        self.of_q, self.of_k, self.of_v = (torch.zeros_like(each, dtype=dtype) for each in (q, k, v))
        self.of_mask = None
        if ctx.wants_mask and scoring.mask is not None:
            self.of_mask = torch.zeros_like(scoring.mask, dtype=dtype)

    def run(self) -> None:
        """Compute the gradients."""
        ring, plan = self._ring, self._ring.plan
        tensors = [self._k, self._v]
        pending = [ring.start_fetch(plan.rounds[0], tensors)] if plan.rounds else []
        self._add_block(self._k, self._v, plan.own, self.of_k, self.of_v, own=True)
        returning: list[tuple[RowExchange, list[int]]] = []
        for number, distances in enumerate(plan.rounds):
            blocks = pending.pop().finish()
            if number + 1 < len(plan.rounds):
                pending.append(ring.start_fetch(plan.rounds[number + 1], tensors))
            gradients = self._of_round(distances, blocks)
            if self._returns:
                self._finish(returning)
                returning.append((ring.start_return(distances, gradients, tensors), distances))
        self._finish(returning)

    def of_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """Return the gradient of sinks, whose values are 0, from this member's rows."""
        weights = (sinks.to(self._whole.top.dtype)[:, None] - self._logsumexp).exp()  # [batch, heads, rows]
        delta = (self._gradient.to(weights.dtype) * self._whole.out.to(weights.dtype)).sum(-1)
        if self._of_logsumexp is not None:
            delta = delta - self._of_logsumexp
        return -(weights * delta).sum((0, 2))

    def _of_round(self, distances: list[int], blocks: _Blocks) -> _Blocks:
        """Return the gradients of the blocks that came in a round, by distance."""
        gradients = {}
        for each in distances:
            if each in self._ring.plan.arriving:
                keys, values = blocks[self._ring.rank_before(each)]
                sums = [torch.zeros_like(part, dtype=self.of_q.dtype) for part in (keys, values)]
                self._add_block(keys, values, self._ring.plan.arriving[each], *sums, own=False)
                gradients[each] = [part.to(keys.dtype) for part in sums]
        return gradients

    def _finish(self, returning: list[tuple[RowExchange, list[int]]]) -> None:
        while returning:
            returned, distances = returning.pop()
            self._ring.add_returned(returned, distances, [self.of_k, self.of_v])

    def _add_block(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        block: KeyBlock,
        of_k: torch.Tensor,
        of_v: torch.Tensor,
        *,
        own: bool,
    ) -> None:
        if own:
            keys, values = _chosen(keys, block.places), _chosen(values, block.places)
        part_k, part_v = of_k, of_v
        if own and block.places is not None:
            part_k, part_v = (torch.zeros_like(each, dtype=of_k.dtype) for each in (keys, values))
        for call in block.calls:
            q = self._q[:, :, call.rows]
            found = self._of_call(block, call, q, keys[:, :, call.keys], values[:, :, call.keys])
            self.of_q[:, :, call.rows] += found[0]
            part_k[:, :, call.keys] += found[1]
            part_v[:, :, call.keys] += found[2]
        if part_k is not of_k:
            _add_rows(of_k, block.places, part_k)
            _add_rows(of_v, block.places, part_v)

    def _of_call(
        self, block: KeyBlock, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient = self._gradient[:, :, call.rows]
        rows = call.rows
        out, top, total = (each[:, :, rows] for each in (self._whole.out, self._whole.top, self._whole.total))
        learned = self.of_mask is not None
        of_logsumexp = None if self._of_logsumexp is None else self._of_logsumexp[:, :, rows]
        is_unfused = learned or of_logsumexp is not None
        operator, bias, _ = _operator(q, k, v, block, call, self._scoring, is_unfused=is_unfused)
        if operator is not None:
            # Contiguous: some operators take no others.
            logsumexp = self._logsumexp[:, :, rows].contiguous()
            return fused.backward(operator, gradient, (q, k, v), bias, out.contiguous(), logsumexp)
        extras = _extras(q, block, call, self._scoring)
        whole = PartialAttention(out.to(self.of_q.dtype), top, total)
        *found, of_tile = unfused.backward(
            gradient, of_logsumexp, (q, k, v), whole, self._scoring.scale, extras, wants_tile=learned
        )
        if self.of_mask is not None and of_tile is not None:
            target = self.of_mask[:, :, rows] if self.of_mask.shape[2] > 1 else self.of_mask
            if isinstance(call.columns, slice):
                target[..., call.columns] += of_tile
            else:
                target.index_add_(-1, call.columns.on(target.device), of_tile)
        return found[0], found[1], found[2]


def _add_block(
    result: PartialAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: KeyBlock,
    scoring: BlockScoring,
    *,
    own: bool,
    learned: bool,
) -> None:
    """Merge the attention over a block of keys into the result."""
    if own:
        k, v = _chosen(k, block.places), _chosen(v, block.places)
    for call in block.calls:
        rows, keys, values = q[:, :, call.rows], k[:, :, call.keys], v[:, :, call.keys]
        operator, bias, hidden = _operator(rows, keys, values, block, call, scoring, is_unfused=learned)
        if operator is None:
            extras = _extras(rows, block, call, scoring)
            result.add(call.rows, unfused.forward(rows, keys, values, scoring.scale, extras))
            continue
        out, logsumexp = fused.forward(operator, rows, keys, values, bias)
        top = logsumexp[..., None].to(result.top.dtype)
        if hidden is not None:
            # The operators return some number for a row that attends to nothing; the weight of its result must be 0.
            top = top.masked_fill(hidden, -torch.inf)
            out = out.masked_fill(hidden, 0.0)
        total = torch.where(top == -torch.inf, 0.0, 1.0)
        result.add(call.rows, PartialAttention(out, top, total))


def _operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: KeyBlock,
    call: AttentionCall,
    scoring: BlockScoring,
    *,
    is_unfused: bool,
) -> tuple[fused.FusedOperator | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the fused operator for a call, or None, with what it adds to the scores and the rows that attend to nothing."""
    if is_unfused or scoring.is_exact or scoring.dropout is not None or scoring.softcap is not None:
        return None, None, None
    tile = scoring.tile(block, call, q.device)
    bias, hidden = fused.as_bias(tile, q)
    causal = call.kind is CallKind.CAUSAL
    operator = fused.choose(q, k, v, bias, causal=causal, scale=scoring.scale)
    return (operator, bias, hidden) if operator is not None else (None, None, None)


def _extras(q: torch.Tensor, block: KeyBlock, call: AttentionCall, scoring: BlockScoring) -> unfused.ScoreExtras:
    return unfused.ScoreExtras(
        scoring.of_mask(call),
        scoring.visible(block, call, q.device),
        scoring.factors(block, call, q.shape, q.device),
        scoring.softcap,
    )


def _chosen(tensor: torch.Tensor, places: RowIndex | None) -> torch.Tensor:
    return tensor if places is None else tensor.index_select(2, places.on(tensor.device))


def _shape(tensor: torch.Tensor, rows: int) -> list[int]:
    return [*tensor.shape[:2], rows, tensor.shape[3]]


def _add_rows(total: torch.Tensor, places: RowIndex | None, part: torch.Tensor) -> None:
    if places is None:
        total += part
    else:
        total.index_add_(2, places.on(total.device), part.to(total.dtype))


def _plain_types(tensor: torch.Tensor) -> torch.autocast:
    """Return a context in which autocast does not change types: partial results stay in theirs."""
    return torch.autocast(tensor.device.type, enabled=False)
