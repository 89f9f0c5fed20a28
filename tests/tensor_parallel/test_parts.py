"""The parts by themselves: attention's scores, translations of states, the throttle, messages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError
from smp_runtime.nn.attention_scores import Scoring, alibi_slopes, attend, rotate
from smp_runtime.tensor_parallel.group import Throttle


def _qkv(heads=4, seq=6, size=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, seq, size, generator=generator) for _ in range(3)]


def test_a_window_of_attention():
    query, key, value = _qkv()
    back = torch.arange(6)[:, None] - torch.arange(6)
    scores = (query @ key.transpose(-1, -2) * 0.3).masked_fill((back < 0) | (back >= 3), -torch.inf)
    torch.testing.assert_close(
        attend(query, key, value, None, Scoring(0.3, causal=True, window=3)), scores.softmax(-1) @ value
    )


def test_fewer_heads_of_keys():
    query, key, value = _qkv()
    few = attend(query, key[:, :2], value[:, :2], None, Scoring(1.0))
    many = attend(query, key[:, [0, 0, 1, 1]], value[:, [0, 0, 1, 1]], None, Scoring(1.0))
    torch.testing.assert_close(few, many)


def test_a_fully_masked_row_is_finite():
    query, key, value = _qkv()
    mask = torch.full((2, 1, 1, 6), torch.finfo(torch.float32).min)
    result = attend(query, key, value, mask, Scoring(1.0, causal=True, slopes=alibi_slopes(4)))
    assert bool(torch.isfinite(result).all())


def test_slopes():
    assert alibi_slopes(4) == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8)
    assert alibi_slopes(3) == (2.0**-4, 2.0**-8, 2.0**-2)  # of the next power of two, the odd ones first
    assert alibi_slopes(2, bias_max=4) == (2.0**-2, 2.0**-4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_depends_on_distance_only(interleaved):
    query, key, _ = _qkv(seq=3)
    frequencies = (1.0, 0.1)

    def score(first, second):
        turned = [
            rotate(tensor, frequencies, interleaved, positions=torch.tensor([[position] * 3]))
            for tensor, position in ((query, first), (key, second))
        ]
        return turned[0] @ turned[1].transpose(-1, -2)

    torch.testing.assert_close(score(5, 2), score(13, 10))
    assert not torch.allclose(score(5, 2), score(5, 3))
    table = rotate(query, frequencies, interleaved)
    torch.testing.assert_close(table, rotate(query, frequencies, interleaved, positions=torch.arange(3)[None]))


def test_flash_attention_layer():
    qkv = torch.stack([tensor.transpose(1, 2) for tensor in _qkv()], 2)  # [batch, seq, 3, heads, size]
    layer = smp.nn.FlashAttentionLayer(
        attention_dropout_prob=0.0, attention_head_size=8, layer_idx=1, scale_attn_by_layer_idx=True
    )
    expected = F.scaled_dot_product_attention(*_qkv(), is_causal=True, scale=8**-0.5 / 2)
    torch.testing.assert_close(layer(qkv, causal=True), expected)
    assert smp.nn.FlashAttentionLayer(scale=0.7).scale == 0.7
    with pytest.raises(SMPUserError, match="attention_head_size is None"):
        smp.nn.FlashAttentionLayer()


def test_fused_layer_norm():
    norm = smp.nn.FusedLayerNorm(8, eps=1e-3)
    x = torch.randn(2, 8)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (8,), eps=1e-3))


def test_every_alias_of_the_translations():
    names = {
        "gpt2": [], "bert": [], "roberta": [], "gptneox": [], "llama": [],
        "gptj": ["translate_hf_gptj_state_dict_to_smdistributed", "translate_hf_gptj_state_dict_to_smdistributed_gptj"],
        "gptneo": ["translate_hf_gptneo_state_dict_to_smdistributed", "translate_hf_gptneo_state_dict_to_smdistributed_gptneo"],
    }  # fmt: skip
    for family, more in names.items():
        module = getattr(smp.nn.huggingface, family)
        common = [
            f"translate_state_dict_to_hf_{family}",
            f"translate_hf_state_dict_to_smdistributed_{family}",
            "translate_hf_state_dict_to_smdistributed",
            "translate_state_dict_to_smdistributed",
        ]
        for name in common + more:
            assert getattr(module, name)({}, max_seq_len=8) is not None, name


def test_a_model_inside_another(solo):
    import transformers

    solo({})
    config = transformers.GPT2Config(
        n_embd=16, n_head=2, n_layer=1, n_positions=8, vocab_size=11, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    config.pad_token_id = 0
    torch.manual_seed(0)
    original = transformers.GPT2ForSequenceClassification(config)
    with smp.tensor_parallelism():
        model = transformers.GPT2ForSequenceClassification(config)
    model = smp.DistributedModel(model)
    gpt2 = smp.nn.huggingface.gpt2
    ours = gpt2.translate_hf_state_dict_to_smdistributed_gpt2(original.state_dict())
    model.load_state_dict(ours)
    back = gpt2.translate_state_dict_to_hf_gpt2(model.state_dict())
    assert back.keys() == original.state_dict().keys()
    assert all(torch.equal(back[name], value) for name, value in original.state_dict().items())
    ids = torch.randint(1, 11, (2, 6))
    torch.testing.assert_close(model(ids).logits, original(ids).logits, atol=1e-5, rtol=1e-5)
    assert [pair[0] for pair in smp.state.module_manager.translate_functions]


def test_what_a_distributed_hugging_face_model_refuses(solo):
    import transformers

    solo({})
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, n_positions=8, vocab_size=11)
    with smp.tensor_parallelism():
        model = transformers.GPT2LMHeadModel(config)
    model = smp.DistributedModel(model)
    assert len(list(model.get_module().transformer.seq_layers.children())) == 1
    layer = next(model.get_module().transformer.seq_layers.children())
    assert layer.attention is not None
    assert layer.output is not None
    with pytest.raises(SMPUserError, match="takes no output_attentions"):
        model(torch.zeros(1, 2, dtype=torch.long), output_attentions=True)
    with pytest.raises(SMPUserError, match="12 tokens, but num_positions is 8"):
        model(torch.zeros(1, 12, dtype=torch.long))
    assert isinstance(model(torch.zeros(1, 2, dtype=torch.long), return_dict=False), tuple)


def test_the_throttle():
    assert Throttle.from_environment({})._limit == 8
    assert Throttle.from_environment({"SMP_NCCL_THROTTLE_LIMIT": "-1"})._limit == -1
    for wrong in ("0", "many", "-2"):
        with pytest.raises(SMPUserError, match="SMP_NCCL_THROTTLE_LIMIT"):
            Throttle.from_environment({"SMP_NCCL_THROTTLE_LIMIT": wrong})


def test_wrong_settings(solo):
    solo({})
    with pytest.raises(SMPUserError, match="did you mean 'use_alibi'"):
        smp.nn.DistributedTransformerLayer(use_alib=True)
    with pytest.raises(SMPUserError, match="did you mean 'gelu'"):
        smp.nn.DistributedTransformerOutputLayer(activation="gellu")
    with pytest.raises(SMPUserError, match="both false"):
        smp.nn.DistributedTransformerLayer(post_layernorm=False)
    with pytest.raises(SMPUserError, match="max_norm"):
        smp.nn.DistributedEmbedding(4, 4, max_norm=1.0)
