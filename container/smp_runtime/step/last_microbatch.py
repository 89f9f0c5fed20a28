"""The last microbatch of a job's training step, without its values: enough to trace the model anew."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.tensors.nested import map_leaves

if TYPE_CHECKING:
    from collections.abc import Hashable

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class _Weak:
    """A weak reference to an argument that must not be kept alive: the model, or an object that holds it."""

    def __init__(self, value: Any) -> None:
        self.reference = weakref.ref(value)


class _IsGone(Exception):
    """A signal that an argument does not exist any more."""


class LastMicrobatch:
    """The shapes of the last training step's first microbatch; kept once per job.

    Tensors are remembered as tensors of the meta device, so that no batch is kept alive. Other objects are
    remembered by weak references.
    """

    outlives_regrouping = True

    def __init__(self) -> None:
        self._course: Hashable = None
        self._step: weakref.ref[Any] | None = None
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def note(self, step: Any, microbatch: functools.partial[Any], course: Hashable) -> None:
        """Remember the first microbatch of a training step that has run.

        Args:
            step: the decorated function.
            microbatch: its first.
            course: equal for calls with arguments of equal shapes; of these the first is remembered.
        """
        if self._step is not None and self._step() is step and course == self._course:
            return
        self._step = None
        with contextlib.suppress(
            RuntimeError, TypeError
        ):  # of tensors without strides, and containers of the script's own
            self._arguments = map_leaves(_remembered, (microbatch.args, microbatch.keywords))
            self._step, self._course = weakref.ref(step), course

    def again(self) -> functools.partial[Any] | None:
        """Return the microbatch with tensors of the meta device; None if there was none, or an argument is gone."""
        step = self._step() if self._step is not None else None
        if step is None:
            return None
        try:
            args, kwargs = map_leaves(_recalled, self._arguments)
        except _IsGone:
            return None
        return functools.partial(step.__wrapped__, *args, **kwargs)


def _remembered(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        made = torch.empty_like(value, device="meta", requires_grad=False)
        return made.requires_grad_(value.requires_grad)
    if isinstance(value, _PLAIN):
        return value
    try:
        return _Weak(value)
    except TypeError:  # of a class without weak references
        return value


def _recalled(value: Any) -> Any:
    if not isinstance(value, _Weak):
        return value
    found = value.reference()
    if found is None:
        raise _IsGone
    return found
