"""``DistributedOptimizer``: the wrapper around the user's optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime import session as sessions
from smp_runtime.checkpoint.full_optimizer import HALF_KEY, copied, of_all_stages, own_parts, whole_values
from smp_runtime.errors import SMPUserError
from smp_runtime.loss_scaling import DYNAMIC_DEFAULTS, make_loss_scaler
from smp_runtime.optimizer_state import load_state, whole_state
from smp_runtime.pieces import Piece
from smp_runtime.sharding.attributes import ShardingAttributes
from smp_runtime.tensor_parallel.placement import part_of

if TYPE_CHECKING:
    from smp_runtime.model import DistributedModel

PARTIAL_KEY = "_smp_is_partial"
#: Marks a state that holds this rank's shard only.
SHARD_KEY = "_smp_is_shard"

logger = logging.getLogger("smp")

#: In names of optimizers whose update of one element depends on others of its tensor, which may lie on another rank.
_NEED_WHOLE_TENSORS = ("adafactor", "came", "lamb", "lars", "lbfgs", "muon", "novograd", "shampoo", "soap")


class DistributedOptimizer(ShardingAttributes, torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` that steps ``optimizer``; schedulers and closures work on it.

    In half precision training the inner optimizer updates float32 copies of the weights, with sharded state the
    parts that this rank owns; its parameter groups then hold these.

    Args:
        optimizer: created from the parameters of the wrapped or of the unwrapped model.
        static_loss_scale: for fp16; None when the dynamic one is used.
        dynamic_loss_scale: for fp16.
        dynamic_loss_args: a dictionary, or the same as keywords: init_scale, scale_factor, scale_window, min_scale,
            delayed_shift, consecutive_hysteresis.

    Raises:
        SMPUserError: (a ``ValueError``) not an optimizer, or an unknown loss scaling argument.
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
        # Only float16 overflows; other types train with a scale of 1.
        self.loss_scaler = scaler if self._session.cfg.fp16 else make_loss_scaler(1.0, False, {})
        self.optimizer = optimizer
        self.dynamic_loss_scale = dynamic_loss_scale
        #: Whether the last step was skipped because of an overflow.
        self.overflow = False
        self._global_grad_norm: float | None = None
        self._model: DistributedModel | None = None
        self._pieces: list[Piece] = []
        self._gradients_are_ready = False
        # The base class's own constructor would build groups and state of its own; only its hooks are wanted.
        super().__setstate__({})
        for model in self._session.models:
            self.bind(model)
        self._session.adopt_optimizer(self)

    # -- the inner optimizer ---------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the inner optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The state of the inner optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the inner optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)
        if self._model is not None:
            self._replace(self.optimizer.param_groups[-1])

    def bind(self, model: DistributedModel) -> None:
        """Update what ``model`` keeps for updating, instead of its parameters; called once both are wrapped."""
        if model is self._model or model.pieces is None:
            return
        owned = {p for group in self.optimizer.param_groups for p in group["params"]} & model.pieces.keys()
        if not owned:
            return
        if self._model is not None:
            raise SMPUserError(
                "one optimizer has parameters of two wrapped models that train in half precision or with sharded state; give "
                "each model an optimizer of its own"
            )
        others = [o for o in self._session.optimizers if o is not self and o.updates(model)]
        if others:
            raise SMPUserError(
                "a second optimizer was wrapped for a model that trains in half precision or with sharded state; use one "
                "optimizer with several parameter groups"
            )
        if model.sharded_state is not None:
            self._check_kind("shard_optimizer_state" if model.shards is None else "sharding")
            if hasattr(self.optimizer, "use_shards"):
                self.optimizer.use_shards(
                    model.sharded_state.sum_over_shards, len(model.sharded_state.pieces), self._session.device
                )
        self._model = model
        self._originals: list[list[nn.Parameter]] = []
        for group in self.optimizer.param_groups:
            self._replace(group)

    def _check_kind(self, why: str) -> None:
        """Refuse an optimizer that is known to need whole tensors, and warn of one that is not known."""
        kind = type(self.optimizer)
        if hasattr(self.optimizer, "use_shards"):
            return
        if any(word in base.__name__.lower() for base in kind.__mro__ for word in _NEED_WHOLE_TENSORS):
            raise SMPUserError(
                f"{kind.__name__} looks at whole tensors, but with {why} a rank updates parts of them; use an element-wise "
                "optimizer such as AdamW, or smp.optimizers.FusedLAMB or FusedNovoGrad, or turn it off"
            )
        home = (getattr(kind.step, "__module__", None) or "").partition(".")[0]
        if home not in ("torch", "smp_runtime") and self._session.rank == 0:
            logger.warning(
                "with %s a rank updates parts of tensors: %s of %s trains rightly only if its update of every element depends on "
                "that element alone (no norm, no matrix of a whole tensor); if not, use AdamW or smp.optimizers.FusedLAMB",
                why,
                kind.__name__,
                kind.__module__,
            )

    def updates(self, model: DistributedModel) -> bool:
        """Whether this optimizer updates pieces of ``model``."""
        return self._model is model

    def original_groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters by parameter group, as the script gave them, of all stages and ranks."""
        if self._model is not None:
            return [list(parameters) for parameters in self._originals]
        return [list(group["params"]) for group in self.optimizer.param_groups]

    def drop_gradients_of(self, model: DistributedModel) -> None:
        """Forget gradients that were brought to the pieces of ``model`` but not used."""
        if self._model is model:
            self._drop_gradients()

    def _replace(self, group: dict[str, Any]) -> None:
        """Put this rank's pieces in place of a group's parameters."""
        if self._model is None or self._model.pieces is None:
            return
        originals = list(group["params"])
        self._originals.append(originals)
        group["params"] = []
        for parameter in originals:
            if parameter not in self._model.pieces:
                group["params"].append(parameter)
                continue
            former = self.optimizer.state.pop(parameter, None)
            piece = self._model.pieces[parameter]
            if piece is None:
                continue
            self._pieces.append(piece)
            group["params"].append(piece.optimized)
            if former is not None:
                self.optimizer.state[piece.optimized] = {
                    key: _part(value, piece) if _is_shaped(value, parameter) else value for key, value in former.items()
                }

    # -- the update ------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with before backward."""
        return self.loss_scaler.scale

    @property
    def step_was_skipped(self) -> bool:
        """For ``accelerate``: whether the last step was skipped."""
        return self.overflow

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients that the step has reduced; skipped on every rank after an overflow."""
        if self._model is None:
            result = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
            self._session.progress.optimizer_stepped()
            return result
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.update_master_grads()
        if self._model.shards is not None:
            self.clip_master_grads(self._model.shards.options.clipping)
        if not self.overflow:
            self.optimizer.step()
            self._store()
        self.loss_scaler.update(self.overflow)
        self._drop_gradients()
        self._session.progress.optimizer_stepped()
        return result

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Bring the reduced gradients to what is updated: in float32, without the loss scale, checked for overflow."""
        if self._gradients_are_ready:
            return
        self._gradients_are_ready = True
        for piece in self._pieces:
            gradient = piece.gradient()
            if gradient is None:
                piece.optimized.grad = None
                continue
            # Copied in every case but one: unscaled float32 gradients of a shard belong to nobody else.
            piece.optimized.grad = gradient.to(piece.optimized.dtype).view(piece.optimized.shape)
        if self._session.cfg.fp16:
            self.overflow = self._unscale()

    def _unscale(self) -> bool:
        """Divide by the loss scale; returns whether any rank of the job has a gradient that is not finite."""
        gradients = [p.optimized.grad for p in self._pieces if p.optimized.grad is not None]
        device = self._session.device
        found = torch.zeros(1, device=device)
        if gradients:
            inverse = torch.full((1,), 1.0 / self.loss_scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        if self._session.size(Group.WORLD) > 1:
            self._session.collectives.all_reduce(found, self._session.groups.group(Group.WORLD)).wait()
        return bool(found.item() > 0)

    def _store(self) -> None:
        for piece in self._pieces:
            piece.store()
        if self._model is not None and self._model.sharded_state is not None:
            self._model.sharded_state.gather_parameters()

    def _drop_gradients(self) -> None:
        for piece in self._pieces:
            piece.optimized.grad = None
        if self._model is not None and self._model.sharded_state is not None:
            self._model.sharded_state.clear_gradients()
        self._gradients_are_ready = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters and of what is updated instead of them."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if self._model is not None:
            for parameter in self._model.parameters():
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
            self._drop_gradients()

    @torch.no_grad()
    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients down to a norm of at most ``max_norm``; call it before :meth:`step`.

        For half precision, sharded state and pipeline parallelism, where ``torch.nn.utils.clip_grad_norm_`` does not see
        the whole gradient; without them nothing is changed, and ``-1.0`` returned.

        Returns:
            The norm of the whole gradient, over all ranks.
        """
        if self._model is None:
            return -1.0
        self.update_master_grads()
        if self.overflow:
            return float("inf")
        shards = self._model.shards
        powers = torch.zeros(1, device=self._session.device, dtype=torch.float64)
        parts = torch.zeros_like(powers)  # of parameters whose elements tensor parallel ranks share out
        counted = [p for p in self._pieces if p.optimized.grad is not None and (shards is None or shards.counts(p))]
        gradients = [(piece.parameter, piece.optimized.grad) for piece in counted]
        for parameter, gradient in [*gradients, *self._whole_gradients()]:
            if gradient is not None:
                power = torch.linalg.vector_norm(gradient, norm_type).double().pow(norm_type)
                is_part = self._model.registry.record_of(parameter).placement.tensor_axis is not None
                (parts if is_part else powers).add_(power)
        if self._session.size(Group.TP) > 1:
            self._session.collectives.all_reduce(parts, self._session.groups.group(Group.TP)).wait()
        powers += parts
        if self._model.sharded_state is not None:
            self._model.sharded_state.sum_over_shards(powers)
        if self._session.size(Group.PP) > 1:
            self._session.collectives.all_reduce(powers, self._session.groups.group(Group.PP)).wait()
        norm = float(powers) ** (1.0 / norm_type)
        self._global_grad_norm = norm
        if norm > max_norm:
            held = [piece.optimized.grad for piece in self._pieces]
            for gradient in [*held, *(gradient for _, gradient in self._whole_gradients())]:
                if gradient is not None:
                    gradient.mul_(max_norm / (norm + 1e-6))
        return norm

    def _whole_gradients(self) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        """This stage's parameters that are updated themselves, not through pieces, with their gradients."""
        pieces = self._model.pieces if self._model is not None else None
        if self._model is None or pieces is None:
            return []
        return [(p, p.grad) for group in self._originals for p in group if p not in pieces]

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The full state, numbered and shaped as in one process without half precision.

        With sharded state it is gathered over the data parallel group, with tensor and pipeline parallelism over the
        ranks of a replica, so every rank of these groups calls it.
        """
        return self._gathered_state(to_first=False)

    def _gathered_state(self, *, to_first: bool) -> dict[str, Any]:
        """:meth:`state_dict` on every rank, or on the first rank of the job and nothing of worth elsewhere."""
        session, keeps = self._session, not to_first or self._session.rank_in(Group.RDP) == 0
        state = self.optimizer.state_dict() if self._model is None else self._stage_state(keep=keeps)
        if not keeps:
            return {}
        if session.size(Group.TP) > 1:
            state = {**state, "state": whole_values(session, self._parameters(), state["state"], to_first=to_first)}
        if session.size(Group.PP) == 1 or self._model is None:
            return state
        merged = of_all_stages(session, state["state"], to_first=to_first)
        return {**state, "state": {number: state["state"].get(number, merged[number]) for number in sorted(merged)}}

    def full_state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """:meth:`state_dict`, and under ``fp16_states`` the whole float32 weights and the loss scale in half precision.

        Every rank of the job calls it.

        Args:
            gather_to_rank0: only the first rank of the job gets it; the others take part, and get ``{}``.
        """
        session, to_first = self._session, gather_to_rank0
        first = session.rank == 0 or not to_first
        keeps = not to_first or session.rank_in(Group.RDP) == 0
        state, half = self._gathered_state(to_first=to_first), self._half_states(keep=keeps)
        if self._model is None or not half or not keeps:
            return state if first else {}
        names = sorted(half["masters"])
        records = {record.name: record for record in self._model.registry}
        values = {number: {"master": half["masters"][name]} for number, name in enumerate(names)}
        whole = whole_values(session, [records[name].parameter for name in names], values, to_first=to_first)
        masters = {names[number]: found["master"] for number, found in whole.items()}
        if session.size(Group.PP) > 1:
            masters = of_all_stages(session, masters, to_first=to_first)
        return {**state, HALF_KEY: {**half, "masters": masters}} if first else {}

    def _parameters(self) -> list[nn.Parameter]:
        """The model's parameters by their number in a state."""
        return list(dict.fromkeys(parameter for group in self.original_groups() for parameter in group))

    def stage_state(self) -> dict[str, Any]:
        """The state of this stage's parameters, with the numbers that they have in the whole; marked as partial."""
        if self._model is None:
            return {**self.optimizer.state_dict(), PARTIAL_KEY: True}
        return {**self._stage_state(), PARTIAL_KEY: True}

    def _stage_state(self, *, keep: bool = True) -> dict[str, Any]:
        if self._model is None:
            raise AssertionError("no model is bound")
        gatherer, pieces = self._model.sharded_state, self._model.pieces or {}
        return whole_state(self.optimizer, self._originals, pieces, gatherer, keep=keep)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The state of this rank's stage, marked by the key ``_smp_is_partial``.

        Args:
            gather_if_shard: False gives this rank's shard only, to be loaded with the same number of ranks.
        """
        if not gather_if_shard:
            return {**self.optimizer.state_dict(), PARTIAL_KEY: True, SHARD_KEY: True}
        states = self.fp16_states()
        return {**self.stage_state(), **({HALF_KEY: states} if states else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full state, whatever number of ranks and precision it was saved with."""
        state = {key: value for key, value in state_dict.items() if key not in (PARTIAL_KEY, SHARD_KEY, HALF_KEY)}
        if HALF_KEY in state_dict:
            self.load_fp16_states(state_dict[HALF_KEY])
        if self._session.size(Group.TP) > 1 and SHARD_KEY not in state_dict:
            state = own_parts(self._session, self._parameters(), state)
        if self._model is None or SHARD_KEY in state_dict:
            self.optimizer.load_state_dict(copied(state, self._session.device))
        else:
            load_state(self.optimizer, self._originals, self._model.pieces or {}, state)

    def fp16_states(self) -> dict[str, Any]:
        """Float32 master weights by parameter name, and the state of loss scaling; empty without half precision.

        With sharded state they are gathered, so every rank of the data parallel group calls it.
        """
        return self._half_states(keep=True)

    def _half_states(self, *, keep: bool) -> dict[str, Any]:
        if self._model is None or not self._model.precision.is_half:
            return {}
        masters = {piece.parameter: piece.optimized.detach() for piece in self._pieces}
        if self._model.sharded_state is not None:
            masters = self._model.sharded_state.gather_whole(masters, keep=keep)
        names = {self._model.registry.record_of(parameter).name: value for parameter, value in masters.items()}
        scaler = {"loss_scaler": self.loss_scaler.state_dict()} if self._session.cfg.fp16 else {}
        return {"masters": names, **scaler}

    @torch.no_grad()
    def load_fp16_states(self, states: Mapping[str, Any]) -> None:
        """Continue from saved master weights and loss scale."""
        if not states:
            return
        self.load_loss_scale(states.get("loss_scaler"))
        if self._model is None or not self._model.precision.is_half:
            for model in self._session.models:  # in full precision they are the weights
                model.load_state_dict(states["masters"], strict=False)
            return
        for piece in self._pieces:
            record = self._model.registry.record_of(piece.parameter)
            master = states["masters"].get(record.name)
            if master is None:
                continue
            master = part_of(record, master)
            piece.optimized.copy_(master.reshape(-1)[piece.start : piece.stop].view(piece.optimized.shape))

    def load_loss_scale(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a saved loss scale; it only means something to fp16, and one that the script fixed stays."""
        if self._session.cfg.fp16 and self.dynamic_loss_scale and "overflows_left" in (state or {}):
            self.loss_scaler.load_state_dict(state or {})

    # -- what older helper scripts call ----------------------------------------------------------------------------

    def save_optimizer_backcompat(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The same as :meth:`local_state_dict`."""
        return self.local_state_dict(gather_if_shard=gather_if_shard)

    def load_optimizer_backcompat(self, state_dict: Mapping[str, Any]) -> None:
        """The same as :meth:`load_state_dict`."""
        self.load_state_dict(state_dict)

    def _param_id_to_index(self) -> dict[int, int]:
        """The number of each of the model's parameters in a state, by the parameter's ``id``."""
        return {id(parameter): number for number, parameter in enumerate(self._parameters())}

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def _is_shaped(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _part(value: torch.Tensor, piece: Piece) -> torch.Tensor:
    flat = value.reshape(-1)[piece.start : piece.stop].to(piece.optimized.dtype)
    return flat.clone().view(piece.optimized.shape)
