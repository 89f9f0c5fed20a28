"""What a script reads between ``smp.reshape`` and the next step is what it was before, and buffers move as they are by then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.platform.memory_told import told
from support.training.reshape_training import settings_of, train_alone
from torch import nn


def _equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


def _states_are_equal(one, other):
    assert [group["params"] for group in one["param_groups"]] == [group["params"] for group in other["param_groups"]]
    assert one["state"].keys() == other["state"].keys()
    assert one["state"]
    for number, values in one["state"].items():
        for key, value in values.items():
            assert torch.equal(value.cpu(), other["state"][number][key].cpu()), (number, key)


def _read(names, path):
    from support.training.checkpoint_training import Training

    import smdistributed.modelparallel.torch as smp

    run = Training(divided=True)
    losses = run.train(0, 2)
    for number, name in enumerate(names):
        before, states = run.model.state_dict(), run.optimizer.state_dict()
        before = {name: value.clone() for name, value in before.items()}
        smp.reshape(settings_of(name))
        assert _equal(run.model.state_dict(), before)
        _states_are_equal(run.optimizer.state_dict(), states)
        assert not any(p.is_meta for p in run.model.local_parameters())
        assert smp.memory_checkpoint(run.model, run.optimizer, {"step": 2 + number})
        run.save(path, f"full-{number}", 2 + number, partial=False)
        if smp.rank() == 0:
            assert _equal(torch.load(f"{path}/full-{number}"), before)
        run.save(path, f"partial-{number}", 2 + number)
        assert run.resume(path, f"partial-{number}") == 2 + number
        assert run.resume(path, f"full-{number}", partial=False) == 2 + number
        smp.reshape(settings_of("dp2"))  # at once
        assert _equal(run.model.state_dict(), before)
        smp.reshape(settings_of(name))
        losses += run.train(2 + number, 3 + number)
    return losses


@pytest.mark.parametrize("names", [["pp2-tp2"], pytest.param(["pp4", "tp2-s2", "pp2-s2"], marks=pytest.mark.full)])
def test_state_is_as_before_until_the_next_step(ranks, tmp_path, names):
    expected = ranks(train_alone, 1, 2 + len(names), config={})[0]
    config = settings_of("dp2")
    for losses in ranks(_read, 4, names, str(tmp_path / "saved"), config=config, env=told(tmp_path), timeout=120):
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5


class _Counting(nn.Linear):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("steps", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 0.1
        return torch.tanh(super().forward(x)) * self.steps


class _Buffers(nn.Module):
    """Layers with every kind of buffer: not saved, shared, resized while it trains, and registered later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Counting() for _ in range(4))
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.register_buffer("wide", torch.ones(4).expand(2, 4), persistent=False)
        self.layers[2].register_buffer("same", self.layers[0].steps, persistent=False)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + self.shift + self.wide[1]
        return x


def _buffers_through(names):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = smp.DistributedModel(_Buffers().double())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    module = model.module

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for number, name in enumerate([None, *names]):
        if name is not None:
            smp.reshape(settings_of(name, microbatches=1))
            shapes = {name: tuple(b.shape) for name, b in module.named_buffers()}
            assert (shapes["seen"], shapes["late"]) == ((number,), (1,)), shapes
            assert module.late.dtype is torch.int32
            assert "late" not in model.state_dict()
            assert "seen" in model.state_dict()
        module.seen = torch.full((number + 1,), 2.0)
        module.register_buffer("late", torch.tensor([number], dtype=torch.int32), persistent=False)
        losses.append(float(step(torch.ones(4, 4, dtype=torch.float64)).reduce_mean()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, module.late.item(), module.seen.tolist()


def test_buffers_move_as_they_are_by_then(ranks):
    names = "pp2-tp2 pp4 s4 tp2 dp2".split()
    expected = ranks(_buffers_alone, 1, len(names) + 1, config={})[0]
    for losses, late, seen in ranks(_buffers_through, 4, names, config=settings_of("dp2", microbatches=1), timeout=60):
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-12
        assert (late, seen) == (len(names), [2.0] * (len(names) + 1))


def _buffers_alone(steps: int) -> list[float]:
    torch.manual_seed(0)
    module = _Buffers().double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(steps):
        loss: Any = module(torch.ones(4, 4, dtype=torch.float64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _refused_at_the_end():
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import SMPUserError
    from smp_runtime.model.stages import Stages

    torch.manual_seed(0)
    model = smp.DistributedModel(_Buffers().double())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for number in range(4):
        if number == 2:
            before, states = model.state_dict(), optimizer.state_dict()
            original, Stages.start = Stages.start, _fails
            try:
                with pytest.raises(SMPUserError, match="on purpose"):
                    smp.reshape(settings_of("pp2", microbatches=1))
            finally:
                Stages.start = original
            assert _equal(model.state_dict(), before)
            _states_are_equal(optimizer.state_dict(), states)
        losses.append(float(step(torch.ones(4, 4, dtype=torch.float64)).reduce_mean()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _fails(*_):
    from smp_runtime.errors import SMPUserError

    raise SMPUserError("on purpose")


def test_a_refusal_at_the_end_leaves_the_job_as_it_was(ranks):
    expected = ranks(_buffers_alone, 1, 4, config={})[0]
    for losses in ranks(_refused_at_the_end, 2, config=settings_of("dp2", microbatches=1), timeout=60):
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-12


def _norms_through(names):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))]
    model = smp.DistributedModel(nn.Sequential(*layers).double())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def buffers(state):
        return {name: value.clone() for name, value in state.items() if "running" in name or "num_b" in name}

    for number, name in enumerate(names):
        # Every replica has another batch, as jobs do.
        step(torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(smp.dp_rank())) + number)
        optimizer.step()
        optimizer.zero_grad()
        first = smp.state.ranks.control.broadcast(buffers(model.state_dict()), list(range(smp.size())))
        smp.reshape(settings_of(name))
        assert _equal(buffers(model.state_dict()), first), name
    return True


def test_buffers_are_those_of_the_first_replica(ranks):
    names = "pp2-tp2 s4 pp4 tp2 dp2 pp2-s2 tp2-s2".split()
    assert all(ranks(_norms_through, 4, names, config=settings_of("s2-dp2"), timeout=60))


@pytest.mark.parametrize("half", [{}, {"bf16": True}])
def test_types_stay(ranks, half):
    assert all(ranks(_types_through, 2, half, config=settings_of("pp2", **half), timeout=60))


class _Asking(nn.Module):
    """Modules whose types differ, and code that asks for them, wherever they are."""

    def __init__(self, types) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4).to(dtype) for dtype in types)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(x.to(part.weight.dtype)))
        return x.float()


class _Float32Momentum(torch.optim.SGD):
    """Keeps its momentum in float32, whatever the weights are."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
                    momentum.mul_(0.9).add_(p.grad.float())
                    p.sub_((0.1 * momentum).to(p.dtype))


def _types_through(half):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    types = [torch.float32] * 4 if half else [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16]
    module = _Asking(types)
    model = smp.DistributedModel(module)
    for number, part in enumerate(module.parts):
        smp.set_partition(part, number // 2)
    optimizer = smp.DistributedOptimizer(_Float32Momentum(model.parameters(), lr=0.1))

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def go():
        loss = step(torch.ones(4, 4))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    go()
    for name in "dp2 pp2 s2 o2 pp2".split():
        before = model.state_dict()
        state = optimizer.state_dict()
        smp.reshape(settings_of(name, **half))
        assert _equal(model.state_dict(), before)
        after = optimizer.state_dict()
        _states_are_equal(after, state)
        kinds = {v.dtype for values in after["state"].values() for v in values.values()}
        assert kinds == {torch.float32}
        wanted = [torch.bfloat16] * 4 if half else types
        assert [p.dtype for p in module.parameters()][::2] == wanted  # of absent ones, too
        go()
    return True
