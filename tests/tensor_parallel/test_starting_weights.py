"""Weights are drawn whole and sliced: the same for every number of ranks, and never two whole ones at a time."""

from __future__ import annotations

import pytest
import torch

GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 32, "vocab_size": 101}


def _config(degree, **more):
    return {"tensor_parallel_degree": degree, "ddp": True, **more}


def _start(seed_by_rank):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(5 + (smp.rank() if seed_by_rank else 0))
    model = torch.nn.Sequential(
        smp.nn.DistributedTransformerLMHead(
            num_layers=2,
            num_attention_heads=4,
            attention_head_size=4,
            hidden_size=16,
            intermediate_size=32,
            vocab_size=37,
            num_positions=8,
            use_normal_initialization=True,
            distribute_embedding=True,
        ),
        smp.nn.DistributedLinear(16, 8),
        smp.nn.DistributedEmbedding(9, 8),
    )
    return smp.DistributedModel(model).state_dict()


@pytest.mark.parametrize("degree", [2, 4])
def test_the_start_does_not_depend_on_the_number_of_ranks(ranks, degree):
    alone = ranks(_start, 1, True, config=_config(1))[0]
    for state in ranks(_start, degree, True, config=_config(degree)):
        assert state.keys() == alone.keys()
        for name, value in state.items():
            assert torch.equal(value, alone[name]), name
    assert not torch.equal(alone["0.transformer.seq_layers.0.attention.query.weight"], torch.zeros(16, 16))
    layers = [alone[f"0.transformer.seq_layers.{i}.output.dense1.weight"] for i in (0, 1)]
    assert not torch.equal(*layers)


def _peak():
    """Bytes of tensors alive at most, beyond the model that remains, while a GPT-2 is made and wrapped."""
    import gc
    import weakref

    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers import AutoModelForCausalLM, GPT2Config

    import smdistributed.modelparallel.torch as smp

    class Alive(TorchDispatchMode):
        bytes, peak = 0, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                    storage = leaf.untyped_storage()
                    if storage._cdata not in seen:
                        size = storage.nbytes()
                        seen.add(storage._cdata)
                        self.bytes += size
                        self.peak = max(self.peak, self.bytes)
                        weakref.finalize(storage, self.freed, storage._cdata, size)
            return result

        def freed(self, key, size):
            seen.discard(key)
            self.bytes -= size

    seen = set()
    config = GPT2Config(**GPT2)
    gc.collect()
    watch = Alive()
    with smp.model_creation(tensor_parallelism=True, distribute_embedding=True):
        model = AutoModelForCausalLM.from_config(config)
    meta = all(parameter.is_meta for parameter in model.parameters())
    with watch:
        model = smp.DistributedModel(model)
    remains = sum(p.nbytes for p in model.parameters())
    largest = max(4 * record.shape[0] * (record.shape[1] if len(record.shape) > 1 else 1) for record in model.registry)
    return meta, watch.peak, remains, largest


def test_no_rank_holds_more_than_one_whole_weight(ranks):
    for meta, peak, remains, largest in ranks(
        _peak, 2, config=_config(2, delayed_parameter_initialization=True), timeout=100
    ):
        assert meta
        states = 2 * torch.get_rng_state().nbytes  # of the generator are tensors too
        assert remains <= peak <= remains + 1.01 * largest + states, (peak, remains, largest)
