"""``DistributedOptimizer``: the wrapper around the user's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from smp_runtime import session as sessions
from smp_runtime.errors import SMPUserError

PARTIAL_KEY = "_smp_is_partial"

#: Arguments of dynamic loss scaling, with their defaults.
DYNAMIC_LOSS_DEFAULTS: dict[str, float | int | bool] = {
    "init_scale": 2**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}


class DistributedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` that steps ``optimizer``; schedulers and closures work on it.

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
        self.loss_scale_args = {**DYNAMIC_LOSS_DEFAULTS, **(dynamic_loss_args or {}), **loss_args}
        unknown = set(self.loss_scale_args) - set(DYNAMIC_LOSS_DEFAULTS)
        if unknown:
            raise SMPUserError(
                f"unknown loss scaling arguments {sorted(unknown)}; known are {', '.join(DYNAMIC_LOSS_DEFAULTS)}"
            )
        self.optimizer = optimizer
        self.static_loss_scale = static_loss_scale
        self.dynamic_loss_scale = dynamic_loss_scale
        #: Whether the last step was skipped because of an overflow.
        self.overflow = False
        self._session = sessions.current()
        # The base class's own constructor would build groups and state of its own; only its hooks are wanted.
        super().__setstate__({})
        self._session.adopt_optimizer(self)

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

    @property
    def step_was_skipped(self) -> bool:
        """For ``accelerate``: whether the last step was skipped."""
        return self.overflow

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients that the step has reduced."""
        result = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        self._session.progress.optimizer_stepped()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the inner optimizer's parameters."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the fp32 gradients of fp16 training; without fp16 there are none, and nothing is changed."""
        return -1.0

    def state_dict(self) -> dict[str, Any]:
        """The full state, as the inner optimizer's."""
        return self.optimizer.state_dict()

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The state of this rank's stage, marked by the key ``_smp_is_partial``."""
        return {**self.optimizer.state_dict(), PARTIAL_KEY: True}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full or partial state."""
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != PARTIAL_KEY})

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)
