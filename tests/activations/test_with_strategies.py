"""Checkpointing together with the other strategies: gathers and collectives are repeated, results stay."""

from __future__ import annotations

import itertools

import pytest
from support.matrix import sampled
from support.training.activation_training import Net, same, train

TIMEOUT = 150.0
SHARDED = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": 1e9,
    "microbatches": 2,
}


PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
LATER = {"sharded": SHARDED, "pipeline": PIPELINE}


def _train(tensor_parallel, strategy, late=False):
    import smdistributed.modelparallel.torch as smp

    def make():
        net = Net(4)
        for layer in net.layers if tensor_parallel else ():
            smp.set_tensor_parallelism(layer.widen)
            smp.set_tensor_parallelism(layer.narrow)
        return net

    def prepare(model):
        if tensor_parallel:
            assert type(model.layers[0].widen).__name__ == "DistributedLinear"
        set_it = lambda *_: smp.set_activation_checkpointing(model.layers, strategy=strategy)  # noqa: E731
        if late:
            once = model.register_post_step_hook(lambda *_: (once.remove(), set_it()))
        elif strategy is not None:
            set_it()

    return train(make, prepare)


@pytest.mark.parametrize("strategy", ["each", pytest.param("group_2", marks=pytest.mark.full)])
def test_sharded_data_parallelism(ranks, strategy):
    plain = ranks(_train, 2, False, None, config=SHARDED, timeout=TIMEOUT)
    marked = ranks(_train, 2, False, strategy, config=SHARDED, timeout=TIMEOUT)
    same(marked, plain)
    assert all(a["runs"] == 2 * b["runs"] for a, b in zip(marked, plain, strict=True))


@pytest.mark.parametrize("strategy", ["each", pytest.param("contiguous", marks=pytest.mark.full)])
def test_tensor_parallelism(ranks, strategy):
    config = {"ddp": True, "tensor_parallel_degree": 2, "microbatches": 2}
    plain = ranks(_train, 2, True, None, config=config, timeout=TIMEOUT)
    marked = ranks(_train, 2, True, strategy, config=config, timeout=TIMEOUT)
    same(marked, plain)
    assert all(a["runs"] == 2 * b["runs"] for a, b in zip(marked, plain, strict=True))


@pytest.mark.parametrize(
    ("strategy", "name"),
    sampled(itertools.product(("each", "group_2"), LATER), {("each", "pipeline"), ("group_2", "sharded")}),
)
def test_a_call_after_the_first_step_counts_from_then_on(ranks, strategy, name):
    config = LATER[name]
    plain = ranks(_train, 2, False, None, config=config, timeout=TIMEOUT)
    late = ranks(_train, 2, False, strategy, True, config=config, timeout=TIMEOUT)
    same(late, plain)
    # Of three steps the last two run everything twice.
    assert 3 * sum(a["runs"] for a in late) == 5 * sum(b["runs"] for b in plain)
