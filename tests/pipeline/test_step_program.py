"""Step programs: planned steps without requests, and the ways in which a step takes another course than its program."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.models.changing_net import PARTS, WIDTH, Net
from support.training.pipeline_training import messages_of_a_known_step, small_chain, summing_step
from torch import nn

from smp_runtime.pipeline.program.call_groups import PostedCall, make_program
from smp_runtime.pipeline.transport.messages import ForwardCall, Modes, TensorSlot
from smp_runtime.tensors.remote_tensor import TensorMetadata

#: The first step that takes another course, and the steps from one to the next: in between, the program is followed again.
LEAVES, APART = 5, 4


def _loss(net: Any, x: torch.Tensor, way: str) -> torch.Tensor:
    if way == "calls nothing":
        return x.square().mean()
    with torch.no_grad() if way == "records no graph" else contextlib.nullcontext():
        out = net(x)
    return out.square().mean() * (0.5 if way == "scales the loss" else 1.0)


def _batch(step: int, way: str) -> torch.Tensor:
    length = 2 if way == "other shape" else 1
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(4 * PARTS, length, WIDTH, dtype=torch.float64, generator=generator)
    return batch.float() if way == "another type" else batch


def _halve(module: nn.Module, given: Any, result: Any) -> Any:
    return result * 0.5


def _halve_gradients(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in into)


@contextlib.contextmanager
def _switched(net: Net, way: str) -> Iterator[None]:
    """Set what a way switches on the model, on all ranks, for one step."""
    middle, handle = net.blocks[1], None
    for part, freezes in ((middle, "freezes"), (net.head, "freezes the head")):
        for parameter in part.parameters():
            parameter.requires_grad_(way != freezes)
    middle.train(way != "switches a flag")
    if way == "evaluates":
        net.eval()
    if way == "adds a hook":
        handle = middle.register_forward_hook(_halve)
    if way == "adds a backward hook":
        handle = middle.register_full_backward_hook(_halve_gradients)
    if way == "replaces a module":
        middle.drop = nn.Tanh()
    if way == "changes a buffer":
        middle.factor.fill_(0.5)
    net.between.way = net.way = way
    try:
        yield
    finally:
        net.between.way = net.way = ""
        net.train()
        if handle is not None:
            handle.remove()
        if way == "replaces a module":
            middle.drop = nn.Identity()
        if way == "changes a buffer":
            middle.factor.fill_(1.0)


def _has_backward(way: str, microbatch: int) -> bool:
    never = ("no backward", "records no graph", "calls nothing")
    return way not in never and not (way == "no backward in one" and microbatch == 2)


_VARIES = "from calls with arguments of the same shapes before"
#: Steps that end with an error, and what it says.
RAISES = {
    **dict.fromkeys(["the step function raises", "the step function raises at once"], "as wanted"),
    **dict.fromkeys(
        ["the step function raises at its end", "a module raises", "a module raises in backward"], "as wanted"
    ),
    "an argument cannot travel": "cannot travel",
    "a module returns another shape": _VARIES,
    "a module returns another type": _VARIES,
    "a module returns its argument": _VARIES,
    "a module returns a list": _VARIES,
    "a module returns no graph": _VARIES,
}
#: Ways, and whether the step still follows its program, until it raises.
WAYS = {
    **dict.fromkeys(["nothing", "writes into its input", "evaluation before", "another step before", *RAISES], True),
    **dict.fromkeys(["scales the loss", "returns more", "changes a buffer", "loads a state", "adds a hook"], True),
    **dict.fromkeys(["adds a backward hook", "replaces a module", "keeps its gradients"], True),
    **dict.fromkeys(["skips a call", "skips the last call", "skips in one microbatch", "calls twice"], False),
    **dict.fromkeys(["passes a mask", "passes by name", "passes a number", "detaches", "computes between"], False),
    **dict.fromkeys(["looks at a value", "branches on a value", "hooks a gradient", "other shape", "freezes"], False),
    **dict.fromkeys(["switches a flag", "no backward", "no backward in one", "records no graph", "casts"], False),
    **dict.fromkeys(["the model twice", "another type", "its input requires a gradient", "swaps two calls"], False),
    **dict.fromkeys(["calls a part", "evaluates", "freezes the head", "calls nothing"], False),
}
_IN_64_BITS = [way for way in WAYS if way != "casts"]
#: Several in one training.
GROUPS = [*(_IN_64_BITS[start : start + 7] for start in range(0, len(_IN_64_BITS), 7)), ["casts"]]


def _course(ways: Sequence[str]) -> list[str]:
    """Return the way of each step."""
    found = [""] * (LEAVES + APART * len(ways))
    for number, way in enumerate(ways):
        found[LEAVES + APART * number] = way
    return found


def _alone(ways: Sequence[str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net = Net().double()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step, now in enumerate(_course(ways)):
        if now in RAISES:
            continue
        if now == "loads a state":
            net.load_state_dict({key: value * 0.9 for key, value in net.state_dict().items()})
        with _switched(net, now):
            losses.append(sum(_losses_alone(net, step, now)))
        if now != "keeps its gradients":
            optimizer.step()
            optimizer.zero_grad()
    return losses, {key: value.clone() for key, value in net.state_dict().items()}


def _losses_alone(net: Net, step: int, now: str) -> Iterator[float]:
    for number, part in enumerate(_batch(step, now).chunk(PARTS)):
        with torch.autocast("cpu", enabled=now == "casts"):
            loss = _loss(net, part.clone(), now)
        if now == "the model twice":
            loss = loss + _loss(net, part.clone(), now)
        if _has_backward(now, number):
            (loss / PARTS).backward()
        yield float(loss.detach()) / PARTS


def _staged_model() -> tuple[Net, Any, Any]:
    """The network on its stages, and its optimizer."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    net = Net().double()
    for part in (net.enter, net.blocks, net.check, net.between):
        smp.set_partition(part, 0)
    smp.set_partition(net.head, smp.pp_size() - 1)
    if smp.pp_size() > 2:
        smp.set_partition(net.blocks[1], 1)
        smp.set_partition(net.blocks[2], 2)
    model = smp.DistributedModel(net)
    return net, model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def _train(ways: Sequence[str]) -> tuple[list[float], dict[str, torch.Tensor], list[bool], int]:
    import smdistributed.modelparallel.torch as smp

    net, model, optimizer = _staged_model()
    microbatch, now = 0, ""

    @smp.step
    def step(x: torch.Tensor) -> Any:
        nonlocal microbatch
        number, microbatch = microbatch, microbatch + 1
        if now == "the step function raises at once":
            raise ValueError("as wanted")
        if now == "an argument cannot travel":
            net.blocks[0](x, lambda: None)
        with torch.autocast("cpu", enabled=now == "casts"):
            loss = _loss(model, x, now)
        if now == "the model twice":
            loss = loss + _loss(model, x, now)
        if now == "the step function raises" and number % PARTS == 2:
            raise ValueError("as wanted")
        if _has_backward(now, number % PARTS):
            model.backward(loss)
        if now == "the step function raises at its end" and number == PARTS - 1:
            raise ValueError("as wanted")
        return (loss, {"more": torch.ones(2)}) if now == "returns more" else loss

    @smp.step
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    losses, followed = [], []
    for number, now in enumerate(_course(ways)):
        microbatch = 0
        x = _batch(number, now)
        if now == "loads a state":
            model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()})
        if now in ("evaluation before", "another step before"):
            model.eval()
            with torch.set_grad_enabled(now == "another step before"):
                evaluate(x)
            model.train()
        raising = now in RAISES
        with _switched(net, now), pytest.raises(Exception, match=RAISES[now]) if raising else contextlib.nullcontext():
            out = step(x)
            losses.append(float((out[0] if isinstance(out, tuple) else out).reduce_mean()))
        program = model.pipeline.context.root_program
        followed.append(any(smp.allgather(program.was_followed, smp.PP_GROUP)))
        if not raising and now != "keeps its gradients":
            optimizer.step()
        if now != "keeps its gradients":
            optimizer.zero_grad()
    return losses, model.state_dict(), followed, model.pipeline.context.values.count


def _compare(ranks: Any, ways: Sequence[str], stages: int, **settings: Any) -> None:
    losses, state = _alone(ways)
    config = {"ddp": True, "partitions": stages, "microbatches": PARTS, "auto_partition": False, "step_program": True}
    config |= {"default_partition": stages - 1, **settings}
    tolerance = 1e-2 if "casts" in ways else 1e-9
    for found, weights, followed, kept in ranks(_train, stages, ways, config=config, timeout=120):
        for number, way in enumerate(ways):
            step = LEAVES + APART * number
            seen = followed[step - 1 : step + APART]
            assert (seen[0], seen[1], seen[-1]) == (True, WAYS[way], True), (way, seen)
        assert found == pytest.approx(losses, rel=tolerance)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance)
        assert kept == 0


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_steps_of_another_course_equal_one_process(ranks, group):
    _compare(ranks, GROUPS[group], 2)


@pytest.mark.parametrize("way", ["nothing", "writes into its input", "skips a call", "no backward in one"])
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_stages_that_learn_of_a_group_from_each_other(ranks, way, schedule):
    _compare(ranks, [way], 3, pipeline=schedule)


def _alternating() -> tuple[list[float], dict[str, torch.Tensor], list[bool]]:
    """Two step functions in turns: losses, weights, and which steps have followed a program."""
    import smdistributed.modelparallel.torch as smp

    _, model, optimizer = _staged_model()

    @smp.step
    def plain(x: torch.Tensor) -> torch.Tensor:
        loss = _loss(model, x, "")
        model.backward(loss)
        return loss

    @smp.step
    def doubled(x: torch.Tensor) -> torch.Tensor:
        loss = _loss(model, x, "") + _loss(model, x, "")
        model.backward(loss)
        return loss

    losses, followed = [], []
    for number in range(16):
        losses.append(float((plain, doubled)[number % 2](_batch(number, "")).reduce_mean()))
        optimizer.step()
        optimizer.zero_grad()
        followed.append(any(smp.allgather(model.pipeline.context.root_program.was_followed, smp.PP_GROUP)))
    return losses, model.state_dict(), followed


def test_two_step_functions_in_turns_have_a_program_each(ranks):
    config = {"ddp": True, "partitions": 2, "microbatches": PARTS, "auto_partition": False, "default_partition": 1}
    torch.manual_seed(0)
    net = Net().double()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for number in range(16):
        losses.append(sum(_losses_alone(net, number, ("", "the model twice")[number % 2])))
        optimizer.step()
        optimizer.zero_grad()
    for found, weights, followed in ranks(_alternating, 2, config={**config, "step_program": True}):
        assert found == pytest.approx(losses, rel=1e-9)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-9)
        assert all(followed[-4:]), followed


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


def _count_work(layers: int) -> dict[str, Any]:
    """Count what a stage does beside its modules in a step that follows a program; see the test for the names."""
    from unittest import mock

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.pipeline.execution import module_server
    from smp_runtime.pipeline.execution.task_scheduler import TaskScheduler

    model, batch = small_chain(layers), torch.ones(PARTS, 4)
    train = summing_step(model)
    for _ in range(8):
        train(batch)
    scheduler, counts = (
        model.pipeline.context.scheduler,
        dict.fromkeys(("pieces", "woken", "waits", "pack", "outcome_of"), 0),
    )
    run, hand_over = TaskScheduler._raised_by, TaskScheduler._hand_over

    def counted(self: TaskScheduler, task: Any) -> BaseException | None:
        counts["pieces"] += task.group is not None
        return run(self, task)

    def counted_hand_over(self: TaskScheduler) -> None:
        hand_over(self)
        goes_on = "next" in self._local.__dict__
        counts["woken"] += self._running is not None and not goes_on

    def count(name: str, function: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            task = scheduler.current
            counts[name] += task is not None and task.group is not None
            return function(*args, **kwargs)

        return counting

    patches = contextlib.ExitStack()
    with patches:
        for name in ("outcome_of", "pack"):
            patches.enter_context(mock.patch.object(module_server, name, count(name, getattr(module_server, name))))
        patches.enter_context(mock.patch.object(TaskScheduler, "wait", count("waits", TaskScheduler.wait)))
        patches.enter_context(mock.patch.object(TaskScheduler, "_raised_by", counted))
        patches.enter_context(mock.patch.object(TaskScheduler, "_hand_over", counted_hand_over))
        train(batch)
    followed = any(smp.allgather(model.pipeline.context.root_program.was_followed, smp.PP_GROUP))
    return {**counts, "followed": followed}


def test_a_piece_of_a_program_neither_waits_nor_packs(ranks):
    settings = {"partitions": 2, "microbatches": PARTS, "auto_partition": False, "default_partition": 0}
    _, stage = ranks(_count_work, 2, 5, config={**settings, "step_program": True})
    assert stage["followed"]
    assert stage["pieces"] == 2 * 5 * PARTS
    # Its result is compared by shape and type. It runs to its end on the thread that has begun it.
    assert stage["outcome_of"] == stage["pack"] == stage["waits"] == 0
    # Pieces of a group follow each other on one thread, unless another microbatch comes in between: a thread is woken at most
    # by each message, of which the first group of five has two.
    assert stage["woken"] <= 3 * PARTS


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
