"""What scripts do beside training, where ranks share sequences out: seeds, samplers, evaluation, saving, ranks of groups."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from support.models.long_sequences import WORDS, CausalNet, next_word_loss, word_batches
from support.ranks.rank_pool import RankFailed
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone

CONFIG = {"ddp": True, "context_parallel_degree": 2}


def _optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _train_with_dropout(seed_by_rank):
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(CausalNet(dropout=0.2).double())
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    torch.manual_seed(7 + (smp.rank() if seed_by_rank else 0))
    return list(updates(training_step(model, next_word_loss), optimizer, word_batches(3, 2)))


@pytest.mark.parametrize("seed_by_rank", [False, True])
def test_dropout_drops_what_one_process_drops(ranks, seed_by_rank):
    model = CausalNet(dropout=0.2).double()
    torch.manual_seed(7)
    expected = train_alone(model, _optimizer, word_batches(3, 2), next_word_loss)
    for losses in ranks(_train_with_dropout, 2, seed_by_rank, config=CONFIG):
        assert losses == pytest.approx(expected.losses, abs=1e-9)


#: What draws random numbers for a tensor, or fills it with them.
DRAWS = {
    "noise": lambda x: x + torch.zeros_like(x).uniform_(-1, 1),
    "normal": lambda x: x + torch.empty_like(x).normal_(0, 0.1),
    "initialized": lambda x: torch.nn.init.normal_(torch.empty_like(x), std=0.1),
    "exponential": lambda x: -torch.empty_like(x).exponential_().log(),
    "mask": lambda x: x * torch.empty_like(x).bernoulli_(0.7),
    "by probabilities": lambda x: torch.bernoulli(x.sigmoid()),
    "mask by probabilities": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "integers": lambda x: torch.zeros_like(x).random_(5),
    "like": lambda x: torch.randn_like(x.transpose(1, 2)).transpose(1, 2),
    "dropout": lambda x: torch.nn.functional.dropout(x.transpose(1, 2), 0.5).transpose(1, 2),
    "filled": lambda x: torch.zeros_like(x.transpose(1, 2)).uniform_().transpose(1, 2),
}


class _Draws(torch.nn.Module):
    def forward(self, x):
        return {name: draw(x) for name, draw in DRAWS.items()}


def _draw():
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(_Draws())
    torch.manual_seed(7)
    return smp.step(model)(torch.ones(2, 9, 4))


def test_random_numbers_are_those_of_one_process(ranks):
    torch.manual_seed(7)
    expected = _Draws()(torch.ones(2, 9, 4))
    for drawn in ranks(_draw, 2, config=CONFIG):
        for name, value in expected.items():
            torch.testing.assert_close(drawn[name].outputs[0], value, msg=lambda m, n=name: f"{n}: {m}")


class _LeavesOutLayers(torch.nn.Module):
    def forward(self, x):
        return x * (random.random() < 0.5) + random.gauss(0, 1) + numpy.random.randn()


def _leave_out_layers():
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(_LeavesOutLayers())
    random.seed(smp.rank())
    numpy.random.seed(smp.rank())
    return [smp.step(model)(torch.ones(2, 9, 4)).outputs[0] for _ in range(4)]


def test_random_numbers_of_python_are_those_of_the_first_rank(ranks):
    """Ranks that leave out other layers would exchange keys of other layers."""
    random.seed(0)
    numpy.random.seed(0)
    expected = [_LeavesOutLayers()(torch.ones(2, 9, 4)) for _ in range(4)]
    for drawn in ranks(_leave_out_layers, 2, config=CONFIG):
        torch.testing.assert_close(drawn, expected)


class _OfGivenTensors(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mixed = torch.nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, embedded, scale, attention_bias):
        hidden = self.mixed(embedded) * scale + attention_bias
        return torch.nn.functional.scaled_dot_product_attention(hidden, hidden, embedded, is_causal=True).square().sum()


def _given_tensors():
    shapes = {"embedded": (2, 9, 4), "scale": (4,), "attention_bias": (2, 9, 4)}
    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()
    }


def _read_gradients_of_inputs():
    import smdistributed.modelparallel.torch as smp

    model, given = smp.DistributedModel(_OfGivenTensors()), _given_tensors()

    @smp.step
    def step(**given):
        model.backward(model(**given))

    step(**given)
    return {name: tensor.grad for name, tensor in given.items()}


def test_inputs_have_the_gradients_of_one_process(ranks):
    given = _given_tensors()
    _OfGivenTensors()(**given).backward()
    for found in ranks(_read_gradients_of_inputs, 2, config=CONFIG):
        for name, tensor in given.items():
            torch.testing.assert_close(found[name], tensor.grad, msg=lambda m, n=name: f"{n}: {m}")


def _train_on_other_batches():
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(CausalNet())
    training_step(model, next_word_loss)(word_batches(2, 2, (20,))[smp.rank()][0])


def test_ranks_with_different_batches_are_refused(ranks):
    with pytest.raises(RankFailed, match=r"share each sequence out, but rank 1 called the model with another batch"):
        ranks(_train_on_other_batches, 2, config=CONFIG)


def _evaluate(path):
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(CausalNet())
    (tokens,) = word_batches(1, 4)[0]

    @smp.step
    def logits_of(tokens):
        return {"logits": model(tokens), "loss": next_word_loss(model, tokens)}

    model.eval()
    with torch.no_grad():
        inside = logits_of(tokens)
        outside = model(tokens)
    if smp.dp_rank() == 0:  # on both ranks
        smp.save(model.state_dict(), f"{path}/model.pt", partial=False)
    smp.barrier()
    best = outside.argmax(-1)
    return {
        "inside": inside["logits"].concat(),
        "outside": outside[:, 3:5].sum(1),
        "best": best.tolist(),
        "loss": float(inside["loss"].reduce_mean()),
        "ranks": (smp.cp_rank(), smp.cp_size(), smp.dp_rank(), smp.dp_size(), smp.rdp_size(), smp.get_cp_group()),
        "saved": list(smp.load(f"{path}/model.pt", partial=False)),
    }


def test_outputs_are_whole_and_files_are_written_once(ranks, tmp_path):
    net = CausalNet().eval()
    (tokens,) = word_batches(1, 4)[0]
    expected = net(tokens).detach()
    found = ranks(_evaluate, 2, str(tmp_path), config={**CONFIG, "microbatches": 2})
    assert [each["ranks"] for each in found] == [(rank, 2, 0, 1, 1, [0, 1]) for rank in range(2)]
    for each in found:
        torch.testing.assert_close(each["inside"], expected)
        torch.testing.assert_close(each["outside"], expected[:, 3:5].sum(1))
        assert each["best"] == expected.argmax(-1).tolist()
        assert each["loss"] == pytest.approx(float(next_word_loss(net, tokens)), abs=1e-5)
        assert each["saved"] == list(net.state_dict())


def _train_in(config_type):
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(CausalNet())
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    return list(updates(training_step(model, _float_loss), optimizer, word_batches(3, 2)))


def _float_loss(model, tokens):
    logits = model(tokens).float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_half_precision_is_as_close_as_in_one_process(ranks, half):
    expected = train_alone(CausalNet(), _optimizer, word_batches(3, 2), next_word_loss)
    for losses in ranks(_train_in, 2, half, config={**CONFIG, half: True}):
        assert losses == pytest.approx(expected.losses, rel=2e-2)


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_each_method_trains_alike(ranks, method):
    expected = train_alone(CausalNet(), _optimizer, word_batches(3, 2), next_word_loss)
    for losses in ranks(_train_in, 2, method, config={**CONFIG, "context_parallel": method}):
        assert losses == pytest.approx(expected.losses, abs=1e-5)


def test_stages_that_share_sequences_out_drop_the_same(ranks):
    stages = {"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2}
    expected = ranks(_train_with_dropout, 2, False, config=stages)[0]
    for losses in ranks(_train_with_dropout, 4, False, config={**stages, "context_parallel_degree": 2}):
        assert losses == pytest.approx(expected, abs=1e-9)
