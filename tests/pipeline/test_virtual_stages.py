"""Stages that own several pieces of the model: which pieces, the same training, and how long stages wait."""

from __future__ import annotations

import logging

import pytest
import torch
from support.matrix import sampled
from support.ranks.chains import pieces_in_turn
from support.training.pipeline_training import alone, compare, staged
from torch import nn

from smp_config import ModelParallelParameters
from smp_runtime.pipeline.partition.costs import CostSettings
from smp_runtime.pipeline.partition.partitioner import partition
from smp_runtime.pipeline.partition.tracing import trace
from smp_runtime.pipeline.schedule import planner
from smp_runtime.pipeline.schedule.policies import policy_named


class Tied(nn.Module):
    """Blocks between an embedding and a head with its weights."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(blocks)))
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(ids)))


def stages_of_blocks(stages: int, pieces: int, blocks: int = 8, **more: object) -> list[int]:
    model = Tied(blocks)
    seen = trace(model, lambda: model(torch.zeros(2, 3, dtype=torch.long)), device=torch.device("cpu"))
    settings = CostSettings(memory_weight=0.5, in_flight=(2,) * stages)
    found = partition(seen, stages, settings, pieces=pieces, **more)  # type: ignore[arg-type]
    assert found.stages == stages
    assert found.stage_of("head") == found.stage_of("tokens")
    assert found.root_stage == stages - 1
    return [found.stage_of(f"blocks.{number}") for number in range(blocks)]


def test_pieces_are_dealt_out_in_turn() -> None:
    assert stages_of_blocks(2, 1) == [0] * 4 + [1] * 4
    assert stages_of_blocks(2, 2) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert stages_of_blocks(2, 4) == [0, 1] * 4
    assert stages_of_blocks(4, 2) == [0, 1, 2, 3] * 2
    pinned = stages_of_blocks(2, 2, pinned={"blocks.0": 1, "blocks.7": 0})
    assert (pinned[0], pinned[7]) == (1, 0)


def test_more_pieces_than_parts_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "smp"):
        stages_of_blocks(2, 16, blocks=2)
    assert "fewer than the 32 pieces of 16 virtual stages on each of 2 stages; lower virtual_stages" in caplog.text


def test_twice_as_many_are_in_flight_unless_something_else_is_said() -> None:
    def read(**more: object) -> ModelParallelParameters:
        return ModelParallelParameters.from_mp_parameters({"pipeline_parallel_degree": 4, **more})

    assert read().active_microbatches == 6
    assert read(virtual_stages=2).active_microbatches == 8
    assert read(virtual_stages=2, active_microbatches=3).active_microbatches == 3
    assert "virtual_stages=2 ignored: pipeline_parallel_degree is 1" in " ".join(
        read(pipeline_parallel_degree=1, virtual_stages=2).warnings()
    )
    assert "virtual_stages=2 ignored: auto_partition is false" in " ".join(
        read(virtual_stages=2, auto_partition=False, default_partition=0).warnings()
    )


@pytest.mark.parametrize(
    ("stages", "pieces", "microbatches"),
    [(2, 2, 4), pytest.param(4, 2, 8, marks=pytest.mark.full), pytest.param(3, 3, 9, marks=pytest.mark.full)],
)
def test_stages_wait_for_parts_of_a_stage(stages: int, pieces: int, microbatches: int) -> None:
    """(p − 1)/v of a microbatch (Narayanan et al. 2021, section 2.2), and no more are in flight than twice the stages."""
    chain = list(pieces_in_turn(stages, pieces, microbatches))
    made = planner.plan(chain, policy=policy_named("interleaved"), active=2 * stages)
    assert made.makespan == pytest.approx(3.0 * (microbatches + (stages - 1) / pieces), rel=0.02)
    assert max(made.in_flight.values()) <= 2 * stages


CASES = [
    ("tied", 2, 2, 4, "interleaved"),
    ("residual", 2, 2, 2, "zero_bubble"),
    ("gpt2", 2, 2, 4, "interleaved"),
    ("twice", 2, 3, 4, "simple"),
    ("tied", 4, 2, 8, "zero_bubble"),
    ("t5", 2, 2, 4, "interleaved"),
    ("containers", 4, 2, 4, "interleaved"),
    ("branching", 2, 2, 4, "zero_bubble"),
    ("normed", 2, 2, 4, "interleaved"),
    ("llama", 2, 4, 4, "zero_bubble"),
]


def _staged(*args: object) -> object:
    return staged(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "stages", "pieces", "microbatches", "schedule"), sampled(CASES, set(CASES[:2])))
def test_losses_and_every_gradient_equal_one_process(
    ranks, name: str, stages: int, pieces: int, microbatches: int, schedule: str
) -> None:
    settings = {
        "pipeline_parallel_degree": stages,
        "virtual_stages": pieces,
        "microbatches": microbatches,
        "pipeline": schedule,
    }
    # Statistics of four samples, and what AdamW makes of gradients near zero, magnify what float32 rounds.
    dtype, tolerance = (torch.float64, 1e-9) if name == "normed" else (torch.float32, 1e-5)
    expected = alone(name, steps=6, batch=16, microbatches=microbatches, evaluates=True, dtype=dtype)
    results = ranks(_staged, stages, name, 6, 16, False, dtype, True, config=settings, timeout=300)
    compare(results, expected, tolerance)
    owners = [path for result in results for path in result["local"]]
    assert len(set(owners)) == len(owners)  # every parameter on one stage
    if name != "branching":
        assert all(result["replayed"] > 0 for result in results)
    if name == "residual":
        settings["virtual_stages"] = 1
        whole = ranks(_staged, stages, name, 1, 16, config=settings, timeout=300)
        assert [one["local"] for one in whole] != [one["local"] for one in results]
