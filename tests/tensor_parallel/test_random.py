"""Dropout: alike where activations are replicated, independent where they are split, repeated in recomputation."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

SIZES = {"num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16, "intermediate_size": 32}


def _config(degree, optimize, prescaled):
    return {"tensor_parallel_degree": degree, "ddp": True, "optimize": optimize, "prescaled_batch": prescaled}


def _masks(seed_by_rank):
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.nn.distributed_module import current_group
    from smp_runtime.tensor_parallel.random_tracker import RandomTracker

    torch.manual_seed(smp.rank() if seed_by_rank else 0)
    tracker = RandomTracker.of(current_group())
    before = torch.get_rng_state()
    draws = {}
    for name, family in (("replicated", tracker.replicated), ("split", tracker.split), ("again", tracker.replicated)):
        with family(torch.device("cpu")):
            draws[name] = torch.rand(64)
    outside = torch.rand(4)
    torch.set_rng_state(before)
    with tracker.replicated(torch.device("cpu")):
        draws["repeated"] = torch.rand(64)
    return draws, outside


@pytest.mark.parametrize("seed_by_rank", [True, False])
def test_families(ranks, seed_by_rank):
    (first, outside), (second, other) = ranks(_masks, 2, seed_by_rank, config=_config(2, "speed", True))
    assert torch.equal(first["replicated"], second["replicated"])
    assert not torch.equal(first["split"], second["split"])
    assert not torch.equal(first["replicated"], first["again"])
    assert torch.equal(first["repeated"], first["replicated"])
    assert torch.equal(outside, other) is not seed_by_rank


def _by_microbatch(orders):
    import smp_runtime.job.session as sessions
    from smp_runtime.nn.distributed_module import current_group
    from smp_runtime.tensor_parallel.random_tracker import RandomTracker, tracker_state

    torch.manual_seed(0)
    tracker, ranks = RandomTracker.of(current_group()), sessions.current_session().ranks
    begin = tracker_state(ranks)

    def draw(microbatch):
        ranks.step.microbatch = microbatch
        with tracker.split(torch.device("cpu")):
            return microbatch, torch.rand(8).tolist()

    found = []
    for order in orders:
        tracker_state(ranks, begin)
        found.append([draw(microbatch) for microbatch in order])
    saved = tracker_state(ranks)
    expected = draw(0), draw(1)
    tracker_state(ranks, saved)
    return found, expected, (draw(0), draw(1)), tracker_state(ranks, {**saved, "uses": 5})


def test_numbers_belong_to_microbatches_in_whatever_order_these_run(ranks):
    """As the steps of a pipeline change it."""
    config = _config(2, "speed", True)
    for (one, other), expected, resumed, _ in ranks(_by_microbatch, 2, [[0, 0, 1, 1], [0, 1, 1, 0]], config=config):
        assert sorted(one) == sorted(other)
        assert len({tuple(numbers) for _, numbers in (*one, *expected)}) == 6
        assert resumed == expected


def test_a_state_that_counted_all_microbatches_together_goes_on(ranks):
    (*_, state), _ = ranks(_by_microbatch, 2, [[0]], config=_config(2, "speed", True))
    assert state["uses"] == {}


def _layer(recomputes):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(3)
    layer = smp.nn.DistributedTransformerLayer(**SIZES, attention_dropout_prob=0.3, hidden_dropout_prob=0.3)
    torch.manual_seed(smp.rank())
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    run = lambda x: layer((x, None))[0]  # noqa: E731
    output = checkpoint(run, x, use_reentrant=False) if recomputes else run(x)
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return output.detach(), x.grad, [p.grad for p in layer.parameters()]


@pytest.mark.parametrize(("optimize", "prescaled"), [("speed", True), ("memory", True), ("memory", False)])
def test_recomputation_repeats_the_forward_pass(ranks, optimize, prescaled):
    plain = ranks(_layer, 2, False, config=_config(2, optimize, prescaled))
    again = ranks(_layer, 2, True, config=_config(2, optimize, prescaled))
    for (output, dx, gradients), (output2, dx2, gradients2) in zip(plain, again, strict=True):
        assert torch.equal(output, output2)
        assert torch.equal(dx, dx2)
        assert all(torch.equal(a, b) for a, b in zip(gradients, gradients2, strict=True))
    if prescaled:  # dropout of replicated activations agrees, so outputs do
        torch.testing.assert_close(plain[0][0], plain[1][0])
