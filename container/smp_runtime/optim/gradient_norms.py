"""Norms of gradients and parameters that are spread over several ranks; every element counts once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from smp_config import Group
from smp_runtime.comm.flag_all_reduce import to_device
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.torch_private import norms_of, values_of

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.trained import TrainedModel
    from smp_runtime.optim.whole_state import Records
    from smp_runtime.parameters.optimizer_shards import OptimizerShard


def scale_down(gradients: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> torch.Tensor | None:
    """Scale gradients of a norm down to ``max_norm``, as PyTorch does; returns the factor, or None if they stay as they are.

    The host does not wait for a device's norm: on a device all gradients are multiplied, by 1 if the norm is small enough.
    """
    # PyTorch's constant, so that clipped gradients equal those of one process.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if factor.device.type == "cpu" and factor >= 1.0:
        return None
    multiply(gradients, factor)  # also when the norm is not a number
    return factor


def clamp(gradients: Sequence[torch.Tensor], limit: float) -> None:
    """Bring every element between ``-limit`` and ``limit``, as PyTorch does, by few operations for each type."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    for alike in by_type.values():
        torch._foreach_clamp_min_(alike, -limit)
        torch._foreach_clamp_max_(alike, limit)


#: Elements that are widened at once.
_WIDENED = 1 << 24


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a complex tensor with its real and imaginary parts, ``[…, 2]``, or any other tensor as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def elements_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a gradient that may be changed in place: of a sparse one its values, of a complex one both parts."""
    return as_real(values_of(gradient) if gradient.is_sparse else gradient)


def multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors in place by a number, of any type, by one operation for each of their types."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in map(elements_of, tensors):
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in by_type.items():
        if factor.device.type == "cpu":
            torch._foreach_mul_(alike, float(factor))
        elif dtype.itemsize >= torch.float32.itemsize:
            torch._foreach_mul_(alike, factor.to(dtype))
        else:  # in half precision the factor itself would be rounded
            for some in _chunks(alike):
                wide = [torch.empty_like(tensor, dtype=torch.float32) for tensor in some]
                torch._foreach_copy_(wide, some)
                torch._foreach_mul_(wide, factor.float())
                torch._foreach_copy_(some, wide)


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield several tensors at a time, so that copies of them do not take memory for all."""
    chunk: list[torch.Tensor] = []
    elements = 0
    for tensor in tensors:
        if chunk and elements + tensor.numel() > _WIDENED:
            yield chunk
            chunk, elements = [], 0
        chunk.append(tensor)
        elements += tensor.numel()
    if chunk:
        yield chunk


class WholeNorms:
    """Norms of whole tensors, computed with the ranks that have the other parts of an optimizer's tensors.

    Tensor parallel ranks have parts of split parameters and the same of all others. Ranks of a sharding group have other
    parts of most parameters. Stages have other parameters. All ranks of these groups call every method together.

    Args:
        model: the model with the optimizer shards to update; None if the parameters themselves are updated and no
            stage has others.
        optimizer_shards: of the model; updated here instead of its parameters; may grow.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: TrainedModel | None,
        optimizer_shards: Sequence[OptimizerShard],
        records: Callable[[], Records],
    ) -> None:
        self._ranks = ranks
        self._records = records
        self._model = model
        self._optimizer_shards = optimizer_shards
        state = model.sharded_state if model is not None else None
        self._sharing: Group | None = None if state is None else state.sharing

    def split_parameters(self) -> set[int]:
        """Return the parameters that tensor parallel ranks have different parts of, by ``id``."""
        if self._ranks.size(Group.TP) == 1:
            return set()
        return {id(p) for p, record in self._records().items() if record.placement.tensor_axis is not None}

    @torch.no_grad()
    def total(
        self,
        gradients: Sequence[tuple[nn.Parameter, torch.Tensor]],
        split_ids: set[int],
        norm_type: float,
        *,
        all_stages: bool = True,
    ) -> torch.Tensor:
        """Return the norm of the whole gradient, a float64 scalar tensor on this rank's device.

        Args:
            gradients: pairs of a parameter of the model and this rank's gradient of it or of its shard.
            split_ids: of this optimizer's parameters, the :meth:`split_parameters`; empty on all ranks or on none.
            norm_type: ``p`` of the p-norm, above 0; infinity for the greatest absolute value.
            all_stages: False measures only this stage's gradients, and only its ranks call it.

        Raises:
            SMPUserError: ``norm_type`` is 0, negative or not a number.
        """
        p = float(norm_type)
        if not p > 0:
            raise SMPUserError(
                f"norm_type is {norm_type}; gradients on several ranks are measured by the p-norm, the p-th root of a sum of p-th "
                "powers: use a number above 0 such as 2.0, or float('inf') for the greatest element",
                code="SMP304",
            )
        device = self._ranks.device
        # In each sum, so that a rank without such gradients takes part with 0. In float64, since sums of many lose digits.
        zero = torch.zeros(1, device=device, dtype=torch.float64)
        # A parameter that the sharding does not know is whole on all of its ranks.
        shared_out = None
        if self._model is not None and self._sharing is not None:
            shared_out = self._model.optimizer_shards or {}
        kinds: dict[str, list[torch.Tensor]] = {"whole": [], "split": [], "alone": []}
        for parameter, gradient in gradients:
            kind = "split" if id(parameter) in split_ids else "whole"
            if shared_out is not None and parameter not in shared_out:
                kind = "alone"
            kinds[kind].append(gradient.coalesce().values() if gradient.is_sparse else gradient)
        norms = [torch.cat([zero, *_norms(tensors, p, device)]) for tensors in kinds.values()]
        if math.isinf(p):
            greatest = torch.cat(norms).amax().view(1)
            for group in self._groups(bool(split_ids), all_stages):
                greatest = self._greatest(greatest, group)
            return greatest[0]
        whole, split, alone = (each.pow(p).sum().view(1) for each in norms)
        # Each element counts once: ranks of a tensor parallel group have the same whole tensors, but other parts.
        total = whole + (self._summed(split, Group.TP) if split_ids else split)
        if self._sharing is not None:
            total = self._summed(total, self._sharing)
        # After that sum, since every rank of the sharding group has the whole of these.
        total = total + alone
        if self._model is not None and all_stages:
            total = self._summed(total, Group.PP)
        return total[0].pow(1.0 / p)

    @torch.no_grad()
    def squares(
        self, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return, for each tensor, the squared L2 norm of the whole tensor that it is a part of.

        Args:
            tensors: pairs of an updated tensor and the tensor of its shape to measure.
            known: all updated tensors, in the same order on all ranks of a tensor parallel group.
        """
        vector, numbers = self._vector(tensors, known)
        narrow = vector.float()  # of narrow parameters, as in one process
        return [
            (vector if _wide(updated.dtype) is torch.float64 else narrow)[numbers[id(updated)]]
            for updated, _ in tensors
        ]

    @torch.no_grad()
    def total_square(
        self, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the squared L2 norm of all whole tensors of every stage together; arguments as in :meth:`squares`."""
        vector, _ = self._vector(tensors, known)
        total = vector.sum().view(1)
        return (self._summed(total, Group.PP) if self._model is not None else total)[0]

    def _vector(
        self, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[int, int]]:
        """Return squares by number, and the numbers by ``id`` of the updated tensors."""
        state = self._model.sharded_state if self._model is not None else None
        # The sharding numbers every parameter that it shares out, even if this rank has no part of it. The others come
        # behind; they are whole on every rank of a sharding group. So the vector has the same length on every rank.
        shared = len(state.optimizer_shards) if state is not None else 0
        numbered = {id(shard.optimized): shard.number for shard in self._optimizer_shards if shard.number is not None}
        numbers = {id(updated): numbered[id(updated)] for updated in known if id(updated) in numbered} if shared else {}
        others = [updated for updated in known if id(updated) not in numbers]
        numbers.update({id(updated): shared + at for at, updated in enumerate(others)})
        split_ids = self.split_parameters()
        split_ids |= {id(shard.optimized) for shard in self._optimizer_shards if id(shard.parameter) in split_ids}
        # The parts of split tensors and all others.
        vectors = torch.zeros(2, shared + len(others), dtype=torch.float64, device=self._ranks.device)
        # A rank without gradients takes part in the sums below with zeros.
        if tensors:
            places = torch.tensor(
                [[int(id(updated) not in split_ids), numbers[id(updated)]] for updated, _ in tensors], device="cpu"
            )
            rows, columns = to_device(places, vectors.device).unbind(1)
            found = _stacked(squared_norms([tensor for _, tensor in tensors]))
            vectors[rows, columns] = found.to(vectors.device)
        vector = self._summed(vectors[0], Group.TP) + vectors[1]
        if state is not None and shared:
            state.sum_over_shards(vector[:shared])
        return vector, numbers

    def _groups(self, any_split: bool, all_stages: bool) -> Iterator[Group]:
        """Yield the groups that the elements are spread over."""
        if any_split:
            yield Group.TP
        if self._sharing is not None:
            yield self._sharing
        if self._model is not None and all_stages:
            yield Group.PP

    def _greatest(self, value: torch.Tensor, group: Group) -> torch.Tensor:
        if self._ranks.size(group) == 1:
            return value
        everyone = value.new_empty(self._ranks.size(group))
        self._ranks.collectives.all_gather(everyone, value, self._ranks.groups.group(group)).wait()
        return everyone.amax().view(1)

    def _summed(self, vector: torch.Tensor, group: Group) -> torch.Tensor:
        if self._ranks.size(group) > 1:
            self._ranks.collectives.all_reduce(vector, self._ranks.groups.group(group)).wait()
        return vector


def squared_norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the squared L2 norm of each tensor, in float64 for float64 tensors and in float32 otherwise."""
    numbers = [as_real(tensor) for tensor in tensors]
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(numbers):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(index)
    found: dict[int, torch.Tensor] = {}
    for (dtype, _), indices in by_kind.items():
        norms = norms_of([numbers[index] for index in indices], 2.0, dtype=_wide(dtype))
        found.update(zip(indices, norms, strict=True))
    return [found[index].square() for index in range(len(numbers))]


def _stacked(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack numbers, perhaps of different precisions, into a vector of float64."""
    if len({number.dtype for number in numbers}) > 1:
        numbers = [number.double() for number in numbers]
    return torch.stack(list(numbers)).double()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which tensors of a type are measured."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _norms(tensors: Sequence[torch.Tensor], p: float, device: torch.device) -> list[torch.Tensor]:
    """Return the norms of tensors in vectors of float64, measured by one operation for each of their types."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        # PyTorch has no maximum of zero elements. Complex numbers count by their absolute values.
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(
                tensor.abs() if tensor.is_complex() else tensor
            )
    return [
        torch.stack(list(norms_of(alike, p, dtype=_wide(dtype)))).to(device, torch.float64)
        for (dtype, _), alike in by_kind.items()
    ]
