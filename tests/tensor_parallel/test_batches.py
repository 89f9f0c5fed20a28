"""What the ranks of a tensor parallel group must agree on before they put their batches together, and what is said."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from support.logs import logged
from support.matrix import sampled
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError

SIZES = {"num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16, "intermediate_size": 24}
QUIET = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
COMMON = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
OWN = {"tensor_parallel_degree": 2, "ddp": True}


class Net(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        self.layers = nn.Sequential(*modules)

    def forward(self, x, extra=None):
        return self.layers(x)


# -- one batch for all ---------------------------------------------------------------------------------------------------


def _sharded_by(rank_name, kind, steps=1):
    """The error of a script that takes its part of the data by one of its ranks."""
    torch.manual_seed(0)
    whole = torch.randint(11, (8, 6)) if kind == "ids" else torch.randn(8, 6, 16)
    first = [nn.Embedding(11, 16)] if kind == "ids" else []
    model = smp.DistributedModel(Net(*first, nn.Linear(16, 16), smp.nn.DistributedLinear(16, 16)))

    @smp.step
    def step(x):
        loss = model(x).square().mean() if kind != "keyword" else model(whole[:4], extra={"weights": x}).square().mean()
        model.backward(loss)
        return loss

    rank, size = getattr(smp, f"{rank_name}_rank")(), getattr(smp, f"{rank_name}_size")()
    share = 8 // size
    try:
        for _ in range(steps):
            # Rounding, as of inputs that a GPU has computed, is no other batch.
            step(whole[rank * share :][:share] + (1e-6 * smp.rank() if kind != "ids" else 0))
    except Exception as error:  # another stage's error comes with what it said
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "pipeline"),
    sampled(itertools.product(("ids", "floats", "keyword"), (1, 2)), {("ids", 1), ("floats", 2), ("keyword", 1)}),
)
def test_a_common_batch_that_is_sharded_by_the_wrong_rank_is_an_error(ranks, kind, pipeline):
    config = {**COMMON, "pipeline_parallel_degree": pipeline, "microbatches": pipeline}
    assert ranks(_sharded_by, 4, "rdp", kind, 5, config=config, timeout=100) == [None] * 4
    if kind == "keyword" and pipeline == 2:
        return
    for message in ranks(_sharded_by, 4, "dp", kind, config=config, timeout=100):
        assert "prescaled_batch is true" in message
        assert "smp.rdp_rank()" in message
        assert "argument extra.weights" in message if kind == "keyword" else "argument 0: other values" in message
        assert "rank 1" in message or "rank 3" in message


# -- a batch per rank ----------------------------------------------------------------------------------------------------


def _alone(kind, second):
    made = smp.nn.DistributedLinear(16, 16) if kind == "linear" else smp.nn.DistributedEmbedding(11, 16)
    shape = second if smp.tp_rank() else (2, 6)
    with pytest.raises(SMPUserError) as caught:
        made(torch.zeros(*shape, 16) if kind == "linear" else torch.zeros(shape, dtype=torch.long))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
@pytest.mark.parametrize("second", [(2, 5), (3, 6)])
def test_single_layers_say_that_batches_have_different_shapes(ranks, kind, second):
    for message in ranks(_alone, 2, kind, second, config=OWN):
        assert "[2, 6" in message
        assert f"[{second[0]}, {second[1]}" in message


def _some_only(what):
    ids, here = torch.zeros(2, 6, dtype=torch.long), smp.tp_rank() == 1
    if what == "positions":
        module = smp.nn.DistributedTransformerLayer(**SIZES, **QUIET, rotary_frequencies=(1.0, 0.1))
        inputs = (torch.randn(2, 6, 16), None, *([torch.arange(6).expand(2, 6)] if here else []))
    else:
        module = smp.nn.DistributedTransformerLMHead(
            num_layers=1, **SIZES, **QUIET, vocab_size=12, num_positions=8, distribute_embedding=True
        )
        inputs = (ids, None, None, None, ids if here else None)
    with pytest.raises(SMPUserError) as caught:
        module(inputs)
    return str(caught.value)


@pytest.mark.parametrize("what", ["positions", "labels"])
def test_what_only_some_ranks_give_is_an_error(ranks, what):
    for message in ranks(_some_only, 2, what, config=OWN):
        assert f"{what} of different shapes, none on its rank 0, [2, 6] on its rank 1" in message


# -- nothing to do -------------------------------------------------------------------------------------------------------


def _warnings(distributes):
    with logged(logging.NOTSET) as found, smp.tensor_parallelism(distributes):
        smp.DistributedModel(nn.Sequential(nn.Linear(16, 16)))
    return [message for message in found if "no module of the Sequential is distributed" in message]


@pytest.mark.parametrize("distributes", [False, True])
def test_a_degree_that_nothing_uses_is_said_once(ranks, distributes):
    first, second = ranks(_warnings, 2, distributes, config=OWN)
    assert len(first) == (0 if distributes else 1)
    assert second == []
