"""Models, batches and optimizers that this library and plain PyTorch both train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
import train_gpt
from torch import nn

import smdistributed.modelparallel.torch as smp
from gpu_check import environment
from gpu_check.device import get_device

#: Of a GPT: layers, hidden, heads and seq.
Shape = dict[str, int]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

SMALL: Shape = {"layers": 2, "hidden": 64, "heads": 2, "seq": 32}
_LARGE: dict[str, Shape] = {
    "350M": {"layers": 24, "hidden": 1024, "heads": 16, "seq": 1024},
    "1.3B": {"layers": 24, "hidden": 2048, "heads": 16, "seq": 2048},
}


def get_shape(name: str) -> Shape:
    """Return the shape of a large GPT, ``350M`` or ``1.3B``; in tiny checks a small one."""
    return SMALL if environment.is_tiny() else _LARGE[name]


def make_gpt(shape: Shape, dropout: float = 0.0) -> train_gpt.GPT:
    """Return a GPT with the same weights at each call."""
    torch.manual_seed(0)
    config = train_gpt.GPTConfig(
        layers=shape["layers"], hidden=shape["hidden"], heads=shape["heads"], seq_len=shape["seq"], dropout=dropout
    )
    return train_gpt.GPT(config)


def draw_batch(
    index: int, batch: int, seq: int, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of a step, both ``[batch, seq]``; equal on all ranks."""
    generator = torch.Generator().manual_seed(1000 + index)
    ids = torch.randint(0, train_gpt.VOCABULARY, (batch, seq + 1), generator=generator)
    ids = ids.to(device or get_device())
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def compute_loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next byte, in float32."""
    return F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten())


def mark_blocks(net: nn.Module) -> None:
    """Checkpoint the activations of each block of a GPT."""
    for block in net.blocks:
        smp.set_activation_checkpointing(block)


def split_tensors(net: nn.Module) -> None:
    """Apply tensor parallelism to a whole model."""
    smp.set_tensor_parallelism(net, True)


def make_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with a large ``eps``.

    Gradients of the biases of keys consist of rounding errors only. A smaller ``eps`` would turn them into full updates.
    """
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


def make_fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the same in PyTorch's fused kernels."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5, fused=True)


def make_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_lamb(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the library's LAMB."""
    return smp.optimizers.FusedLAMB(parameters, lr=1e-3)


class MixedPrecision:
    """Mixed precision in plain PyTorch: a model in half precision, and an optimizer on float32 master weights.

    Args:
        model: changed to ``dtype``.
        make: creates the optimizer of the master weights.
        clip: largest norm of the gradients, or None.
        scale: loss scale; the caller multiplies the loss by it.
        is_dynamic: whether the scale is halved after an overflow, and doubled after ``window`` updates without.

    Attributes:
        parameters: the model's parameters.
        masters: their master weights, in the same order.
        inner: the optimizer.
        skipped: updates that were skipped because a gradient was not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer,
        dtype: torch.dtype,
        clip: float | None = None,
        *,
        scale: float = 1.0,
        is_dynamic: bool = False,
        window: int = 1000,
    ) -> None:
        self._clip, self.scale, self._is_dynamic, self._window = clip, scale, is_dynamic, window
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # Copied before the model's weights are rounded.
        self.masters: list[Any] = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        model.to(dtype)
        self.inner = make(self.masters)
        self._updates, self.skipped = 0, 0

    def zero_grad(self) -> None:
        """Release the model's gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Update the master weights, and copy them to the model."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        gradients = [master.grad for master in self.masters if master.grad is not None]
        if self.scale != 1.0 or self._is_dynamic:
            torch._foreach_mul_(gradients, 1.0 / self.scale)
            if not bool(torch.isfinite(torch.stack(torch._foreach_norm(gradients)).sum())):
                self.scale /= 2
                self._updates, self.skipped = 0, self.skipped + 1
                return
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self.masters, self._clip)
        self.inner.step()
        self._updates += 1
        if self._is_dynamic and self._updates % self._window == 0:
            self.scale *= 2
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
