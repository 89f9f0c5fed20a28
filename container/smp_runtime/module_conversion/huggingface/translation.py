"""States of Hugging Face models under the names of the distributed modules, and back again, bit for bit."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from smp_runtime.job import session as sessions

#: Causal masks and frequencies that older versions of Transformers saved and the distributed layers compute.
_COMPUTED = re.compile(r"(^|\.)(attn|attn\.attention|attention|self_attn)\.(masked_)?bias$|(^|\.)rotary_emb\.inv_freq$")


def transformers_major() -> int:
    """Return the major version of the installed Transformers; 0 if there is none."""
    try:
        return int(importlib.metadata.version("transformers").partition(".")[0])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return 0


def parameter_names(modules: Mapping[str, str | tuple[str, ...]], *kinds: Literal["weight", "bias"]) -> dict[str, Any]:
    """Return names of parameters from those of their modules: of weight and bias, if no ``kinds`` are passed."""
    names: dict[str, Any] = {}
    wanted = kinds or ("weight", "bias")
    for theirs, ours in modules.items():
        for kind in wanted:
            if isinstance(ours, str):
                names[f"{theirs}.{kind}"] = f"{ours}.{kind}"
            else:  # joined from several
                names[f"{theirs}.{kind}"] = tuple(f"{part}.{kind}" for part in ours)
    return names


def _parts_of(target: str | tuple[str, ...]) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else target


@dataclass(frozen=True)
class LayerNames:
    """The names of one layer's parameters.

    Attributes:
        names: the distributed layer's name for each of Hugging Face's; several if the original has them in one.
        transposed: those of Hugging Face's that are stored ``[in, out]``.
    """

    names: Mapping[str, str | tuple[str, ...]]
    transposed: frozenset[str] = frozenset()

    def to_ours(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield a parameter of :attr:`names` under its names here, as views of it."""
        target = self.names[name]
        value = value.t() if name in self.transposed else value
        if isinstance(target, str):
            yield target, value
        else:
            yield from zip(target, value.chunk(len(target), 0), strict=True)

    def to_theirs(self, layer: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield one layer's parameters under Hugging Face's names, in the original's order."""
        for name, target in self.names.items():
            parts = _parts_of(target)
            is_complete = all(part in layer for part in parts)
            if not is_complete:
                continue
            value = layer[parts[0]]
            if len(parts) > 1:
                value = torch.cat([layer[part] for part in parts], 0)
            if name in self.transposed:
                value = value.t().contiguous()
            yield name, value

    def own_names(self, layer: Mapping[str, Any]) -> set[str]:
        """Return the names in a distributed layer's state that :meth:`to_theirs` translates."""
        own: set[str] = set()
        for target in self.names.values():
            parts = _parts_of(target)
            if all(name in layer for name in parts):
                own.update(parts)
        return own


@dataclass(frozen=True)
class CausalNames:
    """The names of a causal language model's parameters.

    The model may be a part of another; everything around it keeps its names.

    Attributes:
        root: Hugging Face's name of the model inside the one with the head.
        outer: the distributed model's name for each parameter outside the layers, by Hugging Face's in the model
            inside.
        head: Hugging Face's name of the head's weight; tied to the word embedding if the distributed model has none.
        head_bias: of its bias.
        other_head: name of the head's module in states of other versions of Transformers.
    """

    root: str
    layers: str
    outer: Mapping[str, str]
    layer: LayerNames
    head: str = "lm_head.weight"
    head_bias: str = "lm_head.bias"
    other_head: str | None = None
    ours: Mapping[str, str] = field(default_factory=lambda: {"head": "lm_head.weight", "bias": "lm_head.bias"})

    # -- from Hugging Face ---------------------------------------------------------------------------------------------

    def to_ours(self, state: Mapping[str, Any], heads: Mapping[str, bool] | None = None) -> dict[str, Any]:
        """Translate a state of the Hugging Face model, of its inner model, or of one that contains either.

        Args:
            state: by Hugging Face's names.
            heads: of distributed models that are known, see :meth:`to_theirs`.
        """
        if self.other_head is not None:
            pattern, here = re.compile(rf"(^|\.){self.other_head}\.(weight|bias)$"), self.head.removesuffix(".weight")
            state = {pattern.sub(rf"\1{here}.\2", name): value for name, value in state.items()}
        result = dict(state)
        for place in self._places_of_theirs(state):
            root, kept = self._levels(place, state, heads or {})
            result = _replaced(result, kept, self._one_to_ours(_below(result, kept), root))
        return result

    def headless_to_ours(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a state if the inner models are distributed, but the models with a head around them are not."""
        return self.to_ours(state, dict.fromkeys(self._places_of_theirs(state), False))

    def _places_of_theirs(self, state: Mapping[str, Any]) -> list[str]:
        """Return the prefix of each list of layers; the names inside show if the layers are of this kind."""
        pattern = re.compile(rf"(|.*\.){self.layers}\.\d+\.(.+)")
        places: dict[str, None] = {}
        for name in state:
            match = pattern.fullmatch(name)
            if match and match[2] in self.layer.names:
                places[match[1]] = None
        return list(places)

    def _levels(self, place: str, state: Mapping[str, Any], heads: Mapping[str, bool]) -> tuple[str, str]:
        """Return the root inside the distributed model, or an empty text, and the prefix before it."""
        root = f"{self.root}."
        is_inside_root = place == root or place.endswith(f".{root}")
        if not is_inside_root:
            return "", place
        around = place.removesuffix(root)
        if around in heads:
            return root, around
        if place in heads:
            return "", place
        beside = {name for name in _below(state, around) if not name.startswith(root)}
        # If another head is around it, the inner model keeps its place.
        has_other_head = not beside <= {self.head, self.head_bias}
        return ("", place) if has_other_head else (root, around)

    def _one_to_ours(self, state: Mapping[str, Any], root: str) -> dict[str, Any]:
        heads = {self.head: self.ours["head"], self.head_bias: self.ours["bias"]}
        layer = re.compile(rf"{re.escape(root + self.layers)}\.(\d+)\.(.+)")
        outer = {root + name: own for name, own in self.outer.items()}
        result: dict[str, Any] = {}
        for name, value in state.items():
            if name in heads:
                result[heads[name]] = value
            elif name in outer:
                result[outer[name]] = value
            elif (match := layer.fullmatch(name)) and match[2] in self.layer.names:
                for own, part in self.layer.to_ours(match[2], value):
                    result[f"transformer.seq_layers.{match[1]}.{own}"] = part
            elif not _COMPUTED.search(name):
                result[name] = value
        embedding = result.get("word_embedding.weight")
        head = result.get(self.ours["head"])
        if embedding is None or head is None:
            return result
        if head is embedding or torch.equal(head, embedding):
            del result[self.ours["head"]]
        return result

    # -- to Hugging Face -----------------------------------------------------------------------------------------------

    def to_theirs(self, state: Mapping[str, Any], heads: Mapping[str, bool] | None = None) -> dict[str, Any]:
        """Translate a whole state to Hugging Face's names, of a distributed model or one that contains such models.

        Args:
            state: by the names of the wrapped model.
            heads: the prefix of each distributed model, and whether it is one with a head. Without it, a model at its
                original's place in a model with another head counts as one without.
        """
        if heads is None:
            heads = {place: self._seems_to_have_a_head(place, state) for place in self._places(state)}
        result = dict(state)
        for place, has_head in heads.items():
            result = _replaced(result, place, self._one_to_theirs(_below(result, place), has_head))
        return result

    def headless_to_theirs(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a whole state to Hugging Face's names, if no distributed model in it has a head."""
        return self.to_theirs(state, dict.fromkeys(self._places(state), False))

    @staticmethod
    def _places(state: Mapping[str, Any]) -> list[str]:
        """Return the prefix of each distributed model."""
        pattern = re.compile(r"(|.*\.)transformer\.seq_layers\.\d+\..+")
        matches = filter(None, map(pattern.fullmatch, state))
        return list(dict.fromkeys(match[1] for match in matches))

    def part_to_theirs(self, part: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """Translate the whole state of one distributed model, ``part``."""
        return self.to_theirs(state, {"": part.add_lm_head})

    def _seems_to_have_a_head(self, place: str, state: Mapping[str, Any]) -> bool:
        is_root = place == f"{self.root}." or place.endswith(f".{self.root}.")
        if not is_root:
            return True
        head = place + self.ours["head"]
        bias = place + self.ours["bias"]
        return head in state or bias in state

    def _one_to_theirs(self, state: Mapping[str, Any], has_head: bool) -> dict[str, Any]:
        root = f"{self.root}." if has_head else ""
        layers: dict[int, dict[str, Any]] = {}
        rest = dict(state)
        for name in state:
            if match := re.fullmatch(r"transformer\.seq_layers\.(\d+)\.(.+)", name):
                layers.setdefault(int(match[1]), {})[match[2]] = rest.pop(name)
        embedding = state.get("word_embedding.weight")
        result: dict[str, Any] = {}
        last: dict[str, Any] = {}
        for name, own in self.outer.items():
            if own in rest:
                # What follows the layers in the original does so here.
                (last if own.startswith("layernorm.") else result)[root + name] = rest.pop(own)
        for number in sorted(layers):
            result |= {f"{root}{self.layers}.{number}.{n}": v for n, v in self.layer.to_theirs(layers[number])}
            own_names = self.layer.own_names(layers[number])
            result |= {
                f"transformer.seq_layers.{number}.{n}": v for n, v in layers[number].items() if n not in own_names
            }
        result |= last
        if has_head:
            head = rest.pop(self.ours["head"], embedding)
            if head is not None:
                result[self.head] = head
            if self.ours["bias"] in rest:
                result[self.head_bias] = rest.pop(self.ours["bias"])
        return result | rest


@dataclass(frozen=True)
class EncoderNames:
    """The names of an encoder's parameters, whatever module contains it."""

    layer: LayerNames

    def to_ours(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a state of a Hugging Face model with such an encoder."""
        result: dict[str, Any] = {}
        for name, value in state.items():
            match = re.fullmatch(r"(|.*\.)layer\.(\d+)\.(.+)", name)
            if match and match[3] in self.layer.names:
                for own, part in self.layer.to_ours(match[3], value):
                    result[f"{match[1]}seq_layers.{match[2]}.{own}"] = part
            else:
                result[name] = value
        return result

    def to_theirs(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a whole state of the model with the distributed encoder."""
        pattern = re.compile(r"(|(?:.*\.)?(?!transformer\.)[^.]+\.)seq_layers\.(\d+)\.(.+)")
        layers: dict[tuple[str, str], dict[str, Any]] = {}
        for name, value in state.items():
            if match := pattern.fullmatch(name):
                layers.setdefault((match[1], match[2]), {})[match[3]] = value
        result: dict[str, Any] = {}
        done: set[tuple[str, str]] = set()
        for name, value in state.items():
            match = pattern.fullmatch(name)
            if match is None or match[3] not in self.layer.own_names(layers[match[1], match[2]]):
                result[name] = value
            elif (place := (match[1], match[2])) not in done:
                done.add(place)
                translated = self.layer.to_theirs(layers[place])
                result |= {f"{match[1]}layer.{match[2]}.{theirs}": part for theirs, part in translated}
        return result

    def part_to_theirs(self, part: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """Translate the whole state of one distributed encoder."""
        return self.to_theirs(state)


@dataclass(frozen=True)
class BlockNames:
    """The names of parameters of layers that stay in their original's list, each distributed on its own.

    Attributes:
        layers: the list's name.
    """

    layers: str
    layer: LayerNames

    def _split(self, name: str) -> tuple[str, str]:
        """Return the prefix of a layer's name and the name inside the layer; a single layer's state has no prefix."""
        match = re.fullmatch(rf"((?:.*\.)?{self.layers}\.\d+\.|)(.+)", name)
        return (match[1], match[2]) if match else ("", name)

    def to_ours(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a state of the Hugging Face model, or of one layer."""
        result: dict[str, Any] = {}
        for name, value in state.items():
            place, theirs = self._split(name)
            if theirs in self.layer.names:
                result |= {place + own: part for own, part in self.layer.to_ours(theirs, value)}
            elif not _COMPUTED.search(name):
                result[name] = value
        return result

    def to_theirs(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a whole state of the model with distributed layers, or of one of them."""
        layers: dict[str, dict[str, Any]] = {}
        for name, value in state.items():
            place, ours = self._split(name)
            layers.setdefault(place, {})[ours] = value
        result: dict[str, Any] = {}
        done: set[str] = set()
        for name, value in state.items():
            place, ours = self._split(name)
            if ours not in self.layer.own_names(layers[place]):
                result[name] = value
            elif place not in done:
                done.add(place)
                result |= {place + theirs: part for theirs, part in self.layer.to_theirs(layers[place])}
        return result


def _below(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries with the prefix, without the prefix."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _replaced(state: Mapping[str, Any], prefix: str, below: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with all entries under ``prefix`` replaced, at the position of the first of them."""
    result: dict[str, Any] = {}
    for name, value in state.items():
        if not name.startswith(prefix):
            result[name] = value
        elif below:
            result |= {prefix + inner: part for inner, part in below.items()}
            below = {}
    return result


class Translator(Protocol):
    """A function ``translate(state_dict, max_seq_len=None)``; ``max_seq_len`` is accepted."""

    def __call__(self, state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        """Return the state under the other names."""


def translators(names: CausalNames | EncoderNames | BlockNames, model: str) -> tuple[Translator, Translator]:
    """Return the public functions of a model: from its states to ours for ``model.load_state_dict``, and back.

    Names that they do not know stay. A state alone does not distinguish a model with a tied head from its inner
    model. If the state's names are those of a wrapped model of this process, that model decides.
    """

    def from_hf(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        heads = (_wrapped_heads(names),) if isinstance(names, CausalNames) else ()
        ours = names.to_ours(state_dict, *heads)
        return {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in ours.items()}

    def to_hf(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        if not isinstance(names, CausalNames):
            return names.to_theirs(state_dict)
        known = {}
        for place, head in _wrapped_heads(names).items():
            is_there = f"{place}word_embedding.weight" in state_dict
            if is_there:
                known[place] = head
        return names.to_theirs(state_dict, known or None)

    from_hf.__doc__ = f"A state of {model} for ``model.load_state_dict``; ``max_seq_len`` is accepted."
    to_hf.__doc__ = f"A full ``model.state_dict()`` for {model}; ``max_seq_len`` is accepted."
    return from_hf, to_hf


def _wrapped_heads(names: CausalNames) -> dict[str, bool]:
    """Return the places of distributed models of this kind in wrapped models, and whether they have a head."""
    if not sessions.is_initialized():
        return {}
    found: dict[str, set[bool]] = {}
    for model in sessions.current_session().models:
        for path, part in model.module.named_modules(remove_duplicate=False):
            if getattr(part, "state_names", None) is names:
                place = f"{path}.".lstrip(".")
                found.setdefault(place, set()).add(bool(part.add_lm_head))
    # If models differ in it, the place decides nothing.
    return {place: heads.pop() for place, heads in found.items() if len(heads) == 1}
