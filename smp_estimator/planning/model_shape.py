"""A model as the planner sees it: its parameter tensors and, when known, its transformer shape."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeGuard

from smp_config import ConfigError
from smp_config.errors import kind_of


@dataclass(frozen=True)
class Weight:
    """One parameter tensor.

    Attributes:
        elements: its size.
        layer: the layer it belongs to, counted from 0; -1 before the layers (embeddings), None after them (head).
        split: tensor parallelism divides it.
        embedding: a word embedding or output projection; divided only when the embedding is distributed.
        trainable: has a gradient and optimizer state.
        matrix: a hidden matrix, or a stack of them, for which Muon keeps a momentum.
    """

    elements: int
    layer: int | None
    split: bool = False
    embedding: bool = False
    trainable: bool = True
    matrix: bool = False


@dataclass(frozen=True)
class ModelShape:
    """A transformer's shape; everything counts elements.

    Attributes:
        hidden: width of the residual stream.
        heads: attention heads.
        sequence: tokens per sample.
        feed_forward: width inside the MLP; 0 means 4 × hidden.
        tied_embeddings: the output projection is the word embedding.
        learned_positions: has a position embedding of ``sequence`` × ``hidden`` (else rotary or none).
        gated: the MLP has three matrices (SwiGLU) instead of two.
        biases: linear layers and norms have biases.
        source: where this shape was published, or how it was made.
        weights: the real tensors when the model was given as a module; empty means: made from the shape.
        given_key_heads: heads of keys and values; 0 means as many as heads.
        given_head_width: width of a head; 0 means hidden / heads.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    feed_forward: int = 0
    tied_embeddings: bool = True
    learned_positions: bool = True
    gated: bool = False
    biases: bool = True
    source: str = "given"
    weights: tuple[Weight, ...] = field(default=(), repr=False)
    given_key_heads: int = 0
    given_head_width: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        if not self.weights and self.hidden % self.heads:
            divisors = [h for h in range(1, self.hidden + 1) if self.hidden % h == 0]
            nearest = max(h for h in divisors if h <= 2 * self.heads)
            raise ConfigError(
                f"hidden {self.hidden} cannot be divided into {self.heads} heads ({self.hidden} = {self.heads} × "
                f"{self.hidden // self.heads} + {self.hidden % self.heads}); use heads={nearest}",
                code="SMP110",
            )

    def _check_types(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "sequence"):
            value = getattr(self, name)
            if not _is_whole(value) or value < 1:
                raise ConfigError(
                    f"{name} is {value!r}; the shape of a model is counted in whole elements: give {name}=1 or more",
                    code="SMP110",
                )
        if not _is_whole(self.feed_forward) or self.feed_forward < 0:
            raise ConfigError(
                f"feed_forward is {self.feed_forward!r}; it is the width inside the MLP, in whole elements: give for example "
                f"feed_forward={4 * self.hidden}, or 0, which means 4 × hidden {self.hidden}",
                code="SMP110",
            )
        for name in ("tied_embeddings", "learned_positions", "gated", "biases"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; the shape has it or not: write {name}=True or False (in JSON true, false)",
                    code="SMP110",
                )

    @property
    def width(self) -> int:
        """Return the width inside the MLP."""
        return self.feed_forward or 4 * self.hidden

    @property
    def key_heads(self) -> int:
        """Return the heads of keys and values."""
        return self.given_key_heads or self.heads

    @property
    def head_width(self) -> float:
        """Return the width of a head."""
        return self.given_head_width or self.hidden / self.heads

    @cached_property
    def parameters(self) -> int:
        """Return the elements of all parameter tensors."""
        return sum(weight.elements for weight in self.tensors())

    @cached_property
    def is_trained_whole(self) -> bool:
        """Return whether every parameter has a gradient."""
        return all(weight.trainable for weight in self.tensors())

    @cached_property
    def layer_parameters(self) -> int:
        """Return the elements of the parameter tensors of all layers, without embeddings and head."""
        elements = 0
        for weight in self.tensors():
            is_embedding_or_head = weight.layer is None or weight.layer < 0
            if not is_embedding_or_head:
                elements += weight.elements
        return elements

    @property
    def has_layers(self) -> bool:
        """Return whether activations can be computed: some hidden width and layers were found."""
        return self.hidden > 1

    def tensors(self) -> tuple[Weight, ...]:
        """Return every parameter tensor, embeddings first, then layer by layer, then the head."""
        return self.weights or self._made_once

    @cached_property
    def _made_once(self) -> tuple[Weight, ...]:
        return tuple(self._made())

    def _made(self) -> Iterable[Weight]:
        h, f = self.hidden, self.width
        yield Weight(self.vocabulary * h, -1, embedding=True)
        if self.learned_positions:
            yield Weight(self.sequence * h, -1)
        for layer in range(self.layers):
            matrices = [3 * h * h, h * h] + [h * f] * (3 if self.gated else 2)
            yield from (Weight(elements, layer, split=True, matrix=True) for elements in matrices)
            norms = [h, h]
            if self.biases:
                norms += [h, h, h, h]  # biases of both norms, of the attention's and of the MLP's output
                yield Weight(3 * h, layer, split=True)
                yield Weight(f, layer, split=True)
            yield from (Weight(elements, layer) for elements in norms)
        yield Weight(h, None)
        if self.biases:
            yield Weight(h, None)
        if not self.tied_embeddings:
            yield Weight(self.vocabulary * h, None, embedding=True)

    @classmethod
    def from_parameter_count(cls, count: float, *, sequence: int = 2048, vocabulary: int = 50_257) -> ModelShape:
        """Return a GPT-2-like shape of nearly ``count`` parameters.

        Heads are 128 wide. The width is a multiple of 128 up to 1,024 and of 1,024 above. Layers and width keep the
        proportion hidden ≈ 128 × layers (Kaplan et al. 2020: loss hardly depends on it between 50 and 200). The shape
        nearest to ``count`` inside that range is chosen.

        Raises:
            ConfigError: fewer than a million parameters, or no shape within 25 % of the count.
        """
        if isinstance(count, bool) or not isinstance(count, int | float) or not 1e6 <= count < math.inf:
            raise ConfigError(
                f"the model has {count!r} parameters; a shape can be chosen from a million parameters on: give the "
                "count in units, for example 20e9, or the shape itself",
                code="SMP110",
            )
        best: tuple[float, int, int] | None = None
        for hidden in [*range(128, 1024, 128), *range(1024, 32_769, 1024)]:
            rest = count - (vocabulary + sequence + 2) * hidden
            layers = max(1, round(rest / (12 * hidden**2 + 13 * hidden)))
            made = layers * (12 * hidden**2 + 13 * hidden) + (vocabulary + sequence + 2) * hidden
            ratio = hidden / layers
            off = abs(made - count) / count
            if off < 0.25:
                best = min(
                    best or (9.9, 0, 0), (off + 0.05 * max(0.0, ratio / 200 - 1, 50 / ratio - 1), layers, hidden)
                )
        if best is None:
            raise ConfigError(
                f"no shape near {_count(count)} parameters has a vocabulary of {vocabulary}: the word embedding alone takes "
                f"{vocabulary} × 128 = {vocabulary * 128} parameters at the smallest width; give vocabulary="
                f"{max(1, int(count / 512))} or the shape itself",
                code="SMP110",
            )
        _, layers, hidden = best
        return cls(
            layers,
            hidden,
            hidden // 128,
            vocabulary,
            sequence,
            source=f"chosen for {_count(count)} parameters",
        )

    @classmethod
    def from_module(
        cls, module: Any, *, sequence: int | None = None, heads: int | None = None, vocabulary: int | None = None
    ) -> ModelShape:
        """Read an ``nn.Module`` (also on the meta device) without importing torch.

        The parameters are exact. Layers are the longest numbered list of modules; width, heads, vocabulary and
        sequence come from ``module.config`` under the usual names, else from the tensors. A table of positions is
        recognized by its name.

        Raises:
            ConfigError: an object without parameters.
        """
        named = getattr(module, "named_parameters", None)
        if not callable(named):
            raise ConfigError(
                f"the model is {module!r:.80}, {kind_of(module)}; give an nn.Module, a ModelShape, the name of a "
                "published shape or a number of parameters",
                code="SMP110",
            )
        found = [
            (str(name), tuple(int(d) for d in p.shape), int(p.numel()), bool(getattr(p, "requires_grad", True)))
            for name, p in named()
        ]
        if not found:
            raise ConfigError(
                f"the model {type(module).__name__} has no parameters; plan() counts the parameters of the module "
                "itself: give the model that is trained",
                code="SMP110",
            )
        return _shape_of(found, getattr(module, "config", None), sequence, heads, vocabulary)

    def with_sequence(self, sequence: int | None) -> ModelShape:
        """Return the same model for samples of another length; weights made from the shape keep their sizes."""
        if sequence is None or sequence == self.sequence:
            return self
        # A configuration's source says how many of the possible tokens a sample has.
        source = self.source.replace(f"{self.sequence:,} were taken", f"{sequence:,} were taken")
        return replace(self, sequence=sequence, weights=self.tensors(), source=source)

    def __str__(self) -> str:
        return (
            f"{_count(self.parameters)} parameters: {self.layers} layers × {self.hidden}, {self.heads} heads, "
            f"vocabulary {self.vocabulary}, sequence {self.sequence}"
        )


def _count(parameters: float) -> str:
    """Return a number of parameters as text: ``"124M"``, ``"20.6B"``, ``"1,000B"``."""
    unit, letter = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    number = parameters / unit
    return f"{number:,.0f}{letter}" if number >= 100 else f"{number:.3g}{letter}"


_COUNT_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?[bm])(?![^\W_])", re.IGNORECASE)


def advise_for_hub_name(name: str) -> str:
    """Return advice for a name of a model hub, such as ``"meta-llama/Llama-3.1-8B"``: no hub is asked for a shape."""
    if "/" not in name:
        return ""
    found = _COUNT_IN_NAME.search(name)
    advice = "it is not looked up in a model hub: give the path of its config.json"
    return f"{advice}, or its size, {found[1].lower()!r}; " if found else f"{advice}; "


_NUMBERED = re.compile(r"^(.*?)\.?(\d+)(?:\.|$)")

#: Names of position tables: ``positions``, ``wpe``, ``pos_emb``, ``embed_positions``.
_POSITIONS = re.compile(r"position|(?<![a-z])(?:wpe|w?pos(?![a-z]))", re.IGNORECASE)

#: What configurations call the tokens of a sample.
_SEQUENCE_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "seq_len",
    "sequence",
    "n_ctx",
    "block_size",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "context_length",
)

_Sizes = tuple[int, ...]


def _vocabulary_table(tables: list[tuple[str, _Sizes, bool]], vocabulary: int) -> _Sizes | None:
    """Return the sizes of the word embedding.

    Args:
        tables: name, sizes and whether it stands before the layers, of each matrix outside of the layers.
        vocabulary: rows of the table if they are known, else 0.
    """
    words = [table for table in tables if not _POSITIONS.search(table[0])]
    known = [sizes for _, sizes, _ in words if sizes[0] == vocabulary]
    # An output projection has the sizes of the word embedding; square matrices are projections of another use.
    before, behind = ({sizes for _, sizes, first in words if first is side} for side in (True, False))
    repeated = [sizes for sizes in before & behind if sizes[0] != sizes[1]]
    candidates = known or repeated or [sizes for _, sizes, _ in words]
    return max(candidates, key=lambda sizes: sizes[0], default=None)


def _sequence_of_tables(tables: list[tuple[str, _Sizes, bool]]) -> int:
    """Return the rows of the position table, 0 without one."""
    return max((sizes[0] for name, sizes, _ in tables if _POSITIONS.search(name)), default=0)


def _shape_of(
    found: list[tuple[str, tuple[int, ...], int, bool]],
    config: Any,
    sequence: int | None,
    heads: int | None,
    vocabulary: int | None,
) -> ModelShape:
    """Find the stack of layers and the sizes around it."""
    stacks: Counter[str] = Counter()
    for name, _, elements, _ in found:
        numbered = _NUMBERED.match(name)
        if numbered:
            stacks[numbered[1]] += elements
    stack = stacks.most_common(1)[0][0] if stacks else None
    inside = [(name, shape) for name, shape, _, _ in found if len(shape) == 2 and _in_stack(name, stack)]
    outside = _outside(found, stack)
    vocabulary = vocabulary or _first(config, "vocab_size", "vocabulary")
    table = _vocabulary_table(outside, vocabulary)
    embeddings = {name for name, sizes, _ in outside if sizes == table and not _POSITIONS.search(name)}
    weights: list[Weight] = []
    numbers: set[int] = set()
    for name, shape, elements, trainable in found:
        # Before the first layer it is beside the embedding; behind the last one, beside the loss.
        layer: int | None = None if numbers else -1
        if _in_stack(name, stack):
            layer = _number(name)
            numbers.add(layer)
            is_matrix = len(shape) > 1
            weights.append(Weight(elements, layer, split=is_matrix, trainable=trainable, matrix=is_matrix))
        else:
            weights.append(Weight(elements, layer, embedding=name in embeddings, trainable=trainable))
    # Without a configuration: the size that most matrices share is the width of the model, the largest that of its MLP.
    sizes = Counter(size for _, shape in inside for size in shape)
    hidden = _first(config, "hidden_size", "n_embd", "d_model", "hidden") or (sizes.most_common(1) or [(1, 0)])[0][0]
    width = _first(config, "intermediate_size", "n_inner", "d_ff", "feed_forward") or max(sizes, default=0)
    first = min(numbers, default=0)
    wide = sum(1 for name, shape in inside if _number(name) == first and width in shape)
    # No matrix shows the heads: 64 is the width that most models give them.
    count = _first(config, "num_attention_heads", "n_head", "num_heads", "heads")
    return ModelShape(
        layers=max(1, len(numbers)),
        hidden=hidden,
        heads=heads or count or max(1, hidden // 64),
        vocabulary=vocabulary or (table[0] if table else 1),
        sequence=sequence or _first(config, *_SEQUENCE_NAMES) or _sequence_of_tables(outside) or 1,
        feed_forward=width,
        tied_embeddings=sum(1 for weight in weights if weight.embedding) < 2,
        learned_positions=False,
        gated=wide > 2,
        source="read from the module",
        weights=tuple(weights),
    )


def _outside(found: list[tuple[str, tuple[int, ...], int, bool]], stack: str | None) -> list[tuple[str, _Sizes, bool]]:
    """Return name, sizes and whether it stands before the layers, of each matrix outside of the layers."""
    outside: list[tuple[str, _Sizes, bool]] = []
    is_before = True
    for name, sizes, _, _ in found:
        if _in_stack(name, stack):
            is_before = False
        elif len(sizes) == 2:
            outside.append((name, sizes, is_before))
    return outside


def _number(name: str) -> int:
    numbered = _NUMBERED.match(name)
    if numbered is None:
        raise AssertionError(f"{name} is in no numbered list")
    return int(numbered[2])


def _in_stack(name: str, stack: str | None) -> bool:
    numbered = _NUMBERED.match(name)
    return bool(numbered and numbered[1] == stack)


def _is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _first(config: Any, *names: str) -> int:
    """Return the first positive integer that ``config`` has under one of these names, else 0."""
    for name in names:
        value = getattr(config, name, None)
        if _is_whole(value) and value > 0:
            return value
    return 0


_ROTARY: dict[str, Any] = {"tied_embeddings": False, "learned_positions": False}
_LLAMA: dict[str, Any] = {**_ROTARY, "gated": True, "biases": False}
_GPT2 = "GPT-2 (Radford et al. 2019)"

#: Published shapes, named by model. Those of 10, 30 and 60 billion parameters stand for the reference points that give
#: only a size; sequence length and vocabulary are those of the reference points.
SHAPES: dict[str, ModelShape] = {
    "gpt2": ModelShape(12, 768, 12, 50_257, 1024, source=_GPT2),
    "gpt2-medium": ModelShape(24, 1024, 16, 50_257, 1024, source=_GPT2),
    "gpt2-large": ModelShape(36, 1280, 20, 50_257, 1024, source=_GPT2),
    "gpt2-xl": ModelShape(48, 1600, 25, 50_257, 1024, source=_GPT2),
    "gpt2-10b": ModelShape(
        50, 4096, 16, 50_000, 512, source="GPT-2-like, 10B of ZeRO-Infinity (Rajbhandari et al. 2021)"
    ),
    "gpt2-30b": ModelShape(
        48, 7168, 64, 50_000, 512, source="GPT-2 30B of the public SageMaker example notebooks: 48 × 7168, 64 heads"
    ),
    "gpt2-60b": ModelShape(75, 8192, 64, 50_000, 512, source="GPT-2-like, 60B of ZeRO (Rajbhandari et al. 2020)"),
    "gptj-6b": ModelShape(28, 4096, 16, 50_400, 2048, source="GPT-J (Wang et al. 2021)", **_ROTARY),
    "gpt-neox-20b": ModelShape(44, 6144, 64, 50_432, 2048, source="GPT-NeoX-20B (Black et al. 2022)", **_ROTARY),
    "gpt-neox-65b": ModelShape(
        80,
        8192,
        64,
        50_432,
        2048,
        source="GPT-NeoX layers in the depth and width of LLaMA-65B (Touvron et al. 2023)",
        **_ROTARY,
    ),
    "llama-7b": ModelShape(
        32, 4096, 32, 32_000, 2048, feed_forward=11_008, source="LLaMA-7B (Touvron et al. 2023)", **_LLAMA
    ),
}
