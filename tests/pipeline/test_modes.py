"""What a script has set for its own thread reaches the modules of every stage, or is said not to."""

from __future__ import annotations

import logging
from typing import ClassVar

import pytest
import torch
from support.logs import logged
from torch import nn

from smp_runtime.pipeline.execution.stage_context import current_modes, default_device, in_modes, keeps_otherwise

TWO = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}


class Block(nn.Module):
    """Makes tensors without a word of where, and notes what it sees."""

    seen: ClassVar[list] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        kept = torch.is_autocast_cache_enabled() if torch.is_autocast_enabled("cpu") else None
        self.seen.append((torch.ones(1).device.type, kept))
        return x + self.layer(x).relu()


def trained(build, context, steps=3):
    """Train on data of the CPU inside ``context``; losses, weights, and what modules of this rank saw in the last step."""
    import torch

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    net = build()
    if smp.pp_size() > 1:
        for number, part in enumerate(net):
            smp.set_partition(part, int(number >= 2))
    losses = []
    with context():
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

        @smp.step
        def train(x):
            loss = model(x).pow(2).mean()
            model.backward(loss)
            return loss

        @smp.step
        def look(x):
            return model(x).sum()

        look(torch.zeros(4, 4, device="cpu"))  # a training step without a backward pass, on all ranks
        for number in range(steps):
            generator = torch.Generator("cpu").manual_seed(number)
            x = torch.randn(4, 4, generator=generator, device="cpu")
            optimizer.zero_grad()
            Block.seen.clear()
            losses.append(float(train(x).reduce_mean()))
            optimizer.step()
        seen = sorted(set(Block.seen), key=str)
        state = {name: value.tolist() for name, value in model.state_dict().items()}
    return losses, state, seen


def blocks():
    return nn.Sequential(*(Block() for _ in range(4)))


def default_on_meta():
    import contextlib

    import torch

    @contextlib.contextmanager
    def set_for_the_thread():
        torch.set_default_device("meta")
        try:
            yield
        finally:
            torch.set_default_device(None)

    return set_for_the_thread()


def without_a_cache():
    import torch

    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


def nothing():
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize(
    "config",
    [
        TWO,
        {"ddp": True, "microbatches": 2},
        {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
        {"ddp": True, "shard_optimizer_state": True, "bf16": True},
    ],
    ids=["pipeline", "replicas", "sharded", "sharded state"],
)
def test_a_default_device_reaches_every_module_and_nothing_of_the_library(ranks, config):
    # No tensor of the library may lie on the meta device: it would have no values.
    plain = ranks(trained, 2, blocks, nothing, config=config)
    on_meta = ranks(trained, 2, blocks, default_on_meta, config=config)
    for (losses, state, before), (same_losses, same_state, seen) in zip(plain, on_meta, strict=True):
        assert losses == same_losses
        assert state == same_state
        assert before == [("cpu", None)]
        assert seen == [("meta", None)]


def test_autocast_without_its_cache_reaches_the_other_stages(ranks):
    for _, _, seen in ranks(trained, 2, blocks, without_a_cache, config=TWO):
        assert seen == [("cpu", False)]


def test_evaluation_in_inference_mode_before_and_after_training(ranks):
    def run(build):
        import torch

        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        net = build()
        for number, part in enumerate(net):
            smp.set_partition(part, int(number >= 2))
        model = smp.DistributedModel(net)
        x = torch.randn(4, 4)

        @smp.step
        def evaluate(x, more):
            return model(x + more["one"])

        @smp.step
        def train(x):
            model.backward(model(x).sum())

        outputs = []
        for inference in (True, False, True):
            with torch.inference_mode() if inference else torch.no_grad():
                outputs.append(evaluate(x * 1, {"one": torch.ones(4, 4)}).concat().tolist())
            train(x)
        return outputs

    for outputs in ranks(run, 2, blocks, config=TWO):
        assert outputs[0] == outputs[1] == outputs[2]


def test_hooks_around_a_step_are_said_to_have_no_effect(ranks):
    def run(build):
        import torch

        import smdistributed.modelparallel.torch as smp

        @smp.step
        def train(model, x):
            model.backward(model(x).sum())

        with logged(logging.NOTSET) as said:
            model = smp.DistributedModel(build())
            for _ in range(2):
                train(model, torch.ones(4, 4))
            before = [text for text in said if "save_on_cpu" in text]
            with torch.autograd.graph.save_on_cpu():
                for _ in range(2):
                    train(model, torch.ones(4, 4))
        return before, sum("save_on_cpu" in text for text in said)

    found = ranks(run, 2, blocks, config=TWO)
    assert [before for before, _ in found] == [[], []]
    assert sorted(count for _, count in found) == [0, 1]  # the root stage says it, once


def test_modes_of_a_thread():
    assert default_device() is None
    assert current_modes().device is None
    with torch.device("meta"):
        modes = current_modes()
        with torch.device("cpu"):
            assert default_device() == "cpu"
    with in_modes(modes):
        assert torch.ones(1).is_meta
        assert current_modes() == modes
    assert not torch.ones(1).is_meta
    with torch.overrides.BaseTorchFunctionMode():
        assert default_device() is None
    assert not keeps_otherwise()
    with torch.autograd.graph.save_on_cpu():
        assert keeps_otherwise()
