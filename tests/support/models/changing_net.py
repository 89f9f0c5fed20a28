"""A network whose code takes another course when it is told to, for tests of what a pipeline has learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH, PARTS = 6, 4


class Block(nn.Module):
    """Adds what a linear layer makes."""

    factor: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(WIDTH, WIDTH), nn.Identity()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        out = self.drop(torch.tanh(self.line(x))) * self.factor * scale
        return x + (out if mask is None else out * mask)


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("as wanted")


class Checked(nn.Module):
    """Passes its input on, or gives something else back for equal arguments, or raises."""

    way = ""

    def forward(self, x: torch.Tensor) -> Any:
        made = x * 1.0
        other = {
            "a module returns another shape": lambda: made[..., :1],
            "a module returns another type": made.float,
            "a module returns its argument": lambda: x,
            "a module returns a list": lambda: [made],
            "a module returns no graph": made.detach,
            "a module raises in backward": lambda: _RaisesInBackward.apply(made),
        }
        if self.way == "a module raises":
            raise ValueError("as wanted")
        return other[self.way]() if self.way in other else made


class Net(nn.Module):
    """Blocks on other stages and a head on the last, which runs this code; ``way`` says what it does differently."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.check, self.between, self.head = Checked(), Checked(), nn.Linear(WIDTH, 1)
        self.way, self.calls = "", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        way, given = self.way, x
        if way == "its input requires a gradient":
            x = x.requires_grad_()
        x = self.check(x)
        x = self.between(self.enter(x.double() if way == "another type" else x))
        blocks = [self.blocks[number] for number in ((0, 2, 1) if way == "swaps two calls" else (0, 1, 2))]
        for number, block in enumerate(blocks):
            if way == "skips a call" and number == 1:
                continue
            if way == "skips the last call" and number == 2:
                continue
            if way == "skips in one microbatch" and number == 1 and self.calls % PARTS == 2:
                continue
            if way == "detaches" and number == 2:
                x = x.detach()
            if way == "calls a part" and number == 1:
                x = x + torch.tanh(block.line(x))
                continue
            if way == "passes a mask":
                x = block(x, torch.full((WIDTH,), 0.5, dtype=x.dtype))
            elif way == "passes by name":
                x = block(x=x)
            elif way == "passes a number":
                x = block(x, None, 0.5)
            else:
                x = block(x)
            if way == "calls twice" and number == 1:
                x = block(x)
            if way == "computes between" and number == 0:
                x = x * 2.0
            if way == "looks at a value" and number == 1 and float(x.detach().abs().sum()) < 0:
                raise AssertionError
            if way == "branches on a value" and number == 1 and float(x.detach().sum()) > 0:
                x = x * 0.5
            if way == "hooks a gradient" and number == 1:
                x.register_hook(lambda gradient: gradient * 0.5)
            if way == "writes into its input" and number == 0:
                given.mul_(0.0)
        return self.head(x)
