"""Code around split modules: weights that it reads itself, attributes that a script has set, evaluation with a mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Reads weights of its children: a map by hand, a tied read-out, a penalty; and calls methods of theirs."""

    def __init__(self):
        super().__init__()
        self.embed, self.enter, self.back = nn.Embedding(6, 8), nn.Linear(8, 12), nn.Linear(12, 8)

    def encode(self, x):
        return torch.tanh(self.enter(x))

    def forward(self, batch):  # of arguments that nothing guesses, so that it is not tried out when it is wrapped
        ids, y = batch["ids"], batch["y"]
        x = self.embed(ids).to(self.enter.weight.dtype)
        x = x + self.back(self.encode(x)) + F.linear(F.linear(x, self.enter.weight, self.enter.bias), self.back.weight)
        loss = F.cross_entropy(x @ self.embed.weight.t(), y)
        return loss + 0.1 * self.enter.weight.norm()


def _data():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(6, (8,), generator=generator), torch.randint(6, (8,), generator=generator)


def _make():
    torch.manual_seed(2)
    return Net().double()


def _train(common):
    import smdistributed.modelparallel.torch as smp

    module = _make()
    module.enter.weight.rate, module.enter.tag = 0.3, "enter"
    smp.set_tensor_parallelism(module, distribute_embedding=True)
    model = smp.DistributedModel(module)
    assert model.module.enter.weight.rate == 0.3
    assert model.module.enter.tag == "enter"
    assert module.enter.weight.numel() == 48, "between steps a rank's part"
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(batch):
        loss = model(batch)
        model.backward(loss)
        return loss

    ids, y = _data()
    if not common:
        ids, y = ids.chunk(2)[smp.rank()], y.chunk(2)[smp.rank()]
    for _ in range(2):
        optimizer.zero_grad()
        step({"ids": ids, "y": y})
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("common", [True, False])
def test_weights_that_code_around_a_module_reads_are_whole(ranks, common):
    config = {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": common}
    states = ranks(_train, 2, common, config=config)
    alone = _make()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        alone(dict(zip(("ids", "y"), _data(), strict=True))).backward()
        optimizer.step()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-10, atol=1e-12)


def _assign(weight):
    weight.data = weight * 0.5


def _set_row(weight):
    weight[1] = 0.25


def _scale_data(weight):
    weight.data.mul_(0.5)


def _fill_views(weight):
    for row in weight.unbind()[:2]:
        row.fill_(0.25)
    weight.detach().view(-1)[5:7].zero_()
    weight.t()[2].add_(weight[3, 1])


def _fill_an_older_view(weight):
    row = weight[1]
    with torch.enable_grad():
        torch.tanh(weight).sum()  # the weight is gathered anew, with its place in the graph
    row.fill_(0.25)


def _begin_anew(weight):
    nn.init.constant_(weight, 0.125)


WRITES = [
    _assign,
    _set_row,
    _scale_data,
    _fill_views,
    _fill_an_older_view,
    _begin_anew,
    lambda weight: weight.clamp_(-0.1, 0.1),
]


class Writing(nn.Module):
    """Changes weights of its children in a forward pass."""

    def __init__(self, write, *, records=False):
        super().__init__()
        self.enter, self.back = nn.Linear(4, 6), nn.Linear(6, 4)
        self.write, self.records = write, records

    def forward(self, batch):
        x = batch["x"]  # nothing guesses this argument
        with torch.set_grad_enabled(self.records):
            self.write(self.enter.weight)
            self.write(self.back.weight)
        return self.back(torch.tanh(self.enter(x))) + x @ self.enter.weight[:4].t()


def _written(write, wrap):
    torch.manual_seed(2)
    model = wrap(Writing(write).double())
    out = model({"x": torch.ones(2, 4, dtype=torch.float64)})
    return out.detach(), dict(model.state_dict())


@pytest.mark.parametrize("number", range(len(WRITES)))
def test_what_a_forward_pass_writes_into_a_weight_reaches_the_parts(ranks, number):
    def run():
        import smdistributed.modelparallel.torch as smp

        def wrap(module):
            smp.set_tensor_parallelism(module)
            model = smp.DistributedModel(module)
            assert max(module.enter.weight.numel(), module.back.weight.numel()) < 24
            return model

        return _written(WRITES[number], wrap)

    found = ranks(run, 2, config={"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})
    wanted = _written(WRITES[number], lambda module: module)
    for one in found:
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-12)


def _clamp_into(weight):
    torch.clamp(weight, -1, 1, out=weight)


def _scale_views(weight):
    torch._foreach_mul_([weight[0], weight[1]], 0.5)


def _scale_row(weight):
    weight[0].mul_(0.5)


@pytest.mark.parametrize(
    ("write", "records", "said"),
    [
        (_clamp_into, False, "which would change a copy"),
        (_scale_views, False, "which would change a copy"),
        (_scale_row, True, "requires grad and is changed in place by mul_"),
        (WRITES[-1], True, "requires grad and is changed in place by clamp_"),
    ],
)
def test_writing_into_a_copy_is_refused(ranks, write, records, said):
    def run():
        import smdistributed.modelparallel.torch as smp

        module = Writing(write, records=records)
        smp.set_tensor_parallelism(module)
        model = smp.DistributedModel(module)
        with pytest.raises(ValueError, match=said):
            model({"x": torch.ones(2, 4)})

    ranks(run, 2, config={"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x, mask):
        return self.encoder(x, src_key_padding_mask=mask)


def _evaluated(wrap):
    torch.manual_seed(3)
    model = wrap(Encoder().double()).eval()
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[:, 3] = True
    with torch.no_grad():
        return model(torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)), mask)


def test_an_encoder_evaluates_a_padded_batch_as_one_process_does(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        def wrap(module):
            smp.set_tensor_parallelism(module)
            return smp.DistributedModel(module)

        return _evaluated(wrap)

    found = ranks(run, 2, config={"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})[0]
    torch.testing.assert_close(found, _evaluated(lambda module: module), rtol=1e-10, atol=1e-12)
