"""Backward hooks of modules that get or return sequences: they see, and may change, the gradients of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from smp_runtime.context.proofs.function_gradients import with_mean_gradient
from smp_runtime.context.rules.pointwise import align
from smp_runtime.context.sequence import ShardedSequence, sequences_in
from smp_runtime.errors import SMPUserError

#: A full backward hook or one that runs before the backward pass: ``(module, gradients, …)``.
_Hook = Callable[..., Any]


class _Gradients:
    """The gradients of a module's inputs or outputs; some of them are sequences.

    Args:
        values: what it gets or returns.
    """

    def __init__(self, values: tuple[Any, ...]) -> None:
        # Not the sequences themselves, which hooks would keep.
        self._forms = [
            (one.dim_held, one.sequence_layout, one.group) if isinstance(one, ShardedSequence) else None
            for one in values
        ]

    def shown(self, gradients: Any) -> Any:
        """Return gradients of one process for those of slices, which are as many times larger as there are ranks."""
        return tuple(
            one if one is None or form is None else ShardedSequence(one / form[2].size, *form)
            for one, form in zip(gradients, self._forms, strict=True)
        )

    def taken(self, gradients: Any) -> Any:
        """Return gradients of slices for those that a hook has returned."""
        given = gradients if isinstance(gradients, tuple) else (gradients,)
        if len(given) != len(self._forms):
            return gradients  # PyTorch says what is wrong
        return tuple(map(self._take, given, self._forms))

    @staticmethod
    def _take(gradient: Any, form: Any) -> Any:
        if form is None or gradient is None:
            return gradient
        held, layout, group = form
        like = gradient if isinstance(gradient, ShardedSequence) else ShardedSequence(gradient, held, layout, group)
        return align(gradient, layout, held - gradient.dim(), like, "hook") * group.size


class SequenceBackwardHook(BackwardHook):
    """PyTorch's hooks around one call of a module, with the gradients of whole sequences."""

    def __init__(self, module: nn.Module, user_hooks: list[_Hook], user_pre_hooks: list[_Hook]) -> None:
        super().__init__(
            module,
            [functools.partial(self._show_both, hook) for hook in user_hooks],
            [functools.partial(self._show_outputs, hook) for hook in user_pre_hooks],
        )
        self._inputs, self._outputs = _Gradients(()), _Gradients(())

    def setup_input_hook(self, args: tuple[Any, ...]) -> Any:
        """Begin with what the module gets."""
        self._inputs = _Gradients(args)
        return _with_mean_gradients(super().setup_input_hook(args), args)

    def setup_output_hook(self, args: Any) -> Any:
        """Go on with what it returns."""
        self._outputs = _Gradients(args if isinstance(args, tuple) else (args,))
        return _with_mean_gradients(super().setup_output_hook(args), args)

    def _show_both(self, hook: _Hook, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        changed = hook(module, self._inputs.shown(inputs), self._outputs.shown(outputs))
        return None if changed is None else self._inputs.taken(changed)

    def _show_outputs(self, hook: _Hook, module: nn.Module, outputs: Any) -> Any:
        changed = hook(module, self._outputs.shown(outputs))
        return None if changed is None else self._outputs.taken(changed)


def _with_mean_gradients(watched: Any, given: Any) -> Any:
    """Return what hooks watch; of whole tensors beside sequences they see the gradient of one process too."""
    found = sequences_in(given)
    if not found or not isinstance(watched, tuple):
        return watched

    def change(one: Any) -> Any:
        is_whole = isinstance(one, torch.Tensor) and not isinstance(one, ShardedSequence)
        return with_mean_gradient(one, found[0].group) if is_whole else one

    return tuple(map(change, watched))


def refuse_older_hooks(module: nn.Module, inputs: Any, result: Any) -> None:
    """Raise an error for a hook of ``register_backward_hook``, which sees gradients of a part of the positions.

    Raises:
        SMPUserError: the module gets or returns sequences.
    """
    if sequences_in([inputs, result]):
        raise SMPUserError(
            f"a {type(module).__name__} has a hook of register_backward_hook, which would see gradients of some positions: "
            "under context parallelism, use register_full_backward_hook",
            code="SMP303",
        )
