"""Wrapped models with common parameters, and casts after wrapping: refused by name where they cannot be right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError

SHARDING = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
CASTS = {
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to(torch.float64),
    "type": lambda model: model.type(torch.float16),
}


def _cast():
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import SMPUserError

    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    for name, cast in CASTS.items():
        with pytest.raises(SMPUserError, match=r"cannot become torch.\w+ after it was wrapped"):
            cast(model)
        assert model.module[0].weight.dtype is torch.float32, name
    assert model.to("cpu") is model
    model.float()
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("config", [{}, {"shard_optimizer_state": True}, SHARDING])
def test_a_cast_after_wrapping_is_refused(ranks, config):
    ranks(_cast, 2, config={"ddp": True, **config})


def test_one_process_in_full_precision_may_cast(solo):
    solo({})
    assert smp.DistributedModel(nn.Linear(2, 1)).double().module.weight.dtype is torch.float64


def _two(settings):
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import SMPUserError

    trunk = nn.Linear(4, 4)
    actor = smp.DistributedModel(nn.Sequential(trunk, nn.Linear(4, 2)))
    with pytest.raises(SMPUserError, match=rf"0.weight, 0.bias of the Sequential belong to another.*{settings}"):
        smp.DistributedModel(nn.Sequential(trunk, nn.Linear(4, 1)))
    smp.DistributedModel(nn.Sequential(nn.Linear(4, 1)))  # one of its own
    actor(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("config", [{"shard_optimizer_state": True}, SHARDING])
def test_two_models_with_a_common_trunk_are_refused(ranks, config):
    ranks(_two, 2, next(iter(config)), config={"ddp": True, **config})


def test_in_half_precision_too(solo):
    solo({"bf16": True})
    trunk = nn.Linear(4, 4)
    actor = smp.DistributedModel(nn.Sequential(trunk))
    with pytest.raises(
        SMPUserError, match="0.weight, 0.bias of the Sequential belong to another wrapped model, too.*bf16"
    ):
        smp.DistributedModel(nn.Sequential(trunk))
    assert actor.module[0] is trunk


def _common_trunk_alone():
    torch.manual_seed(0)
    trunk = nn.Linear(4, 4).double()
    return nn.Sequential(trunk, nn.Linear(4, 2).double()), nn.Sequential(trunk, nn.Linear(4, 1).double())


def _loss(actor, critic, x):
    return actor(x).square().mean() + critic(x).square().mean()


def test_replicas_train_a_common_trunk_as_one_process_does(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        actor, critic = map(smp.DistributedModel, _common_trunk_alone())
        parameters = list({*actor.parameters(), *critic.parameters()})
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))

        @smp.step
        def step(x):
            actor.backward(_loss(actor, critic, x))

        for number in range(3):
            optimizer.zero_grad()
            step(torch.full((1, 4), float(number + smp.rank()), dtype=torch.float64))
            optimizer.step()
        return {**actor.state_dict(), "critic": critic.module[1].weight.detach()}

    actor, critic = _common_trunk_alone()
    optimizer = torch.optim.SGD({*actor.parameters(), *critic.parameters()}, lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (_loss(actor, critic, torch.full((1, 4), float(number + rank), dtype=torch.float64)) / 2).backward()
        optimizer.step()
    for found in ranks(run, 2, config={"ddp": True}):
        for name, value in {**actor.state_dict(), "critic": critic[1].weight.detach()}.items():
            torch.testing.assert_close(found[name], value)
