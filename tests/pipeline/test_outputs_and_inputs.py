"""What goes into a step of a pipeline and what comes out of it, on every rank."""

from __future__ import annotations

import pytest
import torch


def _forms():
    """Steps that take and return all kinds of things."""
    import contextlib
    from collections import namedtuple

    import torch
    from support.models.pipeline_models import WIDTH, Pair, chain
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    net = nn.ModuleDict({"body": chain(3), "head": nn.Linear(WIDTH, 2)})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = net

        def forward(self, x):
            return self.parts["head"](self.parts["body"](x))

    model = smp.DistributedModel(Net())
    smp.set_partition(model.module.parts["body"], 1)
    Named = namedtuple("Named", "loss seen")
    x = torch.arange(8 * WIDTH, dtype=torch.float32).reshape(8, WIDTH) / 50
    weight = torch.ones(3, WIDTH)
    seen = {}

    @smp.step(non_split_inputs=["whole"], input_split_axes={"turned": 1})
    def everything(data, whole, turned, flag=None):
        assert whole.shape == (3, WIDTH)
        assert turned.shape == (WIDTH, 2)
        assert flag == "yes"
        out = model(data["x"] + whole.mean(0)) + turned.sum() * 0
        model.backward(out.sum())
        return {
            "pair": Pair(out, out.shape[0]),
            "named": (out.sum(), [out.mean(0), None]),
            "text": "same",
            "number": float(data["x"][0, 0]),
        }

    done = everything({"x": x}, weight, turned=x.T.contiguous(), flag="yes")
    seen["pair"] = done["pair"].value.concat()
    seen["count"] = done["pair"].count
    seen["named"] = done["named"][0].stack(), done["named"][1][0].reduce_sum()
    seen["others"] = done["named"][1][1], done["text"], done["number"]
    del Named

    @smp.step(detach_outputs=False)
    def attached(x):
        out = model(x)
        model.backward(out.sum())
        return out

    @smp.step
    def plain(x):
        out = model(x)
        model.backward(out.square().sum())
        return out

    seen["detached"] = [output.requires_grad for output in plain(x).outputs]
    seen["attached"] = attached(x).concat().shape

    @smp.step
    def nothing(x):
        model.backward(model(x).sum())

    seen["nothing"] = nothing(x)

    @smp.step
    def raw(x):
        return model(x)

    modes = []
    net["body"].register_forward_pre_hook(lambda *_: modes.append((torch.is_grad_enabled(), net["body"].training)))
    model.eval()
    with torch.no_grad():
        seen["evaluated"] = [raw(x).concat() for _ in range(4)]
        seen["modes"] = not any(output.requires_grad for output in raw(x).outputs)
    model.train()
    seen["modes of the remote module"] = set(modes)
    with torch.autocast("cpu", dtype=torch.bfloat16), contextlib.nullcontext():
        seen["autocast"] = [plain(x).concat() for _ in range(4)]
    seen["after"] = plain(x).concat()
    return seen


def _alone():
    from support.models.pipeline_models import WIDTH, chain
    from torch import nn

    torch.manual_seed(0)
    body, head = chain(3), nn.Linear(WIDTH, 2)
    return nn.Sequential(body, head), torch.arange(8 * WIDTH, dtype=torch.float32).reshape(8, WIDTH) / 50


@pytest.fixture(scope="module")
def forms(_shared_pool):
    settings = {"partitions": 2, "microbatches": 4, "auto_partition": False, "default_partition": 0}
    return _shared_pool.run(lambda: _forms(), 2, config=settings, timeout=120)


def test_every_form_of_output_is_on_every_rank(forms):
    model, x = _alone()
    expected = model(x + 1)
    for seen in forms:
        torch.testing.assert_close(seen["pair"], expected)
        assert seen["count"] == [2, 2, 2, 2]
        torch.testing.assert_close(seen["named"][0], expected.unflatten(0, (4, 2)).sum((1, 2)))
        torch.testing.assert_close(seen["named"][1], expected.unflatten(0, (4, 2)).mean(1).sum(0))
        assert seen["others"] == ([None] * 4, ["same"] * 4, [float(x[2 * m, 0]) for m in range(4)])
        assert seen["nothing"] is None
        assert seen["detached"] == [False] * 4
        assert seen["attached"] == (8, 2)


def test_evaluation_leaves_no_graph(forms):
    model, x = _alone()
    for rank, seen in enumerate(forms):
        assert seen["modes"]
        assert seen["modes of the remote module"] == ({(False, False)} if rank == 1 else set())
        for output in seen["evaluated"]:
            torch.testing.assert_close(output, model(x))


def test_autocast_around_a_step_reaches_every_stage(forms):
    model, x = _alone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
    for seen in forms:
        for output in seen["autocast"]:
            assert output.dtype is torch.bfloat16
            torch.testing.assert_close(output, expected)
        torch.testing.assert_close(seen["after"], model(x))


def _in_place():
    from support.logs import logged
    from support.models.pipeline_models import CASES, built

    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(built("inplace"))
    smp.set_partition(model.module.second, 1)
    smp.set_partition(model.module.act, 1)

    @smp.step
    def train(*arguments):
        loss, _ = CASES["inplace"].loss(model, *arguments)
        model.backward(loss)

    with logged() as told:
        for step in range(3):
            train(*CASES["inplace"].batch(step, 8))
    return told


def test_a_module_that_changes_its_argument_in_place_is_told_once(ranks):
    """Its caller on another stage does not see the change; one process would."""
    settings = {"partitions": 2, "auto_partition": False, "default_partition": 0}
    told = [line for lines in ranks(_in_place, 2, config=settings, timeout=120) for line in lines]
    assert len([line for line in told if "module 'second' changes tensor 0 of its arguments" in line]) == 1
    assert not [line for line in told if "module 'act'" in line]  # returns what it has changed
