"""Training the tiny model of a family in one process and under a strategy, and how far the two are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.documents.client_strategies import SHARDED, STAGES, TENSOR
from support.models.models import part
from support.models.tiny_families import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Family,
    batch_of,
    deeper,
    layers_of,
    loss_of,
    tiny_model,
    tiny_settings,
)
from support.training.reference import divided, train_alone

if TYPE_CHECKING:
    import torch

STEPS, SAMPLES, MICROBATCHES, RATE = 3, 4, 2, 0.1
#: By name, the number of ranks and the parameters; one process computes the same two parts of a batch under all of them.
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp 2": (2, {**STAGES, "ddp": True}),
    "sdp 2": (2, {**SHARDED, "ddp": True}),
    "tp 2": (2, {**TENSOR, "ddp": True, "microbatches": MICROBATCHES, "optimize": "speed"}),
    "tp 2 × pp 2": (4, {**STAGES, **TENSOR, "ddp": True}),
}
#: Of losses, and of gradients: absolute for losses below 1, and relative to the largest element.
LOSS, GRADIENT = 1e-5, 1e-4


@dataclass(frozen=True)
class Distance:
    """How far training on several ranks is from that in one process.

    Attributes:
        loss: largest difference of a loss, relative where the loss is above 1.
        gradient: largest difference of an element of a gradient of the first step, relative to the largest element of its tensor,
            or a hundredth of the model's.
        where: the parameter with that.
        split: of the elements of matrices, the part that a rank has not; None without tensor parallelism.
        traffic: bytes that a rank sends for a layer, forward and backward, divided by those of Megatron's layer; None where layers
            cannot be added or no pipeline stage has all of them.
    """

    loss: float
    gradient: float
    where: str
    split: float | None = None
    traffic: float | None = None

    @property
    def is_equal(self) -> bool:
        """Whether it is within the bounds."""
        return self.loss <= LOSS and self.gradient <= GRADIENT


def note_alone(family: Family, file: str | Path) -> dict[str, Any]:
    """Train in one process, and keep what ranks are compared with in a file; returns the settings of the model."""
    import torch

    settings = tiny_settings(family)
    model = tiny_model(family, settings)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    trained = train_alone_in_parts(model)
    torch.save(
        {"settings": settings, "losses": trained.losses, "gradients": trained.gradients[0], "first": first}, file
    )
    if not all(math.isfinite(loss) for loss in trained.losses):
        raise ValueError(f"the losses are {trained.losses}")
    return settings


def train_alone_in_parts(model: torch.nn.Module) -> Any:
    """The reference: each batch in two parts, whoever computes them."""
    import torch

    trained = train_alone(model, _optimizer, [])
    for step in range(STEPS):
        trained.step(divided((batch_of(step, SAMPLES),), MICROBATCHES), loss_of)
    assert isinstance(trained.model, torch.nn.Module)
    return trained


def distance(family: Family, file: str | Path) -> Distance:
    """Train under the strategy of this rank's session, and compare; runs on every rank."""
    import torch

    import smdistributed.modelparallel.torch as smp

    alone = torch.load(file, weights_only=False)
    net = tiny_model(family, alone["settings"])
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, ids)
        model.backward(loss)
        return loss

    common = smp.state.cfg.prescaled_batch
    rank, size = (smp.rdp_rank(), smp.rdp_size()) if common else (smp.dp_rank(), smp.dp_size())
    losses, second = [], {}
    for number in range(STEPS):
        optimizer.zero_grad()
        mean = float(step(*part((batch_of(number, SAMPLES),), rank, size)).reduce_mean())
        optimizer.step()
        losses.append(sum(smp.allgather(mean, smp.RDP_GROUP if common else smp.DP_GROUP)) / size)
        if number == 0:
            whole = smp.init().module_manager.translated(model.state_dict(), model.module)
            second = {name: value.clone() for name, value in whole.items()}  # later steps go on changing it
    gradient, where = _gradient_distance(alone["first"], second, alone["gradients"])
    loss = max(abs(one - other) / max(1.0, abs(other)) for one, other in zip(losses, alone["losses"], strict=True))
    if smp.tp_size() == 1:
        return Distance(loss, gradient, where)
    traffic = _traffic(family, alone["settings"], smp.tp_size()) if smp.pp_size() == 1 else None
    return Distance(loss, gradient, where, _split(model), traffic)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(parameters, lr=RATE)


def _gradient_distance(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """From what the first update has made of the weights, which all ranks have in one form whatever the strategy."""
    import torch

    most = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel())
    worst = (0.0, "")
    for name, gradient in gradients.items():
        if name not in second:
            return math.inf, f"{name} is absent"
        before, after = first[name].double(), second[name].double().cpu()
        # What float32 cannot tell of a sum is no distance.
        rounding = 2 * torch.finfo(torch.float32).eps * torch.maximum(before.abs(), after.abs()) / RATE
        off = ((before - after) / RATE - gradient.double()).abs() - rounding
        scale = max(float(gradient.abs().max()) if gradient.numel() else 0.0, most / 100)
        worst = max(worst, (float(off.max()) / scale if off.numel() else 0.0, name))
    return worst


def _split(model: Any) -> float:
    """Of the elements of matrices, the part that this rank has not; tables of positions, which nothing splits, are not counted."""
    import torch

    tables = {id(part.weight) for part in model.module.modules() if isinstance(part, torch.nn.Embedding)}
    whole = own = 0
    for record in model.registry:
        is_positions = id(record.parameter) in tables and record.shape[0] != VOCABULARY
        if len(record.shape) > 1 and not is_positions:
            whole += math.prod(record.shape)
            axis, bounds = record.placement.tensor_axis, record.placement.tensor_slice
            share = (bounds[1] - bounds[0]) / record.shape[axis] if axis is not None and bounds is not None else 1.0
            own += math.prod(record.shape) * share
    return 1.0 - own / whole if whole else 0.0


#: Samples of which the traffic is counted: more, since gradients of norms would weigh much beside few activations.
_COUNTED = 16


def _traffic(family: Family, settings: dict[str, Any], ranks: int) -> float | None:
    """From what twice the layers send more, so that what stands before and behind them does not count."""
    deep = deeper(settings)
    try:
        alone, pairs = (
            more - few for few, more in zip(layers_of(family, settings), layers_of(family, deep), strict=True)
        )
        # Two sums forward and two backward; where a decoder looks at an encoder's results a third forward, and backward one for its
        # own input and one for the results.
        sums = 4 * alone + 7 * pairs
        if not sums:
            return None
        few, many = _bytes_sent(family, settings), _bytes_sent(family, deep)
    except Exception:  # no model of twice the layers; on every rank, since all make the same one
        return None
    return (many - few) / (sums * 2 * (ranks - 1) / ranks * _COUNTED * LENGTH * WIDTH * 4)


def _bytes_sent(family: Family, settings: Mapping[str, Any]) -> float:
    """In a pass forward and backward, after one for warming up."""
    from counting import CountingCollectives

    import smdistributed.modelparallel.torch as smp

    net = tiny_model(family, settings)
    smp.set_tensor_parallelism(net)
    model, session = smp.DistributedModel(net), smp.init()
    usual, sent = session.ranks.collectives, 0.0
    try:
        for _ in range(2):
            counting = CountingCollectives()
            session.ranks.collectives = counting
            loss_of(model.module, batch_of(0, _COUNTED)).backward()
            sent = counting.sent
    finally:
        object.__setattr__(session.ranks, "collectives", usual)
    return sent
