"""Optimizers take PyTorch's fused kernels on CUDA devices, with their counters of steps there and those of a saved state not."""

from __future__ import annotations

import pytest
import torch
from support.canaries import Noting
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_emulation.checked import emulated
from smp_runtime.optim.fused_kernels import fused_where_open

OPTIMIZERS = {
    "adam": lambda p, **more: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1, **more),
    "adamw": lambda p, **more: torch.optim.AdamW(p, lr=1e-2, **more),
    "sgd": lambda p, **more: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True, **more),
    "adagrad": lambda p, **more: torch.optim.Adagrad(p, lr=1e-1, **more),
}


def _parameters(device):
    drawn = torch.Generator().manual_seed(0)
    sizes = (1, 7, 64)
    return [nn.Parameter(torch.randn(size, dtype=torch.float64, generator=drawn).to(device)) for size in sizes]


def _train(optimizer, parameters, steps, update):
    drawn = torch.Generator().manual_seed(1)
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, dtype=torch.float64, generator=drawn)
            parameter.grad = gradient.to(parameter.device) if step >= index else None
        update()


def _fused(optimizer):
    def update():
        with fused_where_open(optimizer):
            assert optimizer.param_groups[0]["fused"] or isinstance(optimizer, torch.optim.SGD)
            optimizer.step()

    return update


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_on_a_device_are_fused_and_their_state_is_that_of_the_loop(name):
    expected = _parameters("cpu")
    loop = OPTIMIZERS[name](expected, foreach=False)
    _train(loop, expected, 5, loop.step)
    with emulated():
        parameters = _parameters("cuda")
        optimizer = OPTIMIZERS[name](parameters)
        _train(optimizer, parameters, 3, _fused(optimizer))
        # A plain optimizer goes on from the state, and this one from what that saves.
        plain = OPTIMIZERS[name](parameters)
        plain.load_state_dict(optimizer.state_dict())
        assert all(group["fused"] is None for group in plain.param_groups)
        steps = [(s["step"].device.type, float(s["step"])) for s in plain.state.values() if "step" in s]
        assert steps in ([("cpu", 3.0), ("cpu", 2.0), ("cpu", 1.0)], [])
        optimizer.load_state_dict(plain.state_dict())
        drawn = torch.Generator().manual_seed(1)
        rest = [[torch.randn(p.shape, dtype=torch.float64, generator=drawn) for p in parameters] for _ in range(5)]
        for gradients in rest[3:]:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(parameter.device)
            update = _fused(optimizer)
            update()
        for one, other in zip(parameters, expected, strict=True):
            torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_fused_adam_is_fused_on_a_device(bias_correction):
    def trained(device):
        parameters = _parameters(device)
        optimizer = smp.optimizers.FusedAdam(parameters, lr=1e-2, bias_correction=bias_correction)
        with Noting() as noting:
            _train(optimizer, parameters, 4, optimizer.step)
        names = [str(function.overloadpacket) for function in noting.seen]
        assert "aten._fused_adamw_" in names
        return [parameter.detach().cpu() for parameter in parameters]

    expected = trained("cpu")
    with emulated():
        torch.testing.assert_close(trained("cuda"), expected, rtol=1e-9, atol=1e-9)


def test_what_nobody_could_count_on_the_host_keeps_the_loop():
    with emulated():
        parameters = _parameters("cuda")
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)

        def kept(optimizer):
            with fused_where_open(optimizer):
                return optimizer.param_groups[0]["fused"]

        assert kept(torch.optim.AdamW(parameters)) is True
        assert kept(torch.optim.AdamW(parameters, capturable=True)) is None
        assert kept(torch.optim.AdamW(parameters, lr=torch.tensor(1e-3))) is None
        assert kept(torch.optim.AdamW(parameters, foreach=True)) is None
        hooked = torch.optim.AdamW(parameters)
        hooked.register_step_pre_hook(lambda *_: None)
        assert kept(hooked) is None
        assert kept(torch.optim.AdamW([*parameters, _late()])) is None


def _late():
    """A parameter in half precision."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def test_an_update_that_fails_counts_no_step():
    with emulated():
        parameters = _parameters("cuda")
        optimizer = torch.optim.AdamW(parameters)
        _train(optimizer, parameters, 3, _fused(optimizer))
        with pytest.raises(ZeroDivisionError), fused_where_open(optimizer):
            raise ZeroDivisionError
        assert [float(state["step"]) for state in optimizer.state.values()] == [3.0, 2.0, 1.0]
