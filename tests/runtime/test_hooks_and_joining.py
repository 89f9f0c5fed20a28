"""Communication hooks of PyTorch's DDP, uneven numbers of batches, and the context of model creation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError

WIDTH = 16


def _gradients(make_hook, steps=4):
    """Averages under a hook against the exact ones; three layers in buckets of their own."""
    import smdistributed.modelparallel.torch as smp

    def network():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))

    model = smp.DistributedModel(network(), bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
    state, hook = make_hook(smp.get_dp_process_group())
    model.register_comm_hook(state, hook)
    inputs = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(r)) for r in range(smp.size())]
    worst = 0.0
    for _ in range(steps):
        model.zero_grad()
        model(inputs[smp.rank()]).square().mean().backward()
        exact = network()
        (sum(exact(x).square().mean() for x in inputs) / len(inputs)).backward()
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            worst = max(worst, float((mine.grad - theirs.grad).norm() / theirs.grad.norm()))
    return worst


def _allreduce(group):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return group, default_hooks.allreduce_hook


def _fp16(group):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return group, default_hooks.fp16_compress_hook


def _bf16(group):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return group, default_hooks.bf16_compress_hook


def _powersgd(group):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    # Full rank, so that the compression loses nothing but rounding.
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=WIDTH, start_powerSGD_iter=2, min_compression_rate=0.1, use_error_feedback=True
    )
    return state, powerSGD_hook.powerSGD_hook


@pytest.mark.parametrize(("make", "tolerance"), [(_allreduce, 1e-6), (_fp16, 2e-3), (_bf16, 1e-2), (_powersgd, 1e-3)])
def test_torchs_hooks_average_the_gradients(ranks, make, tolerance):
    errors = ranks(_gradients, 2, make, config={"ddp": True})
    assert max(errors) < tolerance
    if make is not _allreduce:
        assert max(errors) > 0  # the hook really ran


def test_a_hook_of_ones_own_sees_the_buckets(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), bucket_cap_mb=24 / 2**20)
        seen = []

        def hook(state, bucket):
            seen.append((state, bucket.index(), bucket.is_last(), [tuple(g.shape) for g in bucket.gradients()]))
            assert all(g.shape == p.shape for g, p in zip(bucket.gradients(), bucket.parameters(), strict=True))
            bucket.set_buffer(torch.full_like(bucket.buffer(), 7.0))
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook("mine", hook)
        model(torch.ones(1, 2)).sum().backward()
        assert all(torch.all(p.grad == 7.0) for p in model.parameters())
        return seen

    seen = ranks(run, 2, config={"ddp": True})[0]
    assert [s[:3] for s in seen] == [("mine", 0, False), ("mine", 1, True)]


def test_where_a_hook_has_no_place(solo, ranks):
    solo({})
    with pytest.raises(SMPUserError, match="no data parallelism"):
        smp.DistributedModel(nn.Linear(1, 1)).register_comm_hook(None, lambda s, b: None)


def _uneven(with_steps):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.5), nn.Linear(3, 1)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(x):
        model.backward(model(x).square().sum())

    with model.join():
        for index in range(3 + 2 * smp.rank()):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * smp.rank() + index))
            optimizer.zero_grad()
            if with_steps:
                step(x)
            else:
                model(x).square().sum().backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("with_steps", [True, False])
def test_ranks_with_fewer_batches_answer_until_all_are_done(ranks, with_steps):
    first, second = ranks(_uneven, 2, with_steps, config={"ddp": True}, timeout=30)
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_join_under_sharded_state_is_refused(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(nn.Linear(2, 2))
        with pytest.raises(SMPUserError, match="turn shard_optimizer_state off"), model.join():
            pass

    ranks(run, 2, config={"ddp": True, "shard_optimizer_state": True})


def test_model_creation(solo):
    solo({})
    with smp.model_creation(tensor_parallelism=smp.tp_size() > 1, dtype=torch.float16):
        assert nn.Linear(1, 1).weight.dtype is torch.float16
    assert nn.Linear(1, 1).weight.dtype is torch.float32
    with pytest.raises(SMPUserError, match="did you mean 'use_alibi'"), smp.model_creation(use_alib=True):
        pass
    with pytest.raises(SMPUserError, match="floating point"), smp.model_creation(dtype=torch.int8):
        pass


@pytest.mark.parametrize("overlaps", [True, False])
def test_buckets_leave_while_backward_computes(ranks, overlaps):
    def run():
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        import smdistributed.modelparallel.torch as smp

        network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        model, seen = smp.DistributedModel(network, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20), []

        def hook(state, bucket):
            seen.append("leaves")
            return allreduce_hook(smp.get_dp_process_group(), bucket)

        model.register_comm_hook(None, hook)
        network[0].weight.register_hook(lambda gradient: seen.append("first layer"))  # the last that backward computes
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            model(torch.ones(2, WIDTH)).sum().backward()
        return list(seen)

    expected = ["leaves", "leaves", "first layer", "leaves"] if overlaps else ["first layer", *["leaves"] * 3]
    assert ranks(run, 2, config={"ddp": True, "overlapping_allreduce": overlaps}) == [expected] * 2
