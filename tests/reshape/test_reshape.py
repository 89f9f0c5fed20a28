"""A running job goes over to other degrees: it trains on as if nothing had happened, and no byte moves twice."""

from __future__ import annotations

import pytest
import torch
from support.matrix import examples
from support.platform.memory_told import told
from support.training.reshape_training import FOUR, every_pair, settings_of, train_alone, train_through

#: From each kind of parallelism to another one.
SAMPLE = "dp2 pp2-tp2 s4 tp2-s2 pp4 dp2".split()


#: Sequences are shared out, whole again, and shared out beside other degrees.
SHARED = "cp2-o2 dp2 cp2-s4 pp2-cp2 tp2-s2 cp2-o2".split()


def _differences(expected, outcomes):
    return max(abs(a - b) for losses, _ in outcomes for a, b in zip(losses, expected, strict=True))


def _check_bytes(outcomes):
    """Over all ranks together what has come is what had to, within a tenth; and something had to."""
    changes = list(zip(*(changes for _, changes in outcomes), strict=True))
    total = 0
    for each in changes:
        received, bound = sum(change[2] for change in each), sum(change[3] for change in each)
        assert received <= 1.1 * bound, (each[0][:2], received, bound)
        total += received
    assert total > 0


def test_a_job_trains_on_as_if_nothing_had_happened(ranks):
    expected = ranks(train_alone, 1, 2 * len(SAMPLE), "float64", config={})[0]
    outcomes = ranks(train_through, 4, SAMPLE, 2, "float64", config=settings_of(SAMPLE[0]), timeout=120)
    assert _differences(expected, outcomes) < 1e-9
    _check_bytes(outcomes)


def test_a_job_begins_and_ends_to_share_sequences_out(ranks):
    names = SHARED[: examples(3, len(SHARED))]
    expected = ranks(train_alone, 1, 2 * len(names), "float64", config={})[0]
    outcomes = ranks(train_through, 4, names, 2, "float64", config=settings_of(names[0]), timeout=120)
    assert _differences(expected, outcomes) < 1e-9
    _check_bytes(outcomes)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.full), "fp16"])
def test_half_precision_keeps_its_float32_weights(ranks, precision):
    names = "o2 pp2-s2 tp2 s4 dp2".split() if precision == "bf16" else "s4 pp2 tp2-s2 o2".split()
    half = {precision: True}
    stays = ranks(train_through, 4, ["dp2"], 2 * len(names), config=settings_of("dp2", **half))[0][0]
    outcomes = ranks(train_through, 4, names, 2, "float32", half, config=settings_of(names[0], **half), timeout=120)
    assert _differences(stays, outcomes) < 2e-2
    _check_bytes(outcomes)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_ordered_pair_of_twelve_topologies(ranks):
    walk = every_pair(FOUR)
    assert len(walk) == 12 * 11 + 1
    expected = ranks(train_alone, 1, len(walk), "float64", config={}, timeout=300)[0]
    outcomes = ranks(train_through, 4, walk, 1, "float64", config=settings_of(walk[0]), timeout=1500)
    greatest = _differences(expected, outcomes)
    print(f"{len(walk) - 1} pairs: greatest difference {greatest:.1e}")
    for _, changes in outcomes[:1]:
        print(f"seconds of a change: median {sorted(c[4] for c in changes)[len(changes) // 2]:.2f}")
    assert greatest < 1e-9
    _check_bytes(outcomes)


def _keeps_objects():
    from support.training.checkpoint_training import Training

    import smdistributed.modelparallel.torch as smp

    run = Training(divided=True)
    module, group, calls = run.model.module, run.optimizer.param_groups[1], []
    run.train(0, 2)
    module.norm.register_forward_hook(lambda *_: calls.append(1))
    module.norm.eps = 1e-3
    run.model.eval()
    before = run.optimizer.param_groups[0]["lr"]
    state = torch.get_rng_state()
    smp.reshape(settings_of("s4"))
    assert torch.equal(torch.get_rng_state(), state)
    assert run.model.module is module
    assert run.optimizer.param_groups[1] is group
    assert group["weight_decay"] == 0.0
    assert run.optimizer.param_groups[0]["lr"] == before
    assert (module.norm.eps, module.norm.training, run.model.training) == (1e-3, False, False)
    assert not module.scale.requires_grad
    assert module.head.weight is module.embedding.weight
    run.model.train()
    calls.clear()
    run.train(2, 3)
    assert len(calls) == smp.state.cfg.microbatches
    assert run.optimizer.param_groups[0]["lr"] < before
    return smp.dp_size(), smp.state.cfg.sharded_data_parallel_degree


def test_what_the_script_holds_stays(ranks):
    assert ranks(_keeps_objects, 4, config=settings_of("tp2")) == [(4, 4)] * 4


def _refusals():
    from support.training.checkpoint_training import Training

    import smdistributed.modelparallel.torch as smp

    def said(settings):
        try:
            smp.reshape(settings)
        except (ValueError, RuntimeError) as error:
            return str(error)
        return ""

    run = Training(divided=True)
    early = said(settings_of("tp2"))
    losses = run.train(0, 2)
    found = [
        early,
        said({"tensor_parallel_degree": 3}),
        said({"fp16": True}),
        said({"microbatches": 2 + smp.rank() // 3}),
        said([2]),
        said({"tensor_paralel_degree": 2}),
    ]
    run.smp.state.step.microbatch = 0
    found.append(said({"microbatches": 2}))
    run.smp.state.step.microbatch = None
    return losses + run.train(2, 4), found


def test_what_cannot_be_is_refused_on_all_ranks_and_the_job_goes_on(ranks):
    expected = ranks(train_alone, 1, 4, config={})[0]
    wanted = [
        "not partitioned yet; call smp.reshape after the first step",
        "tensor_parallel_degree",
        "cannot change fp16",
        "rank 3 called smp.reshape",
        "a list; pass a dictionary",
        "tensor_paralel_degree",
        "inside a step",
    ]
    for losses, found in ranks(_refusals, 4, config=settings_of("pp2")):
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5
        for text, part in zip(found, wanted, strict=True):
            assert part in text, (part, found)


def _fails_half_way():
    from support.training.checkpoint_training import Training

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import SMPUserError
    from smp_runtime.model import recipe

    run = Training(divided=True)
    losses = run.train(0, 2)
    original = recipe.apply_tensor_parallelism

    def replaced(module, ranks):
        if ranks.cfg.tensor_parallel_degree == 2:
            raise SMPUserError("cannot be divided")
        return original(module, ranks)

    recipe.apply_tensor_parallelism = replaced
    try:
        with pytest.raises(SMPUserError, match="cannot be divided"):
            smp.reshape(settings_of("tp2"))
    finally:
        recipe.apply_tensor_parallelism = original
    assert (smp.tp_size(), smp.state.cfg.sharded_data_parallel_degree) == (1, 4)
    return losses + run.train(2, 5)


def test_a_model_that_cannot_be_laid_out_goes_back_to_where_it_was(ranks):
    expected = ranks(train_alone, 1, 5, config={})[0]
    for losses in ranks(_fails_half_way, 4, config=settings_of("s4")):
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5


def _kept_and_resumed(first):
    from support.training.checkpoint_training import Training

    import smdistributed.modelparallel.torch as smp

    run = Training(divided=True)
    if not first:
        begin = smp.resume_from_checkpoint("nowhere")["step"]
        return begin, run.train(begin, begin + 2)
    for step in range(6):
        if step == 3:
            smp.reshape(settings_of("tp2-s2"))
        run.train(step, step + 1)
        assert smp.memory_checkpoint(run.model, run.optimizer, {"step": step + 1})
    return None


def test_copies_in_memory_are_of_the_degrees_that_they_were_made_with(ranks, tmp_path):
    expected = ranks(train_alone, 1, 8, config={})[0][6:]
    ranks(_kept_and_resumed, 4, True, config=settings_of("dp2"), env=told(tmp_path))
    for begin, losses in ranks(_kept_and_resumed, 4, False, config=settings_of("dp2"), env=told(tmp_path, 1)):
        assert begin == 6
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5
