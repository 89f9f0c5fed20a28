"""Blocks as scripts write them, which no distributed class stands for: heads from shapes, from numbers, packed, normed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from support.models import loss_of

VOCABULARY, WIDTH = 13, 16


class Attention(nn.Module):
    """Causal attention with fewer key heads; each head of queries and keys is normed, with a weight that all heads share."""

    def __init__(self, heads: int = 4, key_heads: int = 2, size: int = 4) -> None:
        super().__init__()
        self.head_size = size
        self.q = nn.Linear(WIDTH, heads * size, bias=False)
        self.k = nn.Linear(WIDTH, key_heads * size)
        self.v = nn.Linear(WIDTH, key_heads * size)
        self.norm = nn.LayerNorm(size)
        self.o = nn.Linear(heads * size, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        groups = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(groups, 1) for part in (self.norm(k), v))
        attended = F.scaled_dot_product_attention(self.norm(q), k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(attended.transpose(1, 2).flatten(2))


class Numbered(nn.Module):
    """Attention that counts its heads and features, and mixes them up where one of these numbers is wrong."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.n_head, self.width = heads, WIDTH
        self.projection, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.projection(x).view(batch, length, self.n_head, 3, -1).permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(attended.transpose(1, 2).reshape(batch, length, self.width))


class Packed(Numbered):
    """The same, with all queries before all keys."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.projection(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Turned(Numbered):
    """The same, with features that alternate between heads, and back."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.n_head)).movedim(-1, 1) for part in self.projection(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).permute(0, 2, 3, 1).flatten(2))


class OneKey(nn.Module):
    """All heads of queries have the same keys and values, in one map with them."""

    def __init__(self, heads: int = 4, size: int = 4) -> None:
        super().__init__()
        self.num_heads, self.embed_dim, self.size = heads, heads * size, size
        self.projection, self.o = nn.Linear(WIDTH, (heads + 2) * size), nn.Linear(heads * size, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.projection(x).split((self.embed_dim, self.size, self.size), -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (q, k, v))
        k, v = (part.expand(-1, self.num_heads, -1, -1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(attended.transpose(1, 2).flatten(2))


class Grouped(Attention):
    """It keeps how many heads share a key."""

    def __init__(self, heads: int, key_heads: int, size: int = 4) -> None:
        super().__init__(heads, key_heads, size)
        self.groups = heads // key_heads

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(self.groups, 1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(attended.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated feed forward net."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PackedGated(nn.Module):
    """The same with one map into it."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.packed(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed forward net, each normed before and added to the stream; dropout of what is added."""

    def __init__(self, attention: Callable[[], nn.Module] = Attention, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), attention()
        self.second = nn.LayerNorm(WIDTH)
        self.mlp = PackedGated() if isinstance(self.attention, Packed) else Gated()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        x = x + self.drop(self.attention(self.first(x), mask=mask))
        return (x + self.drop(self.mlp(self.second(x))),)


class Alone(Block):
    """A block that takes and returns activations alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


#: How :class:`Net` is split.
PLAN = {
    "layers.*.attention.q": "colwise",
    "layers.*.attention.k": "colwise",
    "layers.*.attention.v": "colwise",
    "layers.*.attention.o": "rowwise",
    "layers.*.mlp.gate": "colwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
}


class Net(nn.Module):
    """A small language model of such blocks."""

    def __init__(
        self,
        layers: int = 2,
        attention: Callable[[], nn.Module] = Attention,
        dropout: float = 0.0,
        is_tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(attention, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [batch, seq] -> [batch, seq, vocabulary]
        x = self.embedding(ids)
        for layer in self.layers:
            (x,) = layer(x)
        return self.head(self.norm(x))


def batches(first: int, last: int, batch: int = 8, seq: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets of the steps ``first`` to ``last``, the same on every rank."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(VOCABULARY, (batch, seq + 1), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of a batch."""
    return loss_of(model(ids), targets)
