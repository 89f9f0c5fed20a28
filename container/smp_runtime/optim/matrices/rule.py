"""Which parameters of a model are hidden matrices, for which Muon is meant, and which are tables, heads and vectors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.parameters.registry import ParameterRegistry

#: Last names of modules that turn hidden states into logits.
_HEADS = {"classifier", "embed_out", "head", "lm_head", "output_layer", "score", "unembed"}
#: Classes with weights that are no matrices, though they may have two or three dimensions.
_OTHER_MODULES = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

#: The places of each parameter: the path to it, its module and itself, by ``id``.
_Places = dict[int, list[tuple[str, nn.Module, nn.Parameter]]]


def hidden_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Divide a model's parameters into hidden matrices and all others, in their order.

    Matrices have two dimensions, or three: a stack of matrices, such as a mixture's experts. No matrices are what embeddings
    have, also tied to a head; convolutions; output heads: what ``get_output_embeddings()`` returns, modules that are called like
    one, and, outside of repeated blocks, those with a row for each row of the largest table; and what is one row or column.
    """
    _refuse_flat(model)
    places = _places(model)
    shapes = _whole_shapes(model, places)
    vocabulary = _longest_table(places, shapes)
    named_heads = _output_embeddings(model)
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in dict.fromkeys(model.parameters()):
        shape = shapes.get(id(parameter), tuple(parameter.shape))
        is_matrix = len(shape) in (2, 3) and min(shape[-2:]) > 1 and not parameter.is_complex()
        # A tied parameter has several places. It is a table or a head if it is one in any of them.
        for path, module, _ in places.get(id(parameter), ()):
            if id(module) in named_heads or _is_table(path, module) or _is_head(path, shape, vocabulary):
                is_matrix = False
        (matrices if is_matrix else others).append(parameter)
    return matrices, others


def _refuse_flat(model: nn.Module) -> None:
    module = sys.modules.get("torch.distributed.fsdp")  # nothing is wrapped before it is imported
    kind = getattr(module, "FullyShardedDataParallel", None)
    if kind is not None and any(isinstance(part, kind) for part in model.modules()):
        raise SMPUserError(
            "the model has FullyShardedDataParallel inside, which makes vectors of its parameters, so that Muon finds no matrix; "
            "use fully_shard, or smp.DistributedModel with sharded_data_parallel_degree",
            code="SMP304",
        )


def _places(model: nn.Module) -> _Places:
    """Return the places of each parameter: the path to it, its module and itself, by ``id``."""
    places: _Places = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((f"{path}.{name}", module, parameter))
    return places


def _whole_shapes(model: nn.Module, places: _Places) -> dict[int, tuple[int, ...]]:
    """Return the shapes of parameters, by ``id``; of split or sharded ones, the shapes of the whole tensors."""
    registry = getattr(model, "registry", None)
    shapes: dict[int, tuple[int, ...]] = {}
    for found in places.values():
        for _, _, parameter in found:
            shape: Sequence[int] = parameter.shape
            if isinstance(registry, ParameterRegistry):
                shape = registry.record_of(parameter).shape
            shapes[id(parameter)] = tuple(shape)
    return shapes


def _longest_table(places: _Places, shapes: Mapping[int, tuple[int, ...]]) -> int:
    """Return the rows of the largest table of embeddings, which an output head has too; 0 without one."""
    longest = 0
    for key, found in places.items():
        is_table = any(_is_table(path, module) for path, module, _ in found)
        if is_table and len(shapes[key]) == 2:
            longest = max(longest, shapes[key][0])
    return longest


def _is_table(path: str, module: nn.Module) -> bool:
    if isinstance(module, _OTHER_MODULES) or "embedding" in type(module).__name__.lower():
        return True
    # Such as the positions of a vision model, or adapters of tables, which PEFT keeps in a dictionary by their names.
    is_collection = isinstance(module, nn.ParameterDict | nn.ParameterList)
    names = path.lower().split(".")
    own_names = names[-2:] if is_collection else names[-1:]
    return any("embed" in name for name in own_names)


def _is_head(path: str, shape: tuple[int, ...], vocabulary: int) -> bool:
    *names, _ = path.split(".")
    if any(name.isdigit() for name in names):  # in a repeated block
        return False
    if names and names[-1] in _HEADS:
        return True
    return len(shape) == 2 and bool(vocabulary) and shape[0] == vocabulary


def _output_embeddings(model: nn.Module) -> set[int]:
    """Return the modules that models of Transformers call their output embeddings, by ``id``."""
    return {id(head) for head in _asked(model) if isinstance(head, nn.Module)}


def _asked(model: nn.Module) -> Iterator[Any]:
    for part in model.modules():
        ask = getattr(part, "get_output_embeddings", None)
        if not callable(ask):
            continue
        try:
            yield ask()
        except (AttributeError, NotImplementedError):  # of a model without a head
            continue
