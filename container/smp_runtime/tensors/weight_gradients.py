"""Gradients of weights that are computed after those of inputs, which other stages wait for.

The backward pass of a linear layer is two products. One computes the gradient of its input, which the layer
before it needs at once. The other computes the gradient of its weight, which is not needed before the update.
Inside :func:`split_inside` the operations of :mod:`.split_operations` compute the first when backward comes to
them. They leave the second in a :class:`WeightGradients`, together with its inputs. So the caller of the pass
can compute it in a moment in which it would idle otherwise (zero bubble: Qi et al., 2023).

The unit is the operation, not the graph. Whatever is between two such operations (views, chunks, residuals,
branches, recomputation of checkpointed regions, weights that are used twice) stays autograd's own. So every
gradient is added exactly once, as often as its operation ran.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from smp_records.script_lines import is_runtime_module
from smp_runtime.tensors.torch_private import run_backward, will_run

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode

Gradients = Sequence[torch.Tensor | None]


class SplittableOperation(Protocol):
    """One call of an operation that can compute its backward pass in two parts.

    Attributes:
        tensors: its inputs and parameters, in the order of its arguments; None for those that it does not have.
    """

    tensors: Sequence[Any]

    @property
    def weights(self) -> Sequence[int]:
        """Return the positions of the parameters among the tensors, those that may get their gradients later."""
        ...

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, Sequence[Any]]:
        """Return the output, and the values that backward needs."""
        ...

    def gradients(self, gradient: torch.Tensor, kept: Sequence[Any], wanted: Sequence[bool]) -> Gradients:
        """Return the gradient of each wanted tensor, computed by differentiable operations; None for the others."""
        ...


class _Later(NamedTuple):
    weights: Sequence[torch.Tensor]
    compute: Callable[[], Gradients]


class WeightGradients:
    """The weight gradients that the backward passes of a task have left for later.

    Attributes:
        is_open: whether a pass that runs now may leave some.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._later: list[_Later] = []

    def __bool__(self) -> bool:
        return bool(self._later)

    def add(self, weights: Sequence[torch.Tensor], compute: Callable[[], Gradients]) -> None:
        """Leave the gradients of leaves for later; ``compute`` returns them in the same order."""
        self._later.append(_Later(weights, compute))

    def take(self) -> WeightGradients:
        """Return the work left so far, and remove it from this instance."""
        taken = WeightGradients()
        taken._later, self._later = self._later, []
        return taken

    def run(self) -> None:
        """Compute the gradients left for later and add them to those of the weights.

        As in autograd, the weights' hooks run, once for each weight.
        """
        left = Counter(id(weight) for later in self._later for weight in later.weights)
        sums: dict[int, torch.Tensor] = {}
        # Taken one by one, so that tensors saved by an operation are freed as soon as they are used.
        self._later.reverse()
        while self._later:
            weights, compute = self._later.pop()
            with torch.no_grad():
                gradients = compute()
                for weight, gradient in zip(weights, gradients, strict=True):
                    left[id(weight)] -= 1
                    _add_to(sums, id(weight), gradient)
            # Hooks of a weight expect its whole gradient, so it waits for the last operation.
            ready = [weight for weight in weights if not left[id(weight)] and id(weight) in sums]
            if ready:
                found = tuple(sums.pop(id(weight)) for weight in ready)
                run_backward(tuple(ready), found, False, False, (), allow_unreachable=True, accumulate_grad=True)


class _CurrentWeightGradients(threading.local):
    left: WeightGradients | None = None


_here = _CurrentWeightGradients()


@contextlib.contextmanager
def split_inside(left: WeightGradients, operations: TorchFunctionMode) -> Iterator[None]:
    """Run the block so that, on the calling thread, gradients of weights go to ``left``.

    Args:
        operations: takes the calls of operations that can be split.
    """
    former, _here.left = _here.left, left
    try:
        with operations:
            yield
    finally:
        _here.left = former


def weight_gradient_later(weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> bool:
    """Leave the gradient of a weight for an idle moment, if possible.

    Call it in the ``backward`` of your own ``torch.autograd.Function``. If it returns True, ``compute`` is called
    later on the same rank, without gradients, and its result is added to ``weight.grad``. Then backward returns
    None for the weight. If it returns False, there is no such moment: compute the gradient now and return it.
    This happens with another schedule than ``zero_bubble``, in ``torch.autograd.grad``, in a graph of the
    backward pass itself, and for a weight that is no leaf or has hooks.

    Args:
        weight: a leaf of the graph that requires a gradient, as a parameter is.
        compute: returns its gradient, of the weight's shape, dtype and device.

    Returns:
        Whether ``compute`` is called later.

    Example:
        >>> class Scale(torch.autograd.Function):
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         x, weight = ctx.saved_tensors
        ...         later = smp.weight_gradient_later(weight, lambda: (grad * x).sum(0))
        ...         return grad * weight, None if later else (grad * x).sum(0)
    """
    left = _open()
    if left is None or not _may_wait(weight):
        return False
    left.add((weight,), lambda: (compute(),))
    return True


def _add_to(sums: dict[int, torch.Tensor], key: int, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        return
    # Not in place: the script may hold the tensor that its ``compute`` has returned.
    former = sums.get(key)
    sums[key] = gradient if former is None else former + gradient


def is_deferrable(weight: object) -> bool:
    """Return whether a gradient may be added to a tensor at any time: it is a leaf, and the script has no hooks on it.

    This library's own hooks are allowed. Each pass calls them once when backward comes to the leaf, and once when
    the gradient is there.
    """
    if not isinstance(weight, torch.nn.Parameter):
        return False
    if not weight.is_leaf or not weight.requires_grad:
        return False
    # Such a hook sees the gradient on its way to the weight, and may replace it.
    if weight._backward_hooks:  # noqa: SLF001 - PyTorch has no public list of them
        return False
    hooks = weight._post_accumulate_grad_hooks or {}  # noqa: SLF001 - likewise
    return all(map(_is_ours, hooks.values()))


def _is_ours(hook: object) -> bool:
    return is_runtime_module(str(getattr(hook, "__module__", "")))


def _open() -> WeightGradients | None:
    """Return where this thread's backward pass may leave weight gradients; None if it may not.

    A pass that keeps its own graph may not.
    """
    left = _here.left
    if left is None or not left.is_open or torch.is_grad_enabled():
        return None
    return left


def _may_wait(weight: torch.Tensor | None) -> bool:
    """Return whether the running backward pass adds to a leaf's gradient, and may do so later.

    ``torch.autograd.grad`` and ``backward(inputs=…)`` may not add to it.
    """
    if weight is None or not is_deferrable(weight):
        return False
    try:
        return bool(will_run(get_gradient_edge(weight).node))
    except RuntimeError:  # PyTorch raises this if torch.autograd.grad asks for this leaf
        return False


def _leave(
    left: WeightGradients, operation: SplittableOperation, gradient: torch.Tensor, kept: Any, later: Sequence[int]
) -> None:
    """Leave the gradients of the weights at the positions ``later`` for later."""
    wanted = [i in later for i in range(len(operation.tensors))]
    tensors = [operation.tensors[i] for i in later]

    def compute() -> Gradients:
        found = operation.gradients(gradient, kept, wanted)
        return [found[i] for i in later]

    left.add([tensor for tensor in tensors if tensor is not None], compute)


class SplitOperation(torch.autograd.Function):
    """An operation in the graph that may compute its weights' gradients later.

    Its arguments are those of :meth:`forward`.
    """

    @staticmethod
    def forward(ctx: Any, operation: SplittableOperation, *tensors: torch.Tensor | None) -> torch.Tensor:
        """Run the operation."""
        output, kept = operation.forward(*tensors)
        operation.tensors = [
            None if tensor is None or i not in operation.weights else tensor for i, tensor in enumerate(tensors)
        ]
        ctx.operation = operation
        ctx.save_for_backward(*kept)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients needed now, and leave the others to the thread's :class:`WeightGradients`."""
        operation: SplittableOperation = ctx.operation
        kept, wanted = ctx.saved_tensors, list(ctx.needs_input_grad[1:])
        left = _open()
        later = []
        if left is not None:
            later = [i for i in operation.weights if wanted[i] and _may_wait(operation.tensors[i])]
        if left is not None and later:
            _leave(left, operation, gradient, kept, later)
            for i in later:
                wanted[i] = False
        if not any(wanted):
            return (None, *([None] * len(wanted)))
        return (None, *operation.gradients(gradient, kept, wanted))


def split(operation: SplittableOperation) -> torch.Tensor:
    """Call an operation so that its weights' gradients may come later."""
    output: torch.Tensor = SplitOperation.apply(operation, *operation.tensors)
    return output
