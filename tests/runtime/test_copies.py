"""Copies of wrapped models and optimizers: right where a rank has the whole model, else refused with what to do instead."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS = 3


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved,
    "deepcopy of the module": lambda model: copy.deepcopy(model.module),
    "torch.save of the module": lambda model: _saved(model.module),
}


def _trained(average):
    """Train, and keep an average by ``AveragedModel``."""
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(_net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if average else None
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((1, 4), float(step + 1))).square().sum().backward()
        optimizer.step()
        if averaged is not None:
            averaged.update_parameters(model)
    return model, optimizer, averaged


def _copied_right():
    model, _, averaged = _trained(average=True)
    x = torch.ones(1, 4)
    model.eval()
    wanted = model(x).detach()
    for name, make in COPIES.items():
        made = make(model)
        torch.testing.assert_close(made(x).detach(), wanted, msg=name)
        assert list(made.state_dict()) == list(model.state_dict()), name
        made(x).sum().backward()  # reduces nothing, and leaves the model's gradients alone
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()
        torch.testing.assert_close(model(x).detach(), wanted, msg=name)
    return {name: value.detach() for name, value in averaged.module.state_dict().items()}


def _average_alone():
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((1, 4), float(step + 1))).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
    return averaged.module.state_dict()


@pytest.mark.parametrize("config", [{}, {"shard_optimizer_state": True}])
def test_a_rank_with_the_whole_model_copies_it(ranks, config):
    wanted = _average_alone()
    for found in ranks(_copied_right, 2, config={"ddp": True, **config}):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value)


def _refused(names):
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import SMPUserError

    net = _net()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(net[0])
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    tries = {**{name: lambda make=COPIES[name]: make(model) for name in names}, "average": lambda: AveragedModel(model)}
    if smp.pp_size() == 1 and smp.tp_size() == 1:
        tries |= {"optimizer": lambda: copy.deepcopy(optimizer), "saved optimizer": lambda: _saved(optimizer)}
    said = {}
    for name, attempt in tries.items():
        with pytest.raises(SMPUserError) as caught:
            attempt()
        said[name] = str(caught.value)
    copy.copy(model)  # shares all
    return said


@pytest.mark.parametrize(
    ("config", "why", "inside"),
    [
        (
            {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
            "sharded_data_parallel_degree is 2",
            True,
        ),
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree is 2", False),
        ({"pipeline_parallel_degree": 2, "microbatches": 2}, "pipeline_parallel_degree is 2", False),
        ({"bf16": True}, "bfloat16", False),
    ],
)
def test_a_rank_with_parts_of_the_model_says_what_to_do_instead(ranks, config, why, inside):
    names = [name for name in COPIES if inside or "module" not in name]
    for said in ranks(_refused, 2, names, config={"ddp": True, **config}):
        for name, text in said.items():
            assert "state_dict()" in text, name
            if "module" not in name and "optimizer" not in name:
                assert why in text, name
