"""Choice of the embeddings and heads to split over the vocabulary, in a model with blocks split in place."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from smp_runtime.module_conversion.candidates import is_patched
from smp_runtime.module_conversion.in_place.blocks import parameter_uses
from smp_runtime.module_conversion.in_place.capture import BATCH, calls_by_themselves
from smp_runtime.module_conversion.registration import registration_of
from smp_runtime.module_conversion.scopes import mark_of
from smp_runtime.nn.embedding import DistributedEmbedding
from smp_runtime.nn.linear import DistributedLinear
from smp_runtime.nn.split_in_place.vocabulary import Tie, is_vocabulary

if TYPE_CHECKING:
    from smp_runtime.module_conversion.splitting import BlockSplit
    from smp_runtime.tensor_parallel.group import TensorGroup

logger = logging.getLogger("smp")


def vocabulary_ties(model: nn.Module, blocks: Mapping[int, BlockSplit], group: TensorGroup) -> dict[int, Tie]:
    """Return the tie of each embedding and head to split over the vocabulary, by its ``id``.

    All ranks of the group call it.

    Args:
        blocks: by ``id`` those that are split in place; without any, a model keeps its embeddings.
    """
    if not blocks or is_patched(model):
        return {}
    # One rank decides: a trial run may fail on one rank only, and all must split the same modules.
    mine = _chosen(model, blocks, group) if group.rank == 0 else None
    found: dict[int, Tie] = {}
    for paths in group.agree(mine):
        tie = Tie()
        found |= {id(model.get_submodule(path)): tie for path in paths}
        if group.ranks.rank == 0:
            logger.info("%s: split over %d ranks by rows of the vocabulary", " = ".join(paths), group.size)
    return found


def _chosen(model: nn.Module, blocks: Mapping[int, BlockSplit], group: TensorGroup) -> list[list[str]]:
    groups = list(_groups(model, blocks))
    if not groups:
        return []
    try:
        calls = calls_by_themselves(model, [path for paths in groups for path in paths])
    except Exception:  # the other ranks wait for a decision; whole embeddings are right
        return []

    def is_right(path: str) -> bool:
        if path not in calls:
            return False
        if group.prescaled:
            return all(calls[path])
        batches = {shape[:1] for shape in calls[path]}
        return batches <= {(BATCH,)}

    return [paths for paths in groups if all(map(is_right, paths))]


def _groups(model: nn.Module, blocks: Mapping[int, BlockSplit]) -> Iterator[list[str]]:
    """Yield groups of paths: embeddings and heads of one weight that no other module has."""
    parts = _parts_outside(model, blocks)
    uses = parameter_uses(model)
    for weight, paths in _vocabularies(model, parts).items():
        same = {id(parts[path]) for path in paths}
        named = sum(id(part) in same for _, part in model.named_modules(remove_duplicate=False))
        is_used_elsewhere = uses[weight] != named
        if not is_used_elsewhere:
            yield paths


def _vocabularies(model: nn.Module, parts: Mapping[str, Any]) -> dict[int, list[str]]:
    """Return the paths of embeddings and heads over tokens, by the id of their weight.

    Other embeddings, such as those of positions, are neither a model's input embeddings nor as long as its head.
    """
    embedded = {_rows(part) for part in parts.values() if isinstance(part, nn.Embedding)}
    returned = {_rows(part) for part in parts.values() if isinstance(part, nn.Linear)}
    inputs = {id(_input_embeddings(part)) for part in model.modules()}
    found: dict[int, list[str]] = {}
    in_both = embedded & returned
    for path, part in parts.items():
        rows = _rows(part)
        is_input = id(part) in inputs
        if is_input or rows in in_both:
            found.setdefault(id(part.weight), []).append(path)
    return found


def _rows(part: Any) -> int:
    return part.num_embeddings if isinstance(part, nn.Embedding) else part.out_features


def _parts_outside(model: nn.Module, blocks: Mapping[int, BlockSplit]) -> dict[str, Any]:
    """Return the embeddings and heads that a script wants to be split, by their paths; those in blocks are left out."""
    inside: set[int] = set()
    for block in model.modules():
        if id(block) in blocks:
            inside.update(map(id, block.modules()))
    found: dict[str, Any] = {}
    for path, part in model.named_modules():
        is_outside = id(part) not in inside
        if is_outside and _is_wanted(part):
            found[path] = part
    return found


def _is_wanted(module: nn.Module) -> bool:
    mark, how = mark_of(module), registration_of(module)
    wanted = mark.enabled and mark.plan is None and mark.overrides.get("distribute_embedding", True)
    known = how is None or how.dist_module in (DistributedLinear, DistributedEmbedding)
    return bool(wanted) and known and is_vocabulary(module)


def _input_embeddings(module: nn.Module) -> nn.Module | None:
    """Return the input embeddings of a model of Transformers, or None."""
    with contextlib.suppress(Exception):
        return module.get_input_embeddings()  # type: ignore[operator]
    return None
