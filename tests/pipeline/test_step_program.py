"""Step programs: planned steps without requests, and the ways in which a step takes another course than its program."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from support.training.pipeline_training import messages_of_a_known_step
from torch import nn

from smp_runtime.pipeline.program.call_groups import PostedCall, make_program
from smp_runtime.pipeline.transport.messages import ForwardCall, Modes, TensorSlot
from smp_runtime.tensors.remote_tensor import TensorMetadata

WIDTH, STEPS, PARTS = 6, 9, 4
#: The step in which a way to leave is taken; by then the program has been followed.
LEAVES = 5


class Block(nn.Module):
    """Adds what a linear layer makes; with dropout that is on for one step only."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(WIDTH, WIDTH), nn.Identity()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        out = torch.tanh(self.line(x)) * scale
        return x + (out if mask is None else out * mask)


class Failing(nn.Module):
    """Passes its input on, or raises."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("as wanted")
        return x * 1.0


class Net(nn.Module):
    """Blocks on other stages and a head on the last, which runs this code; ``way`` says what it does differently."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.check, self.head = Failing(), nn.Linear(WIDTH, 1)
        self.way, self.calls = "", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        way, given = self.way, x
        x = self.enter(self.check(x))
        for number, block in enumerate(self.blocks):
            if way == "skips a call" and number == 1:
                continue
            if way == "skips the last call" and number == 2:
                continue
            if way == "skips in one microbatch" and number == 1 and self.calls % PARTS == 2:
                continue
            if way == "detaches" and number == 2:
                x = x.detach()
            if way == "passes a mask":
                x = block(x, torch.full((WIDTH,), 0.5, dtype=x.dtype))
            elif way == "passes by name":
                x = block(x=x)
            elif way == "passes a number":
                x = block(x, None, 0.5)
            else:
                x = block(x)
            if way == "calls twice" and number == 1:
                x = block(x)
            if way == "computes between" and number == 0:
                x = x * 2.0
            if way == "looks at a value" and number == 1 and float(x.detach().abs().sum()) < 0:
                raise AssertionError
            if way == "branches on a value" and number == 1 and float(x.detach().sum()) > 0:
                x = x * 0.5
            if way == "hooks a gradient" and number == 1:
                x.register_hook(lambda gradient: gradient * 0.5)
            if way == "writes into its input" and number == 0:
                given.mul_(0.0)
        return self.head(x)


def _loss(net: Any, x: torch.Tensor, way: str) -> torch.Tensor:
    with torch.no_grad() if way == "records no graph" else contextlib.nullcontext():
        out = net(x)
    return out.square().mean()


def _batch(step: int, way: str) -> torch.Tensor:
    length = 2 if way == "other shape" else 1
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4 * PARTS, length, WIDTH, dtype=torch.float64, generator=generator)


def _switch(net: Net, way: str) -> None:
    """Set what a way switches on the model, on all ranks."""
    for parameter in net.blocks[1].parameters():
        parameter.requires_grad_(way != "freezes")
    net.blocks[1].train(way != "switches a flag")
    net.check.fails = way == "a module raises"


def _has_backward(way: str, microbatch: int) -> bool:
    return way not in ("no backward", "records no graph") and not (way == "no backward in one" and microbatch == 2)


#: Steps that end with an error.
RAISES = ("the step function raises", "a module raises")

#: Ways, and whether the step still follows its program, until it raises.
WAYS = {
    **dict.fromkeys(["nothing", "writes into its input", "evaluation before", "another step before", *RAISES], True),
    **dict.fromkeys(
        [
            *(
                "skips a call",
                "skips the last call",
                "skips in one microbatch",
                "calls twice",
                "passes a mask",
                "passes by name",
            ),
            *(
                "passes a number",
                "detaches",
                "computes between",
                "looks at a value",
                "branches on a value",
                "hooks a gradient",
            ),
            *("other shape", "freezes", "switches a flag", "no backward", "no backward in one", "records no graph"),
            *("casts", "the model twice"),
        ],
        False,
    ),
}


def _alone(way: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net = Net().double()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(STEPS):
        now = way if step == LEAVES else ""
        if now in RAISES:
            continue
        _switch(net, now)
        net.way = now
        total = 0.0
        for number, part in enumerate(_batch(step, now).chunk(PARTS)):
            with torch.autocast("cpu", enabled=now == "casts"):
                loss = _loss(net, part.clone(), now)
            if now == "the model twice":
                loss = loss + _loss(net, part.clone(), now)
            if _has_backward(now, number):
                (loss / PARTS).backward()
            total += float(loss) / PARTS
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.clone() for key, value in net.state_dict().items()}


def _train(way: str) -> tuple[list[float], dict[str, torch.Tensor], list[bool], int]:
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    net = Net().double()
    for part, stage in ((net.enter, 0), (net.blocks, 0), (net.check, 0), (net.head, smp.pp_size() - 1)):
        smp.set_partition(part, stage)
    if smp.pp_size() > 2:
        smp.set_partition(net.blocks[1], 1)
        smp.set_partition(net.blocks[2], 2)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    microbatch, now = 0, ""

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal microbatch
        number, microbatch = microbatch, microbatch + 1
        with torch.autocast("cpu", enabled=now == "casts"):
            loss = _loss(model, x, now)
        if now == "the model twice":
            loss = loss + _loss(model, x, now)
        if now == "the step function raises" and number % PARTS == 2:
            raise ValueError("as wanted")
        if _has_backward(now, number % PARTS):
            model.backward(loss)
        return loss

    @smp.step
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    losses, followed = [], []
    for number in range(STEPS):
        now = way if number == LEAVES else ""
        _switch(net, now)
        net.way = now
        microbatch = 0
        x = _batch(number, now)
        if now == "evaluation before":
            model.eval()
            with torch.no_grad():
                evaluate(x)
            model.train()
        if now == "another step before":
            model.train(False)
            evaluate(x)
            model.train()
        with pytest.raises(Exception, match="as wanted") if now in RAISES else contextlib.nullcontext():
            losses.append(float(step(x).reduce_mean()))
        program = model.pipeline.context.root_program
        followed.append(any(smp.allgather(program.was_followed, smp.PP_GROUP)))
        if now not in RAISES:
            optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict(), followed, model.pipeline.context.values.count


def _compare(ranks: Any, way: str, stages: int, **settings: Any) -> None:
    losses, state = _alone(way)
    config = {"ddp": True, "partitions": stages, "microbatches": PARTS, "auto_partition": False, "step_program": True}
    config |= {"default_partition": stages - 1, **settings}
    tolerance = 1e-2 if way == "casts" else 1e-9
    for found, weights, followed, kept in ranks(_train, stages, way, config=config):
        assert followed[LEAVES - 1], followed
        assert followed[LEAVES] == WAYS[way], followed
        assert followed[-1], followed
        assert found == pytest.approx(losses, rel=tolerance)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance)
        assert kept == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_another_course_equals_one_process(ranks, way):
    _compare(ranks, way, 2)


@pytest.mark.parametrize("way", ["nothing", "writes into its input", "skips a call", "no backward in one"])
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_stages_that_learn_of_a_group_from_each_other(ranks, way, schedule):
    _compare(ranks, way, 3, pipeline=schedule)


def _with_features() -> tuple[list[float], list[int], bool]:
    """Losses of a training with dropout and checkpointing, and the most values that this stage has kept in each step."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    kept: list[int] = []

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if model.pipeline is not None:  # not while the model is traced
                kept.append(model.pipeline.context.values.count)
            return self.drop(torch.tanh(self.line(x)))

    net = nn.Sequential(*(Dropping() for _ in range(2 * smp.pp_size()))).double()
    for number, block in enumerate(net):
        smp.set_partition(block, number // 2)
    model = smp.DistributedModel(net)
    for block in net[::2]:
        smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        model.backward(loss)
        return loss

    losses, most = [], []
    for number in range(6):
        kept.clear()
        x = torch.randn(32, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        losses.append(float(step(x).reduce_mean()))
        most.append(max(kept))
        optimizer.step()
        optimizer.zero_grad()
    return losses, most, any(smp.allgather(model.pipeline.context.root_program.was_followed, smp.PP_GROUP))


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "simple"])
def test_dropout_checkpointing_and_memory_are_the_same(ranks, schedule):
    config = {"ddp": True, "partitions": 3, "microbatches": 16, "auto_partition": False, "default_partition": 0}
    config |= {"pipeline": schedule, "active_microbatches": 4}
    without, given = [ranks(_with_features, 3, config={**config, "step_program": on}) for on in (False, True)]
    for (losses, most, _), (found, now, followed) in zip(without, given, strict=True):
        assert followed
        assert found == pytest.approx(losses, rel=1e-12)
        # Values of microbatches that are finished are forgotten: each has up to five, and four are in flight.
        assert max(now[2:]) <= 32, (most, now)


@pytest.mark.parametrize(("stages", "layers", "others"), [(2, 1, 0), (4, 1, 0), (2, 3, 0), (2, 6, 2)])
def test_stages_send_only_tensors(ranks, stages, layers, others):
    settings = {"partitions": stages, "microbatches": 4, "auto_partition": False, "default_partition": 0}
    settings["step_program"] = True
    counts = sum(
        (Counter(each) for each in ranks(messages_of_a_known_step, stages, 8, layers, config=settings)), Counter()
    )
    # Only the news that a stage has done all of a microbatch.
    assert counts.pop("NoneType", 0) <= 4 * (stages - 1) + 4
    # A tensor goes from each stage to the next one and home from the last, and so does its gradient. Of more than four calls
    # in a row, the first begins by itself.
    assert counts == {"Begin": stages - 1, "End": stages - 1, "ValueMessage": 4 * (2 * stages + others)}


def _forward(stage: int, number: int, needs: list[int], goes: list[int], inline: bool = False) -> PostedCall:
    """A call with one result, which needs those of other calls, and sends its own to stages."""
    meta = TensorMetadata((1,), torch.float32, "cpu", True)
    slots = tuple(TensorSlot(("F", 0, (other,), 0), 9, meta, True) for other in needs)
    names = (("A", 0, (number,), 0),) if inline else ()
    modes, ways = Modes(True, ()), tuple((0, to) for to in goes)
    return PostedCall(
        stage, ForwardCall(0, (number,), "m", b"", False, slots, modes, b"", 0, False, b"", ways, names), 0, 0.0
    )


def test_the_stages_that_the_root_stage_tells():
    chain = [_forward(1, 0, [], [2], True), _forward(2, 1, [0], [3]), _forward(3, 2, [1], [0])]
    (group,) = make_program({0: chain}).groups[0]
    assert group.told == (1,)
    assert group.reached == {1, 2, 3}
    # Stage 2 has a call that needs nothing of another stage: with requests it could begin at once, so it must here.
    branches = [_forward(1, 0, [], [2], True), _forward(2, 1, [0], []), _forward(2, 2, [], [])]
    assert make_program({0: branches}).groups[0][0].told == (1, 2)
    # Nobody sends stage 2 the tensor unasked.
    asking = [_forward(1, 0, [], [], True), _forward(2, 1, [0], [])]
    assert make_program({0: asking}).groups[0][0].told == (1, 2)
    # What all calls of a stage need may come by a call of the same stage.
    second = [_forward(1, 0, [], [2], True), _forward(2, 1, [0], []), _forward(2, 2, [1], [])]
    assert make_program({0: second}).groups[0][0].told == (1,)


def test_groups_end_where_the_step_function_waits_or_computes():
    calls = [_forward(1, number, [], []) for number in range(3)]
    calls[1], calls[2] = calls[1]._replace(part=1), calls[2]._replace(part=1, when=1.0)
    assert [len(group.calls) for group in make_program({0: calls}).groups[0]] == [1, 1, 1]
    program = make_program({0: [_forward(1 + number // 3, number, [], []) for number in range(6)]})
    assert [len(group.calls) for group in program.groups[0]] == [1, 5]
    assert [(number, len(messages)) for number, messages in program.of_stage(1)] == [(0, 1), (1, 2)]
    assert program.keys_of(2, 0) == [("F", (3,)), ("F", (4,)), ("F", (5,))]
