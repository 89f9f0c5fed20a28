"""What modules pass on past their calls: buffers and attributes that others read, and the stages that this binds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.microbatch_state.remote_stubs import RemoteStubAttribute, RemoteStubAttributes
from smp_runtime.pipeline.partition.assignment import Assignment
from smp_runtime.pipeline.partition.manual_stages import ManualAssignment
from smp_runtime.pipeline.partition.tracing import trace


class Noting(nn.Linear):
    """Leaves values behind in many ways."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("fixed", torch.ones(1))
        self.aux, self.all, self.by_name, self.limit = 0.0, [], {}, 3

    def forward(self, x):
        out = super().forward(x)
        self.aux = out.mean()
        self.all.append(out)
        self.by_name["out"] = out
        self.limit = self.limit - 1
        self.count = self.count + 1
        return out


class Reading(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.normal = nn.BatchNorm1d(4)
        self.noting = Noting()
        self.read = [read]

    def forward(self, x):
        return self.noting(self.normal(x)) + self.read[0](self)


@pytest.mark.parametrize(
    ("read", "bound"),
    [
        (lambda m: m.normal.running_mean, ["buffer normal.running_mean"]),
        (lambda m: next(m.normal.buffers()) * 1, ["buffer normal.running_mean"]),
        (lambda m: m.noting.count, ["buffer noting.count"]),
        (lambda m: m.noting.fixed, []),
        (lambda m: m.noting.aux, ["attribute noting.aux"]),
        (lambda m: m.noting.all[-1], ["attribute noting.all"]),
        (lambda m: m.noting.by_name["out"], ["attribute noting.by_name"]),
        (lambda m: setattr(m.noting, "aux", torch.zeros(1)) or 0, ["attribute noting.aux"]),
        (lambda m: m.noting.limit + m.noting.in_features, []),
        (lambda m: 0, []),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_who_reads_what_changes_elsewhere_is_bound_to_it(read, bound, device):
    model = Reading(read).to(device)
    found = trace(model, lambda: model(torch.ones(3, 4, device=device)), device="cpu")
    assert [f"{use.kind} {use.parameter}" for use in found.foreign_uses] == bound
    assert all(use.user == "" for use in found.foreign_uses)
    assert set(found.attributes) == {("noting", "aux"), ("noting", "all"), ("noting", "by_name")}


def test_attributes_that_changed_are_put_back_where_they_were():
    model = Reading(lambda m: 0)
    model.noting.state = torch.zeros(2)
    held = vars(model.noting).copy()
    model.read[0] = lambda m: m.noting.state.add_(1).sum() * 0
    trace(model, lambda: model(torch.ones(3, 4)), device="cpu")
    assert all(vars(model.noting)[name] is value for name, value in held.items())
    assert (model.noting.all, model.noting.by_name, model.noting.aux) == ([], {}, 0.0)
    assert model.noting.state.equal(torch.zeros(2))
    assert model.noting.count.equal(torch.zeros(1))
    assert nn.Module.__setattr__.__qualname__ == "Module.__setattr__"
    assert "__getattribute__" not in vars(nn.Module)


def test_a_manual_partition_that_separates_them_is_refused():
    model = Reading(lambda m: m.normal.running_mean + m.noting.aux)
    found = trace(model, lambda: model(torch.ones(3, 4)), device="cpu")
    manual = ManualAssignment(2)
    manual.set_partition(model.normal, 1)
    with pytest.raises(SMPUserError, match="the same buffer normal.running_mean.*or return the value from forward"):
        manual.resolve(model, found)
    manual.set_partition(model.normal, 0)
    manual.set_partition(model.noting, 1)
    with pytest.raises(SMPUserError, match="the same attribute noting.aux.*or return the value from forward"):
        manual.resolve(model, found)


def test_an_assignment_carries_the_attributes():
    made = Assignment(2, {"": 0, "noting": 1}, [("noting", "aux")])
    assert Assignment.from_dict(made.to_dict()).attributes == [("noting", "aux")]
    with pytest.raises(SMPUserError, match="pairs"):
        Assignment.from_dict({**made.to_dict(), "attributes": [["noting"]]})


def test_stand_ins_for_attributes_come_and_go():
    model = Reading(lambda m: 0)
    stands = RemoteStubAttributes(
        dict(model.named_modules()),
        [("noting", "aux"), ("noting", "new"), ("normal", "own"), ("gone", "x")],
        lambda path: 1,
        lambda path: path == "normal",
    )
    assert isinstance(model.noting.aux, RemoteStubAttribute)
    assert isinstance(model.noting.new, RemoteStubAttribute)
    assert not hasattr(model.normal, "own")
    assert "Noting" in repr(model)
    assert set(model.state_dict()) == set(Reading(lambda m: 0).state_dict())
    stands.remove()
    assert model.noting.aux == 0.0
    assert not hasattr(model.noting, "new")


def _experts():
    """Layers leave a loss of their own behind, which the step function adds up."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.gate = nn.Linear(4, 4), nn.Linear(4, 2)
            self.aux_loss = 0.0

        def forward(self, x):
            share = self.gate(x).softmax(-1)
            self.aux_loss = share.mean(0).square().sum()
            return x + self.inner(x) * share[:, :1]

    model = smp.DistributedModel(nn.Sequential(*(Expert() for _ in range(4))))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(x):
        loss = model(x).pow(2).mean() + sum(layer.aux_loss for layer in model.module)
        model.backward(loss)
        return loss

    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(float(train(torch.ones(4, 4)).reduce_mean()))
        optimizer.step()
    return losses


def test_losses_that_layers_leave_behind_count_on_every_stage(ranks):
    expected, *_ = ranks(_experts, 1, config={"microbatches": 2})
    for losses in ranks(_experts, 2, config={"partitions": 2, "microbatches": 2}):
        assert losses == pytest.approx(expected, rel=1e-5)
