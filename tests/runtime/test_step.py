"""The step decorator: what is split, what comes back, and what a wrong batch says."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError

Pair = collections.namedtuple("Pair", "first second")


class Sliced:
    """Cuts itself."""

    def __init__(self, data):
        self.data = data

    def smp_slice(self, num_mb, mb, axis):
        size = self.data.shape[axis] // num_mb
        return Sliced(self.data.narrow(axis, mb * size, size))


@pytest.fixture
def two_microbatches(solo):
    return solo({"microbatches": 2})


def _seen(decorated_with=None, **decorator):
    """A step that records what each microbatch got."""
    calls = []

    @smp.step(**decorator)
    def record(value, other=None):
        calls.append((value, other))

    return record, calls


def test_tensors_are_split_wherever_they_lie(two_microbatches):
    record, calls = _seen()
    x = torch.arange(4)
    record({"a": [x, (x, "text")], "b": Pair(x, 3), "c": {x}, "d": Sliced(x), "e": torch.tensor(7), "f": None}, other=x)
    first, second = (value for value, _ in calls)
    assert first["a"][0].tolist() == [0, 1]
    assert second["a"][1][0].tolist() == [2, 3]
    assert second["a"][1][1] == "text"
    assert isinstance(second["b"], Pair)
    assert second["b"].first.tolist() == [2, 3]
    assert next(iter(second["c"])).tolist() == [2, 3]
    assert second["d"].data.tolist() == [2, 3]
    assert int(second["e"]) == 7
    assert second["f"] is None
    assert [other.tolist() for _, other in calls] == [[0, 1], [2, 3]]


def test_axes_and_whole_inputs_by_name(two_microbatches):
    record, calls = _seen(input_split_axes={"value": 1}, non_split_inputs=["other"])
    record(torch.zeros(3, 4), torch.zeros(5))
    assert [(tuple(v.shape), tuple(o.shape)) for v, o in calls] == [((3, 2), (5,))] * 2
    calls.clear()
    record(value=torch.zeros(3, 4), other=torch.zeros(5))
    assert [(tuple(v.shape), tuple(o.shape)) for v, o in calls] == [((3, 2), (5,))] * 2


def test_names_that_the_function_does_not_have(two_microbatches):
    with pytest.raises(SMPUserError, match="has the arguments value, other"):
        _seen(non_split_inputs=["valeu"])


def test_a_method_and_variadic_arguments(two_microbatches):
    class Trainer:
        @smp.step
        def train(self, *tensors, **named):
            return sum(t.sum() for t in tensors) + named["extra"].sum()

    out = Trainer().train(torch.ones(4), torch.ones(2), extra=torch.ones(6))
    assert [int(o) for o in out.outputs] == [6, 6]
    assert Trainer.train.__name__ == "train"


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    note: str = "n"


def test_what_is_returned(two_microbatches):
    class ModelOutput(collections.OrderedDict):
        """As Transformers' outputs: a mapping."""

    @smp.step
    def everything(x):
        out = ModelOutput(loss=x.sum(), tag="t")
        return out, {"x": x, "n": int(x[0])}, [x, None], Output(x.sum(), x), Pair(x, 1)

    mapping, dictionary, sequence, data, pair = everything(torch.arange(4.0))
    assert isinstance(mapping, ModelOutput)
    assert mapping["loss"].reduce_mean() == 3.0
    assert mapping["tag"] == ["t", "t"]
    assert dictionary["x"].concat().tolist() == [0, 1, 2, 3]
    assert dictionary["n"] == [0, 2]
    assert sequence[1] == [None, None]
    assert isinstance(data, Output)
    assert data.loss.reduce_sum() == 6.0
    assert data.note == ["n", "n"]
    assert pair.first.stack().tolist() == [[0, 1], [2, 3]]


def test_step_output_reductions(two_microbatches):
    @smp.step
    def counts(x):
        return x.sum(), x

    total, whole = counts(torch.tensor([1, 2, 3, 6]))
    assert [int(o) for o in total.outputs] == [3, 9]
    assert total.reduce_mean().item() == 6.0
    assert total.reduce_sum().item() == 12
    assert total.concat().tolist() == [3, 9]
    assert whole.concat().tolist() == [1, 2, 3, 6]


def test_who_takes_an_output_for_a_tensor_is_told_what_to_call(two_microbatches):
    output = smp.step(lambda x: x * 2)(torch.ones(4))
    for use in (lambda: output.item(), lambda: output.mean(), lambda: float(output), lambda: f"{output:.3f}"):
        with pytest.raises(
            (AttributeError, TypeError), match=r"one tensor for each microbatch; call \.reduce_mean\(\)"
        ):
            use()
    with pytest.raises(AttributeError, match=r"call model\.backward\(loss\), .* in the function with @smp\.step"):
        output.backward()
    assert f"{output}" == "StepOutput(2 × torch.float32 [2])"
    with pytest.raises(AttributeError, match=r"(?m)no attribute 'no_such_thing'$"):
        output.no_such_thing  # noqa: B018


def test_arguments_of_the_decorator_by_position(two_microbatches):
    whole = smp.step(["whole"], {"x": 1})(lambda x, whole: (x, whole))
    x, y = whole(torch.ones(3, 4), whole=torch.ones(3))
    assert [tuple(part.shape) for part in (*x.outputs, *y.outputs)] == [(3, 2), (3, 2), (3,), (3,)]
    with pytest.raises(ValueError, match=r"use \['whole'\]"):
        smp.step("whole")


def test_nothing_returned_is_none(two_microbatches):
    record, _ = _seen()
    assert record(torch.zeros(2)) is None


@pytest.mark.parametrize("detach", [True, False])
def test_outputs_keep_their_graph_only_when_asked(two_microbatches, detach):
    weight = torch.ones(1, requires_grad=True)

    @smp.step(detach_outputs=detach)
    def product(x):
        return (x * weight).sum()

    out = product(torch.ones(2))
    assert out.outputs[0].requires_grad is not detach
    assert not out.detach().outputs[0].requires_grad


def test_a_batch_that_does_not_divide_names_both_numbers_and_loses_nothing(two_microbatches):
    record, calls = _seen()
    with pytest.raises(ValueError, match=r"'value'.* 5 samples .*2 microbatches.*4 or 6 samples"):
        record(torch.zeros(5))
    assert calls == []
    record(torch.zeros(4))
    assert len(calls) == 2


def test_an_axis_that_is_not_there(two_microbatches):
    record, _ = _seen(input_split_axes={"value": 2})
    with pytest.raises(ValueError, match="no axis 2"):
        record(torch.zeros(4, 4))


def test_a_step_inside_a_step(two_microbatches):
    inner, _ = _seen()

    @smp.step
    def outer(x):
        inner(x)

    with pytest.raises(SMPUserError, match="inside another step"):
        outer(torch.zeros(4))
    inner(torch.zeros(4))


def test_before_init():
    record, _ = _seen()
    with pytest.raises(smp.exceptions.SMPRuntimeError, match=r"smp.init\(\) has not been called"):
        record(torch.zeros(4))


def test_autocast_around_a_step_reaches_its_microbatches(two_microbatches):
    layer = torch.nn.Linear(2, 2)

    @smp.step
    def types(x):
        return layer(x).dtype

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert types(torch.ones(2, 2)) == [torch.bfloat16] * 2
    assert types(torch.ones(2, 2)) == [torch.float32] * 2


def test_an_error_in_a_microbatch_leaves_a_usable_session(solo):
    solo({"microbatches": 2})
    model = smp.DistributedModel(torch.nn.Linear(1, 1))

    @smp.step
    def fails(x):
        model.backward(model(x).sum())
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        fails(torch.ones(2, 1))
    assert smp.state.microbatch is None
    with pytest.raises(KeyError, match="boom"):
        fails(torch.ones(2, 1))


def _plain(x, scale=1.0):
    return x.sum() * scale


def _other_name(this, x):
    return x.sum() + this.bias


class InClassBody:
    """Steps in a class body: a method, one whose instance has another name, and a plain function."""

    other_name = smp.step(_other_name)
    plain = smp.step(_plain)
    bias = 1.0

    @smp.step
    def method(self, x):
        return x.sum() + self.bias


def test_a_step_in_a_class_body_may_be_a_method_or_not(two_microbatches):
    x, trainer = torch.ones(4), InClassBody()
    assert [float(loss.reduce_sum()) for loss in (trainer.method(x), trainer.other_name(x))] == [6.0, 6.0]
    assert float(trainer.plain(x).reduce_sum()) == float(InClassBody.plain(x).reduce_sum()) == 4.0
    assert float(trainer.plain(x, 3.0).reduce_sum()) == 12.0
    with pytest.raises(TypeError, match="positional arguments"):
        trainer.plain(x, 1.0, 2.0)
