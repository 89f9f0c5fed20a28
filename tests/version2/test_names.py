"""Every documented name of version 2 is there, takes the documented arguments, and reads them."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from typing import Any

import pytest
import torch
from version2.documented_names import NOTED, OTHERS, SIGNATURES, STATE

import torch_sagemaker_finder  # noqa: F401 - lets the names be found


def found(module: str, name: str) -> Any:
    value: Any = importlib.import_module("torch.sagemaker" + (f".{module}" if module else ""))
    for part in name.split("."):
        value = getattr(value, part)
    return value


def documented(arguments: str) -> ast.arguments:
    (function,) = ast.parse(f"def function({arguments}): ...").body
    assert isinstance(function, ast.FunctionDef)
    return function.args


@pytest.mark.parametrize(("module", "name", "arguments"), SIGNATURES, ids=lambda value: str(value)[:40])
def test_a_signature_is_the_documented_one(module: str, name: str, arguments: str) -> None:
    taken = inspect.signature(found(module, name)).parameters
    wanted = documented(arguments)
    by_place = [parameter.arg for parameter in wanted.args]
    assert list(taken)[: len(by_place)] == by_place
    defaults = dict(zip(by_place[len(by_place) - len(wanted.defaults) :], wanted.defaults, strict=True))
    defaults |= {
        parameter.arg: default for parameter, default in zip(wanted.kwonlyargs, wanted.kw_defaults, strict=True)
    }
    for parameter, default in defaults.items():
        has = taken[parameter].default
        assert has is not inspect.Parameter.empty, parameter
        if default is not None and not isinstance(default, ast.Name):
            assert has == ast.literal_eval(default), parameter
    for parameter in wanted.kwonlyargs:
        assert taken[parameter.arg].kind is inspect.Parameter.KEYWORD_ONLY
    if wanted.vararg is not None:
        assert any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in taken.values())
    more = [parameter for parameter in taken if parameter not in {*by_place, *defaults}]
    assert all(_may_be_left_out(taken[parameter]) for parameter in more), "what the documents lack has a default"


def _may_be_left_out(parameter: inspect.Parameter) -> bool:
    return parameter.default is not inspect.Parameter.empty or parameter.kind in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )


@pytest.mark.parametrize(("module", "name"), OTHERS)
def test_other_names_are_there(module: str, name: str) -> None:
    assert found(module, name) is not None


def test_the_state_has_its_attributes(solo: Any) -> None:
    import torch.sagemaker as tsm

    tsm.init({})
    try:
        assert [name for name in STATE if not hasattr(tsm.state, name)] == []
        assert tsm.state.ranker.get_rep_rank(0) == 0
        assert tsm.state.ranker.get_rep_groups()
    finally:
        tsm.shutdown()


def unread(name: str, function: Any) -> set[str]:
    inner = inspect.unwrap(function)
    made = inner.__init__ if inspect.isclass(inner) else inner
    if not inspect.isfunction(made) or not hasattr(made, "__code__") or "<string>" in made.__code__.co_filename:
        return set()  # of a dataclass, whose fields are looked at elsewhere, or without a constructor
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(made))).body
    read = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return {
        f"{name}.{argument}" for argument in inspect.signature(made).parameters if argument not in {*read, "self", "_"}
    }


def test_every_argument_is_read_or_noted() -> None:
    arguments = {name: unread(name, found(module, name)) for module, name, _ in SIGNATURES}
    assert set().union(*arguments.values()) == NOTED
    count = sum(len(inspect.signature(found(module, name)).parameters) for module, name, _ in SIGNATURES)
    assert len(NOTED) <= 0.1 * count
    for each in NOTED:
        function, _, argument = each.rpartition(".")
        function = function.replace("async_save", "save")  # which refers to that one
        (module,) = [module for module, name, _ in SIGNATURES if name == function]
        assert argument in (inspect.getdoc(found(module, function)) or ""), each


def _scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, bias: Any = None
) -> torch.Tensor:
    """Compute attention of ``[batch, heads, tokens, size]`` from its formula."""
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["b h s d", "b s h d"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_flash_attention_is_attention(layout: str, causal: bool, scale: float | None) -> None:
    attn = importlib.import_module("torch.sagemaker.nn.attn")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)

    def laid(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if layout == "b h s d" else tensor.transpose(1, 2)

    heads = 1 if layout == "b h s d" else 2
    factor = 8**-0.5 if scale is None else scale
    wanted = laid(_scores(q, k, v, causal, factor))
    attention = attn.FlashSelfAttention(scale=scale)
    parts = (laid(q), laid(k), laid(v))
    torch.testing.assert_close(attention(parts, causal=causal, layout=layout), wanted)
    torch.testing.assert_close(attention(torch.cat(parts, heads), causal=causal, layout=layout), wanted)
    in_half = attention(parts, causal=causal, layout=layout, cast_dtype=torch.bfloat16)
    assert in_half.dtype == torch.float64
    assert 1e-6 < float((in_half - wanted).abs().max()) < 0.05
    grouped = attn.FlashGroupedQueryAttention(scale=scale)
    few = (laid(k[:, ::2]), laid(v[:, ::2]))
    shared = laid(_scores(q, *(part[:, ::2].repeat_interleave(2, 1) for part in (k, v)), causal, factor))
    torch.testing.assert_close(grouped(laid(q), few, causal=causal, layout=layout), shared)
    torch.testing.assert_close(grouped(laid(q), torch.cat(few, heads), causal=causal, layout=layout), shared)


def test_flash_attention_takes_masks_and_biases() -> None:
    attn = importlib.import_module("torch.sagemaker.nn.attn")
    torch.manual_seed(0)
    parts = tuple(torch.randn(3, 2, 4, 5, 8, dtype=torch.float64))
    bias = torch.randn(2, 1, 1, 5, dtype=torch.float64)
    alibi = attn.FlashSelfAttention(triton_flash_attention=True, use_alibi=True)
    torch.testing.assert_close(alibi(parts, attn_mask=bias), _scores(*parts, False, 8**-0.5, bias))
    distances = torch.arange(5)[:, None] - torch.arange(5)
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / 4) for head in range(4)], dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(alibi(parts, causal=True), _scores(*parts, True, 8**-0.5, -slopes * distances))
    for given in ({}, {"triton_flash_attention": True}, {"use_alibi": True}):
        with pytest.raises(ValueError, match="triton_flash_attention=True"):
            attn.FlashSelfAttention(**given)(parts, attn_mask=bias)
    with pytest.raises(ValueError, match="layout is 's b h d'"):
        attn.FlashSelfAttention()(parts, layout="s b h d")
    with pytest.raises(ValueError, match="4 heads of queries and 3 of keys"):
        attn.FlashGroupedQueryAttention()(parts[0], tuple(part[:, :3] for part in parts[1:]), layout="b h s d")


def test_flash_attention_drops_weights_in_training_and_computes_in_half_precision() -> None:
    attn = importlib.import_module("torch.sagemaker.nn.attn")
    torch.manual_seed(0)
    parts = tuple(torch.randn(3, 2, 4, 5, 8))
    for made, given in (
        (attn.FlashSelfAttention, (parts,)),
        (attn.FlashGroupedQueryAttention, (parts[0], parts[1:])),
    ):
        whole, dropping = made()(*given), made(attention_dropout_prob=0.9)
        assert not torch.equal(dropping(*given), whole)
        torch.testing.assert_close(dropping.eval()(*given), whole)
    halves = tuple(part.bfloat16() for part in parts)
    in_half = attn.FlashSelfAttention()(halves)
    assert torch.equal(attn.FlashSelfAttention()(halves, cast_dtype=torch.float32), in_half)
    assert in_half.dtype == torch.bfloat16


def test_llama_s_attention_is_its_own() -> None:
    from support.models.version2 import make_llama

    made = importlib.import_module("torch.sagemaker.nn.huggingface.llama_flashattn").LlamaFlashAttention
    torch.manual_seed(0)
    model = make_llama().double().eval()
    ids = torch.randint(0, 64, (2, 12))
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        for layer in model.model.layers:
            attention = made(model.config).double()
            attention.load_state_dict(layer.self_attn.state_dict())
            layer.self_attn = attention
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, wanted, rtol=1e-6, atol=1e-6)
        assert attention.state_dict().keys() == layer.self_attn.state_dict().keys()
        hidden = torch.randn(2, 12, model.config.hidden_size, dtype=torch.float64)
        embeddings = model.model.rotary_emb(hidden, torch.arange(12)[None])
        newer, none = attention(hidden, position_embeddings=embeddings)
        older, weights, cache = attention(hidden, None, torch.arange(12)[None])
        assert (none, weights, cache) == (None, None, None)
        torch.testing.assert_close(older, newer)
        apart = torch.arange(12)[None].square()
        older, _, _ = attention(hidden, None, apart)
        torch.testing.assert_close(
            older, attention(hidden, position_embeddings=model.model.rotary_emb(hidden, apart))[0]
        )
        assert not torch.allclose(older, newer)
        alone = attention(hidden, torch.eye(12, dtype=torch.bool)[None, None].expand(2, 1, 12, 12))[0]
        values = attention.v_proj(hidden).unflatten(-1, (2, 1, -1)).expand(-1, -1, -1, 2, -1).flatten(2)
        torch.testing.assert_close(alone, attention.o_proj(values))  # each token attends to itself only
        with pytest.raises(ValueError, match="output_attentions=True"):
            attention(hidden, output_attentions=True)
        with pytest.raises(ValueError, match="without layer_idx"):
            attention(hidden, past_key_value=object())


def test_llama_s_attention_uses_a_cache() -> None:
    from support.models.version2 import make_llama
    from transformers import DynamicCache

    made = importlib.import_module("torch.sagemaker.nn.huggingface.llama_flashattn").LlamaFlashAttention
    torch.manual_seed(0)
    config = make_llama().config
    attention = made(config, layer_idx=0).double().eval()
    names = list(attention.state_dict())
    hidden, cache = torch.randn(2, 6, config.hidden_size, dtype=torch.float64), DynamicCache()
    with torch.no_grad():
        whole, _, none = attention(hidden)
        first, _, kept = attention(hidden[:, :5], past_key_value=cache, use_cache=True)
        last, _, dropped = attention(hidden[:, 5:], None, torch.tensor([[5]]), cache)
    torch.testing.assert_close(torch.cat([first, last], 1), whole)
    assert kept is cache
    assert (none, dropped) == (None, None)
    assert list(attention.state_dict()) == names
    assert attention.config is not config, "the model's own attention keeps its kernels"
    assert attention.config._attn_implementation == "sdpa"


class _Engine(torch.nn.Module):
    """Stands for a module of ``transformer_engine``."""

    def set_context_parallel_group(self, *given: Any) -> None:
        self.given = given


def test_groups_reach_the_modules_of_transformer_engine() -> None:
    set_up = importlib.import_module("torch.sagemaker.context_parallel.utils").setup_transformer_engine_cp_groups
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), _Engine(), _Engine())
    set_up(model, (0, 1), "group")
    assert [part.given[:2] for part in model[1:]] == [("group", [0, 1])] * 2
    with pytest.raises(ValueError, match=r"pass the model to tsm\.transform"):
        set_up(model[0], (0, 1), "group")
