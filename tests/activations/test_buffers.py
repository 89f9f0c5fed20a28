"""Running a region again leaves buffers and parameters of its modules alone, and finds them as the forward pass did."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Averages(nn.Module):
    """Keeps an average of its inputs, in place, and subtracts it: the result depends on what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return x.pow(2) - self.mean.clone() * x


class Replaces(Averages):
    """The same with a new tensor in each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x.pow(2) - self.mean * x


class Functional(nn.Module):
    """A norm by PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=True)


class Follows(nn.Module):
    """Moves a frozen parameter toward a trained one in its forward pass, and subtracts it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mean = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.move(0.5 * self.mean + 0.5 * (self.scale + x.mean(0)))
        return x.pow(2) * self.scale - self.mean.clone() * x

    def move(self, value: torch.Tensor) -> None:
        self.mean.data = value


class FollowsInPlace(Follows):
    """The same in place."""

    def move(self, value: torch.Tensor) -> None:
        self.mean.copy_(value)


class FollowsUnseen(Follows):
    """The same by a write that changes no counter."""

    def move(self, value: torch.Tensor) -> None:
        self.mean.data.copy_(value)


MODULES = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "cumulative": (lambda: nn.BatchNorm1d(4, momentum=None), (6, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (6, 4, 2, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), (6, 4, 2, 2, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), (6, 4, 3)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), (6, 4, 2, 2)),
    "spectral": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (6, 4)),
    "in place": (Averages, (6, 4)),
    "replaced": (Replaces, (6, 4)),
    "functional": (Functional, (6, 4)),
    "parameter assigned": (Follows, (6, 4)),
    "parameter in place": (FollowsInPlace, (6, 4)),
    "parameter unseen": (FollowsUnseen, (6, 4)),
}


def _trained(module, shape, checkpoints, how):
    from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential

    found = []
    for step in range(3):
        # Two calls before backward, as of two microbatches.
        inputs = [
            torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + n), dtype=torch.float64)
            for n in (0, 1)
        ]
        leaves = [x.requires_grad_() for x in inputs]
        if not checkpoints:
            outputs = [module(x) for x in leaves]
        elif how == "sequential":
            outputs = [checkpoint_sequential(nn.Sequential(module), x, strategy="contiguous") for x in leaves]
        else:
            run = (lambda x: module(x)) if how == "function" else module
            outputs = [checkpoint(run, x) for x in leaves]
        sum(out.square().sum() for out in outputs).backward()
        found += [x.grad for x in leaves]
    return found + [value.clone() for value in module.state_dict().values()]


@pytest.mark.parametrize("how", ["module", "function", "sequential"])
@pytest.mark.parametrize("name", MODULES)
def test_a_second_run_leaves_what_a_module_keeps_alone(solo, name, how):
    solo({})
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    expected = _trained(copy.deepcopy(module), shape, checkpoints=False, how=how)
    for one, other in zip(_trained(module, shape, checkpoints=True, how=how), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_parameters_that_are_too_large_to_be_copied_are_assigned_or_refused(solo, monkeypatch):
    from smp_runtime.activations import region_parameters
    from smp_runtime.errors import SMPUserError

    monkeypatch.setattr(region_parameters, "MOST_COPIED", 0)
    solo({})
    expected = _trained(Follows().double(), (6, 4), checkpoints=False, how="module")
    for one, other in zip(_trained(Follows().double(), (6, 4), True, "module"), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    with pytest.raises(SMPUserError, match="writes into mean of FollowsInPlace") as refused:
        _trained(FollowsInPlace().double(), (6, 4), True, "module")
    assert refused.value.code == "SMP309"
