"""Mixtures of experts in blocks that are split in place: each expert split, or whole experts on each rank."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace

import pytest
import torch
from support.models import own_blocks
from support.models.own_blocks import MixedNet, batches, mixed_loss
from support.training.closeness import close
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone

import smdistributed.modelparallel.torch as smp
from smp_runtime.module_conversion.in_place.planning import plan_splits

STEPS, SEQ = 3, 64


def _optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


def _net(kind, only=None):
    torch.manual_seed(0)
    return MixedNet(mixture=functools.partial(getattr(own_blocks, kind), only=only))


@pytest.mark.parametrize("kind", ["Mixture", "TabledMixture"])
@pytest.mark.parametrize("spreads", [False, True])
def test_each_expert_is_split_or_each_has_a_rank(solo, caplog, kind, spreads):
    solo({})
    caplog.set_level(logging.INFO, logger="smp")
    net = _net(kind)
    smp.set_tensor_parallelism(net)
    group = SimpleNamespace(size=2, rank=0, ranks=SimpleNamespace(rank=0), agree=lambda value: value, prescaled=True)
    group.slices_activations, group.spreads_experts = False, spreads
    split = plan_splits(net, group, lambda _: False)[id(net.layers[0])]
    assert split.regions == ("mlp",)
    said = "has whole experts on each rank" if spreads else "has a part of each expert"
    assert f"mlp {said}" in caplog.text
    assert "mlp.gate.weight" in split.summed
    if kind == "Mixture":
        assert split.leaves["mlp.shared.down"].local
        assert split.leaves["mlp.experts.3.up"].owner == (1 if spreads else None)
    else:
        cuts = (
            dict.fromkeys(("gate_up", "down", "down_bias"), (0, ()))
            if spreads
            else {"gate_up": (1, (24, 24)), "down": (2, ())}
        )
        assert {name: (dim, pieces) for name, dim, pieces in split.tables["mlp.experts"].cuts} == cuts


def _train(kind, only):
    net = _net(kind, only)
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    torch.manual_seed(smp.rank())
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    losses = list(updates(training_step(model, mixed_loss), optimizer, batches(0, STEPS)))
    here = sum(parameter.numel() for parameter in model.module.layers.parameters())
    return losses, model.state_dict(), here, type(model.module.layers[0].mlp.experts).__name__


@pytest.mark.both_transports
@pytest.mark.parametrize(
    ("kind", "spread", "only", "world", "more"),
    [
        ("TabledMixture", 2, None, 2, {}),
        ("Mixture", 2, 0, 2, {}),  # all tokens go to the experts of one rank
        pytest.param("Mixture", 1, None, 2, {}, marks=pytest.mark.full),
        pytest.param("Mixture", 2, None, 2, {}, marks=pytest.mark.full),
        pytest.param("TabledMixture", 1, None, 2, {}, marks=pytest.mark.full),
        pytest.param("TabledMixture", 2, 2, 2, {}, marks=pytest.mark.full),
        pytest.param("Mixture", 2, None, 4, {"pipeline_parallel_degree": 2, "microbatches": 2}, marks=pytest.mark.full),
        pytest.param("Mixture", 2, None, 4, {"shard_optimizer_state": True}, marks=pytest.mark.full),
        pytest.param(
            "TabledMixture",
            2,
            None,
            4,
            {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e6},
            marks=pytest.mark.full,
        ),
        pytest.param("TabledMixture", 4, None, 4, {"tensor_parallel_degree": 4}, marks=pytest.mark.full),
    ],
)
def test_a_mixture_trains_as_in_one_process(ranks, kind, spread, only, world, more):
    alone = train_alone(_net(kind, only), _optimizer, batches(0, STEPS), mixed_loss)
    config = {
        "tensor_parallel_degree": 2,
        "ddp": True,
        "prescaled_batch": True,
        "expert_parallel_degree": spread,
        **more,
    }
    for losses, state, here, name in ranks(_train, world, kind, only, config=config):
        assert losses == pytest.approx(alone.losses, abs=1e-5)
        assert name == ("Tables" if kind == "TabledMixture" else "ModuleList")
        assert state.keys() == alone.model.state_dict().keys()
        for key, value in alone.model.state_dict().items():
            close(state[key], value, key)
        assert here < 0.6 * sum(p.numel() for p in alone.model.layers.parameters())


def _save(path, kind, resumes):
    net = _net(kind)
    smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    if resumes:
        smp.resume_from_checkpoint(path)
    span = (2, 4) if resumes else (0, 2)
    losses = list(updates(training_step(model, mixed_loss), optimizer, batches(*span)))
    if not resumes:
        smp.save_checkpoint(path, "t", partial=True, model=model, optimizer=optimizer)
    return losses


@pytest.mark.parametrize(
    ("kind", "there", "here"),
    [
        pytest.param("Mixture", {"expert_parallel_degree": 2}, {}, marks=pytest.mark.full),
        ("TabledMixture", {}, {"expert_parallel_degree": 2}),
        pytest.param("Mixture", {}, {"expert_parallel_degree": 2}, marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_of_experts_goes_on_otherwise(ranks, tmp_path, kind, there, here):
    alone = train_alone(_net(kind), _optimizer, batches(0, 4), mixed_loss)
    config = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
    first = ranks(_save, 2, str(tmp_path), kind, False, config={**config, **there})[0]
    second = ranks(_save, 2, str(tmp_path), kind, True, config={**config, **here})[0]
    assert first + second == pytest.approx(alone.losses, abs=1e-5)


def _traffic(kind, only):
    """Bytes that a rank sends in a block with a mixture, forward and backward, after one pass for warming up."""
    from counting import CountingCollectives

    net = _net(kind, only)
    smp.set_tensor_parallelism(net.layers)
    model = smp.DistributedModel(net.layers[0])
    session, sent = smp.init(), []
    for _ in range(2):
        counting = CountingCollectives()
        object.__setattr__(session.ranks, "collectives", counting)  # the record is frozen
        output, logits = model.module(torch.randn(4, SEQ, own_blocks.WIDTH, requires_grad=True))
        (output.sum() + logits.square().mean()).backward()
        sent.append(counting.sent)
    return sent[-1]


@pytest.mark.parametrize(
    ("kind", "spread", "only"),
    [
        ("Mixture", 2, None),
        pytest.param("TabledMixture", 2, 0, marks=pytest.mark.full),
        pytest.param("TabledMixture", 1, None, marks=pytest.mark.full),
        pytest.param("Mixture", 1, 2, marks=pytest.mark.full),
    ],
)
def test_a_mixture_sends_as_little_as_a_feed_forward_net(ranks, kind, spread, only):
    config = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "expert_parallel_degree": spread}
    bound = 4 * 2 * (4 * SEQ * own_blocks.WIDTH * 4 / 2)  # four all-reduces of the activations
    for sent in ranks(_traffic, 2, kind, only, config=config):
        assert bound <= sent <= 1.02 * bound
