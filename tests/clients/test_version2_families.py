"""Families of Transformers in version 2 of the library: split and sharded, or with experts shared out, they equal one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.version2_families import FAMILIES, MIXTURES, make_adapted, make_family

#: What does not wait for `make test-clients-full`.
SAMPLE = {"qwen2", "t5", "olmoe"}

TOLERANCE = 1e-9
#: Families that compute norms or scores in float32, whatever their type.
IN_FLOAT32 = {"gemma", "gemma2", "olmo2", "cohere", "helium"}
#: Mixtures that Transformers 4 makes without experts that can be shared out, or does not compute in float64.
OTHERWISE_IN_4 = {"granitemoe", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "phimoe"}


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


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "mixture", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.full) for name in MIXTURES]
)
def test_a_mixture_with_shared_experts_trains_as_one_process(ranks: Any, mixture: str) -> None:
    import transformers
    from support.training.version2_experts import train

    if transformers.__version__ < "5" and mixture in OTHERWISE_IN_4:
        pytest.skip("Transformers 4 makes this mixture in another way, or not in float64")
    make = make_family(mixture)
    for found in ranks(lambda: train({"expert_parallel_degree": 2}, make, None, 64), 2, init=False, timeout=200):
        assert found["missing"] == []
        assert max(found["apart"].values()) < TOLERANCE, found["apart"]
        assert found["norms"] < TOLERANCE
        assert found["held"] < 0.9 * found["whole"]


@pytest.mark.parametrize("degrees", [{}, {"context_parallel_degree": 2}, {"tensor_parallel_degree": 2}], ids=str)
def test_adapters_of_peft_train_as_in_one_process(ranks: Any, degrees: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    from support.training.version2_training import train_on_slices

    world = 4 if "tensor_parallel_degree" in degrees else 2
    config = {"hybrid_shard_degree": 2, **degrees}
    for found in ranks(train_on_slices, world, config, make_adapted, "wrapper", "p2p", False, init=False, timeout=200):
        assert max(map(abs, found["losses"])) < TOLERANCE
        assert max(found["apart"].values()) < TOLERANCE
