"""Parameters of modules that tensor parallelism has replaced: scripts and libraries may still hold and query such a module.

The weights are in the distributed modules. The remaining parameters answer queries of shape, type and device, as
``num_parameters()``, ``dtype`` and ``device`` of a model make. An operation that needs elements raises an error, since
the replaced module would only have its initial ones.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.lazy_tensor import NEEDS_NO_ELEMENTS
from smp_runtime.tensors.nested import argument_tensors
from smp_runtime.tensors.parameter_attributes import set_data
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass as _Plainly
from smp_runtime.tensors.torch_private import can_take_contents, make_subclass


class ReplacedParameter(nn.Parameter):
    """The shape, type and device of a parameter of a replaced module.

    Attributes:
        owner: the class of the module that the script has made.
        is_moving: inside a ``nn.Module.to``, which reads the gradient to move it too.
    """

    owner: str
    is_moving = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replaced = next((each for each in argument_tensors((args, kwargs)) if isinstance(each, cls)), None)
        if replaced is None or func in _ANSWERED:
            with _Plainly():
                return func(*args, **kwargs)
        if func in _SAME_PARAMETER and args[0] is replaced:
            return replaced
        if func == torch.Tensor.data.__set__ and args[1] is replaced:  # type: ignore[attr-defined]
            return None
        if func == can_take_contents:  # what ``nn.Module.to`` asks before
            replaced.is_moving = True
            return True
        if func == torch.Tensor.grad.__get__ and replaced.is_moving:  # type: ignore[union-attr]
            replaced.is_moving = False
            return None
        if func in _FREEZES and _wanted(args, kwargs) == replaced.requires_grad:
            return replaced
        _refuse(replaced, getattr(getattr(func, "__self__", func), "__name__", str(func)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = str(self.dtype).removeprefix("torch.")
        return f"<parameter of a replaced {self.owner}: {kind}{list(self.shape)}>"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = stand_in(self, self.owner)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self, "pickle")


def stand_in(parameter: nn.Parameter, owner: str) -> ReplacedParameter:
    """Return the stand-in for a parameter of a replaced module of class ``owner``, without its elements."""
    with _Plainly():
        # A tensor made on meta can never move to another device. But :func:`settle` moves this one to the device of the
        # model's weights.
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        made: ReplacedParameter = make_subclass(
            ReplacedParameter, _empty(parameter, parameter.dtype, device), parameter.requires_grad
        )
    made.owner = owner
    return made


def settle(parameter: ReplacedParameter, device: torch.device, dtype: torch.dtype | None) -> None:
    """Make a stand-in report the device of the model's weights, and their type if it is a floating point one."""
    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    with _Plainly():
        set_data(parameter, _empty(parameter, kind, device))


def _empty(like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of the shape of ``like`` with one element for all, NaN if the type has it.

    So code that reads past the checks does not continue with wrong weights.
    """
    nothing = float("nan") if dtype.is_floating_point else 0
    return torch.full((), nothing, dtype=dtype, device=device).expand(like.shape)


def _wanted(args: Any, kwargs: Any) -> bool:
    """Return the flag that a call of ``requires_grad_``, or an assignment to ``requires_grad``, sets."""
    return bool(kwargs.get("requires_grad", args[1] if len(args) > 1 else True))


def _refuse(parameter: ReplacedParameter, name: str) -> NoReturn:
    raise SMPUserError(
        f"{name} got a parameter of shape {list(parameter.shape)} of the {parameter.owner} that the script has made, but tensor "
        "parallelism has replaced that module: its weights and gradients are in the model that smp.DistributedModel returned; use "
        "that one (with Trainer trainer.model_wrapped, and trainer.save_model to save), or its state_dict() for whole weights",
        code="SMP303",
    )


def _methods(names: str) -> set[Any]:
    return {getattr(torch.Tensor, name) for name in names.split()}


_ANSWERED = {
    *NEEDS_NO_ELEMENTS,
    *_methods("is_contiguous stride storage_offset"),
    torch.Tensor.retains_grad.__get__,  # type: ignore[attr-defined]
}
#: Moves and casts too: placement and type are those of the wrapped model.
_SAME_PARAMETER = {
    *_methods("detach clone contiguous to cpu cuda float double half bfloat16 type"),
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
}
_FREEZES = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
