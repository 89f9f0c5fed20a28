"""Masks of every kind, and batches of the ranks that do not look alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError
from smp_runtime.nn.attention_scores import Scoring, attend, rotate

SIZES = {"num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16, "intermediate_size": 24}
QUIET = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


def _qkv(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 6, 8, generator=generator).to(dtype) for _ in range(3)]


# -- the ranks' masks and shapes ---------------------------------------------------------------------------------------


def _one_rank_padded(optimize):
    import transformers as hf
    from support.training.closeness import close

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 24}
    config = hf.BertConfig(
        **sizes, vocab_size=11, max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(1)
    original = hf.BertModel(config, add_pooling_layer=False).eval()
    with smp.tensor_parallelism():
        made = hf.BertModel(config, add_pooling_layer=False)
    model = smp.DistributedModel(made)
    bert = smp.nn.huggingface.bert
    model.load_state_dict(bert.translate_hf_state_dict_to_smdistributed_bert(original.state_dict()))
    model.eval()
    mask = torch.ones(2, 6, dtype=torch.long)
    if smp.tp_rank() == 1:
        mask[:, 4:] = 0
    ids = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(smp.tp_rank()))
    with torch.no_grad():
        expected = original(ids, attention_mask=mask).last_hidden_state
        close(model(ids, attention_mask=mask).last_hidden_state, expected, f"{optimize} padded on one rank")


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_only_one_rank_is_padded(ranks, optimize):
    config = {"tensor_parallel_degree": 2, "ddp": True, "optimize": optimize}
    ranks(_one_rank_padded, 2, optimize, config=config, timeout=100)


def _refused(make, *shapes):
    module = make()
    shape = shapes[smp.tp_rank()]
    is_bare = isinstance(module, smp.nn.DistributedTransformer)
    batch = (torch.randn(*shape, 16), None) if is_bare else torch.zeros(shape, dtype=torch.long)
    with pytest.raises(SMPUserError) as caught:
        module(batch)
    return str(caught.value)


def _layers():
    return smp.nn.DistributedTransformer(num_layers=1, **SIZES, **QUIET)


def _gpt2():
    import transformers as hf

    with smp.tensor_parallelism(distribute_embedding=True):
        made = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_head=2, n_layer=1, n_positions=8, vocab_size=12))
    return smp.DistributedModel(made)


@pytest.mark.parametrize("make", [_layers, _gpt2])
@pytest.mark.parametrize("second", [(2, 5), (3, 6)])
def test_batches_of_different_shapes_are_an_error_that_names_them(ranks, make, second):
    config = {"tensor_parallel_degree": 2, "ddp": True, "optimize": "memory"}
    for message in ranks(_refused, 2, make, (2, 6), second, config=config, timeout=100):
        assert "[2, 6" in message
        assert f"[{second[0]}, {second[1]}" in message
        assert "on its rank 1" in message


def _cross():
    """A mask of queries by keys, where the queries need padding and the keys need another one."""
    from support.models import plain_transformer as reference
    from support.training.closeness import close

    ours = smp.nn.DistributedAttentionLayer(cross_attention=True, **SIZES, **QUIET)
    torch.manual_seed(0)
    expected_module = reference.Attention(cross_attention=True, **SIZES)
    ours.load_state_dict(expected_module.state_dict())
    for queries, keys in ((5, 6), (6, 5), (5, 7)):
        states, cross = torch.randn(2, queries, 16), torch.randn(2, keys, 16)
        mask = torch.randn(2, 1, queries, keys)
        close(ours((states, cross, mask)), expected_module((states, cross, mask)), f"{queries} queries, {keys} keys")


def test_a_cross_mask_with_queries_under_sliced_activations(ranks):
    config = {"tensor_parallel_degree": 2, "ddp": True, "optimize": "memory", "prescaled_batch": True}
    ranks(_cross, 2, config=config, timeout=100)


# -- kinds of masks ----------------------------------------------------------------------------------------------------


def test_a_boolean_mask_says_who_takes_part():
    query, key, value = _qkv()
    mask = torch.rand(2, 1, 6, 6) < 0.7
    mask[..., 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(attend(query, key, value, mask, Scoring(0.3)), expected)
    with pytest.raises(SMPUserError, match=r"of type torch.int64.*mask.bool\(\)"):
        attend(query, key, value, mask.long(), Scoring(0.3))


def test_a_boolean_mask_of_a_hugging_face_model(solo):
    import transformers as hf

    solo({"ddp": True})
    with smp.tensor_parallelism():
        made = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_head=2, n_layer=1, n_positions=8, vocab_size=12))
    model = smp.DistributedModel(made).eval()
    ids = torch.randint(0, 12, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[:, 2:]
        torch.testing.assert_close(model(ids, attention_mask=mask.bool()).logits[:, 2:], expected)
        torch.testing.assert_close(model(ids, attention_mask=mask.bool()[:, None, None]).logits[:, 2:], expected)
        with pytest.raises(SMPUserError, match="floating point mask"):
            model(ids, attention_mask=mask[:, None, None])


# -- how attention is computed -----------------------------------------------------------------------------------------


def test_attention_in_fp32_under_autocast():
    query, key, value = _qkv(torch.bfloat16)
    expected = attend(query, key, value, None, Scoring(2.0, in_fp32=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend(query, key, value, None, Scoring(2.0, in_fp32=True))
        wide = attend(query.float(), key.float(), value.float(), None, Scoring(2.0, in_fp32=True))
    assert torch.equal(got, expected)
    assert torch.equal(wide, attend(query.float(), key.float(), value.float(), None, Scoring(2.0)))


def test_tables_of_rotation_outlive_inference():
    query = torch.randn(1, 1, 3, 4)
    with torch.inference_mode():
        rotate(query, (0.917, 0.013), False)
    rotate(query.requires_grad_(), (0.917, 0.013), False).sum().backward()


def test_an_encoder_layer_of_pytorch_evaluates():
    from smp_runtime.job import session

    session.init({"ddp": True})
    try:
        with smp.tensor_parallelism():
            layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        encoder = smp.DistributedModel(nn.Sequential(layer))
        assert layer.linear1.__class__.__name__ == "DistributedLinear"
        x = torch.randn(2, 5, 16)
        expected = encoder.train()(x)
        assert layer.activation_relu_or_gelu == 0
        with torch.no_grad():
            torch.testing.assert_close(encoder.eval()(x), expected)
    finally:
        session.shutdown()


def _encoder_on_two():
    from support.training.closeness import close

    with smp.tensor_parallelism():
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    encoder = smp.DistributedModel(nn.Sequential(layer))
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    expected = encoder.train()(x).detach()
    with torch.no_grad():
        close(encoder.eval()(x), expected)


def test_an_encoder_layer_of_pytorch_evaluates_on_two_ranks(ranks):
    ranks(_encoder_on_two, 2, config={"tensor_parallel_degree": 2, "ddp": True}, timeout=100)


# -- scopes, registrations and parameters of a script's own ------------------------------------------------------------


def test_leaving_a_scope_leaves_the_innermost():
    with smp.tensor_parallelism():
        with smp.tensor_parallelism(enabled=False):
            with smp.tensor_parallelism():
                pass
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    from smp_runtime.module_conversion.scopes import mark_of

    assert (mark_of(inner).enabled, mark_of(outer).enabled) == (False, True)


class OwnLinear(smp.nn.DistributedModule):
    """With a parameter that PyTorch's way makes."""

    def __init__(self, *_, **__):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


def test_a_script_may_register_linear_before_anything_else(solo, monkeypatch):
    from smp_runtime.module_conversion import builtin, registration

    solo({"ddp": True})
    monkeypatch.setattr(registration, "_by_class", {})
    monkeypatch.setattr(registration, "_by_name", {})
    registration.register(nn.Linear, registration.Registration(OwnLinear, arguments=lambda _: ((), {})))
    monkeypatch.setattr(builtin, "register_all", builtin.register_all.__wrapped__)
    with smp.tensor_parallelism(keep_weights=False):
        module = nn.Sequential(nn.Linear(3, 3))
    model = smp.DistributedModel(module)  # a plain parameter is no KeyError
    assert type(model.get_module()[0]).__name__ == "OwnLinear"
    assert [name for name, _ in model.scaled_batch_reducer_named_parameters()] == ["0.weight"]
