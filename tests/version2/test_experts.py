"""Experts that ranks share out, and routers that balance, train as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.version2 import make_mixtral, make_qwen_moe
from support.models.version2_mixtures import (
    EXPERTS,
    VOCABULARY,
    WIDTH,
    Experts,
    TabledMixture,
    balance,
    make_listed,
    make_noisy,
    make_tabled,
    make_with_all_weights,
)
from support.training import version2_checkpoints as checkpoints
from support.training import version2_experts as training

from smp_runtime.errors import SMPUserError
from smp_version2.moe.balancing import route
from smp_version2.moe.config import BALANCINGS, MoEConfig
from smp_version2.moe.exchange import ExpertGroup
from smp_version2.moe.experts import to_tables


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


def test_experts_that_name_their_arguments_and_take_all_weights_are_shared_out(ranks: Any) -> None:
    config = {"expert_parallel_degree": 2}
    for found in ranks(
        lambda: training.train(config, make_with_all_weights, None, VOCABULARY), 2, init=False, timeout=120
    ):
        check(found)


def test_a_mixture_that_draws_experts_draws_as_one_process(ranks: Any) -> None:
    assert max(ranks(training.draw_experts, 2, make_noisy, init=False, timeout=120)) < 1e-9


@pytest.mark.parametrize(
    ("make", "config", "tolerance"),
    [
        (make_listed, {"hybrid_shard_degree": 2}, 1e-9),
        (make_tabled, {"hybrid_shard_degree": 1}, 1e-9),
        (make_mixtral, {"tensor_parallel_degree": 2}, 1e-5),  # its router computes in float32
    ],
)
def test_fully_shard_shares_experts_out(ranks: Any, make: Any, config: dict[str, Any], tolerance: float) -> None:
    config = {"expert_parallel_degree": 2, **config}
    for found in ranks(lambda: training.train_by_function(config, make, VOCABULARY), 4, init=False, timeout=120):
        assert found["names"] == set()
        assert max(found["apart"].values()) < tolerance, found["apart"]
        assert found["norms"] < tolerance
        assert found["held"] < 0.6 * found["whole"]


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


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (make_mixtral, {"moe_load_balancing": "aux_loss"}),
        (make_mixtral, None),
        pytest.param(make_mixtral, {"moe_load_balancing": "sinkhorn"}, marks=pytest.mark.full),
        pytest.param(make_qwen_moe, None, marks=pytest.mark.full),
    ],
)
def test_mixtures_of_transformers_train_as_in_one_process(ranks: Any, make: Any, settings: Any) -> None:
    config, world = ({"expert_parallel_degree": 2}, 2) if settings else ({"expert_parallel_degree": 2}, 4)
    for found in ranks(lambda: training.train(config, make, settings, 64, True), world, init=False, timeout=120):
        check(found)
        assert found["held"] < 0.9 * found["whole"]


@pytest.mark.parametrize(
    ("make", "tolerance"),
    [
        (make_listed, 1e-9),
        (make_mixtral, 1e-5),  # its router computes in float32, and split layers round in another order
        pytest.param(make_tabled, 1e-9, marks=pytest.mark.full),
        pytest.param(make_qwen_moe, 1e-5, marks=pytest.mark.full),
    ],
)
def test_shared_experts_are_split_over_tensor_parallel_ranks(ranks: Any, make: Any, tolerance: float) -> None:
    config = {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}
    for found in ranks(lambda: training.train(config, make, None, VOCABULARY), 4, init=False, timeout=120):
        check(found, tolerance)
        assert found["held"] < 0.6 * found["whole"]


@pytest.mark.parametrize(
    ("make", "way", "config"),
    [
        (make_listed, "sharded", {"hybrid_shard_degree": 2}),
        (make_tabled, "local", {"hybrid_shard_degree": 2}),
        (make_tabled, "full", {"hybrid_shard_degree": 1}),
        (make_listed, "full", {"hybrid_shard_degree": 2}),
        pytest.param(make_tabled, "sharded", {"hybrid_shard_degree": 2}, marks=pytest.mark.full),
    ],
)
def test_checkpoints_bring_shared_experts_back(
    ranks: Any, tmp_path: Path, make: Any, way: str, config: dict[str, Any]
) -> None:
    config = {"expert_parallel_degree": 2, **config}
    for differing in ranks(training.resume, 4, config, make, way, tmp_path, init=False, timeout=120):
        assert differing == []


@pytest.mark.parametrize(
    ("make", "degrees"), [(make_tabled, (2, 1, 4, 2)), (make_listed, (2, 4, 1))], ids=["tables", "lists"]
)
def test_sharded_checkpoints_load_at_other_expert_degrees(
    ranks: Any, tmp_path: Path, make: Any, degrees: tuple[int, ...]
) -> None:
    for apart in ranks(training.resume_at_other_degrees, 4, make, degrees, tmp_path, init=False, timeout=180):
        assert max(apart.values()) < 1e-9, apart


def test_tokens_of_all_ranks_are_mixed(ranks: Any) -> None:
    for found in ranks(training.shuffle_once, 2, make_tabled, "none", init=False, timeout=120):
        assert found["own"] < 0.95  # routers see rows of the other rank
        assert found["results"] < 1e-12
        assert found["apart"] < 1e-9
    for found in ranks(training.shuffle_once, 2, make_listed, "sinkhorn", init=False, timeout=120):
        assert found["apart"] > 1e-6  # other tokens balance each other


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


WRONG = [
    ({"smp_moe": "yes"}, "smp_moe='yes', a str"),
    ({"global_token_shuffle": 1}, "global_token_shuffle=1, an int"),
    ({"random_seed": -1}, "random_seed=-1"),
    ({"random_seed": 1.5}, "random_seed=1.5"),
    ({"moe_load_balancing": "sinkhron"}, "did you mean 'sinkhorn'"),
    ({"moe_load_balancing": None}, "one of sinkhorn, balanced, aux_loss, none"),
    ({"moe_aux_loss_coeff": -0.1}, "moe_aux_loss_coeff=-0.1"),
    ({"moe_z_loss_coeff": "0.1"}, "moe_z_loss_coeff='0.1'"),
]


@pytest.mark.parametrize(("given", "named"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_setting_of_mixtures_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SMPUserError) as caught:
        MoEConfig(**given)
    assert named in str(caught.value)
    assert caught.value.code == "SMP303"


def _refuse(kind: str) -> str:
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with checkpoints.joined({"expert_parallel_degree": 2}):
        model = make_tabled()
        if kind == "no mixture":
            model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        elif kind == "odd":
            model = Odd()
        elif kind == "other results":
            model.blocks[1].mixture.experts.__class__ = MixedExperts
        elif kind == "own forward":
            model.blocks[1].mixture.forward = model.blocks[1].mixture.forward
        elif kind == "shared bias":
            model.blocks[1].mixture.experts.bias = torch.nn.Parameter(torch.zeros(WIDTH))
        try:
            model = tsm.transform(model)
            ids = torch.zeros(1, 4, dtype=torch.long)
            if kind == "not wrapped":
                model(ids)
            elif kind == "fully_shard":
                from torch.distributed.device_mesh import DeviceMesh

                fully_shard(model, mesh=DeviceMesh.from_group(tsm.state.shard_process_group, "cpu"))
            elif kind == "joined":
                FullyShardedDataParallel(model, use_orig_params=False)
            elif kind == "groups":
                FullyShardedDataParallel(model, use_orig_params=True, process_group=tsm.state.shard_process_group)
        except SMPUserError as error:
            return str(error)
        return ""


class MixedExperts(Experts):
    """Experts whose results depend on all tokens."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0), chosen, weights)


class Odd(torch.nn.Module):
    """A mixture of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = TabledMixture()
        for name in ("inner", "outer"):
            setattr(self.mixture.experts, name, torch.nn.Parameter(getattr(self.mixture.experts, name)[:3].detach()))
        self.mixture.gate.weight = torch.nn.Parameter(self.mixture.gate.weight[:3].detach())


def test_what_cannot_be_shared_out_is_named(ranks: Any) -> None:
    cases = {
        "no mixture": "Sequential has no mixture of experts",
        "odd": "has 3 experts, which cannot be divided by it: use one of 1, 3",
        "other results": "computes something else when its experts are called one by one",
        "own forward": "blocks.1.mixture has a forward of its own",
        "shared bias": "bias in its experts does not belong to one expert each",
        "not wrapped": "give the transformed model to one of them",
        "fully_shard": "fully_shard got groups of 1 ranks",
        "joined": "pass use_orig_params=True",
        "groups": "got groups of 1 ranks, and 2 ranks have what is no expert",
    }
    for found in ranks(lambda: {kind: _refuse(kind) for kind in cases}, 2, init=False, timeout=120):
        for kind, words in cases.items():
            assert words in found[kind], (kind, found[kind])


def _join_with_other_degrees(name: str) -> str:
    import os

    import torch.sagemaker as tsm

    from smp_config import ConfigError

    try:
        tsm.init({name: 1 + int(os.environ["RANK"])})
    except ConfigError as error:
        return str(error)
    finally:
        tsm.shutdown()
    return ""


@pytest.mark.parametrize("name", ["expert_parallel_degree", "activation_loading_horizon"])
def test_ranks_with_other_settings_are_refused_at_the_start(ranks: Any, name: str) -> None:
    for said in ranks(_join_with_other_degrees, 2, name, init=False):
        assert said.startswith("rank 1 was configured with {")
        assert f'"{name}": 1' in said
        assert f'"{name}": 2' in said


def test_a_whole_module_is_made_of_a_part() -> None:
    mixture = make_tabled().blocks[0].mixture
    whole = {name: value.clone() for name, value in mixture.experts.state_dict().items()}
    part = to_tables(mixture.experts, EXPERTS)
    part.share_out(ExpertGroup(2, 1, None))
    assert part.inner.shape[0] == part.num_experts == EXPERTS // 2
    assert torch.equal(part.inner, whole["inner"][2:])
    made = part.make_whole(torch.device("cpu"))
    assert type(made) is Experts
    assert {name: value.shape for name, value in made.named_parameters()} == {n: v.shape for n, v in whole.items()}
    assert made.num_experts == EXPERTS
    mixture.load_state_dict(
        {f"experts.{name}": value + 1 for name, value in whole.items()} | {"gate.weight": mixture.gate.weight}
    )
    assert torch.equal(part.outer, whole["outer"][2:] + 1)
