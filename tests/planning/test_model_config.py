"""Configurations of Transformers as shapes: parameters counted without the model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smp_config import ConfigError
from smp_estimator.planning import ModelShape, plan
from smp_estimator.planning.model_config import read_shape, shape_of

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
GEMMA = LLAMA3 | {
    "model_type": "gemma",
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 16384,
    "vocab_size": 256000,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
MIXTRAL = LLAMA3 | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
T5 = {
    "model_type": "t5",
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "vocab_size": 32128,
    "relative_attention_num_buckets": 32,
    "is_encoder_decoder": True,
    "is_gated_act": False,
    "n_positions": 512,
}


@pytest.mark.parametrize(
    ("fields", "published"),
    [
        (GPT2, 124_439_808),
        (LLAMA3, 8_030_261_248),
        (GEMMA, 2_506_172_416),
        (MIXTRAL, 46_702_792_704),
        (T5, 60_506_624),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_counts_come_out(fields: dict[str, Any], published: int) -> None:
    assert shape_of(fields).parameters == pytest.approx(published, rel=1e-4)


@pytest.mark.parametrize(
    ("fields", "left_out"),
    [
        (LLAMA3, ("hidden_act", "rms_norm_eps", "rope_theta", "tie_word_embeddings")),
        (GPT2, ()),
        (GEMMA, ("head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "tie_word_embeddings")),
        (MIXTRAL, ("num_local_experts", "num_experts_per_tok", "rms_norm_eps", "rope_theta", "tie_word_embeddings")),
        (T5, ("d_kv", "d_ff", "relative_attention_num_buckets")),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_fields_that_are_left_out_have_their_classes_defaults(
    fields: dict[str, Any], left_out: tuple[str, ...]
) -> None:
    partial = {name: value for name, value in fields.items() if name not in left_out}
    assert shape_of(partial).parameters == shape_of(fields).parameters


def test_other_names_of_a_given_field_have_no_default() -> None:
    assert shape_of(LLAMA3 | {"head_dim": 64}).parameters < shape_of(LLAMA3).parameters
    few = {name: value for name, value in LLAMA3.items() if name != "num_key_value_heads"}
    assert shape_of(few).key_heads == 32  # as many as there are heads
    renamed = {name: value for name, value in MIXTRAL.items() if name != "num_local_experts"} | {"num_experts": 4}
    assert shape_of(renamed).parameters == shape_of(MIXTRAL | {"num_local_experts": 4}).parameters


def test_sizes_are_those_of_the_configuration() -> None:
    shape = shape_of(LLAMA3)
    assert (shape.layers, shape.hidden, shape.heads, shape.width) == (32, 4096, 32, 14336)
    assert (shape.gated, shape.tied_embeddings, shape.biases) == (True, False, False)
    assert shape.sequence == 4096
    assert "up to 8,192 tokens are possible, 4,096 were taken" in shape.source
    assert "up to 8,192 tokens are possible, 2,048 were taken" in shape.with_sequence(2048).source
    assert plan(LLAMA3, "ml.p4d.24xlarge", sequence=8192).request.shape.sequence == 8192
    assert shape_of(T5).layers == 12
    assert shape_of(MIXTRAL).width == 2 * 14336  # of the experts that a token passes


FAMILIES = [
    "gpt2",
    "gpt_neo",
    "gptj",
    "gpt_neox",
    "opt",
    "bloom",
    "llama",
    "mistral",
    "qwen2",
    "gemma2",
    "phi",
    "falcon",
]
FAMILIES += ["mixtral", "qwen3_moe", "bert", "distilbert", "t5", "bart", "gpt_oss"]


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_the_module(family: str) -> None:
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = hf.AutoConfig.for_model(family)
    kind = {"t5": "Seq2SeqLM", "bart": "Seq2SeqLM", "bert": "MaskedLM", "distilbert": "MaskedLM"}.get(
        family, "CausalLM"
    )
    with torch.device("meta"):
        model = getattr(hf, f"AutoModelFor{kind}").from_config(config)
    real = sum(p.numel() for p in model.parameters())
    assert plan(config, "local", processes_per_host=1).request.shape.parameters == pytest.approx(real, rel=0.01)
    assert shape_of(json.loads(config.to_json_string())).parameters == pytest.approx(real, rel=0.01)


def test_files_folders_and_objects(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT2))
    config = SimpleNamespace(model_type="gpt2", to_dict=lambda: GPT2)
    for given in (file, tmp_path, str(file), str(tmp_path), GPT2, config, {"text_config": GPT2, "model_type": "seen"}):
        assert plan(given, "ml.p4d.24xlarge").request.shape.parameters == 124_439_808
    fields = {"layers": 2, "hidden": 64, "heads": 2, "vocabulary": 100, "sequence": 16}
    file.write_text(json.dumps(fields))
    assert read_shape(tmp_path) == ModelShape(**fields)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[1]", "holds a list"),
        ('{"model_type": "gpt2", "n_embd": 64}', "the number of layers is unknown"),
        ('{"model_type": "deepseek_v3", "kv_lora_rank": 512}', "give the module itself"),
        ('{"layers": 2, "hiden": 3}', "lacks heads, hidden, sequence, vocabulary and has unknown hiden"),
    ],
)
def test_wrong_files_are_told(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        plan(file, "ml.p4d.24xlarge")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.json"):
        plan(tmp_path, "ml.p4d.24xlarge")
    with pytest.raises(ConfigError, match="there is no file"):
        plan(tmp_path / "x.json", "ml.p4d.24xlarge")
