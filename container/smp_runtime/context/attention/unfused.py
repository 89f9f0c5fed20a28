"""Attention over a block of keys by plain operations, for what no fused operator does."""

from __future__ import annotations

from typing import NamedTuple

import torch

from smp_runtime.context.attention.merging import PartialAttention, computing_dtype

#: Bytes of scores that are computed at a time.
_SCORE_BYTES = 2**26


class ScoreExtras(NamedTuple):
    """What acts on the scores of a block; None for nothing.

    Attributes:
        tile: booleans or numbers to add, ``[batch or 1, heads or 1, rows or 1, keys]``.
        visible: booleans ``[rows, keys]`` beside it.
        factors: of the weights, ``[batch, heads, rows, keys]``.
        softcap: of the scores, before the others.
    """

    tile: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    softcap: float | None = None

    def of(self, rows: slice) -> ScoreExtras:
        """Return what acts on some rows."""
        tile = self.tile if self.tile is None or self.tile.shape[2] == 1 else self.tile[:, :, rows]
        visible = None if self.visible is None else self.visible[rows]
        factors = None if self.factors is None else self.factors[:, :, rows]
        return ScoreExtras(tile, visible, factors, self.softcap)

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores after the softcap."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with -inf where a row does not attend to a key, and with what is added."""
        for each in (self.tile, self.visible):
            if each is not None:
                scores = scores.masked_fill(~each, -torch.inf) if each.dtype is torch.bool else scores + each
        return scores


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, extras: ScoreExtras) -> PartialAttention:
    """Return attention over these keys."""
    result = PartialAttention.empty(q, v.shape[-1])
    k, v = (_spread(each.to(result.out.dtype), q.shape[1]) for each in (k, v))
    for rows in _pieces(q, k):
        some = extras.of(rows)
        scores = some.masked(some.capped(q[:, :, rows].to(k.dtype) @ k.transpose(-1, -2) * scale))
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
        total = weights.sum(-1, keepdim=True)
        if some.factors is not None:
            weights = weights * some.factors
        out = weights @ v / total.masked_fill(total == 0, 1.0)
        result.out[:, :, rows], result.top[:, :, rows], result.total[:, :, rows] = out, top, total
    return result


def backward(
    gradient: torch.Tensor,
    of_logsumexp: torch.Tensor | None,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    whole: PartialAttention,
    scale: float,
    extras: ScoreExtras,
    *,
    wants_tile: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of queries, keys, values and of what was added to the scores.

    Args:
        gradient: of the merged result.
        of_logsumexp: gradient of the log-sum-exp of all scores, ``[batch, heads, rows]``; None for none.
        whole: the merged result over all keys.
        wants_tile: whether the last one is asked for; it has the shape of ``extras.tile``.
    """
    q, k, v = inputs
    dtype = computing_dtype(q.dtype)
    heads = q.shape[1]
    wide_k, wide_v = (_spread(each.to(dtype), heads) for each in (k, v))
    of_q = torch.empty(q.shape, dtype=dtype, device=q.device)
    of_k, of_v = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    of_tile = (
        torch.zeros(extras.tile.shape, dtype=dtype, device=q.device) if wants_tile and extras.tile is not None else None
    )
    reference = whole.top.masked_fill(whole.top == -torch.inf, 0.0)
    divisor = whole.total.masked_fill(whole.total == 0, 1.0)
    for rows in _pieces(q, wide_k):
        some = extras.of(rows)
        part, above = q[:, :, rows].to(dtype), gradient[:, :, rows].to(dtype)
        capped = some.capped(part @ wide_k.transpose(-1, -2) * scale)
        weights = (some.masked(capped) - reference[:, :, rows]).exp() / divisor[:, :, rows]
        kept = weights if some.factors is None else weights * some.factors
        of_v += kept.transpose(-1, -2) @ above
        of_weights = above @ wide_v.transpose(-1, -2)
        if some.factors is not None:
            of_weights = of_weights * some.factors
        delta = (above * whole.out[:, :, rows]).sum(-1, keepdim=True)
        if of_logsumexp is not None:  # its derivatives by the scores are the weights
            delta = delta - of_logsumexp[:, :, rows, None]
        of_scores = weights * (of_weights - delta)
        if of_tile is not None:
            target = of_tile[:, :, rows] if of_tile.shape[2] > 1 else of_tile
            target += of_scores.sum_to_size(target.shape)
        if some.softcap is not None:
            of_scores = of_scores * (1 - (capped / some.softcap).square())
        of_q[:, :, rows] = of_scores @ wide_k * scale
        of_k += of_scores.transpose(-1, -2) @ part * scale
    return of_q, _gathered(of_k, k.shape[1]), _gathered(of_v, v.shape[1]), of_tile


def _spread(k: torch.Tensor, heads: int) -> torch.Tensor:
    """Return keys or values for each query head."""
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], 1)


def _gathered(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Sum gradients over the query heads that share a key head."""
    if gradient.shape[1] == heads:
        return gradient
    return gradient.unflatten(1, (heads, gradient.shape[1] // heads)).sum(2)


def _pieces(q: torch.Tensor, k: torch.Tensor) -> list[slice]:
    """Return ranges of rows whose scores fit into memory."""
    per_row = q.shape[0] * q.shape[1] * k.shape[2] * k.element_size()
    count = max(1, _SCORE_BYTES // max(per_row, 1))
    return [slice(begin, min(begin + count, q.shape[2])) for begin in range(0, q.shape[2], count)]
