"""What a rank's memory holds at most while it loads: its shard and one tensor."""

from __future__ import annotations

import pytest

#: Sharded by neighbours; the largest tensor is a sixteenth of the model.
_S4 = {"ddp": True, "sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 0}


def _model(tensor_parallel):
    import contextlib

    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    with smp.tensor_parallelism() if tensor_parallel else contextlib.nullcontext():
        layers = [nn.Linear(96, 96) for _ in range(16)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return model, optimizer, step


def _save(path):
    import torch

    import smdistributed.modelparallel.torch as smp

    _, optimizer, step = _model(smp.tp_size() > 1)
    step(torch.ones(4, 96))
    optimizer.step()
    smp.save_checkpoint(path, tag="1")


def _load(path):
    """Bytes before, at most while loading, of the shard, and of the largest tensor, as PyTorch's allocator counts."""
    import gc
    from pathlib import Path

    import torch
    from torch.profiler import ProfilerActivity, profile

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.checkpoint.live_state import live_masters, live_weights, updated_parameters

    model, optimizer, step = _model(smp.tp_size() > 1)
    if smp.pp_size() > 1:
        step(torch.ones(4, 96))
        optimizer.zero_grad()
    held = sum(h.tensor.numel() * h.tensor.element_size() for h in (*live_weights(model), *live_masters(model)))
    gc.collect()  # what other tests have left must not go away meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        smp.resume_from_checkpoint(path)
    # Mapped files are reported like memory, with the length of the file.
    mapped = {file.stat().st_size for file in Path(path).glob("*/*")}
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    events = [event for event in events if abs(event.nbytes()) not in mapped]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    states = [
        value
        for entry in updated_parameters(model, optimizer)
        if entry.updated is not None
        for value in optimizer.state.get(entry.updated, {}).values()
    ]
    shard = held + sum(value.numel() * value.element_size() for value in states)
    assert any(value.numel() > 1 and value.any() for value in states)
    assert peak > 0.5 * (shard - held)  # the counter counts
    return held + peak, shard, 96 * 96 * 4


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((4, _S4), (2, {"partitions": 2, "microbatches": 2})),
        ((2, {"ddp": True, "tensor_parallel_degree": 2}), (4, _S4)),
        ((4, _S4), (2, {"ddp": True, "tensor_parallel_degree": 2})),
        pytest.param((2, {"partitions": 2}), (4, {**_S4, "bf16": True}), marks=pytest.mark.full),
        pytest.param((4, _S4), (4, {"ddp": True, "shard_optimizer_state": True}), marks=pytest.mark.full),
    ],
    ids=["sharded-pipeline", "tensor-sharded", "sharded-tensor", "pipeline-half", "sharded-state"],
)
def test_no_rank_holds_more_than_its_shard_and_the_largest_tensor(ranks, tmp_path, source, target):
    ranks(_save, source[0], str(tmp_path), config=source[1])
    for peak, shard, largest in ranks(_load, target[0], str(tmp_path), config=target[1]):
        print(f"peak ÷ (shard + largest tensor) = {peak / (shard + largest):.3f}")
        assert peak <= 1.05 * (shard + largest)
