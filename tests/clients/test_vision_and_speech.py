"""Transformers' models for pictures, and for sound, train as in one process."""

from __future__ import annotations

import pytest
import torch
from support.models.vision_and_speech import (
    PIPELINE,
    STRATEGIES,
    TRANSFORMERS_NETS,
    check,
    trained_in_job,
    whisper,
)

TENSOR = {"tensor_parallel_degree": 2, "prescaled_batch": True}
ALL = {**STRATEGIES, "tp 2": (2, TENSOR), "pp 2 × tp 2": (4, {**PIPELINE, **TENSOR})}
#: Always run.
SAMPLE = {("CLIP", "pp 2"), ("Wav2Vec2 CTC", "tp 2")}


def _marks(name, strategy):
    mark = pytest.mark.client("Transformers", f"{name}, own loop", strategy)
    return [mark] if (name, strategy) in SAMPLE else [mark, pytest.mark.full]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [pytest.param(name, strategy, marks=_marks(name, strategy)) for name in TRANSFORMERS_NETS for strategy in ALL],
)
def test_they_train_as_in_one_process(ranks, name, strategy):
    size, config = ALL[strategy]
    net = TRANSFORMERS_NETS[name]
    results = ranks(trained_in_job, size, net, "tp" in strategy, config={"ddp": True, **config}, timeout=100)
    replicas = config.get("sharded_data_parallel_degree", 1)
    check(results, net, microbatches=config.get("microbatches", 1), replicas=replicas)


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=pytest.mark.client("Transformers", "Whisper, `generate()`", name)) for name in ALL],
)
def test_whisper_writes_what_it_writes_in_one_process(ranks, strategy):
    size, config = ALL[strategy]

    def sound(rank):
        return torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(rank))

    def original():
        torch.manual_seed(0)
        return whisper().eval()

    def script():
        import smdistributed.modelparallel.torch as smp

        with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
            model = original()
        model = smp.DistributedModel(model).eval()
        return smp.rdp_rank(), model.generate(sound(smp.rdp_rank()), max_new_tokens=5)

    for replica, tokens in ranks(script, size, config={"ddp": True, **config}, timeout=100):
        assert tokens.tolist() == original().generate(sound(replica), max_new_tokens=5).tolist()
