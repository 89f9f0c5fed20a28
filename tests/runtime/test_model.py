"""The wrapper around the module: names, attributes, state."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from support.models.models import TiedNet
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.config = {"hidden": 2}

    def forward(self, x):
        return self.layer(x)

    def describe(self):
        return "mine"


@pytest.fixture
def model(solo):
    solo({})
    return smp.DistributedModel(Configured())


def test_every_level_of_unwrapping_leads_to_the_module(model):
    module = model.module
    assert isinstance(module, Configured)
    assert module is model.get_module() is model.module.module is model.module.module.module
    assert model.config == {"hidden": 2}
    assert model.describe() == "mine"
    assert model.module.module.config == {"hidden": 2}
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing


class Broken(nn.Linear):
    """Has a property that fails, which is not the same as having none."""

    @property
    def rank_of(self):
        return self.settings.rank


def test_an_attribute_that_nobody_has_is_one_line(solo):
    solo({})
    model = smp.DistributedModel(Broken(2, 2))
    assert not hasattr(model, "save_pretrained")
    with pytest.raises(AttributeError) as raised:
        model.save_pretrained("folder")
    assert str(raised.value) == (
        "the wrapped model has no attribute 'save_pretrained': neither smp.DistributedModel nor the Broken inside it has one"
    )
    assert raised.value.__cause__ is raised.value.__context__ is None
    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'rank_of'"):
        assert model.rank_of


def test_names_agree_everywhere(model):
    names = ["layer.weight", "layer.bias"]
    assert list(model.state_dict()) == names
    assert [n for n, _ in model.named_parameters()] == names
    assert [n for n, _ in model.local_named_parameters()] == names
    assert [n for n, _ in model.default_reducer_named_parameters()] == names
    assert [n for n, _ in model.local_named_modules()] == ["", "layer"]
    assert len(list(model.parameters())) == 2
    assert set(model.local_state_dict()) == {*names, "_smp_is_partial"}
    assert model.partitioned


def test_state_round_trip_also_with_other_wrappers_prefix(model):
    state = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
    model.load_state_dict({f"module.{name}": value for name, value in state.items()})
    assert model.layer.bias[0].item() == 3.0
    model.load_state_dict({**model.local_state_dict(), "layer.bias": torch.zeros(2)})
    assert model.layer.bias[0].item() == 0.0
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"layer.bias": torch.zeros(2)})
    model.load_state_dict({"layer.bias": torch.ones(2)}, strict=False)


def test_tied_parameters_are_one_record(solo):
    solo({})
    model = smp.DistributedModel(TiedNet())
    tied = model.registry.record_of(model.module.head.weight)
    assert tied.names == ("embedding.weight", "head.weight")
    assert model.registry.elements == sum(p.numel() for p in model.parameters())
    with pytest.raises(SMPUserError, match="not a parameter of the wrapped model"):
        model.registry.record_of(torch.zeros(3))


def test_moving_is_the_wrappers_work(model):
    assert model.to("meta") is model
    assert model.cuda() is model
    assert model.layer.weight.device.type == "cpu"
    assert model.to(torch.float64).layer.weight.dtype == torch.float64
    assert model.cpu() is model


CPU_CASES = [
    ({"pipeline_parallel_degree": 2}, True),
    ({"tensor_parallel_degree": 2}, True),
    ({"tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": "speed"}, False),
    ({"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}, False),
    ({"pipeline_parallel_degree": 2, "bf16": True}, False),
]


@pytest.mark.parametrize(
    ("config", "always"), [pytest.param(*case, marks=() if case[1] else pytest.mark.full) for case in CPU_CASES]
)
def test_a_whole_copy_on_the_cpu_computes_by_itself(ranks, config, always):
    def run():
        import smdistributed.modelparallel.torch as smp
        from smp_runtime.errors import SMPUserError

        with smp.tensor_parallelism(smp.tp_size() > 1):
            module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), _Halving(), nn.Linear(4, 2, bias=False))
        if smp.tp_size() > 1:
            sizes = {"num_attention_heads": 2, "attention_head_size": 2, "hidden_size": 4, "intermediate_size": 8}
            model = {
                "hidden_dropout_prob": 0.0,
                "attention_dropout_prob": 0.0,
                "num_layers": 1,
                "vocab_size": 5,
                "num_positions": 4,
            }
            lm = smp.nn.DistributedTransformerLMHead(**sizes, **model, use_alibi=True, distribute_embedding=True)
            module.append(nn.Sequential(OrderedDict(inputs=_AsIds(), lm=lm)))
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @smp.step
        def step(x):
            output = model(x)
            if model.training:
                model.backward(output.sum())
            return output

        assert model.partitioned or model.cpu() is model
        step(torch.arange(16.0).view(4, 4).sin())
        optimizer.step()
        full = {name: value.clone() for name, value in model.state_dict().items()}
        model.module[2].by = 4.0
        model.eval()
        x = torch.linspace(-1, 1, 16).view(4, 4)
        here = step(x).concat()
        assert model.cpu() is model
        assert all(p.device.type == "cpu" and p.isfinite().all() for p in model.parameters())
        copied = model.state_dict()
        if smp.rank() == 0:  # no other rank is asked
            with torch.no_grad():
                torch.testing.assert_close(model(x), here)
        assert full.keys() == copied.keys()
        for name, value in full.items():
            assert torch.equal(value, copied[name]), name
        smp.barrier()
        model.train()
        for call in (step, model):
            with pytest.raises(SMPUserError, match=r"call model\.cuda\(\) first, or model\.eval\(\)"):
                call(x)
        with pytest.raises(SMPUserError, match=r"call model\.cuda\(\) first"):
            model.load_state_dict(copied)
        smp.barrier()
        model.module[2].by = 8.0  # of the copy
        model.to(smp.state.device)
        model.eval()
        torch.testing.assert_close(step(x).concat(), here)
        model.train()
        step(x)
        optimizer.step()
        after = model.state_dict()
        return any(not torch.equal(value, after[name]) for name, value in full.items())

    assert all(ranks(run, 2, config={"ddp": True, **config}))


class _Halving(nn.Module):
    """With a hook that is its own method."""

    def __init__(self):
        super().__init__()
        self.by = 2.0
        self.register_forward_hook(self.divide)

    def divide(self, module, args, output):
        assert module is self
        return output / self.by

    def forward(self, x):
        return x


class _AsIds(nn.Module):
    def forward(self, x):
        ids = (x.sum(-1, keepdim=True) * 0).long().expand(-1, 3) + torch.arange(3)
        return ids, None, None, None, None


@pytest.mark.parametrize(("config", "returns"), [({}, True), ({"bf16": True}, False)])
def test_a_model_on_the_cpu_does_not_train_on_the_device(solo, config, returns):
    session = solo(config)
    model = smp.DistributedModel(nn.Linear(2, 1))
    assert model.cpu() is model
    model(torch.ones(1, 2)).sum().backward()  # this rank's device is the CPU
    session.ranks.device = torch.device("meta")
    model.cpu()
    with pytest.raises(SMPUserError, match="moved the model to the CPU, but this rank trains on meta"):
        model(torch.ones(1, 2))
    model.eval()
    assert model(torch.ones(1, 2)).shape == (1, 1)
    model.cuda()
    assert model.module.weight.is_meta is returns


def test_hooks(model):
    called = []
    handle = model.register_post_partition_hook(lambda m, o: called.append(("partition", m is model, o)))
    model.register_post_step_hook(lambda m, o: called.append(("step", m is model, o)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(x):
        model.backward(model(x).sum())

    for _ in range(2):  # a hook behind a step is called once
        step(torch.ones(1, 2))
        assert called == [("partition", True, None), ("step", True, optimizer)]
    handle.remove()


def test_backward_of_outputs_with_gradients(model):
    x = torch.ones(1, 2)
    with pytest.raises(SMPUserError, match=r"shape \[1, 2\] without a gradient"):
        model.backward(model(x))
    model.backward(model(x), torch.tensor([[1.0, 0.0]]))
    assert model.layer.bias.grad.tolist() == [1.0, 0.0]
    model.backward([model(x), model(x)], [torch.ones(1, 2), torch.ones(1, 2)])
    assert model.layer.bias.grad.tolist() == [3.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"trace_device": "tpu"}, "'gpu' or 'cpu'"),
        ({"trace_device": "cpu", "trace_execution_times": True}, "trace_execution_times"),
        ({"backward_passes_per_step": 0}, "1 or more"),
        ({"bucket_cap_mb": 0}, "MiB"),
    ],
)
def test_wrong_arguments(solo, arguments, says):
    solo({})
    with pytest.raises(SMPUserError, match=says):
        smp.DistributedModel(Configured(), **arguments)


def test_wrapping_what_cannot_be_wrapped(model):
    with pytest.raises(SMPUserError, match="already wrapped"):
        smp.DistributedModel(model)
    with pytest.raises(SMPUserError, match="got a dict"):
        smp.DistributedModel({})
