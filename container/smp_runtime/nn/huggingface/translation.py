"""States of Hugging Face models under the names of the distributed modules, and back again, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class LayerNames:
    """How one layer's parameters are called.

    Attributes:
        names: the distributed layer's name for each of Hugging Face's; several if the original has them in one.
        transposed: those of Hugging Face's that are stored ``[in, out]``.
    """

    names: Mapping[str, str | tuple[str, ...]]
    transposed: frozenset[str] = frozenset()

    def to_ours(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """A parameter under its names here; nothing for what the distributed layer computes itself."""
        target = self.names.get(name)
        if target is None:
            return
        value = value.t().contiguous() if name in self.transposed else value
        if isinstance(target, str):
            yield target, value
            return
        for part_name, part in zip(target, value.chunk(len(target), 0), strict=True):
            yield part_name, part.contiguous()

    def to_theirs(self, layer: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """One layer's parameters under Hugging Face's names, in the original's order."""
        for name, target in self.names.items():
            parts = (target,) if isinstance(target, str) else target
            if not all(part in layer for part in parts):
                continue
            value = layer[parts[0]] if len(parts) == 1 else torch.cat([layer[part] for part in parts], 0)
            yield name, value.t().contiguous() if name in self.transposed else value


@dataclass(frozen=True)
class CausalNames:
    """How a causal language model's parameters are called.

    Attributes:
        root: Hugging Face's name of the model inside the one with the head.
        layers: its list of layers.
        outer: the distributed model's name for each parameter outside the layers, by Hugging Face's in the model inside.
        layer: of each layer.
        head: Hugging Face's name of the head's weight; tied to the word embedding if the distributed model has none.
        head_bias: of its bias.
    """

    root: str
    layers: str
    outer: Mapping[str, str]
    layer: LayerNames
    head: str = "lm_head.weight"
    head_bias: str = "lm_head.bias"
    ours: Mapping[str, str] = field(default_factory=lambda: {"head": "lm_head.weight", "bias": "lm_head.bias"})

    def to_ours(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of the Hugging Face model, of the model inside it, or of one with another head around that."""
        heads = {self.head: self.ours["head"], self.head_bias: self.ours["bias"]}
        root = f"{self.root}."
        others = [name for name in state if not name.startswith(root) and name not in heads]
        rooted = any(name.startswith(root) for name in state)
        # With another head around it the model inside stays where it is.
        kept = root if rooted and others else ""
        result: dict[str, Any] = {}
        for name, value in state.items():
            inner = name.removeprefix(root)
            if name in heads:
                result[heads[name]] = value
            elif match := re.fullmatch(rf"{self.layers}\.(\d+)\.(.+)", inner):
                for own, part in self.layer.to_ours(match[2], value):
                    result[f"{kept}transformer.seq_layers.{match[1]}.{own}"] = part
            elif inner in self.outer:
                result[kept + self.outer[inner]] = value
            elif rooted and not name.startswith(root):
                result[name] = value
        embedding = result.get("word_embedding.weight")
        head = result.get(self.ours["head"])
        if embedding is not None and head is not None and (head is embedding or torch.equal(head, embedding)):
            del result[self.ours["head"]]
        return result

    def to_theirs(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A whole state of the distributed model under Hugging Face's names."""
        nested = f"{self.root}.word_embedding.weight" in state
        inside = f"{self.root}." if nested else ""
        root = f"{self.root}."
        layers: dict[int, dict[str, Any]] = {}
        for name, value in state.items():
            if match := re.fullmatch(rf"{re.escape(inside)}transformer\.seq_layers\.(\d+)\.(.+)", name):
                layers.setdefault(int(match[1]), {})[match[2]] = value
        result: dict[str, Any] = {}
        last: dict[str, Any] = {}
        for name, own in self.outer.items():
            if inside + own in state:
                # What follows the layers in the original does so here.
                (last if own.startswith("layernorm.") else result)[root + name] = state[inside + own]
        for number in sorted(layers):
            for name, value in self.layer.to_theirs(layers[number]):
                result[f"{root}{self.layers}.{number}.{name}"] = value
        result |= last
        if nested:
            result |= {name: value for name, value in state.items() if not name.startswith(inside)}
            return result
        head = state.get(self.ours["head"], state.get("word_embedding.weight"))
        if head is not None:
            result[self.head] = head
        if self.ours["bias"] in state:
            result[self.head_bias] = state[self.ours["bias"]]
        return result


@dataclass(frozen=True)
class EncoderNames:
    """How an encoder's parameters are called, whatever stands around it."""

    layer: LayerNames

    def to_ours(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of a Hugging Face model with such an encoder."""
        result: dict[str, Any] = {}
        for name, value in state.items():
            if match := re.fullmatch(r"(.*\bencoder\.|)layer\.(\d+)\.(.+)", name):
                for own, part in self.layer.to_ours(match[3], value):
                    result[f"{match[1]}seq_layers.{match[2]}.{own}"] = part
            else:
                result[name] = value
        return result

    def to_theirs(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A whole state of the model with the distributed encoder."""
        layers: dict[tuple[str, int], dict[str, Any]] = {}
        for name, value in state.items():
            if match := re.fullmatch(r"(.*\bencoder\.|)seq_layers\.(\d+)\.(.+)", name):
                layers.setdefault((match[1], int(match[2])), {})[match[3]] = value
        result: dict[str, Any] = {}
        for name, value in state.items():
            match = re.fullmatch(r"(.*\bencoder\.|)seq_layers\.(\d+)\..+", name)
            if match is None:
                result[name] = value
                continue
            for (prefix, number), layer in layers.items():
                for theirs, part in self.layer.to_theirs(layer):
                    result[f"{prefix}layer.{number}.{theirs}"] = part
            layers = {}
        return result


class Names(Protocol):
    """Names of one kind of model, both ways."""

    def to_ours(self, state: Mapping[str, Any]) -> dict[str, Any]: ...

    def to_theirs(self, state: Mapping[str, Any]) -> dict[str, Any]: ...


class Translator(Protocol):
    """``translate(state_dict, max_seq_len=None)``; ``max_seq_len`` is accepted."""

    def __call__(self, state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]: ...


def translators(names: Names, model: str) -> tuple[Translator, Translator]:
    """The public functions of a model: from its states to ours for ``model.load_state_dict``, and back."""

    def from_hf(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        return names.to_ours(state_dict)

    def to_hf(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        return names.to_theirs(state_dict)

    from_hf.__doc__ = f"A state of {model} for ``model.load_state_dict``; ``max_seq_len`` is accepted."
    to_hf.__doc__ = f"A full ``model.state_dict()`` for {model}; ``max_seq_len`` is accepted."
    return from_hf, to_hf
