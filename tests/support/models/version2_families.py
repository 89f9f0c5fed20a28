"""Small models of many families and mixtures of Transformers, without dropout, for version 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VOCABULARY = 64

_SIZE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_HIDDEN = {**_SIZE, "intermediate_size": 64, "max_position_embeddings": 64}
_GROUPED = {**_HIDDEN, "num_key_value_heads": 2}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_N = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_TOKENS}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

#: By model, the prefix of its configuration, the class of the model, and the arguments of the configuration.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", "ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3", "ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma": ("Gemma", "ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2", "ForCausalLM", {**_GROUPED, "head_dim": 8, "attn_implementation": "eager"}),
    "phi": ("Phi", "ForCausalLM", _HIDDEN),
    "phi3": ("Phi3", "ForCausalLM", {**_GROUPED, **_TOKENS}),
    "gpt2": ("GPT2", "LMHeadModel", {**_N, **_NO_DROPOUT}),
    "gptj": ("GPTJ", "ForCausalLM", {**_N, **_NO_DROPOUT, "rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeo",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
            **_TOKENS,
        },
    ),
    "codegen": ("CodeGen", "ForCausalLM", {**_N, **_NO_DROPOUT, "rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCode", "ForCausalLM", {**_N, **_NO_DROPOUT, "multi_query": False}),
    "opt": (
        "OPT",
        "ForCausalLM",
        {**_SIZE, "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0, **_TOKENS},
    ),
    "falcon": ("Falcon", "ForCausalLM", {**_SIZE, "new_decoder_architecture": True, "num_kv_heads": 2, **_TOKENS}),
    "bloom": (
        "Bloom",
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_TOKENS},
    ),
    "mpt": (
        "Mpt",
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    ),
    "stablelm": ("StableLm", "ForCausalLM", _GROUPED),
    "starcoder2": ("Starcoder2", "ForCausalLM", {**_GROUPED, "residual_dropout": 0.0, **_TOKENS}),
    "olmo": ("Olmo", "ForCausalLM", {**_GROUPED, **_TOKENS}),
    "olmo2": ("Olmo2", "ForCausalLM", {**_GROUPED, **_TOKENS}),
    "granite": ("Granite", "ForCausalLM", _GROUPED),
    "cohere": ("Cohere", "ForCausalLM", {**_GROUPED, **_TOKENS}),
    "glm": ("Glm", "ForCausalLM", {**_GROUPED, "head_dim": 8, **_TOKENS}),
    "nemotron": ("Nemotron", "ForCausalLM", {**_GROUPED, **_TOKENS}),
    "helium": ("Helium", "ForCausalLM", {**_GROUPED, "head_dim": 8, **_TOKENS}),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            **_TOKENS,
        },
    ),
    "bart": (
        "Bart",
        "ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "decoder_start_token_id": 2,
            **_TOKENS,
        },
    ),
}


_MIXTURE = {**_GROUPED, **_TOKENS, "intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    **_HIDDEN,
    **_TOKENS,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

#: Mixtures of experts in the same way.
MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", "ForCausalLM", _MIXTURE),
    "qwen3_moe": ("Qwen3Moe", "ForCausalLM", {**_MIXTURE, "moe_intermediate_size": 32, "head_dim": 8}),
    "granitemoe": ("GraniteMoe", "ForCausalLM", {**_MIXTURE, "num_local_experts": 4}),
    "deepseek_v2": ("DeepseekV2", "ForCausalLM", {**_ROUTED, **_LATENT}),
    "deepseek_v3": ("DeepseekV3", "ForCausalLM", {**_ROUTED, **_LATENT}),
    "glm4_moe": (
        "Glm4Moe",
        "ForCausalLM",
        {**_ROUTED, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "head_dim": 8},
    ),
    "phimoe": ("Phimoe", "ForCausalLM", {**_MIXTURE, "num_local_experts": 4, "router_jitter_noise": 0.1}),
    "gpt_oss": ("GptOss", "ForCausalLM", {**_MIXTURE, "num_local_experts": 4, "head_dim": 8}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        "ForCausalLM",
        {
            **_GROUPED,
            **_TOKENS,
            "moe_intermediate_size": 32,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
        },
    ),
}


def make_family(name: str) -> Callable[[], Any]:
    """Return the function that makes a model of a family, or a mixture."""

    def make() -> Any:
        import transformers

        prefix, kind, given = {**FAMILIES, **MIXTURES}[name]
        model = getattr(transformers, f"{prefix}{kind}")(getattr(transformers, f"{prefix}Config")(**given))
        if name in MIXTURES and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the grouped kernel does not compute in float64
        if name == "phimoe":
            _route_as_in_evaluation(model)
        return model

    return make


def _route_as_in_evaluation(model: Any) -> None:
    """Keep routers from drawing experts at random, which each rank does for its own tokens."""
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            module.training = False
            module.train = lambda mode=True: None


def make_adapted() -> Any:
    """Make a Llama with adapters of peft in all linear layers."""
    import peft

    from support.models.version2 import make_llama

    model = make_llama()
    model.enable_input_require_grads()  # the training recomputes blocks, whose inputs must have gradients
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    )
