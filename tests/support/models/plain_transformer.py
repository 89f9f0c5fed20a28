"""The public page's reference mathematics of the transformer modules, in plain PyTorch, read sensibly.

The residual is always added, the output dropout is ``hidden_dropout_prob``, and the head size is an argument of its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, cross_attention=False, **settings):
        super().__init__()
        self.settings, self.cross = settings, cross_attention
        hidden, inner = settings["hidden_size"], settings["num_attention_heads"] * settings["attention_head_size"]
        self.query, self.key, self.value = (nn.Linear(hidden, inner) for _ in range(3))
        self.dense = nn.Linear(inner, hidden)
        self.pre_layernorm = nn.LayerNorm(hidden, eps=1e-5) if settings.get("pre_layernorm") else None
        self.layernorm = nn.LayerNorm(hidden, eps=1e-5) if settings.get("post_layernorm", True) else None

    def heads(self, tensor):  # [batch, seq, inner] -> [batch, heads, seq, size]
        return tensor.unflatten(-1, (self.settings["num_attention_heads"], -1)).transpose(1, 2)

    def forward(self, inputs):
        if self.cross:
            states, source, mask = inputs
        else:
            (states, mask), source = inputs, None
        normed = states if self.pre_layernorm is None else self.pre_layernorm(states)
        source = normed if source is None else source
        query, key, value = self.heads(self.query(normed)), self.heads(self.key(source)), self.heads(self.value(source))
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.settings["attention_head_size"])
        queries, keys = scores.shape[-2:]
        back = torch.arange(queries)[:, None] - torch.arange(keys)
        if self.settings.get("use_alibi") and not self.cross:
            heads = self.settings["num_attention_heads"]  # a power of two in the tests
            slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
            scores = scores - slopes[:, None, None] * back.abs()
        if self.settings.get("causal_mask_size") and not self.cross:
            scores = scores.masked_fill(back < 0, torch.finfo(scores.dtype).min)
        if mask is not None:
            scores = (scores + mask).clamp_min(torch.finfo(scores.dtype).min)
        change = self.dense((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        total = states + change
        return total if self.layernorm is None else self.layernorm(total)


class Output(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        hidden, inner = settings["hidden_size"], settings["intermediate_size"]
        self.dense1, self.dense2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.activation = {"gelu": F.gelu, "relu": F.relu}[settings.get("activation", "gelu")]
        self.pre_layernorm = nn.LayerNorm(hidden, eps=1e-5) if settings.get("pre_layernorm") else None
        self.layernorm = nn.LayerNorm(hidden, eps=1e-5) if settings.get("post_layernorm", True) else None

    def forward(self, states):
        normed = states if self.pre_layernorm is None else self.pre_layernorm(states)
        total = states + self.dense2(self.activation(self.dense1(normed)))
        return total if self.layernorm is None else self.layernorm(total)


class Layer(nn.Module):
    def __init__(self, add_cross_attention=False, **settings):
        super().__init__()
        self.attention = Attention(**settings)
        self.cross_attention = Attention(cross_attention=True, **settings) if add_cross_attention else None
        self.output = Output(**settings)

    def forward(self, inputs):
        if self.cross_attention is None:
            states, mask = inputs
            return self.output(self.attention((states, mask))), mask
        states, cross, mask, cross_mask = inputs
        states = self.cross_attention((self.attention((states, mask)), cross, cross_mask))
        return self.output(states), cross, mask, cross_mask


class Transformer(nn.Module):
    def __init__(self, num_layers, **settings):
        super().__init__()
        self.seq_layers = nn.Sequential(*(Layer(**settings) for _ in range(num_layers)))

    def forward(self, inputs):
        return self.seq_layers(inputs)


class LMHead(nn.Module):
    def __init__(self, num_layers, vocab_size, num_positions, num_token_types=0, **settings):
        super().__init__()
        hidden = settings["hidden_size"]
        self.word_embedding = nn.Embedding(vocab_size, hidden)
        self.position_embedding = nn.Embedding(num_positions, hidden)
        self.token_type_embedding = nn.Embedding(num_token_types, hidden) if num_token_types else None
        self.transformer = Transformer(num_layers, **settings)
        self.shifts = settings.get("causal_mask_size") is not None

    def forward(self, inputs):
        ids, mask, token_types, positions, labels = inputs
        positions = torch.arange(ids.shape[1]) if positions is None else positions
        hidden = self.word_embedding(ids) + self.position_embedding(positions)
        if token_types is not None:
            hidden = hidden + self.token_type_embedding(token_types)
        if mask is not None:
            mask = (mask.float() * torch.finfo(torch.float32).min)[:, None, None, :]
        logits = self.transformer((hidden, mask))[0] @ self.word_embedding.weight.t()
        if labels is None:
            return logits
        scored, labels = (logits[:, :-1], labels[:, 1:]) if self.shifts else (logits, labels)
        return F.cross_entropy(scored.flatten(0, 1), labels.flatten()), logits
