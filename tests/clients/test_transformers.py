"""Models of Transformers in a loop of a script's own: the losses are those of one process."""

from __future__ import annotations

import pytest
import torch
from support.models.huggingface import FAMILIES, tiny_inputs, tiny_model

import smdistributed.modelparallel.torch as smp

STEPS, BATCH, VOCABULARY = 3, 4, 43
#: Everything is in shards, and gradients are as long as in one process.
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20, "sdp_gradient_clipping": 1e9}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
STRATEGIES = {
    "pp 2": (2, PIPELINE),
    "tp 2": (2, {"tensor_parallel_degree": 2}),
    "sdp 2": (2, SHARDED),
    "dp 2": (2, {}),
    "pp 2 × tp 2": (4, {**PIPELINE, "tensor_parallel_degree": 2}),
    "pp 2 × sdp 2": (4, {**PIPELINE, **SHARDED}),
}
#: Always run; both in `make test`, and with both versions of Transformers.
SAMPLE = {("vit", "pp 2"), ("qwen3", "tp 2"), ("llama", "sdp 2"), ("gpt2", "pp 2 × tp 2")}


def _batches(family, rank, size):
    generator = torch.Generator().manual_seed(3)
    batches = [tiny_inputs(family, VOCABULARY, BATCH, generator) for _ in range(STEPS)]
    return [{name: value.chunk(size)[rank] for name, value in batch.items()} for batch in batches]


def _model(family):
    torch.manual_seed(7)
    return tiny_model(family, VOCABULARY)


def _config(family, strategy):
    size, config = STRATEGIES[strategy]
    # Rows that go to an expert are others on each rank, unless all have the same batch.
    same = {"prescaled_batch": True} if family == "mixtral" and "tp" in strategy else {}
    return size, {"ddp": True, **config, **same}


def _train(family):
    """Losses of a rank's script."""
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
        original = _model(family)
    model = smp.DistributedModel(original)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step
    def step(model, batch):
        loss = model(**batch).loss
        model.backward(loss)
        return loss

    losses = []
    for batch in _batches(family, *_replica()):
        optimizer.zero_grad()
        losses.append(float(step(model, batch).reduce_mean()))
        optimizer.step()
    return losses


def _replica():
    if smp.state.cfg.prescaled_batch:
        return smp.rdp_rank(), smp.rdp_size()
    return smp.dp_rank(), smp.dp_size()


def _alone(family):
    model = _model(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in _batches(family, 0, 1):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _marks(family, strategy):
    name = FAMILIES[family][0].removesuffix("Config")
    mark = pytest.mark.client("Transformers", f"{name}, own loop", strategy)
    return [mark] if (family, strategy) in SAMPLE else [mark, pytest.mark.full]


@pytest.mark.parametrize(
    ("family", "strategy"),
    [pytest.param(family, strategy, marks=_marks(family, strategy)) for family in FAMILIES for strategy in STRATEGIES],
)
def test_losses_are_those_of_one_process(ranks, family, strategy):
    size, config = _config(family, strategy)
    results = ranks(_train, size, family, config=config, timeout=100)
    losses = [sum(losses) / size for losses in zip(*results, strict=True)]
    assert losses == pytest.approx(_alone(family), abs=1e-5)
