"""Running a model without lasting effect: changes of a forward pass in it are undone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smp_runtime.microbatch_state.entries import REGISTRIES, Entries
from smp_runtime.tensors.nested import tensors_in
from smp_runtime.tensors.random_state import OtherGenerators, number_of
from smp_runtime.tensors.torch_private import NORMS_WITH_STATISTICS

logger = logging.getLogger("smp")

#: Most bytes of parameters that are copied while the model runs.
MOST_COPIED = 2**30


class Snapshot:
    """A model as it was before it ran; until it is put back, its parameters have no gradients."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        #: By identity of a dictionary: its module, and whether it holds attributes or buffers.
        self._owners: dict[int, tuple[nn.Module, str]] = {}
        for module in modules:
            self._owners[id(vars(module))] = module, "attribute"
            self._owners[id(module._buffers)] = module, "buffer"
        self._entries = Entries(modules, buffers=True, apart=REGISTRIES)
        self._children = [(module, dict(module._modules)) for module in modules]
        self._values = self._copied_values(model)
        parameters = list(model.parameters())
        self._parameters = [(parameter, parameter.grad, parameter._version, parameter.data) for parameter in parameters]
        self._copies = _copies_of(parameters)
        for parameter in parameters:
            parameter.grad = None  # nothing can be added to it

    def _copied_values(self, model: nn.Module) -> dict[int, tuple[torch.Tensor, int | None, torch.Tensor | None]]:
        """Return all buffers, and tensors that modules keep like them without registering them, with a copy of each."""
        tensors = list(model.buffers())
        for _, taken in self._entries.slots():
            if _is_like_buffer(taken.value):
                tensors.append(taken.value)
        values = {}
        for tensor in tensors:
            copy = None if tensor.is_meta else tensor.detach().clone()
            values[id(tensor)] = tensor, _version(tensor), copy
        return values

    def changed(self) -> Iterator[tuple[nn.Module, str, str]]:
        """Yield each attribute or buffer with changed tensors: its module, its name, and ``attribute`` or ``buffer``."""
        for slot, before in self._entries.slots():
            owner = self._owners.get(id(slot.holder))
            if owner is None:
                continue
            module, kind = owner
            now = slot.take()
            value = now.value
            if isinstance(value, nn.Module) or callable(value):
                continue
            is_changed = not now.is_same(before) or self._is_changed(value)
            if not is_changed and kind == "buffer":
                is_changed = _may_change_unseen(module, value)
            if is_changed and tensors_in(value):
                yield module, slot.key, kind

    def _is_changed(self, value: Any) -> bool:
        """Return whether the elements of a tensor have changed."""
        if id(value) not in self._values:
            return False
        _, version, former = self._values[id(value)]
        if _version(value) != version:
            return True
        # Normalisation changes its buffers without counting that.
        if former is None or former.layout is not torch.strided:
            return False
        return former.shape != value.shape or not bool((former == value).all())

    def replaced(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return pairs of a parent module and a module that is no longer in its place.

        A module that only has additional children is paired with itself.
        """
        found = []
        for module, children in self._children:
            present = dict(module._modules)
            if present == children:
                continue
            gone = [child for name, child in children.items() if child is not present.get(name)]
            if not gone:
                gone = [module]
            found += [(module, child) for child in gone if child is not None]
        return found

    def put_back(self, *, keeps_tree: bool = False) -> None:
        """Restore the model; log a warning if parameters of a large one have other values.

        Args:
            keeps_tree: keep modules that have replaced others, with their attributes, except tensors.
        """
        if keeps_tree:
            self._put_tensors_back()
        else:
            self._put_children_back()
            self._entries.put_back()
        with torch.no_grad():
            for tensor, _, former in self._values.values():
                if former is not None:
                    _put_back(tensor, former)
        for parameter, gradient, _, _ in self._parameters:
            parameter.grad = gradient
        self._put_parameters_back()

    def _put_tensors_back(self) -> None:
        for slot, before in self._entries.slots():
            if tensors_in(slot.take().value) or tensors_in(before.value):
                slot.put(before)

    def _put_children_back(self) -> None:
        for module, children in self._children:
            if dict(module._modules) != children:
                module._modules.clear()
                module._modules.update(children)

    def _put_parameters_back(self) -> None:
        lost = 0
        for (parameter, _, version, data), former in zip(self._parameters, self._copies, strict=True):
            if parameter.is_meta:
                # Assigned values on meta show no other address; late creation knows a parameter by its memory.
                parameter.data = data
                continue
            if parameter.data_ptr() != data.data_ptr() or parameter.shape != data.shape:
                parameter.data = data
            if former is not None:
                # Always copy: version counters do not show writes through ``.data``.
                data.copy_(former)
            lost += former is None and parameter._version != version
        if lost:
            logger.warning(
                "the forward pass writes into %d parameters, and the tracing step ran it once; set skip_tracing if "
                "training must start from the exact initial values",
                lost,
            )


@contextlib.contextmanager
def restore_afterwards(model: nn.Module, *, keeps_tree: bool = False) -> Iterator[Snapshot]:
    """Run the block, then restore the model and all random generators; yield the model as it was.

    Restored are modules, buffers, attributes, flags and gradients. Parameters are restored too. In a model of more than
    :data:`MOST_COPIED` bytes, only those with other data are, and a warning reports if a forward pass has written into
    them. The snapshot that it yields reports the changes since.

    Args:
        keeps_tree: as for :meth:`Snapshot.put_back`.
    """
    snapshot, generators = Snapshot(model), OtherGenerators()
    try:
        with torch.random.fork_rng(_gpus_of(model)):
            yield snapshot
    finally:
        generators.restore(draws=False)
        torch.clear_autocast_cache()
        snapshot.put_back(keeps_tree=keeps_tree)


def _copies_of(parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
    """Return a copy of each parameter, unless it is on meta or the model is large.

    A second copy of a large model does not fit. A warning reports if its parameters were written in place.
    """
    present = [parameter for parameter in parameters if not parameter.is_meta]
    if sum(parameter.nbytes for parameter in present) > MOST_COPIED:
        return [None] * len(parameters)
    return [None if parameter.is_meta else parameter.detach().clone() for parameter in parameters]


def _is_like_buffer(value: Any) -> bool:
    if type(value) is not torch.Tensor:
        return False
    return value.is_leaf and not value.requires_grad


def _may_change_unseen(module: nn.Module, value: Any) -> bool:
    """Return whether a buffer of a module is a statistic on meta, which shows no changes of its values."""
    if not isinstance(module, NORMS_WITH_STATISTICS) or not module.training:
        return False
    return isinstance(value, torch.Tensor) and value.is_meta


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _put_back(buffer: torch.Tensor, value: torch.Tensor) -> None:
    if buffer.shape != value.shape:  # resized in place
        buffer.resize_(value.shape)
    buffer.copy_(value)


def _gpus_of(model: nn.Module) -> list[int]:
    """Return the numbers of the GPUs that ``model`` may draw on: the current one, and those of its tensors."""
    if not torch.cuda.is_initialized():
        return []
    tensors = (*model.parameters(), *model.buffers())
    numbers = {number_of(tensor.device) for tensor in tensors if tensor.device.type == "cuda"}
    return sorted(numbers | {torch.cuda.current_device()})
