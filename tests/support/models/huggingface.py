"""Tiny models of Hugging Face's families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_QUIET = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DEPTH = {"num_attention_heads": 4, "num_hidden_layers": 2}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 16, **_DEPTH}
_GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, **_QUIET}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}

_HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
_BART = {
    **{f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in _HALF.items()},
    "d_model": 32,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "decoder_start_token_id": 2,
}

#: By family: the class of its configuration, what is set there, and the class of Transformers that makes the model.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2Config", _GPT, "CausalLM"),
    "gptj": ("GPTJConfig", {**_GPT, "rotary_dim": 4}, "CausalLM"),
    "gptneo": (
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_heads": 4,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 16,
            "attention_dropout": 0.0,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
        },
        "CausalLM",
    ),
    "gptneox": ("GPTNeoXConfig", {**_SIZES, "rotary_pct": 0.5}, "CausalLM"),
    "llama": ("LlamaConfig", _GROUPED, "CausalLM"),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 6}, "CausalLM"),
    "mixtral": ("MixtralConfig", {**_GROUPED, **_EXPERTS}, "CausalLM"),
    "qwen2": ("Qwen2Config", _GROUPED, "CausalLM"),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 8}, "CausalLM"),
    "gemma": ("GemmaConfig", {**_GROUPED, "head_dim": 8}, "CausalLM"),
    "phi": ("PhiConfig", {**_SIZES, "resid_pdrop": 0.0}, "CausalLM"),
    "opt": ("OPTConfig", {**_DEPTH, "hidden_size": 32, "ffn_dim": 48, "max_position_embeddings": 16, "dropout": 0.0}, "CausalLM"),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "CausalLM"),
    "falcon": ("FalconConfig", {**_DEPTH, "hidden_size": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0}, "CausalLM"),
    "bert": ("BertConfig", {**_SIZES, **_STILL}, "MaskedLM"),
    "roberta": ("RobertaConfig", {**_SIZES, **_STILL, "max_position_embeddings": 18}, "MaskedLM"),
    "t5": ("T5Config", T5, "Seq2SeqLM"),
    "bart": ("BartConfig", _BART, "Seq2SeqLM"),
    "vit": ("ViTConfig", {**_SIZES, **_STILL, "image_size": 8, "patch_size": 4, "num_labels": 5}, "ImageClassification"),
}  # fmt: skip


def tiny_config(family: str, vocabulary: int, **more: Any) -> Any:
    """Two layers of width 32 without dropout, of at least 3 tokens; GPT-2 ties its embeddings, Llama does not."""
    import transformers as hf

    name, settings, _ = FAMILIES[family]
    words = (
        {} if family == "vit" else {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    )
    return getattr(hf, name)(**{**settings, **words, **more})


def tiny_model(family: str, vocabulary: int, **more: Any) -> nn.Module:
    """A model of that configuration, with attention in plain PyTorch."""
    import transformers as hf

    auto = getattr(hf, f"AutoModelFor{FAMILIES[family][2]}")
    return auto.from_config(tiny_config(family, vocabulary, **more), attn_implementation="eager")


def tiny_inputs(family: str, vocabulary: int, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What such a model is called with to give a loss: 8 tokens of each sample, or a picture of 8 × 8 points."""
    import torch

    if family == "vit":
        pictures = torch.randn(batch, 3, 8, 8, generator=generator)
        return {"pixel_values": pictures, "labels": torch.randint(5, (batch,), generator=generator)}
    ids = torch.randint(3, vocabulary, (batch, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}
