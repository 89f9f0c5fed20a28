"""LARS and LANS: one update by hand. How they train over several ranks: ``test_precision_and_sharding.py``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError


def _updated(make, gradients):
    """The parameter [3, 4] after one update for each gradient."""
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    return parameter.detach()


def test_lars_has_a_rate_per_parameter():
    # |w| = 5, |g| = 10: the rate is 0.1 * 5 / (10 + 0.2 * 5), and the gradient with decay (6.6, 8.8).
    first = 0.1 * 5 / 11 * torch.tensor([6.6, 8.8])
    start = torch.tensor([3.0, 4.0])

    def make(**more):
        return lambda p: smp.optimizers.FusedLARS(p, lr=0.5, weight_decay=0.2, trust_coefficient=0.1, eps=0.0, **more)

    torch.testing.assert_close(_updated(make(), [[6.0, 8.0]]), start - 0.5 * first)
    torch.testing.assert_close(_updated(make(nesterov=True), [[6.0, 8.0]]), start - 0.5 * 1.9 * first)
    # Then |w| = 4.75 - ..., and what is kept of the first update is added.
    after = start - 0.5 * first
    rate = 0.1 * after.norm() / (10 + 0.2 * after.norm())
    second = 0.9 * first + rate * (torch.tensor([6.0, 8.0]) + 0.2 * after)
    torch.testing.assert_close(_updated(make(), [[6.0, 8.0]] * 2), after - 0.5 * second)
    # A gradient of nothing, and groups without a rate of their own.
    torch.testing.assert_close(_updated(make(momentum=0.0), [[0.0, 0.0]]), start - 0.5 * 0.2 * start)
    plain = _updated(lambda p: smp.optimizers.FusedLARS(p, lr=0.5, momentum=0.9, trust_coefficient=0), [[1.0, 2.0]] * 2)
    sgd = _updated(lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), [[1.0, 2.0]] * 2)
    torch.testing.assert_close(plain, sgd)
    with pytest.raises(SMPUserError, match="momentum is 0.*give a momentum"):
        smp.optimizers.FusedLARS([nn.Parameter(torch.ones(1))], momentum=0, nesterov=True)


def test_lans_steps_along_the_average_and_along_the_gradient():
    start, lr, beta_1, beta_2, decay = torch.tensor([3.0, 4.0]), 0.1, 0.9, 0.99, 0.3
    weight, average, squares = start, torch.zeros(2), torch.zeros(2)
    for step, gradient in enumerate(([6.0, 8.0], [0.0, 5.0]), 1):
        unit = torch.tensor(gradient) / torch.tensor(gradient).norm()
        average = beta_1 * average + (1 - beta_1) * unit
        squares = beta_2 * squares + (1 - beta_2) * unit**2
        root = (squares / (1 - beta_2**step)).sqrt() + 1e-6
        directions = average / (1 - beta_1**step) / root + decay * weight, unit / root + decay * weight
        lengths = [direction / direction.norm() * weight.norm() for direction in directions]
        weight = weight - lr * (beta_1 * lengths[0] + (1 - beta_1) * lengths[1])
    made = _updated(
        lambda p: smp.optimizers.FusedLANS(p, lr=lr, betas=(beta_1, beta_2), weight_decay=decay),
        [[6.0, 8.0], [0.0, 5.0]],
    )
    torch.testing.assert_close(made, weight)
