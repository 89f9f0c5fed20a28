"""Clipping, and optimizers that look at norms, do what they do in one process, wherever the gradients lie."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from support.canaries import RELEASE
from support.logs import logged
from support.matrix import sampled
from support.training.closeness import close
from support.training.reference import Alone, train_alone
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.optim.clipping import wrapped_function

STEPS, BATCH = 5, 8
UNCLIPPED = {"sdp_gradient_clipping": 1e30, "sdp_param_persistence_threshold": 20}
TENSOR = {"tensor_parallel_degree": 2, "prescaled_batch": True}
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0}
LAYOUTS = {
    "ddp": (2, {}),
    "tp": (2, TENSOR),
    "pp": (2, STAGES),
    "state": (2, {"shard_optimizer_state": True}),
    "sharding": (2, {"sharded_data_parallel_degree": 2, **UNCLIPPED}),
    "tp-state": (4, {"shard_optimizer_state": True, **TENSOR}),
    "tp-state-batches": (4, {"shard_optimizer_state": True, "tensor_parallel_degree": 2}),
    "tp-state-no-replicas": (2, {"shard_optimizer_state": True, "tensor_parallel_degree": 2}),
    "tp-pp": (4, {**STAGES, **TENSOR}),
    "tp-sharding": (4, {"sharded_data_parallel_degree": 2, **UNCLIPPED, **TENSOR}),
    "pp-state": (4, {"shard_optimizer_state": True, **STAGES}),
}
NORMS = {"2": 2.0, "3": 3.0, "inf": float("inf")}


class Net(nn.Module):
    """A layer that tensor parallel ranks split, between ordinary ones; its halves have gradients of different size."""

    def __init__(self, make_linear=nn.Linear):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.between = make_linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):  # [batch, 8] -> [batch, 1]
        x = self.norm(self.first(x))
        return self.head(torch.tanh(self.between(x * torch.linspace(0.1, 3.0, 16, dtype=x.dtype)) * 0.3))


def _reference():
    torch.manual_seed(0)
    return Net()


def _batch(step):
    return torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))


def _loss(outputs):
    return 10 * (outputs.float() - 1.0).square().mean()


def _loss_of(model, x):
    return _loss(model(x))


def _alone(make, limit=None, norm_type=2.0):
    batches = ((_batch(step),) for step in range(STEPS))
    alone = train_alone(_reference(), make, batches, _loss_of, limit=limit or math.inf, norm_type=norm_type)
    return alone.norms if limit is not None else [], alone.weights


def _together(make, limit=None, norm_type=2.0, clips_by="optimizer"):
    import smdistributed.modelparallel.torch as smp

    net = Net(smp.nn.DistributedLinear if smp.tp_size() > 1 else nn.Linear)
    if smp.pp_size() > 1:
        smp.set_partition(net.between, 1)
        smp.set_partition(net.head, 1)
    model = smp.DistributedModel(net, bucket_cap_mb=800 / 2**20)
    model.load_state_dict(_reference().state_dict())
    optimizer, norms = smp.DistributedOptimizer(make(model.parameters())), []

    @smp.step
    def train(x):
        model.backward(_loss(model(x)))

    replicas = smp.rdp_size() if smp.state.cfg.prescaled_batch else smp.dp_size()
    mine = smp.rdp_rank() if smp.state.cfg.prescaled_batch else smp.dp_rank()
    for step in range(STEPS):
        optimizer.zero_grad()
        train(_batch(step).chunk(replicas)[mine])
        if limit is not None:
            if clips_by == "pytorch":
                norms.append(float(clip_grad_norm_(model.parameters(), limit, norm_type)))
            else:
                norms.append(optimizer.clip_master_grads(limit, norm_type))
        optimizer.step()
    return norms, model.state_dict()


def _compare(results, expected, tolerance=1e-5):
    for norms, state in results:
        assert norms == pytest.approx(expected[0], rel=1e-4)
        for name, value in expected[1].items():
            close(state[name].float(), value, name, tolerance)


def _sampled(cases):
    """In the normal run the richest layouts with the first norm, and the others with one."""
    always = {"ddp", "sharding", "tp-pp", "pp-state"}
    return [
        pytest.param(
            layout,
            other,
            marks=[] if layout in (always if other == cases[0] else ("sharding",)) else pytest.mark.full,
        )
        for layout in LAYOUTS
        for other in cases
    ]


@pytest.mark.parametrize(("layout", "norm_type"), _sampled(list(NORMS)))
def test_clipping_is_that_of_one_process(ranks, layout, norm_type):
    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    world, config = LAYOUTS[layout]
    expected = _alone(make, 0.5, NORMS[norm_type])
    assert min(expected[0]) > 0.5
    # PyTorch's own function, imported before the job began, does the same.
    by = "pytorch" if NORMS[norm_type] == 2.0 or layout == "sharding" else "optimizer"
    _compare(ranks(_together, world, make, 0.5, NORMS[norm_type], by, config={"ddp": True, **config}), expected)


@pytest.mark.parametrize(("layout", "kind"), _sampled(["lamb", "novograd"]))
def test_optimizers_that_look_at_norms_are_those_of_one_process(ranks, layout, kind):
    def make(parameters):
        import smdistributed.modelparallel.torch as smp

        if kind == "lamb":
            return smp.optimizers.FusedLAMB(parameters, lr=1e-2, max_grad_norm=0.3)
        return smp.optimizers.FusedNovoGrad(parameters, lr=1e-2, weight_decay=0.01)

    world, config = LAYOUTS[layout]
    _compare(ranks(_together, world, make, config={"ddp": True, **config}), _alone(make))


def test_a_small_gradient_stays_as_it_is_and_other_norms_are_refused(solo):
    solo({})
    model = smp.DistributedModel(nn.Linear(2, 1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    model(torch.ones(1, 2)).sum().backward()
    assert optimizer.clip_master_grads(5.0) == pytest.approx(3.0**0.5)
    assert model.module.weight.grad.tolist() == [[1.0, 1.0]]
    for norm_type in (0.0, -1.0, float("nan")):
        with pytest.raises(SMPUserError, match=r"norm_type is .*; gradients .* p-norm.*: use a number above 0"):
            optimizer.clip_master_grads(1.0, norm_type)


@pytest.mark.parametrize("config", [{"shard_optimizer_state": True}, LAYOUTS["sharding"][1], {"bf16": True}])
def test_a_parameter_outside_the_model_counts_once(ranks, config):
    def run():
        import smdistributed.modelparallel.torch as smp

        model, outside = smp.DistributedModel(_reference()), nn.Parameter(torch.ones(2))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD([*model.parameters(), outside], lr=0.1))
        outside.grad = torch.tensor([3000.0, 4000.0])
        return optimizer.clip_master_grads(0.5), outside.grad.tolist()

    for norm, outside in ranks(run, 2, config={"ddp": True, **config}):
        assert norm == pytest.approx(5000.0)
        assert outside == pytest.approx([0.3, 0.4])


def test_an_overflow_stays_while_other_gradients_come(solo):
    solo({"fp16": True})
    model = smp.DistributedModel(nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), static_loss_scale=4.0)
    first, second = model.module
    for layer, value in ((first, float("inf")), (second, 1.0)):
        model.backward(layer(torch.full((1, 2), value, dtype=torch.float16)).sum())
        assert optimizer.clip_master_grads(1.0) == float("inf")
        assert optimizer.overflow
    optimizer.zero_grad()
    model.backward(second(torch.ones(1, 2, dtype=torch.float16)).sum())
    assert optimizer.clip_master_grads(5.0) == pytest.approx(3.0**0.5)
    assert not optimizer.overflow


def _clipped_at_every_pass(alone, steps):
    """Several backward passes in every step, whose gradients add up, clipped after each."""
    for batches in steps:
        alone.optimizer.zero_grad()
        for x in batches:
            alone.backward(_loss_of, x)
            alone.clip()
        alone.optimizer.step()


def _head_alone():
    net = _reference()
    for part in (net.first, net.norm, net.between):
        part.requires_grad_(False)
    return net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("half", [{}, {"fp16": True}])
def test_a_frozen_stage_takes_part(ranks, tmp_path, half):
    def run(path):
        import smdistributed.modelparallel.torch as smp

        net, inner = _head_alone()
        for part in (net.first, net.norm, net.between):
            smp.set_partition(part, 0)
        smp.set_partition(net.head, 1)
        model, optimizer = smp.DistributedModel(net), smp.DistributedOptimizer(inner, static_loss_scale=8.0)

        @smp.step
        def train(x):
            model.backward(_loss(model(x)))

        norms = []
        for step in range(2):
            optimizer.zero_grad()
            for more in (0, 10):  # the frozen stage gets no gradient, and must notice that the other one does
                train(_batch(step + more))
                norms.append(optimizer.clip_master_grads(0.5))
            optimizer.step()
        smp.save_checkpoint(path, tag="one", model=model, optimizer=optimizer)
        smp.resume_from_checkpoint(path, tag="one")
        return norms, model.state_dict(), len(optimizer.state_dict()["state"]), optimizer.overflow

    net, optimizer = _head_alone()
    alone = Alone(net, lambda _: optimizer, limit=0.5)
    _clipped_at_every_pass(alone, [[_batch(step + more) for more in (0, 10)] for step in range(2)])
    config = {"ddp": True, **STAGES, **half}
    found = ranks(run, 2, str(tmp_path), config=config, env={"SMP_TIMEOUT_SECONDS": "10"}, timeout=40)
    for mine, state, states, overflow in found:
        assert mine == pytest.approx(alone.norms, rel=2e-2 if half else 1e-5)
        assert (states, overflow) == (2, False)
        for name, value in alone.weights.items():
            close(state[name].float(), value, name, 2e-2 if half else 1e-5)


def test_two_optimizers_may_have_a_stage_each(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        net = _reference()
        smp.set_partition(net.head, 1)
        model = smp.DistributedModel(net)
        rest = [p for name, p in net.named_parameters() if not name.startswith("head.")]
        optimizers = [
            smp.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
            for parameters in (rest, net.head.parameters())
        ]

        @smp.step
        def train(x):
            model.backward(_loss(model(x)))

        norms = []
        for step in range(2):
            train(_batch(step))
            for optimizer in optimizers:
                norms.append(optimizer.clip_master_grads(0.5))
                optimizer.step()
                optimizer.zero_grad()
        return norms, model.state_dict()

    model = (
        _reference()
    )  # two optimizers clip and update by themselves, which support.training.reference.Alone does not
    groups = [[p for n, p in model.named_parameters() if n.startswith("head.") is head] for head in (False, True)]
    norms = []
    for step in range(2):
        _loss(model(_batch(step))).backward()
        for group in groups:
            norms.append(float(nn.utils.clip_grad_norm_(group, 0.5)))
            torch.optim.SGD(group, lr=0.1).step()
        model.zero_grad()
    found = ranks(run, 2, config={"ddp": True, **STAGES}, env={"SMP_TIMEOUT_SECONDS": "10"}, timeout=40)
    _compare(found, (norms, model.state_dict()))


def _accumulated(limit, scale=1.0, backward_passes=3, clips_each=True):
    import smdistributed.modelparallel.torch as smp

    net = _reference()
    if smp.pp_size() > 1:
        smp.set_partition(net.between, 1)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=scale)
    norms = []

    def train(x):
        model.backward(_loss(model(x)))

    step = smp.step(train) if smp.pp_size() > 1 else train
    for first in range(2):
        optimizer.zero_grad()
        for index in range(backward_passes):
            step(_batch(10 * first + index).chunk(smp.dp_size())[smp.dp_rank()])
            if clips_each or index == backward_passes - 1:
                norms.append(optimizer.clip_master_grads(limit))
        optimizer.step()
    return norms, model.state_dict()


#: What gradients are clipped in, and that of the normal run's limit; the other limit is in the whole matrix.
CLIPPED = {
    "plain": ({}, 1.0),
    "bf16": ({"bf16": True}, 1e9),
    "fp16": ({"fp16": True}, 1.0),
    "state": ({"shard_optimizer_state": True}, 1e9),
    "bf16-state": ({"bf16": True, "shard_optimizer_state": True}, 1.0),
    "sharding": ({"sharded_data_parallel_degree": 2, **UNCLIPPED}, 1.0),
    "sharding-fp16": ({"sharded_data_parallel_degree": 2, "fp16": True, **UNCLIPPED}, 1e9),
    "pp-fp16": ({"fp16": True, **STAGES}, 1e9),
    "pp-bf16": ({"bf16": True, **STAGES}, 1.0),
}


@pytest.mark.parametrize(
    ("name", "limit"),
    sampled(itertools.product(CLIPPED, (1.0, 1e9)), [(name, limit) for name, (_, limit) in CLIPPED.items()]),
)
def test_backward_passes_after_clipping_add_to_what_was_clipped(ranks, name, limit):
    config, _ = CLIPPED[name]
    alone = Alone(_reference(), lambda p: torch.optim.SGD(p, lr=0.1), limit=limit)
    _clipped_at_every_pass(alone, [[_batch(10 * first + index) for index in range(3)] for first in range(2)])
    half = "bf16" in config or "fp16" in config
    for mine, state in ranks(_accumulated, 2, limit, 16.0, config={"ddp": True, **config}):
        assert mine == pytest.approx(alone.norms, rel=5e-2 if half else 1e-4)
        for name, value in alone.weights.items():
            close(state[name].float(), value, name, (5e-2 if limit == 1.0 else 2e-1) if half else 1e-5)


def test_what_cannot_be_told_apart_after_unscaling_is_refused(ranks):
    """The gradients of a shard are float32 as they are summed: no memory keeps what they were before unscaling."""

    def run():
        with pytest.raises(SMPUserError, match=r"divided them by the loss scale 16 already; call these once"):
            _accumulated(1.0, 16.0)
        return _accumulated(1.0, 16.0, clips_each=False)[0]

    config = {"ddp": True, "fp16": True, "_fp32_grad_accumulation": True, "shard_optimizer_state": True}
    first, second = ranks(run, 2, config=config)
    assert first == second


def _scaled():
    import smdistributed.modelparallel.torch as smp

    net = _reference()
    smp.set_partition(net.between, 1)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = smp.amp.GradScaler(init_scale=8.0)

    @smp.step
    def train(x, factor):
        loss = _loss(model(x)) * factor.mean()
        model.backward(scaler.scale(loss))

    scales, norms = [], []
    for step in range(4):
        optimizer.zero_grad()
        train(_batch(step), torch.full((BATCH,), float("inf") if step == 2 else 1.0))
        if step != 2:
            scaler.unscale_(optimizer)
            norms.append(optimizer.clip_master_grads(0.5))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return norms, model.state_dict(), scales


def test_a_scaler_works_on_stages_that_never_scale(ranks):
    batches = ((_batch(step),) for step in (0, 1, 3))
    alone = train_alone(_reference(), lambda p: torch.optim.SGD(p, lr=0.1), batches, _loss_of, limit=0.5)
    found = ranks(_scaled, 2, config={"ddp": True, **STAGES}, env={"SMP_TIMEOUT_SECONDS": "10"}, timeout=40)
    _compare([result[:2] for result in found], (alone.norms, alone.weights))
    assert [scales for *_, scales in found] == [[8.0, 8.0, 4.0, 4.0]] * 2


def _clipped_by_pytorch():
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(_reference())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=8.0)

    @smp.step
    def train(x):
        loss = _loss(model(x))
        model.backward(loss)
        return loss

    foreign = nn.Parameter(torch.ones(2))
    foreign.grad = torch.ones(2)
    norms = [float(clip_grad_norm_(foreign, 1e9))]
    train(_batch(0))
    norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))
    norms.append(float(clip_grad_norm_(model.module.head.parameters(), 1e9)))
    with pytest.raises(RuntimeError, match="norm of order 2.0 is nan"):
        clip_grad_norm_(model.parameters(), float("nan")), clip_grad_norm_(model.parameters(), 1.0, 2.0, True)
    with logged() as said:
        for _ in range(2):
            clip_grad_norm_([*model.parameters(), foreign], 1e9)
    optimizer.zero_grad()
    return norms, [line for line in said if "clip_grad_norm_" in line]


@pytest.mark.parametrize(
    "config",
    [{"fp16": True}, {"bf16": True}, {"shard_optimizer_state": True}, STAGES],
    ids=["fp16", "bf16", "state", "pp"],
)
def test_pytorchs_clipping_is_that_of_one_process_for_parts_of_a_model_too(ranks, config):
    model = _reference()
    _loss(model(_batch(0))).backward()
    half = "fp16" in config or "bf16" in config
    whole = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    head = float(nn.utils.clip_grad_norm_(model.head.parameters(), 1e9))
    for norms, warnings in ranks(_clipped_by_pytorch, 2, config={"ddp": True, **config}):
        assert norms == pytest.approx([2**0.5, whole, head], rel=2e-2 if half else 1e-5)
        assert len(warnings) == 1
        assert "parameters of several models, or of none" in warnings[0]


def _clipped_beside_others(clip):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    net = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)))
    own = [*net.module[0].parameters(), *net.module[1].parameters()]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(own, lr=0.1), static_loss_scale=16.0)
    former = net.module[1].bias.detach().clone()
    net.backward((net(torch.arange(16.0).view(4, 4)) - torch.arange(4.0)).square().mean() + net.module[1].bias.sum())
    getattr(nn.utils, clip)(net.parameters(), 0.01)
    optimizer.step()
    return float((net.module[1].bias.detach() - former).abs().max())


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_gradients_in_a_bucket_with_those_that_no_optimizer_has_are_clipped(ranks, clip):
    for moved in ranks(_clipped_beside_others, 2, clip, config={"ddp": True, "fp16": True}):
        assert 0 < moved <= 1.001e-3


def test_pytorch_has_its_own_functions_back_after_the_session(solo):
    def functions():
        if RELEASE < (2, 6):
            return (wrapped_function(clip_grad_norm_).cell_contents,)
        return clip_grad._clip_grads_with_norm_, clip_grad._get_total_norm

    own = functions()
    session = solo({"fp16": True})
    smp.DistributedModel(nn.Linear(2, 2))
    assert not set(own) & set(functions())
    session.close()
    assert functions() == own


def test_what_a_wrapper_calls_can_be_replaced():
    """As PyTorch before 2.6 wraps ``clip_grad_norm_``, which a script holds under a name of its own."""

    def no_grad(function):
        @functools.wraps(function)
        def wrapper(*args):
            with torch.no_grad():
                return function(*args)

        return wrapper

    @no_grad
    def clip(x):
        return x, torch.is_grad_enabled()

    imported = clip
    cell = wrapped_function(clip)
    cell.cell_contents = functools.wraps(cell.cell_contents)(lambda x: (-x, torch.is_grad_enabled()))
    assert imported(3) == (-3, False)
    assert wrapped_function(clip) == cell
    with pytest.raises(SMPRuntimeError, match="has a torch.nn.utils._loss that cannot be made to measure"):
        wrapped_function(_loss)
