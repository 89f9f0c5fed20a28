"""Training under each strategy on ranks that share emulated devices, and the same training in one process of plain PyTorch."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

STEPS, BATCH, WIDTH = 3, 8, 8
_SHARDED = {"sdp_param_persistence_threshold": 0, "sdp_max_live_parameters": 100}
_PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
_TENSORS = {"tensor_parallel_degree": 2, "ddp": True}

#: By name, the number of ranks and the configuration.
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp 2": (2, {"ddp": True}),
    "dp 4": (4, {"ddp": True, "microbatches": 2}),
    "sharded state 2": (2, {"ddp": True, "shard_optimizer_state": True}),
    "sharded state 4": (4, {"ddp": True, "shard_optimizer_state": True}),
    "pp 2": (2, _PIPELINE),
    "pp 2 x dp 2": (4, _PIPELINE),
    "tp 2": (2, _TENSORS),
    "pp 2 x tp 2": (4, {**_PIPELINE, **_TENSORS}),
    "sdp 2": (2, {"ddp": True, "sharded_data_parallel_degree": 2, **_SHARDED}),
    "sdp 4": (4, {"ddp": True, "sharded_data_parallel_degree": 4, **_SHARDED}),
    "sdp 2 x dp 2": (4, {"ddp": True, "sharded_data_parallel_degree": 2, **_SHARDED}),
}
#: Of a whole training: gradients are summed in another order than in one process.
TOLERANCE = 1e-5


class Net(nn.Module):
    """A few layers, of which pipelines and tensor parallelism can take parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layers(x)))


def _batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(index)
    return torch.randn(BATCH, WIDTH, generator=drawn), torch.randn(BATCH, 4, generator=drawn)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_plain() -> dict[str, Any]:
    """Train in this process, on whole batches."""
    torch.manual_seed(0)
    net = Net()
    optimizer, losses = _optimizer(net.parameters()), []
    for index in range(STEPS):
        x, y = _batch(index)
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: value.clone() for name, value in net.state_dict().items()}}


def train() -> dict[str, Any]:
    """Train on the ranks of this job."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    net = Net()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(net.layers, True)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    losses = []
    for index in range(STEPS):
        x, y = (part.chunk(smp.dp_size())[smp.dp_rank()].to(smp.state.device) for part in _batch(index))
        optimizer.zero_grad()
        mine = float(step(x, y).reduce_mean())
        optimizer.step()
        losses.append(sum(smp.allgather(mine, smp.DP_GROUP)) / smp.dp_size())
    return {
        "losses": losses,
        "weights": model.state_dict(),
        "backend": smp.state.backend,
        "device": str(smp.state.device),
    }


def run(name: str, seed: int, backend: str) -> dict[str, Any]:
    """Train on this rank, with all ranks on one emulated device.

    Args:
        backend: of ``SMP_SHARED_GPU``.
    """
    from support.ranks.emulated import on_devices

    before = dict(os.environ)
    os.environ["SMP_SHARED_GPU"] = backend
    try:
        return on_devices(seed, STRATEGIES[name][1], train, devices=1)
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_seeds(name: str, seeds: list[int], backend: str) -> list[dict[str, Any]]:
    """Train once for each seed, one after the other."""
    return [run(name, seed, backend) for seed in seeds]
