"""Training over ranks that share sequences out is training in one process, beside each other strategy."""

from __future__ import annotations

import pytest
import torch
from support.matrix import sampled
from support.models.long_sequences import CausalNet, next_word_loss, word_batches
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone

STEPS = 2


def _optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def _train(steps, dtype, batch, marks):
    """One rank's part; runs inside a rank process."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(smp.rank())
    model = CausalNet().to(dtype)
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(model)
    model = smp.DistributedModel(model)
    if marks:
        for block in model.module.blocks:
            smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    losses = list(updates(training_step(model, next_word_loss), optimizer, word_batches(steps, batch)))
    state = model.state_dict()
    return {
        "losses": losses,
        "state": {name: value.clone() for name, value in state.items()},
        "cp": (smp.cp_rank(), smp.dp_rank()),
    }


CASES = {
    "alone": (2, {}),
    "three": (3, {}),
    "four": (4, {}),
    "beside replicas": (4, {"context_parallel_degree": 2}),
    "microbatches": (2, {"microbatches": 2}),
    "state": (2, {"shard_optimizer_state": True}),
    "sharded": (
        2,
        {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e6},
    ),
    "sharded and replicas": (
        4,
        {
            "sharded_data_parallel_degree": 4,
            "context_parallel_degree": 2,
            "sdp_param_persistence_threshold": 0,
            "sdp_gradient_clipping": 1e6,
        },
    ),
    "pipeline": (4, {"context_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2}),
    "pipeline and checkpointing": (
        4,
        {"context_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 4, "checkpointing": True},
    ),
    "zero bubble": (
        4,
        {"context_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "zero_bubble"},
    ),
    "tensor": (
        4,
        {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": "speed"},
    ),
    "tensor, activations divided": (
        4,
        {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "prescaled_batch": True},
    ),
    "checkpointing": (2, {"checkpointing": True}),
    "offload": (2, {"checkpointing": True, "offload_activations": True, "microbatches": 2}),
}


SAMPLE = {
    "alone",
    "beside replicas",
    "microbatches",
    "state",
    "sharded",
    "pipeline",
    "tensor",
    "checkpointing",
    "offload",
}


@pytest.mark.parametrize("case", sampled(CASES, SAMPLE))
def test_losses_and_parameters_equal_one_process(ranks, case):
    world, given = CASES[case]
    config = {"ddp": True, "context_parallel_degree": world, **given}
    marks = config.pop("checkpointing", False)
    expected = train_alone(CausalNet().double(), _optimizer, word_batches(STEPS, 4), next_word_loss)
    for result in ranks(_train, world, STEPS, torch.float64, 4, marks, config=config):
        assert result["losses"] == pytest.approx(expected.losses, abs=1e-9)
        for name, value in expected.model.state_dict().items():
            torch.testing.assert_close(
                result["state"][name], value, atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )
