"""Which experts a router chooses for a token, and how much each counts.

Let ``l`` be the router's results for ``T`` tokens and ``E`` experts; each token gets ``k`` experts.

=============  ==================================================  ================================================
balancing      experts of token ``t``                              weights
=============  ==================================================  ================================================
``none``       the ``k`` with the greatest ``l[t]``                softmax of these ``k``
``aux_loss``   as ``none``                                         as ``none``
``balanced``   number ``j`` is expert ``(t * k + j) mod E``        softmax of these ``k``
``sinkhorn``   the ``k`` with the greatest ``d[t] exp(l[t]) e``    softmax of all ``E``; sigmoid of ``l`` if ``k`` is 1
=============  ==================================================  ================================================

The vectors ``d`` and ``e`` of ``sinkhorn`` make every row of the product sum to ``1 / T`` and every column to ``1 / E``. Outside
of training ``balanced`` and ``sinkhorn`` choose as ``none``.

Two losses are added to the gradients, not to the loss that the script sees. ``aux_loss`` adds ``coefficient * E * sum_e f_e P_e``:
``f_e`` is the part of all choices that expert ``e`` has, and ``P_e`` the mean of its softmax. All of them add
``coefficient * mean_t (log sum_e exp l[t, e])**2``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from smp_version2.moe.config import MoEConfig

#: Sinkhorn's iteration ends if its column factors change by less than this on average.
_TOLERANCE = 1e-4
#: It ends after so many rounds in any case.
_MOST_ROUNDS = 200
_TINY = 1e-8


class _AddLoss(torch.autograd.Function):
    """Forward nothing; backward the gradient of a loss beside that of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss.detach()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, torch.ones_like(ctx.like)


def route(logits: torch.Tensor, k: int, config: MoEConfig, *, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights ``[T, k]``, in float32 at least, and the experts ``[T, k]`` of each token.

    Args:
        logits: results of the router, ``[T, E]``.
        k: experts of a token.
        is_training: whether balancing applies, and losses are added.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    way = config.moe_load_balancing if is_training else "none"
    choices = _choose(logits.detach(), k, way)
    if config.moe_load_balancing == "sinkhorn":
        whole = torch.sigmoid(logits) if k == 1 else torch.softmax(logits, -1)
        weights = whole.gather(-1, choices)
    else:
        weights = torch.softmax(logits.gather(-1, choices), -1)
    has_loss = is_training and torch.is_grad_enabled()
    if has_loss and logits.shape[0]:
        weights = _AddLoss.apply(weights, _losses(logits, choices, config))
    return weights, choices


def _choose(logits: torch.Tensor, k: int, way: str) -> torch.Tensor:
    tokens, experts = logits.shape
    if way == "balanced":
        return (torch.arange(tokens * k, device=logits.device) % experts).view(tokens, k)
    return torch.topk(normalize(logits) if way == "sinkhorn" else logits, k, dim=-1).indices


def normalize(logits: torch.Tensor) -> torch.Tensor:
    """Scale rows and columns of ``exp(logits)`` so that all rows have one sum, and all columns another (Sinkhorn, Knopp)."""
    # A factor for each row changes nothing: the row's own factor takes it back.
    cost = torch.exp(logits - logits.amax(-1, keepdim=True))
    tokens, experts = cost.shape
    columns = cost.new_ones(experts)
    rows = cost.new_ones(tokens)
    for _ in range(_MOST_ROUNDS if tokens else 0):
        rows = 1 / (tokens * (cost @ columns) + _TINY)
        former, columns = columns, 1 / (experts * (rows @ cost) + _TINY)
        if float((columns - former).abs().mean()) <= _TOLERANCE:
            break
    return rows[:, None] * cost * columns


def _losses(logits: torch.Tensor, choices: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """Return the sum of the losses of one router."""
    loss = logits.new_zeros(())
    if config.moe_load_balancing == "aux_loss":
        experts = logits.shape[-1]
        counts = torch.zeros(experts, dtype=logits.dtype, device=logits.device)
        counts.index_add_(0, choices.flatten(), torch.ones_like(choices.flatten(), dtype=logits.dtype))
        chosen = counts / choices.numel()
        loss = loss + config.moe_aux_loss_coeff * experts * (chosen * torch.softmax(logits, -1).mean(0)).sum()
    return loss + config.moe_z_loss_coeff * torch.logsumexp(logits, -1).square().mean()
