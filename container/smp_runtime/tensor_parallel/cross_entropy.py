"""Cross entropy of logits whose vocabulary is split over the ranks; whole logits never exist on any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.group import TensorGroup


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: TensorGroup, start: int) -> torch.Tensor:
        # The greatest logit over all ranks, so that no exponential overflows. The collectives only sum: gather first.
        greatest = (
            logits.amax(-1).float() if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf).float()
        )
        greatest = group.gather(greatest.unsqueeze(0), 0).amax(0)
        exponentials = (logits.float() - greatest.unsqueeze(-1)).exp_()
        inside = (targets >= start) & (targets < start + logits.shape[-1])
        index = torch.where(inside, targets - start, 0).unsqueeze(-1)
        mine = torch.where(inside, logits.float().gather(-1, index).squeeze(-1) - greatest, 0.0)
        sums, chosen = group.all_reduce(torch.stack([exponentials.sum(-1), mine]))
        ctx.save_for_backward(exponentials.div_(sums.unsqueeze(-1)), index, inside)
        ctx.dtype = logits.dtype
        return sums.log() - chosen

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        probabilities, index, inside = ctx.saved_tensors
        result = probabilities.clone()
        result.scatter_add_(-1, index, -inside.to(result.dtype).unsqueeze(-1))
        return (result * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


def split_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, group: TensorGroup, start: int) -> torch.Tensor:
    """Negative log likelihood of each target, in float32 and replicated.

    Args:
        logits: ``[tokens, vocabulary of this rank]``; at least one row of the vocabulary.
        targets: ``[tokens]``, in the whole vocabulary; the same on every rank.
        start: where this rank's part of the vocabulary begins.
    """
    return _SplitCrossEntropy.apply(logits, targets, group, start)
