"""Distributed modules that are created without memory get the values that they would have got at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

SIZES = {
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_size": 4,
    "hidden_size": 16,
    "intermediate_size": 32,
}


class Mixed(nn.Module):
    """Distributed modules of all kinds, and ordinary ones whose random numbers come before, between and behind."""

    def __init__(self, dropout=0.0, **options):
        super().__init__()
        import smdistributed.modelparallel.torch as smp

        self.before = nn.Linear(16, 16)
        self.model = smp.nn.DistributedTransformerLMHead(
            **SIZES, vocab_size=37, num_positions=8, causal_mask_size=8, add_lm_head=False, use_normal_initialization=True,
            attention_dropout_prob=dropout, hidden_dropout_prob=dropout, **options,
        )  # fmt: skip
        self.between = nn.Linear(16, 16)
        self.linear = smp.nn.DistributedLinear(16, 16)
        self.embedding = smp.nn.DistributedEmbedding(37, 16, padding_idx=0)
        self.given = smp.nn.DistributedEmbedding(3, 16, _weight=torch.arange(48.0).view(3, 16) / 48)
        self.behind = nn.Linear(16, 37)

    def forward(self, ids):
        hidden = self.before(self.model((ids, None, None, None, None)))
        hidden = self.linear(self.between(hidden)) + self.embedding(ids) + self.given(ids % 3)
        return self.behind(hidden)


def _train(delayed, dropout=0.0, steps=2, **options):
    """Losses of a few steps, the weights before them and after, and a number that the script draws itself."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(5 + smp.rank())
    if delayed == "model_creation":
        with smp.model_creation(tensor_parallelism=True):
            module = Mixed(dropout, **options)
    else:
        with smp.delay_param_initialization(enabled=delayed):
            module = Mixed(dropout, **options)
    assert all(p.is_meta for p in module.parameters()) == bool(delayed)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(ids):
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        model.backward(loss)
        return loss

    start, losses = None, []
    for index in range(steps):
        ids = torch.randint(37, (4, 6), generator=torch.Generator().manual_seed(index))
        optimizer.zero_grad()
        losses.append(float(step(ids).reduce_mean()))
        start = {name: v.clone() for name, v in model.state_dict().items()} if start is None else start
        optimizer.step()
    return losses, start, model.state_dict()


CASES = {
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "tp2 prescaled, speed": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": "speed"}),
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "pp2 tp2": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 2}),
    "tp2 in shards": (4, {"tensor_parallel_degree": 2, "prescaled_batch": True, "sharded_data_parallel_degree": 2,
                          "sdp_param_persistence_threshold": 20}),
    "tp2 bf16": (2, {"tensor_parallel_degree": 2, "bf16": True}),
}  # fmt: skip


#: Always run; the others whole.
SAMPLE = {"pp2 tp2", "tp2 in shards"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in SAMPLE else pytest.mark.full) for case in CASES]
)
def test_delayed_creation_gives_the_same_weights_and_training(ranks, case):
    size, config = CASES[case]
    config = {"ddp": True, "delayed_parameter_initialization": True, **config}
    # Of several replicas each has dropout of its own.
    options = (0.1,) if size == 2 else ()
    immediate = ranks(_train, size, False, *options, config=config, timeout=200)
    delayed = ranks(_train, size, True, *options, config=config, timeout=200)
    for one, other in zip(immediate, delayed, strict=True):
        assert one[1].keys() == other[1].keys()
        for name in one[1]:
            assert torch.equal(one[1][name], other[1][name]), name
        assert one[0] == pytest.approx(other[0], abs=1e-6)


@pytest.mark.parametrize("case", ["tp2", "pp2 tp2"])
def test_replaced_and_distributed_modules_in_one_delayed_model(ranks, case):
    size, config = CASES[case]
    config = {"ddp": True, "delayed_parameter_initialization": True, **config}
    for losses, start, after in ranks(_train, size, "model_creation", config=config, timeout=200):
        assert all(loss < 20 for loss in losses)
        assert all(bool(torch.isfinite(value).all()) for value in after.values())
        assert not torch.equal(start["before.weight"], after["before.weight"])
