"""What the tests of sharded data parallelism share: models, settings, one training loop, one reference."""

from __future__ import annotations

import torch
from torch import nn

from support.models.models import TiedNet, loss_of, token_batch

#: Far above any norm: clipping changes nothing.
UNCLIPPED = 1e9
SCALE = 256.0


class Block(nn.Module):
    """Norm, two linear layers and a residual connection: what a model repeats."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Blocks(nn.Module):
    """A stack of blocks between two linear layers."""

    def __init__(self, layers: int = 4, hidden: int = 32) -> None:
        super().__init__()
        self.enter = nn.Linear(8, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.leave = nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, 8] -> [batch, 1]
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def largest_unit(module: nn.Module) -> int:
    """Elements of the largest unit that a module is divided into."""
    from smp_runtime.sharding.wrap_policy import ShardingOptions, plan_units

    options = ShardingOptions(10**9, 0, 10**9, hierarchical=False, clipping=1.0)
    return max(plan.elements for plan in plan_units(module, list(module.parameters()), options))


def settings(module: nn.Module, degree: int, **more) -> dict:
    """A configuration that shards everything and lets at most two units live."""
    return {
        "ddp": True,
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": 0,
        "sdp_max_live_parameters": 2 * largest_unit(module),
        "sdp_gradient_clipping": UNCLIPPED,
        **more,
    }


def check_sharded(model) -> None:
    """At least 95 % of the elements are sharded, and no more than the cap were ever gathered."""
    sharded, whole = model.shards.elements
    assert sharded >= 0.95 * (sharded + whole)
    assert model.shards.scheduler.peak <= model.shards.options.max_live
    assert model.shards.scheduler.elements == 0


def train(make, optimizer, steps: int, batch: int, passes: int = 1, dtype=torch.float32, check=True) -> dict:
    """One rank's training of a net over tokens, in ``passes`` accumulated steps per update."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(smp.rank())  # every rank draws other weights; the first one's count
    model = smp.DistributedModel(make().to(dtype), backward_passes_per_step=passes)
    wrapped = smp.DistributedOptimizer(optimizer(model.parameters()), static_loss_scale=SCALE)

    @smp.step
    def step(ids, targets):
        loss = loss_of(model(ids), targets)
        model.backward(loss / passes)
        return loss

    losses = []
    share = batch // smp.dp_size() // passes
    for index in range(steps):
        ids, targets = token_batch(index, batch)
        wrapped.zero_grad()
        total = 0.0
        for number in range(passes):
            first = (smp.dp_rank() * passes + number) * share
            total += float(step(ids[first : first + share], targets[first : first + share]).reduce_mean()) / passes
        wrapped.step()
        assert not wrapped.overflow
        losses.append(sum(smp.allgather(total, smp.DP_GROUP)) / smp.dp_size())
    if check:
        check_sharded(model)
    return {
        "losses": losses,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": wrapped.state_dict(),
        "norm": wrapped._global_grad_norm,
    }


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


__all__ = ["Block", "Blocks", "TiedNet", "adamw", "check_sharded", "largest_unit", "settings", "train"]
