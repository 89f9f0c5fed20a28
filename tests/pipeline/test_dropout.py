"""Random numbers in a pipeline do not depend on where modules are or in which order their work runs."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from support.models.pipeline_models import CASES, built
from support.training.closeness import close
from support.training.reference import Alone, divided

from smp_runtime.tensors.random_state import task_seed

BATCH = 8


@contextlib.contextmanager
def _generator(seed):
    """Draw from a generator of one's own meanwhile."""
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


class Replay:
    """One process that draws what each module of a pipeline draws: a module that is on another stage than its caller
    begins with a seed made of step, replica, microbatch, path and the number of its call, and so does the step function.
    """

    def __init__(self, model, stage_of, replica):
        self.stage_of, self.replica = stage_of, replica
        self.callers = [""]  # modules that run, outermost first
        for path, module in model.named_modules():
            module.forward = self._wrapped(path, module.forward)

    def microbatch(self, seed, number, function):
        self.seed, self.number, self.calls = seed, number, {}
        with _generator(task_seed(seed, self.replica, number, "", 0)):
            return function()

    def _wrapped(self, path, forward):
        def replayed(*args, **kwargs):
            # Calls are counted by the task that makes them, which is the remote module above, or the step function.
            is_remote = self.stage_of[path] != self.stage_of[self.callers[-1]]
            self.callers.append(path)
            try:
                if not is_remote:
                    return forward(*args, **kwargs)
                calls = self.calls
                nth = calls.get(path, 0)
                calls[path] = nth + 1
                self.calls = {}
                with _generator(task_seed(self.seed, self.replica, self.number, path, nth)):
                    try:
                        return forward(*args, **kwargs)
                    finally:
                        self.calls = calls
            finally:
                self.callers.pop()

        return replayed


def reference(name, stage_of, steps, microbatches, replicas):
    """Losses and gradients of one process with the pipeline's seeds; the random numbers of each replica are replayed."""
    case, model = CASES[name], built(name)
    alone = Alone(model, lambda parameters: torch.optim.AdamW(parameters, lr=case.rate))
    replay = Replay(model, stage_of, 0)
    torch.manual_seed(21)
    for step in range(steps):
        seed = int(torch.empty((), dtype=torch.int64).random_())

        def loss(model, index, *piece, seed=seed):
            replay.replica, number = divmod(index, microbatches)
            return replay.microbatch(seed, number, lambda: case.loss(model, *piece)[0])

        pieces = divided(case.batch(step, BATCH), microbatches, replicas)
        alone.step([(index, *piece) for index, piece in enumerate(pieces)], loss)
    return alone.losses, alone.gradients


def _dropping(name, steps, manual):
    import torch
    from support.models.models import part
    from support.models.pipeline_models import CASES, built, scattered
    from support.training.pipeline_training import replayed

    import smdistributed.modelparallel.torch as smp

    case, net = CASES[name], built(name)
    if manual:
        for path, stage in scattered(net, case, smp.pp_size()).items():
            smp.set_partition(net.get_submodule(path), stage)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=case.rate))

    @smp.step
    def train(*arguments):
        loss, _ = case.loss(model, *arguments)
        model.backward(loss)
        return loss

    torch.manual_seed(21)
    losses, gradients, replays = [], [], 0
    for step in range(steps):
        optimizer.zero_grad()
        loss = train(*part(case.batch(step, 8), smp.dp_rank(), smp.dp_size()))
        losses.append(float(loss.reduce_mean()))
        gradients.append({n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None})
        optimizer.step()
        replays += replayed(model)
    stages = {path: model.assignment.stage_of(path) for path, _ in net.named_modules()}
    state = torch.get_rng_state()
    return {"losses": losses, "gradients": gradients, "stages": stages, "replays": replays, "state": state}


CASE = [
    ("dropping", 2, 1, 4, True),
    ("dropping", 2, 2, 2, False),
    pytest.param("dropping", 4, 1, 2, True, marks=pytest.mark.full),
    pytest.param("dropping", 4, 1, 8, False, marks=pytest.mark.full),
    pytest.param("gpt2_dropping", 2, 1, 2, False, marks=pytest.mark.full),
    pytest.param("gpt2_dropping", 4, 1, 4, True, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "stages", "replicas", "microbatches", "manual"), CASE)
def test_equal_to_one_process_with_the_same_seeds(ranks, name, stages, replicas, microbatches, manual):
    settings = {"partitions": stages, "microbatches": microbatches, "ddp": replicas > 1}
    if manual:
        settings.update(auto_partition=False, default_partition=0)
    results = ranks(_dropping, stages * replicas, name, 8, manual, config=settings, timeout=200)
    losses, gradients = reference(name, results[0]["stages"], 8, microbatches, replicas)
    for step in range(8):
        assert sum(r["losses"][step] for r in results) / len(results) == pytest.approx(losses[step], abs=1e-5)
        for result in results:
            for path, gradient in result["gradients"][step].items():
                close(gradient, gradients[step][path], f"step {step}: {path}")
    assert all(result["replays"] > 0 for result in results)
    # The script's own generators stay together.
    assert all(torch.equal(result["state"], results[0]["state"]) for result in results)


def test_every_task_has_a_seed_of_its_own():
    places = list(itertools.product((1, 2), (0, 1), (0, 1, 11), ("", "a", "a.b"), (0, 1)))
    assert len({task_seed(*place) for place in places}) == len(places)
    assert task_seed(*places[3]) == task_seed(*places[3])
    assert all(0 <= task_seed(*place) < 2**63 for place in places)


def _repeated(warm, times):
    """The same step again and again, under delays that are never the same."""
    import random
    import time

    import torch
    from support.models.pipeline_models import CASES, built
    from support.training.pipeline_training import replayed

    import smdistributed.modelparallel.torch as smp
    import smp_runtime.pipeline.transport.transport as transport

    random.seed(time.time_ns())
    original = transport.PipelineTransport.__init__
    transport.PipelineTransport.__init__ = lambda self, *args, **kwargs: original(
        self, *args, **{**kwargs, "delay": lambda: random.uniform(0, 0.002)}
    )
    try:
        case = CASES["dropping"]
        model = smp.DistributedModel(built("dropping"))

        @smp.step
        def train(*arguments):
            loss, _ = case.loss(model, *arguments)
            model.backward(loss)
            return loss

        found = []
        for step in range(warm + times):
            torch.manual_seed(5)
            model.zero_grad()
            loss = train(*case.batch(0, BATCH)).stack()
            if step >= warm:
                assert replayed(model)
                found.append([loss, *(p.grad.clone() for p in model.local_parameters())])
    finally:
        transport.PipelineTransport.__init__ = original
    return found


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_replayed_steps_are_bitwise_repeatable(ranks, stages):
    """Under random delays, the planned order and the seeds leave nothing to chance, once the order has been reviewed."""
    for first, *others in ranks(
        _repeated, stages, 12, 10, config={"partitions": stages, "microbatches": 4}, timeout=200
    ):
        assert len(first) > 1
        for other in others:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))
