"""Parameters whose values are under way: who reads them waits, however it reads; who does not goes on."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from smp_runtime.parameters.pending_gather import PendingGathers, PendingParameter, wait_before_calls

NEW = 7.0


class Coming:
    """Brings the new values when it is waited for, and not before."""

    def __init__(self, flat, events=None, name=""):
        self.flat, self.events, self.name, self.waits = flat, [] if events is None else events, name, 0

    def wait(self):
        self.waits += 1
        self.events.append(self.name)
        self.flat.fill_(NEW)


def _arriving(count=1):
    flat, arrivals = torch.zeros(4 * count), PendingGathers()
    parameters = [nn.Parameter(part.view(2, 2)) for part in flat.split(4)]
    work = Coming(flat)
    arrivals.expect(work, parameters, flat)
    return arrivals, work, parameters


READERS = {
    "add": lambda p: p + 0,
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "linear": lambda p: nn.functional.linear(torch.eye(2), p),
    "in a list": lambda p: torch.stack([p])[0],
    "foreach": lambda p: torch._foreach_add([p], 0.0)[0],
    "copy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "save": lambda p: torch.save(p, io.BytesIO()) or p,
    "numpy": lambda p: torch.from_numpy(p.numpy(force=True)),
    "list": lambda p: torch.tensor(p.tolist()),
    "data_ptr": lambda p: p.data_ptr() and p,
    "storage": lambda p: p.untyped_storage() and p,
    "text": lambda p: repr(p) and p,
    "vector": lambda p: nn.utils.parameters_to_vector([p]).view(2, 2),
    "functional_call": lambda p: torch.func.functional_call(nn.Linear(2, 2, bias=False), {"weight": p}, torch.eye(2)),
}


@pytest.mark.parametrize("how", READERS)
def test_whoever_reads_waits(how):
    arrivals, work, (parameter,) = _arriving()
    assert type(parameter) is PendingParameter
    found = READERS[how](parameter)
    assert work.waits == 1
    assert type(parameter) is nn.Parameter
    assert type(found) in (nn.Parameter, torch.Tensor)
    assert found.tolist() == [[NEW] * 2] * 2
    READERS[how](parameter)
    arrivals.settle()
    assert work.waits == 1


def test_shapes_flags_and_gradients_are_there_without_waiting():
    arrivals, work, (parameter,) = _arriving()
    assert (parameter.shape, parameter.dtype, parameter.numel()) == ((2, 2), torch.float32, 4)
    assert parameter.requires_grad
    assert parameter.grad is None
    parameter.grad = torch.ones(2, 2)
    parameter.grad = None
    assert {parameter: 1}[parameter] == 1
    assert isinstance(parameter, nn.Parameter)
    assert work.waits == 0
    arrivals.settle()
    assert work.waits == 1
    assert type(parameter) is nn.Parameter
    assert not vars(parameter)


def test_what_comes_together_is_there_together_for_all_threads():
    _, work, parameters = _arriving(3)
    seen = []
    threads = [threading.Thread(target=lambda p=p: seen.append(p.sum().item())) for p in parameters * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [4 * NEW] * 12
    assert work.waits == 1


class PastPyTorch(torch.autograd.Function):
    """Takes a parameter past PyTorch's functions, as kernels of other packages do."""

    @staticmethod
    def forward(ctx, x, weight):
        with torch._C.DisableTorchFunction():
            return x @ weight


class Foreign(nn.Module):
    def __init__(self, events, name):
        super().__init__()
        self.weight, self.events, self.name = nn.Parameter(torch.zeros(2, 2)), events, name

    def forward(self, x):
        y = PastPyTorch.apply(x, self.weight)
        self.events.append(f"{self.name} ran")
        return y


def _stack(is_one):
    events, arrivals = [], PendingGathers()
    model = nn.Sequential(*(Foreign(events, f"layer {n}") for n in range(3)))
    wait_before_calls(model, set(model.parameters()), is_one)
    for layer in reversed(model):
        arrivals.expect(Coming(layer.weight.data, events, f"{layer.name} came"), [layer.weight], layer.weight.data)
    with torch.no_grad():
        out = model(torch.ones(1, 2))
    assert out.tolist() == [[(2 * NEW) ** 3] * 2]
    return events


def test_each_layer_waits_for_its_own_values_right_before_it_runs():
    assert _stack(lambda module: False) == [
        *("layer 0 came", "layer 0 ran", "layer 1 came", "layer 1 ran", "layer 2 came", "layer 2 ran")
    ]


def test_a_module_that_is_one_thing_waits_for_all_in_it():
    events = _stack(lambda module: isinstance(module, nn.Sequential))
    assert sorted(events[:3]) == ["layer 0 came", "layer 1 came", "layer 2 came"]


def test_parameters_of_classes_of_their_own_are_waited_for_at_once():
    class Quantised(nn.Parameter):
        pass

    flat, arrivals = torch.zeros(4), PendingGathers()
    parameter = Quantised(flat)
    arrivals.expect(Coming(flat), [parameter], flat)
    assert type(parameter) is Quantised
    assert torch.Tensor.sum(parameter) == 4 * NEW


def test_a_failed_gather_is_told_to_every_reader():
    class Lost:
        def wait(self):
            raise RuntimeError("connection closed by peer")

    flat = torch.zeros(4)
    parameter = nn.Parameter(flat)
    PendingGathers().expect(Lost(), [parameter], flat)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            parameter.sum()


def test_compiled_code_of_the_script_reads_new_values():
    layer = nn.Linear(2, 2, bias=False)
    run = torch.compile(layer, backend="eager")
    for _ in range(2):
        arrivals, flat = PendingGathers(), torch.zeros(4)
        layer.weight.data = flat.view(2, 2)
        arrivals.expect(Coming(flat), [layer.weight], flat)
        assert run(torch.eye(2)).tolist() == [[NEW] * 2] * 2
