"""Matrices that tensor parallelism has divided into several parameters, or laid out another way, when it replaced a module."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from smp_runtime.optim.matrices.regions import Join
from smp_runtime.parameters.registry import UNKNOWN_ORIGIN

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.parameters.registry import MatrixOrigin, ParameterRecord

logger = logging.getLogger("smp")


def name_in(name: str, number: int) -> str:
    """Return a name of a parameter or matrix that is unique among several models; ``number`` is its model's."""
    return f"{number}:{name}" if number else name


def joins_and_rates(
    records: Sequence[ParameterRecord], models: Mapping[int, int], said: set[str] | None
) -> tuple[dict[nn.Parameter, Join], dict[nn.Parameter, tuple[int, int]]]:
    """Return which parameters are parts of matrices, and the shapes that matrices had before tensor parallelism.

    Parameters are joined if they are a whole matrix of the replaced module together. Otherwise each is a matrix of its own, which
    one line logs: its update differs from that of one process.

    Args:
        records: of a group's parameters with matrices.
        models: numbers of the models, the same on all ranks, by those of the records.
        said: names of parameters that were logged; it gets more. None for no log.
    """
    parts: dict[str, list[ParameterRecord]] = {}
    rated: dict[nn.Parameter, tuple[int, int]] = {}
    joins: dict[nn.Parameter, Join] = {}
    alone: list[ParameterRecord] = []
    for record in records:
        origin = record.origin
        if origin is None:
            continue
        if origin == UNKNOWN_ORIGIN:
            alone.append(record)
        elif math.prod(record.shape) == math.prod(origin.shape):
            rated[record.parameter] = origin.shape
        else:
            parts.setdefault(name_in(origin.name, models[record.model]), []).append(record)
    for name, found in parts.items():
        made = _joined(name, found)
        joins |= made
        rated |= {each.parameter: each.origin.shape for each in found if made and each.origin is not None}
        alone += [each for each in found if not made]
    if said is not None:
        _say([name_in(each.name, models[each.model]) for each in alone if each.parameter.requires_grad], said)
    return joins, rated


def _joined(name: str, found: Sequence[ParameterRecord]) -> dict[nn.Parameter, Join]:
    """Return the joins of a matrix's parts; none if they are not all of it, are cut in different ways, or one is frozen."""
    origins = [each.origin for each in found if each.origin is not None]
    first = origins[0]
    if any(origin.transposed != first.transposed for origin in origins):
        return {}
    if not all(each.parameter.requires_grad for each in found):
        return {}
    shape = first.shape[::-1] if first.transposed else first.shape
    split_axes = {each.placement.tensor_axis for each in found}
    for axis in (0, 1):
        may_follow = split_axes in ({None}, {axis})
        if not may_follow or not _are_in_line(found, origins, shape, axis):
            continue
        joins = {}
        for record, origin in zip(found, origins, strict=True):
            joins[record.parameter] = Join(name, shape, axis, origin.start[axis])
        return joins
    return {}


def _are_in_line(
    found: Sequence[ParameterRecord], origins: Sequence[MatrixOrigin], shape: tuple[int, int], axis: int
) -> bool:
    """Return whether parameters follow each other along an axis and are all of a matrix."""
    at = 0
    for record, origin in sorted(zip(found, origins, strict=True), key=lambda pair: pair[1].start):
        if record.shape[1 - axis] != shape[1 - axis] or origin.start[axis] != at:
            return False
        at += record.shape[axis]
    return at == shape[axis]


def _say(alone: Sequence[str], said: set[str]) -> None:
    new = [name for name in alone if name not in said]
    if not new:
        return
    said.update(new)
    more = f" and {len(new) - 3} more" if len(new) > 3 else ""
    logger.warning(
        "Muon updates %s%s as matrices of their own, which they were not in the modules that tensor parallelism has replaced: "
        "parts of a matrix are frozen or in other groups, or it is not known of what they are parts, since there is no state_hook, "
        "or one that copies. Training differs from that of one process",
        ", ".join(new[:3]),
        more,
    )
