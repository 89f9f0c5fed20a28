"""A small decoder that is trained with its numbers recorded, and faults that nothing else would tell of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.models.models import loss_of, part

VOCABULARY, HIDDEN, HEADS, LENGTH = 13, 16, 2, 6


class Attention(nn.Module):
    """Causal, with positions by a table of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, seq, hidden]
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, hidden))


class Block(nn.Module):
    """Attention and feed forward net."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.norm_2 = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.mlp(self.norm_2(x))


class Waves(nn.Module):
    """Adds a wave to each feature, of frequencies that are a buffer."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 10.0 ** (torch.arange(HIDDEN) / HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        return x + torch.sin(place[:, None] * self.frequencies.float()).to(x.dtype)


class Decoder(nn.Module):
    """Its head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.waves = Waves()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.waves(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


#: By name: number of ranks, and parameters of the library.
DEGREES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "mb": (1, {"microbatches": 4}),
    "dp": (2, {"ddp": True}),
    "dp-mb": (2, {"ddp": True, "microbatches": 2}),
    "zero": (2, {"ddp": True, "shard_optimizer_state": True}),
    "sdp": (
        2,
        {
            "ddp": True,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 0,
            "sdp_gradient_clipping": 1e9,
        },
    ),
    "pp": (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    "pp-dp": (4, {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}),
    "tp": (2, {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}),
    "tp-own": (2, {"tensor_parallel_degree": 2, "ddp": True}),
}


def batch_of(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, each ``[size, LENGTH]``, the same on every rank."""
    generator = torch.Generator().manual_seed(7000 + step)
    ids = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


@dataclass
class Training:
    """What a fault may change; it gets called before the first step."""

    module: nn.Module  # the script's, already wrapped
    model: Any
    optimizer: Any
    rank: int

    def parameter(self, name: str) -> Any:
        """By its name, where this rank has it."""
        return next((p for found, p in self.model.local_named_parameters() if found == name), None)

    def here(self, path: str) -> nn.Module | None:
        """A module, where this rank has it."""
        return next((module for found, module in self.model.local_named_modules() if found == path), None)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a training, and where that must be found.

    Attributes:
        phases: of which the first difference must be in one.
        module: how the name of the tensor begins that must be found; several are divided by ``|``.
        before: changes the script's module before it is wrapped.
        wrapped: changes the training before its first step.
        batch: what a rank reads instead of its part: ``batch(step, rank, readers)``.
        step: what runs before each update.
        loss: instead of the mean.
        options: of ``smp.DistributedModel``.
        degrees: by name in ``DEGREES``.
    """

    phases: tuple[str, ...]
    module: str = ""
    before: Callable[[nn.Module, int], None] | None = None
    wrapped: Callable[[Training], None] | None = None
    batch: Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]] | None = None
    step: Callable[[Training, int], Any] | None = None
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    options: tuple[tuple[str, Any], ...] = ()


def train(folder: str, fault: Fault | None = None, *, steps: int = 3, seed: int = 0, adam: bool = True) -> list[float]:
    """Train with numbers recorded into a folder, if there is one; every rank runs it after ``smp.init``. Gives its losses."""
    import smdistributed.modelparallel.torch as smp

    fault = fault or Fault(())
    if folder:
        smp.record_numerics(folder, every=1)
    torch.manual_seed(seed)
    module = Decoder()
    if fault.before is not None:
        fault.before(module, smp.rank())
    smp.set_tensor_parallelism(module.blocks, smp.tp_size() > 1)
    model = smp.DistributedModel(module, **dict(fault.options))
    make = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = smp.DistributedOptimizer(make(model.parameters(), lr=1e-2 if adam else 0.1), static_loss_scale=128.0)
    training = Training(model.module, model, optimizer, smp.rank())

    @smp.step
    def step_function(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(ids).float()
        loss = (fault.loss or loss_of)(logits, targets)
        model.backward(loss)
        return loss

    def prepare(*_: Any) -> None:
        if fault.wrapped is not None:
            fault.wrapped(training)

    model.register_post_partition_hook(prepare)
    common = smp.state.cfg.prescaled_batch
    reader, readers = (smp.rdp_rank(), smp.rdp_size()) if common else (smp.dp_rank(), smp.dp_size())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        mine = fault.batch(step, reader, readers) if fault.batch else part(batch_of(step), reader, readers)
        losses.append(float(step_function(*mine).reduce_mean()))
        if fault.step is None or fault.step(training, step) is not False:
            optimizer.step()
    return losses
