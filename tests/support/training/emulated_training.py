"""Training on ranks with emulated devices: one function for each path of the runtime that has code of its own for CUDA."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from support.models.models import TiedNet, loss_of, token_batches
from support.training import activation_training, sharded_training
from support.training.pipeline_training import staged
from support.training.rank_training import training_step, updates

STEPS, BATCH = 4, 8


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def reduction() -> dict[str, Any]:
    """Equal replicas, small buckets, some of which travel while backward runs."""
    return _replicas(bucket_cap_mb=800 / 2**20)


def _replicas(**options: Any) -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = smp.DistributedModel(TiedNet(), **options)
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))
    losses = list(updates(training_step(model), optimizer, token_batches(0, STEPS, BATCH)))
    return {"losses": losses, "weights": {name: value.clone() for name, value in model.state_dict().items()}}


def writing() -> dict[str, Any]:
    """A script that changes weights between steps, and gradients before updates."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.job import session

    torch.manual_seed(0)
    model = smp.DistributedModel(TiedNet())
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))
    step, device = training_step(model), session.current_session().ranks.device
    for batch in token_batches(0, STEPS, BATCH):
        ids, targets = (part.chunk(smp.dp_size())[smp.dp_rank()].to(device) for part in batch)
        optimizer.zero_grad()
        step(ids, targets)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.5, 0.5)
                parameter.data.mul_(0.99)
    return {"weights": {name: value.clone() for name, value in model.state_dict().items()}}


def half() -> dict[str, Any]:
    """fp16 with a dynamic loss scale, whose first steps overflow."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = smp.DistributedModel(TiedNet())
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 2, "init_scale": 2.0**20},
    )
    losses, overflows = [], []
    for loss in updates(training_step(model), optimizer, token_batches(0, STEPS, BATCH)):
        losses.append(loss)
        overflows.append(bool(optimizer.overflow))
    return {"losses": losses, "overflows": overflows}


def scaling() -> dict[str, Any]:
    """Autocast to half precision with a gradient scaler, one of whose steps is skipped."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.job import session

    torch.manual_seed(0)
    model = smp.DistributedModel(TiedNet())
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))
    device = session.current_session().ranks.device
    scaler = smp.amp.GradScaler(init_scale=2.0**4, growth_interval=2)

    @smp.step
    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model(ids), targets)
        model.backward(scaler.scale(loss))
        return loss

    losses = []
    for index, batch in enumerate(token_batches(0, STEPS, BATCH)):
        optimizer.zero_grad()
        losses.append(float(step(*(tensor.to(device) for tensor in batch)).reduce_mean()))
        if index == 1:
            next(model.parameters()).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
    return {"losses": losses, "scale": scaler.get_scale()}


def sharding() -> dict[str, Any]:
    """Sharded parameters that are gathered ahead of their use."""
    return sharded_training.train(TiedNet, sharded_training.adamw, STEPS, 3 * BATCH)


def pipeline() -> dict[str, Any]:
    """Two stages, whose tensors go from device to device."""
    return staged("tied", STEPS, BATCH)


def offloading() -> dict[str, Any]:
    """Activations that wait in host memory; without dropout, whose numbers a GPU draws in another way than a CPU."""
    import smdistributed.modelparallel.torch as smp

    def without_dropout() -> nn.Module:
        net = activation_training.Net(4)
        for layer in net.layers:
            layer.dropout.p = 0.0
        return net

    return activation_training.train(
        without_dropout, lambda model: smp.set_activation_checkpointing(model.layers), STEPS
    )


def saving(folder: str) -> dict[str, Any]:
    """A checkpoint that is written while training goes on, and one taken up."""
    from support.training.checkpoint_training import Training

    run = Training()
    run.train(0, 2)
    run.save(folder, "later", 2, async_save=True)
    run.train(2, 3)
    run.smp.wait_for_checkpoint()
    run.resume(folder, "later")
    run.save(folder, "again", 2, async_save=True)
    return {"losses": run.train(2, 4)}


def gathering() -> dict[str, Any]:
    """SMDDP's all-gather in phases, on two hosts."""
    from smp_config import Group
    from smp_runtime.job import session

    weights = gathering_between_hosts()["weights"]
    return {"weights": weights, "phases": session.current_session().groups.group(Group.SHARD).in_phases}


def gathering_between_hosts() -> dict[str, Any]:
    """Sharded training whose all-gather goes between hosts first, then inside each."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.job import session

    torch.manual_seed(0)
    model = smp.DistributedModel(sharded_training.Blocks())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    device = session.current_session().ranks.device
    for index in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * index + smp.rank()))
        optimizer.zero_grad()
        model(x.to(device)).square().mean().backward()
        optimizer.step()
    return {"weights": model.state_dict()}


class Wide(nn.Module):
    """Two layers that tensor parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def dividing() -> dict[str, Any]:
    """Layers that tensor parallelism divides, with at most one collective ahead."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.job import session

    torch.manual_seed(0)
    net = Wide()
    smp.set_tensor_parallelism(net, True)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))
    step = training_step(model, lambda model, x: model(x).square().mean())
    device, losses = session.current_session().ranks.device, []
    for index in range(STEPS):
        x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(index)).to(device)
        optimizer.zero_grad()
        losses.append(float(step(x).reduce_mean()))
        optimizer.step()
    return {"losses": losses}


def reading_late() -> dict[str, Any]:
    """A script that adds up what a step returns without ever waiting for it."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.job import session

    torch.manual_seed(0)
    model = smp.DistributedModel(TiedNet())
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))

    @smp.step
    def step(ids: torch.Tensor, targets: torch.Tensor) -> Any:
        scores = model(ids)
        loss = loss_of(scores, targets)
        model.backward(loss)
        return scores, loss

    device = session.current_session().ranks.device
    total = torch.zeros((), device=device)
    # All of them first: the host waits for a copy from its memory.
    batches = [tuple(tensor.to(device) for tensor in batch) for batch in token_batches(0, 2 * STEPS, BATCH)]
    for batch in batches:
        scores, loss = step(*batch)
        total += scores.concat().square().sum() + loss.reduce_mean()
        del scores, loss
        optimizer.step()
        optimizer.zero_grad()
    return {"total": float(total)}


def on_a_stream(function: Callable[..., Any], *args: Any) -> Any:
    """In a script that computes on a stream of its own."""
    if not torch.cuda.is_available():
        return function(*args)
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        result = function(*args)
    own.synchronize()
    return result


SHARDED = {"microbatches": 2, **sharded_training.settings(TiedNet(), 2)}
OFFLOADED = {"offload_activations": True, "activation_loading_horizon": 1, "microbatches": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}


@dataclass(frozen=True)
class Path:
    """A path of the runtime: a function of this module, and the job that it runs in.

    Attributes:
        saves: whether it needs a folder.
        own_stream: whether the script computes on a stream of its own.
        tolerance: of what must be equal to the CPU's.
    """

    function: str
    world: int
    config: dict[str, Any] = field(default_factory=dict)
    saves: bool = False
    own_stream: bool = False
    tolerance: float = 1e-5


PATHS = {
    "reduction": Path("reduction", 2, {"ddp": True, "microbatches": 2}),
    "sharding": Path("sharding", 2, SHARDED),
    "sharding, hybrid": Path("sharding", 4, SHARDED),
    "pipeline": Path("pipeline", 2, PIPELINE),
    "pipeline, replicas": Path("pipeline", 4, PIPELINE),
    "pipeline, a stream of the script": Path("pipeline", 2, PIPELINE, own_stream=True),
    "pipeline, outputs read late": Path("reading_late", 2, PIPELINE),
    # The checks of the first steps wait for the script's stream, so that nothing could be read late.
    "pipeline, outputs read late on a stream of the script": Path(
        "reading_late", 2, {**PIPELINE, "check_invariants": False}, own_stream=True
    ),
    "reduction, a stream of the script": Path("reduction", 2, {"ddp": True}, own_stream=True),
    "sharding, a stream of the script": Path("sharding", 2, SHARDED, own_stream=True),
    "offloading": Path("offloading", 1, OFFLOADED),
    "offloading, a stream of the script": Path("offloading", 1, OFFLOADED, own_stream=True),
    "offloading, pipeline": Path("offloading", 2, {**PIPELINE, "offload_activations": True}),
    "fp16": Path("half", 2, {"ddp": True, "fp16": True}, tolerance=2e-2),
    "fp16, sharded state": Path("half", 2, {"ddp": True, "fp16": True, "shard_optimizer_state": True}, tolerance=2e-2),
    "gradient scaler": Path("scaling", 2, {"ddp": True}, tolerance=2e-2),
    "saving": Path("saving", 1, {}, saves=True),
    "saving, sharding": Path(
        "saving", 2, {**sharded_training.settings(TiedNet(), 2), "sdp_max_live_parameters": 10**6}, saves=True
    ),
    "saving, pipeline": Path("saving", 2, {"partitions": 2, "microbatches": 4}, saves=True),
    "tensor parallelism": Path("dividing", 2, {"ddp": True, "tensor_parallel_degree": 2}),
    "writing, bf16": Path("writing", 2, {"ddp": True, "bf16": True}, tolerance=2e-2),
    "writing, sharded state": Path("writing", 2, {"ddp": True, "shard_optimizer_state": True}),
    "writing, sharding": Path("writing", 2, SHARDED),
    "sharding between hosts": Path(
        "gathering_between_hosts", 4, sharded_training.settings(sharded_training.Blocks(), 4)
    ),
    "smddp": Path(
        "gathering", 4, {**sharded_training.settings(sharded_training.Blocks(), 4), "ddp_dist_backend": "smddp"}
    ),
}


def run(path: Path, folder: str, start: Callable[..., Any]) -> Any:
    """What a path's function returns on this rank; its ranks are on two hosts if there are four.

    Args:
        folder: to save into.
        start: gets the configuration, the function and its arguments.
    """
    rank, size = int(os.environ.get("RANK", "0")), path.world
    os.environ["SMP_HOST"] = f"algo-{rank * 2 // size if size == 4 else 0}"
    function = globals()[path.function]
    if path.own_stream:
        function = functools.partial(on_a_stream, function)
    try:
        return start(path.config, function, *([folder] if path.saves else []))
    finally:
        del os.environ["SMP_HOST"]
