"""In half precision training, buffers that forward adds to stay in float32; those that it only reads do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.parameters.running_buffers import is_running

NAMES = ("added", "scaled", "assigned", "copied", "helped", "below", "indexed", "aliased", "written", "data")
READ = ("read", "cache", "last", "overwritten", "reset")


def helper(moving, new, decay):
    moving.data.mul_(decay).add_(new, alpha=1 - decay)


class Buffers(nn.Module):
    """Every way to change a buffer that scripts have, and buffers that are read or written anew."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name in (*NAMES, *READ):
            self.register_buffer(name, torch.ones(8))

    def forward(self, x):
        with torch.no_grad():
            now = x.detach().float().mean(0)
            self.added += 0.001
            self.scaled.mul_(0.999)
            self.assigned = 0.999 * self.assigned + 0.001 * now
            later = self.copied.lerp(now, 0.001)
            self.copied.copy_(later)
            helper(self.helped, now, 0.999)
            self._below(now)
            self.indexed[:4] = self.indexed[:4] * 0.999
            alias = self.aliased
            alias.sub_(0.001)
            torch.mul(self.written, 0.999, out=self.written)
            self.data.data = self.data.data * 0.999
            self.cache = now.cos()
            self.last.copy_(now)
            self.overwritten[:4] = now[:4]
        return self.layer(x * self.read) + self.added.sum() * 0

    def _below(self, now):
        self.below.lerp_(now, 0.001)

    def clear(self):
        self.reset.mul_(0)


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ema_0", torch.ones(8))

    def forward(self, x):
        for number in range(1):
            getattr(self, f"ema_{number}").mul_(0.999)
        return x


class InLoop(ByName):
    def forward(self, x):
        for _, buffer in self.named_buffers():
            buffer.mul_(0.999)
        return x


def test_buffers_whose_new_value_depends_on_the_old_one_are_found():
    module = Buffers()
    assert [name for name, _ in module.named_buffers() if is_running(module, name)] == list(NAMES)
    for kind in (ByName, InLoop):
        assert is_running(kind(), "ema_0")
    for norm in (nn.BatchNorm1d(4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)):
        assert is_running(norm, "running_mean")
    assert not is_running(nn.InstanceNorm2d(4), "anything")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.buffers_here, self.norm = nn.Linear(8, 8), Buffers(), nn.BatchNorm1d(8, momentum=0.001)
        self.by_name, self.head = ByName(), nn.Linear(8, 5)

    def forward(self, x, y):
        x = self.norm(self.buffers_here(self.first(x)))
        x = self.by_name(x) * self.by_name.ema_0
        return nn.functional.cross_entropy(self.head(x), y)


def _trained(model, step, update):
    drawn = torch.Generator().manual_seed(1)
    for _ in range(20):
        step(torch.randn(8, 8, generator=drawn) * 3 + 5, torch.randint(0, 5, (8,), generator=drawn))
        update()
    return {name.removeprefix("module."): value.cpu() for name, value in model.state_dict().items()}


def _plain():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x, y):
        optimizer.zero_grad()
        for part in zip(x.chunk(2), y.chunk(2), strict=True):
            (model(*part) / 2).backward()

    return _trained(model, step, optimizer.step)


def _wrapped():
    torch.manual_seed(0)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), static_loss_scale=128.0)

    @smp.step
    def step(x, y):
        optimizer.zero_grad()
        model.backward(model(x, y))

    return _trained(model, step, optimizer.step)


def _check(found, wanted):
    changed = [f"buffers_here.{name}" for name in NAMES] + ["by_name.ema_0", "norm.running_mean", "norm.running_var"]
    for name in changed:
        assert found[name].dtype is torch.float32, name
        torch.testing.assert_close(
            found[name], wanted[name], rtol=2e-2, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert int(found["norm.num_batches_tracked"]) == 40
    torch.testing.assert_close(found["buffers_here.scaled"], torch.full((8,), 0.999**40))
    torch.testing.assert_close(found["head.weight"].float(), wanted["head.weight"], rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_running_buffers_move_in_half_precision(solo, half):
    solo({half: True, "microbatches": 2})
    found = _wrapped()
    _check(found, _plain())
    kind = torch.bfloat16 if half == "bf16" else torch.float16
    assert found["buffers_here.read"].dtype is kind
    assert found["head.weight"].dtype is kind


def test_a_state_of_running_buffers_goes_on(solo):
    solo({"bf16": True, "microbatches": 2})
    state = _wrapped()
    torch.manual_seed(5)
    model = smp.DistributedModel(Net())
    model.load_state_dict(state)
    for name in NAMES:
        assert torch.equal(model.state_dict()[f"buffers_here.{name}"], state[f"buffers_here.{name}"]), name
    assert torch.equal(model.state_dict()["norm.running_mean"], state["norm.running_mean"])


@pytest.mark.parametrize(
    "config",
    [
        {"shard_optimizer_state": True},
        {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9},
        {},
    ],
    ids=["state", "sharding", "ddp"],
)
def test_running_buffers_move_under_every_strategy(ranks, config):
    wanted = _plain()
    for found in ranks(_wrapped, 2, config={"ddp": True, "bf16": True, "microbatches": 2, **config}):
        _check(found, wanted)
