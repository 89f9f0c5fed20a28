"""Random trees of modules whose backward passes are hard to take apart: tied weights, chunks, checkpointing, unused outputs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH = 8, 4


class Tied(nn.Module):
    """Two layers with one weight, the second one by its transpose where drawn."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
        self.second.weight = self.first.weight
        self.transposed = draw.random() < 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.first(x))
        return x + (inner @ self.second.weight if self.transposed else self.second(inner))


class Attention(nn.Module):
    """One product for queries, keys and values, taken apart by ``chunk`` or ``split``."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.chunks = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.qkv(self.norm(x))
        q, k, v = found.chunk(3, -1) if self.chunks else found.split(WIDTH, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


class Multihead(nn.Module):
    """PyTorch's own attention, whose projections are inside one call."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.weighs, self.crosses = draw.random() < 0.5, draw.random() < 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = x.flip(1) if self.crosses else x
        return x + self.inner(x, other, other, need_weights=self.weighs)[0]


class Embedded(nn.Module):
    """A table whose rows are added, and which is the output layer too."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, padding_idx=draw.choice((None, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(LENGTH, device=x.device).expand(x.shape[:2]) % 5
        return x + self.table(ids) * F.linear(x, self.table.weight).logsumexp(-1, keepdim=True)


class Region(nn.Module):
    """PyTorch's checkpointed region, of layers that are this module's own code, so that it is on one stage."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.reentrant = draw.random() < 0.5

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.layer_norm(x, (WIDTH,), self.scale) @ self.first) @ self.second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self._inside, x, use_reentrant=self.reentrant)


class Convolved(nn.Module):
    """A convolution over the positions."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=draw.choice((1, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.transpose(1, 2)).transpose(1, 2)


class Layers(nn.Sequential):
    """Two linear layers around an activation."""

    def __init__(self, draw: random.Random) -> None:
        inner = draw.choice((WIDTH, 2 * WIDTH))
        super().__init__(nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH, bias=draw.random() < 0.5))


class Chain(nn.Module):
    """Children one after the other, around a residual where drawn; some of their outputs are dropped."""

    def __init__(self, draw: random.Random, children: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.dropped = draw.randrange(len(children)) if len(children) > 1 and draw.random() < 0.3 else None
        self.residual = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x
        for number, part in enumerate(self.parts):
            given = part(found)
            found = found if number == self.dropped else given
        return x + 0.5 * found if self.residual else found


class Branches(nn.Module):
    """Each child gets the input, and gives a part of its result: the chunk that is its own."""

    def __init__(self, draw: random.Random, children: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children[:2])
        self.chunks = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = [part(x).chunk(2, -1) if self.chunks else part(x).split(WIDTH // 2, -1) for part in self.parts]
        return torch.cat([half[number % 2] for number, half in enumerate([*halves, *halves][:2])], -1)


class Pair(nn.Module):
    """Gives two results, of which its caller uses one."""

    def __init__(self, draw: random.Random, children: list[nn.Module]) -> None:
        super().__init__()
        self.used, self.unused = children[0], nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


class First(nn.Module):
    """Takes the first of two results."""

    def __init__(self, draw: random.Random, children: list[nn.Module]) -> None:
        super().__init__()
        self.inner = Pair(draw, children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)[0])


LEAVES = (Tied, Attention, Multihead, Embedded, Region, Convolved, Layers, Layers)
INNER = (Chain, Chain, Branches, First)


def random_module(seed: int) -> nn.Module:
    """A tree of float64 modules that maps ``[batch, LENGTH, WIDTH]`` to itself; equal for equal seeds.

    Some linear layers of different branches share their weight.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def tree(depth: int) -> nn.Module:
        if depth == 0 or (depth < 3 and draw.random() < 0.25):
            return draw.choice(LEAVES)(draw)
        return draw.choice(INNER)(draw, [tree(depth - 1) for _ in range(draw.randint(1, 3))])

    root = Chain(draw, [tree(2) for _ in range(draw.randint(2, 3))])
    alike = [m for m in root.modules() if type(m) is nn.Linear and m.weight.shape == (WIDTH, WIDTH)]
    if len(alike) > 1 and draw.random() < 0.5:
        one, other = draw.sample(alike, 2)
        other.weight = one.weight
    return root.double()


def checkpointed(model: nn.Module, seed: int) -> Iterator[nn.Sequential]:
    """Modules of a tree whose activations are not kept."""
    draw = random.Random(seed)
    for module in model.modules():
        if isinstance(module, nn.Sequential) and draw.random() < 0.5:
            yield module


def batch(number: int, samples: int) -> torch.Tensor:
    """The input of a step, ``[samples, LENGTH, WIDTH]``."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(samples, LENGTH, WIDTH, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A number of a model's output."""
    return model(x).square().mean()
