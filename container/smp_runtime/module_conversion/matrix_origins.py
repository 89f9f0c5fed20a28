"""What the matrices of distributed modules were in the modules that they replace, for optimizers that look at whole matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from smp_runtime.module_conversion.carry_over_attributes import translated_places
from smp_runtime.module_conversion.parameter_layout import slices_by_name
from smp_runtime.parameters.registry import UNKNOWN_ORIGIN, MatrixOrigin
from smp_runtime.tensors.torch_private import storage_key

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.module_manager import Translate


def find_origins(original: nn.Module, made: nn.Module, to_ours: Translate | None) -> dict[str, MatrixOrigin]:
    """Return what the matrices of ``made`` were in ``original``, by name, where they are not the same.

    A translation that returns views shows it; what one has copied is unknown.

    Args:
        to_ours: how parameters are renamed and laid out; None if they keep their names.
    """
    parameters = dict(original.named_parameters())
    state = {name: torch.empty(each.shape, device="meta") for name, each in parameters.items()}
    places = translated_places(state, to_ours)
    sources = {storage_key(value): (name, value) for name, value in state.items()}
    slices = slices_by_name(made)
    found: dict[str, MatrixOrigin] = {}
    for name, parameter in made.named_parameters():
        shape = slices[name].shape if name in slices else tuple(parameter.shape)
        if len(shape) < 2:
            continue
        value = places.get(name)
        origin: MatrixOrigin | None = UNKNOWN_ORIGIN
        if value is not None and tuple(value.shape) == shape and storage_key(value) in sources:
            origin = _place_in(value, *sources[storage_key(value)])
        if origin is not None:
            found[name] = origin
    return found


def _place_in(value: torch.Tensor, name: str, source: torch.Tensor) -> MatrixOrigin | None:
    """Return the place of a view in the tensor that it was made of; None if it is all of it."""
    if value.shape == source.shape and value.stride() == source.stride():
        return None
    if value.dim() != 2 or source.dim() != 2:
        return UNKNOWN_ORIGIN
    rows, columns = source.shape
    first_row, first_column = divmod(int(value.storage_offset()), columns)
    for transposed in (False, True):
        block = value.t() if transposed else value
        is_inside = first_row + block.shape[0] <= rows and first_column + block.shape[1] <= columns
        if block.stride() == (columns, 1) and is_inside:
            start = (first_column, first_row) if transposed else (first_row, first_column)
            return MatrixOrigin(name, (rows, columns), transposed, start)
    return UNKNOWN_ORIGIN
