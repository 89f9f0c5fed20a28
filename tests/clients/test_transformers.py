"""Models of Transformers in a loop of a script's own: the losses are those of one process."""

from __future__ import annotations

import pytest
import torch
from support.huggingface import tiny_config

import smdistributed.modelparallel.torch as smp

STEPS = 3
STRATEGIES = {
    "pp 2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "tp 2": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    "sdp 2": (
        2,
        {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 100, "sdp_gradient_clipping": 1e6},
    ),
    "dp 2": (2, {}),
}


def _batches(rank, size):
    everything = torch.randint(43, (STEPS, 4, 8), generator=torch.Generator().manual_seed(3))
    return everything.chunk(size, dim=1)[rank]


def _model(family):
    import transformers as hf

    torch.manual_seed(7)
    return hf.AutoModelForCausalLM.from_config(tiny_config(family, 43))


def _train(family):
    """Losses of a rank's script."""
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
        original = _model(family)
    model = smp.DistributedModel(original)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step
    def step(model, ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        model.backward(loss)
        return loss

    losses = []
    for ids in _batches(smp.rdp_rank(), smp.rdp_size()):
        optimizer.zero_grad()
        losses.append(float(step(model, ids).reduce_mean()))
        optimizer.step()
    return losses


def _alone(family):
    model = _model(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids in _batches(0, 1):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        pytest.param(family, strategy, marks=pytest.mark.client("Transformers", f"{family} in a loop", strategy))
        for family in ("gpt2", "llama")
        for strategy in STRATEGIES
    ],
)
def test_losses_are_those_of_one_process(ranks, family, strategy):
    size, config = STRATEGIES[strategy]
    results = ranks(_train, size, family, config={"ddp": True, **config}, timeout=100)
    losses = [sum(losses) / size for losses in zip(*results, strict=True)]
    assert losses == pytest.approx(_alone(family), abs=1e-5)
