"""``DistributedOptimizer``: the wrapper around the user's optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_config.whereabouts import OPTIMIZER, here
from smp_runtime.errors import SMPAttributeError, SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.optim.early_state import complete_state, is_without_values
from smp_runtime.optim.fused import TakesNorms
from smp_runtime.optim.fused_kernels import fused_where_open
from smp_runtime.optim.gradient_norms import WholeNorms, scale_down
from smp_runtime.optim.loss_scaling import DYNAMIC_DEFAULTS, make_loss_scaler
from smp_runtime.optim.master_gradients import MasterGradients
from smp_runtime.optim.state_dict import SavedOptimizer
from smp_runtime.parameters.optimizer_shards import store_all
from smp_runtime.parameters.registry import Successors

if TYPE_CHECKING:
    from smp_runtime.job.trained import TrainedModel
    from smp_runtime.parameters.optimizer_shards import OptimizerShard

logger = logging.getLogger("smp")

#: In names of optimizers whose update of one element depends on others of its tensor, which may lie on another rank.
_NEED_WHOLE_TENSORS = ("adafactor", "came", "lamb", "lars", "lbfgs", "muon", "novograd", "shampoo", "soap")


def _inner(name: str, meaning: str) -> property:
    """An attribute that is read and set on the inner optimizer."""
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

    #: Read by ``accelerate``, which must not wrap this class again.
    _is_accelerate_prepared = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **loss_args: Any,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SMPUserError(
                f"smp.DistributedOptimizer wraps a torch.optim.Optimizer, but got a {type(optimizer).__name__}"
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise SMPUserError("this optimizer is already wrapped in smp.DistributedOptimizer; wrap it once")
        self.loss_scale_args = {**DYNAMIC_DEFAULTS, **(dynamic_loss_args or {}), **loss_args}
        scaler = make_loss_scaler(static_loss_scale, dynamic_loss_scale, {**(dynamic_loss_args or {}), **loss_args})
        self._session = sessions.current()
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
        self._norms = self._norms_for(None)
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

    param_groups: Any = _inner("param_groups", "The groups of the inner optimizer.")
    state: Any = _inner("state", "The state of the inner optimizer.")
    defaults: Any = _inner("defaults", "The defaults of the inner optimizer.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)
        if self._model is not None:
            self._replace(self.optimizer.param_groups[-1])

    def bind(self, model: TrainedModel) -> None:
        """Update what ``model`` keeps for updating, instead of its parameters; called once both are wrapped.

        With pipeline parallelism it is called again when the model has been partitioned. All stages then bind an optimizer
        that has any of the model's parameters, or none does: later they communicate.
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
        if isinstance(self.optimizer, TakesNorms) and self._ranks.size(Group.TP) > 1 and mine & all_stages:
            self.optimizer.use_norms(self._norms)
        if not mine & (all_stages if is_staged else (model.optimizer_shards or {}).keys()):
            return
        if self._model is not None:
            raise SMPUserError(
                "one optimizer has parameters of two wrapped models that train in half precision or with sharded state; give "
                "each model an optimizer of its own"
            )
        others = [o for o in self._session.optimizers if o is not self and o.updates(model)]
        if others and (model.precision.is_half or model.sharded_state is not None):
            raise SMPUserError(
                "a second optimizer was wrapped for a model that trains in half precision or with sharded state; use one "
                "optimizer with several parameter groups"
            )
        if model.sharded_state is not None:
            self._check_kind("shard_optimizer_state" if model.shards is None else "sharding")
        self._norms = self._norms_for(model)
        if isinstance(self.optimizer, TakesNorms) and (is_staged or model.sharded_state is not None):
            self.optimizer.use_norms(self._norms)
        self._model = model
        for group in self.optimizer.param_groups:
            self._replace(group)

    def release(self) -> None:
        """Let go of parameters and state, for a model that is laid out anew; :meth:`take_over` comes next.

        Groups keep their settings, and stay the same objects, which schedulers hold.
        """
        self._model = None
        self._originals = []
        self._optimizer_shards = []
        self._masters = MasterGradients(self._ranks, self._optimizer_shards)
        self._norms = self._norms_for(None)
        if isinstance(self.optimizer, TakesNorms):
            self.optimizer.use_norms(self._norms)
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
        """An optimizer of the unwrapped model updates what tensor parallelism has put in place of its parameters."""
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

    def _check_kind(self, why: str) -> None:
        """Refuse an optimizer that is known to need whole tensors, and warn of one that is not known."""
        kind = type(self.optimizer)
        if isinstance(self.optimizer, TakesNorms):
            return
        if any(word in base.__name__.lower() for base in kind.__mro__ for word in _NEED_WHOLE_TENSORS):
            raise SMPUserError(
                f"{kind.__name__} looks at whole tensors, but with {why} a rank updates parts of them; use an element-wise "
                "optimizer such as AdamW, or FusedLAMB, FusedLANS, FusedLARS or FusedNovoGrad of smp.optimizers, or turn it off"
            )
        home = (getattr(kind.step, "__module__", None) or "").partition(".")[0]
        if home not in ("torch", "smp_runtime") and self._ranks.rank == 0:
            logger.warning(
                "with %s a rank updates parts of tensors: %s of %s trains rightly only if its update of every element depends on "
                "that element alone (no norm, no matrix of a whole tensor); if not, use AdamW or smp.optimizers.FusedLAMB",
                why,
                kind.__name__,
                kind.__module__,
            )

    def updates(self, model: TrainedModel) -> bool:
        """Whether this optimizer updates shards of ``model``."""
        return self._model is model

    def drop_gradients_of(self, model: TrainedModel) -> None:
        """Forget gradients that were brought to the optimizer shards of ``model`` but not used."""
        if self._model is model:
            self._drop_gradients()

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
            group["params"].append(shard.optimized)
            if former is not None and not is_without_values(former):
                updated = shard.optimized
                self.optimizer.state[updated] = {
                    key: shard.part_of(v).to(updated.device, updated.dtype, copy=True)
                    if _is_shaped(v, parameter)
                    else v
                    for key, v in former.items()
                }

    # -- the update ------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with before backward."""
        return self.loss_scaler.scale

    @property
    def gradient_norm(self) -> float | None:
        """Of the whole gradient, as the last clipping has measured it; None where nothing was clipped."""
        return self._global_grad_norm

    @property
    def step_was_skipped(self) -> bool:
        """For ``accelerate``: whether the last step was skipped."""
        return self.overflow

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients that the step has reduced; skipped on every rank after an overflow."""
        notes = here()
        with self._session.ranks.control.doing("optimizer.step"), notes.within(OPTIMIZER):
            notes.update()
            result = self._update(closure)
        for heard in self._session.after_update:
            heard(self)
        return result

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        if self._model is None:
            self._tell_before()
            result: Any
            if closure is not None:  # gradients come inside
                result = self.optimizer.step(closure)
            else:
                with fused_where_open(self.optimizer):
                    result = self.optimizer.step()
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
            with fused_where_open(self.optimizer):
                self.optimizer.step()
            self._store()
        self.loss_scaler.update(self.overflow)
        self._drop_gradients()
        self._session.progress.optimizer_stepped()
        return result

    def _tell_before(self) -> None:
        for heard in self._session.before_update:
            heard(self)

    def update_master_grads(self) -> None:
        """Bring the reduced gradients to what is updated: in float32, without the loss scale, checked for overflow.

        Again only for what backward has added to since.

        Raises:
            SMPUserError: it was added, with the loss scale, to sharded gradients that were divided by it already.
        """
        if self._model is None:
            return
        overflow = self._masters.bring(self.loss_scale if self._ranks.cfg.fp16 else None)
        if overflow is not None and self._ranks.cfg.fp16:
            self.overflow = overflow

    def _store(self) -> None:
        store_all(self._optimizer_shards)
        if self._model is not None and self._model.sharded_state is not None:
            self._model.sharded_state.gather_parameters()

    def _drop_gradients(self) -> None:
        self._masters.drop()
        if self._model is not None and self._model.sharded_state is not None:
            self._model.sharded_state.clear_gradients()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients of the parameters and of what is updated instead of them.

        Args:
            set_to_none: whether to remove gradients or to write zeros; default: what the inner optimizer does, removing.
        """
        if set_to_none is None:
            set_to_none = bool(getattr(self.optimizer, "set_grad_none", True))
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if self._model is not None:
            for parameter in self._parameters():
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
            self._drop_gradients()

    @torch.no_grad()
    def clip_master_grads(
        self, max_norm: float, norm_type: float = 2.0, among: Iterable[nn.Parameter] | None = None
    ) -> float:
        """Scale the gradients down to a norm of at most ``max_norm``; call it on every rank, before :meth:`step`.

        What ``torch.nn.utils.clip_grad_norm_`` does in one process, with any kind of parallelism and in any precision.

        Args:
            max_norm: of the whole gradient.
            norm_type: ``p`` of the p-norm; ``float("inf")`` for the greatest element.
            among: the parameters whose gradients are measured and scaled, by default all of this optimizer.

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
        """:meth:`clip_master_grads`, whose norm stays on the device: the host does not wait for it."""
        self.update_master_grads()
        if self.overflow:
            return torch.full((), float("inf"), dtype=torch.float64, device=self._ranks.device)
        wanted = {id(parameter) for parameter in (self._parameters() if among is None else among)}
        state = self._model.sharded_state if self._model is not None else None
        whole = [(p, p.grad) for p in self._updated_themselves() if p.grad is not None and id(p) in wanted]
        shards = [shard for shard in self._optimizer_shards if id(shard.parameter) in wanted]
        parts = [
            (shard.parameter, shard.optimized.grad)
            for shard in shards
            if shard.optimized.grad is not None and (state is None or state.counts(shard))
        ]
        split = self._norms.split_parameters().intersection(map(id, self._parameters())) & wanted
        norm = self._norm = self._norms.total([*whole, *parts], split, norm_type)
        factor = scale_down([gradient for _, gradient in whole], max_norm, norm)
        if factor is not None:
            self._masters.scale_down(factor, shards)
        return norm

    @property
    def _global_grad_norm(self) -> float | None:
        """The norm of the last gradient that was clipped, before that."""
        return None if self._norm is None else float(self._norm)

    def _updated_themselves(self) -> list[nn.Parameter]:
        """Parameters on this rank that are updated themselves, not through optimizer shards."""
        optimizer_shards = self._model.optimizer_shards or {} if self._model is not None else {}
        return [parameter for parameter in self._parameters() if parameter not in optimizer_shards]

    # -- what scripts read under sharded data parallelism; without it these attributes do not exist ----------------

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's trained parameters, by parameter group."""
        self._require_shards("fp16_groups")
        return self.original_groups()

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """By parameter group, a flat copy of what this rank updates of it, in float32."""
        self._require_shards("fp32_partitioned_groups_flat")
        updated = {shard.parameter: shard.optimized.detach() for shard in self._optimizer_shards}
        parts = [[updated[p].reshape(-1).float() for p in group if p in updated] for group in self._originals]
        return [torch.cat(found) if found else torch.empty(0, device=self._ranks.device) for found in parts]

    @property
    def ds_param_shard_group(self) -> torch.distributed.ProcessGroup:
        """The ranks that share one copy of the parameters."""
        self._require_shards("ds_param_shard_group")
        return self._ranks.process_group(Group.SHARD)

    def _require_shards(self, name: str) -> None:
        if self._model is None or self._model.shards is None:
            raise SMPAttributeError(f"{name} exists under sharded data parallelism only")

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def _is_shaped(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
