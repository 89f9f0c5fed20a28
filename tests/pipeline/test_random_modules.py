"""Random trees of modules and families of Transformers in ``zero_bubble``: every gradient is that of one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.matrix import sampled
from support.models import random_modules
from support.models.tiny_families import Family, batch_of, loss_of, tiny_model
from support.training.reference import Alone

from smp_runtime.tensors.split_operations import SplitOperations
from smp_runtime.tensors.weight_gradients import WeightGradients, split_inside

#: Of gradients, relative to the greatest element of their tensor where that is above 1.
NEAR = 1e-9
STEPS, MICROBATCHES, SAMPLES = 4, 4, 8

FAMILIES = [
    *(("causal", name) for name in ("gpt2", "llama", "mixtral", "mamba", "opt", "gpt_neox", "qwen2")),
    *(("masked", name) for name in ("bert", "roberta", "deberta-v2")),
    *(("seq2seq", name) for name in ("t5", "bart")),
]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest difference of two tensors' elements, relative to the greatest element where that is above 1."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def _staged(seed: int) -> list[dict[str, torch.Tensor]]:
    """A rank's gradients of every step."""
    import smdistributed.modelparallel.torch as smp

    net = random_modules.random_module(seed)
    model = smp.DistributedModel(net)
    for module in random_modules.checkpointed(net, seed):
        smp.set_activation_checkpointing(module)
    return _gradients(model, random_modules.loss_of, random_modules.batch)


def _gradients(
    model: torch.nn.Module, loss_of: Callable[..., torch.Tensor], batch: Callable[[int, int], torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """Those that a rank has of every step."""
    import smdistributed.modelparallel.torch as smp

    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    @smp.step
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        model.backward(loss)
        return loss

    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        train(batch(step, SAMPLES))
        found.append({n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None})
        optimizer.step()
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", sampled(range(200), {0, 1}))
def test_trees_on_stages(ranks: Any, seed: int, record_property: Any) -> None:
    alone = Alone(random_modules.random_module(seed), lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    for step in range(STEPS):
        alone.step(
            [(piece,) for piece in random_modules.batch(step, SAMPLES).chunk(MICROBATCHES)], random_modules.loss_of
        )
    stages = 2 + seed % 2
    config = {"pipeline_parallel_degree": stages, "microbatches": MICROBATCHES, "pipeline": "zero_bubble"}
    results = ranks(_staged, stages, seed, config=config, timeout=200)
    worst = farthest(results, alone)
    record_property("distance", worst)
    assert worst <= NEAR


def farthest(results: list[list[dict[str, torch.Tensor]]], alone: Alone) -> float:
    """The greatest distance of a gradient of all ranks, of any step, from that of one process."""
    worst = 0.0
    for step, expected in enumerate(alone.gradients):
        found = {name: value for result in results for name, value in result[step].items()}
        assert found.keys() == expected.keys()
        worst = max(worst, *(distance(found[name], value) for name, value in expected.items()))
    return worst


def taken_apart(model: torch.nn.Module, loss_of: Callable[[int], torch.Tensor]) -> float:
    """How far the gradients of two microbatches whose backward passes are taken apart are from those of whole ones."""
    left, found = WeightGradients(), []
    left.is_open = True
    for splits in (False, True):
        model.zero_grad()
        for number in range(2):
            if splits:
                with split_inside(left, SplitOperations()):
                    loss_of(number).backward()
                assert left
                left.run()
            else:
                loss_of(number).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    whole, apart = found
    assert apart.keys() == whole.keys()
    return max(distance(apart[name], value) for name, value in whole.items())


@pytest.mark.parametrize("seeds", sampled([range(4), range(4, 200)], [range(4)]))
def test_trees_on_one_rank(seeds: range) -> None:
    for seed in seeds:
        tree = random_modules.random_module(seed)
        worst = taken_apart(
            tree, lambda number, tree=tree: random_modules.loss_of(tree, random_modules.batch(number, 2))
        )
        assert worst <= NEAR, seed


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "name"), sampled(FAMILIES, {("causal", "gpt2")}))
def test_families(kind: str, name: str, record_property: Any) -> None:
    """What is taken apart does not depend on where it runs."""
    model = _family(kind, name)
    worst = taken_apart(model, lambda number: loss_of(model, batch_of(number, 4)))
    record_property("distance", worst)
    assert worst <= NEAR


def _family(kind: str, name: str) -> torch.nn.Module:
    """A tiny model of a family, in float64 and without dropout."""
    model = tiny_model(Family(kind, name)).double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def _staged_family(kind: str, name: str) -> list[dict[str, torch.Tensor]]:
    """A rank's gradients of every step."""
    import smdistributed.modelparallel.torch as smp

    return _gradients(smp.DistributedModel(_family(kind, name)), loss_of, batch_of)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "name"), FAMILIES)
def test_families_on_stages(ranks: Any, kind: str, name: str, record_property: Any) -> None:
    alone = Alone(_family(kind, name), lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    for step in range(STEPS):
        alone.step([(piece,) for piece in batch_of(step, SAMPLES).chunk(MICROBATCHES)], loss_of)
    config = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "pipeline": "zero_bubble"}
    worst = farthest(ranks(_staged_family, 2, kind, name, config=config, timeout=200), alone)
    record_property("distance", worst)
    assert worst <= NEAR
