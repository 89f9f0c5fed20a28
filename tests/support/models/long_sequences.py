"""A small GPT as scripts write it, for sequences that ranks share out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH, LONGEST = 31, 16, 48


class CausalBlock(nn.Module):
    """Attention and a feed-forward layer, before them norms."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projections, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the block's output ``[batch, tokens, width]``."""
        batch, tokens, width = hidden.shape
        parts = self.projections(self.first_norm(hidden)).split(width, dim=-1)
        query, key, value = (part.view(batch, tokens, 2, width // 2).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).contiguous().view(batch, tokens, width))
        return hidden + self.dropout(self.feed_forward(self.second_norm(hidden)))


class CausalNet(nn.Module):
    """Learned positions, two blocks, and a head that shares the embedding's weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(CausalBlock(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute logits ``[batch, tokens, words]``."""
        hidden = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def next_word_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean loss of predicting each next word."""
    logits = model(tokens)
    return functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


def word_batches(steps: int, batch: int, lengths: tuple[int, ...] = (21, 24, 19)) -> list[tuple[torch.Tensor]]:
    """Batches of words, of lengths that change from step to step."""
    random = torch.Generator().manual_seed(5)
    return [(torch.randint(WORDS, (batch, lengths[step % len(lengths)]), generator=random),) for step in range(steps)]
