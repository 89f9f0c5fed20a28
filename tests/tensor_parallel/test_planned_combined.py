"""Blocks that are split in place, with the other strategies: training is that of one process."""

from __future__ import annotations

import pytest
import torch
from support.models.own_blocks import Net, batches, loss
from support.training.closeness import close
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone

STEPS = 3


def _optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


def _net():
    torch.manual_seed(0)
    return Net()


def _wrapped(checkpointed=False, **options):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=True):
        net = Net(**options)
    model = smp.DistributedModel(net)
    if checkpointed:
        for layer in model.module.layers:
            smp.set_activation_checkpointing(layer)
    return model, smp.DistributedOptimizer(_optimizer(model.parameters()))


def _train(checkpointed):
    model, optimizer = _wrapped(checkpointed)
    losses = list(updates(training_step(model, loss), optimizer, batches(0, STEPS)))
    kinds = {type(part).__name__ for layer in model.module.layers for part in layer.modules()}
    return losses, model.state_dict(), "PlannedLinear" in kinds and "DistributedLinear" not in kinds


CASES = {
    "pipeline": (4, {"pipeline_parallel_degree": 2, "microbatches": 2, "prescaled_batch": True}, False),
    "pipeline, own batches": (4, {"pipeline_parallel_degree": 2, "microbatches": 2}, False),
    "sharded": (
        4,
        {
            "sharded_data_parallel_degree": 2,
            "sdp_gradient_clipping": 1e6,
            "sdp_param_persistence_threshold": 0,
            "prescaled_batch": True,
        },
        False,
    ),
    "sharded, checkpointed": (
        4,
        {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e6, "prescaled_batch": True},
        True,
    ),
    "state": (4, {"shard_optimizer_state": True}, False),
    "state, one batch": (4, {"shard_optimizer_state": True, "prescaled_batch": True}, False),
    "late": (2, {"delayed_parameter_initialization": True, "prescaled_batch": True}, False),
    "late, in stages": (
        4,
        {"delayed_parameter_initialization": True, "pipeline_parallel_degree": 2, "microbatches": 2},
        True,
    ),
    "late, sharded": (
        4,
        {
            "delayed_parameter_initialization": True,
            "sharded_data_parallel_degree": 2,
            "sdp_gradient_clipping": 1e6,
            "prescaled_batch": True,
        },
        False,
    ),
    "checkpointed": (2, {}, True),
    "memory": (2, {"optimize": "memory"}, False),
    "of four": (4, {"tensor_parallel_degree": 4}, False),
}
SAMPLE = {"pipeline, own batches", "sharded", "late, in stages"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SAMPLE else pytest.mark.full) for c in CASES])
def test_training_is_that_of_one_process(ranks, case):
    world, more, checkpointed = CASES[case]
    alone = train_alone(_net(), _optimizer, batches(0, STEPS), loss)
    config = {"tensor_parallel_degree": 2, "ddp": True, **more}
    for losses, state, is_planned in ranks(_train, world, checkpointed, config=config):
        assert is_planned
        assert losses == pytest.approx(alone.losses, abs=1e-5)
        for name, value in alone.model.state_dict().items():
            close(state[name], value, name)


def _save(path):
    import smdistributed.modelparallel.torch as smp

    model, optimizer = _wrapped()
    losses = list(updates(training_step(model, loss), optimizer, batches(0, 2)))
    smp.save_checkpoint(path, "t", partial=True, model=model, optimizer=optimizer)
    return losses


def _resume(path):
    import smdistributed.modelparallel.torch as smp

    model, optimizer = _wrapped()
    smp.resume_from_checkpoint(path)
    return list(updates(training_step(model, loss), optimizer, batches(2, 4)))


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2, "microbatches": 2}),
        pytest.param({"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2}, marks=pytest.mark.full),
        pytest.param({"tensor_parallel_degree": 2}, {"tensor_parallel_degree": 4}, marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_goes_on_at_another_degree(ranks, tmp_path, there, here):
    alone = train_alone(_net(), _optimizer, batches(0, 4), loss)
    first = ranks(_save, 2, str(tmp_path), config={"ddp": True, **there})[0]
    world = max(2, here.get("tensor_parallel_degree", 2))
    second = ranks(_resume, world, str(tmp_path), config={"ddp": True, **here})[0]
    assert first + second == pytest.approx(alone.losses, abs=1e-5)


def _whole_on_the_cpu():
    model, _ = _wrapped()
    ids, _ = next(batches(0, STEPS))
    return model.cpu().eval()(ids).detach()


def test_a_whole_copy_computes_by_itself(ranks):
    ids, _ = next(batches(0, STEPS))
    expected = _net().eval()(ids).detach()
    for found in ranks(_whole_on_the_cpu, 2, config={"tensor_parallel_degree": 2, "ddp": True}):
        close(found, expected)


def _dropped():
    """With dropout and a seed of each rank's own: the replicas of what a block returns."""
    import smdistributed.modelparallel.torch as smp

    model, _ = _wrapped(dropout=0.5)
    torch.manual_seed(smp.rank())
    ids, _ = next(batches(0, STEPS))
    found = []
    model.module.layers[1].attention.o.register_forward_hook(lambda _, args, result: found.append(result.detach()))
    output = model.module(ids)
    output.sum().backward()
    return found[0], model.module.layers[0].first.weight.grad


def test_dropout_of_what_is_replicated_agrees(ranks):
    (one, gradient), (other, its) = ranks(_dropped, 2, config={"tensor_parallel_degree": 2, "ddp": True})
    close(one, other)
    close(gradient, its)
