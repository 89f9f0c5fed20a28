"""What ``model.backward`` takes besides losses: the arguments of ``Tensor.backward``, where they can be served."""

from __future__ import annotations

import pytest
import torch
from torch import nn

SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}

BATCH = 8


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def _backward(how, net, x, backward):
    """A forward pass and one or two backward passes."""
    y = net(x)
    if how == "retain_graph":
        backward(y.square().mean(), retain_graph=True)
        backward(y.sum())
    elif how == "create_graph":
        backward(y.square().mean(), create_graph=True)
    elif how == "inputs":
        backward(y.square().mean(), inputs=[net[2].weight])
    else:
        backward(y.square().mean())
        backward(y.sum())


def _trained(how, steps=2):
    """The state after some steps with two microbatches."""
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(_net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(x):
        _backward(how, model.module if how == "inputs" else model, x, model.backward)

    generator = torch.Generator().manual_seed(smp.dp_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        train(torch.randn(BATCH, 4, generator=generator))
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def _alone(how, replicas, steps=2):
    """The same by PyTorch's own ``backward``."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generators = [torch.Generator().manual_seed(replica) for replica in range(replicas)]
    for _ in range(steps):
        optimizer.zero_grad()
        for generator in generators:
            for part in torch.randn(BATCH, 4, generator=generator).chunk(2):
                _backward(how, net, part, lambda loss, **given: (loss / 2 / replicas).backward(**given))
        optimizer.step()
    return net.state_dict()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("how", ["retain_graph", "create_graph", "inputs"])
@pytest.mark.parametrize("sharding", [{}, {"shard_optimizer_state": True}, SHARDED], ids=["no", "state", "all"])
def test_without_a_pipeline_they_do_what_they_do_in_one_process(ranks, how, sharding):
    for state in ranks(_trained, 2, how, config={"ddp": True, "microbatches": 2, **sharding}):
        torch.testing.assert_close(state, dict(_alone(how, 2)))


def _message(how, **given):
    """Of the error that a step ends with, on this rank; and whether the next one works."""
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(_net())

    @smp.step
    def train(x, fails):
        loss = model(x).square().mean()
        if fails and how == "twice":
            model.backward(loss)
        model.backward(loss, **(given if fails else {}))
        return loss

    train(torch.ones(BATCH, 4), False)
    try:
        train(torch.ones(BATCH, 4), True)
        text = ""
    except Exception as error:
        text = str(error)
    train(torch.ones(BATCH, 4), False)
    return text


REFUSED = [
    ("retain_graph=True", {"retain_graph": True}),
    ("create_graph=True", {"create_graph": True}),
    ("inputs=…", {"inputs": []}),
]


@pytest.mark.parametrize(("named", "given"), REFUSED)
def test_a_pipeline_refuses_them(ranks, named, given):
    for text in ranks(lambda: _message("once", **given), 2, config={"partitions": 2, "microbatches": 2}):
        assert f"model.backward got {named}, but with pipeline parallelism" in text
        assert "sum the losses and call model.backward(sum) once per microbatch" in text


def test_a_pipeline_takes_them_where_they_ask_for_nothing(ranks):
    given = {"retain_graph": False, "create_graph": False, "inputs": None}
    assert ranks(lambda: _message("once", **given), 2, config={"partitions": 2, "microbatches": 2}) == ["", ""]


@pytest.mark.parametrize(
    ("config", "offered"), [({"partitions": 2, "microbatches": 2}, False), ({"ddp": True, "microbatches": 2}, True)]
)
def test_a_second_pass_through_a_graph_says_what_to_do(ranks, config, offered):
    for text in ranks(_message, 2, "twice", config=config):
        assert "model.backward went through a graph a second time" in text
        assert "sum the losses and call model.backward(sum) once per microbatch" in text
        assert ("or pass retain_graph=True" in text) is offered
        assert "Specify retain_graph" not in text.split("\n")[0]
