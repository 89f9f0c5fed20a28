"""A tiny model of every language model of Transformers, by one rule: sizes of the default configuration are shrunk together.

The rule knows words of configurations (layers, heads, experts, widths …), and no model. Where what it gives cannot be built or
does not run, sizes that the error is about are tried with other values. :data:`SETTINGS` are the few that no rule can guess.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

VOCABULARY = 64
LAYERS = 2
HEADS = 4
HEAD = 8
WIDTH = HEADS * HEAD
EXPERTS = 4
POSITIONS = 48
LENGTH = 16  # tokens of a sample
#: Tokens of this number and above stand for images and the like, where a model has them; samples have none.
SPECIAL = VOCABULARY - 16
#: Most elements of a model that still counts as tiny.
MOST_ELEMENTS = 4_000_000

#: What no rule can guess, by type of model, with the reason.
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},  # a list of counted lists
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},  # nothing is the default
    "perceiver": {"max_position_embeddings": LENGTH, "num_self_attends_per_block": 2},  # samples fill its table
    "reformer": {"axial_pos_shape": [4, LENGTH // 4]},  # factors of the length
    "transfo-xl": {"cutoffs": [VOCABULARY // 4, VOCABULARY // 2]},  # borders inside the vocabulary
    "xmod": {"default_language": "en_XX"},  # samples are of some language
}

#: Kinds of language models, as Transformers maps them to classes.
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
}


class Family(NamedTuple):
    """An entry of one of the mappings."""

    kind: str
    model_type: str

    def __str__(self) -> str:
        return f"{self.model_type} ({self.kind})"


def families() -> list[Family]:
    """All entries of the mappings of the installed Transformers."""
    from transformers.models.auto import modeling_auto

    return [Family(kind, name) for kind, mapping in KINDS.items() for name in getattr(modeling_auto, mapping)]


class NotBuilt(Exception):
    """No tiny model was found, with the first reason."""


# -- the rule ------------------------------------------------------------------------------------------------------


class _Sizes:
    """The sizes of a default configuration that others are measured by."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        def first(*patterns: str) -> int | None:
            for pattern in patterns:
                for name, value in values.items():
                    if re.fullmatch(pattern, name) and type(value) is int and value > 0:
                        return value
            return None

        self.width = (
            first("hidden_size|d_model|n_embd|emb_dim|d_embed|dim_model|dim", ".*hidden_size|.*hidden_dim|embed_dim")
            or 512
        )
        self.heads = first("num_attention_heads|n_heads?|num_heads|encoder_attention_heads", ".*heads") or 8
        self.head = first("head_dim|d_kv|d_head|dim_head|kv_channels|attention_head_size") or max(
            1, self.width // self.heads
        )
        self.layers = first(r"(num_(hidden_)?|n_)layers?", ".*(layers|n_layer|depth|num_blocks)") or LAYERS
        kinds = [
            len({repr(item) for item in value})
            for name, value in values.items()
            if isinstance(value, list | tuple) and len(value) == self.layers and _TYPES.search(name)
        ]
        self.tiny_layers = min(4, max([LAYERS, *kinds]))

    def scaled(self, width: int) -> int:
        """A width that keeps its relation to that of the model, if it is one."""
        return width if width <= 16 else min(max(8, 8 * round(WIDTH * width / self.width / 8)), 4 * WIDTH)


_TYPES = re.compile(r"types?$|block_type|pattern")
_TOKEN = re.compile(r"(token|_)(_id|_index)$|(bos|eos|pad|unk|mask|sep|cls)_(index|id)$")
_LAYERS = re.compile(r"(^|_)(n_)?(layers?|num_blocks|depth)$|(^|_)depth$")
_HEADS = re.compile(r"heads?(_kv)?$|(^|_)heads_")
_HEAD = re.compile(
    r"head_dim|d_kv$|d_head|dim_head|head_size|kv_channels|rotary_dim|rope_dim|v_dim|head_width|attn_scalar"
)
_WIDTH = re.compile(
    r"(^|_)(size|dim|width|inner|embd|channels|ff|ffn|dff|hidden|rank|features|state|ssm|d_model|dims)($|_)|_dim$|_size$|^d_|_rank$|embed"
)
_POSITIONS = re.compile(
    r"position(s|_embeddings)$|seq_?(len|length)|^n_ctx$|_positions$|max_length$|target_len|mem_len"
)
_EXPERTS = re.compile(r"experts$|expert_num$|num_experts")
_CHOSEN = re.compile(r"per_tok|top_?k|moe_k$|_k$|capacity")
_GROUPS = re.compile(r"n_groups?$|num_groups$|expert_groups?$")
_WINDOW = re.compile(r"window|chunk|block_size|block_length|block_len|bucket_size")
_PERIOD = re.compile(r"period$|every|interval|_step$|frequency|_pattern$|sparse_step|_freq$")
#: Sizes for which a configuration may have None.
_USUAL = (
    (re.compile("pad_token"), 0),
    (re.compile("vocab"), VOCABULARY),
    (_CHOSEN, 2),
    (_EXPERTS, EXPERTS),
    (_HEAD, HEAD),
    (_HEADS, HEADS),
    (_WIDTH, WIDTH),
)
_ZERO = re.compile(r"drop|jitter|mask_time_prob|mask_feature_prob|noise")


#: By words of a name, what becomes of a size above zero; the first that matches counts.
_RULES: tuple[tuple[re.Pattern[str], Callable[[int, _Sizes], int]], ...] = (
    (re.compile("kernel"), lambda value, sizes: value),
    (_TOKEN, lambda value, sizes: value),
    (re.compile("vocab"), lambda value, sizes: min(value, VOCABULARY)),
    (re.compile("per_tok"), lambda value, sizes: min(value, 2)),
    (_EXPERTS, lambda value, sizes: min(value, EXPERTS)),
    (_CHOSEN, lambda value, sizes: min(value, 2)),
    (_GROUPS, lambda value, sizes: min(value, 2)),
    (_PERIOD, lambda value, sizes: min(value, 2)),
    (re.compile("offset$"), lambda value, sizes: min(value, 1)),
    (_POSITIONS, lambda value, sizes: min(value, POSITIONS)),
    (_WINDOW, lambda value, sizes: min(value, LENGTH // 2)),
    (_LAYERS, lambda value, sizes: min(value, sizes.tiny_layers)),
    (re.compile("shared_layers"), lambda value, sizes: 0),
    (re.compile("layer|^first_k"), lambda value, sizes: value if value < sizes.tiny_layers else 1),
    (_HEAD, lambda value, sizes: max(2, round(HEAD * value / sizes.head / 2) * 2)),
    (_HEADS, lambda value, sizes: min(value, HEADS if value >= sizes.heads else HEADS // 2)),
    (_WIDTH, lambda value, sizes: sizes.scaled(value)),
)


def _int(name: str, value: int, sizes: _Sizes) -> int:
    """A size of a tiny model, for one of the default."""
    rule = next((rule for words, rule in _RULES if value > 0 and words.search(name)), None)
    return value if rule is None else rule(value, sizes)


def _value(name: str, value: Any, sizes: _Sizes) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return 0 if _ZERO.search(name) else _int(name, value, sizes)
    if isinstance(value, float):
        return 0.0 if _ZERO.search(name) else value
    if isinstance(value, list | tuple):
        return _sequence(name, list(value), sizes)
    return value


def _sequence(name: str, value: list[Any], sizes: _Sizes) -> list[Any]:
    if len(value) == sizes.layers and len(value) > 1:
        value = _cut(value, sizes.tiny_layers)
    elif "layer" in name and all(type(item) is int for item in value):
        return [item for item in value if item < sizes.tiny_layers]
    return [_value(name, item, sizes) if not isinstance(item, list) else item for item in value]


def _cut(value: list[Any], count: int) -> list[Any]:
    """As many items, of each kind at least one, in the order in which kinds first appear."""
    first = [index for index, item in enumerate(value) if item not in value[:index]][:count]
    rest = [index for index in range(len(value)) if index not in first]
    return [value[index] for index in sorted(first + rest[: count - len(first)])]


def shrunk(config: Any) -> dict[str, Any]:
    """What makes a tiny configuration of the same class; sub-configurations are dictionaries.

    Args:
        config: the default one, or one that is used by default inside another.
    """
    values = {name: value for name, value in vars(config).items() if name in _settable(type(config))}
    sizes = _Sizes(values)
    found: dict[str, Any] = {}
    special = SPECIAL
    for name, value in values.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found[name] = {**shrunk(value), "model_type": value.model_type}
        elif type(value) is int and _TOKEN.search(name) and value >= VOCABULARY:
            found[name], special = special, special + 1
        elif name.endswith("token_id") and isinstance(value, list):
            found[name] = special
            special += 1
        elif (small := _value(name, value, sizes)) != value or isinstance(value, bool | int | float):
            found[name] = small
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        found["decoder_start_token_id"] = 0
    _fit_heads(values, found, sizes)
    return found


def _fit_heads(values: Mapping[str, Any], found: dict[str, Any], sizes: _Sizes) -> None:
    """Heads of a prefix of their own, such as ``mamba_n_heads`` × ``mamba_d_head``, are as wide together as they were."""
    for name, heads in values.items():
        match = re.fullmatch(r"(\w+?_)??(?:n_|num_)?heads?", name)
        for head in (f"{match[1] or ''}{word}" for word in ("d_head", "head_dim")) if match else ():
            if type(heads) is type(values.get(head)) is int and heads * values[head] % sizes.width == 0:
                found[head] = heads * values[head] // sizes.width * WIDTH // found[name]


@functools.cache
def _settable(kind: type) -> frozenset[str]:
    """Arguments of a configuration's class that are its own."""
    names = [name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters if _is_config(base)]
    return frozenset(names) | {"pad_token_id", "bos_token_id", "eos_token_id"}


def _is_config(kind: type) -> bool:
    from transformers import PretrainedConfig

    return issubclass(kind, PretrainedConfig) and kind is not PretrainedConfig


# -- building ------------------------------------------------------------------------------------------------------


def tiny_settings(family: Family) -> dict[str, Any]:
    """What makes the tiny configuration of a family; it takes a while where the first try does not run.

    Raises:
        NotBuilt: no tiny model of it trains in one process.
    """
    settings = _found(family)
    if isinstance(settings, str):
        raise NotBuilt(settings)
    return settings


def tiny_model(family: Family, settings: Mapping[str, Any] | None = None) -> nn.Module:
    """The tiny model of a family, its weights drawn with seed 0, in training mode.

    Args:
        settings: of :func:`tiny_settings`, where they are known.

    Raises:
        NotBuilt: no tiny model of it trains in one process.
    """
    return _model(family, _config(family, tiny_settings(family) if settings is None else settings))


def layers_of(family: Family, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Layers that settings ask for: those that look at nothing else, and those of a decoder that looks at an encoder's results."""
    alone = pairs = 0
    own = {name: value for name, value in settings.items() if type(value) is int and _LAYERS.search(name)}
    if family.kind == "causal":  # a decoder alone, also in a configuration of both
        alone = sum(value for name, value in own.items() if "encoder" not in name or len(own) == 1)
    else:
        pairs = sum(value for name, value in own.items() if "decoder" in name)
        alone = sum(own.values()) - pairs
    for name, value in settings.items():
        if isinstance(value, Mapping):
            more, more_pairs = layers_of(family, value)
            if family.kind != "causal" and "decoder" in name:  # a configuration of its own
                more, more_pairs = 0, more + more_pairs
            alone, pairs = alone + more, pairs + more_pairs
    return alone, pairs


def deeper(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a model with twice the layers, in the same order twice."""
    layers = {value for name, value in settings.items() if type(value) is int and _LAYERS.search(name)}
    found = dict(settings)
    for name, value in settings.items():
        if isinstance(value, dict):
            found[name] = deeper(value)
        elif type(value) is int and _LAYERS.search(name):
            found[name] = 2 * value
        elif isinstance(value, list) and len(value) in layers and _TYPES.search(name):
            found[name] = value + value
    return found


def batch_of(step: int, samples: int) -> torch.Tensor:
    """Tokens ``[samples, LENGTH]`` without padding or any of the special ones, the same wherever they are drawn."""
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(6, SPECIAL, (samples, LENGTH), generator=generator)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The model's own loss with the tokens as labels; where it has none, that of its logits."""
    import torch.nn.functional as F

    out = model(input_ids=ids, labels=ids)
    loss = getattr(out, "loss", None)
    if loss is None:
        logits = out.logits if hasattr(out, "logits") else out[0]
        return logits if logits.dim() < 2 else F.cross_entropy(logits.flatten(0, -2), ids.flatten())
    return loss if loss.dim() == 0 else loss.mean()


def _default(family: Family) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family.model_type]()


def _config(family: Family, settings: Mapping[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family.model_type](**settings)


def _model(family: Family, config: Any) -> nn.Module:
    import torch

    torch.manual_seed(0)
    return _auto(family).from_config(config).float().train()


def _elements(family: Family, config: Any) -> int:
    """Of the model's parameters; 0 for one that wants values when it is made."""
    import torch

    with torch.device("meta"):
        try:
            return sum(p.numel() for p in _auto(family).from_config(config).parameters())
        except (NotImplementedError, RuntimeError):
            return 0


def _auto(family: Family) -> Any:
    import transformers as hf

    autos = {"causal": hf.AutoModelForCausalLM, "seq2seq": hf.AutoModelForSeq2SeqLM, "masked": hf.AutoModelForMaskedLM}
    return autos[family.kind]


# -- repairing -----------------------------------------------------------------------------------------------------

_ATTEMPTS = 120


@functools.cache
def _found(family: Family) -> dict[str, Any] | str:
    """Settings with which a model is built and trains, or the first reason why there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            default = _default(family)
        except Exception as error:
            return _told(error)
        ties = {"tie_word_embeddings": default.tie_word_embeddings} if hasattr(default, "tie_word_embeddings") else {}
        settings = {**ties, **shrunk(default), **SETTINGS.get(family.model_type, {})}
        if family.kind == "causal" and not default.is_encoder_decoder and hasattr(default, "is_decoder"):
            settings["is_decoder"] = True
        return _repaired(family, settings, default)


def _repaired(family: Family, settings: dict[str, Any], default: Any) -> dict[str, Any] | str:
    first = error = _failure(family, settings)
    waiting, tried = [settings], {repr(settings)}
    errors = {repr(settings): error}
    while waiting and error is not None:
        base = waiting.pop(0)
        failure = errors[repr(base)]
        assert failure is not None
        for candidate in _variations(base, failure, default):
            if repr(candidate) in tried or len(tried) > _ATTEMPTS:
                continue
            tried.add(repr(candidate))
            error = _failure(family, candidate)
            if error is None:
                return candidate
            if _place(error) != _place(failure):  # another fault: perhaps the next one
                errors[repr(candidate)] = error
                waiting.append(candidate)
    return settings if first is None else _told(first)


def _failure(family: Family, settings: Mapping[str, Any]) -> Exception | None:
    """Why a tiny model does not train one step, with a loss that is a number."""

    try:
        config = _config(family, settings)
        if (elements := _elements(family, config)) > MOST_ELEMENTS:
            raise ValueError(f"{elements:,} elements are not tiny")
        model = _model(family, config)
        loss = loss_of(model, batch_of(0, 2))
        loss.backward()
        if not math.isfinite(float(loss)):
            raise ValueError(f"the loss is {float(loss)}")
        if not any(p.grad is not None for p in model.parameters()):
            raise ValueError("no parameter gets a gradient")
    except Exception as error:
        return error
    return None


def _variations(settings: dict[str, Any], error: Exception, default: Any) -> Iterator[dict[str, Any]]:
    """Settings in which one value has another one, those first that the error is about."""
    about, wants_value = _words(error), isinstance(error, TypeError | AttributeError)

    def distance(path: tuple[str, ...]) -> tuple[bool, int]:
        return not (wants_value and _at(settings, path) is None), about.get(path[-1], len(about))

    for path in sorted(_paths(settings, default), key=distance):
        for other in dict.fromkeys(_others(path[-1], _at(settings, path), _at(default, path))):
            yield _with(settings, path, other)


def _others(name: str, value: bool | int | None, before: Any) -> list[bool | int]:
    """What may stand in the place of a value; the number of layers is no way out."""
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [number for words, number in _USUAL if re.search(words, name)][:1]
    if _LAYERS.search(name):
        return [other for other in (LAYERS, 2 * LAYERS) if other > value]
    numbers = [2 * value, HEADS, HEAD, WIDTH, LENGTH, 4 * WIDTH, value // 2, value + 1, 1, 0]
    if type(before) is int and before <= 1024:
        numbers.insert(0, before)
    most = LAYERS if "layer" in name or name.startswith("first_k") else math.inf
    return [other for other in numbers if other != value and other <= most]


def _words(error: Exception) -> dict[str, int]:
    """Names that the error's message and the lines that led to it have, the nearest first."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    text = [str(error)]
    for frame in frames:
        lines = [
            linecache.getline(frame.filename, number)
            for number in range((frame.lineno or 1) - 6, (frame.lineno or 1) + 7)
        ]
        text += lines if "transformers" in frame.filename else []
    found = [word for line in text for word in re.findall(r"\w+", line)]
    return {word: place for place, word in reversed(list(enumerate(found)))}


def _paths(settings: Mapping[str, Any], default: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where settings have numbers and flags; None counts as a number where it stands for a size."""
    for name, value in settings.items():
        if isinstance(value, int):
            yield (*above, name)
        elif isinstance(value, Mapping):
            yield from _paths(value, vars(default).get(name) if default is not None else None, (*above, name))
    for name in sorted(_settable(type(default)) - settings.keys()) if hasattr(default, "to_dict") else ():
        if vars(default).get(name, 0) is None and any(words.search(name) for words, _ in _USUAL):
            yield (*above, name)


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        values = (values if isinstance(values, Mapping) else vars(values)).get(name) if values is not None else None
    return values


def _with(settings: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = path
    return {**settings, name: _with(settings[name], tuple(rest), value) if rest else value}


def _place(error: Exception) -> tuple[str, int]:
    """Where an error was raised, and which."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "transformers" in frame.filename] or frames
    return _told(error), inside[-1].lineno or 0


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
