"""Shapes of models that are only described: by a configuration of Transformers, or by fields in a dictionary."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from smp_config import ConfigError
from smp_config.errors import kind_of, suggest
from smp_estimator.planning.model_shape import ModelShape, Weight

#: What Transformers' configurations call the sizes of a model, the usual name first.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads"),
    "vocabulary": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx"),
    "feed_forward": (
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "d_ff",
        "ffn_hidden_size",
        "encoder_ffn_dim",
        "hidden_dim",
    ),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_size": ("head_dim", "d_kv"),
}

#: Fields that a configuration may leave out: its class has a default. Without the sizes that every configuration states.
OPTIONAL_FIELDS = frozenset(
    (*_NAMES["feed_forward"], *_NAMES["experts"], *_NAMES["chosen"], *_NAMES["kv_heads"], *_NAMES["head_size"])
    + ("moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts", "multi_query")
    + ("new_decoder_architecture", "tie_word_embeddings", "hidden_act", "activation_function", "type_vocab_size")
)

#: Beginnings of fields whose presence tells how norms and positions are computed.
SIGNS = ("rms_", "rope_", "rotary_", "relative_attention", "alibi")

#: Tokens of a sample if a configuration has a higher limit or none: few jobs train at 131,072.
_SEQUENCE = 4096

#: Families without a table of positions, though no field of the configuration shows it.
_NO_POSITIONS = ("bloom", "mpt", "falcon", "t5", "mt5", "umt5", "longt5")

#: Families with a gate in the MLP, though their activation function does not show it.
_GATED = ("gemma", "gemma2", "gemma3_text", "glm", "glm4", "modernbert")

#: Families with one norm per block, shared by attention and MLP.
_ONE_NORM = ("gptj", "codegen", "phi", "falcon")


def read_shape(path: Path) -> ModelShape:
    """Return the shape in ``path``: ``config.json`` of Transformers, its folder, or a file with a shape's fields.

    Raises:
        ConfigError: there is no such file, or it has other contents.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = f"the folder {path} has no config.json" if path.is_dir() else f"there is no file {path}"
        raise ConfigError(
            f"{what}, from which the model's shape would be read; give the path of a configuration of Transformers, or of the "
            "folder that save_pretrained has written",
            code="SMP110",
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{file} is no JSON ({error}); give the path of a configuration of Transformers, or of its folder",
            code="SMP110",
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds {kind_of(found)}; a configuration has names: give a dictionary", code="SMP110")
    return shape_of(found, str(file))


def shape_of(fields: Mapping[str, Any], source: str = "the dictionary") -> ModelShape:
    """Return the shape that a dictionary describes.

    The dictionary is a configuration of Transformers, or has the fields of a :class:`ModelShape`.

    Raises:
        ConfigError: sizes are missing, unknown or wrong.
    """
    if "model_type" in fields or "architectures" in fields or set(_NAMES["hidden"]) & set(fields):
        return _Configuration(fields, source).shape()
    known = set(ModelShape.__dataclass_fields__) - {"weights"}
    unknown = set(fields) - known
    needed = {"layers", "hidden", "heads", "vocabulary", "sequence"} - set(fields)
    if unknown or needed:
        wrong = [
            f"{word} {', '.join(sorted(names))}"
            for word, names in (("lacks", needed), ("has unknown", unknown))
            if names
        ]
        near = suggest(min(unknown), known) if unknown else ""
        raise ConfigError(
            f"the shape in {source} {' and '.join(wrong)}{near}; write for example "
            '{"layers": 48, "hidden": 1600, "heads": 25, "vocabulary": 50257, "sequence": 1024}, or give a configuration of '
            "Transformers, which has model_type",
            code="SMP110",
        )
    return ModelShape(**fields)


@functools.cache
def _defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults of configurations' classes, by type of model."""
    text = (resources.files("smp_estimator.models") / "config_defaults.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def _with_defaults(fields: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    """Return a configuration with the fields that it leaves out; those with another name for a field that it has stay out."""
    given = set(fields)
    for names in _NAMES.values():
        if given & set(names):
            given |= set(names)
    more = {name: value for name, value in _defaults().get(model_type, {}).items() if name not in given}
    return {**more, **fields}


class _Configuration:
    """A configuration of Transformers; those of several models (text and pictures) by their text part."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        text = fields.get("text_config")
        self._fields = {**fields, **text} if isinstance(text, Mapping) else fields
        self._source = source
        self._type = str(self._fields.get("model_type") or "model")
        self._fields = _with_defaults(self._fields, self._type)
        if "kv_lora_rank" in self._fields:
            raise ConfigError(
                f"{source} is of a {self._type} with latent attention, whose matrices are not counted from a configuration; give "
                "the module itself, made on the meta device",
                code="SMP110",
            )

    def shape(self) -> ModelShape:
        """Return the configuration's shape, with every parameter tensor."""
        return ModelShape(
            layers=self._needed("layers") + len(self._decoders()),
            hidden=self._needed("hidden"),
            heads=self._needed("heads"),
            vocabulary=self._needed("vocabulary"),
            sequence=self._sequence(),
            feed_forward=self._computed_width(),
            tied_embeddings=self._is_tied(),
            learned_positions=False,
            gated=self._is_gated(),
            biases=not self._is_plain(),
            source=self._origin(),
            weights=tuple(self._weights()),
            given_key_heads=self._kv_heads(),
            given_head_width=self._size("head_size"),
        )

    # -- sizes -----------------------------------------------------------------------------------------------------

    def _size(self, name: str) -> int:
        for key in _NAMES[name]:
            value = self._fields.get(key)
            # A flag is an ``int`` in Python, and no size.
            if isinstance(value, bool) or not isinstance(value, int):
                continue
            if value > 0:
                return value
        return 0

    def _needed(self, name: str) -> int:
        found = self._size(name)
        if not found:
            raise ConfigError(
                f"{self._source} has none of {', '.join(_NAMES[name])}, so the number of {name} is unknown; give a whole "
                "configuration of Transformers, or a shape with layers, hidden, heads, vocabulary and sequence",
                code="SMP110",
            )
        return found

    def _sequence(self) -> int:
        return min(self._size("sequence") or _SEQUENCE, _SEQUENCE)

    def _origin(self) -> str:
        most = self._size("sequence")
        cut = f"; up to {most:,} tokens are possible, {self._sequence():,} were taken" if most > _SEQUENCE else ""
        return f"{self._type}, counted from its configuration ({self._source}){cut}"

    def _width(self) -> int:
        expert = self._fields.get("moe_intermediate_size")
        if self._size("experts") and isinstance(expert, int):
            return expert
        return self._size("feed_forward") or 4 * self._size("hidden")

    def _shared_width(self) -> int:
        """Return the width of the experts that every token passes through."""
        shared = self._fields.get("shared_expert_intermediate_size")
        if isinstance(shared, int):
            return shared
        many = self._fields.get("n_shared_experts")
        return many * self._width() if isinstance(many, int) else 0

    def _computed_width(self) -> int:
        chosen = self._size("chosen") if self._size("experts") else 1
        return max(1, chosen) * self._width() + self._shared_width()

    def _kv_heads(self) -> int:
        if self._fields.get("multi_query") and not self._fields.get("new_decoder_architecture"):
            return 1
        return self._size("kv_heads") or self._size("heads")

    def _decoders(self) -> range:
        """Return the layers of the decoder of a model that has an encoder too."""
        if not self._fields.get("is_encoder_decoder"):
            return range(0)
        first = self._size("layers")
        given = self._fields.get("num_decoder_layers") or self._fields.get("decoder_layers")
        count = int(given or first)
        return range(first, first + count)

    # -- layers and weights ----------------------------------------------------------------------------------------

    def _is_tied(self) -> bool:
        return bool(self._fields.get("tie_word_embeddings", True))

    def _is_plain(self) -> bool:
        """Return whether linear layers and norms have no biases."""
        has_rms_norm = any(key.startswith("rms_") for key in self._fields)
        return has_rms_norm or self._type in ("t5", "mt5", "umt5")

    def _is_gated(self) -> bool:
        if "is_gated_act" in self._fields:
            return bool(self._fields["is_gated_act"])
        act = self._fields.get("hidden_act") or self._fields.get("activation_function") or ""
        return str(act) in ("silu", "swish", "swiglu") or self._type in _GATED

    def _positions(self) -> int:
        """Return the rows of the position table; 0 if positions are computed."""
        if self._type in _NO_POSITIONS or any(key.startswith(SIGNS[1:]) for key in self._fields):
            return 0
        return self._size("sequence")

    def _weights(self) -> Iterator[Weight]:
        h, vocabulary = self._size("hidden"), self._size("vocabulary")
        yield Weight(vocabulary * h, -1, embedding=True)
        if self._positions():
            yield Weight(self._positions() * h, -1)
        kinds = self._fields.get("type_vocab_size")
        if isinstance(kinds, int) and kinds > 0:
            yield Weight(kinds * h, -1)
        decoders = self._decoders()
        for layer in range(self._size("layers") + len(decoders)):
            yield from self._layer(layer, crosses=layer in decoders)
        yield Weight(h if self._is_plain() else 2 * h, None)
        if not self._is_tied():
            yield Weight(vocabulary * h, None, embedding=True)

    def _layer(self, layer: int, *, crosses: bool) -> Iterator[Weight]:
        h, f, heads = self._size("hidden"), self._width(), self._size("heads")
        head = self._size("head_size") or h // heads
        query, key = heads * head, self._kv_heads() * head
        attentions = 2 if crosses else 1
        matrices = [h * query, 2 * h * key, query * h] * attentions
        many, gates = self._size("experts"), 3 if self._is_gated() else 2
        matrices += [gates * h * f] * (many or 1)
        if many:
            yield Weight(many * h, layer, matrix=True)  # what sends a token to its experts
            if self._shared_width():
                matrices.append(gates * h * self._shared_width())
        for elements in matrices:
            yield Weight(elements, layer, split=True, matrix=True)
        blocks = 1 if self._type in _ONE_NORM else 2
        norms = 3 if crosses else blocks
        for _ in range(norms):
            yield Weight(h, layer)
        if not self._is_plain():
            yield Weight(query + 2 * key + f, layer, split=True)
            yield Weight((norms + 2) * h, layer)
