"""Stand-ins for what lies on another stage: loops over all parameters go on, and no use of elements passes silently."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.training.rank_training import training_step, updates
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.microbatch_state.remote_stubs import (
    RemoteStub,
    RemoteStubAttribute,
    RemoteStubParameter,
    absent_parameter,
)
from smp_runtime.pipeline.transport.tensor_channels import to_dense
from smp_runtime.tensors.torch_private import swap_contents


def _absent_linear():
    """A layer whose weight lies elsewhere, and a parameter of this rank."""
    layer = nn.Linear(3, 3)
    swap_contents(layer.weight, absent_parameter(layer.weight, "layer.weight", 1))
    return layer, nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize(
    "harmless",
    [
        lambda p, own: p.mul_(0.9).add_(p, alpha=0.1),
        lambda p, own: p.data.mul_(0.9).add_(p.data * 0.1),
        lambda p, own: p.copy_(torch.ones(3, 3)),
        lambda p, own: p.mul_(torch.tensor(0.5)).add_(torch.ones(3, 3)),
        lambda p, own: (p * torch.tensor(0.5)).norm(),
        lambda p, own: torch.cat([p, p]).max(0).values,
        lambda p, own: nn.init.normal_(p),
        lambda p, own: torch._foreach_lerp_([p, own], [p, own], 0.5)[0],
        lambda p, own: copy.deepcopy(p),
        lambda p, own: p.detach().clone().double(),
        lambda p, own: torch.zeros_like(p),
    ],
)
def test_what_needs_no_elements_of_this_rank_is_harmless(harmless):
    layer, own = _absent_linear()
    with torch.no_grad():
        assert isinstance(harmless(layer.weight, own), RemoteStub)
    assert own.equal(torch.ones(3, 3))


@pytest.mark.parametrize(
    "use",
    [
        lambda p, own: own.add_(p, alpha=0.1),
        lambda p, own: p.add_(own),
        lambda p, own: own.data.mul_(0.9).add_(p.data * 0.1),
        lambda p, own: torch._foreach_lerp_([own, p], [p, own], 0.5),
        lambda p, own: F.linear(torch.ones(2, 3), p),
        lambda p, own: own.sum() + p.sum(),
        lambda p, own: torch.tensor(1.0) + p.sum(),
        lambda p, own: torch.cat([own, p]),
        lambda p, own: p.sum().item(),
        lambda p, own: p.tolist(),
        lambda p, own: p.detach().numpy(),
        lambda p, own: p.cpu(),
        lambda p, own: p.to("cpu"),
        lambda p, own: bool((p > 0).any()),
        lambda p, own: f"{p.norm():.3f}",
        lambda p, own: p[p > 0],
    ],
)
def test_what_needs_elements_says_where_they_are(use):
    layer, own = _absent_linear()
    with torch.no_grad(), pytest.raises(SMPUserError, match=r"layer\.weight.* lies on pipeline stage 1.*smp\.pp_rank"):
        use(layer.weight, own)


def test_a_stand_in_is_a_parameter_like_others():
    layer, own = _absent_linear()
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad is None
    assert (weight.shape, weight.dtype, weight.numel(), len(weight)) == ((3, 3), torch.float32, 9, 3)
    assert {weight: 1}[weight] == 1
    assert "stage 1" in repr(weight)
    assert "stage 1" in f"{weight}"
    optimizer = torch.optim.AdamW([weight, own], lr=0.1)
    own.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert set(optimizer.state_dict()["state"]) == {1}
    assert isinstance(copy.deepcopy(layer).weight, RemoteStubParameter)
    layer.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(3)})
    assert layer.double().weight.dtype is torch.float64
    assert isinstance(layer.weight, RemoteStubParameter)


def test_it_does_not_travel_and_says_where_it_is():
    with pytest.raises(SMPUserError, match=r"parameter layer.weight, of shape .* stage 1; put both on one stage"):
        to_dense(_absent_linear()[0].weight)


def test_pickled_it_is_a_plain_meta_tensor():
    layer, _ = _absent_linear()
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=True)["weight"]) is torch.Tensor
    again = pickle.loads(pickle.dumps(layer.weight))
    assert type(again) is nn.Parameter
    assert again.is_meta
    assert again.shape == (3, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda a: a + 1,
        lambda a: torch.ones(2) * a,
        lambda a: sum([a]),
        lambda a: torch.stack([torch.ones(2), a]),
        lambda a: bool(a),
        lambda a: list(a),
        lambda a: a.mean(),
        lambda a: a == 1,
        lambda a: float(a),
        lambda a: f"{a:.2f}",
        lambda a: setattr(a, "scale", 1),
    ],
)
def test_any_use_of_an_absent_attribute_raises(use):
    attribute = RemoteStubAttribute("layers.0", "aux_loss", 1)
    with pytest.raises(
        SMPUserError, match=r"'aux_loss' of module 'layers\.0'.*stage 1.*return the value from its forward"
    ):
        use(attribute)
    for same in (copy.deepcopy(attribute), pickle.loads(pickle.dumps(attribute))):
        assert repr(same) == repr(attribute)
        assert same is not None


# -- on ranks ------------------------------------------------------------------------------------------------------


def _teaching(stage_of_teacher, case):
    """Train a student; afterwards, or inside the step, code uses parameters and attributes of other stages."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.microbatch_state.remote_stubs import RemoteStubAttribute, RemoteStubParameter

    torch.manual_seed(0)

    class Layer(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            self.last = out.detach()
            return out

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = Layer(4, 4), Layer(4, 4)
            self.reads = False

        def forward(self, x):
            out = self.student(x) - self.teacher(x)
            if self.reads:
                out = out + torch.mm(x, self.student.weight)
            return out

    net = Net()
    if case == "weight norm":
        torch.nn.utils.weight_norm(net.student)
    for path, stage in {"student": 0, "teacher": stage_of_teacher, "": 1}.items():
        smp.set_partition(net.get_submodule(path), stage)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(x):
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    def step():
        optimizer.zero_grad()
        train(torch.ones(4, 4))
        optimizer.step()

    step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    student, teacher = model.module.student, model.module.teacher
    try:
        if case == "average":
            with torch.no_grad():
                for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.mul_(0.9).add_(other, alpha=0.1)
        elif case == "reads":
            model.module.reads = True
            step()
        elif case == "attribute" and smp.pp_rank() == 1:
            student.last.mean()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if case == "attribute":
        return "nothing"
    kinds = (
        isinstance(next(student.parameters()), RemoteStubParameter),
        isinstance(vars(student)["last"], RemoteStubAttribute),
    )
    assert kinds == (smp.pp_rank() == 1,) * 2
    state = model.state_dict()
    smp.shutdown()
    assert not isinstance(vars(student).get("last"), RemoteStubAttribute)
    return before, state


def test_an_average_of_parameters_on_one_stage_works_on_every_rank(ranks):
    done = ranks(_teaching, 2, 0, "average", config={"partitions": 2})
    for before, state in done:
        for name in ("weight", "bias"):
            expected = 0.9 * before[f"teacher.{name}"] + 0.1 * before[f"student.{name}"]
            assert torch.allclose(state[f"teacher.{name}"], expected)


def test_an_average_of_parameters_on_two_stages_raises_on_both(ranks):
    first, second = ranks(_teaching, 2, 1, "average", config={"partitions": 2})
    assert "teacher.weight" in first
    assert "stage 1" in first
    assert "smp.set_partition" in first
    assert "student.weight" in second
    assert "stage 0" in second
    assert "smp.set_partition" in second


def test_a_parameter_of_another_stage_that_is_used_later(ranks):
    for told in ranks(_teaching, 2, 1, "reads", config={"partitions": 2}):
        assert "mm got parameter student.weight" in told
        assert "pipeline stage 0" in told


def test_an_attribute_that_another_stage_sets(ranks):
    own, told = ranks(_teaching, 2, 1, "attribute", config={"partitions": 2})
    assert own == "nothing"
    assert told.startswith("SMPUserError: attribute 'last' of module 'student'")


def test_weights_that_hang_on_the_graph_of_parameters(ranks):
    (_, state), _ = ranks(_teaching, 2, 1, "weight norm", config={"partitions": 2})
    assert {"student.weight_g", "student.weight_v"} <= set(state)


def _placing(batches):
    """Train a model whose forward puts tensors where its parameters are, wherever those lie; returns the losses."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            for part in (self.first, self.last):
                x = part(x.to(part.weight.device, part.weight.dtype))
                x = x + torch.arange(4, device=part.weight.device)
            return x

    torch.manual_seed(0)
    net = Net()
    if smp.pp_size() > 1:
        for path, stage in {"first": 0, "last": 1, "": 1}.items():
            smp.set_partition(net.get_submodule(path), stage)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    step = training_step(model, lambda model, x: model(x).pow(2).mean())
    losses = list(updates(step, optimizer, ((batch,) for batch in batches)))
    assert smp.pp_size() == 1 or any(parameter.device.type == "meta" for parameter in model.module.parameters())
    return losses


def test_inputs_go_where_a_parameter_of_another_stage_is(ranks):
    batches = list(torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(1)))
    (expected,) = ranks(_placing, 1, batches, config={"microbatches": 2})
    for losses in ranks(_placing, 2, batches, config={"partitions": 2, "microbatches": 2}):
        assert losses == pytest.approx(expected, rel=1e-6)


def _types(delayed):
    """The types of a model's parameters, by name, after a step in half precision."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    with smp.delay_param_initialization(enabled=delayed):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = smp.DistributedModel(net)
    step = training_step(model, lambda model, x: model(x).float().pow(2).mean())
    step(torch.randn(4, 4))
    return {name: parameter.dtype for name, parameter in model.module.named_parameters()}


@pytest.mark.parametrize("delayed", [False, True])
def test_parameters_of_another_stage_have_the_type_that_they_train_in(ranks, delayed):
    (expected,) = ranks(_types, 1, delayed, config={"bf16": True})
    assert {expected["0.weight"], expected["1.weight"]} == {torch.bfloat16, torch.float32}
    for found in ranks(_types, 2, delayed, config={"partitions": 2, "bf16": True}):
        assert found == expected


def _scripted(path):
    """A scripted layer on stage 0, in a pipeline or alone; its state is loaded later."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    net = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 4))
    if smp.pp_size() > 1:
        smp.set_partition(net[0], 0)
        smp.set_partition(net[1], 1)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(x):
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    losses = []
    for number in range(3):
        if number == 2:
            loads = model._replicas.loads
            model.module[0].load_state_dict({"0.weight": torch.eye(4), "0.bias": torch.zeros(4)})
            assert model._replicas.loads > loads
        optimizer.zero_grad()
        losses.append(float(train(torch.ones(4, 4)).reduce_mean()))
        optimizer.step()
    return losses, model.state_dict()


def test_torchscript_modules_are_placed_and_loaded(ranks, tmp_path):
    (expected, state), *_ = ranks(_scripted, 1, str(tmp_path), config={})
    for losses, found in ranks(_scripted, 2, str(tmp_path), config={"partitions": 2}):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert all(torch.allclose(found[name], value) for name, value in state.items())
