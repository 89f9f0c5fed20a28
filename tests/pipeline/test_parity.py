"""A model on the stages of a pipeline trains as in one process: the same losses, the same gradients, the same buffers."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.matrix import sampled
from support.models.pipeline_models import PLAIN
from support.training.closeness import close
from support.training.pipeline_training import alone, compare, staged

BATCH = 16
#: Stages, microbatches, schedule, whether placed by hand.
PAIRWISE = [
    (2, 1, "interleaved", False),
    (4, 1, "simple", True),
    (2, 2, "zero_bubble", True),
    (4, 2, "interleaved", False),
    (2, 4, "interleaved", True),
    (4, 4, "zero_bubble", False),
    (2, 8, "simple", False),
    (4, 8, "interleaved", True),
]
WHOLE = list(itertools.product((2, 4), (1, 2, 4, 8), ("interleaved", "zero_bubble", "simple"), (False, True)))
#: Their steps do not all go the same way, so their order need not be planned.
IRREGULAR = {"branching", "lengths"}


def config(stages, microbatches, schedule, manual, **more):
    by_hand = {"auto_partition": False, "default_partition": 0} if manual else {}
    return {
        "pipeline_parallel_degree": stages,
        "microbatches": microbatches,
        "pipeline": schedule,
        **by_hand,
        **more,
    }


def _staged(*args):
    return staged(*args)  # what functions return travels by reference only where their module can be imported


def check(ranks, name, stages, microbatches, schedule, manual, steps):
    # A norm over the one or two samples of a microbatch makes much of the rounding of float32.
    dtype, tolerance = (torch.float64, 1e-9) if name == "normed" else (torch.float32, 1e-5)
    expected = alone(name, steps=steps, batch=BATCH, microbatches=microbatches, evaluates=True, dtype=dtype)
    settings = config(stages, microbatches, schedule, manual)
    results = ranks(_staged, stages, name, steps, BATCH, manual, dtype, True, config=settings, timeout=300)
    compare(results, expected, tolerance)
    owners = [path for result in results for path in result["local"]]
    assert len(set(owners)) == len(owners)  # every parameter on one stage
    for result in results:
        for got, theirs in zip(result["outputs"], expected["outputs"], strict=True):
            close(got, theirs, "the outputs of the last step")
        assert name in IRREGULAR or result["replayed"] > 0


@pytest.mark.parametrize(("number", "name"), list(enumerate(PLAIN)), ids=list(PLAIN))
def test_losses_and_every_gradient_equal_one_process(ranks, number, name):
    check(ranks, name, *PAIRWISE[(2 * number + 5 * (number // 4)) % 8], steps=6)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("stages", "microbatches", "schedule", "manual"), WHOLE)
def test_the_whole_matrix(ranks, name, stages, microbatches, schedule, manual):
    check(ranks, name, stages, microbatches, schedule, manual, steps=20)


@pytest.mark.parametrize(
    ("stages", "steps", "schedule"),
    sampled(
        [
            (2, 40, "interleaved"),
            (2, 200, "interleaved"),
            (4, 200, "interleaved"),
            (2, 200, "zero_bubble"),
            (4, 200, "zero_bubble"),
        ],
        {(2, 40, "interleaved")},
    ),
)
def test_many_steps_in_double_precision(ranks, stages, steps, schedule):
    expected = alone("tied", steps=steps, batch=4, microbatches=2, dtype=torch.float64)
    results = ranks(
        _staged,
        stages,
        "tied",
        steps,
        4,
        False,
        torch.float64,
        config=config(stages, 2, schedule, False),
        timeout=300,
    )
    compare(results, expected, 1e-9)
    assert all(result["replayed"] > 0.75 * steps for result in results)


#: ``branching`` has parameters that only some replicas use.
REPLICATED = [("tied", False), ("branching", False), ("mlp", True)]
WHOLE_REPLICATED = [(n, s) for n in PLAIN if n not in ("normed", "branching") for s in (False, True)]


@pytest.mark.both_transports
@pytest.mark.parametrize(("name", "sharded"), REPLICATED)
def test_two_stages_of_two_replicas(ranks, name, sharded):
    replicas(ranks, name, sharded, 2, "zero_bubble" if name == "tied" else "interleaved", False, 8)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "sharded"), WHOLE_REPLICATED)
@pytest.mark.parametrize(
    ("microbatches", "schedule", "manual"),
    list(itertools.product((1, 4), ("interleaved", "zero_bubble", "simple"), (False, True))),
)
def test_two_stages_of_two_replicas_whole(ranks, name, sharded, microbatches, schedule, manual):
    replicas(ranks, name, sharded, microbatches, schedule, manual, 20)


def replicas(ranks, name, sharded, microbatches, schedule, manual, steps):
    expected = alone(name, steps=steps, batch=BATCH, microbatches=microbatches, replicas=2)
    settings = config(2, microbatches, schedule, manual, ddp=True, shard_optimizer_state=sharded)
    results = ranks(_staged, 4, name, steps, BATCH, manual, config=settings, timeout=300)
    compare(results, expected, gradients=not sharded)  # with sharded state, they are gone after the update
    if sharded:
        for key, value in expected["state"].items():
            close(results[0]["state"][key], value, key, 1e-4)


# -- half precision ----------------------------------------------------------------------------------------------------


def _half(steps, scaling):
    """Losses, overflows and weights of a few steps; in one process and in a pipeline."""
    from support.models.pipeline_models import CASES, built

    import smdistributed.modelparallel.torch as smp

    case = CASES["tied"]
    model = smp.DistributedModel(built("tied"))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), **scaling)

    @smp.step
    def train(*arguments):
        loss, _outputs = case.loss(model, *arguments)
        model.backward(loss)
        return loss

    losses, overflows = [], []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(float(train(*case.batch(step, BATCH)).reduce_mean()))
        optimizer.step()
        overflows.append(bool(optimizer.overflow))
    return losses, overflows, {name: value.float() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp16 with overflow"])
def test_half_precision_equals_one_process_of_the_same_precision(ranks, kind, stages):
    scaling = {"static_loss_scale": 128.0} if kind == "fp16" else {}
    if "overflow" in kind:
        scaling = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**20, "scale_window": 4}}
    settings = {"microbatches": 4, kind.split()[0]: True}
    (losses, overflows, state) = ranks(_half, 1, 12, scaling, config=settings, timeout=200)[0]
    assert any(overflows) == ("overflow" in kind)
    assert not all(overflows)
    settings["pipeline_parallel_degree"] = stages
    for got, where, weights in ranks(_half, stages, 12, scaling, config=settings, timeout=200):
        assert got == pytest.approx(losses, rel=2e-2)
        assert where == overflows
        for name, value in state.items():
            close(weights[name], value, name, 2e-2)
