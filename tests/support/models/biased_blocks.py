"""Blocks that hand something for each head to one another, or back: a bias of scores, attention weights; and latent attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.models.models import loss_of
from support.models.own_blocks import VOCABULARY, WIDTH, Gated

BUCKETS = 6


class BiasedAttention(nn.Module):
    """Attention with a bias by distance that the first of several makes for all, as T5's; it returns its weights."""

    def __init__(self, has_bias: bool, heads: int = 4) -> None:
        super().__init__()
        self.n_heads, self.inner_dim, self.num_buckets = heads, WIDTH, WIDTH  # as many as features, and no features
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.distance = nn.Embedding(self.num_buckets, heads) if has_bias else None

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, self.n_heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        if bias is None:
            assert self.distance is not None
            places = torch.arange(length)
            apart = (places[None] - places[:, None]).clamp(0, BUCKETS - 1)
            bias = self.distance(apart).permute(2, 0, 1).expand(batch, self.n_heads, length, length)
        weights = (q @ k.transpose(2, 3) + bias).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, length, self.inner_dim)), weights, bias


class BiasedBlock(nn.Module):
    """Such an attention, one that nobody calls, and a feed forward net."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), BiasedAttention(has_bias)
        self.self_attention, self.other = BiasedAttention(False), BiasedAttention(False)
        self.second, self.mlp = nn.LayerNorm(WIDTH), Gated()

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, seen: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        added, weights, bias = self.attention(self.first(x), bias=bias)
        x = x + added
        x = x + self.self_attention(x, bias=bias.tanh())[0]
        if seen is not None:
            x = x + self.other(seen, bias=bias)[0]
        return x + self.mlp(self.second(x)), bias, weights


class BiasedNet(nn.Module):
    """A small language model of them; its second result is made of the last one's weights."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(BiasedBlock(number == 0) for number in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, bias = self.embedding(ids), None
        for layer in self.layers:
            x, bias, weights = layer(x, bias=bias)
        return self.head(x), weights.square().sum((1, 2, 3)) + bias[:, 1:3].square().mean((1, 2, 3))


class Latent(nn.Module):
    """Queries, keys and values from narrow tensors; a part of the keys is that of all heads."""

    def __init__(self, heads: int = 4, size: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.size, self.shared = size, shared
        self.q_down, self.q_norm, self.q_up = nn.Linear(WIDTH, 6), nn.LayerNorm(6), nn.Linear(6, heads * size)
        self.kv_down, self.kv_norm = nn.Linear(WIDTH, 6 + shared), nn.LayerNorm(6)
        self.kv_up = nn.Linear(6, heads * (2 * size - shared))
        self.o = nn.Linear(heads * size, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (-1, self.size)).transpose(1, 2)
        narrow, shared = self.kv_down(x).split((6, self.shared), -1)
        kv = self.kv_up(self.kv_norm(narrow)).unflatten(-1, (-1, 2 * self.size - self.shared)).transpose(1, 2)
        k, v = kv.split((self.size - self.shared, self.size), -1)
        k = torch.cat((k, shared.unsqueeze(1).expand(-1, k.shape[1], -1, -1)), -1)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(attended.transpose(1, 2).flatten(2))


class RootMeanSquare(nn.Module):
    """A norm as scripts write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Centred(nn.Module):
    """Another one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spread = x.var(-1, keepdim=True).sqrt() + torch.mean(x, dim=-1, keepdim=True).abs()
        return (x - x.mean(-1, keepdim=True)) / (spread + 0.1) * self.weight + self.bias


class NormedHeads(nn.Module):
    """Attention with norms over the features of all heads, as OLMo 2's; each of another kind."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.size = size
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm, self.k_norm, self.v_norm = nn.LayerNorm(WIDTH), RootMeanSquare(), Centred()
        self.inner = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        pairs = ((self.q, self.q_norm), (self.k, self.k_norm), (self.v, self.v_norm))
        q, k, v = (norm(part(x)).unflatten(-1, (-1, self.size)).transpose(1, 2) for part, norm in pairs)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(self.inner(attended.transpose(1, 2).flatten(2)))


class ByWidth(nn.Module):
    """Attention that makes its views by the width of its input, as many scripts do."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, WIDTH
        self.projection, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.size()
        parts = self.projection(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(torch.reshape(attended.transpose(1, 2), (batch, length, width)))


def biased_loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of a batch, with what the attention weights add to it."""
    predictions, spread = model(ids)
    return loss_of(predictions, targets) + 0.01 * spread.mean()
