"""Batches that the number of microbatches does not divide."""

from __future__ import annotations

import pytest
import torch

from smp_integrations.trainer_steps import ShortBatch


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("count", [2, 4])
def test_every_sample_counts_once(samples, count):
    losses = torch.arange(1.0, samples + 1)
    batch = ShortBatch({"x": losses, "whole": "word"}, samples, by_samples=True)
    slices = [batch.smp_slice(count, index, 0) for index in range(count)]
    assert all(len(inputs["x"]) > 0 and inputs["whole"] == "word" for inputs, _ in slices)
    assert sum(inputs["x"].mean() * weight for inputs, weight in slices) / count == pytest.approx(float(losses.mean()))
    seen = [value for (inputs, _), size in zip(slices, batch.sizes(count), strict=True) for value in inputs["x"][:size]]
    assert seen == losses.tolist()


def test_means_over_tokens_of_all_batches_are_added():
    values = torch.arange(1.0, 4.0)
    batch = ShortBatch({"x": values}, 3, by_samples=False)
    total = sum(inputs["x"].sum() * weight for inputs, weight in (batch.smp_slice(4, index, 0) for index in range(4)))
    assert float(total) == float(values.sum())
