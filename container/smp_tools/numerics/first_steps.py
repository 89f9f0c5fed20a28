"""Watches the first steps of a layout: NaN in a loss or gradient, though the batch and the model are finite."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.checkpoint.live_state import updated_parameters
from smp_runtime.errors import NumericsError, SMPUserError
from smp_runtime.optim.gradient_norms import as_real
from smp_runtime.tensors.lazy_tensor import LazyTensor
from smp_runtime.tensors.nested import tensors_in
from smp_runtime.tensors.parameter_attributes import get_data, get_gradient
from smp_runtime.tensors.torch_private import norms_of

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedModel, TrainedOptimizer
    from smp_runtime.model.local_part import LocalPart, ParallelState

#: Training passes that are watched: the first order of a pipeline comes from the first steps, and is reviewed five steps later.
WATCHED_PASSES = 10
#: Larger numbers mean that the training diverges or a batch overflows. Their results are no evidence about the library.
_ORDINARY = 1e8


class FirstSteps:
    """A check for NaN that appears between finite inputs and the update.

    It decides from the state of each rank and of the ranks that send it numbers. It reports nothing if a batch, parameter or
    buffer of one of them is not finite, or if one of them did not check.

    Attributes:
        left: number of training passes left to watch.
        is_waiting: whether the next update is to be checked.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ranks = session.ranks
        self.left = 0
        self.is_waiting = False
        self._has_begun = False  # a training pass that is not counted yet
        self._is_finite = True  # this rank's batch, parameters and buffers, in this pass
        self._is_certain = True  # the same for all ranks that exchange numbers
        self._since_update: bool | None = None  # the same for all passes since the last update; None before the first
        self._losses: list[tuple[int | None, torch.Tensor]] = []

    @property
    def is_finite(self) -> bool:
        """Return whether this rank's batch and model are finite, provided that it has checked them."""
        return self._has_begun and self._is_finite

    def begin_again(self) -> None:
        """Count the next passes as first ones."""
        self.left = WATCHED_PASSES
        if self._look_at_arguments not in self._session.arguments:
            self._session.arguments.append(self._look_at_arguments)

    def _look_at_arguments(self, values: list[Any], axes: list[int | None]) -> list[Any]:
        self._look_at(values)
        return values

    def _look_at(self, inputs: Any) -> None:
        tensors = tensors_in(inputs)  # if there are none, the batch arrives another way, unchecked
        self._is_finite = self._is_finite and bool(tensors) and _are_ordinary(tensors, allows_masks=True)

    @torch.no_grad()
    def begin_pass(self, part: LocalPart, placed: ParallelState, inputs: Any) -> None:
        """Begin a training pass.

        Args:
            inputs: of the model; None inside a step, because the step's arguments were checked already.
        """
        if inputs is not None:
            self._look_at(inputs)
        self._is_finite = (
            self._is_finite
            and _are_ordinary(_values(part, placed), allows_masks=False)
            and _are_ordinary(list(part.buffers()), allows_masks=True)
        )
        self._has_begun = self.is_waiting = True
        self._is_certain = self._is_certain and self._is_finite

    def hear(self, *, everyone: bool) -> None:
        """Learn whether the batches and parameters of all data parallel ranks are finite."""
        if self._has_begun:
            self._is_certain = self._is_certain and everyone

    def end_step(self) -> None:
        """End a step; the stages of a pipeline agree on whether their parameters are finite."""
        if self._has_begun:
            if self._ranks.size(Group.PP) > 1:
                said = self._ranks.control.allgather(self._is_certain, self._ranks.members(Group.PP))
                self._is_certain = all(said)
            self._count()
        self._is_finite = True

    def _count(self) -> None:
        """Count a training pass that has ended."""
        self._since_update = self._is_certain and self._since_update is not False
        self._has_begun, self._is_finite, self._is_certain = False, True, True
        self.left -= 1
        # Later passes must not pay for the look.
        if not self.left and self._look_at_arguments in self._session.arguments:
            self._session.arguments.remove(self._look_at_arguments)

    def note_losses(self, outputs: Sequence[torch.Tensor]) -> None:
        """Remember whether losses are NaN, on their device."""
        microbatch = self._ranks.step.microbatch
        for output in outputs:
            if output.is_floating_point() and not isinstance(output, LazyTensor):
                self._losses.append((microbatch, output.detach().isnan().any()))

    @torch.no_grad()
    def before_update(self, optimizer: TrainedOptimizer) -> None:
        """Look for NaN in the losses and gradients since the last update.

        Raises:
            NumericsError: there is one, and all that it was computed from is finite.
        """
        if self._has_begun:  # a training without steps
            self._count()
        is_certain, self._since_update, self.is_waiting = self._since_update, None, False
        losses, self._losses = self._losses, []
        if not is_certain:
            return
        named = [
            (f"the loss{'' if microbatch is None else f' of microbatch {microbatch}'}", flag)
            for microbatch, flag in losses
        ]
        if not self._ranks.cfg.fp16:  # there overflows are expected, and the loss scale falls
            gradients = []
            # Backward goes from the loss: the last modules have their gradients first.
            for name, gradient in reversed(gradients_of(self._session.models, optimizer)):
                numbers = as_real(gradient)
                if _has_range(numbers):
                    gradients.append((f"the gradient of {name}", numbers))
            greatest = _greatest_magnitudes([gradient for _, gradient in gradients])
            named += [(name, value.isnan()) for (name, _), value in zip(gradients, greatest, strict=True)]
        bad = _true_ones(named)
        if bad:
            raise NumericsError(self._message(bad))

    def _message(self, bad: Sequence[str]) -> str:
        more = f", and {len(bad) - 1} more losses or gradients are NaN" if len(bad) > 1 else ""
        return (
            f"{bad[0]} is NaN on rank {self._ranks.rank}{more}, in one of the first {WATCHED_PASSES} training passes of this "
            "layout, though the batches, parameters and buffers of all ranks are finite. The update was not made. Possible "
            "causes: the script's own computation, such as a mean over no tokens in one microbatch, a row of attention with every "
            "position masked, or a square root of 0; else a fault of this library. Run the step in one process with the same "
            "batch: if the loss is finite there, report it. SMP_NUMERICS_GUARDS=finite names the module; "
            '"check_invariants": False goes on without this check'
        )


def gradients_of(models: Sequence[TrainedModel], optimizer: TrainedOptimizer) -> list[tuple[str, torch.Tensor]]:
    """Return the gradients that an optimizer will use on this rank, by parameter, in the order of the model."""
    found: list[tuple[str, torch.Tensor]] = []
    for model in models:
        try:
            entries = updated_parameters(model, optimizer)  # type: ignore[arg-type]  # the one class of each
        except SMPUserError:  # another model's
            continue
        for entry in entries:
            gradient = None if entry.updated is None else get_gradient(entry.updated)
            if gradient is not None:
                found.append((entry.name, gradient.coalesce().values() if gradient.is_sparse else gradient))
    return found


def _values(part: LocalPart, placed: ParallelState) -> list[torch.Tensor]:
    """Return this rank's parameters, sharded ones by the part that is here."""
    if placed.sharded_state is not None:
        placed.sharded_state.settle()
    shards = placed.shards.parameters if placed.shards is not None else set()
    return [p.ds_tensor if p in shards else get_data(p) for p in part.parameters()]  # type: ignore[attr-defined]


def _are_ordinary(tensors: Sequence[torch.Tensor], *, allows_masks: bool) -> bool:
    """Return whether there is no NaN, and nothing huge.

    Args:
        allows_masks: whether numbers may be as small as they like: -inf, or the least number, in an attention mask.
    """
    ranged = [tensor.detach() for tensor in tensors if _has_range(tensor)]
    if allows_masks:
        greatest = [tensor.aminmax()[1] for tensor in ranged]
    else:
        greatest = _greatest_magnitudes(ranged)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in greatest:
        by_device.setdefault(each.device, []).append(each)
    for numbers in by_device.values():
        are_ordinary = torch.stack(numbers).double().le(_ORDINARY).all()
        if not are_ordinary:  # one wait for each device
            return False
    return True


def _has_range(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds numbers that can be compared."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if isinstance(tensor, LazyTensor) or tensor.is_meta:
        return False
    # Eight-bit types have no minimum and maximum in PyTorch.
    is_wide = tensor.is_floating_point() and tensor.element_size() >= 2
    return is_wide and tensor.numel() > 0


def _greatest_magnitudes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the greatest absolute value in each tensor, NaN if there is any, as scalars on the tensors' devices."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(place)
    found: list[torch.Tensor | None] = [None] * len(tensors)
    for (device, _), places in by_kind.items():
        alike = [tensors[place] for place in places]
        # One launch for many tensors. On a CPU the extremes of each are 10 times faster than its norm.
        values = map(_greatest_magnitude, alike) if device.type == "cpu" else norms_of(alike, math.inf)
        for place, value in zip(places, values, strict=True):
            found[place] = value
    return [value for value in found if value is not None]


def _greatest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    low, high = tensor.aminmax()
    return torch.maximum(-low, high)


def _true_ones(named: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names with a set flag; wait once for each device."""
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, flag in named:
        by_device.setdefault(flag.device, []).append((name, flag))
    found: list[str] = []
    for group in by_device.values():
        names, flags = zip(*group, strict=True)
        found += itertools.compress(names, torch.stack(flags).tolist())
    return found
