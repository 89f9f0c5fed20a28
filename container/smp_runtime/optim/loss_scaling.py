"""Loss scaling for float16: keeps small gradients above zero, and halves itself when large ones overflow."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from smp_runtime.errors import SMPUserError


class LossScaler(Protocol):
    """What a loss is multiplied with before backward, and its gradients divided by before the update."""

    scale: float

    def update(self, overflow: bool) -> None:
        """Learn whether a step's gradients overflowed."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""


class StaticLossScaler:
    """The same scale for ever; 1.0 means no scaling."""

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise SMPUserError(
                f"static_loss_scale is {scale}; the loss is multiplied by it: use a number above 0", code="SMP304"
            )
        self.scale = float(scale)

    def update(self, overflow: bool) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, Any]:
        """See :class:`LossScaler`."""
        return {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`LossScaler`."""
        self.scale = float(state["scale"])


#: Beyond it float16 has no finite number, so a gradient of 1 times the scale overflows.
FLOAT16_RANGE = 2.0**16


class DynamicLossScaler:
    """Divides the scale after overflows, and multiplies it after a run of steps without one.

    As long as no step has succeeded, a scale beyond :data:`FLOAT16_RANGE` falls to that at once: halving the documented
    ``init_scale`` would skip 16 steps before one can succeed.

    Args:
        init_scale: the first scale.
        scale_factor: by which it falls and rises.
        scale_window: steps without an overflow before it rises.
        min_scale: never falls below this.
        delayed_shift: overflows before it falls.
        consecutive_hysteresis: True counts only overflows in a row; False counts all until the scale rises.
    """

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None:
        if scale_factor <= 1:
            raise SMPUserError(
                f"scale_factor is {scale_factor}; the scale is divided by it: use more than 1, such as 2", code="SMP304"
            )
        if scale_window < 1 or delayed_shift < 1:
            raise SMPUserError(
                f"scale_window is {scale_window} and delayed_shift {delayed_shift}; both count steps: use 1 or more",
                code="SMP304",
            )
        if not 0 < min_scale <= init_scale:
            raise SMPUserError(
                f"min_scale is {min_scale} and init_scale {init_scale}; it must be 0 < min_scale <= init_scale",
                code="SMP304",
            )
        self.scale = float(init_scale)
        self._factor = float(scale_factor)
        self._window = int(scale_window)
        self._min_scale = float(min_scale)
        self._delayed_shift = int(delayed_shift)
        self._consecutive = bool(consecutive_hysteresis)
        self._overflows_left = self._delayed_shift
        self._good_steps = 0
        self._has_succeeded = False

    def update(self, overflow: bool) -> None:
        """See :class:`LossScaler`."""
        if overflow:
            self._good_steps = 0
            if self._overflows_left <= 1:
                fallen = self.scale / self._factor
                if not self._has_succeeded:
                    fallen = min(fallen, FLOAT16_RANGE)
                self.scale = max(fallen, self._min_scale)
            else:
                self._overflows_left -= 1
            return
        self._has_succeeded = True
        self._good_steps += 1
        if self._consecutive:
            self._overflows_left = self._delayed_shift
        if self._good_steps % self._window == 0:
            self._overflows_left = self._delayed_shift
            self.scale *= self._factor

    def state_dict(self) -> dict[str, Any]:
        """See :class:`LossScaler`."""
        return {
            "scale": self.scale,
            "overflows_left": self._overflows_left,
            "good_steps": self._good_steps,
            "has_succeeded": self._has_succeeded,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`LossScaler`."""
        self.scale = float(state["scale"])
        self._overflows_left = int(state.get("overflows_left", self._delayed_shift))
        self._good_steps = int(state.get("good_steps", 0))
        self._has_succeeded = bool(state.get("has_succeeded", True))


#: Arguments of dynamic loss scaling, with their documented defaults.
DYNAMIC_DEFAULTS: dict[str, float | int | bool] = {
    name: parameter.default for name, parameter in inspect.signature(DynamicLossScaler).parameters.items()
}


def make_loss_scaler(
    static_loss_scale: float | None, dynamic_loss_scale: bool, dynamic_loss_args: Mapping[str, Any]
) -> LossScaler:
    """Return the scaler for the arguments of ``smp.DistributedOptimizer``.

    Raises:
        SMPUserError: an unknown argument, or one out of its range.
    """
    unknown = sorted(set(dynamic_loss_args) - set(DYNAMIC_DEFAULTS))
    if unknown:
        raise SMPUserError(
            f"unknown loss scaling arguments {unknown}; known are {', '.join(DYNAMIC_DEFAULTS)}", code="SMP304"
        )
    if dynamic_loss_scale:
        return DynamicLossScaler(**dynamic_loss_args)
    return StaticLossScaler(1.0 if static_loss_scale is None else static_loss_scale)
