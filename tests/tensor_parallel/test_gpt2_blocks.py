"""GPT-2 whose blocks are distributed one by one, as a script asks that registers them itself."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")


def _model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 16, "n_positions": 8, "vocab_size": 11}
    # Of the implementations of Transformers only this one scales by the layer.
    config = GPT2Config(**sizes, scale_attn_by_inverse_layer_idx=True, attn_implementation="eager")
    return GPT2LMHeadModel(config).eval()


def _ids():
    return torch.arange(16).view(2, 8) % 11


def _distributed():
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
        get_hf_gpt2_transformer_layer_hooks,
        translate_hf_block_state_dict_to_smdistributed,
        translate_layer_state_dict_to_hf_gpt2_block,
    )
    from smp_runtime.module_conversion import registration

    plain = _model()
    model = _model()
    smp.set_tensor_parallelism(model.transformer.h, True)
    smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer, *get_hf_gpt2_transformer_layer_hooks())
    try:
        model = smp.DistributedModel(model)
    finally:
        registration._by_class.pop(GPT2Block)
    assert all(isinstance(block, smp.nn.DistributedTransformerLayer) for block in model.module.transformer.h)
    state = plain.state_dict()
    model.load_state_dict(translate_hf_block_state_dict_to_smdistributed(state, 8))
    ids = _ids().roll(smp.dp_rank() if not smp.state.cfg.prescaled_batch else 0, 0)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    with torch.no_grad():
        found, expected = (m(ids, attention_mask=mask, labels=ids) for m in (model, plain))
    back = translate_layer_state_dict_to_hf_gpt2_block(model.state_dict(), 8)
    assert list(back) == list(state)
    assert all(torch.equal(value, back[name]) for name, value in state.items())
    single = {
        name.removeprefix("transformer.h.1."): v for name, v in state.items() if name.startswith("transformer.h.1.")
    }
    own = model.module.transformer.h[1].state_dict()
    assert translate_hf_block_state_dict_to_smdistributed(single).keys() == own.keys()
    with pytest.raises(ValueError, match="takes no head_mask"):
        model(ids, head_mask=torch.ones(4))
    return found.logits[mask.bool()], expected.logits[mask.bool()], found.loss, expected.loss


@pytest.mark.parametrize("prescaled", [False, True])
def test_blocks_compute_what_the_original_does(ranks, prescaled):
    config = {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": prescaled}
    for found, expected, loss, expected_loss in ranks(_distributed, 2, config=config):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(loss, expected_loss)
