"""PyTorch's functions that clip and measure gradients, made to act on a wrapped model as in one process.

These are ``clip_grad_norm_``, ``clip_grads_with_norm_``, ``get_total_norm`` and ``clip_grad_value_`` of ``torch.nn.utils``.
PyTorch's functions measure this rank's own gradients. If these are a part of the gradient, every rank would scale by
another factor. If gradients lie in shards, the functions would find none. Scripts and libraries call them all the same.
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
from smp_runtime.tensors.parameter_attributes import get_gradient

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedModel, TrainedOptimizer

logger = logging.getLogger("smp")

#: Since 2.6 PyTorch's function calls these two, so replacing them works however a script has imported it.
#: Before 2.6 it is one function, wrapped once.
#: Since 2.6 scripts also call the two directly, by their names without the underscore.
_MEASURE, _SCALE = "_get_total_norm", "_clip_grads_with_norm_"

#: Other parameters, each with the part of its values or gradient that this rank has.
_Pairs = list[tuple["nn.Parameter", torch.Tensor]]


def needs_other_ranks(session: Session) -> bool:
    """Return whether the norm of this rank's own gradients differs from the norm over the whole model."""
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
    """Make PyTorch's function clip wrapped models' parameters over all their ranks, until the session closes.

    Args:
        accumulates: whether gradients may still be those of this rank when a script clips them.
    """
    if not (accumulates or needs_other_ranks(session)) or session.ranks.kept(_Clipping) is not None:
        return
    clipping = session.ranks.keep(_Clipping, lambda: _Clipping(session))

    def patch(name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the function that ``clip_grad_norm_`` calls; it has switched gradients off already."""
        former, original = getattr(clip_grad, name), wrapped_function(getattr(clip_grad, name)).cell_contents
        setattr(clip_grad, name, around(original))
        session.at_close.append(functools.partial(setattr, clip_grad, name, former))

    def patch_inside(wrapper: Callable[..., Any], around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the function inside its wrapper: a script that has imported the name holds the wrapper itself."""
        cell = wrapped_function(wrapper)
        original = cell.cell_contents
        cell.cell_contents = around(original)
        session.at_close.append(functools.partial(setattr, cell, "cell_contents", original))

    patch_inside(clip_grad.clip_grad_value_, clipping.clamping)
    if not hasattr(clip_grad, _MEASURE) or not hasattr(clip_grad, _SCALE):
        patch_inside(clip_grad.clip_grad_norm_, clipping.clipping)
        return
    measure, scale = getattr(clip_grad, _MEASURE), getattr(clip_grad, _SCALE)
    patch(_MEASURE, clipping.measuring)
    patch(_SCALE, clipping.scaling)
    patch_inside(measure, clipping.totalling)
    patch_inside(scale, clipping.scaling_by)


def wrapped_function(wrapper: Callable[..., Any]) -> types.CellType:
    """Return the closure cell in which a wrapper made with ``functools.wraps`` keeps its function.

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
    """The arguments of the last norm measurement, by which this thread scales next."""

    norm_type: float = 2.0
    error_if_nonfinite: bool = False


class _Clipping:
    outlives_regrouping = True

    def __init__(self, session: Session) -> None:
        # Weak, since PyTorch's functions keep this object.
        self._session = weakref.ref(session)
        self._measured = _Measured()
        self._said = False

    def measuring(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Record the kind of norm; the check that it is finite follows when it is known."""

        @functools.wraps(original)
        def measure(
            tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
        ) -> torch.Tensor:
            __tracebackhide__ = True  # reports name the caller
            self._measured.norm_type, self._measured.error_if_nonfinite = norm_type, error_if_nonfinite
            made: torch.Tensor = original(tensors, norm_type, False, foreach)
            return made

        return measure

    def scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Scale by the norm of the whole gradient, which the caller of PyTorch's function gets back too."""

        @functools.wraps(original)
        def scale(parameters: Any, max_norm: Any, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
            __tracebackhide__ = True  # reports name the caller
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
        """Measure and scale gradients, for a PyTorch that does both in one function."""

        @functools.wraps(original)
        def clip(
            parameters: Any,
            max_norm: Any,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Any:
            __tracebackhide__ = True  # reports name the caller
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            norm = self._clipped(parameters, float(max_norm), norm_type)
            if norm is None:
                return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
            if error_if_nonfinite:
                _require_finite(float(norm), norm_type)
            return norm.float()

        return clip

    def totalling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the norm of tensors that are gradients or parameters of a wrapped model over all ranks."""

        @functools.wraps(original)
        def total(
            tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
        ) -> torch.Tensor:
            __tracebackhide__ = True  # reports name the caller
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            norm = self._total(tensors, float(norm_type))
            if norm is None:
                unchanged: torch.Tensor = original(tensors, norm_type, error_if_nonfinite, foreach)
                return unchanged
            if error_if_nonfinite:
                _require_finite(float(norm), norm_type)
            is_narrow = bool(tensors) and all(tensor.dtype is not torch.float64 for tensor in tensors)
            return norm.float() if is_narrow else norm

        return total

    def scaling_by(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Scale by a norm that the script has, wherever the gradients lie."""

        @functools.wraps(original)
        def scale(parameters: Any, max_norm: Any, total_norm: Any, foreach: bool | None = None) -> None:
            __tracebackhide__ = True  # reports name the caller
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            model, optimizer = self._owner(parameters)
            session = self._session()
            if model is None or session is None or optimizer is None:  # then gradients lie on the parameters
                original(parameters, max_norm, total_norm, foreach)
                return
            norm = torch.as_tensor(total_norm, dtype=torch.float64, device=session.ranks.device)
            optimizer.scale_on_device(float(max_norm), norm, among=parameters)

        return scale

    def clamping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Clamp the gradients that the optimizer will see: without the loss scale, and in shards."""

        @functools.wraps(original)
        def clamp(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
            __tracebackhide__ = True  # reports name the caller
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _, optimizer = self._owner(parameters)
            if optimizer is None:
                original(parameters, clip_value, foreach)
            else:
                optimizer.clamp_on_device(float(clip_value), among=parameters)

        return clamp

    def _owner(self, parameters: list[nn.Parameter]) -> tuple[TrainedModel | None, TrainedOptimizer | None]:
        """Return the wrapped model that has the parameters, and the wrapped optimizer that updates them.

        Either is None if there is not exactly one.
        """
        session = self._session()
        if session is None:
            return None, None
        wanted = {id(parameter) for parameter in parameters}
        models = [model for model in session.models if wanted & _own(model)]
        if not models:
            return None, None
        # First, since accumulated gradients are of this replica's data only until they are reduced.
        reduce_accumulated(session, parameters)
        optimizers = [optimizer for optimizer in session.optimizers if wanted & _updated(optimizer)]
        known = _own(models[0]).union(*map(_updated, optimizers))
        if len(models) > 1 or not wanted <= known:
            self._warn("parameters of several models, or of none, at once")
            return None, None
        if len(optimizers) == 1:
            return models[0], optimizers[0]
        shards = models[0].optimizer_shards or {}
        has_shards = any(shard is not None for shard in shards.values())
        if has_shards:
            self._warn("parameters whose gradients an optimizer has that was not wrapped in smp.DistributedOptimizer")
            return None, None
        return models[0], None

    def _total(self, tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        """Return the norm over all ranks; None if PyTorch's own result is right, or the best available."""
        session = self._session()
        if session is None or not session.models:
            return None
        weights = _weights_by_id(session)
        keys = list(map(id, tensors))
        if keys and weights.keys() >= set(keys):
            return self._total_of_weights(session, [weights[key] for key in keys], norm_type)
        by_gradient, trained = {}, 0
        for parameter in weights.values():
            gradient = get_gradient(parameter)
            if gradient is not None:
                by_gradient[id(gradient)] = parameter
                trained += 1
        if not by_gradient.keys() >= set(keys):
            return None
        parameters = [by_gradient[key] for key in keys]
        is_all = len(set(keys)) == trained
        if is_all and len(session.models) == 1:  # include those with gradients in shards, or on other stages
            parameters = list(weights.values())
        return self._total_of_gradients(session, parameters, norm_type, trained, is_all=is_all)

    def _total_of_weights(self, session: Session, weights: list[nn.Parameter], norm_type: float) -> torch.Tensor | None:
        model, _ = self._owner(weights)
        if model is None:
            return None
        return _norm_of_weights(session, model, weights, norm_type)

    def _total_of_gradients(
        self, session: Session, parameters: list[nn.Parameter], norm_type: float, trained: int, *, is_all: bool
    ) -> torch.Tensor | None:
        """Return the norm of the gradients of some parameters.

        Args:
            trained: the number of gradients that lie on parameters.
            is_all: whether the script passed all of these.
        """
        model, optimizer = self._owner(parameters)
        if model is None:
            return None
        # Scripts log the norms of single gradients on the ranks that have them, so no other stage can take part.
        is_one = not is_all and len(parameters) == 1
        is_some = not is_all and not is_one
        if is_some and model.sharded_state is not None:
            raise SMPOperationError(
                f"torch.nn.utils.get_total_norm got {len(parameters)} of the {trained} gradients that lie on parameters, but "
                "other gradients lie in shards, and which of them are meant is not known; give it the gradients of all "
                "parameters, or use optimizer.clip_master_grads(max_norm, among=parameters), which returns their norm",
                code="SMP304",
            )
        if optimizer is not None and not is_one:
            return optimizer.norm_on_device(norm_type, among=parameters)
        norms = WholeNorms(session.ranks, model, (), lambda: session.records)
        pairs: _Pairs = [(p, p.grad) for p in parameters if p.grad is not None]
        split = norms.split_parameters().intersection(map(id, parameters))
        return norms.total(pairs, split, norm_type, all_stages=not is_one)

    def _clipped(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Clip the gradients of a wrapped model; None if PyTorch's own way is right, or nothing better is known."""
        session = self._session()
        model, optimizer = self._owner(parameters)
        if session is None or model is None:
            return None
        if optimizer is not None:
            return optimizer.clip_on_device(max_norm, norm_type, among=parameters)
        return _clip_alone(session, model, parameters, max_norm, norm_type)

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
            "scale by it all the same",
            code="SMP304",
        )


def _own(model: TrainedModel) -> set[int]:
    return {id(record.parameter) for record in model.registry}


def _updated(optimizer: TrainedOptimizer) -> set[int]:
    updated: set[int] = set()
    for group in optimizer.original_groups():
        updated.update(map(id, group))
    return updated


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


@torch.no_grad()
def _weights_by_id(session: Session) -> dict[int, nn.Parameter]:
    weights: dict[int, nn.Parameter] = {}
    for model in session.models:
        weights.update({id(record.parameter): record.parameter for record in model.registry})
    return weights


def _norm_of_weights(
    session: Session, model: TrainedModel, parameters: list[nn.Parameter], norm_type: float
) -> torch.Tensor:
    """Measure parameters themselves, each element once."""
    known = model.optimizer_shards or {}
    state = model.sharded_state
    shards = [shard for shard in known.values() if shard is not None]
    norms = WholeNorms(session.ranks, model, shards, lambda: session.records)
    pairs: _Pairs = []
    for parameter in dict.fromkeys(parameters):
        shard = known.get(parameter)
        is_whole = parameter not in known or (shard is not None and state is None)
        if is_whole:
            pairs.append((parameter, parameter.detach()))
        elif shard is not None and state is not None and state.counts(shard):
            pairs.append((parameter, shard.stored))
    split = norms.split_parameters().intersection(map(id, parameters))
    return norms.total(pairs, split, norm_type)
