"""``"deterministic": true``: two runs of a pipeline with replicas are equal in every bit, however long their work takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.ranks.schedules import chain

from smp_runtime.pipeline.execution.plan_store import PlanStore
from smp_runtime.pipeline.schedule.policies import POLICIES
from smp_runtime.pipeline.transport.messages import Record, StepKind

if TYPE_CHECKING:
    from smp_runtime.pipeline.schedule.actions import Segment

CONFIG = {"partitions": 2, "auto_partition": False, "default_partition": 1, "microbatches": 6, "ddp": True}


def _train(run: int, steps: int) -> tuple[list[float], list[bytes], bool]:
    """Train with work that takes another time in each run; gives losses, bits of the weights, and whether an order was followed."""
    import random
    import time

    import torch
    from support.training.pipeline_training import replayed, summing_step
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    clock = random.Random(1000 * run + smp.rank())

    class Slow(nn.Linear):
        """Its time is that of the run, and a little more or less."""

        def __init__(self, slow_in: int) -> None:
            super().__init__(32, 32)
            self.most = 0.01 if slow_in == run else 0.001

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(clock.uniform(0.0, self.most))
            return super().forward(x)

    class Net(nn.Module):
        """Calls a module twice, with the other stage's between: so the order of the calls decides how its gradients are summed."""

        def __init__(self) -> None:
            super().__init__()
            self.twice, self.between, self.drop = Slow(0), Slow(1), nn.Dropout(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.between(torch.tanh(self.twice(x))))
            return self.drop(torch.tanh(self.between(torch.tanh(self.twice(y)))))

    torch.manual_seed(0)
    net = Net()
    smp.set_partition(net.twice, 0)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02))
    train = summing_step(model)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(float(train(torch.rand(12, 32)).reduce_mean()))
        optimizer.step()
    weights = [bytes(p.detach().view(torch.uint8).numpy()) for _, p in sorted(model.local_named_parameters())]
    return losses, weights, bool(replayed(model))


@pytest.mark.parametrize(
    ("is_deterministic", "schedule"),
    [(True, "interleaved"), (False, "interleaved"), pytest.param(True, "zero_bubble", marks=pytest.mark.full)],
)
def test_runs_are_equal_in_every_bit(ranks: Callable[..., list[Any]], is_deterministic: bool, schedule: str) -> None:
    config = {**CONFIG, "deterministic": is_deterministic, "pipeline": schedule}
    found = [ranks(_train, 4, run, 7, config=config) for run in (0, 1)]
    one, other = ([(losses, weights) for losses, weights, _ in run] for run in found)
    assert (one == other) is is_deterministic
    assert all(follows for run in found for *_, follows in run)
    replicas = {tuple(weights) for _, weights in one}
    assert len(replicas) == 2  # stages


@pytest.mark.parametrize("schedule", ["interleaved", pytest.param("simple", marks=pytest.mark.full), "zero_bubble"])
def test_an_order_follows_from_the_work_alone(schedule: str) -> None:
    """Steps that took other times, recorded by the stages in another order, are planned alike."""
    recorded = chain(3, 6, 1.0, 2.0, step_seconds=0.01, step_rank=2, pieces=2)

    def orders(segments: list[Segment], repeatable: bool) -> object:
        plans = PlanStore(POLICIES[schedule], 5, lambda value: [value], repeatable=repeatable)
        kind = StepKind("", ())
        plans.of(kind)
        plans.learn(kind, [Record(segments, 0, False, False)])
        assert plans.of(kind).orders
        return plans.of(kind).orders

    slower = [
        replace(s, seconds=s.seconds * (1 + 9 * (len(s.action.path) > 0 and s.action.path[0] % 2))) for s in recorded
    ]
    assert orders(recorded, True) == orders(slower[::-1], True)
    assert orders(recorded, False) != orders(slower[::-1], False)
