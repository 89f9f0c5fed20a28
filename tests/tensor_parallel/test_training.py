"""Training with split layers is training in one process: losses, weights, states and norms, over many steps."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.models.plain_transformer import Layer
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone
from torch import nn

SIZES = {"num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16, "intermediate_size": 24}
BATCH, SEQ, VOCABULARY, STEPS = 8, 6, 13, 10


class Net(nn.Module):
    """Ordinary layers around a distributed one, with a head that shares the embedding's weight."""

    def __init__(self, make_layer, make_linear):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(make_layer() for _ in range(2))
        self.between = make_linear()
        self.norm = nn.LayerNorm(16)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer((x, None))[0]
        return self.norm(torch.tanh(self.between(x))) @ self.embedding.weight.t()


def _reference_net():
    torch.manual_seed(0)
    return Net(lambda: Layer(**SIZES, causal_mask_size=SEQ), lambda: nn.Linear(16, 16))


def _batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(VOCABULARY, (BATCH, SEQ + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def _loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _batches(steps):
    return (_batch(step) for step in range(steps))


def _loss_of(model, ids, targets):
    return _loss(model(ids), targets)


def _adamw(parameters):
    # The keys' biases have no gradient but rounding, which a small eps would blow up.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def _alone(steps=STEPS):
    alone = train_alone(_reference_net(), _adamw, _batches(steps), _loss_of)
    return alone.losses, alone.model.state_dict()


def _wrapped():
    import smdistributed.modelparallel.torch as smp

    quiet = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    model = smp.DistributedModel(
        Net(
            lambda: smp.nn.DistributedTransformerLayer(**SIZES, **quiet, causal_mask_size=SEQ),
            lambda: smp.nn.DistributedLinear(16, 16),
        )
    )
    model.load_state_dict(_reference_net().state_dict())
    return smp, model


def _mine(smp):
    """This rank's part of the batch."""
    if smp.state.cfg.prescaled_batch:
        share = BATCH // smp.rdp_size()
        return slice(smp.rdp_rank() * share, (smp.rdp_rank() + 1) * share)
    share = BATCH // smp.dp_size()
    return slice(smp.dp_rank() * share, (smp.dp_rank() + 1) * share)


def _train(steps=STEPS):
    smp, model = _wrapped()
    torch.manual_seed(smp.rank())
    optimizer = smp.DistributedOptimizer(_adamw(model.parameters()))

    return list(updates(training_step(model, _loss_of), optimizer, _batches(steps))), model.state_dict()


def _config(degree, optimize, prescaled, **more):
    return {"tensor_parallel_degree": degree, "ddp": True, "optimize": optimize, "prescaled_batch": prescaled, **more}


CASES = list(itertools.product((2, 4), (2, 4), ("speed", "memory"), (True, False), (1, 2)))
SAMPLE = {
    (2, 4, "memory", False, 2),
    (4, 4, "speed", True, 1),
}


@pytest.mark.parametrize(
    ("degree", "world", "optimize", "prescaled", "microbatches"),
    [
        pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.full)
        for case in CASES
        if case[0] <= case[1] and not (case[0] == 4 and not case[3] and case[4] == 2 and BATCH // 4 < 2)
    ],
)
def test_many_steps_equal_one_process(ranks, degree, world, optimize, prescaled, microbatches):
    config = _config(degree, optimize, prescaled, microbatches=microbatches)
    _equals_one_process(ranks(_train, world, config=config, timeout=100))


def _equals_one_process(results, steps=STEPS):
    losses, state = _alone(steps)
    for found, weights in results:
        assert found == pytest.approx(losses, abs=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, atol=2e-5, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.both_transports
@pytest.mark.parametrize(
    ("optimize", "prescaled", "steps"),
    [
        pytest.param("memory", False, 6),
        *(
            pytest.param(*case, STEPS, marks=pytest.mark.full)
            for case in itertools.product(("speed", "memory"), (True, False))
        ),
    ],
)
def test_with_pipeline_stages(ranks, optimize, prescaled, steps):
    config = _config(2, optimize, prescaled, pipeline_parallel_degree=2, microbatches=2)
    _equals_one_process(ranks(_train, 4, steps, config=config, timeout=100), steps)


@pytest.mark.full
@pytest.mark.parametrize(("optimize", "prescaled"), [("memory", False), ("speed", True)])
def test_with_pipeline_stages_and_replicas(optimize, prescaled):
    from support.ranks.rank_pool import RankPool

    config = _config(2, optimize, prescaled, pipeline_parallel_degree=2, microbatches=2)
    with RankPool(8) as pool:
        _equals_one_process(pool.run(_train, 8, config=config, timeout=110))


@pytest.mark.both_transports
@pytest.mark.parametrize("prescaled", [pytest.param(True, marks=pytest.mark.full), False])
def test_with_shared_out_optimizer_state(ranks, prescaled):
    config = _config(2, "memory", prescaled, shard_optimizer_state=True)
    _equals_one_process(ranks(_train, 4, config=config, timeout=100))


def _clipped():
    smp, model = _wrapped()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))

    @smp.step
    def train_step(ids, targets):
        model.backward(_loss(model(ids), targets))

    ids, targets = _batch(0)
    train_step(ids[_mine(smp)], targets[_mine(smp)])
    return optimizer.clip_master_grads(0.1), [smp.tp_rank(), model.local_state_dict()["between.weight"].shape]


def test_the_norm_counts_each_part_once(ranks):
    model = _reference_net().to(torch.bfloat16)
    ids, targets = _batch(0)
    _loss(model(ids), targets).backward()
    norm = torch.cat([p.grad.float().flatten() for p in model.parameters()]).norm()
    found = ranks(_clipped, 4, config=_config(2, "memory", False, bf16=True), timeout=100)
    assert {round(value, 6) for value, _ in found} == {round(found[0][0], 6)}
    assert found[0][0] == pytest.approx(float(norm), rel=0.02)  # bfloat16 adds differently
    assert found[0][1] == [0, (16, 8)]


def _loaded_on_some():
    smp, model = _wrapped()
    changed = {name: value + 1.0 for name, value in model.state_dict().items()}
    if smp.rdp_rank() == 0:
        model.load_state_dict(changed)

    @smp.step
    def train_step(ids):
        model.backward(model(ids).sum() * 0.0)

    train_step(_batch(0)[0][_mine(smp)])
    return all(torch.equal(value, changed[name]) for name, value in model.state_dict().items())


def test_a_state_that_some_replicas_loaded_reaches_the_others(ranks):
    assert all(ranks(_loaded_on_some, 4, config=_config(2, "speed", True), timeout=100))


def _saved(path):
    from smp_runtime.module_conversion.parameter_layout import slices_by_name

    smp, model = _wrapped()
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step
    def train_step(ids, targets):
        loss = _loss(model(ids), targets)
        model.backward(loss)
        return loss

    def train(step):
        ids, targets = _batch(step)
        optimizer.zero_grad()
        loss = train_step(ids[_mine(smp)], targets[_mine(smp)]).reduce_mean()
        optimizer.step()
        return float(loss)

    train(0)
    smp.save_checkpoint(path, tag="one", model=model, optimizer=optimizer)
    expected = [train(1), train(2)]
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    smp.resume_from_checkpoint(path)
    again = [train(1), train(2)]
    smp.save_checkpoint(path, tag="full.pt", partial=False, model=model)
    smp.barrier()
    whole = torch.load(f"{path}/full.pt", weights_only=True)
    split = slices_by_name(model.module)
    return expected, again, all(tuple(whole[name].shape) == where.shape for name, where in split.items())


def test_checkpoints(ranks, tmp_path):
    for expected, again, whole in ranks(_saved, 2, str(tmp_path), config=_config(2, "memory", False), timeout=100):
        assert again == expected
        assert whole
