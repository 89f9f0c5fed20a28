"""Convolution nets and PyTorch's own transformers train and evaluate as in one process, on stages and in shards."""

from __future__ import annotations

import pytest
from support.models.vision_and_speech import STRATEGIES, TORCH_NETS, check, trained_in_job

#: Always run.
SAMPLE = {("ResNet", "pp 2"), ("TransformerEncoder", "sdp 2"), ("MultiheadAttention", "pp 2")}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=[] if (name, strategy) in SAMPLE else pytest.mark.full)
        for name in TORCH_NETS
        for strategy in STRATEGIES
    ],
)
def test_they_train_as_in_one_process(ranks, name, strategy):
    size, config = STRATEGIES[strategy]
    replicas = config.get("sharded_data_parallel_degree", 1)
    results = ranks(trained_in_job, size, TORCH_NETS[name], config={"ddp": True, **config}, timeout=100)
    # Running statistics of a data parallel rank are those of its own batches.
    check(
        results, TORCH_NETS[name], microbatches=config.get("microbatches", 1), replicas=replicas, buffers=replicas == 1
    )
