"""Families of Transformers in version 2 of the library: tensor parallelism beside sharding trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.version2_families import FAMILIES, make_family

#: What does not wait for `make test-clients-full`.
SAMPLE = {"qwen2", "t5"}

TOLERANCE = 1e-9
#: Families that compute norms or scores in float32, whatever their type.
IN_FLOAT32 = {"gemma", "gemma2", "olmo2", "cohere", "helium"}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.full) for name in FAMILIES]
)
def test_a_split_and_sharded_model_trains_as_one_process(ranks: Any, family: str) -> None:
    import transformers
    from support.training.version2_training import train_split

    if family == "mpt" and transformers.__version__ < "5":
        pytest.skip("MPT of Transformers 4 makes no mask in float64")
    tolerance, eps = (1e-5, 1e-3) if family in IN_FLOAT32 else (TOLERANCE, 1e-8)
    config = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}
    make = make_family(family)
    for found in ranks(lambda: train_split(config, make, torch.float64, eps=eps), 4, init=False, timeout=200):
        differences = {**found["apart"], **found["saved"]}
        assert {name: value for name, value in differences.items() if value > tolerance} == {}
        assert found["held"] < 0.75 * found["whole"]
        assert all(norm > 0.01 for norm in found["norms"])
