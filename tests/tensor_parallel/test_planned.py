"""Modules that no distributed class stands for, split in place by a plan: their training is that of one process."""

from __future__ import annotations

import pytest
import torch
from support.closeness import close
from support.models import loss_of
from support.own_blocks import PLAN, VOCABULARY, Net
from support.rank_training import training_step, updates
from support.reference import train_alone

BATCH, SEQ, STEPS = 8, 6, 4


def _batches():
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(VOCABULARY, (BATCH, SEQ + 1), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def _loss(model, ids, targets):
    return loss_of(model(ids), targets)


def _optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def _net():
    torch.manual_seed(0)
    return Net()


def _train():
    import smdistributed.modelparallel.torch as smp

    net = _net()
    smp.set_tensor_parallelism(net, plan=PLAN)
    model = smp.DistributedModel(net)
    torch.manual_seed(smp.rank())
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    losses = list(updates(training_step(model, _loss), optimizer, _batches()))
    here = sum(parameter.numel() for parameter in model.parameters())
    return losses, model.state_dict(), here, type(model.module.layers[0]).__name__


def _config(prescaled, **more):
    return {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": prescaled, **more}


@pytest.mark.parametrize(
    ("prescaled", "world", "more"), [(True, 2, {}), (False, 2, {}), (False, 4, {"microbatches": 2})]
)
def test_a_script_s_plan_trains_as_one_process(ranks, prescaled, world, more):
    alone = train_alone(_net(), _optimizer, _batches(), _loss)
    for losses, state, here, kind in ranks(_train, world, config=_config(prescaled, **more)):
        assert losses == pytest.approx(alone.losses, abs=1e-5)
        assert kind == "Block"
        assert state.keys() == alone.model.state_dict().keys()
        for name, value in alone.model.state_dict().items():
            close(state[name], value, name)
        assert here < 0.6 * sum(p.numel() for p in alone.model.parameters())
