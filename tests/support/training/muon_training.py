"""What the tests of Muon share: a model with hidden matrices, a stack of them, a table and a head; and layouts of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp

STEPS, BATCH, WORDS, WIDTH = 4, 8, 11, 8
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}
TENSOR = {"tensor_parallel_degree": 2, "prescaled_batch": True}
STAGES = {"pipeline_parallel_degree": 2}
STATE = {"shard_optimizer_state": True}
#: Ranks and settings.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "state": (2, STATE),
    "sharding": (2, SHARDED),
    "tp": (2, TENSOR),
    "pp": (2, STAGES),
    "tp × state": (4, {**TENSOR, **STATE}),
    "tp × sharding": (4, {**TENSOR, **SHARDED}),
    "pp × sharding": (4, {**STAGES, **SHARDED}),
    "pp × tp": (4, {**STAGES, **TENSOR}),
    "sharding × dp": (4, SHARDED),
}


class Block(nn.Module):
    """Two linear maps, and a stack of experts that all positions use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.experts = nn.Parameter(0.3 * torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x + torch.tanh(torch.einsum("bsi,eij->bsj", x, self.experts))


class Net(nn.Module):
    """A table, blocks and a head, which is tied or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.decode = nn.Linear(WIDTH, WORDS)
        if tied:
            self.decode.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.decode(self.norm(x))


def mean_loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of the next words."""
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    ids = torch.randint(WORDS, (BATCH, 6), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def muon_of(model: nn.Module) -> torch.optim.Optimizer:
    """With an ``eps`` of AdamW at which gradients near zero are no signs."""
    return smp.optimizers.Muon(model, lr=0.02, adamw_lr=3e-3, adamw_eps=1e-3)
