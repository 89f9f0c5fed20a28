"""Modules that no distributed class stands for, split in place by a plan: their training is that of one process."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from support.models import own_blocks
from support.models.own_blocks import PLAN, Net, batches, loss
from support.training.closeness import close
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone
from torch import nn

SEQ, STEPS = 6, 4


def _optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def _net(kind="Attention"):
    torch.manual_seed(0)
    return Net(attention=getattr(own_blocks, kind))


def _train(kind="Attention", plan=None):
    import smdistributed.modelparallel.torch as smp

    net = _net(kind)
    smp.set_tensor_parallelism(net, plan=plan)
    model = smp.DistributedModel(net)
    torch.manual_seed(smp.rank())
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    losses = list(updates(training_step(model, loss), optimizer, batches(0, STEPS)))
    here = sum(parameter.numel() for parameter in model.parameters())
    return losses, model.state_dict(), here, type(model.module.layers[0]).__name__


def _config(prescaled, **more):
    return {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": prescaled, **more}


@pytest.mark.parametrize(
    ("prescaled", "world", "more"),
    [
        pytest.param(True, 2, {}, marks=pytest.mark.full),
        pytest.param(False, 2, {}, marks=pytest.mark.full),
        (False, 4, {"microbatches": 2}),
    ],
)
def test_a_script_s_plan_trains_as_one_process(ranks, prescaled, world, more):
    alone = train_alone(_net(), _optimizer, batches(0, STEPS), loss)
    _check(ranks(_train, world, "Attention", PLAN, config=_config(prescaled, **more)), alone, share=0.6)


def _check(results, alone, share):
    """Every rank's training is that of one process, and it holds at most a share of the parameters."""
    for losses, state, here, kind in results:
        assert losses == pytest.approx(alone.losses, abs=1e-5)
        assert kind == "Block"
        assert state.keys() == alone.model.state_dict().keys()
        for name, value in alone.model.state_dict().items():
            close(state[name], value, name)
        assert here < share * sum(p.numel() for p in alone.model.parameters())


@pytest.mark.parametrize(
    ("kind", "prescaled", "share"),
    [
        pytest.param("Attention", False, 0.6, marks=pytest.mark.full),
        ("Numbered", True, 0.6),  # numbers of heads are those of a rank
        pytest.param("Numbered", False, 0.6, marks=pytest.mark.full),
        pytest.param("Packed", True, 0.6, marks=pytest.mark.full),
        ("OneKey", False, 0.7),  # every rank has its keys
        pytest.param("Turned", True, 0.6, marks=pytest.mark.full),  # its attention's maps are split one by one
    ],
)
def test_what_nobody_planned_is_inferred(ranks, kind, prescaled, share):
    alone = train_alone(_net(kind), _optimizer, batches(0, STEPS), loss)
    _check(ranks(_train, 2, kind, config=_config(prescaled)), alone, share)


class _Inside(Net):
    """A model that a class is registered for, to be called in its own way."""


class _Around(nn.Module):
    """A model around it, with a plan for the blocks in it."""

    _tp_plan: ClassVar[dict[str, str]] = {f"inside.{name}": style for name, style in PLAN.items()}

    def __init__(self):
        super().__init__()
        self.inside = _Inside()

    def forward(self, ids):
        return self.inside(ids)


def _around():
    torch.manual_seed(0)
    return _Around()


def _train_around():
    import smdistributed.modelparallel.torch as smp

    smp.tp_register_with_module(_Inside, smp.nn.DistributedLinear, lambda: ((4, 4), {}))
    net = _around()
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    losses = list(updates(training_step(model, loss), optimizer, batches(0, STEPS)))
    here = sum(parameter.numel() for parameter in model.parameters())
    return losses, model.state_dict(), here, type(model.module.inside.layers[0]).__name__


def test_a_plan_goes_before_a_class_for_a_model_inside(ranks):
    alone = train_alone(_around(), _optimizer, batches(0, STEPS), loss)
    _check(ranks(_train_around, 2, config=_config(True)), alone, share=0.6)


def _wrong(plan):
    import smdistributed.modelparallel.torch as smp

    net = _net()
    smp.set_tensor_parallelism(net, plan=plan)
    with pytest.raises(ValueError, match=r"\w") as caught:
        smp.DistributedModel(net)
    return str(caught.value)


def test_a_plan_that_computes_something_else_is_an_error_on_every_rank(ranks):
    plan = {"layers.*.mlp.gate": "colwise", "layers.*.mlp.down": "rowwise"}
    for said in ranks(_wrong, 2, plan, config=_config(True)):
        assert "the plan of a Block (layers.0) over 2 ranks makes it compute something else" in said


def _traffic(prescaled):
    """Bytes that a rank sends in blocks, forward and backward, after one pass for warming up."""
    from counting import CountingCollectives

    import smdistributed.modelparallel.torch as smp

    blocks = torch.nn.Sequential(*(own_blocks.Alone() for _ in range(3)))
    smp.set_tensor_parallelism(blocks)
    model = smp.DistributedModel(blocks)
    session, sent = smp.init(), []
    for _ in range(2):
        counting = CountingCollectives()
        session.ranks.collectives = counting
        output = model.module(torch.randn(4 if prescaled else 2, SEQ, own_blocks.WIDTH, requires_grad=True))
        forward = counting.sent
        output.sum().backward()
        sent.append((forward, counting.sent - forward))
    return sent[-1]


@pytest.mark.parametrize("prescaled", [True, False])
def test_blocks_send_what_megatron_s_layers_do(ranks, prescaled):
    unit = 4 * SEQ * own_blocks.WIDTH * 4 / 2  # half of the activations of the whole group, in float32
    ends = 0 if prescaled else unit
    for forward, backward in ranks(_traffic, 2, prescaled, config=_config(prescaled)):
        assert forward == 3 * 2 * 2 * unit + ends  # gathered once, in front of the first block
        assert unit * 3 * 2 * 2 + ends <= backward <= 1.02 * unit * 3 * 2 * 2 + ends + 64
