"""Saved at one topology, resumed at another: training goes on as if one process had never stopped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.matrix import examples
from support.models.long_sequences import CausalNet, next_word_loss, word_batches
from support.ranks.rank_pool import RankPool
from support.training.checkpoint_training import SHARDED, TOPOLOGIES, resume_each, resume_train_save, train_and_save
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone

STOP, END = 10, 20

#: From one topology to the next: each of those with up to four processes is resumed at, and saves, once.
CHAIN = "one pp2-s2 tp2 o2 pp2 s4 tp2-s2 dp2 pp2-tp2 s2-dp2 tp2-o2 pp2-o2 one".split()
HOP = 3


def _precision(name: str, precision: str) -> tuple[int, dict]:
    world, settings = TOPOLOGIES[name]
    return world, settings if precision == "fp32" else {**settings, precision: True}


def _expected(ranks, tmp_path, precision: str) -> list[float]:
    world, settings = _precision("one", precision)
    return ranks(train_and_save, world, str(tmp_path / "alone"), "alone", 0, END, config=settings)[0]


def _run_pairs(ranks, path, pairs, precision: str) -> dict[tuple[str, str], float]:
    """The greatest difference from the uninterrupted run, of each pair."""
    expected = _expected(ranks, path, precision)
    differences = {}
    for name in dict.fromkeys(source for source, _ in pairs):
        world, settings = _precision(name, precision)
        losses = ranks(train_and_save, world, str(path), name, 0, STOP, config=settings, timeout=200)
        for rank in losses:
            differences[name, ""] = max(abs(a - b) for a, b in zip(rank, expected[:STOP], strict=True))
    for name in dict.fromkeys(target for _, target in pairs):
        world, settings = _precision(name, precision)
        tags = [source for source, target in pairs if target == name]
        for rank in ranks(resume_each, world, str(path), tags, END, config=settings, timeout=400):
            for tag in tags:
                found = max(abs(a - b) for a, b in zip(rank[tag], expected[STOP:], strict=True))
                differences[tag, name] = max(found, differences.get((tag, name), 0.0))
    return differences


def test_pairs_one_after_the_other_go_on_as_one_process(ranks, tmp_path):
    chain = CHAIN[: examples(6, len(CHAIN))]
    expected = ranks(train_and_save, 1, str(tmp_path / "alone"), "alone", 0, HOP * len(chain), config={})[0]
    differences = {}
    for number, name in enumerate(chain):
        world, settings = TOPOLOGIES[name]
        first, last = number * HOP, (number + 1) * HOP
        tag = str(first) if number else None
        seed = 99 if number else 0
        for losses in ranks(resume_train_save, world, str(tmp_path), tag, first, last, seed, config=settings):
            differences[number, name] = max(abs(a - b) for a, b in zip(losses, expected[first:last], strict=True))
    assert max(differences.values()) < 1e-5, differences


#: From one layout with shared sequences to the next: processes and settings.
CONTEXT = [
    (2, {"context_parallel_degree": 2}),
    (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    (4, {"context_parallel_degree": 4, "shard_optimizer_state": True}),
    (4, {"context_parallel_degree": 2, "sharded_data_parallel_degree": 4, **SHARDED}),
    (1, {}),
    (4, {"context_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2}),
    (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "prescaled_batch": True}),
    (4, {"context_parallel_degree": 4, "sharded_data_parallel_degree": 2, **SHARDED}),
    (2, {"context_parallel_degree": 2, "sharded_data_parallel_degree": 2, **SHARDED}),
]


def _go_on_with_long_sequences(path, first, last, partial):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(first + smp.rank())
    model = CausalNet().double()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(model)
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    if first:
        content = smp.resume_from_checkpoint(path, tag=f"{first}-{partial}", partial=partial)
        assert content["step"] == first
    batches = word_batches(last, 4)[first:]
    losses = list(updates(training_step(model, next_word_loss), optimizer, batches))
    for is_partial in (True, False):
        smp.save_checkpoint(
            path,
            tag=f"{last}-{is_partial}",
            partial=is_partial,
            model=model,
            optimizer=optimizer,
            user_content={"step": last},
        )
    return losses, smp.cp_size()


def test_shared_sequences_go_on_whole_and_shared_out_otherwise(ranks, tmp_path):
    chain = CONTEXT[: examples(4, len(CONTEXT))]
    batches = word_batches(HOP * len(chain), 4)
    expected = train_alone(CausalNet().double(), _adamw, batches, next_word_loss).losses
    for number, (world, settings) in enumerate(chain):
        first, last = number * HOP, (number + 1) * HOP
        given = (str(tmp_path), first, last, number % 2 == 1)
        for losses, size in ranks(_go_on_with_long_sequences, world, *given, config={"ddp": True, **settings}):
            assert losses == pytest.approx(expected[first:last], abs=1e-9), (number, settings)
            assert size == settings.get("context_parallel_degree", 1)


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_goes_on_at_other_degrees(ranks, tmp_path, precision):
    pairs = [("s2", "pp2"), ("pp2", "tp2"), ("tp2", "s2"), ("o2", "s2"), ("s2", "o2")]
    pairs = pairs[:3] if precision == "bf16" else pairs
    differences = _run_pairs(ranks, tmp_path, pairs, precision)
    assert max(differences.values()) < 2e-2, differences


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


#: Every ordered pair of these is tried by the full tests.
MATRIX = "one o2 pp2 tp2 s4 s2-dp2 pp2-s2 tp2-s2 pp2-tp2 pp2-tp2-dp2 pp4-o2 pp2-tp2-s2".split()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("third", range(3))
def test_all_pairs(eight, tmp_path, precision, third):
    pairs = [(source, target) for source in MATRIX for target in MATRIX][third::3]
    differences = _run_pairs(eight.run, tmp_path, pairs, precision)
    print(f"{len(pairs)} pairs in {precision}: greatest difference {max(differences.values()):.1e}")
    assert max(differences.values()) < (1e-5 if precision == "fp32" else 2e-2), differences


def test_precision_may_change(ranks, solo, tmp_path):
    """A bf16 run continues from float32 weights of its own, and a float32 run takes the masters, not rounded weights."""

    def masters(path):
        from support.training.checkpoint_training import Training

        run = Training()
        run.train(0, 3)
        run.save(path, "half", 3)
        return {name: p.detach().clone() for name, p in run.model.virtual_named_parameters()}

    expected = ranks(masters, 1, str(tmp_path), config={"bf16": True})[0]
    assert any(not torch.equal(p, p.bfloat16().float()) for p in expected.values())
    solo({})
    from support.training.checkpoint_training import Training

    run = Training(seed=3)
    assert run.resume(str(tmp_path)) == 3
    for name, parameter in run.model.named_parameters():
        if name in expected:
            assert torch.equal(parameter, expected[name]), name
