"""The modules of the models that a case trains, each with something that makes parallel training hard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY = 8, 13


class Block(nn.Module):
    """Norm, two linear maps and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Perceptron(nn.Module):
    """A stack of blocks between two linear maps.

    Args:
        make: a block.
    """

    def __init__(self, make: Callable[[], nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


class Recomputed(Block):
    """A block that the model itself computes again in backward, as the layers of Transformers do.

    Args:
        reentrant: in PyTorch's older way.
    """

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant) if self.training else super().forward(x)


class Convolution(nn.Module):
    """A convolution whose norm keeps running statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Images(nn.Module):
    """Convolutions with batch norms before a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(Convolution(WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Down(nn.Module):
    """Halves an image, and hands on what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1), nn.GroupNorm(2, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.norm(self.conv(x))), x


class Up(nn.Module):
    """Doubles an image, and adds what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(x)) + skip


class Skips(nn.Module):
    """A U-Net: what early blocks give goes to late ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Conv2d(3, WIDTH, 1), nn.Conv2d(WIDTH, 4, 1)
        self.layers = nn.ModuleList([Down(), Down(), Up(), Up()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.enter(x), []
        for layer in self.layers[:2]:
            x, skip = layer(x)
            skips.append(skip)
        for layer in self.layers[2:]:
            x = layer(x, skips.pop())
        return self.head(x).mean((2, 3))


class Recurrent(nn.Module):
    """LSTMs over a sequence, each of which gives several tensors; nothing comes before them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.leave(x)


class Tied(nn.Module):
    """A head that has the table's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Packed(nn.Module):
    """A block that takes and gives a dictionary with a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x = self.inner(state["x"])
        return {"x": x, "seen": [*state["seen"], x.mean(-1)]}


class Nested(nn.Module):
    """Blocks that hand on nested structures, all of which count in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Packed() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {"x": self.enter(x), "seen": []}
        for layer in self.layers:
            state = layer(state)
        return self.leave(state["x"]) + torch.stack(state["seen"]).sum(0)[..., None]


class LateHead(nn.Module):
    """A head that only batches with a positive sum use."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.late = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, uses: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.late(x) + self.leave(x) if bool(uses.all()) else self.leave(x)


class Forked(nn.Module):
    """Two heads, of which the first number of a batch chooses one: replicas and passes train different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.left if float(x[0, 0, 0]) > 0 else self.right
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return head(x)


class Buffered(nn.Module):
    """Buffers of which no state dict has all: rotations that are not persistent, and an average that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("angles", torch.arange(1, WIDTH + 1) / 4.0, persistent=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x) + (self.angles * torch.arange(x.shape[1], device=x.device)[:, None]).cos().to(x.dtype)
        for layer in self.layers:
            x = layer(x) * self.scale
        return self.leave(x)


class Initialised(Perceptron):
    """An initialiser that assigns ``.data``, and one that reads a parameter to make another."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position.data = nn.init.trunc_normal_(self.position.data.clone(), std=0.2)
        with torch.no_grad():
            self.leave.weight.copy_(self.enter.weight.t() * 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.position)


class Expert(nn.Module):
    """Two experts, of which each position has the one that a router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1, keepdim=True)
        parts = [(chosen == i) * weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts)]
        return x + parts[0] + parts[1]


class Averaging(Perceptron):
    """A running average that each forward pass in training changes and uses, and one that moves by less than bfloat16 rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("slow", torch.full((WIDTH,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
                self.slow.mul_(0.999).add_(x.square().mean((0, 1)), alpha=0.001)
        return super().forward(x - self.average)


class Gain(nn.Module):
    """A residual branch that is scaled by a parameter of its own, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x))) * self.gain


class Normed(nn.Module):
    """Linear maps of which length and direction are trained, and one whose greatest singular value is kept at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 2 * WIDTH))
        self.down = nn.utils.parametrizations.spectral_norm(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Pruned(Block):
    """A block without the smallest of its weights."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.up, self.down):
            nn.utils.prune.l1_unstructured(module, "weight", amount=0.3)


class Clamped(Perceptron):
    """A forward pass that keeps a parameter small, as critics of GANs do."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.shift.clamp_(-0.25, 0.25)
        return super().forward(x + self.shift)


class Following(nn.Module):
    """A frozen map that each forward pass in training moves toward a trained one, by assigning ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for mean, trained in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mean.data = 0.9 * mean + 0.1 * trained
        return x + torch.tanh(self.student(x)) + 0.5 * self.teacher(x)


class Chained(nn.Module):
    """Blocks that PyTorch's containers chain, whose children a checkpoint takes one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.layers(self.enter(x)))


class Adapted(nn.Module):
    """A linear map that trains a product of two narrow matrices only, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.narrow, self.widen = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + torch.tanh(self.base(y) + self.widen(self.narrow(y)) * 2.0)


class Adapters(Perceptron):
    """Frozen blocks with adapters that train."""

    def __init__(self) -> None:
        super().__init__(Adapted)
        self.enter.requires_grad_(False)


class Documents(nn.Module):
    """Attention inside documents of three positions, by functions of PyTorch that have no kernels for this processor.

    Ranks that share a sequence out compute them without these kernels. Whole sequences get a mask.

    Args:
        attend: ``attend(q, k, v, ends)`` for sequences, ``[batch, heads, seq, width]``.
    """

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        q, k, v = (part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1))
        places = torch.arange(length)
        if type(q) is torch.Tensor:
            seen = (places[:, None] >= places) & (places[:, None] // 3 == places // 3)
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            found = self.attend(q, k, v, torch.tensor([*range(0, length, 3), length], dtype=torch.int32))
        return x + self.out(found.transpose(1, 2).flatten(2))


def attend_flexibly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Attend with a mask that is a function of two positions."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (query // 3 == key // 3)

    length = q.shape[2]
    found = flex_attention(q, k, v, block_mask=create_block_mask(sees, None, None, length, length, device="cpu"))
    assert isinstance(found, torch.Tensor)
    return found


def attend_to_ranges(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Attend to one range of keys for each document; each sample is a batch of its own."""
    from torch.nn.attention.varlen import varlen_attn

    rows = zip(q.unbind(0), k.unbind(0), v.unbind(0), strict=True)
    samples = [[part.transpose(0, 1) for part in row] for row in rows]
    found = [varlen_attn(*sample, ends, ends, 3, 3, window_size=(-1, 0)).transpose(0, 1) for sample in samples]
    return torch.stack(found)
