"""The modules that are distributed without registration: PyTorch's, and Hugging Face's on first use."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

from smp_config import Group
from smp_runtime.module_conversion.registration import (
    Arguments,
    Registration,
    arguments_of,
    distributed_classes,
    register,
    register_later,
)
from smp_runtime.nn.distributed_module import NotDistributableError
from smp_runtime.nn.embedding import DistributedEmbedding
from smp_runtime.nn.linear import DistributedConv1D, DistributedLinear
from smp_runtime.nn.lm_head import DistributedTransformerLMHead
from smp_runtime.nn.split_in_place.linear import LinearSplit, PlannedLinear, features_of, has_own_weight
from smp_runtime.nn.split_in_place.tables import Tables, module_like
from smp_runtime.nn.split_in_place.vocabulary import PlannedHead, Tie, embedding_like
from smp_runtime.nn.transformer import DistributedTransformer

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.block_entry import SharedInput

_MODELS = "transformers.models"
_FAMILIES = "smp_runtime.module_conversion.huggingface"

#: Hugging Face's classes, and the function that registers each.
_HUGGING_FACE = {
    "gpt2.modeling_gpt2.GPT2LMHeadModel": "gpt2.register_model",
    "gpt2.modeling_gpt2.GPT2Model": "gpt2.register_model",
    "gptj.modeling_gptj.GPTJForCausalLM": "gptj.register_model",
    "gptj.modeling_gptj.GPTJModel": "gptj.register_model",
    "gpt_neo.modeling_gpt_neo.GPTNeoForCausalLM": "gptneo.register_model",
    "gpt_neo.modeling_gpt_neo.GPTNeoModel": "gptneo.register_model",
    "gpt_neox.modeling_gpt_neox.GPTNeoXForCausalLM": "gptneox.register_model",
    "gpt_neox.modeling_gpt_neox.GPTNeoXModel": "gptneox.register_model",
    "llama.modeling_llama.LlamaForCausalLM": "llama.register_model",
    "llama.modeling_llama.LlamaModel": "llama.register_model",
    "bert.modeling_bert.BertEncoder": "encoder.register_model",
    "roberta.modeling_roberta.RobertaEncoder": "encoder.register_model",
}


@functools.cache
def register_all() -> None:
    """Register the built-in modules; only the first call has an effect."""
    # Each function runs when a module of its class is met. A script's own registration takes precedence, before and after.
    register_later("torch.nn.modules.linear.Linear", f"{__name__}.register_linear")
    register_later("torch.nn.modules.sparse.Embedding", f"{__name__}.register_embedding")
    register_later("transformers.pytorch_utils.Conv1D", f"{__name__}.register_conv1d")
    for name, function in _HUGGING_FACE.items():
        register_later(f"{_MODELS}.{name}", f"{_FAMILIES}.{function}")


#: What scope keywords can override, besides what registered modules take.
OVERRIDABLE = (DistributedLinear, DistributedEmbedding, DistributedTransformer, DistributedTransformerLMHead)


def register_linear(kind: type) -> None:
    """Register ``nn.Linear``."""
    register(kind, Registration(DistributedLinear, arguments=_linear))


def register_conv1d(kind: type) -> None:
    """Register Transformers' ``Conv1D``, the linear map of GPT-2."""
    register(kind, Registration(DistributedConv1D, arguments=_conv1d))


def register_embedding(kind: type) -> None:
    """Register ``nn.Embedding``."""
    register(kind, Registration(DistributedEmbedding, arguments=_embedding, only_if="distribute_embedding"))


def _require_own_weight(module: nn.Module) -> None:
    """Check that a module's weight is its own parameter. A part of the parameters of a computed weight gives another weight.

    Raises:
        NotDistributableError: the weight is computed from other parameters.
    """
    if not has_own_weight(module):
        raise NotDistributableError(
            "its weight is computed from other parameters (weight norm, spectral norm or pruning)"
        )


def _linear(module: nn.Linear) -> Arguments:
    _require_own_weight(module)
    settings = {"bias": module.bias is not None, "dtype": module.weight.dtype}
    return (module.in_features, module.out_features), settings


def _conv1d(module: Any) -> Arguments:
    _require_own_weight(module)
    return tuple(module.weight.shape), {"dtype": module.weight.dtype}


def _embedding(module: nn.Embedding) -> Arguments:
    _require_own_weight(module)
    return (module.num_embeddings, module.embedding_dim), {
        "padding_idx": module.padding_idx,
        "max_norm": module.max_norm,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "sparse": module.sparse,
        "initializer_range": 1.0,  # as nn.Embedding draws
    }


def plan_linear(split: LinearSplit, shared: SharedInput) -> Registration:
    """Return the registration of a linear map inside a module that is split in place."""

    def arguments(module: nn.Module) -> Arguments:
        bias = module.bias is not None
        return features_of(module), {"split": split, "bias": bias, "shared": shared, "reduction": Group.RDP}

    return Registration(PlannedLinear, arguments=arguments)


def of_vocabulary(module: nn.Module, tie: Tie) -> Registration:
    """Return the registration of an embedding or a head that is split by rows, with all that share its weight."""
    kind: Any = type(module)
    made = PlannedHead if isinstance(module, nn.Linear) else embedding_like(kind)
    return Registration(made, arguments=lambda original: ((original, tie), {}), shares_weights=True)


def of_tables(module: nn.Module, tables: Tables) -> Registration:
    """Return the registration of a module with parameters that are split over the ranks."""
    kind: Any = type(module)
    return Registration(module_like(kind), arguments=lambda original: ((original, tables), {}))


def known_arguments() -> set[str]:
    """Return the names of all arguments that the distributed modules take."""
    register_all()
    modules = [*OVERRIDABLE, *distributed_classes()]
    return {name for module in modules for name in arguments_of(module)}
