"""Experts that ranks share out, and routers that balance, train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.version2_mixtures import VOCABULARY, ListedMixture, Model, TabledMixture, balance
from support.training import version2_experts as training

from smp_version2.moe.balancing import route
from smp_version2.moe.config import BALANCINGS, MoEConfig


def make_listed() -> Any:
    return Model(ListedMixture)


def make_tabled() -> Any:
    return Model(TabledMixture)


def check(found: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert found["missing"] == []
    assert max(found["apart"].values()) < tolerance, found["apart"]
    assert found["norms"] < tolerance


@pytest.mark.parametrize("make", [make_listed, make_tabled])
@pytest.mark.parametrize(
    ("config", "world"),
    [
        ({"expert_parallel_degree": 2}, 2),
        ({"expert_parallel_degree": 2, "hybrid_shard_degree": 2}, 4),
        pytest.param({"expert_parallel_degree": 2, "hybrid_shard_degree": 1}, 4, marks=pytest.mark.full),
    ],
)
def test_shared_experts_train_as_in_one_process(ranks: Any, make: Any, config: dict[str, Any], world: int) -> None:
    for found in ranks(lambda: training.train(config, make, None, VOCABULARY), world, init=False, timeout=120):
        check(found)


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (make_listed, "sinkhorn"),
        (make_tabled, "aux_loss"),
        (make_listed, "balanced"),
        (make_tabled, "none"),
        *[pytest.param(make_tabled, way, marks=pytest.mark.full) for way in ("sinkhorn", "balanced")],
        *[pytest.param(make_listed, way, marks=pytest.mark.full) for way in ("aux_loss", "none")],
    ],
)
def test_balanced_routers_train_as_their_formulas(ranks: Any, make: Any, way: str) -> None:
    settings = {"moe_load_balancing": way, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.05}
    config = {"expert_parallel_degree": 2}
    for found in ranks(lambda: training.train(config, make, settings, VOCABULARY, True), 2, init=False, timeout=120):
        check(found)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("way", BALANCINGS)
def test_routes_equal_their_formulas(way: str, k: int) -> None:
    logits = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    config = MoEConfig(moe_load_balancing=way, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2)
    weights, chosen = route(mine, k, config, is_training=True)
    wanted, choices, loss = balance(theirs, k, way, 0.3, 0.2)
    assert torch.equal(chosen, choices)
    torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-12)
    factors = torch.randn(40, k, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    (weights * factors).sum().backward()
    ((wanted * factors).sum() + loss).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)
    counts = chosen.flatten().bincount(minlength=6)
    if way == "balanced":
        assert int(counts.max() - counts.min()) <= 1
    # Without training nothing balances, and no loss is added.
    _, greatest = route(logits, k, config, is_training=False)
    assert torch.equal(greatest, logits.topk(k).indices)
