"""How often and how much a layer communicates, read off the tensors at the collectives, against the theory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.matrix import sampled

SIZES = {"num_attention_heads": 4, "attention_head_size": 16, "hidden_size": 64, "intermediate_size": 256}
BATCH, SEQ, HIDDEN = 4, 32, 64


def _config(degree, optimize, prescaled):
    return {"tensor_parallel_degree": degree, "ddp": True, "optimize": optimize, "prescaled_batch": prescaled}


class Recording:
    """The library's collectives, with the calls by name and the bytes that this rank sends."""

    def __init__(self):
        from counting import CountingCollectives

        self.counting, self.calls = CountingCollectives(), Counter()

    def __getattr__(self, name):
        method = getattr(self.counting, name)

        def call(*args):
            self.calls[name] += 1
            return method(*args)

        return call


def _measured(layers):
    """Calls and bytes forward and backward of ``layers`` layers, after one pass for warming up."""
    import smdistributed.modelparallel.torch as smp

    quiet = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    model = smp.nn.DistributedTransformer(num_layers=layers, **SIZES, **quiet)
    batch = BATCH if smp.state.cfg.prescaled_batch else BATCH // smp.tp_size()
    x = torch.randn(batch, SEQ, HIDDEN, requires_grad=True)
    session = smp.init()
    found = []
    for _ in range(2):
        recording = Recording()
        session.ranks.collectives = recording
        output = model((x, None))[0]
        forward = (dict(recording.calls), recording.counting.sent)
        recording.calls.clear()
        recording.counting.sent = 0.0
        output.sum().backward()
        found.append((forward, (dict(recording.calls), recording.counting.sent)))
    return found[-1]


#: Collectives per layer forward and backward, and per transformer; see docs/how-it-works/tensor-parallelism.md.
LAYER = {
    ("speed", True): ({"all_reduce": 2}, {"all_reduce": 2}),
    ("speed", False): ({"all_reduce": 2}, {"all_reduce": 2}),
    ("memory", True): (
        {"all_gather": 2, "reduce_scatter": 2},
        {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 2},
    ),
    ("memory", False): ({"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 4, "reduce_scatter": 2}),
}
ENDS = {
    ("speed", True): ({}, {}),
    ("speed", False): ({"all_gather": 1}, {"all_gather": 1}),
    ("memory", True): ({"all_gather": 1}, {"all_gather": 1}),
    ("memory", False): ({}, {}),
}


def _times(counts, factor):
    return {name: count * factor for name, count in counts.items()}


@pytest.mark.parametrize(
    ("degree", "optimize", "prescaled"),
    sampled(
        ((degree, *how) for degree in (2, 4) for how in LAYER),
        {(2, "speed", True), (4, "speed", False), (4, "memory", True), (2, "memory", False)},
    ),
)
def test_calls_and_bytes_equal_the_theory(ranks, degree, optimize, prescaled):
    layers = 3
    whole = BATCH * SEQ * HIDDEN * 4  # of the group's batch
    per_pass = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    share = (degree - 1) / degree
    for directions in ranks(_measured, degree, layers, config=_config(degree, optimize, prescaled)):
        total = 0.0
        for (calls, sent), per_layer, ends in zip(
            directions, LAYER[optimize, prescaled], ENDS[optimize, prescaled], strict=True
        ):
            assert calls == dict(Counter(_times(per_layer, layers)) + Counter(ends))
            bound = sum(per_pass[name] * share * whole * count for name, count in calls.items() if name != "all_reduce")
            if optimize == "speed":
                bound += 2 * share * whole * calls["all_reduce"]
            assert bound <= sent <= 1.02 * bound, (sent, bound)
            total += sent
        if optimize == "speed" and prescaled:  # 4 all-reduces of batch · seq · hidden · bytes per layer
            assert total == 4 * layers * 2 * share * whole


def _seen_by_torch():
    from torch.distributed.tensor.debug import CommDebugMode

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.comm.collectives import TorchCollectives

    smp.init().ranks.collectives = TorchCollectives()  # PyTorch does not see what ranks of a host do in shared memory
    layer = smp.nn.DistributedTransformerLayer(**SIZES, attention_dropout_prob=0.0, hidden_dropout_prob=0.0)
    with CommDebugMode() as seen:
        layer((torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True), None))[0].sum().backward()
    return {str(name): count for name, count in seen.get_comm_counts().items()}


def test_pytorch_counts_four_all_reduces_per_layer(ranks):
    for counts in ranks(_seen_by_torch, 2, config=_config(2, "speed", True), timeout=100):
        assert list(counts.values()) == [4], counts
        assert all("allreduce" in name for name in counts), counts


def _one_linear():
    import smdistributed.modelparallel.torch as smp

    linear = smp.nn.DistributedLinear(HIDDEN, 32)
    session = smp.init()
    batch = BATCH if smp.state.cfg.prescaled_batch else BATCH // smp.tp_size()
    recording = Recording()
    session.ranks.collectives = recording
    linear(torch.randn(batch, HIDDEN, requires_grad=True)).sum().backward()
    return dict(recording.calls), recording.counting.sent


@pytest.mark.parametrize("prescaled", [True, False])
def test_a_linear_layer(ranks, prescaled):
    out, ways = 32, 2
    if prescaled:  # the output's sum, and the input's gradient from its features
        calls, elements = {"all_reduce": 1, "all_gather": 1}, ways * BATCH * out + BATCH * HIDDEN
    else:  # features of the own input out, and their gradients back; the output's sum, and its gradient
        calls = {"all_to_all": 2, "reduce_scatter": 1, "all_gather": 1}
        elements = ways * BATCH // 2 * HIDDEN + ways * BATCH * out
    for found, sent in ranks(_one_linear, 2, config=_config(2, "speed", prescaled)):
        assert found == calls
        assert sent == elements * 4 / 2
