"""Guards stop all ranks before a bad update, say where it began, and leave the weights as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def _train(config: dict[str, Any], fault: str, rank_with_fault: int) -> dict[str, Any]:
    """Train until a guard stops it."""
    import torch
    from support.training.numerics_training import Decoder, batch_of, loss_of, part

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import NumericsError

    smp.init(config)  # here, since what hears of it must be imported first
    torch.manual_seed(0)
    module = Decoder()
    broken: list[int] = []
    if smp.rank() == rank_with_fault:
        norm = module.norm
        forward = norm.forward

        def other(x: torch.Tensor) -> torch.Tensor:
            y = forward(x)
            return y * float("nan") if broken and fault == "result" else y

        norm.forward = other
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))

    @smp.step
    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids), targets)
        loss = loss * 1000 if broken and fault == "spike" else loss
        model.backward(loss)
        return loss

    if fault == "gradient":
        weight = dict(module.named_parameters())["blocks.1.mlp.0.weight"]
        weight.register_hook(lambda g: g * float("inf") if broken and smp.rank() == rank_with_fault else g)
    said = ""
    before: dict[str, torch.Tensor] = {}
    updates = 0
    for number in range(14):
        if number == 10:
            broken.append(1)
            before = {name: p.detach().clone() for name, p in model.local_named_parameters()}
            if fault == "replicas" and smp.rank() == rank_with_fault:
                with torch.no_grad():
                    module.norm.weight[0] += 1e-3
        optimizer.zero_grad()
        step(*part(batch_of(number), smp.dp_rank(), smp.dp_size()))
        try:
            optimizer.step()
        except NumericsError as error:
            said = str(error)
            break
        updates += 1
    kept = all(torch.equal(p, before[name]) for name, p in model.local_named_parameters()) if before else False
    return {"said": said, "updates": updates, "kept": kept}


def _stopped(
    ranks: Any, tmp_path: Path, fault: str, guards: str, rank: int = 1
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    env = {"SMP_NUMERICS_GUARDS": guards, "SM_OUTPUT_DATA_DIR": str(tmp_path)}
    found = ranks(_train, 2, {"ddp": True, "microbatches": 2}, fault, rank, init=False, env=env)
    report = tmp_path / "numerics" / "numerics-guard.json"
    return found, json.loads(report.read_text()) if report.exists() else {}


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("result", "output of norm, microbatch 0 on rank 1"),
        # The reduction has spread it over the replicas; what came before it is finite.
        ("gradient", "gradient of blocks.1.mlp.0.weight on rank 0"),
    ],
)
def test_numbers_that_are_not_finite_stop_all_ranks(ranks: Any, tmp_path: Path, fault: str, first: str) -> None:
    found, report = _stopped(ranks, tmp_path, fault, "finite")
    assert {one["said"] for one in found} == {found[0]["said"]}
    assert f"the first number that is not is in the {first}" in found[0]["said"]
    assert [(one["updates"], one["kept"]) for one in found] == [(10, True), (10, True)]
    assert report["kind"] == "not finite"
    assert report["update"] == 11


def test_a_spike_stops_all_ranks(ranks: Any, tmp_path: Path) -> None:
    found, report = _stopped(ranks, tmp_path, "spike", "spike=20")
    assert "times the median" in found[0]["said"]
    assert [(one["updates"], one["kept"]) for one in found] == [(10, True), (10, True)]
    assert report["value"] > 20 * report["median"] > 0
    norms = [one["norm"] for one in report["gradients"]]
    assert norms == sorted(norms, reverse=True)
    assert len(norms) == 5
    assert f"the greatest gradient is that of {report['gradients'][0]['name']} on rank" in found[0]["said"]


def test_replicas_that_drift_stop_all_ranks(ranks: Any, tmp_path: Path) -> None:
    found, report = _stopped(ranks, tmp_path, "replicas", "replicas=4")
    assert [one["updates"] for one in found] == [11, 11]  # the comparison behind the twelfth update
    assert "norm.weight" in found[0]["said"]
    assert list(report["tensors"]) == ["norm.weight"]


@pytest.mark.parametrize("guards", ["finite,spike=50,replicas=2", ""])
def test_a_good_training_goes_on(ranks: Any, tmp_path: Path, guards: str) -> None:
    found, report = _stopped(ranks, tmp_path, "none", guards)
    assert [(one["updates"], one["said"]) for one in found] == [(14, ""), (14, "")]
    assert not report
