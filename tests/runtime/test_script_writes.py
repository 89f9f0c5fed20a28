"""What a script writes into parameters and gradients between the library's calls counts, as in one process."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

STEPS, BATCH = 3, 8
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}
BASE = {"ddp": True, "microbatches": 2}
MODES = {
    "ddp": (2, {}),
    "shard_optimizer_state": (2, {"shard_optimizer_state": True}),
    "sdp": (2, SHARDED),
    "pp": (2, {"pipeline_parallel_degree": 2}),
    "tp": (2, {"tensor_parallel_degree": 2}),
    "pp, shard_optimizer_state": (4, {"pipeline_parallel_degree": 2, "shard_optimizer_state": True}),
    "pp, sdp": (4, {"pipeline_parallel_degree": 2, **SHARDED}),
    "tp, shard_optimizer_state": (4, {"tensor_parallel_degree": 2, "shard_optimizer_state": True}),
    "tp, sdp": (4, {"tensor_parallel_degree": 2, "prescaled_batch": True, **SHARDED}),
}


class Block(nn.Module):
    """A residual block, with a weight that it limits itself if it is told to."""

    def __init__(self, limits=False):
        super().__init__()
        self.norm, self.up, self.down, self.limits = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), limits

    def forward(self, x):
        if self.limits:
            with torch.no_grad():
                self.up.weight.clamp_(-0.2, 0.2)
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks between two layers."""

    def __init__(self, limits=False):
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(limits) for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _in_place(p):
    p.mul_(0.5)


def _set_slice(p):
    p[:2] = 0.125


def _detached(p):
    p.detach().clamp_(-0.2, 0.2)


def _view(p):
    p.view(-1)[:3].fill_(0.0625)


def _out(p):
    torch.mul(p, 0.5, out=p)


def _data(p):
    p.data.mul_(0.5)


def _data_slice(p):
    p.data[:1] = 0.1


def _data_view(p):
    p.data.view(-1).add_(0.01)


def _assigned(p):
    p.data = torch.full_like(p, 0.05)


def _assigned_clone(p):
    p.data = p.data.clone()


def _initialized(p):
    nn.init.constant_(p, 0.03)


def _foreach(p):
    torch._foreach_mul_([p.data], 0.75)


def _own_arithmetic(p):
    p.copy_(p * 0.5 + 0.01)


def _average(p):
    p.lerp_(p.detach().clone() * 0.5, 0.5)


WRITES = [
    _in_place, _set_slice, _detached, _view, _out, _data, _data_slice, _data_view, _assigned, _assigned_clone, _initialized,
    _foreach, _own_arithmetic, _average,
]  # fmt: skip


def _scaled(p):
    p.grad.mul_(0.5)


def _zeroed(p):
    p.grad.zero_()


def _dropped(p):
    p.grad = None


def _deleted(p):
    del p.grad


def _replaced(p):
    p.grad = p.grad * 0.25


def _through_data(p):
    p.grad.data.mul_(0.5)


def _normalized(p):
    p.grad.div_(p.grad.abs().max() + 1)


def _given(p):
    p.grad = torch.full_like(p, 0.01)


GRADIENTS = [_scaled, _zeroed, _dropped, _deleted, _replaced, _through_data, _given]


def _batch(index, dtype):
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(BATCH, 8, generator=generator, dtype=dtype), torch.randint(0, 5, (BATCH,), generator=generator)


def _loss(scores, targets):
    return nn.functional.cross_entropy(scores, targets)


def _events(whole):
    """A write before the first step and after every step, an edit of gradients before every update."""
    gradients = [*GRADIENTS, *([_normalized] if whole else [])]
    writes = [write for write in WRITES if whole or write not in (_set_slice, _view, _data_slice)]
    count = max(len(writes), len(gradients))
    return [(writes[i % len(writes)], gradients[i % len(gradients)]) for i in range(count)]


def _change(model, write, only=""):
    with torch.no_grad() if only != "grad" else contextlib.nullcontext():
        for name, parameter in model.named_parameters():
            if "norm" not in name and (only != "grad" or parameter.grad is not None):
                write(parameter)


def _change_group(optimizer, index):
    """Some scripts go through what the optimizer has in its groups."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if index % 3 == 1:
                with torch.no_grad():
                    parameter.mul_(0.9)
            if index % 3 == 2 and parameter.grad is not None:
                parameter.grad.mul_(0.5)


def _alone(dtype, limits=False, whole=True, makes=None):
    torch.manual_seed(0)
    model = Net(limits).to(dtype)
    optimizer = (makes or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(model.parameters())
    losses = []
    for index, (write, edit) in enumerate(_events(whole)):
        _change(model, write)
        if index % 3 == 1:
            _change_group(optimizer, index)
        x, y = _batch(index, dtype)
        optimizer.zero_grad()
        losses.append(_loss(model(x), y))
        losses[-1].backward()
        _change(model, edit, only="grad")
        if index % 3 == 2:
            _change_group(optimizer, index)
        optimizer.step()
    return [float(loss.detach()) for loss in losses], {n: v.clone() for n, v in model.state_dict().items()}


def _trained(dtype, limits=False, whole=True):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    net = Net(limits).to(dtype)
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(net, True)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), static_loss_scale=8.0
    )

    @smp.step
    def step(x, y):
        loss = _loss(model(x), y)
        model.backward(loss)
        return loss

    common = smp.state.cfg.prescaled_batch
    rank, size = (smp.rdp_rank(), smp.rdp_size()) if common else (smp.dp_rank(), smp.dp_size())
    losses = []
    for index, (write, edit) in enumerate(_events(whole)):
        _change(model, write)
        if index % 3 == 1:
            _change_group(optimizer, index)
        x, y = _batch(index, dtype)
        optimizer.zero_grad()
        mean = float(step(x.chunk(size)[rank], y.chunk(size)[rank]).reduce_mean())
        losses.append(sum(smp.allgather(mean, smp.WORLD)) / smp.size())
        _change(model, edit, only="grad")
        if index % 3 == 2:
            _change_group(optimizer, index)
        optimizer.step()
    return losses, {n: v.cpu().clone() for n, v in model.state_dict().items()}


def _compare(found, wanted, tolerance):
    losses, weights = found
    assert losses == pytest.approx(wanted[0], rel=tolerance, abs=tolerance)
    for name, value in wanted[1].items():
        mine = weights[name].to(value.dtype)
        assert (mine - value).abs().max() <= tolerance * max(1.0, float(value.abs().max())), name


LARGE = [pytest.param(mode, marks=pytest.mark.full) if MODES[mode][0] > 2 else mode for mode in MODES]


@pytest.mark.parametrize("mode", LARGE)
def test_any_write_counts_as_in_one_process(ranks, mode):
    world, config = MODES[mode]
    whole = "tp" not in mode
    found = ranks(_trained, world, torch.float64, False, whole, config={**BASE, **config})
    _compare(found[0], _alone(torch.float64, whole=whole), 1e-9)


@pytest.mark.parametrize("half", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", LARGE)
def test_any_write_reaches_float32_copies(ranks, mode, half):
    world, config = MODES[mode]
    whole = "tp" not in mode
    found = ranks(_trained, world, torch.float32, False, whole, config={**BASE, **config, half: True})
    _compare(found[0], _alone(torch.float32, whole=whole), 2e-2)


@pytest.mark.parametrize("mode", LARGE)
def test_a_module_may_change_its_weight_in_forward(ranks, mode):
    world, config = MODES[mode]
    microbatches = 1 if "pp" in mode else 2  # of the next one, forward comes before backward of the one before
    found = ranks(_trained, world, torch.float64, True, False, config={**BASE, **config, "microbatches": microbatches})
    _compare(found[0], _alone(torch.float64, limits=True, whole=False), 1e-9)


class Exchanging(torch.optim.SGD):
    """Moves weights to an average for evaluation, and back, as schedule-free optimizers do."""

    @torch.no_grad()
    def eval(self):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.mul_(0.5)

    @torch.no_grad()
    def train(self):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.mul_(2)


def _exchanged(dtype):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = smp.DistributedModel(Net().to(dtype))
    optimizer = smp.DistributedOptimizer(Exchanging(model.parameters(), lr=0.1))

    @smp.step
    def step(x, y):
        loss = _loss(model(x), y)
        if torch.is_grad_enabled():
            model.backward(loss)
        return loss

    losses = []
    for index in range(2):
        x, y = _batch(index, dtype)
        x, y = (tensor.chunk(smp.dp_size())[smp.dp_rank()] for tensor in (x, y))
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()
        optimizer.eval()
        with torch.no_grad():
            mean = float(step(x, y).reduce_mean())
        losses.append(sum(smp.allgather(mean, smp.WORLD)) / smp.size())
        optimizer.train()
    return losses, {name: value.cpu().clone() for name, value in model.state_dict().items()}


def _exchanged_alone(dtype):
    torch.manual_seed(0)
    model = Net().to(dtype)
    optimizer = Exchanging(model.parameters(), lr=0.1)
    losses = []
    for index in range(2):
        x, y = _batch(index, dtype)
        optimizer.zero_grad()
        _loss(model(x), y).backward()
        optimizer.step()
        optimizer.eval()
        losses.append(float(_loss(model(x), y).detach()))
        optimizer.train()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("mode", "half"), [("shard_optimizer_state", False), ("shard_optimizer_state", True), ("sdp", False), ("pp", True)]
)
def test_weights_that_a_method_of_the_optimizer_moves_reach_the_model(ranks, mode, half):
    world, config = MODES[mode]
    dtype = torch.float32 if half else torch.float64
    found = ranks(_exchanged, world, dtype, config={**BASE, **config, **({"bf16": True} if half else {})})
    _compare(found[0], _exchanged_alone(dtype), 2e-2 if half else 1e-9)


def _filled_by_the_library():
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.sharding.flat_unit import ShardedUnit

    filled, fill = [], ShardedUnit.fill_from_shard

    def counted(unit):
        filled.append(unit.name)
        fill(unit)

    ShardedUnit.fill_from_shard = counted
    try:
        model = smp.DistributedModel(Net())
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

        @smp.step
        def step(x, y):
            loss = _loss(model(x), y)
            model.backward(loss)
            return loss

        for index in range(2):
            optimizer.zero_grad()
            step(*_batch(index, torch.float32))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.state_dict()
            optimizer.state_dict()
        for parameter in model.parameters():
            data = parameter.data
            assert (data.numel(), data.shape, data.dtype) == (parameter.numel(), parameter.shape, parameter.dtype)
        return filled
    finally:
        ShardedUnit.fill_from_shard = fill


@pytest.mark.parametrize("mode", ["sdp", pytest.param("pp, sdp", marks=pytest.mark.full)])
def test_nothing_but_the_script_gives_sharded_parameters_memory_outside_their_use(ranks, mode):
    world, config = MODES[mode]
    assert ranks(_filled_by_the_library, world, config={**BASE, **config}) == [[]] * world
