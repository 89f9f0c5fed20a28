"""``torch.nn.utils.clip_grad_norm_`` on a wrapped model's parameters clips as in one process, wherever the gradients lie.

PyTorch's function measures what this rank has. Where that is a part of the gradient, every rank would scale by another
factor; where gradients lie in shards, it would find none. Scripts and libraries call it all the same.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import threading
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

from smp_config import Group
from smp_runtime.errors import SMPOperationError, SMPRuntimeError
from smp_runtime.optim.accumulated import reduce_accumulated
from smp_runtime.optim.gradient_norms import WholeNorms, scale_down

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedModel, TrainedOptimizer

logger = logging.getLogger("smp")

#: What PyTorch's function is made of since 2.6, however a script has imported it; before, it is one function, wrapped once.
_MEASURE, _SCALE = "_get_total_norm", "_clip_grads_with_norm_"


def needs_other_ranks(session: Session) -> bool:
    """Whether gradients are not what one process has, on the parameters of one rank."""
    parameters = session.ranks.cfg
    return (
        session.ranks.size(Group.PP) > 1
        or session.ranks.size(Group.TP) > 1
        or parameters.sharded_data_parallel_degree > 1
        or parameters.shard_optimizer_state
        or parameters.fp16
        or parameters.bf16
    )


def clip_over_ranks(session: Session, *, accumulates: bool = False) -> None:
    """Until the session closes, PyTorch's function clips parameters of wrapped models over all ranks that have some.

    Args:
        accumulates: whether gradients may still be those of this rank when a script clips them.
    """
    if not (accumulates or needs_other_ranks(session)) or session.ranks.kept(_Clipping) is not None:
        return
    clipping = session.ranks.keep(_Clipping, lambda: _Clipping(session))

    def patch(module: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(module, name)
        setattr(module, name, around(original))
        session.at_close.append(functools.partial(setattr, module, name, original))

    if hasattr(clip_grad, _MEASURE) and hasattr(clip_grad, _SCALE):
        patch(clip_grad, _MEASURE, clipping.measuring)
        patch(clip_grad, _SCALE, clipping.scaling)
    else:
        # Inside the wrapper: a script that has imported the name holds the wrapper itself.
        cell = wrapped_function(clip_grad.clip_grad_norm_)
        original = cell.cell_contents
        cell.cell_contents = clipping.clipping(original)
        session.at_close.append(functools.partial(setattr, cell, "cell_contents", original))


def wrapped_function(wrapper: Callable[..., Any]) -> types.CellType:
    """Where a wrapper made with ``functools.wraps`` keeps the function that it calls.

    Raises:
        SMPRuntimeError: the function is not wrapped, in a PyTorch that the runtime is not tested with.
    """
    inner = inspect.unwrap(wrapper)
    for cell in wrapper.__closure__ or ():
        # Another session may have put its own there, which is made with ``functools.wraps`` too.
        if callable(cell.cell_contents) and inspect.unwrap(cell.cell_contents) is inner:
            return cell
    raise SMPRuntimeError(
        f"PyTorch {torch.__version__} has a torch.nn.utils.{wrapper.__name__} that cannot be made to measure gradients over all "
        "ranks, and would clip each by another norm; install PyTorch 2.4 or newer, or use optimizer.clip_master_grads(max_norm)"
    )


class _Measured(threading.local):
    """How the norm was asked for that this thread scales by next."""

    norm_type: float = 2.0
    error_if_nonfinite: bool = False


class _Clipping:
    outlives_regrouping = True

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self._measured = _Measured()
        self._said = False

    def measuring(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note what the norm is measured by; whether it is to be finite is looked at when it is known."""

        @functools.wraps(original)
        def measure(
            tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
        ) -> torch.Tensor:
            self._measured.norm_type, self._measured.error_if_nonfinite = norm_type, error_if_nonfinite
            made: torch.Tensor = original(tensors, norm_type, False, foreach)
            return made

        return measure

    def scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Scale by the norm of the whole gradient, which the caller of PyTorch's function gets back too."""

        @functools.wraps(original)
        def scale(parameters: Any, max_norm: Any, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            norm = self._clipped(parameters, float(max_norm), self._measured.norm_type)
            found = total_norm if norm is None else norm
            if self._measured.error_if_nonfinite:
                _require_finite(float(found), self._measured.norm_type)
            if norm is None:
                original(parameters, max_norm, total_norm, foreach)
            else:
                total_norm.fill_(norm)

        return scale

    def clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a PyTorch that does both in one function."""

        @functools.wraps(original)
        def clip(
            parameters: Any,
            max_norm: Any,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            norm = self._clipped(parameters, float(max_norm), norm_type)
            if norm is None:
                return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
            if error_if_nonfinite:
                _require_finite(float(norm), norm_type)
            return norm.float()

        return clip

    def _clipped(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Clip the gradients of a wrapped model; None if PyTorch's own way is right, or nothing better is known."""
        session = self._session()
        wanted = {id(parameter) for parameter in parameters}
        models = [] if session is None else [m for m in session.models if wanted & _own(m)]
        if session is None or not models:
            return None
        reduce_accumulated(session, parameters)
        optimizers = [o for o in session.optimizers if wanted & _updated(o)]
        known = _own(models[0]).union(*map(_updated, optimizers))
        if len(models) > 1 or not wanted <= known:
            self._warn("parameters of several models, or of none, at once")
        elif len(optimizers) == 1:
            return optimizers[0].clip_on_device(max_norm, norm_type, among=parameters)
        elif models[0].optimizer_shards and any(s is not None for s in models[0].optimizer_shards.values()):
            self._warn("parameters whose gradients an optimizer has that was not wrapped in smp.DistributedOptimizer")
        else:
            return _clip_alone(session, models[0], parameters, max_norm, norm_type)
        return None

    def _warn(self, what: str) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "torch.nn.utils.clip_grad_norm_ got %s, and measures what this rank has of them; call it for each model, or use "
                "optimizer.clip_master_grads(max_norm) of smp.DistributedOptimizer, on every rank",
                what,
            )


def _require_finite(norm: float, norm_type: float) -> None:
    if not math.isfinite(norm):
        raise SMPOperationError(
            f"the gradient's norm of order {norm_type} is {norm}, so it cannot be clipped; pass error_if_nonfinite=False to "
            "scale by it all the same"
        )


def _own(model: TrainedModel) -> set[int]:
    return {id(record.parameter) for record in model.registry}


def _updated(optimizer: TrainedOptimizer) -> set[int]:
    return {id(parameter) for group in optimizer.original_groups() for parameter in group}


@torch.no_grad()
def _clip_alone(
    session: Session, model: TrainedModel, parameters: list[nn.Parameter], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Clip gradients that lie on the parameters."""
    norms = WholeNorms(session.ranks, model, (), lambda: session.records)
    found = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    norm = norms.total(found, norms.split_parameters().intersection(map(id, parameters)), norm_type)
    scale_down([gradient for _, gradient in found], max_norm, norm)
    return norm
