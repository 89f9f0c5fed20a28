"""Muon where tensor parallelism has replaced modules: matrices are those that the replaced modules had."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from support.logs import logged
from support.models.huggingface import tiny_model
from support.models.replaced import VOCABULARY, original_of, translations_of
from support.training.rank_training import training_step
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.nn.linear import ColumnProjection
from smp_runtime.optim.matrices.joins import joins_and_rates
from smp_runtime.parameters.registry import part_of

pytest.importorskip("transformers")

STEPS = 2
#: Families that are split in place, with experts, or with several maps in one matrix.
IN_PLACE = ("mixtral", "bloom", "falcon")
TENSOR = {"tensor_parallel_degree": 2, "prescaled_batch": True, "ddp": True}
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}
#: Ranks and settings.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replaced only": (2, {"ddp": True}),
    "tp": (2, TENSOR),
    "tp × state": (4, {**TENSOR, "shard_optimizer_state": True}),
    "tp × sharding": (4, {**TENSOR, **SHARDED}),
    "tp × pp": (4, {**TENSOR, "pipeline_parallel_degree": 2}),
    "bf16": (2, {**TENSOR, "bf16": True}),
}


def _gradients(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients for the original's parameters, which are those of no loss: models compute some of theirs in float32."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(each.shape, generator=generator).to(each.dtype) for name, each in state.items()}


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return smp.optimizers.Muon(model, lr=0.02, adamw_lr=3e-3)


def _made(family: str) -> nn.Module:
    if family not in IN_PLACE:
        return original_of(family).double()
    torch.manual_seed(1)
    model = tiny_model(family, VOCABULARY)
    if family == "mixtral" and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel does not compute in float64
    return model.double()


def _alone(family: str) -> dict[str, torch.Tensor]:
    model = _made(family)
    optimizer = _muon(model)
    parameters = dict(model.named_parameters())
    for _ in range(STEPS):
        for name, gradient in _gradients(parameters).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: each.detach().clone() for name, each in model.state_dict().items() if each.is_floating_point()}


def _replaced(family: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    original = _made(family)
    wanted = _gradients(dict(original.named_parameters()))
    to_ours, to_theirs = translations_of(family) if family not in IN_PLACE else (dict, dict)
    gradients = to_ours(wanted)
    smp.set_tensor_parallelism(original)
    with logged(logging.WARNING) as said:
        model = smp.DistributedModel(original)
        optimizer = smp.DistributedOptimizer(_muon(model))
    for record in model.registry:
        gradient = part_of(record, gradients[record.name])
        record.parameter.register_hook(lambda found, gradient=gradient: gradient.to(found.dtype).view_as(found))
    ids = torch.randint(3, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(3))
    train = training_step(model, lambda m, ids: m(input_ids=ids, labels=ids)["loss"])
    for _ in range(STEPS):
        optimizer.zero_grad()
        train(ids)
        with logged(logging.WARNING) as more:
            optimizer.step()
        said += more
    back = to_theirs({name: value.cpu() for name, value in model.state_dict().items()})
    return back, [line for line in map(str, said) if "Muon" in line]


def _compare(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], bound: float) -> None:
    for name, value in wanted.items():
        assert float((found[name] - value).norm()) <= bound * float(value.norm()), name


@pytest.mark.parametrize("family", ["gpt2", "gptj", "gptneo", "gptneox", "llama tied", "bert"])
def test_matrices_are_those_of_the_replaced_model(ranks: Callable[..., list[Any]], family: str) -> None:
    wanted = _alone(family)
    for found, said in ranks(_replaced, 2, family, config=TENSOR):
        assert not said
        _compare(found, wanted, 1e-9)


@pytest.mark.parametrize(
    ("family", "settings"), [*((family, {}) for family in IN_PLACE), ("mixtral", {"expert_parallel_degree": 2})]
)
def test_matrices_that_are_split_in_place_are_the_models(
    ranks: Callable[..., list[Any]], family: str, settings: dict[str, Any]
) -> None:
    wanted = _alone(family)
    for found, said in ranks(_replaced, 2, family, config={**TENSOR, **settings}):
        assert not said
        _compare(found, wanted, 1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_joined_matrices_are_updated_wherever_their_parts_are(ranks: Callable[..., list[Any]], layout: str) -> None:
    world, settings = LAYOUTS[layout]
    # In a pipeline the table's gradient comes in two passes, each of which the hook replaces.
    wanted = {name: value for name, value in _alone("gpt2").items() if ".h." in name}
    for found, said in ranks(_replaced, world, "gpt2", config=settings):
        assert not said
        _compare(found, wanted, 1e-2 if "bf16" in settings else 1e-9)


class Pair(nn.Module):
    """Two maps in one matrix, stored ``[in, out]``."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(6, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.both


class DistributedPair(smp.nn.DistributedModule):
    """The same in two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (ColumnProjection(6, 8, None, bias=False) for _ in range(2))


def _halves(state: Mapping[str, Any]) -> dict[str, Any]:
    first, second = state["both"].t().chunk(2)
    return {"first.weight": first, "second.weight": second}


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.contiguous() for name, value in _halves(state).items()}


def _what_is_said(hook: Callable[..., Any], case: str) -> tuple[int, list[str]]:
    smp.tp_register_with_module(Pair, DistributedPair, state_hook=hook)
    module = nn.Sequential(Pair())
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    if case != "whole":
        model.module[0].second.weight.requires_grad_(False)
    if case == "frozen":
        model.module[0].first.weight.requires_grad_(False)
    records, said = [each for each in model.registry if case != "groups" or "first" in each.name], set()
    with logged() as lines:
        for _ in range(2):  # once
            joins, _ = joins_and_rates(records, {record.model: 0 for record in records}, said)
    return len(joins), lines


@pytest.mark.parametrize(
    ("hook", "case", "joined", "named"),
    [
        (_halves, "whole", 2, ""),
        (_halves, "a part frozen", 0, "0.first.weight as"),
        (_halves, "groups", 0, "0.first.weight as"),
        (_halves, "frozen", 0, ""),
        (_copied, "whole", 0, "0.first.weight, 0.second.weight as"),
        (None, "whole", 0, "0.first.weight, 0.second.weight as"),
    ],
)
def test_parts_of_no_known_matrix_are_named_once(
    ranks: Callable[..., list[Any]], hook: Callable[..., Any], case: str, joined: int, named: str
) -> None:
    for count, lines in ranks(_what_is_said, 2, hook, case, config=TENSOR):
        assert count == joined
        assert len(lines) == bool(named)
        assert all(f"Muon updates {named}" in line for line in lines)


def _inferred(family: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train with what this rank infers of the others, as in a rehearsal, in place of what they say."""
    from smp_runtime.optim.matrices import exchange

    real, exchange.is_complete = exchange.is_complete, lambda holdings: False
    try:
        return _replaced(family)
    finally:
        exchange.is_complete = real


@pytest.mark.parametrize("layout", ["tp", pytest.param("tp × state", marks=pytest.mark.full)])
def test_one_rank_infers_which_parts_others_have(ranks: Callable[..., list[Any]], layout: str) -> None:
    world, settings = LAYOUTS[layout]
    wanted = _alone("gpt2")
    for found, _ in ranks(_inferred, world, "gpt2", config=settings):
        _compare(found, wanted, 1e-9)
