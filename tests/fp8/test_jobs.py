"""The parameter ``fp8`` of version 1: results of every strategy equal one process; sharded weights come in 8 bits; jobs resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.training.sharded_training import UNCLIPPED
from torch import nn

from smp_config import ConfigError, ModelParallelParameters

WIDTH, ROWS, STEPS = 32, 8, 6
SHARDED = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": UNCLIPPED,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Rows:
    """A training in which each row has the gradient that it has in one process, in 8 bits too.

    So the loss is no mean over a rank's rows, and the rate of learning makes up for the average over replicas.
    """

    def __init__(self, checkpoints: bool = False, planned: bool = False) -> None:
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        layers: list[nn.Module] = [Block() for _ in range(3)]
        self.smp = smp
        with smp.tensor_parallelism(enabled=planned):
            net = nn.Sequential(*layers).double()
        if checkpoints:
            smp.set_activation_checkpointing(net)
        self.model = smp.DistributedModel(net)
        cfg = smp.state.cfg
        group = smp.rdp_size, smp.rdp_rank
        self.replicas, self.mine = (group[0](), group[1]()) if cfg.prescaled_batch else (smp.dp_size(), smp.dp_rank())
        self.optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1 * self.replicas))

        @smp.step
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().sum() / (64 * ROWS) * cfg.microbatches
            self.model.backward(loss)
            return loss

        self.step = step

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            self.optimizer.zero_grad()
            self.step(x.chunk(self.replicas)[self.mine])
            self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def _train(checkpoints: bool = False, planned: bool = False) -> Any:
    from smp_runtime.fp8 import autocast

    training = Rows(checkpoints, planned)
    training.run(0, STEPS)
    scales = autocast.scales_to_save()
    return training.state(), scales


def _distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


STRATEGIES = [
    pytest.param({"ddp": True}, 2, {}, id="replicas"),
    pytest.param(SHARDED, 2, {}, id="sharded"),
    pytest.param(SHARDED, 2, {"checkpoints": True}, id="sharded, recomputed"),
    pytest.param({"ddp": True, "shard_optimizer_state": True}, 2, {}, id="state shared"),
    pytest.param({"pipeline_parallel_degree": 2, "microbatches": 2}, 2, {}, id="pipeline"),
    pytest.param(
        {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True}, 2, {"planned": True}, id="tensor parallel"
    ),
    pytest.param(
        {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True, **SHARDED}, 4, {"planned": True}, id="both"
    ),
]


@pytest.fixture(scope="module")
def alone(_shared_pool: Any) -> Any:
    return _shared_pool.run(_train, 1, config={"fp8": True}, process_mode=False)[0]


@pytest.mark.parametrize(("config", "world", "how"), STRATEGIES)
def test_every_strategy_equals_one_process(
    ranks: Any, alone: Any, config: dict[str, Any], world: int, how: dict[str, Any]
) -> None:
    wanted, scales = alone
    assert len(scales) == 6
    for found, theirs in ranks(
        _train, world, *(how.get(name, False) for name in ("checkpoints", "planned")), config={"fp8": True, **config}
    ):
        if found:
            assert _distance(found, wanted) < 1e-9
        assert theirs.keys() == scales.keys()


def test_it_makes_a_difference(ranks: Any, alone: Any) -> None:
    exact = ranks(_train, 1)[0]
    assert not exact[1]
    assert 1e-4 < _distance(exact[0], alone[0]) < 0.1


def _resume(folder: str, config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.fp8 import autocast

    first = Rows()
    first.run(0, 3)
    smp.save_checkpoint(folder, tag="3", model=first.model, optimizer=first.optimizer)
    first.run(3, STEPS)
    wanted = first.state()
    used = autocast.scales_to_save()
    del first
    smp.shutdown()
    smp.init(config)
    again = Rows()
    smp.resume_from_checkpoint(folder, tag="3")
    again.run(3, STEPS)
    assert autocast.scales_to_save() == used
    return wanted, again.state()


@pytest.mark.parametrize("config", [{"ddp": True}, SHARDED], ids=["replicas", "sharded"])
def test_a_resumed_job_equals_one_without_a_break(ranks: Any, tmp_path: Path, config: dict[str, Any]) -> None:
    for wanted, found in ranks(_resume, 2, str(tmp_path), config := {"fp8": True, **config}, config=config):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _count_gathers(width: int) -> float:
    """Return the bytes of all gathers of a step, those of greatest values included."""
    from dataclasses import replace

    from counting import CountingCollectives

    import smdistributed.modelparallel.torch as smp

    session = smp.init()

    class Gathers(CountingCollectives):
        bytes_gathered = 0.0

        def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: Any) -> Any:
            type(self).bytes_gathered += full.nbytes
            return super().all_gather(full, shard, group)

    session.ranks = replace(session.ranks, collectives=Gathers(session.ranks.collectives))
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6))))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def step(x: torch.Tensor) -> None:
        model.backward(model(x).square().mean())

    for _ in range(3):
        Gathers.bytes_gathered = 0.0
        optimizer.zero_grad()
        step(torch.randn(4, width))
        optimizer.step()
    return Gathers.bytes_gathered


def test_sharded_weights_are_gathered_in_half_of_the_bytes(ranks: Any) -> None:
    half, eight = (
        ranks(_count_gathers, 2, 256, config={**SHARDED, "bf16": True, **more})[0] for more in ({}, {"fp8": True})
    )
    assert 0.49 < eight / half <= 0.51


def test_settings_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="fp8 and compile"):
        ModelParallelParameters.from_mp_parameters({"fp8": True, "compile": True})
    with pytest.raises(ConfigError, match="fp8"):
        ModelParallelParameters.from_mp_parameters({"fp8": "true"})
