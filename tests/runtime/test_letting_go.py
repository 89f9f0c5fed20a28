"""A model that a script lets go of is freed, with all that the library has made for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

STAGED = {"pipeline_parallel_degree": 2, "microbatches": 2}
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}


def _left(kind):
    """Train a model, let go of it, and return what is left of it: of its modules and wrappers."""
    import gc
    import time
    import weakref

    import smdistributed.modelparallel.torch as smp

    def train():
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        if kind == "distributed":
            with smp.tensor_parallelism():
                net.append(smp.nn.DistributedLinear(8, 8))
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
        if kind == "checkpointed":
            smp.set_activation_checkpointing(net[1])

        @smp.step
        def step(x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        for _ in range(2):
            optimizer.zero_grad()
            step(torch.ones(4, 8))
            optimizer.step()
        return [weakref.ref(thing) for thing in (model, optimizer, *net.modules())]

    made = train()
    if smp.pp_size() > 1:
        smp.shutdown()  # until then it serves the other stages
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        left = [type(reference()).__name__ for reference in made if reference() is not None]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)  # a thread that has ended may still hold its last frame


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("plain", {}),
        ("checkpointed", {}),
        ("checkpointed", STAGED),
        ("plain", {"shard_optimizer_state": True, "fp16": True}),
        ("plain", SHARDED),
        ("plain", {**SHARDED, "bf16": True}),
        ("plain", {**STAGED, "bf16": True}),
        ("distributed", {"tensor_parallel_degree": 2}),
    ],
)
def test_nothing_is_left_of_a_model_that_a_script_lets_go_of(ranks, kind, config):
    assert ranks(_left, 2, kind, config={"ddp": True, **config}) == [[], []]


def _told_late():
    """Leave the job while the other rank has not yet told whether its last step ran backward."""
    import time

    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(nn.Linear(2, 2))
    agreement = model._accumulation._agreement
    agreement.open()
    if smp.rank():
        time.sleep(0.2)
    agreement.tell()
    smp.shutdown()
    return agreement.is_under_way


def test_a_job_ends_after_what_nobody_waits_for(ranks):
    assert ranks(_told_late, 2, config={"ddp": True}) == [False, False]


def test_a_job_that_has_ended_is_gone_at_once(solo):
    """Not with the next collection of garbage, which may come in a fork: there a group waits for threads that it does not have."""
    import gc
    import weakref

    import smdistributed.modelparallel.torch as smp

    gc.collect()
    gc.disable()
    try:
        session = weakref.ref(solo({}))
        smp.DistributedModel(nn.Linear(2, 2))
        smp.shutdown()
        assert session() is None
    finally:
        gc.enable()


def _refused(way):
    """Be refused a job, and join another one at the same meeting place; returns what is left of each."""
    import os

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.comm.host import collectives
    from smp_runtime.errors import SMPUserError
    from smp_runtime.job import session

    def fail(_):
        raise ValueError("it cannot begin")

    is_possible = collectives.is_possible
    if way == "late":
        session.at_init.append(fail)
    collectives.is_possible = lambda: False
    config = {"ddp": True, "deterministic": True, "host_collectives": way == "early"}
    try:
        smp.init(config)
    except (ValueError, SMPUserError) as error:
        said = str(error)
    finally:
        collectives.is_possible = is_possible
        session.at_init[:] = [begin for begin in session.at_init if begin is not fail]
    left = [
        smp.is_initialized(),
        torch.distributed.is_initialized(),
        torch.are_deterministic_algorithms_enabled(),
        "CUBLAS_WORKSPACE_CONFIG" in os.environ,
    ]
    smp.init({"ddp": True})
    total = torch.ones(())
    torch.distributed.all_reduce(total)
    smp.shutdown()
    return said, left, total.item(), torch.distributed.is_initialized()


@pytest.mark.parametrize(("way", "why"), [("early", "cannot share memory"), ("late", "it cannot begin")])
def test_a_job_that_cannot_begin_leaves_nothing_behind(ranks, way, why):
    for said, left, total, is_started in ranks(_refused, 2, way, init=False):
        assert why in said
        assert not any(left)
        assert (total, is_started) == (2.0, False)


def test_a_child_leaves_groups_of_its_parent_alone(solo):
    """A worker of a DataLoader is such a child; a model that the script let go of may still hold groups."""
    import gc
    import os
    import signal

    import smdistributed.modelparallel.torch as smp

    gc.disable()
    try:
        cycle = [solo({}).ranks.groups]
        cycle.append(cycle)
        smp.shutdown()
        del cycle
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        gc.enable()
