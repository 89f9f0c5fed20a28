"""Checkpointing together with the other strategies: gathers and collectives are repeated, results stay."""

from __future__ import annotations

import pytest
from checkpointed import Net, same, train

TIMEOUT = 150.0
SHARDED = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": 1e9,
    "microbatches": 2,
}


def _train(tensor_parallel, strategy):
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
        if strategy is not None:
            smp.set_activation_checkpointing(model.layers, strategy=strategy)

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
