"""What PyTorch keeps private of tensors, parameters and their gradients."""

# ruff: noqa: SLF001 - this folder is the place for private names

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp_runtime.tensors.torch_private.lookup import find_private

#: A context in which functions see subclasses of tensors as plain ones.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

#: A context in which neither modes nor subclasses of tensors take functions.
DisableTorchFunction = torch._C.DisableTorchFunction

#: ``(class, tensor, requires_grad)``: a tensor of a subclass that shares the elements of another.
make_subclass: Callable[..., Any] = find_private("makes stand-ins for tensors of other stages", "Tensor._make_subclass")

#: ``(one, other)``: whether ``one.data = other`` can be set; what ``nn.Module.to`` asks of each parameter.
can_take_contents: Callable[[torch.Tensor, torch.Tensor], bool] = find_private(
    "moves modules whose parameters were replaced", "_has_compatible_shallow_copy_type"
)

#: ``(class, shape, dtype=…, device=…)``: a tensor of a subclass without elements.
make_without_elements: Callable[..., Any] = find_private(
    "makes handles of remote tensors", "Tensor._make_wrapper_subclass"
)

#: What pickles of parameters call when they are read; pickled by PyTorch's name, so that they need no package of ours.
rebuild_parameter: Callable[..., nn.Parameter] = find_private("pickles stand-ins", "_utils._rebuild_parameter")

_swap_in_place: Callable[[torch.Tensor, torch.Tensor], None] = find_private(
    "gives a parameter that a recurrent layer refers to another content", "_C._swap_tensor_impl"
)


def swap_contents(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap values, device, type and gradients of two tensors; both keep their identity for code that refers to them.

    Unlike ``torch.utils.swap_tensors`` it also swaps parameters with weak references, as recurrent layers have them.

    Raises:
        RuntimeError: an autograd graph or a view holds one of them.
    """
    # A parameter that was frozen after its use is held by that graph; swap_tensors looks only at those that require gradients.
    is_held = one.is_leaf and not one.requires_grad and one._use_count() > 1  # type: ignore[attr-defined]
    if not weakref.getweakrefs(one):
        with _requiring_gradients(one if is_held else None, other):
            torch.utils.swap_tensors(one, other)
    else:
        one.__class__, other.__class__ = other.__class__, one.__class__
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
        _swap_in_place(one, other)
    for tensor in (one, other):
        set_gradient_hooks(tensor, *gradient_hooks(tensor))


@contextlib.contextmanager
def _requiring_gradients(held: torch.Tensor | None, other: torch.Tensor) -> Iterator[None]:
    """Let a frozen tensor require gradients until its contents are those of ``other``."""
    if held is None or not (held.is_floating_point() or held.is_complex()):
        yield
        return
    with DisableTorchFunctionSubclass():
        frozen = held.requires_grad_(True)
        try:
            yield
            frozen = other
        finally:
            frozen.requires_grad_(False)


def gradient_hooks(tensor: torch.Tensor) -> tuple[dict[int, Any] | None, dict[int, Any] | None]:
    """Return the dictionaries of ``register_hook`` and ``register_post_accumulate_grad_hook``; None if never used."""
    with DisableTorchFunctionSubclass():
        return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def set_gradient_hooks(tensor: torch.Tensor, computed: dict[int, Any] | None, added: dict[int, Any] | None) -> None:
    """Have autograd run what these dictionaries hold, now and later, so that handles of hooks go on removing them."""
    with DisableTorchFunctionSubclass():
        if computed is not None:
            tensor._backward_hooks = computed
        if added is not None:
            tensor._post_accumulate_grad_hooks = added


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage while it is alive; meta tensors have one too.

    Raises:
        NotImplementedError, RuntimeError: the tensor has no storage, as sparse ones.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def key_of_storage(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage while it is alive, the same for all its Python objects."""
    return storage._cdata


#: ``(tensors, p, dtype=…)``: the p-norms of tensors of one type and device, computed in ``dtype``.
norms_of: Callable[..., Sequence[torch.Tensor]] = find_private("measures gradients", "_foreach_norm")


def values_of(sparse: torch.Tensor) -> torch.Tensor:
    """Return the entries of a sparse tensor as they lie there, to be changed in place; several may be of one element."""
    return sparse._values()


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether something runs before each update of an optimizer, and may change gradients."""
    hooks: Mapping[int, Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return bool(hooks)


def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiply gradients by ``inverse``; ``found`` becomes 1 if one of them is not finite. Both have one element."""
    fused = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
    if fused is not None:
        fused(gradients, found, inverse)
        return
    for gradient in gradients:
        found.logical_or_(gradient.isfinite().all().logical_not().to(found.device))
        gradient.mul_(inverse.to(gradient.device))
