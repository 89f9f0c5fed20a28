"""The small GPT of several benchmarks, with nothing but PyTorch around it."""

from __future__ import annotations

import torch
from torch import nn

#: Of the vocabulary, of a sequence, and of a rank's batch.
VOCABULARY, SEQ, BATCH = 512, 128, 8


class Gpt(nn.Module):
    """A decoder without tied weights."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 8, 4 * hidden, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [batch, seq] -> [batch, seq, vocabulary]
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
