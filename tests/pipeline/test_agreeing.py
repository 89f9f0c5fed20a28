"""Pipelines that must run their work in one order do so in steps without a planned one, whatever arrives first."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.training.pipeline_training import summing_step

TP = {"tensor_parallel_degree": 2, "ddp": True}
DP = {"deterministic_server": True, "ddp": True}


def _orders(steps):
    import time

    import torch
    from support.training.pipeline_training import replayed
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    is_slow = smp.dp_rank() == 1
    ran: list[str] = []

    class Noted(nn.Linear):
        def __init__(self, name: str, seconds: float = 0.0) -> None:
            super().__init__(4, 4)
            self.name, self.seconds = name, seconds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(self.seconds)
            ran.append(self.name)
            return super().forward(x)

    class Asking(nn.Module):
        """Asks the other stage, and uses the answer later, when it may be there or not."""

        def __init__(self) -> None:
            super().__init__()
            self.elsewhere, self.between, self.last = Noted("elsewhere", 0.2 * is_slow), Noted("between"), Noted("last")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            answer = self.elsewhere(x)
            aside = self.between(x)
            time.sleep(0.1)
            return self.last(answer + aside)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.asking, self.beside = Asking(), Noted("beside")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.asking(x) + self.beside(x)

    torch.manual_seed(0)
    net = Net()
    smp.set_partition(net.asking, 1)
    smp.set_partition(net.asking.elsewhere, 0)
    smp.set_partition(net.beside, 1)
    model = smp.DistributedModel(net)

    train = summing_step(model)
    train(torch.ones(4, 4))
    ran.clear()  # one rank has traced the model in it too
    for _ in range(steps):
        train(torch.ones(4, 4))
    return smp.pp_rank(), ran, replayed(model)


@pytest.mark.parametrize("agreeing", [TP, DP], ids=["tensor parallel", "deterministic"])
def test_steps_without_a_planned_order_leave_no_choice(ranks, agreeing):
    """A rank whose answer comes late runs what is beside it no sooner than the others do."""
    config = {"partitions": 2, "auto_partition": False, "default_partition": 0, "microbatches": 2, **agreeing}
    found = ranks(_orders, 4, 3, config=config)
    for stage in range(2):
        for (_, one, _), (_, other, _) in pairwise(each for each in found if each[0] == stage):
            assert one == other
    assert all(replayed for *_, replayed in found)
