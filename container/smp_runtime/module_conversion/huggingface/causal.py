"""Causal language models of Hugging Face: a distributed model that is called, and answers, like the original."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.activations.marking import say_offloading_is_ours
from smp_runtime.errors import SMPAttributeError, SMPUserError
from smp_runtime.module_conversion.huggingface.generating import generate_as, past_length
from smp_runtime.module_conversion.registration import Arguments, Registration, register
from smp_runtime.nn.distributed_module import NotDistributableError
from smp_runtime.nn.lm_head import DistributedTransformerLMHead, additive_mask
from smp_runtime.tensor_parallel.masks import to_additive

if TYPE_CHECKING:
    from smp_runtime.module_conversion.huggingface.translation import CausalNames

#: Arguments of ``forward`` that a distributed model does not support.
_REFUSED = ("layer_past", "inputs_embeds", "head_mask", "output_attentions", "output_hidden_states")
#: Rotary embeddings with frequencies that do not change with the sequence.
_STATIC_ROTARY = ("default", "linear", "llama3", "yarn")


class CausalModel(DistributedTransformerLMHead):
    """A model that returns what a Hugging Face model does: an output object, or a tuple.

    Args:
        with_cross_outputs: whether the original's output objects have fields of cross attention.
        state_names: the original's names of its parameters.
        original: its class.
        settings: of :class:`DistributedTransformerLMHead`.
    """

    def __init__(
        self,
        with_cross_outputs: bool = False,
        state_names: CausalNames | None = None,
        original: type | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.original = original
        self.with_cross_outputs = with_cross_outputs
        self.state_names = state_names

    def forward(
        self,
        inputs: tuple[Any, ...],
        return_dict: bool = True,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
    ) -> Any:
        """See :class:`DistributedTransformerLMHead`; masks are Hugging Face's, with 1 for a position that counts.

        ``past_key_values`` is its cache, which gets keys and values of this rank's heads. Without it and without a mask, positions
        that begin again separate documents, as in the original.
        """
        from transformers import modeling_outputs as outputs

        ids, mask, token_types, positions, labels = inputs
        if mask is None and positions is not None and past_key_values is None and self._separates(use_cache):
            mask = _document_mask(positions)
        self._agree_on_inputs(ids, token_types, labels)
        cross = "AndCrossAttentions" if self.with_cross_outputs else ""
        past = past_length(past_key_values)
        hidden = self.hidden_states(
            ids, _additive(mask, self.hidden_dtype), token_types, positions, cache=past_key_values, past=past
        )
        if not self.add_lm_head:
            made = getattr(outputs, f"BaseModelOutputWithPast{cross}")(last_hidden_state=hidden)
        elif labels is None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            made = _causal_output(outputs, self.with_cross_outputs)(logits=self.logits(hidden[:, kept, :]))
        else:
            loss, logits = self.loss_and_logits(hidden, labels, num_items_in_batch)
            made = _causal_output(outputs, self.with_cross_outputs)(loss=loss, logits=logits)
        if past_key_values is not None:
            made["past_key_values"] = past_key_values
        return made if return_dict else made.to_tuple()

    def _separates(self, use_cache: bool | None) -> bool:
        """Return whether the original takes positions that begin again for documents; it does not beside a cache."""
        if use_cache is None:
            use_cache = bool(getattr(getattr(self, "config", None), "use_cache", True))
        makes_cache = use_cache and not (self.training and self.is_gradient_checkpointing)
        return not makes_cache and self.original is not None and _separates_documents(self.original)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the original's ``generate``; see Transformers."""
        if self.original is None or not hasattr(self.original, "generate"):
            raise SMPAttributeError(
                f"a distributed {getattr(self, 'replaced_class', 'model')} has no head to generate with", code="SMP307"
            )
        return generate_as(self.original, self, *args, **kwargs)

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the word embedding."""
        return self.word_embedding

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Checkpoint the layers, as ``smp.set_activation_checkpointing`` does; ``use_reentrant`` does not matter."""
        settings = gradient_checkpointing_kwargs or {}
        if offload:
            say_offloading_is_ours()
        self.transformer.checkpoint_layers(
            preserve_rng_state=bool(settings.get("preserve_rng_state", True)), every=every_n_layers
        )

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Checkpoint the layers; this is the name in Transformers 5."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, every_n_layers, offload)

    def gradient_checkpointing_disable(self) -> None:
        """Let the layers keep all that backward needs."""
        self.transformer.gradient_checkpointing = False

    def activation_checkpointing_disable(self) -> None:
        """Let the layers keep all that backward needs; this is the name in Transformers 5."""
        self.gradient_checkpointing_disable()

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Return whether layers keep only their inputs for backward."""
        return self.transformer.gradient_checkpointing

    @property
    def is_activation_checkpointing(self) -> bool:
        """Return whether layers keep only their inputs for backward; this is the name in Transformers 5."""
        return self.is_gradient_checkpointing


@functools.cache
def _separates_documents(original: type) -> bool:
    """Return whether a class of Transformers makes a mask of documents from positions: with this PyTorch, and in this version."""
    make = getattr(sys.modules.get(original.__module__), "create_causal_mask", None)
    return make is not None and "position_ids" in inspect.signature(make).parameters and _masks_documents()


def _masks_documents() -> bool:
    return torch.torch_version.TorchVersion(torch.__version__) >= "2.6"  # as Transformers asks


def _document_mask(positions: torch.Tensor) -> torch.Tensor:
    """Return a mask, ``[batch, 1, seq, seq]``, that is True for positions of one document: each is one more than the former."""
    begins = torch.diff(positions, dim=-1) != 1
    documents = torch.nn.functional.pad(begins, (1, 0)).cumsum(-1)
    return (documents[:, :, None] == documents[:, None, :])[:, None]


def _causal_output(outputs: Any, with_cross: bool) -> Any:
    return outputs.CausalLMOutputWithCrossAttentions if with_cross else outputs.CausalLMOutputWithPast


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return an additive mask from one of ``[batch, seq]`` with 1 for a position that counts.

    A mask of four dims is additive already, or boolean.
    """
    if mask is None or mask.dim() == 4:
        return to_additive(mask, dtype)
    return additive_mask(mask == 0, dtype)


def register_causal(
    kind: type, settings: Callable[[Any], dict[str, Any]], names: CausalNames, *, has_cross: bool = False
) -> None:
    """Register a Hugging Face class; ``settings`` makes keyword arguments of its configuration."""
    with_head = kind.__name__.endswith(("LMHeadModel", "ForCausalLM"))

    def init_hook(config: Any, *_: Any, **facts: Any) -> Arguments:
        refuse_cross_attention(config)
        made = {
            **common_settings(config),
            **settings(config),
            **facts,
            "add_lm_head": with_head,
            "with_cross_outputs": has_cross,
            "state_names": names,
            "original": kind,
        }
        if not with_head:
            made["lm_head_bias"] = False
        return (), made

    register(
        kind,
        Registration(
            CausalModel,
            init_hook,
            _forward_hook(kind),
            arguments=lambda module: ((module.config,), _facts(module) if with_head else {}),
            is_whole_model=True,
            translations=(names.to_theirs, names.to_ours),
            was_initialised=was_initialised,
        ),
    )


@torch.no_grad()
def was_initialised(module: torch.nn.Module) -> bool:
    """Return whether a module of Transformers has initialized or loaded weights.

    Scripts of the original library replace ``PreTrainedModel.init_weights`` by a function that does nothing. This
    saves time, since the distributed form draws new weights anyway. Transformers then marks no module. A state
    that was trained and loaded shows in the values of the norms.
    """
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:
        return True
    is_original = getattr(base.init_weights, "__module__", "").startswith("transformers.")
    if is_original:
        return True
    if any(getattr(part, "_is_hf_initialized", False) for part in module.modules()):
        return True
    return any(_is_trained_norm(part) for part in module.modules())


def _is_trained_norm(part: torch.nn.Module) -> bool:
    if "norm" not in type(part).__name__.lower():
        return False
    for name, value in part.named_parameters():
        initial = 1.0 if name == "weight" else 0.0
        if value.is_meta:
            continue
        if bool((value != initial).any()):
            return True
    return False


def _facts(module: Any) -> dict[str, Any]:
    """Return settings of a module that may differ from its configuration."""
    if not was_initialised(module):
        return {}  # nor were its weights tied
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    return {"tie_word_embeddings": head.weight is embedding.weight}


def refuse_cross_attention(config: Any) -> None:
    """Raise NotDistributableError for a configuration with cross attention."""
    if getattr(config, "add_cross_attention", False):
        raise NotDistributableError(
            "its configuration has add_cross_attention, which is not distributed; use the original"
        )


def common_settings(config: Any) -> dict[str, Any]:
    """Return the settings common to all models: pre-norms, a norm after the last layer, and normal weights.

    Sizes are read under the names that all configurations of Transformers know.
    """
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "num_positions": 0,
        "causal_mask_size": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "final_layernorm": True,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _forward_hook(kind: type) -> Callable[..., Arguments]:
    """Return a hook that translates the arguments of ``kind.forward``."""
    bind = given_arguments(kind)

    def hook(*args: Any, **kwargs: Any) -> Arguments:
        given = bind(*args, **kwargs)
        for name in _REFUSED:
            if given.get(name) is not None and given[name] is not False:
                raise SMPUserError(
                    f"{kind.__name__} is distributed and takes no {name}; leave it out, or create the model outside of "
                    "smp.tensor_parallelism()",
                    code="SMP307",
                )
        inputs = tuple(
            given.get(name) for name in ("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels")
        )
        if inputs[0] is None:
            raise SMPUserError(f"{kind.__name__} got no input_ids; pass them", code="SMP307")
        kept = ("logits_to_keep", "num_items_in_batch", "past_key_values", "use_cache")
        options = {name: given[name] for name in kept if given.get(name) is not None}
        if given.get("return_dict") is False:
            options["return_dict"] = False
        return (inputs,), options

    return hook


def given_arguments(kind: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that binds the arguments of ``kind.forward`` by name.

    It works with the order of arguments in any version of Transformers.
    """
    signature = inspect.signature(kind.forward)

    @functools.wraps(kind.forward)
    def bind(*args: Any, **kwargs: Any) -> dict[str, Any]:
        given = dict(signature.bind(None, *args, **kwargs).arguments)
        return given | given.pop("kwargs", {})

    return bind


def rotary_settings(config: Any, head_size: int) -> Mapping[str, Any]:
    """Return the rotary embedding of a configuration; Transformers computes any scaling of its frequencies.

    Raises:
        NotDistributableError: its frequencies change with the sequence.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # One dictionary since Transformers 5; before, one of the scaling, and attributes.
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _STATIC_ROTARY:
        raise NotDistributableError(
            f"its rope_scaling is of type {kind!r}, whose frequencies change with the sequence; use one of "
            f"{', '.join(_STATIC_ROTARY)}"
        )
    if kind == "default":
        theta = scaling.get("rope_theta", getattr(config, "rope_theta", None)) or 10000.0
        part = scaling.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1.0
        size = int(head_size * part)
        frequencies, scale = 1.0 / theta ** (torch.arange(0, size, 2, device="cpu").float() / size), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if 2 * len(frequencies) > head_size:
        raise NotDistributableError(f"it rotates {2 * len(frequencies)} channels of heads that have {head_size}")
    return {
        "rotary_frequencies": tuple(frequencies.tolist()),
        "rotary_interleaved": False,
        "rotary_scale": float(scale),
    }


def activation_name(name: Any) -> str:
    """Return the name of an activation if distributed layers have it.

    Raises:
        NotDistributableError: they do not have it.
    """
    from smp_runtime.nn.settings import ACTIVATIONS

    if name not in ACTIVATIONS:
        raise NotDistributableError(f"its activation is {name!r}; distributed layers have {', '.join(ACTIVATIONS)}")
    return str(name)
