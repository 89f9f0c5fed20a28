"""What tensor parallelism and sharding say of a model when it has got its place."""

from __future__ import annotations

import logging

import torch
from support.logs import logged
from support.training.sharded_training import Blocks


def _said():
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = Blocks()
    smp.set_tensor_parallelism(model.blocks, True)
    with logged(logging.INFO) as found:
        wrapped = smp.DistributedModel(model)
    return [text for text in found if "ranks: rank" in text], wrapped.shards.elements


def test_both_say_what_is_split_what_stays_whole_and_how_much_each_rank_holds(ranks):
    config = {
        "tensor_parallel_degree": 2,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 100,
        "prescaled_batch": True,
        "ddp": True,
    }
    everyone = ranks(_said, 4, config=config)
    assert [len(said) for said, _ in everyone] == [2, 0, 0, 0], "one rank of each stage speaks"
    texts, (sharded, whole) = everyone[0]
    lines = [" ".join(line.split()) for text in texts for line in text.splitlines()]
    # 4 blocks of two linear layers, 32 → 128 → 32: one split by outputs, one by inputs, so that its bias is whole.
    split, biases, others = 4 * (2 * 32 * 128 + 128), 4 * 32, 4 * 64 + 8 * 32 + 32 + 32 + 1
    assert lines[:6] == [
        f"Tensor parallelism over 2 ranks: rank 0 holds {(split / 2 + biases + others) / 256:.1f} of "
        f"{(split + biases + others) / 256:.1f} KiB of parameters",
        "module kind parameters on this rank",
        "blocks.0–3.mlp.0 4 × Linear → PlannedLinear 16,896 8,448",
        "blocks.0–3.mlp.2 4 × Linear → PlannedLinear 16,512 8,320",
        f"whole on every rank: {biases} parameters in 4 tensors of distributed modules, because each rank needs them (norms, "
        "biases that are added to a sum) or nobody asked (embeddings without distribute_embedding): blocks.0–3.mlp.2.bias 4 × 32",
        f"whole on every rank: {others} parameters of modules that are not distributed, because nothing marked them or they have "
        "no distributed form: enter.weight 256, blocks.0–3.norm.weight 4 × 32, blocks.0–3.norm.bias 4 × 32, enter.bias 32, "
        "leave.weight 32, leave.bias 1",
    ]
    assert lines[6].startswith("Sharded over 2 ranks: rank 0 holds ")
    rows = [line.split() for line in lines if "float32" in line]
    assert sum(int(row[-2].replace(",", "")) for row in rows) == sharded
    assert sum(int(row[-1].replace(",", "")) for row in rows) == sharded / 2
    assert lines[-1].startswith(
        f"whole on every rank: {whole} parameters in 19 tensors, each below sdp_param_persistence_threshold (100; 0 shards all): "
    )
    assert "blocks.0–3.norm.weight 4 × 32" in lines[-1]


def test_without_either_there_is_nothing_to_say(solo):
    import smdistributed.modelparallel.torch as smp

    solo({})
    with logged(logging.INFO) as found:
        smp.DistributedModel(Blocks())
    assert not [text for text in found if "ranks: rank" in text]
