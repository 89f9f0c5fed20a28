"""Embeddings and heads of models whose blocks are split in place: rows of the vocabulary on each rank, also where they are tied."""

from __future__ import annotations

import pytest
import torch
from support.models.own_blocks import VOCABULARY, WIDTH, Net, batches, loss
from support.training.closeness import close
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone
from torch import nn

STEPS = 3


class Scaled(nn.Embedding):
    """As in some families of Transformers: what it returns is scaled by a buffer that is not saved."""

    def __init__(self, tokens, width):
        super().__init__(tokens, width, padding_idx=0)
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)

    def forward(self, ids):
        return super().forward(ids) * self.scale


class Peeking(Net):
    """It uses the weight of its head by itself."""

    def forward(self, ids):
        return super().forward(ids) + self.head.weight.sum()


def _optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


def _net(kind):
    torch.manual_seed(0)
    if kind == "peeking":
        return Peeking()
    net = Net(is_tied=kind != "two")
    if kind == "scaled":
        net.embedding = Scaled(VOCABULARY, WIDTH)
        net.head = nn.Linear(WIDTH, VOCABULARY)  # with a bias that another module has too
        net.head.weight = net.embedding.weight
        net.shift = nn.Module()
        net.shift.bias = net.head.bias
    return net


def _train(kind, **scope):
    import smdistributed.modelparallel.torch as smp

    net = _net(kind)
    smp.set_tensor_parallelism(net, **scope)
    model = smp.DistributedModel(net)
    torch.manual_seed(smp.rank())
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    losses = list(updates(training_step(model, loss), optimizer, batches(0, STEPS)))
    module = model.module
    tied = module.head.weight is module.embedding.weight
    rows = [part.weight.shape[0] for part in (module.embedding, module.head)] if smp.pp_size() == 1 else []
    return losses, model.state_dict(), rows, tied


@pytest.mark.parametrize(
    ("kind", "world", "more"),
    [
        ("scaled", 2, {}),
        pytest.param("tied", 2, {"prescaled_batch": True}, marks=pytest.mark.full),
        pytest.param("scaled", 2, {"prescaled_batch": True}, marks=pytest.mark.full),
        pytest.param("two", 2, {}, marks=pytest.mark.full),
        pytest.param("two", 4, {"tensor_parallel_degree": 4, "prescaled_batch": True}, marks=pytest.mark.full),
        ("tied", 4, {"pipeline_parallel_degree": 2, "microbatches": 2, "prescaled_batch": True}),
        pytest.param(
            "tied",
            4,
            {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e6, "prescaled_batch": True},
            marks=pytest.mark.full,
        ),
        pytest.param("tied", 4, {"shard_optimizer_state": True}, marks=pytest.mark.full),
    ],
)
def test_a_split_vocabulary_trains_as_one_process(ranks, kind, world, more):
    alone = train_alone(_net(kind), _optimizer, batches(0, STEPS), loss)
    config = {"tensor_parallel_degree": 2, "ddp": True, **more}
    for rank, (losses, state, rows, tied) in enumerate(ranks(_train, world, kind, config=config)):
        assert losses == pytest.approx(alone.losses, abs=1e-5)
        assert tied == (kind != "two")
        share = -(-VOCABULARY // config["tensor_parallel_degree"])
        here = rank % config["tensor_parallel_degree"]
        assert set(rows) <= {min(share, VOCABULARY - here * share)}
        assert state.keys() == alone.model.state_dict().keys()
        for name, value in alone.model.state_dict().items():
            close(state[name], value, name)


def test_a_weight_that_others_read_stays_as_it_was(ranks):
    alone = train_alone(_net("peeking"), _optimizer, batches(0, STEPS), loss)
    for losses, _, rows, _ in ranks(_train, 2, "peeking", config={"tensor_parallel_degree": 2, "ddp": True}):
        assert rows[1] == VOCABULARY
        assert losses == pytest.approx(alone.losses, abs=1e-5)
