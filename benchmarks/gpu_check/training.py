"""Short trainings in plain PyTorch and with this library, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from gpu_check.device import get_device, shut_down
from gpu_check.models import SMALL, MakeOptimizer, MixedPrecision, Shape, compute_loss, draw_batch, make_adamw, make_gpt
from gpu_check.results import Finding, round_significant

STEPS, BATCH = 4, 8
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Set after the models have their weights, so that both sides draw the same dropout.
_SEED = 5


@dataclass(frozen=True)
class Run:
    """Results of a training.

    Attributes:
        losses: the mean over the whole batch, for each step.
        weights: the whole model's, by name; master weights where there are any.
        skipped: updates that were skipped for an overflow; counted in plain PyTorch only.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    skipped: int = 0


def train_plain(
    mode: str = "fp32",
    *,
    clip: float | None = None,
    make: MakeOptimizer = make_adamw,
    dropout: float = 0.0,
    scale: float = 1.0,
    is_dynamic: bool = False,
    shape: Shape = SMALL,
    steps: int = STEPS,
) -> Run:
    """Train in plain PyTorch on this device, on whole batches.

    Args:
        mode: ``fp32``, ``bf16`` or ``fp16``.
        clip: largest norm of the gradients.
        scale: loss scale of fp16.
        is_dynamic: whether the loss scale changes.
    """
    model = make_gpt(shape, dropout).to(get_device())
    masters = None
    if mode in _DTYPES:
        masters = MixedPrecision(model, make, _DTYPES[mode], clip, scale=scale, is_dynamic=is_dynamic)
    optimizer: Any = masters or make(model.parameters())
    losses = []
    torch.manual_seed(_SEED)
    for index in range(steps):
        ids, targets = draw_batch(index, BATCH, shape["seq"])
        optimizer.zero_grad()
        loss = compute_loss(model, ids, targets)
        (loss * (optimizer.scale if mode == "fp16" else 1.0)).backward()
        if clip and masters is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss))
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if masters is None:
        return Run(losses, weights)
    master_of = {id(p): master for p, master in zip(masters.parameters, masters.masters, strict=True)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        weights[name] = master_of[id(parameter)].detach().clone()
    return Run(losses, weights, masters.skipped)


def train_wrapped(
    config: Mapping[str, Any],
    *,
    clip: float | None = None,
    make: MakeOptimizer = make_adamw,
    dropout: float = 0.0,
    optimizer_options: Mapping[str, Any] | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    shape: Shape = SMALL,
    steps: int = STEPS,
    at_end: Callable[[nn.Module, Any], None] | None = None,
) -> Run:
    """Train with this library; each data parallel rank gets its part of the batch.

    Args:
        config: for ``smp.init``. The session is left to the caller.
        prepare: gets the model before it is wrapped.
        at_end: gets the wrapped model and optimizer after the last step.
    """
    smp.init(config)
    net = make_gpt(shape, dropout)
    if prepare is not None:
        prepare(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(make(model.parameters()), **(optimizer_options or {}))

    @smp.step
    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = compute_loss(model, ids, targets)
        model.backward(loss)
        return loss

    # With a prescaled batch, tensor parallel ranks share their samples.
    is_prescaled = smp.state.cfg.prescaled_batch
    rank, size = (smp.rdp_rank(), smp.rdp_size()) if is_prescaled else (smp.dp_rank(), smp.dp_size())
    group = smp.RDP_GROUP if is_prescaled else smp.DP_GROUP
    length = BATCH // size
    mine = slice(rank * length, (rank + 1) * length)
    losses = []
    torch.manual_seed(_SEED)
    for index in range(steps):
        ids, targets = draw_batch(index, BATCH, shape["seq"], smp.state.device)
        optimizer.zero_grad()
        mean = float(step(ids[mine], targets[mine]).reduce_mean())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(sum(smp.allgather(mean, group)) / size if smp.size() > 1 else mean)
    weights = {name: value.detach().clone().cpu() for name, value in model.state_dict().items()}
    if at_end is not None:
        at_end(model, optimizer)
    return Run(losses, weights)


@dataclass(frozen=True)
class Comparison:
    """A configuration of the library, and the training in plain PyTorch that it must equal.

    Attributes:
        config: for ``smp.init``.
        tolerance: largest relative difference of losses; that of weights is ten times as large.
        mode: ``fp32``, ``bf16`` or ``fp16``.
        plain: arguments of :func:`train_plain` only.
        both: arguments of both trainings.
        ours: arguments of :func:`train_wrapped`, which take precedence over ``both``.
    """

    config: Mapping[str, Any]
    tolerance: float
    mode: str = "fp32"
    plain: Mapping[str, Any] = field(default_factory=dict)
    both: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)

    def run(self, finding: Finding) -> Run:
        """Train on both sides, and add the differences to a finding; return the training in plain PyTorch."""
        theirs = train_plain(self.mode, **{**self.both, **self.plain})
        mine = train_wrapped(self.config, **{**self.both, **self.ours})
        judge(finding, mine, theirs, self.tolerance)
        shut_down()
        return theirs


def compute_distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of ``theirs``."""
    mine, theirs = mine.detach().double().cpu(), theirs.detach().double().cpu()
    return float(torch.linalg.vector_norm(mine - theirs) / torch.linalg.vector_norm(theirs).clamp_min(1e-30))


@dataclass(frozen=True)
class Distance:
    """How far apart two state dicts are.

    Attributes:
        worst: largest relative distance of a tensor.
        where: the name of that tensor.
        is_equal: whether all tensors are equal in every bit.
        missing: names that only one of them has.
    """

    worst: float
    where: str
    is_equal: bool
    missing: list[str]


def compare_weights(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> Distance:
    """Compare two state dicts in the precision of the first."""
    worst, where, is_equal = 0.0, "", True
    for name in theirs.keys() & mine.keys():
        # Master weights are float32, while the state may have the model's half precision.
        wanted = theirs[name].detach().cpu().to(mine[name].dtype)
        distance = compute_distance(mine[name], wanted)
        is_equal = is_equal and torch.equal(mine[name].detach().cpu(), wanted)
        if not distance <= worst:  # also if it is not a number
            worst, where = distance, name
    return Distance(worst, where, is_equal, sorted(theirs.keys() ^ mine.keys()))


def judge(finding: Finding, mine: Run, theirs: Run, tolerance: float) -> None:
    """Add the distance of two trainings to a finding, and whether it is within the tolerance."""
    apart = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(mine.losses, theirs.losses, strict=True))
    distance = compare_weights(mine.weights, theirs.weights)
    dtypes = {str(value.dtype).removeprefix("torch.") for value in mine.weights.values()}
    finding["state"] = "/".join(sorted(dtypes))
    finding["loss_rel"] = round_significant(apart)
    finding["weights_rel"] = round_significant(distance.worst)
    finding["bit_equal"] = distance.is_equal and mine.losses == theirs.losses
    if distance.missing:
        finding["missing"] = distance.missing[:4]
    if distance.worst > tolerance:
        finding["worst"] = distance.where
    is_near = apart <= tolerance and distance.worst <= 10 * tolerance
    finding["ok"] = all(map(math.isfinite, mine.losses)) and is_near and not distance.missing
