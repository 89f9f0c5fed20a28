"""The whole of a split weight, for code that reads it past the module that has it: ``F.linear(x, self.enter.weight)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.errors import SMPUserError
from smp_runtime.tensor_parallel.block_entry import is_in_block
from smp_runtime.tensor_parallel.group import gather_whole
from smp_runtime.tensors.later import LaterTensor
from smp_runtime.tensors.torch_private import backward_pass

if TYPE_CHECKING:
    from smp_runtime.parameters.registry import TensorSlice
    from smp_runtime.tensor_parallel.group import TensorGroup

_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


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


class WholeWeight(LaterTensor):
    """A split weight that is gathered when it is used, on all ranks of its group."""

    source: _Source

    @staticmethod
    def __new__(cls, source: _Source) -> WholeWeight:
        """Without memory of its own."""
        made = cls.like(source.where.shape, source.mine.dtype, source.mine.device)
        made.source = source
        return made

    def elements(self) -> torch.Tensor:
        """All ranks' parts; every rank of the group calls it."""
        return gather_whole(self.source.mine.detach(), self.source.where, self.source.group)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse writing: it would change a copy."""
        name = getattr(func, "__name__", "")
        writes = (
            name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_", "retain_grad_")
        )
        if args and isinstance(args[0], WholeWeight) and (writes or name == "__setitem__" or func == _DATA):
            raise SMPUserError(
                f"{args[0].source.name} is split over {args[0].source.group.size} tensor parallel ranks, and a forward pass uses "
                f"{'its .data' if func == _DATA else name + ' on it'}, which would act on a copy: read it by .detach(), write it "
                "between steps, or leave the module whole with smp.set_tensor_parallelism(module, False)"
            )
        return super().__torch_function__(func, types, args, kwargs)


class _Whole(torch.autograd.Function):
    """Forward nothing; backward this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, source: _Source) -> torch.Tensor:
        ctx.source = source
        return WholeWeight(source)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        source = ctx.source
        whole = gradient if source.is_replicated else source.group.all_reduce(gradient.clone())
        return source.where.cut(whole), None


def is_read_in_forward(group: TensorGroup) -> bool:
    """Whether the script's own code runs as a part of a forward pass, or what repeats it in backward."""
    step = group.ranks.step
    return step.microbatch is not None or step.is_in_forward or backward_pass() != -1


def whole_weight(name: str, mine: torch.Tensor, where: TensorSlice, group: TensorGroup) -> torch.Tensor:
    """A tensor of the whole's shape, to be gathered when it is used; gradients go to each rank's part."""
    if group.is_tracing:  # of the right shape, and seen to use the parameter
        runs = -(-where.shape[where.dim] // max(1, mine.shape[where.dim]))
        return torch.cat([mine] * runs, where.dim).narrow(where.dim, 0, where.shape[where.dim])
    source = _Source(name, mine, where, group, group.prescaled or is_in_block())
    is_trained = torch.is_grad_enabled() and mine.requires_grad
    made: torch.Tensor = _Whole.apply(mine, source) if is_trained else WholeWeight(source)
    return made
