"""Blocks as scripts write them, which no distributed class stands for: heads from shapes, from numbers, packed, normed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from support.models.models import loss_of

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


class Router(nn.Module):
    """It chooses two experts for each token; ``only`` has it choose the same ones for all."""

    def __init__(self, experts: int, only: int | None = None) -> None:
        super().__init__()
        self.weight, self.num_experts, self.only = nn.Parameter(torch.randn(experts, WIDTH) * 0.3), experts, only

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(x, self.weight)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        if self.only is not None:
            chosen = torch.full_like(chosen, self.only)
            chosen[:, 1] += 1
            weights = logits.softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


class Expert(Gated):
    """One of several."""


class Mixture(nn.Module):
    """Experts in a list, and one that sees all tokens."""

    def __init__(self, experts: int = 4, only: int | None = None) -> None:
        super().__init__()
        self.gate, self.experts = Router(experts, only), nn.ModuleList(Expert() for _ in range(experts))
        self.shared, self.scale = Gated(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.flatten(0, 1)
        logits, weights, chosen = self.gate(rows)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                result.index_add_(0, token, expert(rows[token]) * weights[token, place, None])
        result = result + self.shared(rows) * self.scale(rows).sigmoid()
        return result.view(x.shape), logits


class Tables(nn.Module):
    """Experts in one parameter each for the way in and the way out, with a bias."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts, self.features = experts, 24
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * self.features, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, self.features) * 0.3)
        self.down_bias = nn.Parameter(torch.randn(experts, WIDTH) * 0.3)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            if number < self.num_experts:
                token, place = torch.where(chosen == number)
                gate, up = F.linear(x[token], self.gate_up[number]).chunk(2, -1)
                out = F.linear(F.silu(gate) * up, self.down[number], self.down_bias[number])
                result = result.index_add(0, token, out * weights[token, place, None])
        return result


class TabledMixture(nn.Module):
    """A mixture of such experts."""

    def __init__(self, experts: int = 4, only: int | None = None) -> None:
        super().__init__()
        self.gate, self.experts = Router(experts, only), Tables(experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.flatten(0, 1)
        logits, weights, chosen = self.gate(rows)
        return self.experts(rows, chosen, weights).view(x.shape), logits


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


class Mixed(Block):
    """A block with a mixture of experts, in training with what evens out their loads."""

    def __init__(self, mixture: Callable[[], nn.Module] = Mixture) -> None:
        super().__init__()
        self.mlp = mixture()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.first(x), mask=mask)
        mixed, logits = self.mlp(self.second(x))
        return x + mixed, logits


class MixedNet(nn.Module):
    """A small language model of such blocks."""

    def __init__(self, layers: int = 2, mixture: Callable[[], nn.Module] = Mixture) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Mixed(mixture) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predictions, and the mean square of what the routers found."""
        x, squares = self.embedding(ids), 0.0
        for layer in self.layers:
            x, logits = layer(x)
            squares = squares + logits.square().mean()
        return self.head(x), squares


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


def mixed_loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of a batch, with what the routers add to it."""
    predictions, squares = model(ids)
    return loss_of(predictions, targets) + 0.1 * squares


def batches(first: int, last: int, batch: int = 8, seq: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets of the steps ``first`` to ``last``, the same on every rank."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(VOCABULARY, (batch, seq + 1), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of a batch."""
    return loss_of(model(ids), targets)
