"""``DistributedOptimizer``: the wrapper around the user's optimizer."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_config.errors import kind_of
from smp_records.rank_record import OPTIMIZER, current_record
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.optim.accumulated import reduce_accumulated
from smp_runtime.optim.fused import TakesNorms
from smp_runtime.optim.gradient_norms import WholeNorms, clamp, scale_down
from smp_runtime.optim.kinds.early_state import complete_state, is_without_values
from smp_runtime.optim.kinds.inner_step import step_inner, whole_matrices
from smp_runtime.optim.kinds.known_kinds import check_kind, check_parts, require_one_optimizer
from smp_runtime.optim.loss_scaling import DYNAMIC_DEFAULTS, make_loss_scaler
from smp_runtime.optim.master_gradients import MasterGradients
from smp_runtime.optim.master_writes import MasterWrites
from smp_runtime.optim.matrices.exchange import TakesMatrices, WholeMatrices
from smp_runtime.optim.other_gradients import OtherGradients
from smp_runtime.optim.state_dict import SavedOptimizer
from smp_runtime.parameters.optimizer_shards import store_all
from smp_runtime.parameters.registry import Successors
from smp_runtime.tensors.parameter_attributes import get_gradient, set_gradient

if TYPE_CHECKING:
    from smp_runtime.job.trained import TrainedModel
    from smp_runtime.parameters.optimizer_shards import OptimizerShard

logger = logging.getLogger("smp")


def _inner(name: str, meaning: str) -> property:
    """Return a property that reads and sets an attribute of the inner optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
        doc=meaning,
    )


class DistributedOptimizer(SavedOptimizer):
    """A ``torch.optim.Optimizer`` that steps ``optimizer``; schedulers and closures work on it.

    In half precision training the inner optimizer updates float32 copies of the weights, with sharded state the
    parts that this rank owns; its parameter groups then hold these.

    Args:
        optimizer: created from the parameters of the wrapped or of the unwrapped model.
        static_loss_scale: for fp16; None when the dynamic one is used.
        dynamic_loss_scale: for fp16.
        dynamic_loss_args: a dictionary of init_scale, scale_factor, scale_window, min_scale,
            delayed_shift, consecutive_hysteresis.
        loss_args: the same as keywords.

    Raises:
        SMPUserError: (a ``ValueError``) not an optimizer, or an unknown loss scaling argument.

    Example:
        >>> optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    """

    _is_accelerate_prepared = True  # read by ``accelerate``, which must not wrap this class again

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **loss_args: Any,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SMPUserError(f"expected a torch.optim.Optimizer, but got {kind_of(optimizer)}", code="SMP304")
        if isinstance(optimizer, DistributedOptimizer):
            raise SMPUserError("this optimizer is already wrapped in DistributedOptimizer; wrap it once", code="SMP304")
        self.loss_scale_args = {**DYNAMIC_DEFAULTS, **(dynamic_loss_args or {}), **loss_args}
        scaler = make_loss_scaler(static_loss_scale, dynamic_loss_scale, {**(dynamic_loss_args or {}), **loss_args})
        self._session = sessions.current_session()
        self._ranks = self._session.ranks
        # Only float16 overflows; other types train with a scale of 1.
        self.loss_scaler = scaler if self._ranks.cfg.fp16 else make_loss_scaler(1.0, False, {})
        self.optimizer = optimizer
        self.dynamic_loss_scale = dynamic_loss_scale
        #: Whether the last step was skipped because of an overflow.
        self.overflow = False
        self._norm: torch.Tensor | None = None
        self._model: TrainedModel | None = None
        self._optimizer_shards: list[OptimizerShard] = []
        self._originals: list[list[nn.Parameter]] = []
        self._masters = MasterGradients(self._ranks, self._optimizer_shards)
        self._writes = MasterWrites(self.update_master_grads)
        self._norms = self._norms_for(None)
        self._matrices: WholeMatrices | None = None
        #: Whether its constructor makes state, which some then need from their first step on.
        self._has_early_state = bool(optimizer.state)
        # The base class's own constructor would build groups and state of its own; only its hooks are wanted.
        super().__setstate__({})
        self._follow_replaced()
        for model in self._session.models:
            self.bind(model)
        self._complete_state()
        self._session.adopt_optimizer(self)

    # -- the inner optimizer ---------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> Any:
        """Return the groups of the inner optimizer."""
        if self._model is not None:  # a script that reads the groups must find its earlier writes to the model
            self._model.adopt_writes()
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    state: Any = _inner("state", "The state of the inner optimizer.")
    defaults: Any = _inner("defaults", "The defaults of the inner optimizer.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)
        if self._model is not None:
            self._replace(self.optimizer.param_groups[-1])

    def bind(self, model: TrainedModel) -> None:
        """Update the optimizer shards of ``model`` instead of its parameters; called once both are wrapped.

        With pipeline parallelism it is called again after the model has been partitioned. Either all stages then bind an
        optimizer that has any of the model's parameters, or none does: later they communicate.
        """
        if model is not self._model:
            self._follow_replaced()
            self._bind(model)
        self._complete_state()

    def _complete_state(self) -> None:
        if self._has_early_state:
            complete_state(self.optimizer)

    def _bind(self, model: TrainedModel) -> None:
        mine = {p for group in self.optimizer.param_groups for p in group["params"]}
        all_stages = {record.parameter for record in model.registry}
        is_staged = model.assignment is not None
        is_sharded = model.sharded_state is not None
        if mine & all_stages:
            found = whole_matrices(self.original_groups, model, self._session)
            self._give_whole(found, norms=self._ranks.size(Group.TP) > 1)
            check_parts(self.optimizer, model, mine, self._ranks)
        bound = all_stages if is_staged else (model.optimizer_shards or {}).keys()
        if not mine & bound:
            return
        others = [other for other in self._session.optimizers if other is not self and other.updates(model)]
        require_one_optimizer(model, has_model=self._model is not None, has_others=bool(others))
        if is_sharded:
            setting = "shard_optimizer_state" if model.shards is None else "sharding"
            check_kind(self.optimizer, setting, self._ranks)
        self._norms = self._norms_for(model)
        self._give_whole(self._matrices, norms=is_staged or is_sharded)
        self._model = model
        for group in self.optimizer.param_groups:
            self._replace(group)

    def _give_whole(self, matrices: WholeMatrices | None, *, norms: bool) -> None:
        """Give the inner optimizer what it takes of whole tensors; norms only if ``norms``."""
        self._matrices = matrices
        if norms and isinstance(self.optimizer, TakesNorms):
            self.optimizer.use_norms(self._norms)
        if isinstance(self.optimizer, TakesMatrices):
            self.optimizer.use_matrices(matrices)

    def release(self) -> None:
        """Release parameters and state, for a model that is laid out anew; :meth:`take_over` comes next.

        Groups keep their settings, and stay the same objects, since schedulers hold them.
        """
        self._model = None
        self._originals = []
        self._optimizer_shards = []
        self._masters = MasterGradients(self._ranks, self._optimizer_shards)
        self._writes = MasterWrites(self.update_master_grads)
        self._norms = self._norms_for(None)
        self._give_whole(None, norms=True)
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []

    def take_over(self, model: TrainedModel, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Update the parameters of a model that was laid out anew.

        Args:
            groups: its parameters by group.
        """
        for group, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = list(parameters)
            group.pop("param_names", None)  # of those that it had
        self.bind(model)

    def _follow_replaced(self) -> None:
        """Update the parameters that tensor parallelism has put in place of the unwrapped model's."""
        successors = self._ranks.kept(Successors)
        if successors is None:
            return
        for group in self.optimizer.param_groups:
            former = group["params"]
            group["params"] = successors.follow(former)
            for parameter in {*former} - {*group["params"]}:
                self.optimizer.state.pop(parameter, None)

    def _norms_for(self, model: TrainedModel | None) -> WholeNorms:
        session = self._session  # and not this object, which the inner optimizer would hold then
        return WholeNorms(self._ranks, model, self._optimizer_shards, lambda: session.records)

    def updates(self, model: TrainedModel) -> bool:
        """Return whether this optimizer updates shards of ``model``."""
        return self._model is model

    def drop_gradients_of(self, model: TrainedModel, *, to_zero: bool) -> None:
        """Forget gradients that were brought to the optimizer shards of ``model`` but not used, or set them to zero."""
        if self._model is model:
            self._drop_gradients(to_zero=to_zero)

    def _replace(self, group: dict[str, Any]) -> None:
        """Put this rank's optimizer shards in place of a group's parameters."""
        if self._model is None:
            return
        originals, optimizer_shards = list(group["params"]), self._model.optimizer_shards or {}
        self._originals.append(originals)
        group["params"] = []
        for parameter in originals:
            if parameter not in optimizer_shards:
                group["params"].append(parameter)
                continue
            former = self.optimizer.state.pop(parameter, None)
            shard = optimizer_shards[parameter]
            if shard is None:
                continue
            self._optimizer_shards.append(shard)
            self._writes.watch(shard)
            group["params"].append(shard.optimized)
            if former is not None and not is_without_values(former):
                updated = shard.optimized
                self.optimizer.state[updated] = {
                    key: shard.part_of(v).to(updated.device, updated.dtype, copy=True)
                    if isinstance(v, torch.Tensor) and v.shape == parameter.shape
                    else v
                    for key, v in former.items()
                }

    # -- the update ------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients that the step has reduced; skipped on every rank after an overflow."""
        notes = current_record()
        with self._session.ranks.control.doing("optimizer.step"), notes.within(OPTIMIZER):
            notes.update()
            for model in self._session.models:
                model.check_parameters()
            result = self._update(closure)
        for heard in self._session.after_update:
            heard(self)
        return result

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        if self._model is None:
            self._reduce_accumulated()
            self._tell_before()
            result = step_inner(self.optimizer, self._matrices, closure and self._reducing_after(closure))
            self._session.progress.optimizer_stepped()
            return result
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.update_master_grads()
        self._tell_before()
        if self._model.shards is not None:
            self.clip_on_device(self._model.shards.clipping)
        if not self.overflow:
            if self._model.sharded_state is not None:
                self._model.sharded_state.settle()
            with self._writes.ignored():
                step_inner(self.optimizer, self._matrices)
            self._store()
        self.loss_scaler.update(self.overflow)
        self._drop_gradients()
        self._session.progress.optimizer_stepped()
        return result

    def _reduce_accumulated(self) -> None:
        reduce_accumulated(self._session, self._parameters())

    def _reducing_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that calls ``closure`` and then reduces its gradients."""

        def reducing() -> Any:
            result = closure()
            self._reduce_accumulated()
            return result

        return reducing

    def _tell_before(self) -> None:
        for heard in self._session.before_update:
            heard(self)

    def update_master_grads(self) -> None:
        """Bring the reduced gradients to the optimizer shards: in float32, without the loss scale, checked for overflow.

        A later call brings only the gradients that backward has added to since.

        Raises:
            SMPUserError: it was added, with the loss scale, to sharded gradients that were divided by it already.
        """
        self._reduce_accumulated()
        if self._model is None:
            return
        self._model.adopt_writes()
        edits_only = self._model.sharded_state is not None and self._masters.are_current
        if self._model.sharded_state is not None:
            self._model.sharded_state.complete_gradients()
        with self._writes.ignored():
            scale = self.loss_scale if self._ranks.cfg.fp16 else None
            overflow = self._masters.bring(scale, edits_only=edits_only)
        if overflow is not None and self._ranks.cfg.fp16:
            self.overflow = overflow

    def store_writes(self) -> bool:
        """Write what a script has changed of the tensors in the parameter groups into the model.

        Returns:
            Whether replicas must gather parameters: shards of them have changed.
        """
        has_written = self._writes.store()
        is_sharded = self._model is not None and self._model.sharded_state is not None
        return has_written and is_sharded

    def _call_inner(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the inner optimizer that this class lacks; weights that it has moved reach the model."""
        model = self._model
        if model is None:
            return method(*args, **kwargs)
        model.adopt_writes()
        result = method(*args, **kwargs)
        has_moved = self._writes.store()
        is_agreed = method.__name__ in ("train", "eval")  # every rank calls these, also one without a shard
        if model.sharded_state is not None and (has_moved or is_agreed):
            model.sharded_state.gather_parameters()
        return result

    def _store(self) -> None:
        store_all(self._optimizer_shards)
        self._writes.note()
        if self._model is not None and self._model.sharded_state is not None:
            self._model.sharded_state.gather_parameters()

    def _drop_gradients(self, *, to_zero: bool = False) -> None:
        with self._writes.ignored():
            self._masters.drop()
        if self._model is not None and self._model.sharded_state is not None:
            self._model.sharded_state.clear_gradients(to_zero=to_zero)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients of the parameters and of what is updated instead of them.

        Args:
            set_to_none: whether to remove gradients or to write zeros; default: what the inner optimizer does, removing.
        """
        if set_to_none is None:
            set_to_none = bool(getattr(self.optimizer, "set_grad_none", True))
        if self._model is not None:
            for parameter in self._parameters():
                gradient = get_gradient(parameter)
                if set_to_none:
                    set_gradient(parameter, None)
                elif gradient is not None:
                    gradient.zero_()
            self._drop_gradients(to_zero=not set_to_none)
        with self._writes.ignored():
            self.optimizer.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def clip_master_grads(
        self, max_norm: float, norm_type: float = 2.0, among: Iterable[nn.Parameter] | None = None
    ) -> float:
        """Scale the gradients down to a norm of at most ``max_norm``; call it on every rank, before :meth:`step`.

        It equals ``torch.nn.utils.clip_grad_norm_`` in one process, with any kind of parallelism and in any precision.

        Args:
            max_norm: of the whole gradient.
            norm_type: ``p`` of the p-norm; ``float("inf")`` for the greatest element.
            among: the parameters to measure and scale, by default all of this optimizer.

        Returns:
            The norm before, the same on all ranks that train one replica; infinity after an overflow of fp16.

        Raises:
            SMPUserError: ``norm_type`` is not above 0.
        """
        return float(self.clip_on_device(max_norm, norm_type, among))

    @torch.no_grad()
    def clip_on_device(
        self, max_norm: float, norm_type: float = 2.0, among: Iterable[nn.Parameter] | None = None
    ) -> torch.Tensor:
        """Clip as :meth:`clip_master_grads`, but return the norm on the device; the host does not wait for it."""
        among = None if among is None else list(among)
        norm = self.norm_on_device(norm_type, among)
        if not self.overflow:
            self._norm = norm
            self._scale_down(max_norm, norm, among)
        return norm

    @torch.no_grad()
    def norm_on_device(self, norm_type: float = 2.0, among: Iterable[nn.Parameter] | None = None) -> torch.Tensor:
        """Return the norm of the whole gradient, or of that of some parameters, in float64."""
        self.update_master_grads()
        if self.overflow:
            return torch.full((), float("inf"), dtype=torch.float64, device=self._ranks.device)
        whole, shards = self._gradients_of(among)
        state = self._model.sharded_state if self._model is not None else None
        parts = [
            (shard.parameter, shard.optimized.grad)
            for shard in shards
            if shard.optimized.grad is not None and (state is None or state.counts(shard))
        ]
        wanted = {id(parameter) for parameter in (self._parameters() if among is None else among)}
        pairs = [*whole, *parts, *self._others(among).pairs()]
        return self._norms.total(pairs, self._norms.split_parameters() & wanted, norm_type)

    @torch.no_grad()
    def scale_on_device(self, max_norm: float, norm: torch.Tensor, among: Iterable[nn.Parameter] | None = None) -> None:
        """Scale gradients of a known norm down to ``max_norm``, all of them or those of some parameters."""
        self.update_master_grads()
        if not self.overflow:
            self._scale_down(max_norm, norm, among)

    def _scale_down(self, max_norm: float, norm: torch.Tensor, among: Iterable[nn.Parameter] | None) -> None:
        whole, shards = self._gradients_of(among)
        factor = scale_down([gradient for _, gradient in whole], max_norm, norm)
        if factor is not None:
            self._others(among).multiply(factor)
            self._masters.scale_down(factor, shards)  # last: it notes versions, which gradients in one bucket share

    @torch.no_grad()
    def clamp_on_device(self, limit: float, among: Iterable[nn.Parameter] | None = None) -> None:
        """Bring every element of the gradients between ``-limit`` and ``limit``."""
        self.update_master_grads()
        if self.overflow:
            return
        whole, shards = self._gradients_of(among)
        clamp([gradient for _, gradient in whole], limit)
        others = self._others(among)
        others.clamp(limit)
        self._masters.clamp(limit, shards, others.scale)  # last, for the same reason

    def _others(self, among: Iterable[nn.Parameter] | None) -> OtherGradients:
        scale = self.loss_scale if self._ranks.cfg.fp16 else 1.0
        return OtherGradients(self._model, self._parameters(), among, scale)

    def _gradients_of(
        self, among: Iterable[nn.Parameter] | None
    ) -> tuple[list[tuple[nn.Parameter, torch.Tensor]], list[OptimizerShard]]:
        """Return the parameters that are updated directly, with their gradients, and the optimizer shards, of ``among`` or all."""
        parameters = self._parameters() if among is None else among
        wanted = set(map(id, parameters))
        whole = [(p, p.grad) for p in self._updated_themselves() if p.grad is not None and id(p) in wanted]
        shards = [shard for shard in self._optimizer_shards if id(shard.parameter) in wanted]
        return whole, shards

    @property
    def _global_grad_norm(self) -> float | None:
        """Return the norm of the last clipped gradient, measured before it was clipped."""
        return None if self._norm is None else float(self._norm)

    def _updated_themselves(self) -> list[nn.Parameter]:
        """Return the parameters on this rank that are updated directly, not through optimizer shards."""
        model = self._model
        shards = {} if model is None else model.optimizer_shards or {}
        return [parameter for parameter in self._parameters() if parameter not in shards]

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(name)
        found = getattr(self.optimizer, name)
        return functools.partial(self._call_inner, found) if inspect.ismethod(found) else found
