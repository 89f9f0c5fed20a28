"""Points of a training: a step and its values, which may still be on their way from the device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import SupportsFloat

import torch

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError

Number = float | torch.Tensor


@dataclass(frozen=True)
class MetricPoint:
    """The values of one step for a tracker.

    Attributes:
        step: updates before it.
        when: seconds since the epoch.
        values: by name, finite or not.
    """

    step: int
    when: float
    values: dict[str, float]


class LaterPoint:
    """A point with tensors that are copied from the device in parallel with computation; nothing waits for them here.

    Args:
        values: numbers, and tensors of one element.
    """

    def __init__(self, step: int, when: float, values: Mapping[str, Number]) -> None:
        self._step, self._when = step, when
        self._numbers = {name: float(value) for name, value in values.items() if not isinstance(value, torch.Tensor)}
        self._names = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        self._order = list(values)
        self._copies: list[torch.Tensor] = []
        #: Each with its device.
        self._copied: list[tuple[torch.device, torch.cuda.Event]] = []
        for value in values.values():
            if isinstance(value, torch.Tensor):
                self._take(value.detach())

    def _take(self, value: torch.Tensor) -> None:
        if value.device.type != "cuda":
            self._copies.append(value.double().clone())  # the script may write into its own
            return
        pinned = torch.empty((), dtype=torch.float64, pin_memory=True)
        self._copies.append(pinned.copy_(value.double().reshape(()), non_blocking=True))
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(value.device))
        self._copied.append((value.device, event))

    def arrived(self) -> MetricPoint:
        """Return the point. It waits for the device, so only the writer thread calls it."""
        for device, event in self._copied:
            # A new thread's device is the host's first, and waiting there would create a context on it.
            torch.cuda.set_device(device)
            event.synchronize()
        found = {**self._numbers, **{name: float(copy) for name, copy in zip(self._names, self._copies, strict=True)}}
        return MetricPoint(self._step, self._when, {name: found[name] for name in self._order})


def check_values(values: Mapping[str, object]) -> dict[str, Number]:
    """Return the values that a script logs, as numbers and tensors of one element.

    Raises:
        SMPUserError: a value is something else.
    """
    found: dict[str, Number] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            found[name] = value.detach().reshape(())
        elif isinstance(value, torch.Tensor):
            raise SMPUserError(
                f"smp.log got {name} of shape {tuple(value.shape)}; a tracker draws one number per step: log its "
                "mean(), or one element",
                code="SMP318",
            )
        else:
            found[name] = _number(name, value)
    return found


def _number(name: str, value: object) -> float:
    if isinstance(value, SupportsFloat):  # texts are none
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise SMPUserError(
        f"smp.log got {name}={str(value)[:80]!r}, {kind_of(value)}; a tracker draws numbers: give a number or a tensor of "
        "one element",
        code="SMP318",
    )


def finite_or_none(value: float) -> float | None:
    """Return the value, or None if it is not finite: lines of the log cannot contain such numbers."""
    return value if math.isfinite(value) else None
