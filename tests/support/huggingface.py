"""Tiny configurations of Hugging Face models."""

from __future__ import annotations

from typing import Any


def tiny_config(family: str, vocabulary: int) -> Any:
    """Two layers without dropout; GPT-2 ties its embeddings, Llama here does not."""
    import transformers as hf

    if family == "gpt2":
        rates = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        return hf.GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=16, vocab_size=vocabulary, **rates)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 16}
    return hf.LlamaConfig(**sizes, **heads, vocab_size=vocabulary)
