"""The whole of a split weight, for code outside its module that reads it: ``F.linear(x, self.enter.weight)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.errors import SMPUserError
from smp_runtime.tensor_parallel.block_entry import is_in_block
from smp_runtime.tensor_parallel.group import gather_whole
from smp_runtime.tensors.lazy_tensor import NEEDS_NO_ELEMENTS, OF_ITS_PLACE, LazyTensor, changes_in_place, plain_of
from smp_runtime.tensors.nested import leaves_of
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass, backward_pass, storage_key, tree_map

if TYPE_CHECKING:
    from smp_runtime.parameters.registry import TensorSlice
    from smp_runtime.tensor_parallel.group import TensorGroup

_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Source:
    """What a whole weight is gathered from.

    Attributes:
        is_replicated: whether all ranks compute the same with it, so that each has the whole gradient.
    """

    name: str
    mine: torch.Tensor
    where: TensorSlice
    group: TensorGroup
    is_replicated: bool


class WholeWeight(LazyTensor):
    """A split weight that is gathered when it is used, on all ranks of its group."""

    source: _Source

    @staticmethod
    def __new__(cls, source: _Source) -> WholeWeight:
        """Create a tensor without memory of its own."""
        made = cls.like(source.where.shape, source.mine.dtype, source.mine.device)
        made.source = source
        return made

    def elements(self) -> torch.Tensor:
        """Gather all ranks' parts; every rank of the group calls it."""
        return gather_whole(self.source.mine.detach(), self.source.where, self.source.group)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let writes reach the ranks' parts."""
        args, kwargs = _first_as_argument(args, dict(kwargs or {}))
        whole = args[0] if args and isinstance(args[0], WholeWeight) else None
        _refuse_other_writes(func, args, kwargs)
        if whole is None or func in NEEDS_NO_ELEMENTS | OF_ITS_PLACE:
            return super().__torch_function__(func, types, args, kwargs)
        if not _changes_first(func) and func != _DATA:
            return whole.mark_views(super().__torch_function__(func, types, args, kwargs))
        plain = whole.plain()
        if func == _DATA:
            return _marked(plain.detach(), whole, plain)
        args, kwargs = tree_map(plain_of, (args[1:], kwargs))
        if func == _SET_DATA:
            whole.write(torch.Tensor.copy_, plain.detach(), plain, args, kwargs)
            return None
        result = whole.write(func, plain, plain, args, kwargs)
        return whole if isinstance(result, torch.Tensor) else result

    def mark_views(self, result: Any) -> Any:
        """Mark what shares memory with the gathered weight, if it was gathered."""
        return result if self._plain is None else _marked(result, self, self._plain)

    def write(
        self, func: Any, target: torch.Tensor, gathered: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Change the gathered weight in place; every rank keeps its part of it.

        Args:
            func: gets ``target``, which is ``gathered`` or a view of it, before ``args`` and ``kwargs``.
            gathered: the weight, as it was gathered; perhaps not for the last time.

        Raises:
            SMPUserError: gradients are recorded, which PyTorch refuses of any parameter.
        """
        name = getattr(func, "__name__", func)
        if torch.is_grad_enabled() and target.requires_grad:
            raise SMPUserError(
                f"{self.source.name} requires grad and is changed in place by {name}: do that inside torch.no_grad()",
                code="SMP307",
            )
        with torch.no_grad(), DisableTorchFunctionSubclass():
            result = func(target, *args, **kwargs)
            self.source.mine.copy_(self.source.where.cut(gathered))
        if gathered is not self._plain:
            self._plain = None
        return result


def _marked(result: Any, weight: WholeWeight, gathered: torch.Tensor) -> Any:
    """Mark what shares memory with the gathered weight: what is written into it reaches the ranks' parts too."""
    if isinstance(result, list | tuple):
        parts = [_marked(part, weight, gathered) for part in result]
        return getattr(type(result), "_make", type(result))(parts)
    if not isinstance(result, torch.Tensor) or isinstance(result, WholeWeight):
        return result
    # Only strided tensors have a storage to compare.
    if result.layout is not torch.strided or storage_key(result) != storage_key(gathered):
        return result
    view = result.as_subclass(_View)
    view.weight, view.gathered = weight, gathered
    return view


class _View(torch.Tensor):
    """Shares memory with a gathered weight, and passes writes on to it."""

    weight: WholeWeight
    gathered: torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _first_as_argument(args, dict(kwargs or {}))
        _refuse_other_writes(func, args, kwargs)
        view = args[0] if args and isinstance(args[0], _View) else None
        if view is None:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Setting ``data`` of a view leaves the weight alone.
        if _changes_first(func) and func != _SET_DATA:
            args, kwargs = tree_map(plain_of, (args[1:], kwargs))
            result = view.weight.write(func, view, view.gathered, args, kwargs)
            return view if isinstance(result, torch.Tensor) else result
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _marked(result, view.weight, view.gathered)


def _first_as_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move a tensor given by keyword, as ``torch.nn.init`` does, to the front of the arguments."""
    if args or "tensor" not in kwargs:
        return args, kwargs
    first = kwargs.pop("tensor")
    return (first,), kwargs


def _changes_first(func: Any) -> bool:
    return changes_in_place(getattr(func, "__name__", "")) and func not in OF_ITS_PLACE


def _refuse_other_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = getattr(func, "__name__", "")
    is_foreach = name.startswith("_foreach_") and name.endswith("_")
    for each in leaves_of(args[:1] if is_foreach else kwargs.get("out")):
        if isinstance(each, WholeWeight | _View):
            source = each.source if isinstance(each, WholeWeight) else each.weight.source
            raise SMPUserError(
                f"{source.name} is split over {source.group.size} tensor parallel ranks, and a forward pass writes into it by "
                f"{name}, which would change a copy: change it by a method of its own (weight.clamp_(…)), write it between steps, "
                "or leave the module whole with smp.set_tensor_parallelism(module, False)",
                code="SMP307",
            )


class _WholeWeight(torch.autograd.Function):
    """Forward nothing; backward this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, source: _Source) -> torch.Tensor:
        ctx.source = source
        return WholeWeight(source)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        source = ctx.source
        # A copy, since autograd may pass the same tensor on to others, and it is summed in place.
        whole = gradient if source.is_replicated else source.group.all_reduce(gradient.clone())
        return source.where.cut(whole), None


def is_read_in_forward(group: TensorGroup) -> bool:
    """Return whether the script's code runs inside a forward pass, or its recomputation in backward."""
    step = group.ranks.step
    return step.microbatch is not None or step.is_in_forward or backward_pass() != -1


def whole_weight(name: str, mine: torch.Tensor, where: TensorSlice, group: TensorGroup) -> torch.Tensor:
    """Return a tensor of the whole's shape that is gathered on use; gradients go to each rank's part."""
    if group.is_tracing:  # of the right shape, and seen to use the parameter
        runs = -(-where.shape[where.dim] // max(1, mine.shape[where.dim]))
        return torch.cat([mine] * runs, where.dim).narrow(where.dim, 0, where.shape[where.dim])
    is_replicated = group.prescaled or is_in_block()
    source = _Source(name, mine, where, group, is_replicated)
    is_trained = torch.is_grad_enabled() and mine.requires_grad
    made: torch.Tensor = _WholeWeight.apply(mine, source) if is_trained else WholeWeight(source)
    return made
