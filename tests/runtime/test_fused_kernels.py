"""Optimizers of the script take PyTorch's fused kernels where it has left that open, and train as with PyTorch's loop."""

from __future__ import annotations

import pytest
import torch
from support.canaries import Noting
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.optim.fused_kernels import fused_where_open

OPTIMIZERS = {
    "adam": lambda p, **more: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1, **more),
    "adamw": lambda p, **more: torch.optim.AdamW(p, lr=1e-2, **more),
    "sgd": lambda p, **more: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True, **more),
    "adagrad": lambda p, **more: torch.optim.Adagrad(p, lr=1e-1, **more),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def _parameters(dtype, sizes=(1, 7, 13, 64, 1001)):
    drawn = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, dtype=dtype, generator=drawn)) for size in sizes]


def _train(optimizer, parameters, steps, update):
    drawn = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=drawn)
        update()
    return parameters


def _operations(update):
    """The names of the operations that an update makes."""
    with Noting() as noting:
        update()
    return [str(function.overloadpacket) for function in noting.seen]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_one_kernel_and_the_same_as_the_loop(solo, name, dtype):
    solo({})
    mine, theirs = _parameters(dtype), _parameters(dtype)
    wrapped, loop = smp.DistributedOptimizer(OPTIMIZERS[name](mine)), OPTIMIZERS[name](theirs, foreach=False)
    _train(wrapped, mine, 10, wrapped.step)
    _train(loop, theirs, 10, loop.step)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    made = _operations(wrapped.step)
    assert [operation for operation in made if "fused" in operation] == [f"aten._fused_{name}_"]
    # The counters of steps are counted up by one operation, or by one for each parameter where there is no other.
    assert len(made) <= 2 + 2 * len(mine) < len(_operations(loop.step))
    # A state of it says nothing of kernels, and goes on in the loop.
    assert all(group["fused"] is None for group in wrapped.state_dict()["param_groups"])
    other = OPTIMIZERS[name](_parameters(dtype), foreach=False)
    other.load_state_dict(wrapped.state_dict())
    _train(other, [p for group in other.param_groups for p in group["params"]], 1, other.step)


@pytest.mark.parametrize("used", ["later", "by turns", "rarely"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_without_a_gradient_in_some_steps_train_as_in_the_loop(solo, name, used):
    """Layers that are dropped, experts and tasks in turn: state of one group's parameters begins at different steps."""
    solo({})
    mine, theirs = _parameters(torch.float64), _parameters(torch.float64)
    wrapped, loop = smp.DistributedOptimizer(OPTIMIZERS[name](mine)), OPTIMIZERS[name](theirs, foreach=False)
    has_one = {
        "later": lambda step, index: step >= index,
        "by turns": lambda step, index: step % 2 == index % 2,
        "rarely": lambda step, index: step % (index + 1) == index,
    }[used]
    for parameters, update in ((mine, wrapped.step), (theirs, loop.step)):
        drawn = torch.Generator().manual_seed(1)
        for step in range(6):
            for index, parameter in enumerate(parameters):
                gradient = torch.randn(parameter.shape, dtype=torch.float64, generator=drawn)
                parameter.grad = gradient if has_one(step, index) else None
            update()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("settings", [{}, {"adam_w_mode": False}, {"bias_correction": False}], ids=str)
def test_fused_adam_is_one_kernel_too(dtype, settings):
    mine, theirs = _parameters(dtype), _parameters(dtype)
    optimizer = smp.optimizers.FusedAdam(mine, lr=1e-2, weight_decay=0.1, **settings)
    averages = [(torch.zeros_like(p), torch.zeros_like(p)) for p in theirs]
    steps = 0

    @torch.no_grad()
    def by_hand():
        nonlocal steps
        steps += 1
        first, second = (1 - 0.9**steps, 1 - 0.999**steps) if settings.get("bias_correction", True) else (1.0, 1.0)
        for parameter, (average, square) in zip(theirs, averages, strict=True):
            gradient = parameter.grad
            if settings.get("adam_w_mode", True):
                parameter.mul_(1 - 1e-2 * 0.1)
            else:
                gradient = gradient + 0.1 * parameter
            average.mul_(0.9).add_(gradient, alpha=0.1)
            square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            parameter.sub_(1e-2 * (average / first) / ((square / second).sqrt() + 1e-8))

    _train(optimizer, mine, 10, optimizer.step)
    _train(None, theirs, 10, by_hand)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert {state["step"] for state in optimizer.state.values()} == {10}
    kernel = "adamw" if settings.get("adam_w_mode", True) else "adam"
    assert [made for made in _operations(optimizer.step) if "fused" in made] == [f"aten._fused_{kernel}_"]


def _kept(change=None, **settings):
    """Whether an optimizer that is made like that keeps PyTorch's own form."""
    parameters = _parameters(torch.float32, (8, 16))
    if change is not None:
        change(parameters)
    optimizer = torch.optim.AdamW(parameters, **settings)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.ones_like(parameter)
    with fused_where_open(optimizer):
        return optimizer.param_groups[0]["fused"]


def test_what_a_script_has_chosen_stays():
    assert _kept() is True
    assert _kept(fused=False) is False
    assert _kept(foreach=True) is None
    assert _kept(foreach=False) is None
    assert _kept(lr=torch.tensor(1e-3)) is None
    assert _kept(differentiable=True) is None


def test_what_the_kernels_would_read_wrongly_keeps_the_loop():
    def transposed(parameters):
        parameters[1] = nn.Parameter(torch.randn(4, 4).t())

    def gradient_transposed(parameters):
        parameters[1] = nn.Parameter(torch.randn(4, 4))
        parameters[1].grad = torch.randn(4, 4).t()

    def half(parameters):
        parameters[1] = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))

    def elsewhere(parameters):
        parameters[1] = nn.Parameter(torch.randn(4, device="meta"))

    for change in (transposed, gradient_transposed, half, elsewhere):
        assert _kept(change) is None, change


def test_other_optimizers_and_subclasses_with_an_update_of_their_own_are_left_alone():
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            assert self.param_groups[0]["fused"] is None

    parameters = _parameters(torch.float32, (8,))
    parameters[0].grad = torch.ones(8)
    optimizer = Own(parameters)
    with fused_where_open(optimizer):
        optimizer.step()
    with fused_where_open(torch.optim.Rprop(parameters)):
        pass


def test_groups_are_as_before_after_an_error():
    parameters = _parameters(torch.float32, (8,))
    parameters[0].grad = torch.ones(8)
    optimizer = torch.optim.AdamW(parameters)
    with pytest.raises(ZeroDivisionError), fused_where_open(optimizer):
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["fused"] is None
